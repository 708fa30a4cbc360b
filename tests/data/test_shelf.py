"""A thread fills a shelf as far as there is room, and ends when it is told to or has to."""

import time

import pytest

import stepfold as sf
from stepfold.data.copying import Copying
from stepfold.data.shelf import End, Item, Shelf, can_resume, start_thread, state_of


def start(source, size, place=None):
    shelf = Shelf(size)
    return shelf, start_thread(shelf, iter(source), place, Copying(few=1))


def test_no_more_is_taken_than_there_is_room_for():
    taken = []
    shelf, thread = start((taken.append(i) or i for i in range(9)), 3)
    for expected in range(3):
        assert shelf.ready.get() == Item(expected, None)
    time.sleep(0.05)
    assert taken == [0, 1, 2]
    shelf.room.put(None)
    assert shelf.ready.get() == Item(3, None)
    shelf.stop()
    thread.join(5)
    assert not thread.is_alive()
    assert taken == [0, 1, 2, 3]


def test_the_end_comes_last_and_ends_the_thread():
    shelf, thread = start([1], 2)
    assert [shelf.ready.get(), shelf.ready.get()] == [Item(1, None), End(None)]
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_whatever_is_raised_is_passed_on(kind):
    error = kind("disk")

    def source():
        yield 1
        raise error

    shelf, thread = start(source(), 5)
    assert [shelf.ready.get(), shelf.ready.get()] == [Item(1, None), End(error)]
    thread.join(5)
    assert not thread.is_alive()


def test_placing_may_neither_end_the_batches_nor_lose_them():
    shelf, _ = start([1], 1, place=lambda batch: next(iter(())))
    end = shelf.ready.get()
    assert isinstance(end.error, sf.DataError)
    assert str(end.error) == "sharding: StopIteration came up while a batch was placed"
    shelf, _ = start([1], 1, place=lambda batch: None)
    assert "sharding: expected a batch, got None; return what" in str(shelf.ready.get().error)


class Counting:
    """One dict for all states, which it writes into."""

    def __init__(self):
        self.state = {"step": 0}

    def __iter__(self):
        return self

    def __next__(self):
        self.state["step"] += 1
        return self.state["step"]

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state.update(state)


def test_a_state_is_of_its_batch_although_the_iterator_goes_on():
    shelf, _ = start(Counting(), 3)
    items = [shelf.ready.get() for _ in range(3)]
    assert [item.batch for item in items] == [1, 2, 3]
    assert len({item.state for item in items}) == 3
    shelf.stop()
    assert can_resume(Counting())
    assert not can_resume(iter([]))
    assert state_of(iter([])) is None
