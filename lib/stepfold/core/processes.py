"""Agreement between the processes of a run, through the service that started them.

Values travel through jax's coordination service instead of devices. Unlike a collective, this works
in any thread, and waits as long as `start_distributed(timeout=…)` says; gloo gives up after 30
seconds. It is for rare events: a call takes about a millisecond.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import jax

from stepfold.errors import CheckpointError, PeerTimeoutError, refuse
from stepfold.internals.jax import coordination_service, live_processes

T = TypeVar("T")
DEFAULT_TIMEOUT = 300  # seconds
_WATCH_SECONDS = 3.0
_LONGEST_TEXT = 1000  # characters of an error


class Disbanded(BaseException):
    """Raised in every member of a group at once when one died or left.

    Attributes:
      dead: the processes that died.
      reason: if none died, why a process left.
    """

    def __init__(self, dead: Collection[int], reason: str = "") -> None:
        super().__init__(f"{spell_processes(sorted(dead))} died" if dead else reason)
        self.dead, self.reason = frozenset(dead), reason


@dataclass
class Position:
    """Progress counter: the others wait for the process with the lowest.

    Each call of `move` is between something that may take long in this process alone and something
    that waits for others.

    Attributes:
      meetings: the meetings entered.
      moves: what was begun since the last of them.
      waits: results of devices that were waited for, which shows that they still compute.
      step: the step that it is at.
      doing: what was begun last.
      has_run: whether it has done a step with the present devices, so that it is compiled.
      on_run: called after that step.
    """

    BATCH: ClassVar[str] = "its next batch"
    OTHERS: ClassVar[str] = "the wait for the batches of the others"
    DEVICES: ClassVar[str] = "the wait for its devices"
    RESTORE: ClassVar[str] = "a restore"

    meetings: int = 0
    moves: int = 0
    waits: int = 0
    step: int = 0
    doing: str = "the start"
    has_run: bool = False
    on_run: Callable[[], None] | None = None

    def move(self, doing: str, step: int) -> None:
        """Begin something."""
        self.doing, self.step = doing, step
        self.moves += 1
        is_first = doing == self.DEVICES and not self.has_run
        self.has_run = doing == self.DEVICES or (self.has_run and doing != self.RESTORE)
        if is_first and self.on_run is not None:
            self.on_run()

    def reach(self, doing: str) -> None:
        """Begin something, once."""
        if self.doing != doing:
            self.move(doing, self.step)

    def enter(self, meeting: str) -> None:
        """Enter a meeting."""
        self.doing, self.moves = meeting, 0
        self.meetings += 1

    def wait(self) -> None:
        """Count a result that was waited for."""
        self.waits += 1


@dataclass(frozen=True)
class Group:
    """Processes of an elastic run that meet. A run that is not elastic has none.

    A meeting returns in all processes of the group, or raises `Disbanded` in all of them, if one
    has died or left since the previous meeting. All calls that agree on something take the group.
    They then are meetings, so none waits for a dead process longer than its heartbeat. After a
    death the others form another group.

    Attributes:
      processes: their indices.
      starts: for each, the number that jax's service gave it when it started. A process that was
        started again in place of one that died has another.
      position: how far this process is, counted since the group began.
    """

    processes: tuple[int, ...]
    starts: tuple[int, ...] = ()
    position: Position = field(default_factory=Position, compare=False, repr=False)

    @classmethod
    def of_live(cls) -> "Group":
        """Return the group of the processes of the job that are alive; all of them call it."""
        starts = sorted(live_processes(range(jax.process_count())).items())
        return cls(tuple(process for process, _ in starts), tuple(start for _, start in starts))

    @property
    def name(self) -> str:
        """A name that no group of other processes has."""
        return "-".join(map(str, self.processes))

    @property
    def rank(self) -> int:
        """The position of this process among those of the group."""
        return self.processes.index(jax.process_index())

    @property
    def devices(self) -> list[jax.Device]:
        """The devices of its processes."""
        return [device for device in jax.devices() if device.process_index in self.processes]

    def only(self, processes: Collection[int]) -> "Group":
        """Return the group of some of its processes."""
        pairs = zip(self.processes, self.starts, strict=True)
        kept = [pair for pair in pairs if pair[0] in processes]
        kept_processes, kept_starts = zip(*kept, strict=True)
        return Group(kept_processes, kept_starts, Position(on_run=self.position.on_run))

    def meet(self, value: Any = None, about: str = "") -> list[Any]:
        """Return the values of all processes, which meet about the same.

        Raises:
          Disbanded: if a process has died or left since the previous meeting.
        """
        self.position.enter(f"a meeting about {about}")
        return self._exchange(value, about)

    def poll(self, is_over: bool, about: str) -> bool:
        """Meet, and return whether something is over in all; only its end counts as progress."""
        if is_over:
            self.position.reach(f"{about} of the others")
        return all(self._exchange(is_over, about))

    def _exchange(self, value: Any, about: str) -> list[Any]:
        met = self._meet([about, value])
        for process in self.processes:
            kind, reason = met.get(process, (_LEFT, "nothing, and has ended"))
            if kind == _LEFT:
                raise Disbanded((), f"process {process} raised {reason}")
        if len({kind for kind, _ in met.values()}) > 1:
            where = {process: kind for process, (kind, _) in met.items()}
            refuse("processes", "all to do the same", f"{where}", kind=CheckpointError)
        return [met[process][1] for process in self.processes]

    def leave(self, error: BaseException) -> frozenset[int]:
        """End the group, and return the processes that have died; empty if none has."""
        if isinstance(error, Disbanded):  # all have left at that meeting
            return error.dead
        self.position.enter("its end after an error")
        try:
            met = self._meet([_LEFT, f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]])
        except Disbanded as disbanded:
            return disbanded.dead
        for process, (kind, reason) in met.items():  # an error of one fails collectives of all
            if kind == _LEFT and process != jax.process_index():
                error.add_note(f"process {process} raised {reason}")
        return frozenset()

    def _meet(self, message: list[Any]) -> dict[int, Any]:
        if len(self.processes) == 1:
            return {self.processes[0]: message}
        values, me = KeyValues("meeting", self), jax.process_index()
        call = values.count_call()
        values.set(f"{call}/{me}", message)
        starts = live_processes(self.processes)
        pairs = zip(self.processes, self.starts, strict=True)
        if dead := {process for process, start in pairs if starts.get(process) != start}:
            raise Disbanded(dead)
        met = {int(process): met for process, met in values.get(str(call)).items()}
        values.delete(f"{call - 1}/{me}")  # all have read it, since they are here
        return met


_LEFT = "left"


def processes_of(group: Group | None) -> Sequence[int]:
    """Return the processes of a group, or all of the job."""
    return range(jax.process_count()) if group is None else group.processes


def rank_in(group: Group | None) -> tuple[int, int]:
    """Return the position of this process in a group, or in all of the job, and their number."""
    processes = processes_of(group)
    return processes.index(jax.process_index()), len(processes)


class KeyValues:
    """JSON values by key, which all processes see; false if jax runs without its service.

    A group has its own values.
    """

    def __init__(self, name: str, group: Group | None = None) -> None:
        self._name, self._group = name, group
        self.service = coordination_service()

    def __bool__(self) -> bool:
        return self.service is not None

    def set(self, key: str, value: Any) -> None:
        """Set the value of a key."""
        self.service.key_value_set(self._path(key), json.dumps(value), allow_overwrite=True)

    def get(self, folder: str) -> dict[str, Any]:
        """Return all values whose keys are in a folder, without it."""
        prefix = self._path(f"{folder}/")
        pairs = self.service.key_value_dir_get(prefix)
        return {path.removeprefix(prefix): json.loads(value) for path, value in pairs}

    def delete(self, key: str) -> None:
        """Delete a key, if it is there."""
        self.service.key_value_delete(self._path(key))

    def count_call(self) -> int:
        """Return the number of calls by this process, including this one."""
        path = self._path(f"calls/{jax.process_index()}")
        return int(self.service.key_value_increment(path, 1))

    def gather(self, value: Any, waiting_for: str, *, where: str = "") -> list[Any]:
        """Return the values of all processes, or of the group; each calls this equally often.

        Raises:
          PeerTimeoutError: if a process does not call it in time; it begins with `where`.
        """
        if self._group is not None:
            return self._group.meet(value, f"{self._name}: {waiting_for}")
        if not self or jax.process_count() == 1:
            return [value]
        call, me, processes = self.count_call(), jax.process_index(), range(jax.process_count())
        values: dict[int, Any] = {}
        self.set(f"{call}/{me}", value)

        def are_all_there() -> bool:
            values.update({int(key): value for key, value in self.get(str(call)).items()})
            return len(values) == len(processes)

        if not self.wait(are_all_there):
            late = sorted(set(processes) - set(values))
            raise PeerTimeoutError(
                f"{where or self._name}: expected {waiting_for} from every process, got none from "
                f"{spell_processes(late)} in {self.timeout} s; see what that does, or wait longer "
                "with start_distributed(timeout=…)",
                late,
            )
        # All have returned from the call before this one, so its value is no longer needed.
        self.delete(f"{call - 1}/{me}")
        return [values[process] for process in sorted(values)]

    @property
    def timeout(self) -> int:
        """The longest timeout that a process has given to `start_distributed`."""
        timeouts = KeyValues("start_distributed").get("timeout")
        return max(timeouts.values(), default=DEFAULT_TIMEOUT)

    def wait(self, is_over: Callable[[], bool]) -> bool:
        """Poll until a condition holds; return False if it does not in time."""
        start, pause = time.monotonic(), 0.002
        while not is_over():
            if pause > 0.1 and time.monotonic() - start > self.timeout:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.5)  # hundreds of processes ask one server
        return True

    def _path(self, key: str) -> str:
        group = "" if self._group is None else f"{self._group.name}/"
        return f"stepfold/{self._name}/{group}{key}"


def spell_processes(processes: Sequence[int]) -> str:
    """List processes for an error message."""
    named = ", ".join(map(str, processes[:8])) + (", …" if len(processes) > 8 else "")
    return f"process {named}" if len(processes) == 1 else f"processes {named}"


def max_over_processes(value: int, group: Group | None = None) -> int:
    """Return the maximum over all processes, all of which call this."""
    return int(max(KeyValues("agreement", group).gather(value, "an answer")))


def broadcast_from_first(values: list[T], group: Group | None = None) -> list[T]:
    """Return the list of process 0, of JSON, on every process, all of which call this."""
    first: list[T] = KeyValues("agreement", group).gather(values, "an answer")[0]
    return first


@contextmanager
def agreement(message: str, group: Group | None = None) -> Iterator[None]:
    """Raise on every process if the block raises on any of them; all of them enter it.

    The others raise a `CheckpointError` with this message, and with the error of the first process
    that failed. Otherwise they would wait for it in their next collective.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001  raised below
        error = caught
    try:
        values = KeyValues("agreement", group)
        problems = values.gather(_spell_error(error), "an answer", where=message)
    except PeerTimeoutError as timeout:
        raise error or timeout from None
    if error is not None:
        raise error
    for process, problem in zip(processes_of(group), problems, strict=True):
        if message in problem:
            raise CheckpointError(message)
        if problem:
            raise CheckpointError(f"{message}: process {process} raised {problem}")


@contextmanager
def report_failed_peer() -> Iterator[None]:
    """Print the error of another process that raised one inside the block.

    This process then waits for it in a collective, until jax terminates all of them.
    """
    errors = KeyValues("failed")
    if not errors or jax.process_count() == 1:
        yield
        return
    block, is_over = str(errors.count_call()), threading.Event()

    def watch() -> None:
        while not is_over.wait(_WATCH_SECONDS):
            for process, error in errors.get(block).items():
                print(  # noqa: T201  the main thread may never come back
                    f"stepfold: process {process} raised {error}; this process waits for it until "
                    "jax terminates all, see start_distributed(shutdown=…)",
                    file=sys.stderr,
                    flush=True,
                )
                return

    threading.Thread(target=watch, name="stepfold-peers", daemon=True).start()
    try:
        yield
    except Exception as error:
        errors.set(f"{block}/{jax.process_index()}", _spell_error(error))
        raise
    finally:
        is_over.set()


def _spell_error(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]
