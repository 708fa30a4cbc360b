"""Prefetch batches in a background thread, preserving their order and position."""

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
    """Read batches in a background thread and place them on devices while the current step runs.

    Prefetching hides the I/O latency of a source. Python code in a source still shares the
    interpreter with the loop, so run heavy transforms in worker processes: pass
    `dataset.mp_prefetch(…)` of a grain `IterDataset`. In a plain script these processes start only
    after `absl.flags.FLAGS.mark_as_parsed()`.

    Prefetching changes neither the batches nor their order, and an error is raised at the batch
    that caused it. A saved position is that of the last batch returned; prefetched batches do not
    count. The thread starts with the first `next`. It stops after the last batch, an error,
    `close()` or the `with` block, when the iterator is garbage collected, and at exit. A source may
    reuse its buffers: the first batches are copied, and if they share memory, all later ones too.

    Args:
      batches: an iterable of batches. Do not use it elsewhere while it is prefetched. If it has
        `get_state()` and `set_state()`, as `sf.batches` and grain's iterators do, so does the
        result.
      sharding: where to place batches: a sharding, a tree of shardings, or a function from a batch
        to a batch. For a mesh, pass `lambda batch: sf.shard_batch(batch, mesh)`; with several
        processes this is the only option. `shard_batch` communicates with the other processes for
        every new number of rows. The loop is waiting when it does so for the first batch, so use
        batches of one size. None does not place batches, which is as fast on one device.
      size: the number of batches to buffer.

    Raises:
      ConfigError: if `size` is not a positive integer, or `sharding` is invalid.
      DataError: if `batches` is not an iterable of batches.

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
    """Return advice for an error if `batches` is not an iterable of batches, otherwise None."""
    if isinstance(batches, str | bytes):
        return "give batches of numbers, as sf.batches makes them"
    if isinstance(batches, Mapping) or tree.is_array(batches):
        return "make batches of it with sf.batches, or put one batch in a list"
    if hasattr(type(batches), "__iter__") or hasattr(type(batches), "__getitem__"):
        return None
    return "give what the function returns" if callable(batches) else "give a list of batches"


def _read_sharding(sharding: Any) -> Place | None:
    """Convert `sharding` to a function that places a batch."""
    if sharding is None:
        return None
    leaves = jax.tree.leaves(sharding)
    if leaves and all(isinstance(leaf, Sharding) for leaf in leaves):
        if not all(leaf.is_fully_addressable for leaf in leaves):
            # device_put would take the local rows for the global batch, and contact the other
            # processes.
            raise ConfigError(
                "sharding: expected one over the devices of this process, got one over others' "
                "too; give a function that knows the rows here for a part of the batch: "
                "lambda batch: sf.shard_batch(batch, mesh)"
            )
        return lambda batch: jax.device_put(batch, sharding)
    if isinstance(sharding, Mesh) or not callable(sharding):  # a Mesh is callable
        raise ConfigError(
            "sharding: expected a sharding, a tree of them, or a function of a batch, got "
            f"{tree.spell(sharding)}; for a mesh give lambda batch: sf.shard_batch(batch, mesh)"
        )
    return sharding  # type: ignore[no-any-return]


class _CannotResumeError(DataError, AttributeError):
    """A DataError that is also an AttributeError, so that `hasattr` returns False."""


class Prefetch:
    """An iterator over prefetched batches, returned by `prefetch`.

    It is thread-safe: each batch goes to one of the threads that iterate.

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
            None  # after the last batch returned; None before the thread starts
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
                del item, error  # avoid a reference cycle: the traceback refers to this frame

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def endless(self) -> bool:
        """Whether the batches are known to be infinite."""
        return bool(getattr(self._batches, "endless", False))

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of steps per epoch, or None if unknown."""
        return getattr(self._batches, "steps_per_epoch", None)

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name == "state_at":  # only of batches that are a function of the step
            return getattr(self._iterator, name)
        if name in ("get_state", "set_state"):
            raise _CannotResumeError(
                f"prefetch: expected batches with get_state() and set_state(), to be resumed, got "
                f"{tree.spell(self._batches)}; give sf.batches or an iterator of grain's"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def close(self) -> None:
        """Stop the thread and drop prefetched batches; the iterator is then exhausted.

        The source is not closed. A thread blocked in its source ends when the source returns the
        next batch; `close` waits for it only briefly.
        """
        self._end()
        self._wait(PATIENCE)

    def _start(self) -> Shelf:
        shelf = Shelf(self._size)
        self._state = state_of(self._iterator)
        own = Copying(few=self._size + 2)  # plus one being read and one in use
        self._thread = start_thread(shelf, self._iterator, self._place, own)
        self._stop = weakref.finalize(self, shelf.stop)
        self._shelf = shelf
        if self._over:  # another thread called close() in the meantime
            self._end()
        return shelf

    def _wait(self, timeout: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    def _end(self) -> None:
        self._over, self._shelf = True, None
        self._stop()


class _Resumable(Prefetch):
    """A `Prefetch` of resumable batches, resumable by the same protocol."""

    def get_state(self) -> Any:
        """Return the state of the source after the last batch returned.

        Before the first batch, this is the initial state. After the end, an error or `close()`, it
        is still the state after the last batch returned, so that a run can resume from there.
        """
        if self._state is None:
            return self._iterator.get_state()
        return load_state(self._iterator, self._state)

    def set_state(self, state: Any) -> None:
        """Restore a state from `get_state`, of this iterator or its source.

        This also works after the end, an error or `close()`. It drops prefetched batches, and waits
        for a batch that is being read. If the source refuses the state, the position does not
        change; if a source that can only be read once cannot be rewound, the iterator is exhausted.
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
