"""Requests to act on between two steps, in a fixed order, and the signals that make some of them.

Hooks, signals, the lock of the run directory and other processes make requests. The highest one
that is due is acted on, and a request is removed only once it is done.

At SIGINT and SIGTERM, a run finishes its step and saves before it stops. At SIGUSR1 it only saves.
"""

import enum
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from stepfold.errors import refuse
from stepfold.loop.hooks.base import GoBack, Stop

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAVE_SIGNAL: signal.Signals | None = getattr(signal, "SIGUSR1", None)  # not on Windows


class Kind(enum.IntEnum):
    """Kinds of requests; a higher one comes first."""

    SAVE = 1
    GO_BACK = 2
    STOP = 3  # for a reason that a hook or the lock gave
    SIGNAL = 4
    END = 5  # all steps are done, or the batches ended
    CORRUPTION = 6  # of the state, or another run may own the directory: nothing is saved
    ERROR = 7  # user code raised one, in some process


class Request(NamedTuple):
    """Something to do after `step`, or as soon as possible if that has passed.

    Requests of hooks belong to the state of the run. A checkpoint keeps a reason to stop until the
    run has stopped for it. Going back drops what hooks requested after the checkpoint.
    """

    kind: Kind
    step: int = 0
    reason: Any = None  # a Stop, or a GoBack
    by_hook: bool = False


class Requests:
    """The requests that wait to be done, the first of each kind."""

    def __init__(self) -> None:
        self.pending: dict[Kind, Request] = {}  # by kind

    def __bool__(self) -> bool:
        return bool(self.pending)

    def __contains__(self, kind: Kind) -> bool:
        return kind in self.pending

    def __iter__(self) -> Iterator[Request]:
        return iter([*self.pending.values()])

    def get(self, kind: Kind) -> Request | None:
        return self.pending.get(kind)

    def add(self, request: Request) -> None:
        """Add a request; a single dict operation, for threads and signal handlers."""
        self.pending.setdefault(request.kind, request)

    def due(self, step: int) -> Request | None:
        """Return the highest request that is due after a step."""
        due = (request for request in self if request.step <= step)
        return max(due, key=lambda request: request.kind, default=None)

    def done(self, *kinds: Kind) -> None:
        for kind in kinds:
            self.pending.pop(kind, None)

    def set_state(self, saved: Any) -> None:
        """Replace the requests of hooks by the one in a checkpoint, if it has one."""
        self.done(Kind.END, *(request.kind for request in self if request.by_hook))
        if saved is not None:
            step, kind, message = saved
            if type(step) is not int:
                refuse("stop", "a step", repr(step), kind=TypeError)
            self.add(Request(Kind.STOP, step, Stop(str(kind), str(message)), by_hook=True))


def of_hook(reason: Stop | GoBack, step: int, stops_at: int) -> Request:
    """Make a request of what a hook returned at `step`; a plain reason stops at `stops_at`."""
    if isinstance(reason, GoBack):
        return Request(Kind.GO_BACK, step, reason, by_hook=True)
    if reason.kind == "corrupt":
        return Request(Kind.CORRUPTION, step, reason, by_hook=True)
    return Request(Kind.STOP, stops_at, reason, by_hook=True)


class WaitInterrupted(BaseException):
    """Raised by a signal handler where the loop waits for data or an evaluation."""


class Signals:
    """Handle the signals of a run.

    `stop` is called with the first signal to stop; a second one raises KeyboardInterrupt at once.
    `save` is called at each SIGUSR1.
    """

    def __init__(self, stop: Callable[[signal.Signals], None], save: Callable[[], None]) -> None:
        self._stop, self._save = stop, save
        self.received: signal.Signals | None = None
        self.was_repeated = False  # by a second signal, to exit at once
        self.is_waiting = False  # for data or an evaluation, which a signal may interrupt
        self._pid = os.getpid()
        self._previous: dict[signal.Signals, Any] = {}  # the handlers to restore

    @contextmanager
    def handle(self) -> Iterator[None]:
        """Install the handlers, and restore the previous ones; a no-op outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._previous = {number: signal.signal(number, self._handle) for number in _STOP_SIGNALS}
        # A handler that the program has for SIGUSR1 stays: schedulers and debuggers use it too.
        if _SAVE_SIGNAL and signal.getsignal(_SAVE_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN):
            self._previous[_SAVE_SIGNAL] = signal.signal(_SAVE_SIGNAL, self._handle)
        try:
            yield
        finally:
            self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a child that a hook forked inherits the handlers
            self._restore_handlers()
            signal.raise_signal(number)
            return
        if number == _SAVE_SIGNAL:
            self._save()
            return
        if self.received is not None:
            self.was_repeated = True
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        self._stop(self.received)
        if self.is_waiting:
            raise WaitInterrupted
