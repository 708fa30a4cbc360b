import itertools
import time

import numpy as np
import pytest

import stepfold as sf
from stepfold.loop.feed import Feed


def taken(feed, limit=100):
    found = []
    for step in range(limit):
        try:
            found.append(feed.pull(step))
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


def test_without_epochs_it_goes_through_once():
    assert taken(Feed([1, 2, 3])) == [1, 2, 3]
    assert taken(Feed(iter([1, 2, 3]))) == [1, 2, 3]


@pytest.mark.parametrize("length", [True, False])
def test_it_goes_through_as_often_as_it_is_told_to(length):
    assert taken(Feed(Counting(3, length), epochs=2)) == [0, 1, 2] * 2


def test_it_knows_how_many_steps_there_are_where_the_batches_do():
    assert (Feed(Counting(3), epochs=2).total, Feed(Counting(3)).epoch_steps) == (6, 3)
    assert Feed(Counting(3, length=False), epochs=2).total is None
    assert Feed(Counting(3)).total is None


def test_batches_that_count_their_epochs_may_be_an_iterator():
    class Known(Numbers):
        steps_per_epoch = 4

    feed = Feed(Known(100), epochs=2)
    assert (feed.epoch_steps, feed.total) == (4, 8)


def test_batches_of_ones_own_know_their_epochs():
    data = {"x": np.arange(10)}
    feed = Feed(sf.batches(data, 4, seed=0), epochs=3)
    assert (feed.epoch_steps, feed.total) == (2, 6)


def test_the_batches_are_begun_once_an_epoch():
    batches = Counting(3)
    feed = Feed(batches, epochs=2)
    assert batches.begun == 1
    taken(feed)
    assert batches.begun == 2


def test_a_length_that_nobody_knows_is_none():
    class Unknown(Counting):
        def __len__(self):
            raise TypeError("no length")

    feed = Feed(Unknown(3, length=False), epochs=2)
    assert feed.total is None
    assert taken(feed) == [0, 1, 2] * 2


def test_an_epoch_without_batches_is_refused():
    epochs = iter([[1, 2], []])

    class Short:
        def __iter__(self):
            return iter(next(epochs))

        def __len__(self):
            return 2

    class Never(Short):
        def __iter__(self):
            return iter([1] if next(first, None) else [])

    first = iter([1])
    feed = Feed(Never(), epochs=3)
    with pytest.raises(sf.DataError, match="batches: expected batches in the next epoch too, got "):
        taken(feed)


def test_an_error_says_at_which_step_it_was():
    def broken():
        yield 1
        raise OSError("disk")

    feed = Feed(broken())
    feed.pull(0)
    with pytest.raises(OSError, match="disk") as caught:
        feed.pull(1)
    assert "pulling the batch of step 1" in caught.value.__notes__


def test_it_says_how_long_it_was_waited():
    def slow():
        for number in range(2):
            time.sleep(0.02)
            yield number

    feed = Feed(slow())
    assert feed.waited == 0
    taken(feed)
    assert 0.04 <= feed.waited < 1


def test_its_position_is_that_of_the_next_batch():
    feed = Feed(sf.batches(np.arange(9), 3))
    feed.pull(0)
    assert feed.position()["step"] == 1
    other = Feed(sf.batches(np.arange(9), 3))
    other.go_to(feed.position(), 1)
    assert other.pull(1).tolist() == [3, 4, 5]


def test_batches_without_a_position_have_none():
    assert Feed([1, 2]).position() is None


def test_it_goes_to_a_position_in_a_later_epoch():
    feed = Feed(Counting(3, length=False), epochs=3)
    seen = [feed.pull(step) for step in range(4)]
    other = Feed(Counting(3, length=False), epochs=3)
    other.go_to(feed.position(), 4)
    assert seen + taken(other) == [0, 1, 2] * 3


@pytest.mark.parametrize("batches", [[1, 2, 3], (x for x in range(3))])
def test_batches_without_a_position_cannot_be_resumed(batches):
    words = "batches: expected some that can be resumed at step 2, got .*, which have no get_state"
    with pytest.raises(sf.DataError, match=words):
        Feed(batches).go_to({"at": 2}, 2)


def test_a_position_that_was_not_saved_is_what_is_missing():
    with pytest.raises(sf.DataError, match="no position was saved") as caught:
        Feed(sf.batches(np.arange(9), 3)).go_to(None, 2)
    assert "which have no get_state" not in str(caught.value)


@pytest.mark.parametrize("batches", [None, 3, "text", b"text", {"x": np.ones(3)}, lambda: [1]])
def test_what_is_no_batches_is_refused(batches):
    with pytest.raises(sf.ConfigError, match="batches: expected an iterable of batches, got "):
        Feed(batches)


def test_epochs_of_what_can_be_gone_through_once_are_refused():
    words = "epochs=2: expected batches that can be gone through again, or .*, got generator"
    with pytest.raises(sf.ConfigError, match=words):
        Feed((x for x in itertools.count()), epochs=2)


def test_an_array_is_data_and_no_batches():
    with pytest.raises(
        sf.ConfigError, match=r"batches: expected an iterable .* got float64\[4,2\]"
    ):
        Feed(np.ones((4, 2)))


def test_it_is_known_of_batches_whether_they_end():
    assert Feed(sf.batches(np.arange(8), 4)).endless
    assert not Feed(sf.batches(np.arange(8), 4, epochs=1)).endless
    assert not Feed(itertools.repeat(1)).endless
