"""SIGINT and SIGTERM: a run finishes its step and saves before it stops."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import jax
import numpy as np
from jax.experimental import multihost_utils

from stepfold.loop.hooks.base import Stop

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class WaitInterrupted(BaseException):
    """Raised by a signal handler where the loop waits for data or an evaluation."""


class Preemption:
    """Whether the process was signalled to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.was_repeated = False  # a second signal, to exit at once
        self.is_alone = jax.process_count() == 1  # several processes have to agree to stop
        self.is_waiting = False  # for data or an evaluation, which a signal may interrupt

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Install the handlers, and restore the previous ones; a no-op outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            self.was_repeated = True
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        if self.is_waiting:
            raise WaitInterrupted

    def agree(self, stop: Stop | None) -> Stop | None:
        """Agree on a reason to stop, at the same step in all processes; signals come first."""
        mine = np.array([int(self.signal or 0), int(stop is not None)], np.int32)
        votes = np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, 2)
        number = int(votes[:, 0].max())
        self.signal = signal.Signals(number) if number else None
        if self.signal is not None:
            return Stop("signal", self.signal.name)
        if stop is None and votes[:, 1].any():
            return Stop("hook", f"process {int(np.argmax(votes[:, 1]))} stopped")
        return stop
