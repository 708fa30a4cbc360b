"""The prefetch thread and its queue."""

import atexit
import pickle
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

from stepfold.data.copying import Copying
from stepfold.errors import DataError

Place = Callable[[Any], Any]

PATIENCE = 0.5  # seconds to wait for a stopped thread; one blocked in its source ends later
_NO_MORE = object()


class Item(NamedTuple):
    """A batch, and the state of the source right after it."""

    batch: Any
    state: bytes | int | None


class End(NamedTuple):
    """The end of the batches, and the error that caused it, if any."""

    error: BaseException | None


class Shelf:
    """The bounded prefetch queue that the thread shares with the iterator.

    The thread has no other reference to the iterator. So an unused iterator is garbage collected,
    and its finalizer stops the thread. Ready batches and free slots are each a `SimpleQueue`. It is
    the fastest queue, and its `put` is reentrant: a finalizer may run in any thread at any time.
    """

    def __init__(self, size: int) -> None:
        self.ready: SimpleQueue[Item | End] = SimpleQueue()
        self.room: SimpleQueue[None] = SimpleQueue()
        self.stopped = False
        for _ in range(size):
            self.room.put(None)

    def has_room(self) -> bool:
        """Wait for a free slot; return False once stopped."""
        self.room.get()
        return not self.stopped

    def stop(self) -> None:
        """Ask the thread to end, and wake both sides."""
        self.stopped = True
        self.room.put(None)
        self.ready.put(End(None))


def _read_ahead(shelf: Shelf, iterator: Any, place: Place | None, own: Copying) -> None:
    """Fill the queue until it is stopped or the batches end; the body of the thread."""
    try:
        while shelf.has_room():
            batch = next(iterator, _NO_MORE)
            if batch is _NO_MORE:
                break
            state = state_of(iterator)
            shelf.ready.put(Item(_placed(place, own(batch)), state))
            del batch  # free its memory while the source reads the next one
    except BaseException as error:  # noqa: BLE001  raised by the iterator instead
        shelf.ready.put(End(error))
    else:
        shelf.ready.put(End(None))


def start_thread(
    shelf: Shelf, iterator: Any, place: Place | None, own: Copying
) -> threading.Thread:
    """Start the thread that fills the prefetch queue from an iterator."""

    def run() -> None:
        try:
            _read_ahead(shelf, iterator, place, own)
        finally:
            atexit.unregister(leave)

    def leave() -> None:
        shelf.stop()
        thread.join(PATIENCE)

    # A daemon, so that a blocked source cannot prevent exit. But a thread inside JAX must not
    # outlive JAX, so `leave` waits for it, up to `PATIENCE`. `leave` runs before JAX shuts down,
    # because atexit calls the last registered function first.
    thread = threading.Thread(target=run, name="prefetch", daemon=True)
    atexit.register(leave)
    thread.start()
    return thread


def state_of(iterator: Any) -> bytes | int | None:
    """Return a copy of an iterator's state for `load_state`, or None if it has none.

    If batches are a function of the step, the copy is only the step.
    """
    if hasattr(iterator, "state_at"):
        step: int = iterator.get_state()["step"]
        return step
    # A copy, because iterators may mutate the dict they returned. Pickled, because deepcopy takes
    # twenty times as long, and most of these states are never read.
    return pickle.dumps(iterator.get_state()) if can_resume(iterator) else None


def load_state(iterator: Any, state: bytes | int) -> Any:
    """Return the state that `state_of` copied."""
    return iterator.state_at(state) if isinstance(state, int) else pickle.loads(state)


def _placed(place: Place | None, batch: Any) -> Any:
    if place is None:
        return batch
    try:
        placed = place(batch)
    except StopIteration as error:  # would silently end the iteration
        raise DataError("sharding: StopIteration came up while a batch was placed") from error
    if placed is None:
        raise DataError("sharding: expected a batch, got None; return what the function makes")
    return placed


def can_resume(iterator: Any) -> bool:
    """Return whether an iterator has grain's protocol, `get_state` and `set_state`."""
    return hasattr(iterator, "get_state") and hasattr(iterator, "set_state")
