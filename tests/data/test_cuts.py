"""Epochs cut into batches, of one size or of several."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepfold as sf
from stepfold.data.cuts import Cuts, read_sizes, size_at


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=4),
    st.booleans(),
    st.integers(1, 4),
)
def test_a_ramp_is_what_stepping_through_it_gives(length, stretches, whole, epochs):
    sizes = [min(size, length) for _, size in stretches]
    steps = np.cumsum([0, *(steps for steps, _ in stretches[:-1])]).tolist()
    cuts = Cuts(length, list(zip(steps, sizes, strict=True)), whole=whole, epochs=epochs)
    expected, step, epoch, start = [], 0, 0, 0
    while True:
        # Whether an epoch goes on is for the size that was at its last batch to say.
        before = sizes[np.searchsorted(steps, max(step - 1, 0), side="right") - 1]
        size = sizes[np.searchsorted(steps, step, side="right") - 1]
        if start and length - start < (before if whole else 1):
            epoch, start = epoch + 1, 0
        if whole and length - start < size:
            epoch, start = epoch + 1, 0
        if epoch >= epochs:
            break
        expected.append((epoch, start, min(start + size, length), size))
        start, step = start + size, step + 1
    assert cuts.total == len(expected)
    found = [cuts.at(step) for step in range(cuts.total)]
    assert [cut[:4] for cut in found] == expected
    for step, cut in enumerate(found):
        later = [other[:1] + other[3:4] for other in found[step : step + cut.alike]]
        full = [other.stop - other.start == other.size for other in found[step : step + cut.alike]]
        assert set(later) <= {(cut.epoch, cut.size)}
        assert all(full)
    short = [step for step, (_, start, stop, size) in enumerate(expected) if stop - start < size]
    listed = cuts.shorter()
    assert {step for step, _ in listed} <= set(short)
    kinds = {(cut.size, cut.stop - cut.start) for _, cut in listed}
    assert kinds == {(expected[step][3], expected[step][2] - expected[step][1]) for step in short}


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (0, "batch_size: expected an integer of at least 1, got 0"),
        (2.0, "batch_size: expected an integer of at least 1, got 2.0"),
        (True, "batch_size: expected an integer of at least 1, got True"),
        (None, "batch_size: expected an integer of at least 1, got None"),
        ([], r"batch_size: expected pairs \(from step, size\), the first from step 0 .* got \[\]"),
        ([(5, 2)], "the first from step 0"),
        ([(0, 2), (9, 4), (9, 8)], "each from a later step than the one before"),
        ([(0, 2), 4], "expected pairs"),
        ([(0, 0)], "batch_size: size: expected an integer of at least 1, got 0"),
        ([(-1, 1)], "batch_size: from step: expected an integer of at least 0, got -1"),
        (lambda step: 3, r"got a function; .* give pairs such as \[\(0, 64\), \(1000, 256\)\]"),
    ],
)
def test_what_is_no_batch_size_is_refused(size, says):
    with pytest.raises(sf.ConfigError, match=says):
        read_sizes(size)


def test_a_size_holds_from_its_step_on():
    ramp = [(0, 2), (3, 8), (5, 4)]
    assert [size_at(ramp, step) for step in range(7)] == [2, 2, 2, 8, 8, 4, 4]
    assert size_at([(0, 6)], 10**12) == 6
