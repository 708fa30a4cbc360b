"""SIGINT and SIGTERM: asked to stop, a run finishes its step, saves, and says why it stopped."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax

from stepfold.checkpoint.agreement import worst_of

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _WaitingError(BaseException):
    """Break off waiting for a batch; never seen outside."""


class Signals:
    """Know whether the process was asked to stop, and break off what may wait for ever.

    Attributes:
      got: the signal that came, or None.
      twice: whether another came after it.
      alone: whether this process may stop by itself; several have to agree first.
    """

    def __init__(self) -> None:
        self.got: signal.Signals | None = None
        self.twice = False
        self.alone = jax.process_count() == 1
        self._waiting = False

    def agree(self) -> None:
        """Hear of a signal that any process got; each has to call it, at the same step."""
        number = worst_of(int(self.got or 0))
        self.got = signal.Signals(number) if number else None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Take the signals over, and put the handlers back; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.got is not None:  # asked twice: at once
            self.twice = True
            raise KeyboardInterrupt
        self.got = signal.Signals(number)
        if self._waiting:
            raise _WaitingError

    def wait_for(self, pull: Callable[[int], Any], step: int) -> list[Any] | None:
        """Pull a batch, in a list; None at the end, or where a signal breaks off the waiting."""
        try:
            self._waiting = self.alone
            batch = None if self.got is not None and self.alone else [pull(step)]
            self._waiting = False
        except (StopIteration, _WaitingError):
            return None
        finally:
            self._waiting = False
        return batch
