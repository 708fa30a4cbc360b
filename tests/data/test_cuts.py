"""Epochs cut into batches, of one size or of several."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepfold as sf
from stepfold.data.cuts import Cuts, Share, read_share, read_sizes, size_at


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


def test_the_shares_in_order_are_the_batch():
    rows = [i for process in range(4) for i in range(*Share(process, 4).rows(12))]
    assert rows == list(range(12))


def test_jax_is_asked_where_nothing_is_said(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    assert read_share(None, None) is None
    assert Share.asked_of_jax() == (2, 3)
    assert read_share(1, 2) == (1, 2)


@pytest.mark.parametrize(
    ("index", "count", "says"),
    [
        (0, None, "expected both or neither, got 0 and None"),
        (0, 0, "process_count: expected an integer of at least 1, got 0"),
        (-1, 2, "process_index: expected an integer of at least 0, got -1"),
        (2, 2, "process_index: expected one below process_count=2, got 2"),
    ],
)
def test_what_is_no_share_is_refused(index, count, says):
    with pytest.raises(sf.ConfigError, match=says):
        read_share(index, count)


def test_sizes_that_do_not_divide_are_refused():
    Share(0, 4).check_sizes([(0, 8), (5, 12)])
    with pytest.raises(sf.DataError, match="got 6 from step 5 on; give 4 or 8"):
        Share(0, 4).check_sizes([(0, 8), (5, 6)])
    Share(0, 4).check_short(3, 8)
    with pytest.raises(sf.DataError, match="got 7 rows at step 3; use remainder='pad'"):
        Share(0, 4).check_short(3, 7)
