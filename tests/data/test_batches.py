"""The batch at step i depends on i alone: walked to, sought, resumed, on any processes."""

import itertools
import json

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepfold as sf
from stepfold.data.batches import batches

REMAINDERS = st.sampled_from(["drop", "pad", "keep"])
SEEDS = st.none() | st.integers(0, 3)


def numbered(count):
    return {"x": np.arange(count), "y": np.arange(count)[:, None] * 2.0}


def same(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    jax.tree.map(np.testing.assert_array_equal, one, two)


def seen(batch):
    return batch["x"][batch.get("mask", slice(None))].tolist()


@st.composite
def pipelines(draw, epochs=2):
    count = draw(st.integers(1, 50))
    remainder = draw(REMAINDERS)
    size = draw(st.integers(1, count if remainder == "drop" else count + 5))
    ramp = draw(st.none() | st.integers(1, count))
    sizes = size if ramp is None else [(0, size), (draw(st.integers(1, 6)), ramp)]
    options = {"remainder": remainder, "seed": draw(SEEDS), "epochs": epochs}
    return numbered(count), sizes, options


@given(st.integers(1, 60), st.integers(1, 15), st.sampled_from([1, 2, 4]), REMAINDERS, SEEDS)
def test_every_example_comes_once_an_epoch(count, share, processes, remainder, seed):
    size = share * processes
    if remainder == "drop" and size > count:
        return
    if remainder == "keep":
        count = max(processes, count - count % processes)
    shares = [
        list(
            batches(
                numbered(count),
                size,
                seed=seed,
                epochs=3,
                remainder=remainder,
                process_index=index,
                process_count=processes,
            )
        )
        for index in range(processes)
    ]
    per_epoch, uneven = divmod(len(shares[0]), 3)
    assert uneven == 0
    for epoch in range(3):
        steps = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
        got = [x for stream in shares for batch in stream[steps] for x in seen(batch)]
        assert len(got) == len(set(got))
        assert len(got) == (count // size * size if remainder == "drop" else count)
        assert set(got) <= set(range(count))
        if remainder == "pad":
            masks = [batch["mask"] for stream in shares for batch in stream[steps]]
            assert sum(mask.sum() for mask in masks) == count
            assert {mask.shape for mask in masks} == {(share,)}
            filled = {x for stream in shares for batch in stream[steps] for x in batch["x"]}
            assert filled == set(range(count))  # what fills up is valid too


@given(pipelines(), st.sampled_from([2, 4]))
def test_the_global_batch_is_the_same_for_any_number_of_processes(pipeline, processes):
    source, sizes, options = pipeline
    sizes = [(0, sizes)] if isinstance(sizes, int) else sizes
    sizes = [(step, size * processes) for step, size in sizes]
    source = jax.tree.map(lambda leaf: np.concatenate([leaf] * processes), source)
    if options["remainder"] == "keep" and any(
        batch["x"].size % processes for batch in batches(source, sizes, **options)
    ):
        return
    shares = [
        batches(source, sizes, process_index=index, process_count=processes, **options)
        for index in range(processes)
    ]
    whole = batches(source, sizes, **options)
    for parts in zip(*shares, strict=True):
        same(jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts), next(whole))
    assert next(whole, None) is None


def test_without_a_seed_they_are_in_order_and_with_one_each_epoch_is_another():
    source = numbered(12)
    assert [seen(batch) for batch in batches(source, 5, epochs=1, remainder="keep")] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
        [10, 11],
    ]
    orders = [
        tuple(itertools.chain(*map(seen, itertools.islice(stream, 6 * epoch, 6 * epoch + 6))))
        for seed in (0, 1)
        for epoch in range(3)
        for stream in [batches(source, 2, seed=seed)]
    ]
    assert len(set(orders)) == 6
    assert all(sorted(order) == list(range(12)) for order in orders)


def test_a_ramp_holds_each_size_from_its_step_on():
    stream = batches(np.arange(100), [(0, 2), (3, 8), (5, 4)], seed=0)
    assert [len(next(stream)) for _ in range(7)] == [2, 2, 2, 8, 8, 4, 4]


def test_pad_adds_a_mask_of_one_structure_to_every_batch():
    found = list(batches(numbered(5), 4, epochs=1, remainder="pad"))
    assert [batch["mask"].tolist() for batch in found] == [[True] * 4, [True, False, False, False]]
    assert found[1]["x"].tolist() == [4, 4, 4, 4]
    assert len({str(jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), b)) for b in found}) == 1


@pytest.mark.parametrize("dtype", [np.bool_, np.float32, np.int32])
def test_pad_combines_with_a_mask_that_is_there(dtype):
    mask = np.ones((5, 3), dtype)
    mask[4, 2] = 0
    last = list(batches({"x": np.arange(5), "mask": mask}, 2, epochs=1, remainder="pad"))[-1]
    assert last["mask"].dtype == dtype
    assert last["mask"].tolist() == [[1, 1, 0], [0, 0, 0]]
    if dtype == np.float32:  # a weight stays what it is, and what is not there weighs nothing
        mask[4] = [0.5, np.nan, np.inf]
        last = batches({"x": np.arange(5), "mask": mask}, 2, remainder="pad").at(2)
        np.testing.assert_array_equal(last["mask"], [[0.5, np.nan, np.inf], [0, 0, 0]])


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        (np.arange(5), {}, r"expected batches that are a dict, .* got int64\[2\]; give a source"),
        ([{"mask": {"a": 1}}] * 5, {}, "expected a mask of 2 rows to combine with, got dict"),
        (
            numbered(5),
            {"collate": lambda rows: {"x": np.ones(1)}},
            "batches of 2 rows, .* got none",
        ),
        (numbered(5), {"collate": lambda rows: {"mask": np.ones(7)}}, r"got float64\[7\]; call it"),
    ],
)
def test_pad_refuses_what_it_cannot_mask(source, options, says):
    with pytest.raises(sf.DataError, match=says):
        next(batches(source, 2, remainder="pad", **options))


def test_an_evaluation_that_pads_is_exact_and_compiles_once(compiles):
    count = jax.jit(lambda batch: batch["x"].sum(where=batch["mask"]))
    found = [int(count(batch)) for batch in batches(numbered(10), 4, epochs=1, remainder="pad")]
    assert (sum(found), len(found), len(compiles)) == (45, 3, 1)


def test_transform_is_of_an_example_and_collate_of_a_list():
    source = [{"text": "a"}, {"text": "bcd"}, {"text": "ef"}]
    lengths = batches(source, 3, transform=lambda example: {"n": len(example["text"])})
    assert next(lengths)["n"].tolist() == [1, 3, 2]
    joined = batches(source, 2, collate=lambda examples: "+".join(e["text"] for e in examples))
    assert next(joined) == "a+bcd"
    arrays = batches(numbered(4), 2, start=1, transform=lambda e: {"x": -e["x"]}, collate=list)
    assert next(arrays) == [{"x": -2}, {"x": -3}]


def test_processes_are_asked_for_when_the_first_batch_is_made(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: pytest.fail("asked too early"))
    stream = batches(np.arange(8), 4)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert next(stream).tolist() == [2, 3]


def test_a_batch_that_does_not_divide_is_refused():
    share = {"process_index": 0, "process_count": 4}
    says = "batch_size: expected a multiple of the 4 processes, got 6 from step 0 on; give 4 or 8"
    with pytest.raises(sf.DataError, match=says):
        next(batches(np.arange(20), 6, **share))
    with pytest.raises(sf.DataError, match="got 3 from step 9 on; give 4 or 4"):
        next(batches(np.arange(20), [(0, 8), (9, 3)], **share))


def test_a_short_batch_that_does_not_divide_is_refused_at_the_first():
    share = {"process_index": 0, "process_count": 2, "remainder": "keep"}
    stream = batches(np.arange(11), 4, **share)
    with pytest.raises(sf.DataError, match="got 3 rows at step 2; use remainder='pad'"):
        next(stream)
    assert [len(batch) for batch in batches(np.arange(10), 4, epochs=1, **share)] == [2, 2, 1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seed": -1}, "seed: expected an integer of at least 0, got -1"),
        ({"seed": 1.0}, "seed: expected an integer of at least 0, got 1.0"),
        ({"start": -1}, "start: expected an integer of at least 0, got -1"),
        ({"start": None}, "start: expected an integer of at least 0, got None"),
        ({"epochs": 0}, "epochs: expected an integer of at least 1, got 0"),
        ({"epochs": True}, "epochs: expected an integer of at least 1, got True"),
        ({"batch_size": 0}, "batch_size: expected an integer of at least 1, got 0"),
        ({"remainder": "cut"}, "remainder: expected 'drop', 'pad' or 'keep', got 'cut'"),
        ({"transform": 3}, "transform: expected a function, got int 3"),
        ({"collate": "stack"}, "collate: expected a function, got str 'stack'"),
        ({"process_index": 0}, "expected both or neither, got 0 and None"),
        ({"process_count": 0, "process_index": 0}, "process_count: expected an integer of at le"),
        ({"process_count": 2, "process_index": 2}, "one below process_count=2, got 2"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_when_given(options, says):
    with pytest.raises(sf.ConfigError, match=says):
        batches(**{"source": np.arange(8), "batch_size": 4, **options})


def test_any_librarys_integers_will_do():
    stream = batches(np.arange(8), np.int32(4), seed=np.uint8(3), start=jax.numpy.int32(1))
    assert json.loads(json.dumps(stream.get_state()))["step"] == 1


def test_sources_that_make_no_batch_are_refused():
    with pytest.raises(sf.DataError, match="source: expected examples, got none"):
        batches([], 4)
    says = "batch_size: expected at most the 3 examples of the source, got 4, .* remainder='pad'"
    with pytest.raises(sf.DataError, match=says):
        batches(np.arange(3), 4)
    assert len(batches(np.arange(3), 4, epochs=1, remainder="keep")) == 1


class Broken:
    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 13:
            raise self.error
        return index


@pytest.mark.parametrize("error", [OSError("disk"), KeyError(13), IndexError(13)])
def test_an_error_of_the_source_keeps_its_type_and_says_where(error):
    stream = batches(Broken(error), 4, start=2)
    next(stream)
    with pytest.raises(type(error)) as caught:
        next(stream)
    assert caught.value is error
    assert caught.value.__notes__ == [
        "reading index 13 of the source, row 1 of those asked for",
        "making the batch of step 3: positions 12 to 15 of epoch 0",
    ]
    assert stream.get_state()["step"] == 3  # it can be tried again


def test_a_stop_iteration_of_the_source_does_not_end_the_batches():
    with pytest.raises(sf.DataError, match="StopIteration came up at step 3"):
        list(batches(Broken(StopIteration()), 4, epochs=1))
    with pytest.raises(sf.DataError, match="StopIteration came up at step 0"):
        list(batches([1, 2], 2, epochs=1, transform=lambda example: next(iter(()))))


def test_an_error_of_a_transform_says_where():
    with pytest.raises(ZeroDivisionError) as caught:
        list(batches(np.arange(8), 4, epochs=1, transform=lambda x: 1 / (x - np.int64(6)).item()))
    assert (
        caught.value.__notes__[0] == "transforming index 6 of the source, row 2 of those asked for"
    )
    assert "step 1: positions 4 to 7 of epoch 0" in caught.value.__notes__[1]


def test_functions_that_return_nothing_are_refused():
    with pytest.raises(sf.DataError, match="transform: expected an example, got None for index 0"):
        next(batches(np.arange(8), 4, transform=lambda example: None))
    with pytest.raises(sf.DataError, match="collate: expected a batch, got None; return what"):
        next(batches(np.arange(8), 4, collate=lambda examples: None))


def test_a_source_that_changes_its_length_is_noticed():
    source = list(range(8))
    stream = batches(source, 4)
    next(stream)
    source.pop()
    with pytest.raises(sf.DataError, match="expected the 8 examples .* got 7"):
        next(stream)
