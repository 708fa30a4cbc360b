"""Make batches in worker processes, with the same bits for any number of them.

For batches with random access, a worker needs only a position. A stream is read in this process.
Its examples are sent to the workers, which transform and batch them.
"""

import copy
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, cast

from stepfold import tree
from stepfold.core.validation import read_integer
from stepfold.data.dtypes import warn_of_wrapped
from stepfold.data.prefetch import ReadAhead
from stepfold.data.stream import BatchIterator, StreamBatches, refuse_stop_iteration
from stepfold.data.worker_main import Failure, Reply
from stepfold.data.worker_pool import ATTEMPTS, BatchRequest, WorkerPool, spell_status
from stepfold.errors import DataError, refuse

_MOST_AHEAD = 60  # each is a file descriptor, of which one message holds a limited number


def workers(batches: Any, count: int, *, ahead: int = 2) -> "Workers":
    """Make batches in other processes, in order, and ahead of the loop.

    Use it for slow transforms in Python, which a thread cannot speed up. The batches, their order
    and their positions do not depend on the number of processes: a run may resume with any other.
    An error is raised at the batch that caused it, as the exception of the worker, whose traceback
    is its cause. The next `next` then makes this batch again.

    The processes start with the first `next`, which takes about two seconds. They do not run the
    script, so it needs no `if __name__ == "__main__"`. They end with `close()` or the `with` block,
    when the iterator is garbage collected, and whenever this process ends, even if it is killed. If
    one dies, another makes its batches; a batch that ends three processes is an error. A process
    that is forked from this one has its own position, and starts its own processes; arrays of
    batches from before the fork may change in it.

    Workers are for Python and numpy: jax does not run in them. Functions and classes that a script
    or a notebook defines, lambdas and closures are sent by cloudpickle, which
    `pip install 'stepfold[workers]'` installs. Numerical libraries use one thread in each worker.
    If their rounding depends on the number of threads, as that of large matrix products does, so
    do the bits with `count=0`.

    The source is copied into memory that all workers share, except arrays of `np.memmap` and
    datasets that pickle as references to their files. The examples of a stream are read in this
    process, and transformed in the workers.

    Args:
      batches: batches of `sf.batches`, or an iterator with `state_at(step)`, `get_state()` and
        `set_state()` whose state is a dict with a `step`. Do not use it elsewhere. The result has
        its methods.
      count: the number of processes. With 0, this process makes the batches when they are needed.
      ahead: the number of batches that each process makes in advance.

    Raises:
      ConfigError: if `count` or `ahead` is not an integer in range, or the system is neither Linux
        nor macOS. The first `next` raises it if cloudpickle is needed and not installed.
      DataError: if the batches have no random access and are no stream of `sf.batches`, or depend
        on the state of the run. The first `next` raises it if a process cannot load them.

    >>> import numpy as np, stepfold as sf
    >>> def make(count):
    ...     batches = sf.batches(np.arange(6), 2, seed=0, epochs=1, transform=lambda x: x * 10)
    ...     return sf.workers(batches, count)
    >>> with make(2) as stream:
    ...     first, saved = next(stream), stream.get_state()
    >>> resumed = make(0)
    >>> resumed.set_state(saved)
    >>> first, list(resumed)
    (array([30, 20]), [array([40, 10]), array([50,  0])])
    """
    count, ahead = read_integer("count", count, 0), read_integer("ahead", ahead, 1)
    if ahead > _MOST_AHEAD:
        expected = f"at most {_MOST_AHEAD} batches of each process"
        refuse("ahead", expected, f"{ahead}", "give a larger count instead")
    if count and sys.platform == "win32":
        refuse("workers", "Linux or macOS", sys.platform, "give count=0, or use sf.prefetch")
    return Workers(_read_messages(batches), count, ahead)


def _read_messages(batches: Any) -> "_States | _Examples":
    got = tree.describe_value(batches)
    if hasattr(batches, "read_state"):
        expected = "batches that do not depend on the state of the run"
        advice = "their read_state would be called too late: do without workers"
        refuse("workers", expected, f"{got} with read_state", advice, kind=DataError)
    if isinstance(batches, StreamBatches):
        return _Examples(*batches.unbuilt())
    if isinstance(batches, ReadAhead):
        advice = "give the batches themselves, as in sf.prefetch(sf.workers(batches, 2))"
        refuse("workers", "batches that this process makes", got, advice, kind=DataError)
    needed = ("__next__", "get_state", "set_state", "state_at")
    state = batches.get_state() if all(hasattr(batches, name) for name in needed) else None
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        advice = "give sf.batches, or read ahead with sf.prefetch"
        expected = "sf.batches, or an iterator with get_state, set_state and state_at"
        refuse("workers", expected, got, advice, kind=DataError)
    return _States(batches, batches, ())


class Workers(ReadAhead):
    """An iterator over batches of worker processes, returned by `workers`.

    It is thread-safe. It has the methods of its batches: `get_state`, `set_state` and `without`,
    and `at`, `state_at` and `reweight` if they have them.

    >>> import numpy as np, stepfold as sf
    >>> stream = sf.workers(sf.batches(np.arange(6), 2, epochs=1), 0)
    >>> len(stream), next(stream), stream.get_state()["step"]
    (3, array([0, 1]), 1)
    """

    def __init__(
        self,
        messages: "_States | _Examples",
        count: int,
        ahead: int,
        pool: WorkerPool | None = None,
    ) -> None:
        super().__init__(messages.batches, messages.batches)
        self._messages, self._count, self._ahead, self._pool = messages, count, ahead, pool
        if not count:  # otherwise, each batch has its own memory
            self.reuses_buffers = getattr(messages.batches, "reuses_buffers", True)
        self._make: _StateMaker | _ExampleMaker | None = None  # without processes
        self._position = messages.get_state()  # after the last batch returned
        self._pending: deque[_PendingBatch] = deque()
        self._error: Exception | None = None  # of the stream, after the pending batches
        self._has_checked_values = False
        self._registry: dict[Any, Any] = {}  # of the warnings of workers that were shown
        self._lock, self._process = threading.RLock(), os.getpid()

    @property
    def _locked(self) -> threading.RLock:
        """The lock of this process. A forked process makes its own, and drops the parent's pool."""
        if self._process != os.getpid():
            self._lock, self._process = threading.RLock(), os.getpid()  # a thread may hold the old
            self.close()
        return self._lock

    def __next__(self) -> Any:
        with self._locked:
            self._request_ahead()
            if not self._pending:
                error, self._error = self._error, None
                raise error or StopIteration
            first = self._pending[0]
            if self._pool is None:
                make = self._make = self._make or self._messages.maker()
                batch = make(first.message)
            else:
                batch = self._receive(self._pool, first)
            if not self._has_checked_values:
                self._has_checked_values = True
                warn_of_wrapped(batch)
            self._pending.popleft()
            self._position = first.after
            if self._pool is not None:  # the workers go on while the batch is used
                self._request_ahead()
            return batch

    def _request_ahead(self) -> None:
        """Ask for the next batches, and again for those whose processes have ended."""
        if self._count and self._pool is None:
            self._pool = WorkerPool(self._messages.maker(), self._count, self._ahead)
        while len(self._pending) < max(1, self._count * self._ahead) and self._error is None:
            try:
                message = next(self._messages)
            except StopIteration:
                break
            except Exception as error:  # noqa: BLE001  raised after the batches before
                self._error = error
            else:
                self._pending.append(_PendingBatch(message, self._messages.get_state()))
        for pending in self._pending:
            if self._pool is not None and pending.request is None:
                pending.request = self._pool.submit(pending.message)

    def _receive(self, pool: WorkerPool, pending: "_PendingBatch") -> Any:
        try:
            reply = pool.receive(cast(BatchRequest, pending.request))
        except BaseException:  # such as KeyboardInterrupt in the middle of a message
            self.close()
            raise
        pending.request = None  # after an error, the next call makes the batch again
        for message, category, filename, line in reply.warnings:
            warnings.warn_explicit(message, category, filename, line, registry=self._registry)
        if reply.kind == "end":
            self._rewind()
            raise StopIteration
        if reply.kind != "batch":
            _raise(reply, pending.after["step"] - 1)
        return reply.value

    def close(self) -> None:
        """End the processes. The position stays, and the next `next` starts others."""
        with self._locked:
            if self._pool is not None:
                self._pool.close()
            self._pool = None
            for pending in self._pending:
                pending.request = None

    def _drop(self) -> None:
        """Drop the pending batches."""
        for pending in self._pending:
            if pending.request is not None:
                pending.request.is_dropped = True
        self._pending.clear()
        self._error = None

    def get_state(self) -> Any:
        """Return the state of the batches after the last batch returned."""
        with self._locked:
            return copy.deepcopy(self._position)

    def set_state(self, state: Any) -> None:
        """Restore a state from `get_state`, of these batches with any number of workers."""
        with self._locked:
            self._messages.set_state(state)
            self._drop()
            self._position = self._messages.get_state()

    def _rewind(self) -> None:
        """Drop the pending batches, and return to the position of the loop."""
        if self._messages.get_state() != self._position:
            self._messages.set_state(self._position)
        self._drop()

    def _reweight(self, weights: Any, step: int | None = None) -> None:
        """Change the weights of a mixture, by default after the last batch returned."""
        with self._locked:
            self.set_state(self._position)
            self._iterator.reweight(weights, step)
            self._position = self._messages.get_state()

    def _without(self, ranges: Sequence[tuple[int, int]]) -> "Workers":
        """Return batches that skip ranges of these, after the last batch returned."""
        with self._locked:
            self._rewind()
            messages = self._messages.without(ranges)
            new = Workers(messages, self._count, self._ahead, self._pool)
            self._pool = None  # the new batches take over the processes
            return new


class _PendingBatch:
    """A pending batch: what a process makes it of, the state after it, and the pool's request."""

    def __init__(self, message: Any, after: dict[str, Any]) -> None:
        self.message, self.after = message, after
        self.request: BatchRequest | None = None


class _States:
    """An iterator over the states from which batches with random access are made.

    Each state comes with the skips: the arguments of the calls of `without` so far.
    """

    def __init__(self, batches: Any, unchanged: Any, skips: tuple[Any, ...]) -> None:
        self.batches, self._unchanged, self._skips = batches, unchanged, skips
        self._step: int = batches.get_state()["step"]

    def maker(self) -> "_StateMaker":
        """Return a function from a message to a batch."""
        batches = self._unchanged
        return _StateMaker(batches.copied() if isinstance(batches, BatchIterator) else batches)

    def __next__(self) -> Any:
        self._step += 1
        return self._skips, self.batches.state_at(self._step - 1)

    def get_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.batches.state_at(self._step)
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        self.batches.set_state(state)
        self._step = self.batches.get_state()["step"]

    def without(self, ranges: Sequence[tuple[int, int]]) -> "_States":
        """Return the states of batches that skip ranges of these."""
        self.batches.set_state(self.get_state())
        batches = self.batches.without(ranges)
        return _States(batches, self._unchanged, (*self._skips, ranges))


class _StateMaker:
    """Make a batch from the skips and a state."""

    def __init__(self, batches: Any) -> None:
        self._unchanged = self._batches = batches
        self._skips: tuple[Any, ...] = ()

    def __call__(self, message: Any) -> Any:
        skips, state = message
        if skips != self._skips:
            self._batches, self._skips = self._unchanged, skips
            for ranges in skips:
                self._batches = self._batches.without(ranges)
        self._batches.set_state(state)
        return next(self._batches)


class _Examples:
    """An iterator over the steps and the examples of batches of a stream."""

    def __init__(self, batches: StreamBatches, builder: Any) -> None:
        self.batches, self._builder = batches, builder
        self.get_state, self.set_state = batches.get_state, batches.set_state

    def maker(self) -> "_ExampleMaker":
        return _ExampleMaker(self._builder)

    def __next__(self) -> Any:
        return self.get_state()["step"], next(self.batches)

    def without(self, ranges: Sequence[tuple[int, int]]) -> "_Examples":
        return _Examples(self.batches.without(ranges), self._builder)


class _ExampleMaker(NamedTuple):
    """Make a batch from its step and the examples that were read for it."""

    builder: Any

    def __call__(self, message: Any) -> Any:
        step, arguments = message
        try:
            return self.builder.build(*arguments)
        except Exception as error:
            error.add_note(f"making the batch of step {step} of a stream")
            refuse_stop_iteration(error, step)
            raise


class _WorkerTraceback(Exception):  # noqa: N818  the cause of an error, and none itself
    """The traceback of an exception in a worker."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _raise(reply: Reply, step: int) -> NoReturn:
    """Raise what a worker raised, or say that the batch kills its workers."""
    if reply.kind == "died":
        raise DataError(
            f"workers: {ATTEMPTS} processes died while they made the batch of step {step}, the "
            f"last by {spell_status(reply.value)}; debug it with count=0, or leave its index out "
            "with without([(index, index + 1)])"
        )
    failure: Failure = reply.value
    cause = _WorkerTraceback(failure.traceback)
    if failure.used_jax:
        raise DataError(
            f"workers: the batch of step {step} uses jax, which does not run in workers; return "
            "numpy arrays, or give count=0"
        ) from cause
    error = failure.load()
    if error is None:
        text = f"workers: making the batch of step {step} raised {failure.line}"
        raise DataError(text) from cause
    raise error from cause
