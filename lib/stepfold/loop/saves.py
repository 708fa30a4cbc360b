"""The part of a run that saves its state, and a NaN of which ends the run instead."""

import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from stepfold.checkpoint.series import Series
from stepfold.checkpoint.steps import order_by
from stepfold.core.processes import broadcast_from_first
from stepfold.core.state import has_nan
from stepfold.errors import warn
from stepfold.loop.data import BatchFeed
from stepfold.loop.fold import Alone
from stepfold.loop.hooks.base import HookDispatcher, Stop, find_save_interval
from stepfold.loop.parts import Evaluate
from stepfold.loop.plan import Plan
from stepfold.loop.run import Kind, Request, Run

_SLOW_SAVES = 30.0  # seconds in saves, from which on a fifth of the time is worth a warning


class Save:
    """Save the state; a NaN in a parameter ends the run instead."""

    name = "a save"

    def __init__(
        self,
        series: Series | None,
        plan: Plan,
        feed: BatchFeed,
        hooks: HookDispatcher,
        peers: Alone,
        evaluations: Sequence[Evaluate],
        describe: Callable[[Run], dict[str, Any]],
        awaits: Callable[[Run], Sequence[str]],
    ) -> None:
        self._series, self._plan, self._feed, self._hooks = series, plan, feed, hooks
        self._peers, self._evaluations = peers, evaluations
        self._describe = describe  # what a checkpoint holds next to the state
        self._awaits = awaits  # the evaluations that another process makes of the step
        self._has_warned = self._has_warned_of_time = False
        # The step, time, seconds in saves and their number, after the first save.
        self._first: tuple[int, float, float, int] | None = None

    def next(self, run: Run) -> float:
        if self._series is None:
            return math.inf
        schedules = self._series.policy.schedules
        return min(self._plan.next_due(schedule, run.step) for schedule in schedules)

    def is_due(self, run: Run) -> bool:
        request, series = run.requests.get(Kind.SAVE), self._series
        is_asked = request is not None and request.step <= run.step and run.end is None
        if series is None:
            return is_asked
        if run.is_at_start:
            is_needed = self._is_needed(run)
            permanent = is_needed or run.step == run.began
            return is_asked or self._what(run, permanent=permanent, is_needed=is_needed) is not None
        # First, since the series notes what kind of save is due.
        epoch = self._plan.epochs_done(run.step) if series.policy.every_epochs else None
        is_due = series.due(run.step, epoch=epoch)
        return run.end is None and (is_due or is_asked or self._is_needed(run))

    def __call__(self, run: Run) -> Run:
        """Save at the start, by the schedule or by request, once hooks know all metrics."""
        request = run.requests.get(Kind.SAVE)
        if self._series is None:
            return self._warn(run)
        if run.is_at_start:
            is_needed = self._is_needed(run)
            permanent = is_needed or run.step == run.began
            run = self.save(run, permanent=permanent, is_needed=is_needed)
            later = Request(Kind.SAVE, run.step + 1)  # until there is something new
            return run if request is None else run.without(Kind.SAVE).ask(later)
        is_requested = (request is not None and request.reason is None) or self._is_needed(run)
        if not run.closed and run.current and self._is_wrong(run, is_requested):
            run = run.close_interval()  # a hook may find out more
        if run.closed:
            due = Request(Kind.SAVE, run.step, "due")
            return run if request is not None else run.ask(due)
        saved = self.save(run, permanent=is_requested, is_requested=is_requested)
        if request is None or request.reason is not None:
            self._warn_of_time(run)
        return saved if request is None else saved.without(Kind.SAVE)

    def save(
        self,
        run: Run,
        *,
        permanent: bool = True,
        is_requested: bool = False,
        is_needed: bool = False,
        has_user_code: bool = True,
    ) -> Run:
        """Save what is not saved yet, unless a parameter is NaN.

        `permanent` saves are all but those by the schedule of the temporary directory. Requested
        saves, and those that an evaluation needs, do not count as scheduled where old steps are
        deleted. Without `has_user_code`, the data position and the states of hooks are left out.
        """
        what = self._what(run, permanent=permanent, is_needed=is_needed)
        if what is None or self._series is None:
            return run
        if what == "state" and has_nan(run.state):
            if run.end is None:
                run = run.ask(Request(Kind.STOP, run.step, Stop("nonfinite", "")))
            return run if run.unsaved else run._replace(unsaved="a parameter is NaN")
        metrics = run.logged_metrics if run.logged_step == run.step else {}
        extra = self._describe(run if has_user_code else run._replace(hook_states=[]))
        if what == "metadata":  # add to the checkpoint that the run resumed from
            self._hooks.flush()
            self._series.add_later(run.step, metrics=metrics, extra=extra)
            return run._replace(has_news=False)
        with self._hooks.stopwatch.measure("saving"):
            self._series.save(
                run.state,
                step=run.step,
                data=self._feed.position(run.batches_used) if has_user_code else None,
                metrics=metrics,
                extra=extra,
                before_commit=self._hooks.flush,
                permanent=permanent,
                requested=is_requested,
                awaits=self._awaits(run),
            )
        return run._replace(has_news=False)

    def describe_end(self, run: Run) -> dict[str, Any]:
        """Return what the checkpoint of a run that stopped early holds: a later one continues."""
        return {} if self._series is None else self._describe(run.without(Kind.STOP))

    def add_end(self, run: Run, ended: Run, extra: dict[str, Any]) -> None:
        """Add to the checkpoint of a run that stopped early what its end has measured.

        `extra` is what `describe_end` returned before the end.
        """
        series, rank = self._series, self._rank(ended)
        has_news = run.requests.to_checkpoint() is not None or rank != self._rank(run)
        has_news = has_news and not ended.requests.has(Kind.CORRUPTION)
        if series is not None and has_news and run.step in (series.saved, run.resumed):
            self._hooks.flush()
            series.add_later(run.step, metrics=rank, extra=extra)

    def wait(self) -> None:
        """Wait until the last save is on disk."""
        if self._series is not None:
            self._series.wait()

    def _is_wrong(self, run: Run, permanent: bool) -> bool:
        return self._what(run, permanent=permanent) == "state" and has_nan(run.state)

    def _rank(self, run: Run) -> dict[str, float]:
        """Return the metric that ranks checkpoints, if an evaluation has measured it here."""
        name = None if self._series is None else self._series.policy.best
        metrics = run.logged_metrics if run.logged_step == run.step else {}
        is_known = name is not None and name in metrics and not name.startswith("train/")
        return {name: metrics[name]} if name is not None and is_known else {}

    def _is_needed(self, run: Run) -> bool:
        """Whether an evaluation needs the step, here or in another process."""
        is_saved = self._series is not None and self._series.saved == run.step
        return (not is_saved and bool(self._awaits(run))) or self._is_best(run)

    def _is_best(self, run: Run) -> bool:
        """Whether the metric that ranks checkpoints is the best so far; the same in all processes.

        Metrics of train steps belong to the state before those steps.
        """
        series, peers = self._series, self._peers
        ranking = None if series is None else series.ranking
        if series is None or ranking is None or ranking[0].startswith("train/"):
            return False
        is_measured = any(evaluation.is_scheduled(run) for evaluation in self._evaluations)
        if not is_measured or run.step == series.saved or run.end is not None:
            return False
        curve = run.history.curve(ranking[0])
        values = {step: {ranking[0]: x} for step, x in zip(curve.steps, curve, strict=True)}
        is_best = order_by(ranking, values)[:1] == [run.step]
        return is_best if peers.is_alone else broadcast_from_first([is_best])[0]

    def _what(self, run: Run, *, permanent: bool, is_needed: bool = False) -> str | None:
        """Return what a save writes at this step: "state", "metadata", or None for nothing.

        A state that may be wrong, or that the run is to go back from, is not saved. A resume
        repeats the steps since the previous checkpoint, with the same bits.
        """
        series = self._series
        is_wrong = run.requests.has(Kind.CORRUPTION, Kind.GO_BACK)
        if series is None or is_wrong:
            return None
        if run.step == series.saved:  # the last evaluation may come after the save
            return "metadata" if run.is_complete and run.has_news else None
        # A checkpoint in the temporary directory is saved again, since that may be lost.
        is_promoted = permanent and series.restored_temporary
        is_start = run.resumed is None and (series.policy.at_start or is_needed)
        if not run.is_at_start or is_promoted or is_start:
            return "state"
        # A resume replays the events that have replaced the state since the checkpoint.
        has_news = run.resumed is not None and run.has_news and not run.has_note()
        return "metadata" if has_news else None

    def _warn_of_time(self, run: Run) -> None:
        """Warn once if saves take much of the time since the first of them."""
        watch = self._hooks.stopwatch
        seconds, count = watch.seconds.get("saving", 0.0), watch.counts.get("saving", 0)
        now = run.step, perf_counter(), seconds, count
        first = self._first = self._first or now
        steps, elapsed, saving, saves = (end - start for start, end in zip(first, now, strict=True))
        is_slow = saving >= max(_SLOW_SAVES, 0.2 * elapsed) and steps > 0
        if is_slow and not self._has_warned_of_time:
            self._has_warned_of_time = True
            every = find_save_interval(saving, round(saves), elapsed - saving, round(steps))
            warn(
                f"checkpoints: {saves} saves took {saving:.0f} of the last {elapsed:.0f} s; every "
                f"{every} steps, they would take 5 % of the time",
            )

    def _warn(self, run: Run) -> Run:
        if not self._has_warned:
            self._has_warned = True
            warn("SIGUSR1: expected checkpoints to save, got none; give checkpoints=…")
        return run.without(Kind.SAVE)
