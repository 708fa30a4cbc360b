"""Checkpoints of a run: decide whether a save is due, and write it."""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, Literal

from stepfold.checkpoint.series import SaveKind, Series
from stepfold.checkpoint.steps import order_by
from stepfold.core.processes import broadcast_from_first
from stepfold.core.state import has_nan
from stepfold.errors import warn
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.events import GoBack, Stop
from stepfold.loop.feed import BatchFeed
from stepfold.loop.hook import Hooks, find_save_interval
from stepfold.loop.inbox import Inbox
from stepfold.loop.run import Kind, Request, Run
from stepfold.loop.schedule import Schedule

_SLOW_SAVES = 30.0  # seconds in saves, from which on a fifth of the time is worth a warning


Due = SaveKind | Literal["metadata"]
"""What a save writes: the state, as a checkpoint of some kind, or only metadata.

Metadata is measured after the save of the state, such as a late evaluation. Retention counts
requested saves, and those for an evaluation, apart from scheduled ones.
"""


class Saves:
    """The checkpoints of a run.

    `find_target` returns the step to go back to, or why to stop instead. `describe` returns what a
    checkpoint holds next to the state, and `awaits` the evaluations that another process makes of
    the step of a run. `stopped` is what the restored checkpoint holds, if the run has yet to stop
    there.
    """

    def __init__(
        self,
        series: Series,
        find_target: Callable[[GoBack], int | Stop],
        schedule: Schedule,
        feed: BatchFeed,
        hooks: Hooks,
        inbox: Inbox,
        evaluations: Sequence[Evaluation],
        describe: Callable[[Run], dict[str, Any]],
        awaits: Callable[[Run], Sequence[str]],
        stopped: Mapping[str, Any] | None = None,
    ) -> None:
        self._series, self.find_target = series, find_target
        self._schedule, self._feed, self._hooks = schedule, feed, hooks
        self._inbox, self._evaluations = inbox, evaluations
        self._describe, self._awaits, self._stopped = describe, awaits, stopped
        self._has_warned_of_time = False
        # The step, time, seconds in saves and their number, after the first save.
        self._first: tuple[int, float, float, int] | None = None

    # The decision

    def find_due(self, run: Run) -> Due | None:
        """Decide about a save between two steps.

        All processes call this at the same steps, since a schedule in minutes uses the clock of
        process 0.
        """
        series, request = self._series, run.requests.get(Kind.SAVE)
        is_asked = request is not None and request.step <= run.step and run.end is None
        is_needed = self._is_needed(run)
        if run.is_at_start:
            is_permanent = is_needed or run.step == run.began
            return self._decide(run, "permanent" if is_permanent else None, is_needed=is_needed)
        if run.end is not None:
            return None
        epoch = self._schedule.epochs_done(run.step) if series.policy.every_epochs else None
        kind = series.kind_due(run.step, epoch=epoch)
        if is_asked or is_needed:
            kind = kind if kind == "permanent" else "requested"
        return self._decide(run, kind)

    def find_last(self, run: Run) -> Due | None:
        """Decide about the save at the end of a run, and after an exception."""
        return self._decide(run, "permanent")

    def _decide(self, run: Run, kind: SaveKind | None, *, is_needed: bool = False) -> Due | None:
        """Return what a save of some kind writes at this step, or None.

        A state that may be wrong is not saved, nor one from which the run goes back. A resume
        repeats the steps since the previous checkpoint, with the same bits.
        """
        series = self._series
        is_wrong = run.requests.has(Kind.CORRUPTION, Kind.GO_BACK)
        if is_wrong:
            return None
        if run.step == series.saved:  # the last evaluation may come after the save
            return "metadata" if run.is_complete and run.has_news else None
        # A checkpoint in the temporary directory is saved again, since that may be lost.
        is_promoted = kind is not None and kind != "temporary" and series.restored_temporary
        is_start = run.resumed is None and (series.policy.at_start or is_needed)
        if not run.is_at_start or is_promoted or is_start:
            return kind
        # A resume replays the events that have replaced the state since the checkpoint.
        has_news = run.resumed is not None and run.has_news and not run.has_note()
        return "metadata" if has_news else None

    def _is_needed(self, run: Run) -> bool:
        """Whether an evaluation needs the step, here or in another process."""
        is_saved = self._series.saved == run.step
        return (not is_saved and bool(self._awaits(run))) or self._is_best(run)

    def _is_best(self, run: Run) -> bool:
        """Whether the metric that ranks checkpoints is the best so far; the same in all processes.

        Metrics of train steps belong to the state before those steps.
        """
        series, inbox = self._series, self._inbox
        ranking = series.ranking
        if ranking is None or ranking[0].startswith("train/"):
            return False
        is_measured = any(
            self._schedule.evaluates(each, run.step, run.began) for each in self._evaluations
        )
        if not is_measured or run.step == series.saved or run.end is not None:
            return False
        curve = run.history.curve(ranking[0])
        values = {step: {ranking[0]: x} for step, x in zip(curve.steps, curve, strict=True)}
        is_best = order_by(ranking, values)[:1] == [run.step]
        return is_best if inbox.is_alone else broadcast_from_first([is_best])[0]

    def is_wrong(self, run: Run, due: Due) -> bool:
        """Whether a save would write a NaN in a parameter."""
        return due != "metadata" and has_nan(run.state)

    # The save

    def save(self, run: Run, due: Due | None, *, has_user_code: bool = True) -> Run:
        """Save what is due; if a parameter is NaN, end the run instead.

        Without `has_user_code`, the data position and the states of hooks are left out.
        """
        series = self._series
        if due is None:
            return run
        if self.is_wrong(run, due):
            if run.end is None:
                run = run.ask(Request(Kind.STOP, run.step, Stop("nonfinite", "")))
            return run if run.unsaved else run._replace(unsaved="a parameter is NaN")
        metrics = run.logged_metrics if run.logged_step == run.step else {}
        extra = self._describe(run if has_user_code else run._replace(hook_states=()))
        self._stopped = None if run.requests.to_checkpoint() is None else extra
        if due == "metadata":  # add to the checkpoint that the run resumed from
            self._hooks.flush()
            series.add_later(run.step, metrics=metrics, extra=extra)
            return run._replace(has_news=False)
        with self._hooks.stopwatch.measure("saving"):
            series.save(
                run.state,
                step=run.step,
                data=self._feed.position(run.batches_used) if has_user_code else None,
                metrics=metrics,
                extra=extra,
                before_commit=self._hooks.flush,
                kind=due,
                awaits=self._awaits(run),
            )
        return run._replace(has_news=False)

    def describe_end(self, run: Run) -> dict[str, Any]:
        """Return what the checkpoint of a run that stopped early holds: a later one continues."""
        extra = self._stopped or self._describe(run)
        return {**extra, "fit": {**extra["fit"], "stop": None}}

    def add_end(self, run: Run, ended: Run, extra: Mapping[str, Any]) -> None:
        """Add to the checkpoint of a run that stopped early what its end has measured.

        `extra` is what `describe_end` returned before the end.
        """
        series, rank = self._series, self._rank(ended)
        has_news = self._stopped is not None or rank != self._rank(run)
        has_news = has_news and not ended.requests.has(Kind.CORRUPTION)
        if has_news and run.step in (series.saved, run.resumed):
            self._hooks.flush()
            series.add_later(run.step, metrics=rank, extra=extra)

    def _rank(self, run: Run) -> dict[str, float]:
        """Return the metric that ranks checkpoints, if an evaluation has measured it here."""
        name = self._series.policy.best
        metrics = run.logged_metrics if run.logged_step == run.step else {}
        is_known = name is not None and name in metrics and not name.startswith("train/")
        return {name: metrics[name]} if name is not None and is_known else {}

    def wait(self) -> None:
        """Wait until the last save is on disk."""
        self._series.wait()

    def has_saved(self, run: Run) -> bool:
        """Whether the state of this step was saved by this call."""
        return run.step == self._series.saved

    def warn_of_time(self, run: Run) -> None:
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
                f"{every} steps, they would take 5 % of the time"
            )
