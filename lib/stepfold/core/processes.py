"""Agreement between the processes of a run, through the service that started them.

Values travel through jax's coordination service instead of devices. Unlike a collective, this works
in any thread, and waits as long as `start_distributed(timeout=…)` says; gloo gives up after 30
seconds. It is for rare events: a call takes about a millisecond.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import jax

from stepfold.errors import CheckpointError, PeerTimeoutError
from stepfold.internals.jax import coordination_service

T = TypeVar("T")
DEFAULT_TIMEOUT, DEFAULT_PATIENCE = 300, 1800.0  # seconds
_LONGEST_TEXT = 1000  # characters of an error


@dataclass
class Position:
    """Progress counter: the others wait for the process with the lowest.

    Each call of `move` is between something that may take long in this process alone and something
    that waits for others.

    Attributes:
      moves: how many activities this process has started.
      step: the step that it is at.
      doing: the activity that it started last.
      has_run: whether it has done a step since its last restore, so that it is compiled.
      on_run: called after that step.
    """

    BATCH: ClassVar[str] = "its next batch"
    OTHERS: ClassVar[str] = "the wait for the batches of the others"
    DEVICES: ClassVar[str] = "the wait for its devices"
    RESTORE: ClassVar[str] = "a restore"

    moves: int = 0
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


class KeyValues:
    """JSON values by key, which all processes see; false if jax runs without its service."""

    def __init__(self, name: str) -> None:
        self._name = name
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
        """Return the values of all processes; each calls this equally often.

        Raises:
          PeerTimeoutError: if a process does not call it in time; it begins with `where`.
        """
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
                f"{where or self._name}: {spell_processes(late)} did not respond in {self.timeout} "
                f"s, while the others wait for {waiting_for}; see the log of each, or wait longer "
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

    @property
    def patience(self) -> float | None:
        """The longest patience that a process has given to `start_distributed`; None has no end."""
        values = KeyValues("start_distributed").get("patience").values()
        return None if None in values else max(values, default=DEFAULT_PATIENCE)

    def wait(self, is_over: Callable[[], bool], timeout: float | None = None) -> bool:
        """Poll until a condition holds; return False if it does not in time."""
        start, pause = time.monotonic(), 0.002
        while not is_over():
            if pause > 0.1 and time.monotonic() - start > (timeout or self.timeout):
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.5)  # hundreds of processes ask one server
        return True

    def _path(self, key: str) -> str:
        return f"stepfold/{self._name}/{key}"


def spell_processes(processes: Sequence[int]) -> str:
    """List processes for an error message."""
    named = ", ".join(map(str, processes[:8])) + (", …" if len(processes) > 8 else "")
    return f"process {named}" if len(processes) == 1 else f"processes {named}"


def broadcast_from_first(values: list[T]) -> list[T]:
    """Return the list of process 0, of JSON, on every process, all of which call this."""
    first: list[T] = KeyValues("agreement").gather(values, "an answer")[0]
    return first


@contextmanager
def agreement(message: str) -> Iterator[None]:
    """Raise on every process if the block raises on any of them; all of them enter it.

    The others raise a `CheckpointError` with this message, and with the error of the first process
    that failed. Otherwise they would wait for it in their next collective.
    """
    if jax.process_count() == 1:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001  raised below
        error = caught
    try:
        values = KeyValues("agreement")
        problems = values.gather(spell_error(error), "an answer", where=message)
    except PeerTimeoutError as timeout:
        raise error or timeout from None
    if error is not None:
        raise error
    for process, problem in enumerate(problems):
        if message in problem:
            raise CheckpointError(message)
        if problem:
            raise CheckpointError(f"{message}: process {process} raised {problem}")


def spell_error(error: BaseException | None) -> str:
    """Describe an error for other processes; none is empty."""
    return "" if error is None else f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]
