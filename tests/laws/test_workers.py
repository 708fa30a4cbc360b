"""Batches of worker processes are those of this process, wherever they are stopped and resumed."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.small import Counter

import stepfold as sf

pytestmark = pytest.mark.not_optimized

COUNTS = st.sampled_from([0, 1, 2, 5])
MOST = 12  # batches of an endless pipeline that are looked at


@st.composite
def pipelines(draw):
    """Return a function that makes batches of a source, a mixture or a stream, transformed."""
    count, seed = draw(st.integers(4, 30)), draw(st.integers(0, 3))
    size, kind = draw(st.integers(1, 4)), draw(st.sampled_from(["source", "mixture", "stream"]))
    width = draw(st.sampled_from([1, 3000]))
    noisy = lambda example, rng: {**example, "noise": rng.normal(size=width)}
    data, options = {"x": np.arange(count)}, {"seed": seed, "transform": noisy}
    if kind == "mixture":
        mixture = sf.mix([(data, 2), ({"x": -np.arange(5)}, 1)], seed=seed)
        return lambda: sf.batches(mixture, size, **options)
    options |= {
        "epochs": draw(st.integers(1, 2)),
        "remainder": draw(st.sampled_from(["pad", "drop"])),
    }
    if kind == "stream":
        return lambda: sf.batches(lambda: Counter(count), size, **options)
    return lambda: sf.batches(data, size, **options)


@st.composite
def ranges(draw):
    pairs = st.tuples(st.integers(0, 8), st.integers(1, 3))
    return [(first, first + length) for first, length in draw(st.lists(pairs, max_size=2))]


def bits(batches, most=MOST):
    return [
        {name: (leaf.dtype, leaf.shape, leaf.tobytes()) for name, leaf in batch.items()}
        for batch in itertools.islice(batches, most)
    ]


def check(wrap, make, skipped=(), stop=3, counts=(2, 3)):
    """Stop after some batches, and resume with another number of workers; go back in the same."""
    try:
        whole = bits(make().without(skipped))
    except sf.errors.ConfigError:  # no batch is left
        return
    stop = min(stop, len(whole))
    stream = wrap(make(), counts[0]).without(skipped)
    assert bits(stream, stop) == whole[:stop]
    plain = make().without(skipped)
    bits(plain, stop)
    assert stream.get_state() == plain.get_state()
    saved = json.loads(json.dumps(stream.get_state()))
    assert bits(stream, len(whole) - stop) == whole[stop:]
    resumed = wrap(make(), counts[1]).without(skipped)
    resumed.set_state(saved)
    assert bits(resumed, len(whole) - stop) == whole[stop:]
    stream.set_state(saved)
    assert bits(stream, len(whole) - stop) == whole[stop:]


@given(pipelines(), ranges(), st.integers(0, MOST))
def test_without_processes_it_holds_too(make, skipped, stop):
    check(sf.workers, make, skipped, stop, (0, 0))


# Each example starts up to two pools of processes.
@settings(max_examples=3)
@given(pipelines(), ranges(), st.integers(0, MOST), st.tuples(COUNTS, COUNTS))
def test_any_number_of_workers_makes_the_same_batches(make, skipped, stop, counts):
    check(sf.workers, make, skipped, stop, counts)


@pytest.mark.full
@settings(max_examples=50)
@given(pipelines(), ranges(), st.integers(0, MOST), st.tuples(COUNTS, COUNTS))
def test_so_do_more_of_them(make, skipped, stop, counts):
    check(sf.workers, make, skipped, stop, counts)


class Mutant:
    """Batches of simulated workers: worker k of n makes the batches k, k + n, k + 2n, …"""

    def __init__(self, batches, count):
        self.batches, self.count, self.step = batches, count, batches.get_state()["step"]

    def __iter__(self):
        return self

    def __next__(self):
        self.step += 1
        return self.made(self.step - 1)

    def made(self, step):
        try:
            return self.batches.at(step)
        except IndexError:
            raise StopIteration from None

    def get_state(self):
        return self.batches.state_at(self.step)

    def set_state(self, state):
        self.batches.set_state(state)
        self.step = state["step"]

    def without(self, ranges):
        return type(self)(self.batches.without(ranges), self.count)


class FirstCome(Mutant):
    """Return what is ready first: of each round, the last worker is the fastest."""

    def made(self, step):
        start = step - step % self.count
        return super().made(start + self.count - 1 - step % self.count)


class Striped(Mutant):
    """Give each worker a block of steps, which depends on the number of workers."""

    def made(self, step):
        block = len(self.batches) // self.count
        return super().made(step % self.count * block + step // self.count)


class ReadAhead(Mutant):
    """Save the position up to which workers have made batches."""

    def get_state(self):
        return self.batches.state_at(self.step + self.count)


class Miscounted(Mutant):
    """Skip ranges in the workers' numbering instead of that of the batches."""

    def without(self, ranges):
        return type(self)(self.batches.without([(a // 2, b // 2) for a, b in ranges]), self.count)


class OwnGenerator(Mutant):
    """Draw the random numbers of a worker from its own generator, as torch's workers do."""

    def made(self, step):
        rng = np.random.default_rng(step % self.count)
        batch = super().made(step)
        return {**batch, "noise": rng.normal(size=batch["noise"].shape)}


@pytest.mark.parametrize(
    "mutant",
    [FirstCome, Striped, ReadAhead, Miscounted, OwnGenerator],
)
def test_what_is_nearly_right_fails_the_same_law(mutant):
    noisy = lambda example, rng: {**example, "noise": rng.normal(size=1)}
    data = {"x": np.arange(40)}
    make = lambda: sf.batches(data, 2, seed=0, epochs=1, remainder="drop", transform=noisy)
    check(Mutant, make, [(6, 8)])
    with pytest.raises(AssertionError):
        check(mutant, make, [(6, 8)])
