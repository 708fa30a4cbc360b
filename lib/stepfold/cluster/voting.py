"""Votes of several processes, so that all act on the same requests after the same steps.

A single process (`loop/inbox.py`) acts on its requests at once. Of several, each votes with the
signal that it received, its highest other request, and the number of its requests to save. Votes
are gathered on devices between two steps. No process waits for them: they are dispatched after one
step, and read when the next ones are dispatched.

jax's own `reached_preemption_sync_point` receives only SIGTERM, replaces its handler, and needs a
setting before jax starts.
"""

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import jax
import numpy as np

from stepfold.core.processes import (
    KeyValues,
    Position,
    agreement,
    spell_error,
    spell_processes,
)
from stepfold.errors import DataError, StepfoldError, refuse, warn
from stepfold.loop.evaluate import Gather
from stepfold.loop.events import Event, GoBack, HookRequest, Replace, Reweight, Stop
from stepfold.loop.feed import BatchFeed
from stepfold.loop.hook import Hooks, States
from stepfold.loop.inbox import NO_VALUE, Inbox
from stepfold.loop.run import Kind, Request, Requests, Run

_VOTE_SECONDS = 0.25  # between votes
_VISIT_VOTE_SECONDS = 0.02  # the same, after a visit
_MAX_VOTE_STEPS = 256  # between votes, as steps may become slower
_FAILED = "hooks: failed"  # the message if a process raised while all agree on a replacement
# The fields of a run that events change, besides `closed`.
_SEEN = (
    *("epoch_ended_at", "logged_step", "logged_metrics", "evaluated", "history", "hook_states"),
)


class _Pace(NamedTuple):
    """When this process voted last, and how fast steps are."""

    voted_at: int = 0  # the step
    read_at: float | None = None
    step_seconds: float = 0.0  # measured by this process
    longest: float = 0.0  # of all processes, 0 if unknown
    max_steps: float = 1  # between votes; grows until the pace is certain


class Voting(Inbox):
    """The inbox of several processes, which act on the highest request of any of them."""

    is_alone = False
    position: Position

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None  # of a hook; raised once all have stopped and saved
        self.position = Position()
        self._inbox = deque[Request]()  # of this process, for its next vote
        self._own = Requests()
        self._save_requests = 0
        self._seen_saves: Any = 0  # of each process, in the last vote that was read
        self._has_visited = False  # since the last vote
        self._seen: Run | None = None  # by hooks, once one of them has raised an error
        self._gather: Gather | None = None
        self._votes: jax.Array | None = None  # dispatched, and not yet read
        self._pace = _Pace()
        # Vote on each pull if a process may have fewer batches.
        self._votes_on_batches = False

    def notify(self, request: Request) -> None:
        self._inbox.append(request)

    def begin_fold(self, feed: BatchFeed, run: Run) -> None:
        self._votes, self._has_visited = None, False
        self._pace = self._pace._replace(voted_at=run.step, read_at=None)
        left, total = feed.batches_left(run.batches_used), run.total
        if left is not None and total is not None:
            left = min(left, max(0, total - run.step))
        lengths = KeyValues("fit").gather([total, left], "the start of the run")
        totals, counts = ([length[i] for length in lengths] for i in range(2))
        self._votes_on_batches = None in counts
        if len(set(totals)) > 1 or (None not in counts and len(set(counts)) > 1):
            counts = totals if len(set(totals)) > 1 else [run.step + count for count in counts]
            known = [count for count in counts if count is not None]
            advice = f"give steps={min(known)}, or every process the same number of batches"
            expected = "the same number of steps in every process"
            refuse("batches", expected, f"{counts}", advice, kind=DataError)

    def track(self, doing: str, step: int) -> None:
        self.position.move(doing, step)

    def pull(self, feed: BatchFeed, run: Run, step: int, state: Any, count: int) -> list[Any]:
        self.track(Position.BATCH, step)
        batches = self._pull(feed, run, step, state, count)
        self.track("a step", step)
        return batches

    def _pull(self, feed: BatchFeed, run: Run, step: int, state: Any, count: int) -> list[Any]:
        try:
            batches = super().pull(feed, run, step, state, count)
        except Exception as error:
            if not self._votes_on_batches:  # the others may have dispatched this step already
                raise
            self._defer(run, error)
            batches = []
        if self._votes_on_batches:
            return self._agree_on_batches(run, step, batches)
        left = feed.batches_left(run.batches_used + step - run.step)
        is_new = step == run.began and run.resumed is None
        if not batches and left and not is_new:
            more = "no end" if left == math.inf else f"{left} more"
            expected = f"{more} after step {step}, by their own count"
            advice = "give every process the same number"  # the others are in a step already
            refuse("batches", expected, "the end", advice, kind=DataError)
        return batches

    def _agree_on_batches(self, run: Run, step: int, batches: list[Any]) -> list[Any]:
        """Keep as many batches as all processes have, so that all stop at the same step."""
        self.track(Position.OTHERS, step)
        if step in (run.began, run.resumed):  # a process may be minutes late
            KeyValues("fit").gather(None, "a first batch")
        counts = self._wait_for_vote(len(batches))
        has_failed = any(request.kind is Kind.ERROR for request in self.agreed)
        if min(counts) == 0 < max(counts) and not has_failed:
            ended = [process for process, count in enumerate(counts) if not count]
            warn(
                f"batches: expected the same number in every process, got {step} in "
                f"{spell_processes(ended)}, and more in the others, which stop there too; give "
                "steps=…, or every process the same number",
            )
        return batches[: min(counts)]

    def next_vote(self, step: int) -> float:  # noqa: ARG002
        if self._votes_on_batches:
            return math.inf
        return self._pace.voted_at + max(1, math.ceil(self._steps_between_votes()))

    def _steps_between_votes(self) -> float:
        """Return how many steps after the last vote the next one is due."""
        pace = self._pace
        seconds = _VISIT_VOTE_SECONDS if self._has_visited else _VOTE_SECONDS
        return min(seconds / pace.longest if pace.longest else 1, pace.max_steps)

    def poll_votes_after_visit(self, run: Run) -> Run:
        self._has_visited = True  # in all processes, whether or not hooks saw an event
        return self.poll_votes(run)

    def poll_votes(self, run: Run) -> Run:
        """Vote if a vote is due, and add the requests of the previous votes.

        All processes vote after the same steps, since they compute these from the same votes and
        visits.
        """
        steps = run.step - self._pace.voted_at
        if not self._votes_on_batches and steps >= self._steps_between_votes():
            self._vote(run.step, steps)
        return super().poll_votes(run)

    def _vote(self, step: int, steps: int) -> None:
        """Dispatch a vote, and read the previous one."""
        pace = self._pace
        previous, self._votes = self._votes, self._dispatch()
        self._pace, self._has_visited = pace._replace(voted_at=step), False
        if previous is None:
            return
        self._read(previous)
        now = time.perf_counter()
        if pace.read_at is not None:
            self._pace = self._pace._replace(step_seconds=(now - pace.read_at) / steps)
        most = min(2 * steps, _MAX_VOTE_STEPS)
        self._pace = self._pace._replace(read_at=now, max_steps=most)

    def wait_for(
        self,
        function: Callable[..., Any],
        *args: Any,
        may_interrupt: bool = True,  # noqa: ARG002
    ) -> Any:
        try:
            return function(*args)
        except StopIteration:
            return NO_VALUE

    def propose(self, run: Run, *requests: Request) -> Run:
        for request in requests:
            self.notify(request)
        return run

    def take_if_alone(self, run: Run) -> Run:
        return run

    def drop_requests(self, run: Run, *kinds: Kind, instead: Sequence[Request] = ()) -> Run:
        # They follow from what hooks requested, and are forgotten with it.
        own = [request._replace(by_hook=True) for request in instead]
        self._own = self._own.without(*kinds).add(*own)
        return super().drop_requests(run, *kinds, instead=instead)

    def call_hooks(self, run: Run, function: Callable[..., Any], *args: Any) -> Any:
        if self._seen is None:
            try:
                return function(*args)
            except Exception as error:  # noqa: BLE001  raised by `raise_hook_error`
                self._defer(run, error)
        self._seen = self.as_hooks_saw(run)
        return NO_VALUE

    def update_hooks(
        self, run: Run, hooks: Hooks, states: States, make_event: Callable[[], Event]
    ) -> Any:
        if self.error is not None and hooks.replaces:
            with suppress(Exception), agreement(_FAILED):  # where the others wait for this process
                raise self.error
        return self.call_hooks(run, _update_hooks, hooks, states, make_event)

    def _defer(self, run: Run, error: Exception) -> None:
        """Take part in what the others do until they know of the error."""
        if self.error is None:
            self.error, self._seen = error, run
            self.notify(Request(Kind.ERROR, 0, Stop("error", "user code raised an error")))

    def as_hooks_saw(self, run: Run) -> Run:
        if (seen := self._seen) is None:
            return run
        later = [each for each in run.closed if not any(each is one for one in seen.closed)]
        kept = {name: getattr(seen, name) for name in _SEEN}
        return run._replace(closed=(*seen.closed, *later), **kept)

    def raise_hook_error(self, run: Run) -> None:
        """Raise it in all processes, which exchange it here, since it may have come last."""
        errors = KeyValues("fit").gather(spell_error(self.error), "the end of the run")
        self.leave_together = any(errors)
        if self.error is not None:
            raise self.error
        for process, error in enumerate(errors):
            if error:
                raise StepfoldError(
                    f"process {process} raised an error, so all processes stopped at step "
                    f"{run.step}; see its log: {error}"
                )

    def vote_now(self, run: Run) -> Run:
        self._wait_for_vote()
        return super().poll_votes(run)

    def _wait_for_vote(self, batches: int = 0) -> list[int]:
        """Vote and wait for the others; return the number of batches that each process has."""
        self._votes = None
        votes = self._dispatch(batches)
        self._read(votes)
        counts: list[int] = np.asarray(votes.addressable_data(0))[:, 3].tolist()
        return counts

    def exchange_reasons(self, run: Run) -> Run:
        self._read_inbox()
        gathered = KeyValues("fit").gather([*self._own], "the end of its steps")
        # Votes hold only the kinds of requests. These have the reasons too, and replace them.
        run = run.without(*(Kind(kind) for requests in gathered for kind, *_ in requests))
        own = [request.reason for request in self._own]
        for process, requests in enumerate(gathered):
            for kind, step, reason, by_hook in requests:
                reason = _read_reason(Kind(kind), reason)
                if isinstance(reason, Stop) and reason not in own:
                    message = f"process {process} stopped: {reason.message}"
                    reason = reason._replace(message=message)
                run = run.ask(Request(Kind(kind), step, reason, by_hook))
        return run

    def drop_hook_requests(self) -> None:
        self._read_inbox()
        self._own = self._own.carried_over()

    def _read_inbox(self) -> None:
        while self._inbox:
            request = self._inbox.popleft()
            if request.kind is Kind.SAVE:
                self._save_requests += 1
            else:
                self._own = self._own.add(request)

    def _dispatch(self, batches: int = 0) -> jax.Array:
        self._read_inbox()  # a signal that is received from now on is part of the next vote
        microseconds = min(int(self._pace.step_seconds * 1e6), np.iinfo(np.int32).max)
        own = self._own.get(Kind.SIGNAL)
        others = [request.kind for request in self._own if request.kind is not Kind.SIGNAL]
        number = 0 if own is None else own.reason
        vote = [number, max(others, default=0), microseconds, batches, self._save_requests]
        self._gather = self._gather or Gather()
        return self._gather(np.array(vote, np.int32))

    def _read(self, votes: jax.Array) -> None:
        """Read votes, and queue the requests that they contain."""
        rows = np.asarray(votes.addressable_data(0))
        self._pace = self._pace._replace(longest=rows[:, 2].max() / 1e6)
        if np.any(rows[:, 4] != self._seen_saves):  # counts, so that a dropped vote loses nothing
            self._seen_saves = rows[:, 4]
            self.agreed.append(Request(Kind.SAVE))
        if number := int(rows[:, 0].max()):
            self.agreed.append(Request(Kind.SIGNAL, 0, signal.Signals(number)))
        if kind := int(rows[:, 1].max()):
            self.agreed.append(self._request_of(Kind(kind), int(np.argmax(rows[:, 1]))))

    def _request_of(self, kind: Kind, process: int) -> Request:
        """Return a request of a kind that a process voted for, without the reason of another."""
        own = self._own.get(kind)
        if kind is Kind.ERROR:
            reason: Any = Stop("error", f"process {process} raised an error")
        else:
            reason = own.reason if own else Stop("hook", f"process {process} stopped")
        return Request(kind, 0, reason, by_hook=own is None or own.by_hook)


def _update_hooks(
    hooks: Hooks, states: States, make_event: Callable[[], Event]
) -> tuple[States, Event, list[HookRequest]]:
    """Call the hooks, and check that either all processes replace the state or none."""
    event = make_event()
    with agreement(_FAILED) if hooks.replaces else nullcontext():
        states, event, requests = hooks.update(states, event)
    reasons = [
        request.why if isinstance(request, Replace) else f"{request.why}: {request.weights}"
        for request in requests
        if isinstance(request, Replace | Reweight)
    ]
    if reasons and not hooks.replaces:
        expected = "Hook(returns=[Replace, Reweight]), for a hook that returns one of them"
        advice = "set replaces_state = True on a function or an object, and return the same"
        refuse("hooks", expected, "none", f"{advice} in all processes")
    if hooks.replaces:
        gathered = KeyValues("fit").gather(reasons, "an event")
        if any(others != reasons for others in gathered):
            refuse("hooks", "the same replacements in every process", str(gathered))
    return states, event, requests


def _read_reason(kind: Kind, reason: Any) -> Any:
    """Return the reason of a request, which has come as JSON."""
    if kind is Kind.SIGNAL:
        return signal.Signals(reason)
    if kind is not Kind.GO_BACK:
        return Stop(*reason)
    to, skip, why, limit = reason
    return GoBack(to, tuple(skip), why, limit)
