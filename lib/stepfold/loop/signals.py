"""The signals of a run: SIGINT and SIGTERM stop it after its step and a save, SIGUSR1 saves.

A handler only notes a request, on which the run acts between two steps. It raises where the run
waits for a batch or an evaluation, since that may take long, and nothing is lost.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from stepfold.checkpoint.series import Series
from stepfold.loop.inbox import Inbox, WaitInterrupted
from stepfold.loop.run import Kind, Request, Run

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAVE_SIGNAL: signal.Signals | None = getattr(signal, "SIGUSR1", None)  # not on Windows


class Signals:
    """Note the signals of a run, in its inbox; a second one to stop raises KeyboardInterrupt."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox, self._pid = inbox, os.getpid()
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
        inbox = self._inbox
        if number == _SAVE_SIGNAL:
            inbox.notify(Request(Kind.SAVE))
            return
        if inbox.signal is not None:
            inbox.leaves_at_once = True
            raise KeyboardInterrupt
        inbox.signal = signal.Signals(number)
        inbox.notify(Request(Kind.SIGNAL, 0, inbox.signal))
        if inbox.is_waiting:
            raise WaitInterrupted


def print_waiting(inbox: Inbox, series: Series) -> None:
    """After a second signal, print that a save in progress delays the exit."""
    saving = series.saving
    if inbox.leaves_at_once and saving is not None:
        with suppress(OSError, ValueError):  # the other end of a pipe may be gone
            print(  # noqa: T201  a person interrupted twice, and sees nothing happen
                f"waiting for the checkpoint of step {saving}, which is being written",
                file=sys.stderr,
                flush=True,
            )


def raise_signal(inbox: Inbox, run: Run, result: Any) -> None:
    """Raise the exception for a signal, with the result attached."""
    # One that came after the last vote is raised too, now that everything is saved.
    agreed = run.requests.get(Kind.SIGNAL)
    number = inbox.signal if agreed is None else agreed.reason
    if number is None:
        return
    error: Any = SystemExit(128 + number)
    if number == signal.SIGINT:
        error = KeyboardInterrupt(
            f"{result.stop_reason}; the trained state is in this exception: in a notebook or "
            "console, type: import sys; result = sys.last_value.result"
        )
    error.result = result
    raise error
