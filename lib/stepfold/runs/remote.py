"""Evaluations of the checkpoints of a run by another process: read their results.

`evaluator.py` runs in the other process. The two communicate by notes next to the checkpoints (see
`checkpoint/results.py`): the run lists the evaluations that a checkpoint awaits, and the other
process creates a result for each, once.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax

from stepfold.checkpoint.claims import Leases
from stepfold.checkpoint.results import (
    LEASES,
    Result,
    find_results,
    is_saved,
    read_result,
    read_run,
    write_run,
)
from stepfold.checkpoint.series import Series
from stepfold.checkpoint.store import complete_steps
from stepfold.core.processes import agreement, broadcast_from_first
from stepfold.errors import CheckpointError, warn
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.fold import Setup, show_evaluation
from stepfold.loop.inbox import NO_VALUE, Inbox
from stepfold.loop.run import Run
from stepfold.loop.schedule import Schedule

_SHARE = 0.05  # the largest share of the time that looking for results at log points takes
_QUIET_SECONDS = 10.0  # of the wait at the end, before a warning
_MANY = 10  # with more steps that wait for an evaluation, there is a warning


class RemoteResults:
    """Read results at the next event, in the order of their steps, and show them to hooks.

    A result counts if its checkpoint exists, or existed when the result was first read: the run may
    have resumed or gone back since. Several processes look for results only where an evaluation or
    a save is due, since all of them then wait for process 0.
    """

    name = "remote evaluations"

    def __init__(
        self, evaluations: Sequence[Evaluation], series: Series, schedule: Schedule, inbox: Inbox
    ) -> None:
        self._evaluations, self._series, self._schedule = evaluations, series, schedule
        self._inbox, self._store = inbox, series.store
        self._names = [each.name for each in evaluations]
        self._leases = Leases(series.store, LEASES)
        self._known: list[Result] = []  # read, and of a checkpoint of this run
        self._queue: list[Any] = []
        self._looked_at: int | None = None  # the step
        self._next_look = 0.0
        self._has_warned = self._has_warned_of_many = False
        self._warned_of: set[str] = set()  # at the end

    def open(self, run: Run) -> None:
        """Write which evaluations the run awaits, before its first step."""
        self._note(run)
        with agreement(f"{self._series.directory}: not opened"):
            if jax.process_index() == 0:
                known = [Result(*each) for each in read_run(self._store).get("read", [])]
                # Later steps are done again.
                self._known = [result for result in known if result.step <= run.step]
                self._write(has_ended=False)

    def end(self, run: Run) -> None:
        """Write that the run has ended, so that other processes end too."""
        self._note(run)
        self._series.prune()  # steps that no longer wait for an evaluation
        if jax.process_index() == 0:
            self._write(has_ended=True)

    def awaits(self, run: Run) -> list[str]:
        """Return the evaluations that are due; at the end, as in `fit`, all of them."""
        is_end = run.is_complete or (run.end is not None and not run.is_interrupted)
        return [
            each.name
            for each in self._evaluations
            if is_end or self._schedule.evaluates(each, run.step, run.began)
        ]

    def is_due(self, run: Run) -> bool:
        if self._queue or run.step == self._looked_at:
            return bool(self._queue)
        return self._inbox.is_alone or self._is_scheduled(run)

    def take(self, run: Run, setup: Setup) -> Run:
        """Show hooks the next result; without one, return the same run."""
        self._inbox.track(self.name, run.step)
        if not self._queue and run.step != self._looked_at:
            self._looked_at = run.step
            is_late = time.monotonic() >= self._next_look
            if is_late or self._is_scheduled(run) or run.end is not None:
                self._queue = self._look(run)
        return self._show_next(run, setup)

    def finish(self, run: Run, setup: Setup) -> Run:
        """Show hooks the next result; wait for it if a live process is about to make it."""
        pause, start = 0.02, time.monotonic()
        while not self._queue:
            is_over = self._is_over(run)  # before the look, so that no result is missed
            self._queue = self._look(run)
            if is_over or self._queue:
                break
            if time.monotonic() - start > _QUIET_SECONDS:
                self._warn_at_end(run, "is done, and waits for", "which another process makes")
            self._inbox.track("the wait for remote evaluations", run.step)
            if self._inbox.wait_for(time.sleep, pause) is NO_VALUE:
                return self._inbox.take_if_alone(run)
            pause = min(2 * pause, 1.0)
        if not self._queue:
            why = "since no live process makes it; start sf.evaluate_run, and then the same call of"
            self._warn_at_end(run, "ends without", f"{why} fit, which reads the results")
        return self._show_next(run, setup)

    def _warn_at_end(self, run: Run, problem: str, why: str) -> None:
        """Warn once of each problem with the steps that await an evaluation."""
        if jax.process_index() > 0 or problem in self._warned_of:
            return
        with suppress(CheckpointError):
            awaited = self._awaited(run)
            if steps := [*awaited]:
                self._warned_of.add(problem)
                names = sorted({name for names in awaited.values() for name in names})
                listed = f"{', '.join(map(str, steps[:8]))}{', …' if len(steps) > 8 else ''}"
                what = f"{', '.join(names)} of step{'s' * (len(steps) > 1)} {listed}"
                text = f"{self._series.directory}: the run {problem} {what}, {why}"
                warn(text, RuntimeWarning)

    def _is_scheduled(self, run: Run) -> bool:
        return any(self._schedule.is_due(item, run.step) for item in self._schedule.recurring)

    def _show_next(self, run: Run, setup: Setup) -> Run:
        if not self._queue:
            return run
        name, step, metrics = self._queue.pop(0)
        run = show_evaluation(run, setup, name, metrics, step)
        self._note(run)
        return run

    def _note(self, run: Run) -> None:
        self._series.evaluated = {name: run.evaluated.get(name, -1) for name in self._names}

    def _write(self, *, has_ended: bool) -> None:
        write_run(self._store, self._names, self._known, has_ended=has_ended)

    def _look(self, run: Run) -> list[Any]:
        """Return the results that hooks have not seen, the same in all processes."""
        found, start = list[Any](), time.monotonic()
        if jax.process_index() == 0:
            try:
                found = self._find(run)
            except CheckpointError as error:  # such as a server that does not answer
                if not self._has_warned:
                    self._has_warned = True
                    text = f"{error}; the run continues, and looks for evaluations again later"
                    warn(text, RuntimeWarning)
        now = time.monotonic()
        self._next_look = now + (now - start) / _SHARE
        return broadcast_from_first(found)

    def _find(self, run: Run) -> list[Any]:
        found, known = [], {*self._known}
        for result in find_results(self._store):
            name, step, identity = result
            is_new = name in self._names and run.evaluated.get(name, -1) < step <= run.step
            if is_new and (is_saved(self._store, step, identity) or result in known):
                metrics = read_result(self._store, result)
                if metrics is not None:
                    found.append([name, step, metrics])
                    self._known += [] if result in known else [result]
        if len(self._known) > len(known):
            self._write(has_ended=False)
        self._warn_of_many(run)
        return found

    def _is_over(self, run: Run) -> bool:
        """Whether no live process is about to evaluate a step for the run."""
        is_over = True
        if jax.process_index() == 0 and self._inbox.signal is None:
            with suppress(CheckpointError):
                held = self._leases.held()
                live = {name for lease in held for name in lease["names"]}
                is_over = not any(live & names for names in self._awaited(run).values())
        return broadcast_from_first([is_over])[0]

    def _awaited(self, run: Run) -> dict[int, set[str]]:
        """Return the evaluations that steps await, by step."""
        awaited = {
            step: {
                name
                for name in metadata.awaits
                if name in self._names and run.evaluated.get(name, -1) < step
            }
            for step, metadata in complete_steps(self._store, self._later_steps(run)).items()
        }
        return {step: names for step, names in awaited.items() if names}

    def _later_steps(self, run: Run) -> list[int]:
        """List the steps after the last one of which all results were read."""
        last = min(run.evaluated.get(name, -1) for name in self._names)
        return [step for step in self._store.steps() if step > last]

    def _warn_of_many(self, run: Run) -> None:
        """Warn once if no other process evaluates, since retention keeps all that waits."""
        if not self._has_warned_of_many and len(steps := self._later_steps(run)) > _MANY:
            self._has_warned_of_many = True
            warn(
                f"{self._series.directory}: {len(steps)} steps wait for {', '.join(self._names)} "
                f"since step {steps[0]}, and are kept until then; start sf.evaluate_run",
                RuntimeWarning,
            )
