import copy

import jax
import numpy as np
import pytest

import stepfold as sf
from stepfold.adapter import TrainingArguments
from stepfold.adapter.loading import (
    Anew,
    Loader,
    evaluation_batches,
    length_of,
    training_batches,
    with_mask,
    without,
)

DATA = {"x": np.arange(10), "name": np.array(list("abcdefghij"))}
PLAIN = {"x": np.arange(10)}


def training(dataset=PLAIN, **options):
    given = TrainingArguments(**options)
    return training_batches(given, dataset, 2, collect=None, prepare=with_mask, epoch_steps=None)


def evaluation(dataset=PLAIN, steps=None, **options):
    given = TrainingArguments(**options)
    return evaluation_batches(given, dataset, 4, collect=None, prepare=with_mask, steps=steps)


def test_a_loader_prepares_and_is_resumed_as_its_batches_are():
    loader = training()
    first = [next(loader)["x"].tolist() for _ in range(3)]
    saved = loader.get_state()
    rest = next(loader)["x"].tolist()
    resumed = training()
    resumed.set_state(saved)
    assert next(resumed)["x"].tolist() == rest
    assert len(first) == 3
    assert loader.steps_per_epoch == 5
    assert next(loader)["mask"].all()
    assert next(iter(copy.copy(loader)))["mask"].all()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = loader.nothing


def test_prefetched_batches_are_the_same_and_know_their_epochs():
    plain, ahead = training(), training(dataloader_num_workers=2)
    assert [next(ahead)["x"].tolist() for _ in range(7)] == [
        next(plain)["x"].tolist() for _ in range(7)
    ]
    assert ahead.steps_per_epoch == 5
    assert ahead.get_state() == plain.get_state()


def test_a_run_begins_where_it_is_told_to():
    later, plain = training(step_start_point=3), training()
    assert next(later)["x"].tolist() == [next(plain) for _ in range(4)][3]["x"].tolist()


def test_shares_are_those_that_were_asked_for():
    halves = [training(grain_shard_index=index, grain_shard_count=2) for index in (0, 1)]
    whole = next(training())["x"].tolist()
    assert [int(next(half)["x"][0]) for half in halves] == whole


def test_grain_reads_the_same_examples_and_goes_on_in_mid_epoch():
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


def test_an_evaluation_goes_through_all_of_it_each_time():
    loader = evaluation()
    for _ in range(2):
        assert [batch["x"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(list(evaluation(steps=1))) == 1
    with pytest.raises(TypeError, match="nobody knows how many batches there are"):
        len(Anew(lambda: iter([]), None))


def test_columns_are_left_out_of_arrays_and_of_examples():
    options = TrainingArguments(ids_to_pop_from_dataset=("name",))
    assert without(DATA, options) == ({"x": DATA["x"]}, None)
    rows = [{"x": 1, "name": "a"}]
    dataset, leave_out = without(rows, options)
    assert [leave_out(row) for row in dataset] == [{"x": 1}]
    assert next(training(DATA, remove_unused_columns=True)).keys() == {"x", "mask"}


def test_the_length_of_what_has_one():
    assert [length_of(data) for data in (PLAIN, [1, 2], None, lambda: [1])] == [10, 2, None, None]


def test_a_mask_that_is_there_stays():
    batch = {"x": np.ones((2, 3)), "mask": np.zeros((2, 3))}
    assert with_mask(batch) is batch
    assert with_mask((1, 2)) == (1, 2)
    assert with_mask({"x": np.float32(1)}) == {"x": np.float32(1)}


def test_what_has_no_batches_is_told_by_them():
    with pytest.raises(sf.DataError, match="source: expected an array"):
        training(3)
    assert isinstance(training(jax.numpy.arange(10)), Loader)
