"""The batch at step i depends only on i: iterated, sought, resumed, on any processes."""

import itertools
import json
from functools import partial

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
    count = draw(st.integers(1, 25))
    remainder = draw(REMAINDERS)
    size = draw(st.integers(1, count if remainder == "drop" else count + 5))
    ramp = draw(st.none() | st.integers(1, count))
    sizes = size if ramp is None else [(0, size), (draw(st.integers(1, 6)), ramp)]
    options = {"remainder": remainder, "seed": draw(SEEDS), "epochs": epochs}
    return numbered(count), sizes, options


@given(st.integers(1, 60), st.integers(1, 15), st.sampled_from([1, 2, 4]), REMAINDERS, SEEDS)
def test_every_example_is_in_one_batch_per_epoch(count, share, processes, remainder, seed):
    size = share * processes
    if remainder == "drop" and size > count:
        return
    if remainder == "keep":
        count = max(processes, count - count % processes)
    options = {"seed": seed, "epochs": 3, "remainder": remainder, "process_count": processes}
    shares = [
        list(batches(numbered(count), size, process_index=index, **options))
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
            assert filled == set(range(count))  # repeated rows are valid too


@given(pipelines(), st.sampled_from([2, 4]))
def test_global_batch_is_the_same_on_any_number_of_processes(pipeline, processes):
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


def test_order_is_that_of_the_source_or_shuffled_in_each_epoch():
    found = list(batches(numbered(12), 5, epochs=1, remainder="keep"))
    assert list(map(seen, found)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    orders = [
        tuple(itertools.chain(*(seen(stream.at(6 * epoch + step)) for step in range(6))))
        for stream in (batches(numbered(12), 2, seed=seed) for seed in (0, 1))
        for epoch in range(3)
    ]
    assert len(set(orders)) == 6
    assert all(sorted(order) == list(range(12)) for order in orders)


# Random access and resuming


@given(pipelines())
def test_seeking_equals_iterating(pipeline):
    source, sizes, options = pipeline
    walked = list(batches(source, sizes, **options))
    other = batches(source, sizes, **options)
    assert len(other) == len(walked)
    for step in reversed(range(len(walked))):
        same(other.at(step), walked[step])
        sought = batches(source, sizes, start=step, **options)
        same(next(sought), walked[step])
    assert next(batches(source, sizes, start=len(walked), **options), None) is None
    assert next(batches(source, sizes, start=10**9, **options), None) is None
    with pytest.raises(IndexError, match=f"expected a step below {len(walked)}, got"):
        other.at(len(walked))


@given(pipelines())
def test_resuming_at_any_step_equals_an_uninterrupted_run(pipeline):
    source, sizes, options = pipeline
    whole = list(batches(source, sizes, **options))
    stream = batches(source, sizes, **options)
    for step in range(len(whole) + 1):
        saved = json.loads(json.dumps(stream.get_state()))
        resumed = batches(source, sizes, **options)
        next(resumed)
        resumed.set_state(saved)
        rest = list(resumed)
        assert len(rest) == len(whole) - step
        for one, two in zip(rest, whole[step:], strict=True):
            same(one, two)
        next(stream, None)


@given(pipeline=pipelines(), processes=st.sampled_from([1, 2]), data=st.data())
def test_rows_are_counted_without_padding(pipeline, processes, data):
    source, sizes, options = pipeline
    parts = [
        batches(source, sizes, process_index=i, process_count=processes, **options)
        for i in range(processes)
    ]
    step = data.draw(st.integers(0, len(parts[0]) - 1))
    try:
        own = [len(seen(part.at(step))) for part in parts]
    except sf.errors.DataError:  # it does not divide over the processes
        return
    assert [part.count_rows(step) for part in parts] == [(rows, sum(own)) for rows in own]
    assert sf.prefetch(parts[0]).count_rows(step) == (own[0], sum(own))


def test_rows_that_collate_may_change_are_not_counted():
    assert batches(numbered(4), 2, collate=lambda examples: examples).count_rows(0) is None
    padded = batches(numbered(3), 2, remainder="pad", collate=lambda xs: {"x": np.zeros(2)})
    assert padded.count_rows(1) == (1, 1)


@pytest.mark.parametrize("count", [1000, 100_000])
def test_batches_without_epochs_have_no_end(count):
    far = batches(numbered(count), 64, seed=0, start=10**12)
    one, two = next(far), next(far)
    assert not np.array_equal(one["x"], two["x"])
    same(batches(numbered(count), 64, seed=0).at(10**12 + 1), two)
    assert far
    with pytest.raises(TypeError, match="no length without epochs; give epochs=…"):
        len(far)


def test_order_computed_ahead_equals_that_of_each_step():
    source = np.arange(100_000)
    options = {"seed": 5, "epochs": 2, "process_index": 1, "process_count": 2}
    stream = batches(source, [(0, 1000), (40, 600)], **options)
    for step, batch in enumerate(stream):
        if step % 13 == 0 or 30 < step < 50:
            fresh = batches(source, [(0, 1000), (40, 600)], **options)
            np.testing.assert_array_equal(batch, fresh.at(step))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"source": np.arange(9)}, "length was 8 and is 9; make them as they were"),
        ({"batch_size": [(0, 4), (5, 2)]}, r"batch_size was 4 and is \[\[0, 4\], \[5, 2\]\]"),
        ({"seed": None, "remainder": "keep"}, "seed was 0 and is None; remainder was 'drop'"),
    ],
)
def test_position_of_other_batches_is_refused(other, says):
    options = {"source": np.arange(8), "batch_size": 4, "seed": 0, "epochs": 2}
    saved = batches(**options, start=1).get_state()
    stream = batches(**{**options, **other})
    with pytest.raises(sf.errors.DataError, match=says) as caught:
        stream.set_state(saved)
    assert str(caught.value).endswith("make them as they were, or make new ones with start=1")
    assert stream.get_state()["step"] == 0
    for state in (None, {}, b"state", {"step": 1, "pipeline": 2}):
        with pytest.raises(
            sf.errors.DataError, match="a state that get_state.* by another kind of"
        ):
            stream.set_state(state)


@pytest.mark.parametrize(("epochs", "more"), [(3, 5), (3, None), (None, 2), (5, 3)])
def test_number_of_epochs_may_change_on_resume(epochs, more):
    stream = batches(numbered(10), 3, seed=1, epochs=epochs, start=4)
    resumed = batches(numbered(10), 3, seed=1, epochs=more)
    resumed.set_state(json.loads(json.dumps(stream.get_state())))
    same(next(resumed), next(stream))
    if more is not None:
        assert len(list(resumed)) == 3 * more - 5


def test_positions_of_earlier_versions_are_read():
    pipeline = {"seed": 0, "batch_size": 4, "remainder": "drop", "length": 8, "source": None}
    stream = batches(np.arange(8), 4, seed=0)
    stream.set_state({"step": 3, "pipeline": pipeline})
    assert next(stream).tolist() == batches(np.arange(8), 4, seed=0).at(3).tolist()


# Padding


def test_pad_adds_a_mask_to_every_batch():
    found = list(batches(numbered(5), 4, epochs=1, remainder="pad"))
    assert [batch["mask"].tolist() for batch in found] == [[True] * 4, [True, False, False, False]]
    assert found[1]["x"].tolist() == [4, 4, 4, 4]
    assert len({str(jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), b)) for b in found}) == 1


@pytest.mark.parametrize("dtype", [np.bool_, np.float32, np.int32])
def test_pad_combines_with_a_mask_of_the_source(dtype):
    mask = np.ones((5, 3), dtype)
    mask[4, 2] = 0
    last = list(batches({"x": np.arange(5), "mask": mask}, 2, epochs=1, remainder="pad"))[-1]
    assert last["mask"].dtype == dtype
    assert last["mask"].tolist() == [[1, 1, 0], [0, 0, 0]]
    if dtype == np.float32:  # weights of real rows do not change, those of repeated rows are 0
        mask[4] = [0.5, np.nan, np.inf]
        last = batches({"x": np.arange(5), "mask": mask}, 2, remainder="pad").at(2)
        np.testing.assert_array_equal(last["mask"], [[0.5, np.nan, np.inf], [0, 0, 0]])


@pytest.mark.parametrize(
    ("source", "collate", "says"),
    [
        (np.arange(5), None, r"batches that are a dict, .* got int64\[2\]; give a source"),
        ([{"mask": {"a": 1}}] * 5, None, "expected a mask of 2 rows to combine with, got dict"),
        ([1] * 5, lambda rows: {"x": np.ones(1)}, "batches of 2 rows, .* got none"),
        ([1] * 5, lambda rows: {"mask": np.ones(7)}, r"got float64\[7\]; rename"),
    ],
)
def test_pad_refuses_batches_that_cannot_have_a_mask(source, collate, says):
    with pytest.raises(sf.errors.DataError, match=says):
        next(batches(source, 2, remainder="pad", collate=collate))


# Transforms


def test_transform_takes_an_example_and_collate_a_list():
    source = [{"text": "a"}, {"text": "bcd"}, {"text": "ef"}]
    lengths = batches(source, 3, transform=lambda example: {"n": len(example["text"])})
    assert next(lengths)["n"].tolist() == [1, 3, 2]
    joined = batches(source, 2, collate=lambda examples: "+".join(e["text"] for e in examples))
    assert next(joined) == "a+bcd"
    arrays = batches(numbered(4), 2, start=1, transform=lambda e: {"x": -e["x"]}, collate=list)
    assert next(arrays) == [{"x": -2}, {"x": -3}]


def noise(example, rng):
    return {**example, "noise": rng.normal(size=2)}


@given(pipelines(), st.integers(0, 3), st.sampled_from([1, 2]))
def test_random_numbers_are_the_same_after_a_seek_and_on_any_processes(pipeline, seed, processes):
    source, sizes, options = pipeline
    options |= {"seed": seed, "transform": noise}
    sizes = [(0, sizes)] if isinstance(sizes, int) else sizes
    sizes = [(step, size * processes) for step, size in sizes]
    source = jax.tree.map(lambda leaf: np.concatenate([leaf] * processes), source)
    walked = list(batches(source, sizes, **options))
    if any(len(batch["x"]) % processes for batch in walked):
        return
    for step, batch in enumerate(walked):
        place = {"start": step, "process_count": processes, **options}
        shares = [
            next(batches(source, sizes, process_index=index, **place)) for index in range(processes)
        ]
        same(jax.tree.map(lambda *leaves: np.concatenate(leaves), *shares), batch)


def test_random_numbers_depend_on_the_epoch_and_not_on_the_batch_size():
    by_index = {}
    for size in (3, 4):
        stream = batches(numbered(12), size, seed=0, epochs=2, transform=noise)
        for step, batch in enumerate(stream):
            epoch = step // (12 // size)
            for x, drawn in zip(batch["x"].tolist(), batch["noise"].tolist(), strict=True):
                assert by_index.setdefault((epoch, x), drawn) == drawn
    assert len({tuple(drawn) for drawn in by_index.values()}) == 24


def test_random_numbers_of_examples_are_independent():
    draw = lambda example, rng: rng.normal()
    drawn = next(batches(np.zeros(4000), 4000, seed=0, transform=draw))
    assert abs(np.mean(drawn)) < 0.06
    assert abs(np.var(drawn) - 1) < 0.08
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.06
    other = next(batches(np.zeros(4000), 4000, seed=1, transform=draw))
    assert not set(drawn.tolist()) & set(other.tolist())


@pytest.mark.parametrize(
    ("function", "draws"),
    [
        (lambda example, scale=2: 0, False),
        (lambda *args: len(args) - 1, False),
        (partial(lambda scale, example: 0, 2), False),
        (int, False),  # written in C, and without a signature
        (abs, False),
        (lambda example, rng: rng.integers(1 << 30), True),
        (partial(lambda scale, example, rng: rng.integers(1 << 30), 2), True),
    ],
)
def test_transform_with_two_arguments_gets_a_generator(function, draws):
    drawn = next(batches([0, 0], 2, seed=0, transform=function))
    assert (len(set(drawn.tolist())) == 2) is draws


def test_draws_of_a_transform_do_not_change_between_versions():
    # A resumed run would have other batches.
    stream = batches(np.arange(4), 4, seed=3, transform=lambda x, rng: (x, rng.integers(1000)))
    drawn = [np.asarray(next(stream)).tolist() for _ in range(2)]
    assert drawn == [[[0, 1, 3, 2], [114, 527, 983, 187]], [[1, 0, 3, 2], [438, 146, 162, 144]]]


# Processes


def test_process_of_jax_is_read_with_the_first_batch(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: pytest.fail("read too early"))
    stream = batches(np.arange(8), 4)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert next(stream).tolist() == [2, 3]


def test_batch_size_that_does_not_divide_is_refused():
    share = {"process_index": 0, "process_count": 4}
    says = "batch_size: expected a multiple of the 4 processes, got 6 from step 0 on; give 4 or 8"
    with pytest.raises(sf.errors.DataError, match=says):
        next(batches(np.arange(20), 6, **share))
    with pytest.raises(sf.errors.DataError, match="got 3 from step 9 on; give 4 or 4"):
        next(batches(np.arange(20), [(0, 8), (9, 3)], **share))


def test_incomplete_batch_that_does_not_divide_is_refused_at_the_first():
    share = {"process_index": 0, "process_count": 2, "remainder": "keep"}
    stream = batches(np.arange(11), 4, **share)
    with pytest.raises(sf.errors.DataError, match="got 3 rows at step 2; use remainder='pad'"):
        next(stream)
    assert [len(batch) for batch in batches(np.arange(10), 4, epochs=1, **share)] == [2, 2, 1]


# Errors


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seed": -1}, "seed: expected an integer of at least 0, got -1"),
        ({"seed": 1.0}, "seed: expected an integer of at least 0, got 1.0"),
        ({"start": -1}, "start: expected an integer of at least 0, got -1"),
        ({"epochs": 0}, "epochs: expected an integer of at least 1, got 0"),
        ({"epochs": True}, "epochs: expected an integer of at least 1, got True"),
        ({"remainder": "cut"}, "remainder: expected one of 'drop', 'pad', 'keep', got 'cut'"),
        ({"transform": 3}, "transform: expected a function, got int 3"),
        ({"transform": lambda a, b, c: a}, "and a random generator, got function .* 3 arguments"),
        ({"transform": noise}, "transform: expected a seed .* got seed=None; give seed=…"),
        ({"collate": "stack"}, "collate: expected a function, got str 'stack'"),
        ({"process_index": 0}, "expected both or neither, got 0 and None"),
        ({"process_index": 0, "process_count": 0}, "process_count: expected an integer of at leas"),
        ({"process_index": -1, "process_count": 2}, "process_index: expected an integer of at le"),
        ({"process_index": 2, "process_count": 2}, "expected one below process_count=2, got 2"),
    ],
)
def test_invalid_arguments_are_refused_when_given(options, says):
    with pytest.raises(sf.errors.ConfigError, match=says):
        batches(**{"source": np.arange(8), "batch_size": 4, **options})


def test_sources_without_a_full_batch_are_refused():
    with pytest.raises(sf.errors.DataError, match="source: expected examples, got none"):
        batches([], 4)
    says = "batch_size: expected at most the 3 examples of the source, got 4, .* remainder='pad'"
    with pytest.raises(sf.errors.DataError, match=says):
        batches(np.arange(3), 4)
    assert len(batches(np.arange(3), 4, epochs=1, remainder="keep")) == 1


def test_error_of_a_transform_names_the_example_which_can_be_tried_again():
    stream = batches(np.arange(8), 4, start=1, transform=lambda x: 1 / (x - np.int64(6)).item())
    with pytest.raises(ZeroDivisionError) as caught:
        next(stream)
    assert caught.value.__notes__ == [
        "transforming index 6 of the source, row 2 of those requested",
        "making the batch of step 1: positions 4 to 7 of epoch 0",
    ]
    assert stream.get_state()["step"] == 1


def test_functions_that_return_none_are_refused():
    with pytest.raises(
        sf.errors.DataError, match="transform: expected an example, got None for index 0"
    ):
        next(batches(np.arange(8), 4, transform=lambda example: None))
    with pytest.raises(
        sf.errors.DataError, match="collate: expected a batch, got None; return the batch"
    ):
        next(batches(np.arange(8), 4, collate=lambda examples: None))


# Batches that are left out


@pytest.mark.parametrize(
    ("ranges", "says"),
    [
        ((3, 5), r"a list of pairs \(first, stop\) .* such as \[\(9000, 9040\)\], got \(3, 5\)"),
        (None, "expected a list of pairs .* got None"),
        ([(-1, 2)], r"each first at least 0 and below its stop, .* got \[\(-1, 2\)\]"),
        ([(0, 1.5)], r"pairs \(first, stop\) of batch indices, .* got \[\(0, 1.5\)\]"),
        ([(1, 2), (4, 4)], r"below its stop, .* got \[\(1, 2\), \(4, 4\)\]"),
        ([(0, 7), (6, 20)], r"that leave one of the 20 batches, got \[\(0, 20\)\]"),
    ],
)
def test_invalid_ranges_are_refused(ranges, says):
    with pytest.raises(sf.errors.ConfigError, match=says):
        batches(numbered(20), 2, epochs=2).without(ranges)
