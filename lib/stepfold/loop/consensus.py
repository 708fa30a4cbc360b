"""Agreement of the processes of a run on what to do between two steps.

A single process acts on its requests at once. Several processes act on the same requests after the
same steps, which they agree on by votes. Each votes with the signal that it received, the highest
other request, and the number of its requests to save. Votes are gathered on devices between two
steps, and no process waits for them: they are dispatched after one step, and read when the next
ones are dispatched. jax's own `reached_preemption_sync_point` receives only SIGTERM, replaces its
handler, and needs a setting before jax starts.
"""

import signal
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from stepfold.core.processes import Group, KeyValues
from stepfold.loop.hooks.base import GoBack, Stop
from stepfold.loop.requests import Kind, Request, Requests
from stepfold.sharding.place import process_mesh

_VOTE_SECONDS = 0.25  # between votes
_EVENT_VOTE_SECONDS = 0.02  # the same, if hooks have seen an event since
_MAX_VOTE_STEPS = 256  # between votes, as steps may become slower


class Alone:
    """The consensus of a single process, which agrees to each request at once."""

    is_alone = True
    failed_process: int | None = None

    def __init__(self) -> None:
        self.requests = Requests()  # agreed on

    def ask(self, request: Request) -> None:
        """Make a request; safe in any thread and in signal handlers."""
        self.requests.add(request)

    def ask_to_end(self, reason: signal.Signals | Stop) -> None:
        """Request the end of the run, by a signal or for a reason that no hook gave."""
        kind = Kind.SIGNAL if isinstance(reason, signal.Signals) else Kind.STOP
        self.ask(Request(kind, 0, reason))

    def ask_to_save(self) -> None:
        """Request a save."""
        self.ask(Request(Kind.SAVE))

    def done(self, *kinds: Kind) -> None:
        """Remove requests that are done."""
        self.requests.done(*kinds)

    def note_event(self) -> None:
        """Agree sooner, since hooks have seen an event and may have made requests."""

    def poll(self, step: int) -> None:
        """Agree on requests if a vote is due; called between steps."""

    def settle(self, batches: int = 0) -> list[int]:
        """Agree now, and return the number of batches that each process has."""
        return [batches]

    def conclude(self) -> None:
        """Collect the requests of all processes, with their reasons, after the last step."""

    def restart(self, step: int) -> None:
        """Start over after a step, when the run resumes or goes back."""

    def regroup(self, group: Group, step: int) -> None:
        """Continue after a step with the processes that are left."""


class Several(Alone):
    """Several processes vote, and agree on the highest request of any of them."""

    is_alone = False

    def __init__(self, group: Group | None = None) -> None:
        super().__init__()
        self._group = group
        self.failed_process = None  # the first in which user code raised an error
        self._own = Requests()
        self._save_requests = 0
        self._seen_saves: Any = 0  # of each process, in the last vote that was read
        self._has_event = False  # since the last vote
        self._gather: Gather | None = None
        self._votes: jax.Array | None = None  # dispatched, and not yet read
        self._voted_at = 0  # the step
        self._read_at: float | None = None
        self._step_seconds = 0.0  # measured by this process
        self._pace = 0.0  # the longest of all processes, 0 if unknown
        self._max_steps = 1  # between votes; grows until the pace is certain

    def ask(self, request: Request) -> None:
        if request.kind is Kind.SAVE:
            self._save_requests += 1
        else:
            self._own.add(request)
        self._has_event = self._has_event or request.kind is not Kind.SIGNAL

    def done(self, *kinds: Kind) -> None:
        super().done(*kinds)
        self._own.done(*kinds)

    def note_event(self) -> None:
        self._has_event = True

    def poll(self, step: int) -> None:
        """Vote if a vote is due, and agree on what the previous votes asked for.

        All processes vote after the same steps, because they derive them from the same votes.
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

    def settle(self, batches: int = 0) -> list[int]:
        self._votes = None
        counts: list[int] = self._read(self._dispatch(batches))[:, 3].tolist()
        return counts

    def conclude(self) -> None:
        own = [[r.kind, r.step, _to_json(r.reason), r.by_hook] for r in self._own]
        gathered = KeyValues("fit", self._group).gather(own, "the end of its steps")
        # Votes hold only the kinds of requests. These have the reasons too, and replace them.
        self.requests.done(*(Kind(kind) for requests in gathered for kind, *_ in requests))
        for process, requests in enumerate(gathered):
            for kind, step, reason, by_hook in requests:
                if kind == Kind.ERROR and self.failed_process is None:
                    self.failed_process = process
                reason = _from_json(reason)
                if isinstance(reason, Stop) and process != jax.process_index():
                    message = f"process {process} stopped: {reason.message}"
                    reason = reason._replace(message=message)
                self.requests.add(Request(Kind(kind), step, reason, by_hook))

    def restart(self, step: int) -> None:
        self._votes, self._voted_at = None, step
        self._has_event, self._read_at = False, None
        self._own.set_state(None)

    def regroup(self, group: Group, step: int) -> None:
        """Vote again on what this process requested: some may have read a vote that others lack."""
        own = [request for request in self._own if request.kind is not Kind.END]
        if Kind.SAVE in self.requests:  # agreed on, and not done
            self.ask_to_save()
        self.restart(step)
        self.requests.done(*Kind)
        for request in own:
            self._own.add(request)
        seen: Any = np.zeros(len(group.processes), np.int32)
        if self._group is not None and np.ndim(self._seen_saves):
            left = [process in group.processes for process in self._group.processes]
            seen = self._seen_saves[left]
        self._seen_saves = np.min(group.meet(seen.tolist(), "the votes that were read"), axis=0)
        self._step_seconds, self._pace, self._max_steps = 0.0, 0.0, 1
        self._group, self._gather = group, None

    def _dispatch(self, batches: int = 0) -> jax.Array:
        # A signal that is received from now on is part of the next vote.
        microseconds = min(int(self._step_seconds * 1e6), np.iinfo(np.int32).max)
        own = self._own.get(Kind.SIGNAL)
        others = [request.kind for request in self._own if request.kind is not Kind.SIGNAL]
        number = 0 if own is None else own.reason
        vote = [number, max(others, default=0), microseconds, batches, self._save_requests]
        self._gather = self._gather or Gather(self._group)
        return self._gather(np.array(vote, np.int32))

    def _read(self, votes: jax.Array) -> np.ndarray:
        """Read votes, and agree on what they ask for."""
        rows = np.asarray(votes.addressable_data(0))
        self._pace = rows[:, 2].max() / 1e6
        if np.any(rows[:, 4] != self._seen_saves):  # counts, so that a dropped vote loses nothing
            self._seen_saves = rows[:, 4]
            self.requests.add(Request(Kind.SAVE))
        if number := int(rows[:, 0].max()):
            self.requests.add(Request(Kind.SIGNAL, 0, signal.Signals(number)))
        if kind := int(rows[:, 1].max()):
            process = int(np.argmax(rows[:, 1]))
            self._agree(Kind(kind), process)
        return rows

    def _agree(self, kind: Kind, process: int) -> None:
        """Agree on the highest kind of request; `conclude` collects the reasons."""
        own = self._own.get(kind)
        if kind is Kind.ERROR:
            self.failed_process = process if self.failed_process is None else self.failed_process
            reason: Any = Stop("error", f"process {process} raised an error")
        else:
            reason = own.reason if own else Stop("hook", f"process {process} stopped")
        self.requests.add(Request(kind, 0, reason, by_hook=own is None or own.by_hook))


def _to_json(reason: Any) -> Any:
    return int(reason) if isinstance(reason, signal.Signals) else reason and list(reason)


def _from_json(reason: Any) -> Any:
    if isinstance(reason, int):
        return signal.Signals(reason)
    if reason is None:
        return None
    if len(reason) == 2:
        return Stop(*reason)
    to, skip, why, limit = reason
    return GoBack(to, tuple(skip), why, limit)


class Gather:
    """Gather a small row from each process, or each of a group, on one device per process."""

    def __init__(self, group: Group | None = None) -> None:
        mesh = process_mesh(group)
        self._sharding = NamedSharding(mesh, PartitionSpec("process"))
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._copy = jax.jit(lambda rows: rows, out_shardings=everywhere)

    def __call__(self, row: np.ndarray) -> jax.Array:
        shape = (len(self._sharding.device_set), len(row))
        rows = jax.make_array_from_process_local_data(self._sharding, row[None], shape)
        gathered: jax.Array = self._copy(rows)
        return gathered
