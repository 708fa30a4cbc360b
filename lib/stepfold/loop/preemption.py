"""SIGINT and SIGTERM: a run finishes its step and saves before it stops. SIGUSR1: it only saves.

Several processes stop and save at the same steps. Each votes with the signal that it received, the
reason of its hooks, whether one of them raised an error, and the number of its requests to save.
Votes are gathered on devices between two steps, and no process waits for them: they are dispatched
at one step, and read when the next ones are dispatched. jax's own `reached_preemption_sync_point`
receives only SIGTERM, replaces its handler, and needs a setting before jax starts.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stepfold.loop.hooks.base import Stop

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAVE_SIGNAL: signal.Signals | None = getattr(signal, "SIGUSR1", None)  # not on Windows
_VOTE_SECONDS = 0.25  # between votes
_EVENT_VOTE_SECONDS = 0.02  # the same, if hooks have seen an event since
_MAX_VOTE_STEPS = 256  # between votes, as steps may become slower
_FAILED = 2  # a vote: user code raised an error


class WaitInterrupted(BaseException):
    """Raised by a signal handler where the loop waits for data or an evaluation."""


class Preemption:
    """Signals to stop and requests to save: received by this process, and agreed on by all of them.

    A single process agrees at once. The loop acts only on agreed values, so that several processes
    do the same at each step.
    """

    def __init__(self) -> None:
        self.is_alone = jax.process_count() == 1  # several processes have to agree to stop
        self.received: signal.Signals | None = None
        self.agreed: signal.Signals | None = None
        self.agreed_stop: Stop | None = None  # another reason than a signal
        self.agreed_save = False  # until the loop has saved
        self.has_agreed = False  # on any of them; the one value that the loop reads in each step
        self.failed_process: int | None = None  # the first in which user code raised an error
        self.was_repeated = False  # a second signal, to exit at once
        self.is_waiting = False  # for data or an evaluation, which a signal may interrupt
        self._pid = os.getpid()
        self._previous: dict[signal.Signals, Any] = {}  # the handlers before these
        # What this process votes with.
        self.has_failed = False
        self._hook_stop: Stop | None = None
        self._save_requests = 0
        self._seen_requests: Any = 0  # of each process, in the last vote that was read
        self._has_event = False  # since the last vote
        self._gather: Gather | None = None
        self._votes: jax.Array | None = None  # dispatched, and not yet read
        self._voted_at = 0  # the step
        self._read_at: float | None = None
        self._step_seconds = 0.0  # as this process has measured it
        self._pace = 0.0  # the longest of all processes, 0 if unknown
        self._max_steps = 1  # between votes; grows until the pace is certain

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Install the handlers, and restore the previous ones; a no-op outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
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
            self.request_save()
            return
        if self.received is not None:
            self.was_repeated = True
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        if self.is_alone:
            self.agreed, self.has_agreed = self.received, True
        if self.is_waiting:
            raise WaitInterrupted

    def restart(self, step: int) -> None:
        """Forget votes and reasons of hooks, as the run goes back to a step."""
        self._votes = self._hook_stop = self.agreed_stop = None
        self._voted_at, self._has_event, self._read_at = step, False, None

    def add_event(self, stop: Stop | None) -> None:
        """Note an event, and the reason to stop that a hook of this process gave, to vote on it."""
        self._has_event = True
        self.request_stop(stop)

    def request_stop(self, stop: Stop | None) -> None:
        """Stop after this step or, with several processes, once they agree; for any thread."""
        self._hook_stop = self._hook_stop or stop
        if self.is_alone and stop is not None:
            self.agreed_stop = stop
            self.has_agreed = True  # last, since the loop clears it first

    def request_save(self) -> None:
        """Request a save, or vote for one; may be called in a thread or a signal handler."""
        self._save_requests += 1
        if self.is_alone:
            self.agreed_save = True
            self.has_agreed = True  # last, since the loop clears it first

    def vote(self, step: int) -> None:
        """Vote if it is time to, and then agree on what the votes before were.

        All processes vote at the same steps, because they derive them from the same votes. It is
        sooner after an event, because hooks may have a reason to stop then.
        """
        seconds = _EVENT_VOTE_SECONDS if self._has_event else _VOTE_SECONDS
        steps = step - self._voted_at
        if steps < min(seconds / self._pace if self._pace else 1, self._max_steps):
            return
        previous, self._votes = self._votes, self._dispatch()
        self._voted_at, self._has_event = step, False
        if previous is None:
            return
        self._read(previous)
        now = time.perf_counter()
        if self._read_at is not None:
            self._step_seconds = (now - self._read_at) / steps
        self._read_at, self._max_steps = now, min(2 * steps, _MAX_VOTE_STEPS)

    def agree(self, batches: int = 0) -> list[int]:
        """Vote, wait until all have agreed, and return the number of batches of each process."""
        if self.is_alone:
            return [batches]
        self._votes = None
        counts: list[int] = self._read(self._dispatch(batches))[:, 3].tolist()
        return counts

    def _dispatch(self, batches: int = 0) -> jax.Array:
        # A signal that is received from now on is part of the next vote.
        microseconds = min(int(self._step_seconds * 1e6), np.iinfo(np.int32).max)
        reason = _FAILED if self.has_failed else int(self._hook_stop is not None)
        vote = [int(self.received or 0), reason, microseconds, batches, self._save_requests]
        self._gather = self._gather or Gather()
        return self._gather(np.array(vote, np.int32))

    def _read(self, votes: jax.Array) -> np.ndarray:
        """Read the votes, agree on a save or a reason to stop; errors and signals come first."""
        rows = np.asarray(votes.addressable_data(0))
        self._pace = rows[:, 2].max() / 1e6
        if np.any(rows[:, 4] != self._seen_requests):  # a count, so that no vote has to be read
            self._seen_requests, self.agreed_save, self.has_agreed = rows[:, 4], True, True
        reason, number, first = rows[:, 1].max(), int(rows[:, 0].max()), int(np.argmax(rows[:, 1]))
        if reason == _FAILED:
            self.failed_process = first
            self.agreed_stop = Stop("error", f"process {first} raised an error")
        elif number:
            self.agreed = signal.Signals(number)
        elif reason:
            self.agreed_stop = self._hook_stop or Stop("hook", f"process {first} stopped")
        self.has_agreed = self.has_agreed or bool(reason or number)
        return rows


class Gather:
    """Gather a small row of each process in all of them, on one device of each."""

    def __init__(self) -> None:
        devices = {device.process_index: device for device in reversed(jax.devices())}
        mesh = Mesh(np.array([devices[process] for process in sorted(devices)]), ("process",))
        self._sharding = NamedSharding(mesh, PartitionSpec("process"))
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._copy = jax.jit(lambda rows: rows, out_shardings=everywhere)

    def __call__(self, row: np.ndarray) -> jax.Array:
        shape = (len(self._sharding.device_set), len(row))
        rows = jax.make_array_from_process_local_data(self._sharding, row[None], shape)
        gathered: jax.Array = self._copy(rows)
        return gathered
