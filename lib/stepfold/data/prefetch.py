"""Prefetch batches in a background thread, preserving their order and position."""

import atexit
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from stepfold import tree
from stepfold.core.validation import read_integer
from stepfold.errors import DataError, refuse, warn
from stepfold.internals.jax import enter_contexts, thread_contexts

Place = Callable[[Any], Any]

_JOIN_SECONDS = 0.5  # to wait for a stopped thread; one blocked in its source ends later
_NONE = object()

# The contexts of jax that change where a batch is and what it holds, compared at every `next`.
_PLACING = ("default_device", "enable_x64", "default_prng_impl")


def prefetch(batches: Any, *, sharding: Any = None, size: int = 2) -> "Prefetch":
    """Read batches in a background thread, and place them on devices.

    Prefetching hides the I/O latency of a source. Python code in a source still shares the
    interpreter with the loop, so run heavy transforms in other processes: pass `sf.workers(…)`, or
    `dataset.mp_prefetch(…)` of a grain `IterDataset`. In a plain script grain's processes start
    only after `absl.flags.FLAGS.mark_as_parsed()`.

    Prefetching changes neither the batches nor their order, and an error is raised at the batch
    that caused it. The next `next` then continues as that of `batches` does: `sf.batches` reads the
    same batch again, and a generator has ended. A saved position is that of the last batch
    returned; prefetched batches do not count. The thread starts with the first `next`. It stops
    after the last batch, an error, `close()` or the `with` block, when the iterator is garbage
    collected, and at exit. Batches of numpy arrays are copied, because their source may reuse its
    buffers while they wait; only those of `sf.batches`, without `collate` or with `sf.collate`,
    never share memory that is written again.

    The thread makes and places batches in the jax contexts of the first `next`, such as
    `jax.default_device`, `jax.enable_x64` and `jax.set_mesh`. A later `next` in others warns if the
    batches are jax's arrays.

    Args:
      batches: an iterable of batches. Do not use it elsewhere while it is prefetched. If it has
        `get_state()` and `set_state()`, as `sf.batches` and grain's iterators do, so does the
        result. The same holds for `without`.
      sharding: where to place batches: a sharding, a tree of shardings, or a function from a batch
        to a batch. For a mesh, pass `lambda batch: sf.shard_batch(batch, mesh)`; with several
        processes this is the only option. None does not place batches, which is as fast on one
        device.
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
    _check_batches(batches)
    return Prefetch(batches, iter(batches), place, size)


def _read_sharding(sharding: Any) -> Place | None:
    """Convert `sharding` to a function that places a batch."""
    if sharding is None:
        return None
    leaves = jax.tree.leaves(sharding)
    if leaves and all(isinstance(leaf, Sharding) for leaf in leaves):
        if not all(leaf.is_fully_addressable for leaf in leaves):
            # device_put would take the local rows for the global batch, and contact the other
            # processes.
            got = "one that spans other processes"
            advice = "give lambda batch: sf.shard_batch(batch, mesh)"
            refuse("sharding", "one over the devices of this process", got, advice)
        return lambda batch: jax.device_put(batch, sharding)
    if isinstance(sharding, Mesh) or not callable(sharding):  # a Mesh is callable
        expected = "a sharding, a tree of them, or a function of a batch"
        advice = "for a mesh give lambda batch: sf.shard_batch(batch, mesh)"
        refuse("sharding", expected, tree.describe_value(sharding), advice)
    return sharding  # type: ignore[no-any-return]


def _check_batches(batches: Any) -> None:
    if isinstance(batches, str | bytes):
        advice = "give batches of numbers, as sf.batches makes them"
    elif isinstance(batches, Mapping) or tree.is_array(batches):
        advice = "make batches of it with sf.batches, or put one batch in a list"
    elif hasattr(type(batches), "__iter__") or hasattr(type(batches), "__getitem__"):
        return
    elif callable(batches):
        advice = "give what the function returns"
    else:
        advice = "give a list of batches"
    got = tree.describe_value(batches)
    refuse("batches", "an iterable of batches", got, advice, kind=DataError)


DEFAULTS = {"endless": False, "steps_per_epoch": None, "epoch_ends": None, "batch_sizes": ()}
"""Attributes of batches, with their values if the batches lack them."""

_PASSED_ON = ("at", "state_at", "skipped", "batch_index", "count_rows")
_CHANGED = ("get_state", "set_state", "without", "reweight")


class ReadAhead:
    """Base class of iterators that read batches ahead, and have the attributes of the batches.

    Attributes in `_PASSED_ON` do not depend on how far the batches are read ahead. A subclass
    implements each method in `_CHANGED` with an underscore before its name; it exists if the
    batches have it. A subclass does not pass on what it `_lacks`.
    """

    reuses_buffers = False
    _lacks: tuple[str, ...] = ()

    def __init__(self, batches: Any, iterator: Any) -> None:
        self._batches, self._iterator = batches, iterator

    def __iter__(self) -> Self:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading ahead."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name in DEFAULTS:
            return getattr(self._batches, name, DEFAULTS[name])
        if name in _PASSED_ON and name not in self._lacks:
            return getattr(self._iterator, name)
        if name in _CHANGED and hasattr(self._iterator, name):
            return getattr(self, f"_{name}")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


class _CannotResumeError(DataError, AttributeError):
    """A DataError that is also an AttributeError, so that `hasattr` returns False."""


class Prefetch(ReadAhead):
    """An iterator over prefetched batches, returned by `prefetch`.

    It is thread-safe: each batch goes to one of the threads that iterate. It has `get_state`,
    `set_state`, `without` and `reweight` if the batches have them.

    >>> import stepfold as sf
    >>> stream = sf.prefetch([1, 2, 3], size=1)
    >>> list(stream), hasattr(stream, "get_state")
    ([1, 2, 3], False)
    """

    _lacks = ("at",)  # it would not be placed

    def __init__(self, batches: Any, iterator: Any, place: Place | None, size: int) -> None:
        super().__init__(batches, iterator)
        self._place, self._size = place, size
        self._lock, self._process = threading.Lock(), os.getpid()
        self._is_over = False
        self._state: bytes | None = None  # after the last batch returned; None if none was
        self._failed: Any = _NONE  # a batch that was read, and could not be placed
        self._reader: _ReaderThread | None = None
        self._placing: tuple[Any, ...] = ()  # the contexts of the thread that change its batches
        self._stop: Callable[[], object] = lambda: None

    def __next__(self) -> Any:
        if self._process != os.getpid():
            self._leave_parent()
        with self._lock:
            if self._is_over:
                raise StopIteration
            reader = self._reader
            if reader is None or reader.is_stopped:
                reader = self._start()
            item = reader.ready.get()
            if isinstance(item, _Item):
                if _read_placing() != self._placing:
                    self._warn_of_contexts(item.batch)
                self._state = item.state
                reader.free.put(None)
                return item.batch
            self._end()
            error, self._failed = item
            self._is_over = isinstance(error, StopIteration)  # else the next call tries again
            try:
                raise error
            finally:
                del item, error  # avoid a reference cycle: the traceback refers to this frame

    def _start(self) -> "_ReaderThread":
        if self._state is None:
            self._state = _copy_state(self._iterator)
        self._placing = _read_placing()
        reader = _ReaderThread(self._iterator, self._place, self._failed, self._size)
        self._failed, self._stop = _NONE, weakref.finalize(self, reader.stop)
        reader.start()
        self._reader = reader
        return reader

    def _leave_parent(self) -> None:
        """Continue from the same position in a forked process, which has no thread."""
        self._lock, self._process = threading.Lock(), os.getpid()  # a thread may hold the old
        if self._reader is None or self._reader.is_stopped or self._is_over:
            return
        if self._state is None or not hasattr(self._iterator, "set_state"):
            self._is_over = True
            expected = "batches with get_state() and set_state(), to continue in a forked process"
            got, advice = tree.describe_value(self._batches), "make the batches in that process"
            refuse("prefetch", expected, got, advice, kind=DataError)
        self._reader, self._failed = None, _NONE
        self._iterator.set_state(pickle.loads(self._state))

    def _warn_of_contexts(self, batch: Any) -> None:
        if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch)):
            return  # contexts do not change arrays of numpy
        names, now = (*_PLACING, "set_mesh"), _read_placing()
        pairs = [
            f"{name} was {before} and is {after}"
            for name, before, after in zip(names, self._placing, now, strict=True)
            if before != after
        ]
        self._placing = now  # warn once
        warn(
            "prefetch: batches are made in the jax contexts of the first next(), and these "
            f"changed since: {', '.join(pairs)}; call the first next() in the new ones",
        )

    def __getattr__(self, name: str) -> Any:
        if name in ("get_state", "set_state") and not hasattr(self._iterator, name):
            expected = "batches with get_state() and set_state(), to be resumed"
            got = tree.describe_value(self._batches)
            advice = "give sf.batches or an iterator of grain's"
            refuse("prefetch", expected, got, advice, kind=_CannotResumeError)
        return super().__getattr__(name)

    def close(self) -> None:
        """Stop the thread and drop prefetched batches; the iterator is then exhausted.

        The source is not closed. A thread blocked in its source ends when the source returns the
        next batch; `close` waits for it only briefly.
        """
        self._end()
        if self._reader is not None:
            self._reader.thread.join(_JOIN_SECONDS)

    def _end(self) -> None:
        self._is_over, self._failed = True, _NONE
        self._stop()

    def _get_state(self) -> Any:
        """Return the state of the source after the last batch returned.

        Before the first batch, this is the initial state. After the end, an error or `close()`, it
        is still the state after the last batch returned, so that a run can resume from there.
        """
        return self._iterator.get_state() if self._state is None else pickle.loads(self._state)

    def _set_state(self, state: Any) -> None:
        """Restore a state from `get_state`, of this iterator or its source.

        This also works after the end, an error or `close()`. It drops prefetched batches, and waits
        for a batch that is being read. If the source refuses the state, the position does not
        change; if a source that can only be read once cannot be rewound, the iterator is exhausted.
        """
        with self._lock:
            was_over = self._is_over
            self._end()
            if self._reader is not None:
                self._reader.thread.join()
            try:
                self._iterator.set_state(state)
            except BaseException:
                if self._state is not None:
                    self._iterator.set_state(pickle.loads(self._state))
                self._is_over = was_over
                raise
            self._is_over, self._state = False, None

    def _without(self, ranges: Any) -> "Prefetch":
        """Return prefetched batches that skip ranges of these, after the last batch returned."""
        self._rewind()
        return prefetch(self._iterator.without(ranges), sharding=self._place, size=self._size)

    def _reweight(self, weights: Any, step: int | None = None) -> None:
        """Change the weights of a mixture, by default after the last batch returned."""
        self._rewind()
        self._iterator.reweight(weights, step)

    def _rewind(self) -> None:
        """Stop the thread, and drop prefetched batches."""
        if self._reader is not None:
            self._set_state(self._get_state())


class _Item(NamedTuple):
    """A batch, and the state of the source right after it."""

    batch: Any
    state: bytes | None


class _Failure(NamedTuple):
    """The end of a thread, and the batch that it had read but could not prepare, or `_NONE`."""

    error: BaseException
    batch: Any


class _ReaderThread:
    """The thread that reads batches, and the queues that it shares with the iterator.

    It has no reference to the iterator. So an unused iterator is garbage collected, and its
    finalizer stops the thread. Ready batches and free slots are each a `SimpleQueue`. It is the
    fastest queue, and its `put` is reentrant: a finalizer may run in any thread at any time.
    """

    def __init__(self, iterator: Any, place: Place | None, batch: Any, size: int) -> None:
        self._iterator, self._place = iterator, place
        self._batch = batch  # the next to prepare if it was read already, else `_NONE`
        self.ready: SimpleQueue[_Item | _Failure] = SimpleQueue()  # ends with a failure
        self.free: SimpleQueue[None] = SimpleQueue()
        self.is_stopped = False
        for _ in range(size):
            self.free.put(None)
        # jax's contexts belong to a thread, so this one enters those of the loop.
        self._contexts = thread_contexts(), jax.sharding.get_mesh()
        # A daemon, so that a blocked source cannot prevent exit. But a thread inside JAX must not
        # outlive JAX, so `_leave` waits for it briefly. `_leave` runs before JAX shuts down,
        # because atexit calls the last registered function first.
        self.thread = threading.Thread(target=self._run, name="prefetch", daemon=True)

    def start(self) -> None:
        atexit.register(self._leave)
        self.thread.start()

    def stop(self) -> None:
        """Ask the thread to end, and wake both sides."""
        self.is_stopped = True
        self.free.put(None)
        self.ready.put(_Failure(StopIteration(), _NONE))

    def _leave(self) -> None:
        self.stop()
        self.thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        try:
            with enter_contexts(*self._contexts):
                self._fill()
        except BaseException as error:  # noqa: BLE001  raised by the iterator instead
            self.ready.put(_Failure(error, _NONE))
        finally:
            # They may hold arrays, which must not be freed after `_leave`.
            self._iterator = self._place = self._batch = None
            atexit.unregister(self._leave)

    def _fill(self) -> None:
        """Prepare a batch for each free slot, until stopped or the batches end."""
        # A source may write into its buffers again while its batches wait, and jax on CPU uses the
        # memory of numpy arrays without copying it.
        copies = getattr(self._iterator, "reuses_buffers", True)
        while True:
            self.free.get()
            if self.is_stopped:
                return
            if self._batch is _NONE:
                self._batch = next(self._iterator)
            try:
                state = _copy_state(self._iterator)
                copied = jax.tree.map(_copy_array, self._batch) if copies else self._batch
                item = _Item(copied if self._place is None else _place(self._place, copied), state)
            except BaseException as error:  # noqa: BLE001  raised by the iterator instead
                self.ready.put(_Failure(error, self._batch))
                return
            self.ready.put(item)
            self._batch = _NONE
            del copied, item  # free their memory while the source reads the next one


def _read_placing() -> tuple[Any, ...]:
    values = [getattr(jax.config, f"jax_{name}") for name in _PLACING]
    return (*values, jax.sharding.get_mesh())


def _copy_state(iterator: Any) -> bytes | None:
    """Copy the state of an iterator, if it has one, since it may mutate what it returned."""
    # Pickled, because deepcopy takes twenty times as long, and most states are never read.
    return pickle.dumps(iterator.get_state()) if hasattr(iterator, "get_state") else None


def _copy_array(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _place(place: Place, batch: Any) -> Any:
    try:
        placed = place(batch)
    except StopIteration as error:  # would silently end the iteration
        raise DataError("sharding: StopIteration was raised while a batch was placed") from error
    if placed is None:
        refuse("sharding", "a batch", "None", "return what the function makes", kind=DataError)
    return placed
