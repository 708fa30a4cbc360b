"""The batches of a run: how many there are, their position, and which are kept."""

import itertools
import time
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
from tests.small import STEP, start

import stepfold as sf
from stepfold.loop.feed import BatchFeed


def taken(feed, limit=100):
    found = []
    for step in range(limit):
        try:
            found.append(feed.next_batch(step))
        except StopIteration:
            break
    return found


class Counting:
    """Batches that can be gone through again, and know how often that was begun."""

    def __init__(self, count=3, length=True):
        self.count, self.begun = count, 0
        if length:
            self.__class__ = type("Sized", (Counting,), {"__len__": lambda self: self.count})

    def __iter__(self):
        self.begun += 1
        return Numbers(self.count)


class Numbers:
    """An iterator with a position."""

    def __init__(self, count):
        self.at, self.count = 0, count

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.count:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


class Unknown(Counting):
    def __len__(self):
        raise TypeError("no length")


@pytest.mark.parametrize(
    ("batches", "total"),
    [(Counting(3), 6), (Counting(3, length=False), None), (Unknown(3, length=False), None)],
)
def test_it_goes_through_as_often_as_it_is_told_to(batches, total):
    feed = BatchFeed(batches, epochs=2)
    assert (feed.total, batches.begun) == (total, 1)
    assert (taken(feed), batches.begun) == ([0, 1, 2] * 2, 2)
    assert BatchFeed(batches).total is None


def test_batches_may_know_their_epochs_and_whether_they_end():
    class Known(Numbers):
        steps_per_epoch = 4

    feed = BatchFeed(Known(100), epochs=2)
    assert (feed.epoch_steps, feed.total) == (4, 8)
    assert BatchFeed(Counting(3)).epoch_steps == 3
    assert BatchFeed(sf.batches(np.arange(8), 4)).endless
    assert not BatchFeed(sf.batches(np.arange(8), 4, epochs=1)).endless
    assert not BatchFeed(itertools.repeat(1)).endless


def test_an_epoch_without_batches_is_refused():
    class Once:
        epochs = iter([[1]])

        def __iter__(self):
            return iter(next(self.epochs, []))

        def __len__(self):
            return 2

    words = "batches: expected some in the next epoch too, got none"
    with pytest.raises(sf.errors.DataError, match=words):
        taken(BatchFeed(Once(), epochs=3))


def test_an_error_says_at_which_step_it_was():
    def broken():
        yield 1
        raise OSError("disk")

    feed = BatchFeed(broken())
    feed.next_batch(0)
    with pytest.raises(OSError, match="disk") as caught:
        feed.next_batch(1)
    assert "pulling the batch of step 1" in caught.value.__notes__


def test_it_knows_how_long_it_was_waited(monkeypatch):
    now = [0.0]

    def slow():
        for number in range(2):
            now[0] += 2.0
            yield number

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    feed = BatchFeed(slow())
    assert feed.wait_seconds == 0
    taken(feed)
    assert feed.wait_seconds == 4


@pytest.mark.parametrize("batches", [[1, 2, 3], (x for x in range(3))])
def test_batches_without_a_position_cannot_be_resumed(batches):
    words = "batches: expected get_state and set_state, to be resumed at step 2, got "
    assert BatchFeed(batches).position(0) is None
    with pytest.raises(sf.errors.DataError, match=words):
        BatchFeed(batches).seek({"at": 2}, 2)
    with pytest.raises(
        sf.errors.DataError, match="a position .* of step 2, got none; save w"
    ) as caught:
        BatchFeed(sf.batches(np.arange(9), 3)).seek(None, 2)
    assert "get_state" not in str(caught.value)


ITERABLE = "batches: expected an iterable of batches, got "


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        *((x, {}, ITERABLE) for x in (None, 3, "text", b"text", {"x": np.ones(3)}, lambda: [1])),
        (np.ones((4, 2)), {}, r"batches: expected an iterable .* got float64\[4,2\]"),
        (
            (x for x in itertools.count()),
            {"epochs": 2},
            "epochs=2: expected batches that can be iterated again, or .*, got generator",
        ),
    ],
)
def test_what_is_no_batches_is_refused(batches, options, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        BatchFeed(batches, **options)


# Positions after a failure


class Advancing(Numbers):
    """An iterator that moves on before it fails, and counts how often it is asked."""

    def __init__(self, count, fails_at=None):
        super().__init__(count)
        self.fails_at, self.asked = fails_at, 0

    def __next__(self):
        number = super().__next__()
        if number == self.fails_at:
            self.fails_at = None
            raise OSError("disk")
        return number

    def get_state(self):
        self.asked += 1
        return super().get_state()


def test_the_position_after_a_failed_pull_is_that_of_the_batch_that_failed():
    feed = BatchFeed(Advancing(10, fails_at=4))
    for step in range(4):
        feed.next_batch(step)
    with pytest.raises(OSError, match="disk"):
        feed.next_batch(4)
    assert feed.position(4) == {"at": 4}


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize(
    "make", [lambda: Advancing(10), lambda: sf.batches(np.arange(10), 1),
             lambda: sf.prefetch(sf.batches(np.arange(10), 1)), lambda: sf.prefetch(Advancing(10))]
)  # fmt: skip
def test_batches_that_no_step_has_used_are_not_skipped(make, ahead):
    feed = BatchFeed(make())
    for step in range(5 + ahead):
        feed.next_batch(step)
    other = BatchFeed(make())
    used = other.seek(feed.position(5), 5)
    assert (np.ravel(other.next_batch(5)).tolist(), used) == ([5], 5)


def test_the_position_is_not_asked_for_with_every_batch():
    batches = Advancing(1000)
    feed = BatchFeed(batches)
    for step in range(1000):
        feed.next_batch(step)
    feed.position(1000)
    feed.position(1000)
    assert batches.asked == 2


def test_the_kept_batches_are_those_since_the_last_log_point_that_cannot_be_read_again():
    feed = BatchFeed((np.ones(2) for _ in range(9)), keep_recent=True)
    for step in range(5):
        feed.next_batch(step)
    feed.recent.drop_until(3)
    assert list(feed.recent) == [4, 5]
    for batches in [[np.ones(2)], sf.batches(np.ones(4), 2)]:
        assert BatchFeed(batches, keep_recent=True).recent is None


def test_a_run_keeps_no_batches_of_earlier_log_points():
    kept = []

    def generate():
        for _ in range(40):
            batch = {"x": jnp.ones(4)}
            kept.append(weakref.ref(batch["x"]))
            yield batch

    alive = []
    sf.fit(
        STEP, start(), generate(), log_every=4,
        hooks=[lambda event: alive.append(sum(batch() is not None for batch in kept))],
    )  # fmt: skip
    assert max(alive) <= 12


def test_the_batches_left_of_a_list_are_those_of_all_epochs():
    feed = BatchFeed([1, 2, 3], epochs=3)
    left = []
    for step in range(9):
        feed.next_batch(step)
        left.append(feed.batches_left(step + 1))
    assert left == [8, 7, 6, 5, 4, 3, 2, 1, 0]
