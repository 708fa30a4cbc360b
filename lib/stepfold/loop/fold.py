"""The order in which things happen in a run."""

import functools
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import jax

from stepfold.checkpoint.series import Series
from stepfold.errors import DataError, StepfoldError
from stepfold.loop.asked import Asked
from stepfold.loop.condition import has_nan, is_whole, steps_of
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.event import Event, check_measured, expect
from stepfold.loop.ledger import Interval, Ledger
from stepfold.loop.replaying.rereading import Mark
from stepfold.loop.schedule import Schedule
from stepfold.loop.signals import Signals
from stepfold.loop.telling import Telling

_AHEAD = 4
_BROKEN = "; not saved, for a parameter is NaN"


class Fold:
    """Hold what changes in the course of a run, and change it in the order that `fit` promises."""

    def __init__(self, asked: Asked, state: Any, series: Series | None) -> None:
        self.step, self.state, self.feed, self.series = asked.step, state, asked.feed, series
        self.evaluations = asked.evaluations
        self.steps_per_call, self.looked_for = asked.steps_per_call, asked.looked_for
        # To read what a step said waits for that step. By then so many others are under way that
        # the device has work for as long as the hooks have theirs.
        self._ahead = min(_AHEAD, max(1, asked.log_every // 2))
        self.done = steps_of(state)
        self.total = asked.steps
        if self.total is None and self.feed.total is not None:
            self.total = self.done + self.feed.total
        self.signals = Signals()
        self.telling = Telling(asked.hooks, self.signals)
        self.ledger = Ledger(asked.step.metrics)
        self.schedule = Schedule(
            asked.log_every,
            [*self.evaluations, *([] if series is None else [series])],
            epoch_steps=self.feed.epoch_steps,
            by_epoch=self.telling.by_epoch,
            total=self.total,
        )
        self.stopped: str | None = None
        self.resumed: int | None = None
        self._evaluated: dict[str, int] = {}  # the step at which each evaluation was made last
        self._began = self.done
        self._position: Any = None  # of the first batch that was pulled and is in no state yet
        self._next_position: Any = None
        self._epochs_told = self.done  # up to which step hooks know of the ends of epochs
        self._batch: Any = None
        self._news = False  # whether hooks were told of anything
        self._ended = self.total is not None and self.done >= self.total
        self.marks: list[Mark] = []  # where the run began, and its last log points

    def resume(self) -> None:
        """Go on from the newest good checkpoint."""
        if self.series is None:
            return
        restored = self.series.restore(self.state)
        self.state = restored.state
        self.done = self._began = self.resumed = restored.step
        if self.total is None or self.done < self.total:
            self.feed.go_to(restored.data, self.done)
        kept = restored.extra.get("fit") if isinstance(restored.extra, dict) else None
        if kept:
            self._evaluated, self._epochs_told = kept["evaluated"], kept["epochs_told"]
            self._ended = kept["ended"]
            self.telling.history.set_state(kept["history"])
            self.ledger.set_state(kept)
            self.telling.set_state(kept["hooks"])

    def run(self) -> None:
        """Fold until something says stop; save before anything gets out."""
        over = self.total is not None and self.done >= self.total
        if over and self._ended:
            self.stopped = f"step {self.done} of {self.total} was done before"
            return
        try:
            self.telling.open(self.done, self.total)
            self._catch_up()
            if over:
                self.stopped = self.stopped or f"all {self.total} steps were done"
            self._fold()
            self._end()
        except BaseException as error:
            if not self.signals.twice:
                self._rescue(error)
            raise

    def _catch_up(self) -> None:
        """Do what an exception cut off in the run that this one goes on with."""
        self._show()
        if self.resumed and self.done != self.total:
            self._evaluate([e for e in self.evaluations if self.schedule.is_due(e, self.done)])
            self._end_epoch()
        self._save()

    def _fold(self) -> None:
        due = self.schedule.next_after(self.done)
        self.marks.append(self._mark())
        while self.stopped is None:
            batches = self._pull(min(self.steps_per_call, due - self.done))
            if not batches:
                return
            self.state, said = self.step(self.state, batches)
            self.done += len(batches)
            self._position, self._next_position = self._next_position, None
            self.ledger.add(said)
            if self.done == due:
                self._at_boundary()
                due = self.schedule.next_after(self.done)
            if self.ledger.closed:
                self._show(self.done - self._ahead)
            if self.signals.got is not None and self.signals.alone:
                self.stopped = f"{self.signals.got.name} at step {self.done}"

    def _pull(self, count: int) -> list[Any]:
        """Pull batches; none at the end, for which it says why."""
        batches: list[Any] = []
        for number in range(count):
            position = None if self.series is None else self.feed.position()
            if number == 0:
                self._position = position
            pulled = self.signals.wait_for(self.feed.pull, self.done + number)
            if pulled is None:
                self._next_position = position  # whatever the waiting that was broken off took
                break
            batches += pulled
        if batches:
            self._batch, self._ended = batches[-1], False
        elif self.signals.got is not None:
            self.stopped = f"{self.signals.got.name} at step {self.done}"
        else:
            self.stopped = f"the batches ended at step {self.done}"
            self._ended = True
            if not self.done:
                raise DataError("batches: expected at least one, got none")
        return batches

    def _at_boundary(self) -> None:
        done, last = self.done, self.done == self.total
        if last:
            self.stopped = f"all {done} steps were done"
        if self.schedule.is_log_point(done):
            self.ledger.close(done)
            self.marks = [*self.marks[:1], *self.marks[1:][-2:], self._mark()]
        epochs = self.schedule.epochs_done(done)
        saves = self.series is not None and self.series.due(done, epoch=epochs)
        due = [e for e in self.evaluations if self.schedule.is_due(e, done) and not last]
        ends = epochs is not None and self.telling.by_epoch
        if due or saves or ends:
            self._show()  # in the order of steps
        self._evaluate(due)
        if self.stopped is None:
            self._end_epoch()
        if saves and self.stopped is None:
            broken = has_nan(self.state)
            if broken:  # it stops, and those who look for it say where it came from
                self.ledger.close(self.done)
                self._show()
            self._save(broken=broken)

    def _mark(self) -> Mark:
        """Note where the batches stand: a metric of the interval to come may turn out no number."""
        return Mark(self.done, self.feed.position() if self._position is None else self._position)

    def _end_epoch(self) -> None:
        """Tell hooks that an epoch is over, after all that was measured at its end."""
        epochs = self.schedule.epochs_done(self.done)
        if epochs is not None and self.done > self._epochs_told:
            with self.telling.wholly():
                self.telling.end_epoch(epochs - 1)
                self._epochs_told = self.done

    def _show(self, until: int | None = None) -> None:
        """Show hooks the intervals that are over, all or those up to a step."""
        for interval in self.ledger.take(self.done if until is None else until):
            with self.telling.wholly():
                self._tell(interval)

    def _evaluate(self, due: Sequence[Evaluation]) -> None:
        for evaluation in due:
            if self._evaluated.get(evaluation.name) == self.done:
                continue
            found = self.signals.wait_for(functools.partial(_measure, evaluation, self.state), 0)
            if found is None:
                return
            check_measured(self.looked_for, evaluation.name, *found)
            with self.telling.wholly():
                self._tell(Interval(self.done, found[0], {}, {}, perf_counter()))
                self._evaluated[evaluation.name] = self.done

    def _tell(self, found: Interval) -> None:
        event = Event(
            found.step,
            self.total,
            found.metrics,
            self.state,
            found.each,
            self._batch,
            self.feed.waited,
            found.weights,
            found.time,
        )
        if self.series is not None and self.series.best is not None:
            expect(self.series.best[0], event)
        said = self.telling.show(event)
        self._news = True
        if said and self.stopped is None:
            self.stopped = f"{said} at step {self.done}"

    def _end(self) -> None:
        """Show what is left, evaluate a last time, and save."""
        self._ended = self._ended or self.done == self.total
        if not self._ended:  # it may go on, and then the interval is shown whole
            self._show()
            self._save()
        if self.signals.got is None:
            self.ledger.close(self.done)
            self._show()
            self._evaluate(self.evaluations)
            self._end_epoch()
        if self._ended:
            self._show()
            self._ended = self.signals.got is None
            self._save()

    def _rescue(self, error: BaseException) -> None:
        """Save what an exception would lose, if it is there; the exception itself goes on.

        Not with several processes, for the others know nothing of it, and would have to take part.
        """
        self._ended = False
        if not is_whole(self.state):
            told = self.step.explain(error)
            if told is not None:
                raise told from error
        elif jax.process_count() == 1:
            try:
                self._save()
            except (StepfoldError, OSError) as failure:
                error.add_note(f"nor could the state be saved: {type(failure).__name__}: {failure}")

    def _save(self, *, broken: bool | None = None) -> None:
        """Save, unless it is there already, or nothing that anybody wants back.

        To tell whether it is `broken` waits for the device; None is not known yet.
        """
        if self.series is None or self.done == self.series.saved:
            return
        if self.done == self._began and (self.resumed is None or not self._news):
            return
        if has_nan(self.state) if broken is None else broken:
            why = self.stopped or f"stopped at step {self.done}"
            self.stopped = f"{why.removesuffix(_BROKEN)}{_BROKEN}"
            return
        kept = {
            **self.ledger.get_state(),
            "history": self.telling.history.get_state(),
            "ended": self._ended,
            "evaluated": self._evaluated,
            "epochs_told": self._epochs_told,
            "hooks": self.telling.get_state(),
        }
        measured, extra = self.telling.measured(self.done), {"fit": kept}
        if self.done == self._began:  # it is there, and what was cut off when it was saved is done
            self.series.add_later(self.done, metrics=measured, extra=extra)
            self._news = False
            return
        self.series.save(
            self.state,
            step=self.done,
            data=self.feed.position() if self._position is None else self._position,
            metrics=measured,
            extra=extra,
        )


def _measure(evaluation: Evaluation, state: Any, _: int) -> dict[str, float]:
    try:
        return evaluation(state)
    except StopIteration as error:  # would pass for the end of what was waited for
        raise DataError(
            f"{evaluation.name}: StopIteration came up in the evaluation; what it reads has ended, "
            "so make it anew for each"
        ) from error
