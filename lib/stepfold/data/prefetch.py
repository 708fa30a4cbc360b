"""Batches read ahead of the step, in a thread, with their order and their position kept."""

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
from jax.sharding import Mesh, Sharding

from stepfold import tree
from stepfold.data.copying import Copying
from stepfold.data.integers import read_integer
from stepfold.data.shelf import (
    PATIENCE,
    Item,
    Place,
    Shelf,
    can_resume,
    load_state,
    start_thread,
    state_of,
)
from stepfold.errors import ConfigError, DataError


def prefetch(batches: Any, *, sharding: Any = None, size: int = 2) -> "Prefetch":
    """Read batches ahead in a thread, and place them, while the step before runs.

    It hides the time that a source waits, for a disk or a network. What a source computes in Python
    takes turns with the loop instead: heavy transforms belong in worker processes, which are
    grain's part. Give `dataset.mp_prefetch(…)` of its `IterDataset`; in a plain script the
    processes start only after `absl.flags.FLAGS.mark_as_parsed()`.

    Batches are the same and in the same order, an error comes where it would have come, and a saved
    position is that of the last batch that was given, whatever has been read ahead. The thread
    begins when the first batch is asked for, and ends with the last batch, an error, `close()`, a
    `with` block, the iterator itself, or the program. A source may fill one buffer again and again:
    the first batches are copied, and where they share memory, all that follow are.

    Args:
      batches: any iterable of batches, which is left alone while it is read. One with `get_state()`
        and `set_state()`, as `sf.batches` and grain's iterators, can be resumed as before.
      sharding: where batches go: a sharding, a tree of them, or a function from a batch to a batch.
        For a mesh that is `lambda batch: sf.shard_batch(batch, mesh)`, which with several processes
        is the only way, and asks the others about every new number of rows: as the loop is waiting
        when it does so for the first, give it batches of one size. None leaves batches as they are,
        which on one device is as fast.
      size: how many batches may wait to be used.

    Raises:
      ConfigError: if `size` is no integer above 0, or `sharding` is not as described.
      DataError: if there is nothing to take batches from.

    >>> import jax, numpy as np, stepfold as sf
    >>> def make():
    ...     return sf.prefetch(sf.batches(np.arange(6), 2, epochs=1), sharding=jax.device_put)
    >>> with make() as stream:
    ...     first, saved = next(stream), stream.get_state()
    >>> first, len(stream), saved["step"]
    (Array([0, 1], dtype=int32), 3, 1)
    >>> resumed = make()
    >>> resumed.set_state(saved)
    >>> [batch.tolist() for batch in resumed]
    [[2, 3], [4, 5]]
    """
    size = read_integer("size", size, 1)
    place = _read_sharding(sharding)
    advice = _no_batches(batches)
    if advice:
        raise DataError(
            f"batches: expected an iterable of batches, got {tree.spell(batches)}; {advice}"
        )
    iterator = iter(batches)
    return (_Resumable if can_resume(iterator) else Prefetch)(batches, iterator, place, size)


def _no_batches(batches: Any) -> str | None:
    """Say what to do with something that is no iterable of batches, or None if it is one."""
    if isinstance(batches, str | bytes):
        return "give batches of numbers, as sf.batches makes them"
    if isinstance(batches, Mapping) or tree.is_array(batches):
        return "make batches of it with sf.batches, or put one batch in a list"
    if hasattr(type(batches), "__iter__") or hasattr(type(batches), "__getitem__"):
        return None
    return "give what the function returns" if callable(batches) else "give a list of batches"


def _read_sharding(sharding: Any) -> Place | None:
    """Make a function from a batch to a batch of what says where batches go."""
    if sharding is None:
        return None
    leaves = jax.tree.leaves(sharding)
    if leaves and all(isinstance(leaf, Sharding) for leaf in leaves):
        if not all(leaf.is_fully_addressable for leaf in leaves):
            # device_put would take the rows that are here for all there are, and ask the others.
            raise ConfigError(
                "sharding: expected one over the devices of this process, got one over others' "
                "too; give a function that knows the rows here for a part of the batch: "
                "lambda batch: sf.shard_batch(batch, mesh)"
            )
        return lambda batch: jax.device_put(batch, sharding)
    if isinstance(sharding, Mesh) or not callable(sharding):  # a mesh can be called: it decorates
        raise ConfigError(
            "sharding: expected a sharding, a tree of them, or a function of a batch, got "
            f"{tree.spell(sharding)}; for a mesh give lambda batch: sf.shard_batch(batch, mesh)"
        )
    return sharding  # type: ignore[no-any-return]


class _CannotResumeError(DataError, AttributeError):
    """Say so in words, and no to `hasattr`, by which loops ask whether batches can be resumed."""


class Prefetch:
    """An iterator over batches that are read ahead; `prefetch` makes it.

    Several threads may take from it, and each batch goes to one of them.

    >>> import stepfold as sf
    >>> stream = sf.prefetch([1, 2, 3], size=1)
    >>> list(stream), hasattr(stream, "get_state")
    ([1, 2, 3], False)
    """

    def __init__(self, batches: Any, iterator: Any, place: Place | None, size: int) -> None:
        self._batches, self._iterator, self._place, self._size = batches, iterator, place, size
        self._taking = threading.Lock()
        self._over = False
        self._state: bytes | int | None = (
            None  # after the last batch given; None before the thread is
        )
        self._thread: threading.Thread | None = None
        self._shelf: Shelf | None = None
        self._stop: Callable[[], object] = lambda: None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        with self._taking:
            if self._over:
                raise StopIteration
            shelf = self._shelf or self._start()
            item = shelf.ready.get()
            if isinstance(item, Item):
                self._state = item.state
                shelf.room.put(None)
                return item.batch
            self._end()
            error = StopIteration() if item.error is None else item.error
            try:
                raise error
            finally:
                del item, error  # the error's traceback holds this frame

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def endless(self) -> bool:
        """Whether the batches are known to have no end."""
        return bool(getattr(self._batches, "endless", False))

    @property
    def steps_per_epoch(self) -> int | None:
        """The steps of an epoch, or None where the batches do not tell."""
        return getattr(self._batches, "steps_per_epoch", None)

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name == "state_at":  # where batches are a function of the step
            return getattr(self._iterator, name)
        if name in ("get_state", "set_state"):
            raise _CannotResumeError(
                f"prefetch: expected batches with get_state() and set_state(), to be resumed, got "
                f"{tree.spell(self._batches)}; give sf.batches or an iterator of grain's"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def close(self) -> None:
        """End the thread, and drop what has been read ahead: there is no next batch.

        What it reads from is not closed. A thread that waits for its source ends when that gives
        the next batch, and is not waited for.
        """
        self._end()
        self._wait(PATIENCE)

    def _start(self) -> Shelf:
        shelf = Shelf(self._size)
        self._state = state_of(self._iterator)
        own = Copying(few=self._size + 2)  # one more is being read, and one is in use
        self._thread = start_thread(shelf, self._iterator, self._place, own)
        self._stop = weakref.finalize(self, shelf.stop)
        self._shelf = shelf
        if self._over:  # closed by another thread, just now
            self._end()
        return shelf

    def _wait(self, timeout: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    def _end(self) -> None:
        self._over, self._shelf = True, None
        self._stop()


class _Resumable(Prefetch):
    """One over batches that can be resumed, by the same protocol."""

    def get_state(self) -> Any:
        """Give the state that what it reads from had after the last batch that was given.

        Before the first batch that is where it began. After the last one, an error or `close()` it
        is still that of the last batch, so that a run can go on there.
        """
        if self._state is None:
            return self._iterator.get_state()
        return load_state(self._iterator, self._state)

    def set_state(self, state: Any) -> None:
        """Go to a position that `get_state` gave, also after the last batch, an error or `close()`.

        What has been read ahead is dropped, and the batch that is just being read is waited for. If
        the state is refused, the position stays what it was; or, if what it reads from can only be
        read once, and cannot be put back, there is no next batch.

        Args:
          state: what `get_state` gave, here or of what this reads from.
        """
        with self._taking:
            over = self._over
            self._end()
            self._wait()
            try:
                self._iterator.set_state(state)
            except BaseException:
                if self._state is not None:
                    self._iterator.set_state(load_state(self._iterator, self._state))
                self._over = over
                raise
            self._over, self._state = False, None
