"""Epochs are divided into batches of one size or of several, and batches into shards."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepfold as sf
from stepfold.data.epochs import Epochs, read_sizes


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=4),
    st.booleans(),
    st.integers(1, 4),
)
def test_spans_equal_those_found_step_by_step(length, segments, drop, epochs):
    sizes = [min(size, length) for _, size in segments]
    steps = np.cumsum([0, *(steps for steps, _ in segments[:-1])]).tolist()
    pairs = list(zip(steps, sizes, strict=True))
    found = Epochs(length, pairs, drop=drop, epochs=epochs)
    expected, step, epoch, start = [], 0, 0, 0
    while True:
        # The size of its last batch decides whether an epoch continues.
        before = sizes[np.searchsorted(steps, max(step - 1, 0), side="right") - 1]
        size = sizes[np.searchsorted(steps, step, side="right") - 1]
        if start and length - start < (before if drop else 1):
            epoch, start = epoch + 1, 0
        if drop and length - start < size:
            epoch, start = epoch + 1, 0
        if epoch >= epochs:
            break
        expected.append((epoch, start, min(start + size, length), size))
        start, step = start + size, step + 1
    assert found.total == len(expected)
    spans = [found.span(step) for step in range(found.total)]
    assert [span[:4] for span in spans] == expected
    for step, span in enumerate(spans):
        later = spans[step : step + span.full_batches_left]
        assert {(other.epoch, other.size) for other in later} <= {(span.epoch, span.size)}
        assert all(other.stop - other.start == other.size for other in later)
    short = [step for step, (_, start, stop, size) in enumerate(expected) if stop - start < size]
    listed = found.incomplete_steps()
    assert set(listed) <= set(short)
    kinds = {(spans[step].size, spans[step].stop - spans[step].start) for step in listed}
    assert kinds == {(expected[step][3], expected[step][2] - expected[step][1]) for step in short}


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (0, "batch_size: expected an integer of at least 1, got 0"),
        (True, "batch_size: expected an integer of at least 1, got True"),
        ([], r"batch_size: expected pairs \(from step, size\), the first from step 0 .* got \[\]"),
        ([(5, 2)], "the first from step 0"),
        ([(0, 2), (9, 4), (9, 8)], "each from a later step than the one before"),
        ([(0, 2), 4], "expected pairs"),
        ([(0, 0)], "batch_size: size: expected an integer of at least 1, got 0"),
        ([(-1, 1)], "batch_size: from step: expected an integer of at least 0, got -1"),
        (lambda step: 3, r"got a function; .* give pairs such as \[\(0, 64\), \(1000, 256\)\]"),
    ],
)
def test_invalid_batch_sizes_are_refused(size, says):
    with pytest.raises(sf.errors.ConfigError, match=says):
        read_sizes(size)
