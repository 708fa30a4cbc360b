"""Batches without some ranges are those that are left, wherever they are read from and resumed."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.small import Counter

import stepfold as sf

from . import course
from .test_replay import check as check_replay
from .test_replay import logarithm, planted, start
from .test_replay import run as run_loss

pytestmark = pytest.mark.not_optimized

MOST = 40  # batches of an endless pipeline that are looked at


@st.composite
def options(draw, count):
    size = draw(st.integers(1, max(1, count // 2)))
    ramp = draw(st.none() | st.integers(1, count))
    sizes = size if ramp is None else [(0, size), (draw(st.integers(1, 9)), ramp)]
    remainder = draw(st.sampled_from(["drop", "pad", "keep"]))
    return sizes, {"remainder": remainder}


@st.composite
def pipelines(draw):
    """Return a function that makes batches: of a source, a mixture or a stream, or prefetched."""
    count = draw(st.integers(2, 24))
    kind = draw(st.sampled_from(["source", "mixture", "stream", "prefetched", "shards"]))
    sizes, others = draw(options(count))
    seed = draw(st.none() | st.integers(0, 3))
    data = {"x": np.arange(count)}
    if kind == "mixture":
        mixture = sf.mix([(data, 2), ({"x": -np.arange(5)}, 1)], seed=seed)
        return lambda: sf.batches(mixture, sizes)
    epochs = draw(st.integers(1, 3))
    if kind == "stream":
        return lambda: sf.batches(lambda: Counter(count), sizes, epochs=epochs, **others)
    if kind == "shards":
        half = {"process_index": draw(st.integers(0, 1)), "process_count": 2, "remainder": "pad"}
        sizes = 2 * sizes if isinstance(sizes, int) else [(n, 2 * size) for n, size in sizes]
        return lambda: sf.batches(data, sizes, seed=seed, epochs=epochs, **half)
    make = lambda: sf.batches(data, sizes, seed=seed, epochs=epochs, **others)
    if kind == "source":
        return make
    size = draw(st.integers(1, 4))
    return lambda: sf.prefetch(make(), size=size)


@st.composite
def ranges(draw, most=3):
    pairs = st.tuples(st.integers(0, 20), st.integers(1, 6))
    return [(first, first + length) for first, length in draw(st.lists(pairs, max_size=most))]


def is_left(index, skipped):
    return not any(first <= index < stop for first, stop in skipped)


def bits(batches):
    return [
        {name: (leaf.dtype, leaf.shape, leaf.tobytes()) for name, leaf in batch.items()}
        for batch in itertools.islice(batches, MOST)
    ]


def without(batches, skipped):
    return batches.without(skipped)


def check(make, skipped, stop, skip=without):
    """Compare with a list of all batches, walked, sought and resumed after `stop` of them."""
    whole = bits(make())
    indices = [index for index in range(len(whole)) if is_left(index, skipped)]
    if not indices:
        return
    left, stop = [whole[index] for index in indices], min(stop, len(indices))
    stream = skip(make(), skipped)
    assert bits(itertools.islice(stream, stop)) == left[:stop]
    saved = json.loads(json.dumps(stream.get_state()))
    assert saved["step"] == stop
    assert bits(stream)[: len(left) - stop] == left[stop:]
    resumed = skip(make(), skipped)
    resumed.set_state(saved)
    assert bits(resumed)[: len(left) - stop] == left[stop:]
    assert [stream.batch_index(step) for step in range(len(indices))] == indices
    if hasattr(stream, "at"):
        assert bits(map(stream.at, reversed(range(len(left))))) == left[::-1]
        resumed.set_state(stream.state_at(stop))
        assert bits(itertools.islice(resumed, len(left) - stop)) == left[stop:]
    if len(whole) < MOST and hasattr(stream, "state_at"):
        assert len(stream) == len(indices)


@given(pipelines(), ranges(), st.integers(0, 30))
def test_they_are_those_that_are_left_wherever_they_are_resumed(make, skipped, stop):
    check(make, skipped, stop)


class Shifted:
    """Skip as one easily does: look up ranges of batches with a number of those returned."""

    def __init__(self, batches, skipped):
        self.batches, self.skipped, self.step = batches, skipped, 0

    def batch_index(self, step):
        return step + sum(stop - first for first, stop in self.skipped if first <= step)

    def __iter__(self):
        return self

    def __next__(self):
        self.step += 1
        try:
            return self.batches.at(self.batch_index(self.step - 1))
        except IndexError:
            raise StopIteration from None

    def get_state(self):
        return {"step": self.step}

    def set_state(self, state):
        self.step = state["step"]


class Filtered(Shifted):
    """Skip while iterating, and save the position of all batches."""

    def __next__(self):
        while not is_left(self.get_state()["step"], self.skipped):
            next(self.batches)
        return next(self.batches)

    def get_state(self):
        return self.batches.get_state()

    def set_state(self, state):
        self.batches.set_state(state)


@pytest.mark.parametrize("mutant", [Shifted, Filtered])
def test_what_is_nearly_right_fails_the_same_law(mutant):
    make = lambda: sf.batches({"x": np.arange(30)}, 2, epochs=1)
    check(make, [(2, 4), (5, 7)], 4)
    with pytest.raises(AssertionError):
        check(make, [(2, 4), (5, 7)], 4, mutant)


@given(ranges(), st.integers(0, 24), ranges(), st.booleans())
def test_a_position_is_taken_if_and_only_if_the_same_batches_came_before_it(one, stop, two, stream):
    count = 60
    make = lambda: sf.batches((lambda: Counter(count)) if stream else {"x": np.arange(count)}, 1)
    walked, other = make().without(one), make().without(two)
    for _ in range(stop):
        next(walked)
    before = [[b.batch_index(step) for step in range(stop)] for b in (walked, other)]
    saved = json.loads(json.dumps(walked.get_state()))
    if before[0] == before[1]:
        other.set_state(saved)
        assert next(other)["x"].tolist() == [other.batch_index(stop) % count]
        return
    with pytest.raises(sf.errors.DataError) as caught:
        other.set_state(saved)
    for batches in (walked, other):
        end = before[0][-1] + 1
        assert str([pair for pair in batches.skipped if pair[0] < end]) in str(caught.value)


@given(ranges(), ranges())
def test_ranges_add_up(one, two):
    make = lambda: sf.batches(np.arange(100), 1)
    both = make().without(one + two)
    assert make().without(one).without(two).skipped == both.skipped
    assert make().without(both.skipped).skipped == both.skipped
    stops = [stop for _, stop in both.skipped]
    assert all(a < b for a, (b, _) in zip(stops, both.skipped[1:], strict=False))
    covered = {n for first, stop in both.skipped for n in range(first, stop)}
    assert covered == {n for n in range(100) if not is_left(n, one + two)}


@given(st.data())
def test_epochs_end_after_their_last_batch_that_is_left(data):
    count, epochs = data.draw(st.integers(2, 24)), 4
    sizes, others = data.draw(options(count))
    all_of_them = sf.batches(np.arange(count), sizes, epochs=epochs, **others)
    # The epoch of a batch: those before it have ended once it comes.
    epoch = [all_of_them.epoch_ends.done(index) for index in range(len(all_of_them))]
    skipped = data.draw(ranges())
    left = [epoch[index] for index in range(len(epoch)) if is_left(index, skipped)]
    if not left:
        return
    ends = all_of_them.without(skipped).epoch_ends
    for done in range(1, epochs + 1):
        assert ends.end(done) == sum(number < done for number in left)
        assert ends.count_steps(done, 0) == ends.end(done)
    assert [ends.done(step) for step in range(len(left))] == left
    start = data.draw(st.integers(1, len(left)))
    if start < len(left) and (last := left[start] + 2) <= epochs:
        assert ends.count_steps(2, start) == sum(number < last for number in left[start:])


# A run


class CutError(Exception):
    pass


def left_out(ranges, **options):
    return course.batches(**options).without(ranges)


def run_cut(folder, ranges, cut):
    """Run until the batch after `cut` steps cannot be made."""
    examples = itertools.count()

    def transform(example):
        if next(examples) == 8 * cut:
            raise CutError
        return example

    with pytest.raises(CutError):
        course.run(folder, data=left_out(ranges, transform=transform))


def test_a_run_with_other_ranges_before_is_refused_and_with_later_ones_resumes(tmp_path):
    run_cut(tmp_path, [(3, 5), (20, 28)], 17)
    for other in ([], [(3, 6)], [(3, 5), (18, 19)]):
        before = [pair for pair in other if pair[0] < 19]
        with pytest.raises(sf.errors.DataError) as caught:
            course.run(tmp_path, data=left_out(other))
        assert "[(3, 5)]" in str(caught.value)
        assert str(before) in str(caught.value)
    resumed = course.run(tmp_path, data=left_out([(3, 5), (19, 30)]))
    assert resumed.resumed == 17
    assert course.told(resumed) == course.told(course.run(data=left_out([(3, 5), (19, 30)])))


@pytest.mark.full
def test_a_fault_after_a_skip_is_replayed(tmp_path):
    """The zero is in batch 11, and so in step 8 of a run that skips three."""
    make = planted(0.0, 11, (3,))
    batches = lambda: make().without([(1, 2), (4, 6)])
    step, result = run_loss(logarithm, sf.prefetch(batches()), tmp_path)
    replayed = sf.debug.replay(result.capsule.path, step, state=start(), batches=batches())
    check_replay(replayed, result, 8, (3,))
