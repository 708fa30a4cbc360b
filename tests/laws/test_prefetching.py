"""Reading ahead changes nothing that a run could see, wherever it is stopped and resumed."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepfold as sf

pytestmark = pytest.mark.not_optimized

SIZES = st.integers(1, 20)


@st.composite
def pipelines(draw):
    count = draw(st.integers(1, 40))
    options = {
        "source": {"x": np.arange(count), "y": np.arange(count)[:, None] * 2.0},
        "batch_size": draw(st.integers(1, count + 5)),
        "seed": draw(st.none() | st.integers(0, 3)),
        "epochs": draw(st.integers(1, 3)),
        "remainder": "pad",
    }
    return lambda: sf.batches(**options)


def bits(batches):
    return [
        {name: (leaf.dtype, leaf.shape, leaf.tobytes()) for name, leaf in batch.items()}
        for batch in batches
    ]


def check(wrap, make, size, stop, again):
    """Stop after some batches and resume, in a new iterator and in the same one."""
    whole = bits(make())
    stop = min(stop, len(whole))
    stream = wrap(make(), size)
    assert bits(next(stream) for _ in range(stop)) == whole[:stop]
    saved = json.loads(json.dumps(stream.get_state()))
    resumed = wrap(make(), again)
    resumed.set_state(saved)
    assert bits(resumed) == whole[stop:]
    assert bits(stream) == whole[stop:]
    stream.set_state(saved)
    assert bits(stream) == whole[stop:]


@given(pipelines(), SIZES, st.integers(0, 60), SIZES)
def test_stopping_anywhere_is_as_not_stopping(make, size, stop, again):
    check(lambda batches, size: sf.prefetch(batches, size=size), make, size, stop, again)


@given(pipelines(), SIZES, st.integers(0, 60), SIZES)
def test_so_it_is_for_one_that_reads_ahead_of_another(make, size, stop, again):
    twice = lambda batches, size: sf.prefetch(sf.prefetch(batches), size=size)
    check(twice, make, size, stop, again)


class Fetched:
    """Read ahead, and say where reading is instead of where the loop is, as one easily does."""

    def __init__(self, batches, size):
        self.batches, self.size, self.waiting = batches, size, []
        self.get_state = batches.get_state

    def set_state(self, state):
        self.batches.set_state(state)
        self.waiting = []

    def __iter__(self):
        return self

    def __next__(self):
        while len(self.waiting) <= self.size and (batch := next(self.batches, None)):
            self.waiting.append(batch)
        if not self.waiting:
            raise StopIteration
        return self.waiting.pop(0)


def test_what_is_nearly_right_fails_the_same_law():
    make = lambda: sf.batches({"x": np.arange(12)}, 2, epochs=1)
    with pytest.raises(AssertionError):
        check(Fetched, make, 2, 2, 2)
