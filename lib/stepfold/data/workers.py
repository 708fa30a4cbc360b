"""Make batches in worker processes, with the same bits for any number of them.

What has random access is made from a position, which is all that a worker needs. A stream is read
here, and its examples are sent to the workers, which transform and batch them.
"""

import copy
import sys
import threading
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, Self

from stepfold import tree
from stepfold.core.validation import read_integer
from stepfold.data.dtypes import warn_of_wrapped
from stepfold.data.prefetch import DEFAULTS, Prefetch
from stepfold.data.stream import BatchIterator, StreamBatches, refuse_stop_iteration
from stepfold.data.worker_main import Failure, Reply
from stepfold.data.worker_pool import ATTEMPTS, WorkerPool, spell_status
from stepfold.errors import DataError, refuse

_MOST_AHEAD = 60  # each is a file descriptor, of which one message holds a limited number


def workers(batches: Any, count: int, *, ahead: int = 2) -> "Workers":
    """Make batches in other processes, in order, and ahead of the loop.

    For transforms that take long in Python, which a thread cannot speed up. The batches, their
    order and their positions do not depend on the number of processes: a run may resume with any
    other. An error is raised at the batch that caused it, as the exception of the worker, whose
    traceback is its cause. The next `next` then makes this batch again.

    The processes start with the first `next`, which takes about two seconds. They do not run the
    script, so it needs no `if __name__ == "__main__"`. They end with `close()` or the `with` block,
    when the iterator is garbage collected, and whenever this process ends, even if it is killed. If
    one dies, another makes its batches; a batch of which three die is an error.

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
    return Workers(_read_requests(batches), count, ahead)


def _read_requests(batches: Any) -> "_Positions | _Examples":
    got = tree.describe_value(batches)
    if hasattr(batches, "read_state"):
        expected = "batches that do not depend on the state of the run"
        advice = "their read_state would be called too late: do without workers"
        refuse("workers", expected, f"{got} with read_state", advice, kind=DataError)
    if isinstance(batches, StreamBatches):
        return _Examples(*batches.unbuilt())
    if isinstance(batches, Prefetch | Workers):
        advice = "give the batches themselves, as in sf.prefetch(sf.workers(batches, 2))"
        refuse("workers", "batches that this process makes", got, advice, kind=DataError)
    needed = ("__next__", "get_state", "set_state", "state_at")
    state = batches.get_state() if all(hasattr(batches, name) for name in needed) else None
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        advice = "give sf.batches, or read ahead with sf.prefetch"
        expected = "sf.batches, or an iterator with get_state, set_state and state_at"
        refuse("workers", expected, got, advice, kind=DataError)
    return _Positions(batches)


class Workers:
    """An iterator over batches of worker processes, returned by `workers`.

    It is thread-safe. It has the methods of its batches: `get_state`, `set_state` and `without`,
    and `at`, `state_at`, `shared` and `reweight` if they have them.

    >>> import numpy as np, stepfold as sf
    >>> stream = sf.workers(sf.batches(np.arange(6), 2, epochs=1), 0)
    >>> len(stream), next(stream), stream.get_state()["step"]
    (3, array([0, 1]), 1)
    """

    reuses_buffers = False

    def __init__(
        self,
        requests: "_Positions | _Examples",
        count: int,
        ahead: int,
        pool: WorkerPool | None = None,
    ) -> None:
        self._requests, self._count, self._ahead, self._pool = requests, count, ahead, pool
        self._position = requests.position()  # after the last batch returned
        self._pending: deque[_Pending] = deque()
        self._error: Exception | None = None  # of the stream, after the pending batches
        self._has_checked_values = False
        self._registry: dict[Any, Any] = {}  # of the warnings of workers that were shown
        self._lock = threading.RLock()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        with self._lock:
            self._request_ahead()
            if not self._pending:
                error, self._error = self._error, None
                raise error or StopIteration
            first = self._pending[0]
            if self._pool is None:
                batch = self._requests.make(first.request)
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
            self._pool = WorkerPool(self._requests.maker(), self._count, self._ahead)
        while len(self._pending) < max(1, self._count * self._ahead) and self._error is None:
            try:
                request, after = self._requests.pull()
            except StopIteration:
                break
            except Exception as error:  # noqa: BLE001  raised after the batches before
                self._error = error
            else:
                self._pending.append(_Pending(request, after))
        for pending in self._pending:
            if self._pool is not None and pending.ticket is None:
                pending.ticket = self._pool.submit(self._requests.message(pending.request))

    def _receive(self, pool: WorkerPool, pending: "_Pending") -> Any:
        try:
            reply = pool.receive(pending.ticket)
        except BaseException:  # such as KeyboardInterrupt in the middle of a message
            self._stop()
            raise
        pending.ticket = None  # after an error, the next call makes the batch again
        for message, category, filename, line in reply.warnings:
            warnings.warn_explicit(message, category, filename, line, registry=self._registry)
        if reply.kind == "end":
            self._rewind()
            raise StopIteration
        if reply.kind != "batch":
            _raise(reply, self._requests.step(pending.after) - 1)
        return reply.value

    def __len__(self) -> int:
        batches: Any = self._requests.batches
        return len(batches)

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        batches = self._requests.batches
        if name in DEFAULTS:
            return getattr(batches, name, DEFAULTS[name])
        if name in ("at", "state_at", "skipped", "batch_index"):
            return getattr(batches, name)
        if name in ("without", "shared", "reweight") and hasattr(batches, name):
            return getattr(self, f"_{name}")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def close(self) -> None:
        """End the processes. The position stays, and the next `next` starts others."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None
        for pending in self._pending:
            pending.ticket = None

    def _drop(self) -> None:
        """Drop the pending batches."""
        for pending in self._pending:
            if self._pool is not None and pending.ticket is not None:
                self._pool.discard(pending.ticket)
        self._pending.clear()
        self._error = None

    def get_state(self) -> Any:
        """Return the state of the batches after the last batch returned."""
        with self._lock:
            return self._requests.state(self._position)

    def set_state(self, state: Any) -> None:
        """Restore a state from `get_state`, of these batches with any number of workers."""
        with self._lock:
            self._requests.set_state(state)
            self._drop()
            self._position = self._requests.position()

    def _rewind(self) -> None:
        """Drop the pending batches, and return to the position of the loop."""
        if self._requests.position() != self._position:
            self._requests.set_state(self.get_state())
        self._drop()

    def _reweight(self, weights: Any, step: int | None = None) -> None:
        """Change the weights of a mixture, by default after the last batch returned."""
        with self._lock:
            self._rewind()
            batches: Any = self._requests.batches
            batches.reweight(weights, step)

    def _without(self, ranges: Sequence[tuple[int, int]]) -> "Workers":
        """Return batches that skip ranges of these, after the last batch returned."""
        return self._changed("without", ranges)

    def _shared(self, share: tuple[int, int, int]) -> "Workers":
        """Return batches with other rows, after the last batch returned."""
        return self._changed("shared", share)

    def _changed(self, method: str, argument: Any) -> "Workers":
        """Return changed batches, which take over the processes."""
        with self._lock:
            self._rewind()
            requests = self._requests.changed(method, argument)
            new = Workers(requests, self._count, self._ahead, self._pool)
            self._pool = None
            return new


class _Pending:
    """A pending batch: the request, the position after it, and the pool's ticket."""

    def __init__(self, request: Any, after: Any) -> None:
        self.request, self.after = request, after
        self.ticket: Any = None


class _Positions:
    """Requests for batches with random access. A request is a step, and a position is one too.

    `changes` are calls of `without` and `shared` since the processes got the batches.
    """

    def __init__(self, batches: Any, changes: tuple[tuple[str, Any], ...] = ()) -> None:
        self.batches, self._changes = batches, changes
        self._next: int = batches.get_state()["step"]

    def maker(self) -> "_StateMaker":
        """Return what makes a batch of a message, for another process."""
        self._changes = ()
        is_ours = isinstance(self.batches, BatchIterator)
        return _StateMaker(self.batches.copied() if is_ours else self.batches)

    def pull(self) -> tuple[int, int]:
        """Return the next request, and the position after its batch."""
        self._next += 1
        return self._next - 1, self._next

    def message(self, request: int) -> Any:
        """Return a request for another process."""
        return self._changes, self.batches.state_at(request)

    def make(self, request: int) -> Any:
        """Make the batch of a request in this process."""
        self.batches.set_state(self.batches.state_at(request))
        return next(self.batches)

    def position(self) -> int:
        """Return the position after the last request."""
        return self._next

    def step(self, position: int) -> int:
        """Return the number of batches before a position."""
        return position

    def state(self, position: int) -> Any:
        """Return the state of the batches at a position."""
        return self.batches.state_at(position)

    def set_state(self, state: Any) -> None:
        self.batches.set_state(state)
        self._next = self.batches.get_state()["step"]

    def changed(self, method: str, argument: Any) -> "_Positions":
        """Return the requests for changed batches."""
        batches = getattr(self.batches, method)(argument)
        return _Positions(batches, (*self._changes, (method, argument)))


class _StateMaker:
    """Make a batch of the changes to the batches, and a state."""

    def __init__(self, batches: Any) -> None:
        self._unchanged = self._batches = batches
        self._changes: tuple[tuple[str, Any], ...] = ()

    def __call__(self, message: Any) -> Any:
        changes, state = message
        if changes != self._changes:
            self._batches = self._unchanged
            for method, argument in changes:
                self._batches = getattr(self._batches, method)(argument)
            self._changes = changes
        self._batches.set_state(state)
        return next(self._batches)


class _Examples:
    """Requests for batches of a stream. A request is what was read, and a position is a state."""

    def __init__(self, batches: StreamBatches, builder: Any) -> None:
        self.batches, self._builder = batches, builder

    def maker(self) -> "_ExampleMaker":
        return _ExampleMaker(self._builder)

    def pull(self) -> tuple[Any, Any]:
        step: int = self.batches.get_state()["step"]
        return (step, next(self.batches)), self.batches.get_state()

    def message(self, request: Any) -> Any:
        return request

    def make(self, request: Any) -> Any:
        return _ExampleMaker(self._builder)(request)

    def position(self) -> Any:
        return self.batches.get_state()

    def step(self, position: Any) -> int:
        step: int = position["step"]
        return step

    def state(self, position: Any) -> Any:
        return copy.deepcopy(position)

    def set_state(self, state: Any) -> None:
        self.batches.set_state(state)

    def changed(self, method: str, argument: Any) -> "_Examples":
        return _Examples(getattr(self.batches, method)(argument), self._builder)


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
        expected = f"a process that makes the batch of step {step}"
        got = f"{ATTEMPTS} that died while they made it, the last by {spell_status(reply.value)}"
        advice = "debug it with count=0, or leave its index out with without([(index, index + 1)])"
        refuse("workers", expected, got, advice, kind=DataError)
    failure: Failure = reply.value
    cause = _WorkerTraceback(failure.traceback)
    if failure.used_jax:
        expected = f"only numpy and Python in the batch of step {step}"
        advice = "jax does not run in workers: return numpy arrays, or give count=0"
        refuse("workers", expected, "a use of jax", advice, kind=DataError, cause=cause)
    error = failure.load()
    if error is None:
        text = f"workers: making the batch of step {step} raised {failure.line}"
        raise DataError(text) from cause
    raise error from cause
