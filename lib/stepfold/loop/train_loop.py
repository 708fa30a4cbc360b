"""The training loop: the order of operations, and the state of a run in its checkpoints."""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import jax

from stepfold.checkpoint.series import Series
from stepfold.core.state import has_nan, is_available, step_of
from stepfold.errors import ConfigError, DataError, StepfoldError
from stepfold.loop.data import BatchFeed, DataPosition
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.hooks.base import Event, HookDispatcher, Stop, check_spelling
from stepfold.loop.metrics import History, Interval, MetricBuffer
from stepfold.loop.preemption import Preemption, WaitInterrupted
from stepfold.loop.step_runner import StepRunner

_MAX_DELAY = 4  # steps that are dispatched before the metrics of a log point are read
_FORMAT = 2  # of the run state in a checkpoint; incremented when its meaning changes
_NOT_SAVED = "; not saved, because a parameter is NaN"
_END = object()


def iterate(
    step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batches: Iterable[Any]
) -> Iterator[tuple[Any, Any]]:
    """Fold batches into a state; yield the state and the metrics after each.

    Nothing is compiled, placed or waited for here. If the step donates its state, use each yielded
    state before the next iteration.

    Args:
      step: a `StepFn`, jitted or compiled for speed.
      state: the initial state.
      batches: any iterable of batches.

    >>> import itertools, jax, jax.numpy as jnp, optax, stepfold as sf
    >>> tx = optax.sgd(0.1)
    >>> state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    >>> step = jax.jit(sf.make_train_step(lambda p, x, key: sf.mean((p["w"] - x) ** 2), tx))
    >>> for state, metrics in sf.iterate(step, state, itertools.repeat(jnp.zeros(4), 3)):
    ...     print(int(state.step), f"{metrics['loss'].compute():.2f}")
    1 1.00
    2 0.64
    3 0.41
    """
    for batch in batches:
        state, metrics = step(state, batch)
        yield state, metrics


class Schedule:
    """When something is due: log points, evaluations, saves, the ends of epochs and of the run.

    Steps count from step 0 of the state, epochs from the first batch of the data, after
    `first_step`. Objects in `recurring` have `every` and `every_epochs`, each an integer or None.
    """

    def __init__(
        self,
        log_every: int,
        recurring: Sequence[Any],
        *,
        total: int | None,
        epoch_steps: int | None = None,
        first_step: int = 0,
        log_epochs: bool = False,
    ) -> None:
        self._log_every, self._total = log_every, total
        self._epoch_steps, self._first_step, self._log_epochs = epoch_steps, first_step, log_epochs
        self._every = [log_every, *(item.every for item in recurring if item.every)]
        epochs = [item.every_epochs for item in recurring if item.every_epochs]
        epochs += [1] if log_epochs else []
        self._every_epochs = [count * epoch_steps for count in epochs] if epoch_steps else []

    def next_after(self, step: int) -> int:
        first = self._first_step
        steps: list[int] = [(step // every + 1) * every for every in self._every]
        steps += [((step - first) // every + 1) * every + first for every in self._every_epochs]
        return min(steps if self._total is None else [*steps, self._total])

    def is_log_point(self, step: int) -> bool:
        """Whether an interval of train metrics ends with a step."""
        ends_epoch = self._log_epochs and self.epochs_done(step) is not None
        return step == self._total or step % self._log_every == 0 or ends_epoch

    def is_due(self, item: Any, step: int) -> bool:
        epochs = self.epochs_done(step)
        by_epoch = bool(epochs and item.every_epochs and epochs % item.every_epochs == 0)
        return by_epoch or bool(item.every and step % item.every == 0)

    def epochs_done(self, step: int) -> int | None:
        """Return the number of epochs done if one ends with a step, else None."""
        if not self._epoch_steps or step <= self._first_step:
            return None
        epochs, rest = divmod(step - self._first_step, self._epoch_steps)
        return epochs if rest == 0 else None


class TrainLoop:
    """Run steps until something stops the run; log, evaluate and save where due.

    The arguments are those of `fit`, checked. `watched` maps each metric that an argument depends
    on to that argument. `save_history` is for runs without a file of all metrics.
    """

    def __init__(
        self,
        runner: StepRunner,
        state: Any,
        feed: BatchFeed,
        *,
        steps: int | None = None,
        more_steps: int | None = None,
        evaluations: Sequence[Evaluation] = (),
        series: Series | None = None,
        hooks: HookDispatcher,
        watched: Mapping[str, str],
        log_every: int = 10,
        steps_per_call: int = 1,
        save_history: bool = True,
    ) -> None:
        self.state, self.step = state, step_of(state)
        self.preemption, self.hooks, self.series = Preemption(), hooks, series
        self.history, self._batch = History(), None
        self.stop: Stop | None = None
        self.resumed: int | None = None  # the step of the checkpoint that it resumed from
        self.positions: list[DataPosition] = []  # at the start and at the last log points
        self._run_step, self._feed, self._evaluations = runner, feed, evaluations
        self._buffer = MetricBuffer(runner.unpack)
        self._log_every, self._steps_per_call = log_every, steps_per_call
        self._save_history = save_history
        # Metrics are read this many steps late, so that the device has work while hooks run. At a
        # log point that evaluates or saves, and at the end, they are read at once.
        self._delay = min(_MAX_DELAY, max(1, log_every // 2))
        self._more_steps, new_steps = more_steps, more_steps or feed.total
        self.total = self.step + new_steps if steps is None and new_steps else steps
        self._first_step = self.step  # of this call
        self._unseen_metrics = dict(watched)
        self._provides_any = any(getattr(h, "provides", None) is None for h in hooks.hooks)
        # Saved in checkpoints, so that a resume finishes what an exception interrupted.
        self._evaluated: dict[str, int] = {}  # the step of the last evaluation by name
        self._epoch_ended_at = self.step
        self._is_complete = self.total is not None and self.step >= self.total
        self.logged_step = self.step  # of the last event
        self.logged_metrics: dict[str, float] = {}  # all of that step
        self._has_news = False  # whether hooks have seen an event

    def run(self) -> None:
        """Run to the end; save before an exception propagates."""
        if self._is_complete and self.total is not None and self.step >= self.total:
            message = f"step {self.step} of {self.total} was done before"
            self.stop = Stop("already_completed", message)
            return
        try:
            self.hooks.open(self.step, self.total)
            self._finish_boundary()
            while self.stop is None:
                batches = self._next_batches(min(self._steps_per_call, self._due - self.step))
                if not batches:
                    break
                self.state, metrics = self._run_step(self.state, batches)
                self.step += len(batches)
                self._feed.used += len(batches)
                self._buffer.append(metrics)
                if self.step == self._due:
                    self._boundary()
                if self._buffer.closed:
                    self._log(self.step - self._delay)
                if self.preemption.signal is not None and self.preemption.is_alone:
                    self._stop_by_signal()
            self._finish()
        except BaseException as error:
            if not self.preemption.was_repeated:
                self._rescue(error)
            raise

    def _finish_boundary(self) -> None:
        """Start the schedule, and finish what an exception interrupted before a resume."""
        self._schedule = Schedule(
            self._log_every,
            [*self._evaluations, *([] if self.series is None else [self.series])],
            total=self.total,
            epoch_steps=self._feed.epoch_steps,
            first_step=self.step - self._feed.used,
            log_epochs=self.hooks.wants_epochs,
        )
        self._due = self._schedule.next_after(self.step)
        self._log()
        if self.resumed and self.step != self.total:
            self._evaluate([e for e in self._evaluations if self._schedule.is_due(e, self.step)])
            self._end_epoch()
        self._save()
        self.positions.append(self._position())
        if self.total is not None and self.step >= self.total and self.stop is None:
            self.stop = Stop("completed", f"all {self.total} steps were done")

    def _next_batches(self, count: int) -> list[Any]:
        """Pull up to `count` batches; if there are none, set the reason to stop."""
        batches: list[Any] = []
        while len(batches) < count:
            batch = self._interruptible(self._feed.next_batch, self.step + len(batches))
            if batch is _END:
                break
            batches.append(batch)
        if batches:
            self._batch, self._is_complete = batches[-1], False
        elif self.preemption.signal is not None:
            self._stop_by_signal()
        else:
            self._stop_exhausted()
        return batches

    def _interruptible(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that may block; return `_END` on StopIteration or a signal."""
        preemption = self.preemption
        if preemption.signal is not None and preemption.is_alone:
            return _END
        try:
            preemption.is_waiting = preemption.is_alone
            value = function(*args)
            preemption.is_waiting = False
        except (StopIteration, WaitInterrupted):
            return _END
        finally:
            preemption.is_waiting = False
        return value

    def _stop_by_signal(self) -> None:
        if self.preemption.signal is not None:
            name = self.preemption.signal.name
            self.stop = self.stop or Stop("signal", f"{name} at step {self.step}")

    def _stop_exhausted(self) -> None:
        if not self.step:
            raise DataError("batches: expected at least one, got none")
        self.stop = Stop("exhausted", f"the batches ended at step {self.step}")
        self._is_complete = True
        if self.total is not None and not self._feed.is_iterator:
            warnings.warn(
                f"batches: expected enough for {self.total} steps, got {self._feed.used}; give "
                "epochs=… to iterate them several times, or steps=None to use them once",
                stacklevel=5,
            )

    def _boundary(self) -> None:
        """Do what is due after a step: log, then evaluate, then save."""
        step, is_last = self.step, self.step == self.total
        if is_last:
            self.stop = Stop("completed", f"all {step} steps were done")
        if self._schedule.is_log_point(step):
            self._buffer.close_interval(step)
            self.positions = [*self.positions[:1], *self.positions[1:][-2:], self._position()]
        epochs = self._schedule.epochs_done(step)
        saves = self.series is not None and self.series.due(step, epoch=epochs)
        evaluations = [e for e in self._evaluations if self._schedule.is_due(e, step)]
        ends_epoch = epochs is not None and self.hooks.wants_epochs
        if evaluations or saves or ends_epoch or self.hooks.needs_exact_state:
            self._log()
        if not is_last:  # `_finish` does it otherwise
            self._evaluate(evaluations)
        if self.stop is None:
            self._end_epoch()
        if saves and self.stop is None:
            broken = has_nan(self.state)
            if broken:  # hooks see the metrics first: one may know where the NaN comes from
                self._buffer.close_interval(step)
                self._log()
            self._save(broken)
        self._due = self._schedule.next_after(step)

    def _finish(self) -> None:
        """Log the rest, evaluate a last time, and save."""
        self._is_complete = self._is_complete or self.step == self.total
        if not self._is_complete:  # a resume continues the open interval, and logs it whole
            self._log()
            self._save()
        if self.preemption.signal is None:
            self._buffer.close_interval(self.step)
            self._log()
            self._evaluate(self._evaluations)
            self._end_epoch()
            self._warn_of_unseen_metrics()
        if self._is_complete:
            self._log()
            self._is_complete = self.preemption.signal is None
            self._save()

    def _rescue(self, error: BaseException) -> None:
        """Save after an exception, but not with several processes: the others do not take part."""
        self._is_complete = False
        if not is_available(self.state):
            explanation = self._run_step.explain(error)
            if explanation is not None:
                raise explanation from error
        elif jax.process_count() == 1:
            try:
                self._save()
            except (StepfoldError, OSError) as failure:
                error.add_note(f"the state could not be saved: {type(failure).__name__}: {failure}")

    def _log(self, until: int | None = None) -> None:
        """Send hooks the intervals that ended at or before a step, by default all."""
        for interval in self._buffer.take(self.step if until is None else until):
            with self.hooks.transaction():
                self._dispatch(interval, "train")

    def _evaluate(self, evaluations: Sequence[Evaluation]) -> None:
        for evaluation in evaluations:
            if self._evaluated.get(evaluation.name) == self.step:
                continue
            metrics = self._interruptible(functools.partial(_evaluate, evaluation), self.state)
            if metrics is _END:
                return
            interval = Interval(self.step, metrics, {}, {}, perf_counter())
            with self.hooks.transaction():
                self._dispatch(interval, evaluation.name)
                self._evaluated[evaluation.name] = self.step

    def _end_epoch(self) -> None:
        """Call hooks at the end of an epoch, after all events of its last step."""
        epochs = self._schedule.epochs_done(self.step)
        if epochs is not None and self.step > self._epoch_ended_at:
            with self.hooks.transaction():
                self.hooks.end_epoch(epochs - 1)
                self._epoch_ended_at = self.step

    def _dispatch(self, interval: Interval, kind: str) -> None:
        event = Event(
            step=interval.step,
            total=self.total,
            metrics=interval.metrics,
            state=self.state,
            per_step=interval.per_step,
            batch=self._batch,
            data_wait_seconds=self._feed.wait_seconds,
            weights=interval.weights,
            time=interval.time,
            kind=kind,
        )
        if self._unseen_metrics:
            self._check_watched(event)
        event, stop = self.hooks.dispatch(event)
        self.history.add(event.step, event.metrics)
        if self._unseen_metrics:
            self._mark_seen(event)
        is_new = event.step != self.logged_step
        self.logged_metrics = {**({} if is_new else self.logged_metrics), **event.metrics}
        self.logged_step, self._has_news = event.step, True
        if not self.preemption.is_alone:
            stop = self.preemption.agree(stop)
        if stop is not None and self.stop is None:
            self.stop = stop._replace(message=f"{stop.message} at step {self.step}")

    def _check_watched(self, event: Event) -> None:
        for metric, argument in self._unseen_metrics.items():
            check_spelling(metric, event)
            is_own_kind = metric.rpartition("/")[0] == event.kind
            if is_own_kind and metric not in event.metrics and not self._provides_any:
                names = ", ".join(sorted(event.metrics))
                raise ConfigError(
                    f"{metric}: expected a metric that is measured, got {names}; {argument} needs "
                    "one of them"
                )

    def _mark_seen(self, event: Event) -> None:
        unseen = self._unseen_metrics.items()
        self._unseen_metrics = {name: arg for name, arg in unseen if name not in event.metrics}

    def _warn_of_unseen_metrics(self) -> None:
        for metric, argument in self._unseen_metrics.items():
            if self._has_news:
                warnings.warn(
                    f"{metric}: expected a metric that is measured, got "
                    f"{', '.join(sorted(self.history))}; {argument} had no effect",
                    stacklevel=5,
                )

    def restore(self) -> None:
        """Restore the newest good checkpoint."""
        if self.series is None:
            return
        restored = self.series.restore(self.state)
        self.state = restored.state
        self.step = self._first_step = self.resumed = self.logged_step = restored.step
        extra = restored.extra if isinstance(restored.extra, dict) else {}
        saved = extra.get("fit") or {}
        if saved and saved.get("format") != _FORMAT:
            warnings.warn(
                f"{self.series.directory}: step {self.step} was saved by another version of "
                "stepfold: its state and data position are restored, but not its metrics and hooks",
                stacklevel=4,
            )
            saved = {}
        if self._more_steps is not None:  # an interrupted run keeps its target
            complete = saved.get("is_complete", True) or saved["total"] is None
            self.total = self.step + self._more_steps if complete else saved["total"]
        self._is_complete = saved.get("is_complete", self._is_complete)
        if self.total is None or self.step < self.total:
            self._feed.seek(restored.data, self.step, saved.get("batches_used"))
        if saved:
            self._evaluated, self._epoch_ended_at = saved["evaluated"], saved["epoch_ended_at"]
            self.logged_step, self.logged_metrics = saved["logged_step"], saved["logged_metrics"]
            self.history.set_state(saved["history"])
            self._buffer.set_state(saved["buffer"])
            self.hooks.set_state(saved["hooks"])

    def get_state(self) -> dict[str, Any]:
        """Return the run state for a checkpoint; its size does not grow with the run."""
        return {
            "format": _FORMAT,
            "total": self.total,
            "is_complete": self._is_complete,
            "batches_used": self._feed.used,
            "evaluated": self._evaluated,
            "epoch_ended_at": self._epoch_ended_at,
            "logged_step": self.logged_step,
            "logged_metrics": self.logged_metrics,
            "history": self.history.get_state() if self._save_history else {},
            "buffer": self._buffer.get_state(),
            "hooks": self.hooks.get_state(),
        }

    def _position(self) -> DataPosition:
        return DataPosition(self.step, self._feed.position())

    def _save(self, broken: bool | None = None) -> None:
        """Save the state, unless it is saved already or a parameter is NaN (`broken`)."""
        if self.series is None or self.step == self.series.saved:
            return
        if self.step == self._first_step and (self.resumed is None or not self._has_news):
            return
        if has_nan(self.state) if broken is None else broken:
            stop = self.stop or Stop("nonfinite", f"stopped at step {self.step}")
            message = stop.message.removesuffix(_NOT_SAVED) + _NOT_SAVED
            self.stop = stop._replace(message=message)
            return
        metrics = self.logged_metrics if self.logged_step == self.step else {}
        extra = {"fit": self.get_state()}
        if self.step == self._first_step:  # resumed from it: add what was measured since
            self.hooks.flush()
            self.series.add_later(self.step, metrics=metrics, extra=extra)
            self._has_news = False
            return
        self.series.save(
            self.state,
            step=self.step,
            data=self._feed.position(),
            metrics=metrics,
            extra=extra,
            before_commit=self.hooks.flush,
        )


def _evaluate(evaluation: Evaluation, state: Any) -> dict[str, float]:
    try:
        return evaluation(state)
    except StopIteration as error:  # would pass for the end of the batches
        raise DataError(
            f"{evaluation.name}: StopIteration came up in the evaluation: what it reads has ended; "
            "make it again for each evaluation"
        ) from error
