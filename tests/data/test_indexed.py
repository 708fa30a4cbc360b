"""Batches that are asked for by their step: sought, resumed, and far away."""

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


@st.composite
def pipelines(draw, epochs=2):
    count = draw(st.integers(1, 50))
    remainder = draw(REMAINDERS)
    size = draw(st.integers(1, count if remainder == "drop" else count + 5))
    ramp = draw(st.none() | st.integers(1, count))
    sizes = size if ramp is None else [(0, size), (draw(st.integers(1, 6)), ramp)]
    options = {"remainder": remainder, "seed": draw(SEEDS), "epochs": epochs}
    return numbered(count), sizes, options


@given(pipelines())
def test_a_seek_gives_what_the_way_there_gives(pipeline):
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
def test_resuming_at_any_step_is_as_if_uninterrupted(pipeline):
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


@pytest.mark.parametrize("count", [1000, 100_000])
def test_they_go_on_for_ever_from_anywhere(count):
    far = batches(numbered(count), 64, seed=0, start=10**12)
    one, two = next(far), next(far)
    assert not np.array_equal(one["x"], two["x"])
    same(batches(numbered(count), 64, seed=0).at(10**12 + 1), two)
    assert far
    with pytest.raises(TypeError, match="no length without epochs; give epochs=…"):
        len(far)


def test_orders_found_ahead_are_those_found_one_by_one():
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
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"batch_size": 2}, "batch_size was 4 and is 2"),
        ({"batch_size": [(0, 4), (5, 2)]}, r"batch_size was 4 and is \[\[0, 4\], \[5, 2\]\]"),
        (
            {"seed": None, "remainder": "keep"},
            "seed was 0 and is None; remainder was 'drop'",
        ),
    ],
)
def test_a_position_in_other_batches_is_refused(other, says):
    options = {"source": np.arange(8), "batch_size": 4, "seed": 0, "epochs": 2}
    saved = batches(**options, start=1).get_state()
    stream = batches(**{**options, **other})
    with pytest.raises(sf.DataError, match=says) as caught:
        stream.set_state(saved)
    assert str(caught.value).endswith("or begin the new ones with start=1")
    assert stream.get_state()["step"] == 0


@pytest.mark.parametrize(
    "state", [None, {}, {"next_index": 3}, b"state", {"step": 1, "pipeline": 2}]
)
def test_what_is_no_position_is_refused(state):
    with pytest.raises(sf.DataError, match="expected a state that get_state.* by another kind of"):
        batches(np.arange(8), 4).set_state(state)


def test_a_position_may_come_from_any_number_of_processes():
    saved = batches(np.arange(8), 4, start=1, process_index=1, process_count=2).get_state()
    stream = batches(np.arange(8), 4)
    stream.set_state(saved)
    assert next(stream).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(("epochs", "more"), [(3, 5), (3, None), (None, 2), (5, 3)])
def test_a_run_may_be_prolonged_or_cut_short(epochs, more):
    stream = batches(numbered(10), 3, seed=1, epochs=epochs, start=4)
    resumed = batches(numbered(10), 3, seed=1, epochs=more)
    resumed.set_state(json.loads(json.dumps(stream.get_state())))
    same(next(resumed), next(stream))
    if more is not None:
        assert len(list(resumed)) == 3 * more - 5


def noise(example, rng):
    return {**example, "noise": rng.normal(size=2)}


@given(pipelines(), st.integers(0, 3), st.sampled_from([1, 2]))
def test_what_is_drawn_is_the_same_from_anywhere_and_on_any_processes(pipeline, seed, processes):
    source, sizes, options = pipeline
    options |= {"seed": seed, "transform": noise}
    sizes = [(0, sizes)] if isinstance(sizes, int) else sizes
    sizes = [(step, size * processes) for step, size in sizes]
    source = jax.tree.map(lambda leaf: np.concatenate([leaf] * processes), source)
    walked = list(batches(source, sizes, **options))
    if any(len(batch["x"]) % processes for batch in walked):
        return
    for step, batch in enumerate(walked):
        parts = [
            batches(
                source,
                sizes,
                start=step,
                process_index=index,
                process_count=processes,
                **options,
            )
            for index in range(processes)
        ]
        shares = [next(part) for part in parts]
        same(jax.tree.map(lambda *leaves: np.concatenate(leaves), *shares), batch)


def test_what_is_drawn_is_new_each_epoch_and_hangs_on_no_batch_size():
    by_index = {}
    for size in (3, 4):
        stream = batches(numbered(12), size, seed=0, epochs=2, transform=noise)
        for step, batch in enumerate(stream):
            epoch = step // (12 // size)
            for x, drawn in zip(batch["x"].tolist(), batch["noise"].tolist(), strict=True):
                assert by_index.setdefault((epoch, x), drawn) == drawn
    assert len({tuple(drawn) for drawn in by_index.values()}) == 24
