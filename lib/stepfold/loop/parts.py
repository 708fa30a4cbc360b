"""The parts of a run: what happens between two steps, in this order.

Hooks see the metrics of log points, evaluations run, and an epoch ends. Then the state is saved
(`loop/saves.py`), and the step gets the size of the next batches. `Part` in `loop/fold.py` says
what they have in common.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from time import perf_counter
from typing import Any

import jax

from stepfold.checkpoint.series import Series
from stepfold.core.processes import KeyValues, agreement
from stepfold.data.epochs import size_at
from stepfold.errors import refuse, warn
from stepfold.loop.data import BatchFeed, batch_sizes
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.fold import NO_VALUE, Alone
from stepfold.loop.hooks.base import (
    Event,
    HookDispatcher,
    Replace,
    Reweight,
)
from stepfold.loop.metrics import Interval
from stepfold.loop.plan import Plan
from stepfold.loop.run import Kind, Run, make_hook_request
from stepfold.loop.step_runner import StepRunner

_FAILED = "hooks: failed"  # the message where one process raised, and all were to replace the state


class Log:
    """Close the interval of metrics at a log point, and later show it to hooks."""

    name = "hooks"

    def __init__(
        self,
        plan: Plan,
        feed: BatchFeed,
        hooks: HookDispatcher,
        peers: Alone,
        series: Series | None = None,
    ) -> None:
        self._plan, self._feed, self._hooks, self._peers = plan, feed, hooks, peers
        self._series = series
        self._waited = dict[int, float]()  # by log point: the seconds spent waiting for batches

    def next(self, run: Run) -> float:
        reads = [each.step + self._plan.delay for each in run.closed]
        later = [step for step in reads if step > run.step]
        return min([self._plan.next_log_point(run.step), *later])

    def is_due(self, run: Run) -> bool:
        if self._ends_interval(run):
            return True
        if not run.closed:
            return False
        # A save that a signal requests depends on what hooks say.
        is_read = run.closed[0].step <= self._plan.read_until(run.step)
        return is_read or run.requests.has(Kind.SAVE)

    def __call__(self, run: Run) -> Run:
        """Close an interval, or show hooks the first that is closed."""
        if self._ends_interval(run):
            self._waited[run.step] = self._feed.wait_seconds
            return run.close_interval().mark(self._feed.mark(run.step, run.batches_used))
        if not run.closed:
            return run
        return self._show(run, run._replace(closed=run.closed[1:]), run.closed[0].read, "train")

    def show(self, run: Run, evaluation: str, metrics: Any, step: int | None = None) -> Run:
        """Show hooks the metrics of an evaluation, of this step or an earlier one."""
        step = run.step if step is None else step
        interval = Interval(step, metrics, {}, {}, perf_counter())
        shown = run._replace(evaluated={**run.evaluated, evaluation: step})
        return self._show(run, shown, lambda: interval, evaluation)

    def end_epoch(self, run: Run, epoch: int) -> Run:
        """Call hooks at the end of an epoch."""
        return self._call_at_end(run, run._replace(epoch_ended_at=run.step), "end_epoch", epoch)

    def end_run(self, run: Run) -> Run:
        """Let hooks act on the last train metrics."""
        return self._call_at_end(run, run, "end_run")

    def _call_at_end(self, run: Run, shown: Run, method: str, *args: Any) -> Run:
        def call() -> Run:
            getattr(self._hooks, method)(*args)
            return shown._replace(hook_states=self._hooks.get_state())

        called = self._peers.call_hooks(run, call)
        return shown if called is NO_VALUE else called

    def _ends_interval(self, run: Run) -> bool:
        return bool(run.current) and self._plan.is_log_point(run.step) and not run.is_at_start

    def _show(self, run: Run, shown: Run, read: Callable[[], Interval], kind: str) -> Run:
        """Show hooks an event; `shown` is the run once they have seen it."""
        feed, peers = self._feed, self._peers
        if peers.error is not None and self._hooks.replaces_state:
            with suppress(Exception), agreement(_FAILED):  # the others ask for it there
                raise peers.error
        called = peers.call_hooks(run, self._call, shown, read, kind)
        if called is NO_VALUE:
            return shown
        event, requests, hook_states = called
        run = shown.log(event.step, event.metrics)._replace(hook_states=hook_states)
        for request in requests:
            at = self._plan.read_step(event.step) if kind == "train" else run.step
            if isinstance(request, Replace | Reweight):
                run = self._replace(run, request, at)
            else:
                run = peers.ask(run, make_hook_request(request, event.step, at))
        run = peers.hear(run)
        if kind == "train" and feed.recent and not run.requests:
            feed.recent.drop_until(event.step)  # no hook asks for them
        return run

    def _call(
        self, run: Run, read: Callable[[], Interval], kind: str
    ) -> tuple[Event, list[Any], Any]:
        """Call the hooks; with several processes, either all or none replace the state."""
        feed, hooks, interval = self._feed, self._hooks, read()
        waited = self._waited.pop(interval.step, None) if kind == "train" else None
        leaves, structure = jax.tree.flatten(run.state)
        event = Event(
            **interval._asdict(),
            total=run.total,
            state=jax.tree.unflatten(structure, leaves),  # hooks may change its containers
            batch=run.batch,
            data_wait_seconds=feed.wait_seconds if waited is None else waited,
            kind=kind,
            hook_seconds=hooks.seconds,
            is_late=kind != "train" and interval.step < run.step,
        )
        if self._peers.is_alone:
            return *hooks.dispatch(event), hooks.get_state()
        with agreement(_FAILED) if hooks.replaces_state else nullcontext():
            event, requests = hooks.dispatch(event)
        reasons = [
            request.why if isinstance(request, Replace) else f"{request.why}: {request.weights}"
            for request in requests
            if isinstance(request, Replace | Reweight)
        ]
        if reasons and not hooks.replaces_state:
            advice = "set it, and return the same in all processes"
            refuse("hooks", "replaces_state = True on a hook that returns Replace", "none", advice)
        if hooks.replaces_state:
            gathered = KeyValues("fit").gather(reasons, "an event")
            if any(others != reasons for others in gathered):
                refuse("hooks", "the same replacements in every process", str(gathered))
        return event, requests, hooks.get_state()

    def _replace(self, run: Run, request: Replace | Reweight, at: int) -> Run:
        """Continue with another state, unless that of this step was saved before.

        A `Reweight` has an effect on the batches of the steps after `at`.
        """
        if self._series is not None and run.step == self._series.saved:
            if run.end is None:
                warn(
                    f"step {run.step}: expected to replace the state before it is saved, got a "
                    f"request after that, which has no effect: {request.why}",
                )
            return run
        if isinstance(request, Reweight):
            self._feed.reweight(request.weights, run.batches_used + max(at, run.step) - run.step)
            return run.note(request.why, "weights")
        return run._replace(state=request.state).note(request.why)


class Evaluate:
    """Evaluate the state."""

    def __init__(
        self, evaluation: Evaluation, plan: Plan, log: Log, hooks: HookDispatcher, peers: Alone
    ) -> None:
        self.name = f"evaluation {evaluation.name}"
        self.evaluation, self._plan, self._log = evaluation, plan, log
        self._hooks, self._peers = hooks, peers

    def next(self, run: Run) -> float:
        return self._plan.next_due(self.evaluation, run.step)

    def is_due(self, run: Run) -> bool:
        return self.is_scheduled(run) and not self._is_done(run)

    def is_scheduled(self, run: Run) -> bool:
        """Whether the schedule has it at this step; at the end, all evaluations run anyway."""
        if run.step == run.total:
            return False
        if run.step == run.began:
            return self.evaluation.at_start
        return self._plan.is_due(self.evaluation, run.step)

    def __call__(self, run: Run) -> Run:
        if self._is_done(run):
            return run
        with self._hooks.stopwatch.measure(self.name):
            metrics = self._peers.wait_for(self.evaluation, run.state, self._peers.position)
        self._peers.move("hooks", run.step)
        if metrics is NO_VALUE:  # a signal came
            return self._peers.hear(run)
        return self._log.show(run, self.evaluation.name, metrics)

    def _is_done(self, run: Run) -> bool:
        return run.evaluated.get(self.evaluation.name) == run.step


class EndEpoch:
    """Call hooks at the end of an epoch, after all events of its last step."""

    name = "hooks at the end of an epoch"

    def __init__(self, plan: Plan, log: Log, peers: Alone) -> None:
        self._plan, self._log, self._peers = plan, log, peers

    def next(self, run: Run) -> float:  # noqa: ARG002  such a step is a log point
        return math.inf

    def is_due(self, run: Run) -> bool:
        if run.step == run.total or (run.end is not None and not run.is_at_start):
            return False
        return self._epochs(run) is not None

    def __call__(self, run: Run) -> Run:
        epochs = self._epochs(run)
        return run if epochs is None else self._log.end_epoch(run, epochs - 1)

    def _epochs(self, run: Run) -> int | None:
        """Return how many epochs are done if hooks have yet to see the end of one."""
        is_new = self._plan.logs_epochs and run.step > run.epoch_ended_at
        return self._plan.epochs_done(run.step) if is_new else None


class BatchSizes:
    """Use the program of the step for the size of the next batches."""

    name = "a program of the step"

    def __init__(self, plan: Plan, feed: BatchFeed, runner: StepRunner) -> None:
        self._plan, self._runner, self._sizes = plan, runner, batch_sizes(feed.batches)

    def next(self, run: Run) -> float:
        return self._plan.next_size(run.step)

    def is_due(self, run: Run) -> bool:
        sizes = self._sizes
        return len(sizes) > 1 and size_at(sizes, run.batches_used) != self._runner.batch_size

    def __call__(self, run: Run) -> Run:
        end = math.inf if run.total is None else run.total - run.step + run.batches_used
        later = [size for start, size in self._sizes if run.batches_used < start < end]
        self._runner.set_batch_size(size_at(self._sizes, run.batches_used), later)
        return run
