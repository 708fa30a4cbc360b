"""Batches of a trainer have the order, the columns, the mask and the position that they should."""

import copy
import itertools

import numpy as np
import pytest
from tests.clients.rows import shows

import stepfold as sf
from stepfold.adapter import TrainingArguments, compute_sizes, loading
from stepfold.adapter.loading import (
    EvaluationLoader,
    GrainStream,
    TrainingLoader,
    collect_function,
    columns,
    evaluation_batches,
    position_at,
    replicate_if_uneven,
    seek,
    training_batches,
    with_mask,
    without_columns,
)

DATA = {"x": np.arange(10), "name": np.array(list("abcdefghij"))}
PLAIN = {"x": np.arange(10)}


def training(dataset=PLAIN, **options):
    arguments = TrainingArguments(total_batch_size=2, **options)
    return training_batches(arguments, compute_sizes(arguments), dataset, None)


def evaluation(dataset=PLAIN, steps=None, **options):
    arguments = TrainingArguments(eval_batch_size=4, **options)
    return evaluation_batches(
        arguments, compute_sizes(arguments)._replace(eval_steps=steps), dataset, None
    )


def test_a_training_loader_prepares_batches_and_resumes_as_they_do():
    loader = training()
    first = [next(loader)["x"].tolist() for _ in range(3)]
    saved = loader.get_state()
    rest = next(loader)["x"].tolist()
    resumed = training()
    resumed.set_state(saved)
    assert next(resumed)["x"].tolist() == rest
    assert len(first) == 3
    assert next(loader)["mask"].all()
    assert next(iter(copy.copy(loader)))["mask"].all()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = loader.nothing


def test_a_peeked_batch_stays_and_so_does_the_position():
    plain, peeked = training(), training()
    assert peeked.peek() is peeked.peek()
    assert peeked.steps_per_epoch == 5
    for _ in range(3):
        assert peeked.get_state() == plain.get_state()
        assert next(peeked)["x"].tolist() == next(plain)["x"].tolist()
    moved = training()
    moved.peek()
    assert hasattr(moved, "set_state")
    moved.set_state(plain.get_state())
    assert next(moved)["x"].tolist() == next(plain)["x"].tolist()


def test_batches_without_a_position_can_be_peeked_at():
    batches = TrainingLoader(iter([1, 2]))
    assert not hasattr(batches, "get_state")
    assert (batches.peek(), list(batches)) == (1, [1, 2])
    with pytest.raises(
        sf.errors.ConfigError, match="dataloader_train: expected a batch to compile for"
    ):
        batches.peek()


def test_batches_that_skip_some_are_prepared_too():
    loader = TrainingLoader(sf.batches(np.arange(10), 2), lambda batch: batch + 100)
    skipping = loader.without([(1, 3)])
    assert [next(skipping).tolist() for _ in range(2)] == [[100, 101], [106, 107]]
    assert (skipping.skipped, skipping.batch_index(1)) == ([(1, 3)], 3)


def test_prefetched_batches_are_the_same_and_know_their_epochs():
    plain, prefetched = training(), training(dataloader_num_workers=2)
    assert [next(prefetched)["x"].tolist() for _ in range(7)] == [
        next(plain)["x"].tolist() for _ in range(7)
    ]
    assert prefetched.steps_per_epoch == 5
    assert prefetched.get_state() == plain.get_state()


def test_a_run_starts_at_step_start_point():
    later, plain = training(step_start_point=3), training()
    assert next(later)["x"].tolist() == [next(plain) for _ in range(4)][3]["x"].tolist()


def test_shards_of_grain_shard_index_make_up_the_batch():
    halves = [training(grain_shard_index=index, grain_shard_count=2) for index in (0, 1)]
    whole = next(training())["x"].tolist()
    assert [int(next(half)["x"][0]) for half in halves] == whole


def test_grain_reads_the_same_examples_and_resumes_in_mid_epoch():
    rows = [{"x": index} for index in range(10)]
    loader = training(rows, use_grain=True, dataloader_num_workers=2)
    epoch = [next(loader)["x"].tolist() for _ in range(5)]
    assert sorted(np.concatenate(epoch)) == list(range(10))
    third = [next(loader)["x"].tolist() for _ in range(2)]
    resumed = training(rows, use_grain=True)
    seen = training(rows, use_grain=True)
    for _ in range(6):
        next(seen)
    resumed.set_state(seen.get_state())
    assert next(resumed)["x"].tolist() == third[1]


@pytest.mark.parametrize("kind", [dict, tuple])
def test_grain_reads_rows_of_arrays(kind):
    columns = {"x": np.arange(10), "y": np.arange(10) * 2}
    dataset = columns if kind is dict else tuple(columns.values())
    loader = training(dataset, use_grain=True)
    batches = [next(loader) for _ in range(5)]
    keys = columns if kind is dict else (0, 1)
    x, y = (np.concatenate([batch[key] for batch in batches]) for key in keys)
    assert sorted(x) == list(range(10))
    assert (y == x * 2).all()


@shows(
    "API reference",
    "Attributes",
    {
        "`dataloader_eval`": "starts again for each evaluation: `next(iter(…))` in place of "
        "`next(…)`"
    },
)
def test_an_evaluation_reads_all_data_each_time():
    loader = evaluation()
    for _ in range(2):
        assert next(iter(loader))["x"].tolist() == [0, 1, 2, 3]
        assert [batch["x"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(list(evaluation(steps=1))) == len(evaluation(steps=1)) == 1
    with pytest.raises(TypeError, match="the number of batches is not known"):
        len(EvaluationLoader(lambda: iter([]), None))


def test_an_iterator_is_refused_as_evaluation_data():
    with pytest.raises(
        sf.errors.ConfigError, match="dataset_eval: expected data that can be iterated"
    ):
        evaluation(iter([1, 2]))


def test_columns_are_dropped_from_arrays_and_from_examples():
    options = TrainingArguments(ids_to_pop_from_dataset=("name",))
    assert without_columns(DATA, options) == ({"x": DATA["x"]}, None)
    rows = [{"x": 1, "name": "a"}]
    dataset, drop_columns = without_columns(rows, options)
    assert [drop_columns(row) for row in dataset] == [{"x": 1}]
    assert next(training(DATA, remove_unused_columns=True)).keys() == {"x", "mask"}


def test_a_mask_of_the_user_is_kept():
    assert next(training(ids_to_pop_from_dataset=("mask",))).keys() == {"x"}
    batch = {"x": np.ones((2, 3)), "mask": np.zeros((2, 3))}
    assert with_mask(batch) is batch
    assert with_mask((1, 2)) == (1, 2)
    assert with_mask({"x": np.float32(1)}) == {"x": np.float32(1)}


def test_a_batch_that_does_not_divide_is_replicated():
    mesh = sf.make_mesh()
    assert replicate_if_uneven({"x": np.ones(16)}, mesh)["x"].__class__ is np.ndarray
    whole = replicate_if_uneven({"x": np.ones(3)}, mesh)["x"]
    assert whole.sharding.is_fully_replicated
    assert len(whole.sharding.device_set) == 8
    assert replicate_if_uneven({"x": np.ones(3)}, None)["x"].shape == (3,)


# Collect functions


def test_without_a_length_examples_are_stacked():
    collect = collect_function(None, "keep_end")
    assert collect([{"x": [1, 2]}, {"x": [3, 4]}])["x"].tolist() == [[1, 2], [3, 4]]
    assert collect({"x": [[1, 2], [3, 4]]})["x"].tolist() == [[1, 2], [3, 4]]
    with pytest.raises(sf.errors.DataError, match="expected one shape and dtype to stack"):
        collect([{"x": [1]}, {"x": [1, 2]}])


def test_columns_of_one_shape_are_arrays_and_others_lists():
    table = columns([{"x": np.ones(2), "ids": [1]}, {"x": np.ones(2), "ids": [2, 3]}])
    assert table["x"].shape == (2, 2)
    assert table["ids"] == [[1], [2, 3]]
    assert columns([{"a": [1, [2]]}, {"a": [3, [4]]}])["a"] == [[1, [2]], [3, [4]]]
    assert columns([1.0, 2.0]).tolist() == [1.0, 2.0]


# Positions


def test_batches_with_a_position_for_each_step_are_moved_to_it():
    batches = sf.batches(np.arange(8), 2, seed=0)
    seek(batches, None, 3)
    assert batches.get_state()["step"] == 3
    assert position_at(batches, 1)["step"] == 1
    assert batches.get_state()["step"] == 3


def test_an_iterator_continues_where_it_is():
    batches = iter([1, 2])
    seek(batches, None, 3)
    assert next(batches) == 1
    assert position_at(batches, 3) is None
    with pytest.raises(
        sf.errors.CheckpointError, match="expected batches that can be moved to step 3"
    ):
        seek(batches, {"step": 3}, 3)


def test_a_stream_is_moved_only_to_a_saved_position():
    batches = sf.batches(iter(range(8)), 2)
    next(batches)
    before = batches.get_state()
    seek(batches, None, 3)
    assert batches.get_state() == before


# Grain


def epochs(stream, count=2, steps=3):
    return [[next(stream).tolist() for _ in range(steps)] for _ in range(count)]


def test_grain_stream_reads_every_example_once_per_epoch():
    first, second = epochs(sf.batches(GrainStream(range(6), seed=0), 2))
    for epoch in (first, second):
        assert sorted(itertools.chain(*epoch)) == list(range(6))
    assert first != second
    assert epochs(sf.batches(GrainStream(range(6), seed=0, threads=2), 2)) == [first, second]


def test_grain_stream_resumes_in_mid_epoch():
    stream, resumed = (sf.batches(GrainStream(range(6), seed=0), 2) for _ in range(2))
    for _ in range(4):
        next(stream)
    resumed.set_state(stream.get_state())
    assert [next(resumed).tolist() for _ in "1234"] == [next(stream).tolist() for _ in "1234"]
    assert epochs(sf.batches(GrainStream(range(6)), 2)) == [[[0, 1], [2, 3], [4, 5]]] * 2


def test_a_stream_and_missing_grain_are_refused(monkeypatch):
    with pytest.raises(
        sf.errors.DataError, match="source: expected an array, .* or something with len"
    ):
        GrainStream(iter(range(6)))
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(sf.errors.ConfigError, match=r"^grain is not installed; run pip install '"):
        GrainStream(range(6))
