"""End all processes of a run if one fails or is stuck.

An exception in one process leaves the others in a collective that no exception can end. So that
process publishes its error. The others print it, and end by a timer unless they leave within
seconds. Before that they join jax's shutdown, for which the failed process waits at its exit.

A process that is stuck in a batch, a hook or a file system still sends heartbeats, so the others
wait for it forever, in a collective. Each process therefore publishes its `Position`. If no
position has changed for some time, those that are behind are stuck: all processes count the same
events in the same order, and whoever waits for another has counted more than it.

A process that is stuck dumps the stacks of its threads and exits, by the timer of `faulthandler`.
Each process restarts its own timer until it is found to be stuck. The timer needs no GIL, so it
also ends a process in which a library holds the GIL. The others wait in a collective that no
exception can end, so they print the stacks of the stuck process and end by their own timers.

Positions are ignored before a process has done its first step, since that compiles. They are also
ignored if all are equal while the processes evaluate, save or call hooks, which may take long.
"""

import faulthandler
import math
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import jax

from stepfold.core.processes import KeyValues, Position, spell_error
from stepfold.errors import PeerTimeoutError
from stepfold.hooks.stop import Watchdog
from stepfold.loop.hook import Sink
from stepfold.loop.inbox import Inbox

_IN_STEPS = (Position.BATCH, Position.OTHERS, Position.DEVICES)
_HEARTBEAT = 100  # seconds, jax's default
_FOUND_SECONDS = 3.0  # the most between two looks whether one has failed or is stuck
_LEAVE_SECONDS = 3.0  # to leave by an exception after another process has failed
_SHUTDOWN_SECONDS = 10.0  # to wait for that process at jax's shutdown
_STACK_SECONDS = 0.1  # between two looks for its stacks
_SHOW_SECONDS = 20.0  # the most to wait for them
_LONGEST_STACKS = 100_000  # characters


class Seen(NamedTuple):
    """A position as other processes see it."""

    moves: int
    step: int
    doing: str
    has_run: bool
    host: str


def find_stuck(seen: Mapping[int, Seen]) -> list[int]:
    """Return the processes that the others wait for, all of them if none is ahead.

    The list is empty if there may be a good reason for them to take long.
    """
    first = min(each.moves for each in seen.values())
    behind = [process for process, each in seen.items() if each.moves == first]
    if not all(seen[process].has_run for process in behind):
        return []
    in_steps = all(seen[p].doing in _IN_STEPS for p in behind)
    return behind if len(behind) < len(seen) or in_steps else []


@contextmanager
def end_with_others(
    inbox: Inbox, sinks: Sequence[Sink], moved: Mapping[str, Any]
) -> Iterator[None]:
    """Watch the processes of a run, and end this one if another has failed, or one is stuck.

    `moved` may have the patience, as an argument of `fit` in version 0.2.
    """
    values = KeyValues("stuck")
    if inbox.position is None or not values:
        yield
        return
    patience = moved.get("patience", values.patience)
    has_timer = any(isinstance(sink, Watchdog) for sink in sinks)
    watch = _Watch(inbox.position, patience, owns_timer=not has_timer)
    try:
        yield
    except BaseException as error:
        watch.leave(error, is_known=inbox.leave_together)
        raise
    finally:
        watch.close()


class _Watch:
    """Publishes the position of this process, reads those of all, and finds out who is stuck.

    It then ends all processes, each with the stacks of those that are stuck in its log. Without
    patience, it only finds out who has failed.
    """

    def __init__(self, position: Position, patience: float | None, *, owns_timer: bool) -> None:
        self._position, self._has_patience = position, patience is not None
        self._patience = math.inf if patience is None else patience
        self._owns_timer = owns_timer and self._has_patience
        self._values = KeyValues("stuck")
        self._folder = f"{self._values.count_call()}/"  # of this call of `fit`
        heartbeats = KeyValues("start_distributed").get("heartbeat")
        # Before that, jax finds a dead process, and the collectives that it fails time out.
        self._limit = max(heartbeats.values(), default=_HEARTBEAT) + self._patience
        self._host, self._me = socket.gethostname(), jax.process_index()
        self._is_over, self._is_ending = threading.Event(), False
        self._published: list[Any] = []
        self._seen: dict[int, Seen] = {}
        self._moved_at = time.monotonic()
        # At once, since a library may hold the GIL before the threads see that it has run a step.
        position.on_run = self._start if self._has_patience else None
        # Reading positions may block, which must not keep the other from restarting the timer.
        self._threads = [
            threading.Thread(target=target, name="stepfold-patience", daemon=True)
            for target in (self._read, *([self._restart_timer] if self._owns_timer else []))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(_FOUND_SECONDS)
        if self._owns_timer and not self._is_ending:  # then jax may wait for the others at the exit
            faulthandler.cancel_dump_traceback_later()

    def leave(self, error: BaseException, *, is_known: bool) -> None:
        """Tell the others of an error, unless they know it; print why if one of them is stuck."""
        self._is_over.set()  # this one ends by its exception
        with suppress(RuntimeError):  # the service has ended
            for process in error.processes if isinstance(error, PeerTimeoutError) else ():
                at = self._seen.get(process)
                self._note(process, "late" if at is None else _spell(at))
            if found := self._found_by_any():
                self._show(found)
            elif not is_known:
                self._values.set(f"{self._folder}failed/{self._me}", spell_error(error))

    def _start(self) -> None:
        self._publish()
        if self._owns_timer:
            self._end_after(self._limit + self._patience)

    def _restart_timer(self) -> None:
        """Restart the timer until this process is stuck; a library that holds the GIL ends it."""
        while not self._is_over.wait(self._patience / 10) and not self._is_ending:
            if self._position.has_run:
                # A little later than the others find it, so that they can name it.
                self._end_after(self._limit + self._patience)
            else:
                faulthandler.cancel_dump_traceback_later()

    def _end_after(self, seconds: float) -> None:
        """End this process by a timer, with code 1, unless it ends before."""
        file = sys.__stderr__ or sys.stderr
        faulthandler.dump_traceback_later(seconds, exit=True, file=file)

    def _publish(self) -> None:
        at = self._position
        own = [at.moves, at.step, at.doing, at.has_run, self._host]
        if own != self._published:
            self._values.set(f"{self._folder}positions/{self._me}", own)
            self._published = own

    def _read(self) -> None:
        """Look at what the others say, until one has failed, or has found that one is stuck."""
        pause, read_at = min(self._patience / 10, _FOUND_SECONDS), -math.inf
        while not self._is_over.wait(pause):
            if found := self._found_by_any():
                self._end_all(found)
                return
            if failed := self._values.get(f"{self._folder}failed"):
                self._end_after_error(failed)
                return
            if self._has_patience and time.monotonic() - read_at >= self._patience / 10:
                read_at = time.monotonic()
                self._look()

    def _look(self) -> None:
        """Publish the own position, and read all."""
        self._publish()
        positions = self._values.get(f"{self._folder}positions")
        if len(positions) == jax.process_count():
            self._judge({int(process): Seen(*each) for process, each in positions.items()})

    def _judge(self, seen: dict[int, Seen]) -> None:
        """Find out who is stuck, if there was no progress for long enough."""
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._moved_at = seen, now
        seconds = now - self._moved_at
        if seconds >= self._limit:
            for process in find_stuck(seen):
                text = f"{_spell(seen[process])}, without progress for {seconds:.0f} s"
                self._note(process, text)

    def _note(self, process: int, text: str) -> None:
        """Let all processes know that one is stuck."""
        self._values.set(f"{self._folder}found/{process}", text)

    def _found_by_any(self) -> dict[int, str]:
        found = self._values.get(f"{self._folder}found")
        return {int(process): text for process, text in sorted(found.items())}

    def _end_all(self, found: Mapping[int, str]) -> None:
        self._is_ending = True
        if self._me in found:
            self._values.set(f"{self._folder}stacks/{self._me}", _dump_stacks())
        self._show(found)
        # The first that ends fails the collectives of the others, and process 0 answers them.
        others, until = {str(process) for process in range(jax.process_count())}, self._deadline()
        while others - {*self._values.get(f"{self._folder}shown")} and time.monotonic() < until:
            time.sleep(_STACK_SECONDS)
        self._end()

    def _end_after_error(self, failed: Mapping[str, str]) -> None:
        """End this process if it does not leave by itself, since it waits for one that failed."""
        if self._is_over.wait(_LEAVE_SECONDS):
            return
        for process, error in failed.items():
            at = f"in {self._position.doing} at step {self._position.step}"
            self._say(f"process {process} raised {error}; this process ends too, {at}")
        self._end()

    def _end(self) -> None:
        """End this process with code 1, once all are at jax's shutdown, or after some seconds.

        jax aborts those that are not there when another one ends, and when process 0 does, which
        has its service.
        """
        self._is_ending = True  # so that nothing restarts or cancels the timer
        self._end_after(_SHUTDOWN_SECONDS + (_LEAVE_SECONDS if self._me == 0 else 0))
        with suppress(Exception):
            jax.distributed.shutdown()
        self._end_after(_STACK_SECONDS)

    def _show(self, found: Mapping[int, str]) -> None:
        for process, text in found.items():
            self._say(
                f"process {process} is {text}; all end, as start_distributed(patience=…) says"
            )
        self._print_stacks([process for process in found if process != self._me])
        self._values.set(f"{self._folder}shown/{self._me}", True)

    def _print_stacks(self, processes: Sequence[int]) -> None:
        """Print the stacks of stuck processes, once they have them; one may hold the GIL."""
        left, until = {str(process) for process in processes}, self._deadline()
        while left and time.monotonic() < until:
            for process, stacks in self._values.get(f"{self._folder}stacks").items():
                if process in left:
                    left.remove(process)
                    self._say(f"the stacks of process {process}:\n{stacks}")
            time.sleep(_STACK_SECONDS)
        for process in sorted(left):
            self._say(f"process {process} gives no stacks; its own log has them once it ends")

    def _say(self, text: str) -> None:
        print(f"stepfold: {text}", file=sys.stderr, flush=True)  # noqa: T201  the main thread may hang

    def _deadline(self) -> float:
        return time.monotonic() + min(self._patience, _SHOW_SECONDS)


def _spell(at: Seen) -> str:
    return f"stuck on {at.host}, last seen at step {at.step} in {at.doing}"


def _dump_stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()[-_LONGEST_STACKS:]
