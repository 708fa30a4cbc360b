"""A thread that reads batches ahead, and the shelf that it puts them on."""

import atexit
import pickle
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

from stepfold.data.copying import Copying
from stepfold.errors import DataError

Place = Callable[[Any], Any]

PATIENCE = 0.5  # seconds; a thread whose source keeps it waiting for longer ends when it can
_NO_MORE = object()


class Item(NamedTuple):
    """A batch, and the state right after it of what it was taken from."""

    batch: Any
    state: bytes | int | None


class End(NamedTuple):
    """That nothing more comes, and the error if that is why."""

    error: BaseException | None


class Shelf:
    """What the thread shares with the iterator.

    The thread knows nothing else of the iterator, so that one that nobody uses any more is
    collected, and stops it. What is ready and what room there is are each a `SimpleQueue`: nothing
    is faster, and it may be used by a finalizer, which runs in any thread at any time.
    """

    def __init__(self, size: int) -> None:
        self.ready: SimpleQueue[Item | End] = SimpleQueue()
        self.room: SimpleQueue[None] = SimpleQueue()
        self.stopped = False
        for _ in range(size):
            self.room.put(None)

    def has_room(self) -> bool:
        """Wait for room; give False once there is no use for it."""
        self.room.get()
        return not self.stopped

    def stop(self) -> None:
        """Ask the thread to end, and wake whoever waits."""
        self.stopped = True
        self.room.put(None)
        self.ready.put(End(None))


def _read_ahead(shelf: Shelf, iterator: Any, place: Place | None, own: Copying) -> None:
    """Fill the shelf until it is stopped or there is no more; this is what the thread does."""
    try:
        while shelf.has_room():
            batch = next(iterator, _NO_MORE)
            if batch is _NO_MORE:
                break
            state = state_of(iterator)
            shelf.ready.put(Item(_placed(place, own(batch)), state))
            del batch  # or it would be held while the source waits for the next one
    except BaseException as error:  # noqa: BLE001  it is raised where the batch is asked for
        shelf.ready.put(End(error))
    else:
        shelf.ready.put(End(None))


def start_thread(
    shelf: Shelf, iterator: Any, place: Place | None, own: Copying
) -> threading.Thread:
    """Start the thread that fills a shelf with what an iterator gives.

    Args:
      shelf: what it puts batches on, until that is stopped.
      iterator: what it takes them from, and then asks for its state.
      place: a function of a batch, or None.
      own: what copies a batch where that has to be.
    """

    def run() -> None:
        try:
            _read_ahead(shelf, iterator, place, own)
        finally:
            atexit.unregister(leave)

    def leave() -> None:
        shelf.stop()
        thread.join(PATIENCE)

    # A daemon, so that no source can hold up the end of the program; but one that is inside jax
    # must not outlive it, so it is waited for, before jax ends, as that was registered earlier.
    thread = threading.Thread(target=run, name="prefetch", daemon=True)
    atexit.register(leave)
    thread.start()
    return thread


def state_of(iterator: Any) -> bytes | int | None:
    """Return a copy of an iterator's state for `load_state`, or None if it has none.

    Where batches are a function of the step, that is the step.
    """
    if hasattr(iterator, "state_at"):
        step: int = iterator.get_state()["step"]
        return step
    # A copy, since iterators may change the dict they gave; and as bytes, since deepcopy takes
    # twenty times as long, and most of these states are never asked for.
    return pickle.dumps(iterator.get_state()) if can_resume(iterator) else None


def load_state(iterator: Any, state: bytes | int) -> Any:
    """Return the state that `state_of` copied."""
    return iterator.state_at(state) if isinstance(state, int) else pickle.loads(state)


def _placed(place: Place | None, batch: Any) -> Any:
    if place is None:
        return batch
    try:
        placed = place(batch)
    except StopIteration as error:  # would end the iteration, as if all were well
        raise DataError("sharding: StopIteration came up while a batch was placed") from error
    if placed is None:
        raise DataError("sharding: expected a batch, got None; return what the function makes")
    return placed


def can_resume(iterator: Any) -> bool:
    """Tell whether an iterator has grain's protocol."""
    return hasattr(iterator, "get_state") and hasattr(iterator, "set_state")
