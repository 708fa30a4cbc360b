"""The signals of a run: SIGINT and SIGTERM stop it after its step and a save, SIGUSR1 saves.

A handler puts a request into the inbox, and the run acts on it between two steps. A second signal
to stop raises KeyboardInterrupt. The handler also raises where the run waits for a batch or an
evaluation: that may take long, and an interrupt there loses nothing.
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


@contextmanager
def handle_signals(inbox: Inbox) -> Iterator[None]:
    """Handle signals, and restore the previous handlers; a no-op outside the main thread."""
    pid, previous = os.getpid(), dict[signal.Signals, Any]()

    def restore_handlers() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def handle(number: int, _: FrameType | None) -> None:
        if os.getpid() != pid:  # a child that a hook forked inherits the handlers
            restore_handlers()
            signal.raise_signal(number)
        elif number == _SAVE_SIGNAL:
            inbox.notify(Request(Kind.SAVE))
        elif inbox.signal is not None:
            inbox.leaves_at_once = True
            raise KeyboardInterrupt
        else:
            inbox.signal = signal.Signals(number)
            inbox.notify(Request(Kind.SIGNAL, 0, inbox.signal))
            if inbox.is_waiting:
                raise WaitInterrupted

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous |= {number: signal.signal(number, handle) for number in _STOP_SIGNALS}
    # A handler that the program has for SIGUSR1 stays: schedulers and debuggers use it too.
    if _SAVE_SIGNAL and signal.getsignal(_SAVE_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN):
        previous[_SAVE_SIGNAL] = signal.signal(_SAVE_SIGNAL, handle)
    try:
        yield
    finally:
        restore_handlers()


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
