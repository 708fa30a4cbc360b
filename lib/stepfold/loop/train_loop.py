"""The training loop: the order of operations, and the state of a run in its checkpoints."""

import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from stepfold import tree
from stepfold.checkpoint.series import Series
from stepfold.core.processes import KeyValues, agreement, spell_processes
from stepfold.core.state import has_nan, is_available, step_of
from stepfold.data.epochs import EpochEnds, size_at
from stepfold.errors import CheckpointError, ConfigError, DataError, StepfoldError
from stepfold.loop.data import BatchFeed, DataPosition, EqualEpochs
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.hooks.base import Event, GoBack, HookDispatcher, Stop
from stepfold.loop.metrics import History, Interval, MetricBuffer
from stepfold.loop.preemption import Preemption, WaitInterrupted
from stepfold.loop.rollback import Rollbacks
from stepfold.loop.step_runner import StepRunner

_MAX_DELAY = 4  # steps that are dispatched before the metrics of a log point are read
_FORMAT = 2  # of the run state in a checkpoint; incremented when its meaning changes
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
    `first_step`; `epoch_ends` knows where they end. Objects in `recurring` have `every` and
    `every_epochs`, each an integer or None. The batch size changes after the steps `size_changes`,
    across which no call of several steps may go.
    """

    def __init__(
        self,
        log_every: int,
        recurring: Sequence[Any],
        *,
        total: int | None,
        epoch_ends: EpochEnds | EqualEpochs | None = None,
        first_step: int = 0,
        log_epochs: bool = False,
        size_changes: Sequence[int] = (),
    ) -> None:
        self._log_every, self._total, self._log_epochs = log_every, total, log_epochs
        self._epoch_ends, self._first_step = epoch_ends, first_step
        self._every = [item.every for item in recurring if item.every]
        self._every_epochs = [item.every_epochs for item in recurring if item.every_epochs]
        self._every_epochs += [1] if log_epochs else []
        self._size_changes = size_changes

    def next_after(self, step: int) -> int:
        """Return the next step after which something is due."""
        steps = [step + self._log_every - step % self._log_every, *self._next_reads(step)]
        return min([*steps, *(change for change in self._size_changes if change > step)])

    def read_at(self, log_point: int, delay: int) -> int:
        """Return the step after which the metrics of a log point are read, `delay` at most."""
        read = min(self._next_reads(log_point - 1), default=log_point + delay)
        return min(read, log_point + delay)

    def _next_reads(self, step: int) -> list[int]:
        """List the next evaluation, save, end of an epoch and of the run: all metrics are read."""
        steps = [step + every - step % every for every in self._every]
        if self._epoch_ends is not None:
            done = self._epoch_ends.done(step - self._first_step)
            epochs = [(done // every + 1) * every for every in self._every_epochs]
            steps += [self._first_step + self._epoch_ends.end(count) for count in epochs]
        return steps if self._total is None else [*steps, self._total]

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
        used = step - self._first_step
        if self._epoch_ends is None or used <= 0:
            return None
        done = self._epoch_ends.done(used)
        return done if done > self._epoch_ends.done(used - 1) else None


class TrainLoop:
    """Run steps until something stops the run; log, evaluate and save where due.

    The arguments are those of `fit`, checked. `save_history` is for runs without a file of all
    metrics.
    """

    def __init__(
        self,
        runner: StepRunner,
        state: Any,
        feed: BatchFeed,
        *,
        steps: int | None,
        more_steps: int | None,
        evaluations: Sequence[Evaluation],
        series: Series | None,
        hooks: HookDispatcher,
        log_every: int,
        steps_per_call: int,
        save_history: bool,
    ) -> None:
        self.state, self.step = state, step_of(state)
        self.preemption, self.hooks, self.series = Preemption(), hooks, series
        self.history, self._batch = History(), None
        self.stop: Stop | None = None
        self.resumed: int | None = None  # the step of the checkpoint that it resumed from
        self.was_complete = False  # whether that checkpoint was the last of a complete run
        self.positions: list[DataPosition] = []  # at the start and at the last log points
        self.rollbacks = None if series is None else Rollbacks(series, feed)
        self.go_back: GoBack | None = None  # agreed on, if `run` returned for the run to go back
        self._request: GoBack | None = None  # of a hook of this process
        # A reason of a hook, and the step at which it ends the run. No resume and no length of a
        # call changes the step, and a checkpoint keeps it until the run has ended by it.
        self._hook_stop: tuple[int, Stop] | None = None
        self._run_step, self._feed, self._evaluations = runner, feed, evaluations
        self._buffer = MetricBuffer(runner.unpack)
        self._log_every, self._steps_per_call = log_every, steps_per_call
        self._save_history = save_history
        # Metrics are read this many steps late, so that the device has work while hooks run. At a
        # log point that evaluates or saves, and at the end, they are read at once.
        self._delay = 0 if hooks.needs_exact_state else min(_MAX_DELAY, max(1, log_every // 2))
        self._more_steps = more_steps
        new_steps = more_steps or feed.total  # at most one of the three is given
        self.total = self.step + new_steps if new_steps else steps
        self._start = self._first_step = self.step  # of the run; and since it resumed or went back
        # Saved in checkpoints, so that a resume finishes what an exception interrupted.
        self._evaluated: dict[str, int] = {}  # the step of the last evaluation by name
        self._epoch_ended_at = self.step
        self._is_complete = self.total is not None and self.step >= self.total
        self.logged_step = self.step  # of the last event
        self.logged_metrics: dict[str, float] = {}  # all of that step
        self._saw_event = False  # whether hooks saw an event that the restored checkpoint lacks
        # With several processes: on each pull, if one of them may have fewer batches, or on stops.
        self._votes_on_batches = self._votes_on_steps = False
        self._deferred_error: Exception | None = None  # of user code, see `_defer_error`
        self._warned_of_save = False
        if series is not None:
            series.on_request(self.preemption.request_save)

    def run(self) -> None:
        """Run to the end, or until `go_back` is set; save before an exception propagates."""
        self._compare_lengths()
        if self._is_complete and self.total is not None and self.step >= self.total:
            message = f"step {self.step} of {self.total} was done before"
            self.stop = Stop("already_completed", message)
            return
        try:
            with agreement("hooks: not opened"):
                self.hooks.open(self.step, self.total)
            self._finish_boundary()
            while self.stop is None and (batches := self._next_batches()):
                self.state, metrics = self._run_step(self.state, batches)
                self.step += len(batches)
                self._feed.used += len(batches)
                self._buffer.append(metrics)
                if self.step == self._due:
                    self._boundary()
                if self._buffer.closed:
                    self._log(self.step - self._delay)
                if self._hook_stop is not None:
                    self._stop_by_hook()
                if self._votes_on_steps:
                    self.preemption.vote(self.step)
                if self.preemption.has_agreed:
                    self._act_on_agreement()
            self._finish()
            self._raise_deferred_error()
        except BaseException as error:
            if not self.preemption.was_repeated:
                self._rescue(error)
            raise

    # The start

    def _compare_lengths(self) -> None:
        """Check that all processes have equally many batches; if unknown, vote on each pull."""
        left = self._feed.batches_left
        if left is not None and self.total is not None:
            left = min(left, max(0, self.total - self.step))
        lengths = KeyValues("fit").gather([self.total, left], "the start of the run")
        totals, counts = ([length[i] for length in lengths] for i in range(2))
        self._votes_on_batches = not self.preemption.is_alone and None in counts
        self._votes_on_steps = not self.preemption.is_alone and None not in counts
        if len(set(totals)) > 1 or (None not in counts and len(set(counts)) > 1):
            counts = totals if len(set(totals)) > 1 else [self.step + count for count in counts]
            known = [count for count in counts if count is not None]
            raise DataError(
                f"batches: expected as many steps in every process, got {counts}; give "
                f"steps={min(known)}, or as many batches to each"
            )

    def _finish_boundary(self) -> None:
        """Start the schedule, and finish what an exception interrupted before a resume."""
        first_step = self.step - self._feed.used
        saves = [] if self.series is None else [self.series.policy, self.series.temporary]
        self._schedule = Schedule(
            self._log_every,
            [*self._evaluations, *filter(None, saves)],
            total=self.total,
            epoch_ends=self._feed.epoch_ends,
            first_step=first_step,
            log_epochs=self.hooks.wants_epochs,
            size_changes=[first_step + start for start, _ in self._feed.batch_sizes[1:]],
        )
        self._find_due()
        is_read = bool(self.resumed) and self._schedule.read_at(self.step, 1) == self.step
        self._log(self.step if is_read else self.step - self._delay)
        if self.resumed and self.step != self.total:
            self._evaluate([e for e in self._evaluations if self._schedule.is_due(e, self.step)])
            self._end_epoch()
        self._save(permanent=False)
        self.positions.append(DataPosition(self.step, self._feed.position()))
        if self.total is not None and self.step >= self.total and self.stop is None:
            self.stop = Stop("completed", f"all {self.total} steps were done")
        self._stop_by_hook()
        if self._request is not None and self.stop is None:  # an exception came before
            self.stop = Stop("go_back", self._request.why)

    # The next batches

    def _next_batches(self) -> list[Any]:
        """Pull batches for a call; if there are none, set the reason to stop."""
        count = min(self._steps_per_call, self._due - self.step)
        if self._buffer.closed:  # hooks may have a reason to stop there
            count = min(count, self._buffer.closed[0].step + self._delay - self.step)
        batches: list[Any] = []
        try:
            while len(batches) < count:
                batch = self._interruptible(self._feed.next_batch, self.step + len(batches))
                if batch is _END:
                    break
                batches.append(batch)
        except Exception as error:
            if not self._votes_on_batches:  # the others may have dispatched this step already
                raise
            self._defer(error)
        if self._votes_on_batches:
            batches = self._agree_on_batches(batches)
        if batches:
            self._batch, self._is_complete = batches[-1], False
        else:
            self._stop_by_agreement()
            if self.stop is None:
                self._stop_exhausted()
        return batches

    def _interruptible(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that may block; return `_END` on StopIteration or a signal."""
        preemption = self.preemption
        if preemption.agreed is not None and preemption.is_alone:
            return _END
        try:
            preemption.is_waiting = preemption.is_alone
            value = function(*args)
            # Not only in `finally`, where a signal would raise outside of this `try`.
            preemption.is_waiting = False
        except (StopIteration, WaitInterrupted):
            return _END
        finally:
            preemption.is_waiting = False
        return value

    def _agree_on_batches(self, batches: list[Any]) -> list[Any]:
        """Keep as many batches as all processes have, so that all stop at the same step."""
        if self.step == self._first_step:  # a process may be minutes late
            KeyValues("fit").gather(None, "a first batch")
        counts = self.preemption.agree(len(batches))
        if min(counts) == 0 < max(counts) and self.preemption.failed_process is None:
            ended = [process for process, count in enumerate(counts) if not count]
            warnings.warn(
                f"batches: expected as many in every process, got {self.step} in "
                f"{spell_processes(ended)}, and more in the others, which stop there too; give "
                "steps=…, or as many batches to each",
                stacklevel=5,
            )
        return batches[: min(counts)]

    def _stop_exhausted(self) -> None:
        if self.step == self._first_step and self.resumed is None:
            raise DataError("batches: expected at least one, got none")
        self.stop = Stop("exhausted", f"the batches ended at step {self.step}")
        self._is_complete = True
        if self.total is not None and not self._feed.is_iterator:
            warnings.warn(
                f"batches: expected enough for {self.total} steps, got {self._feed.used}; give "
                "epochs=… to iterate them several times, or steps=None to use them once",
                stacklevel=5,
            )

    # After a step

    def _boundary(self) -> None:
        """Log, then evaluate, then save, each if it is due after this step."""
        step, is_last = self.step, self.step == self.total
        if is_last:
            self.stop = Stop("completed", f"all {step} steps were done")
        if self._schedule.is_log_point(step):
            self._buffer.close_interval(step)
            # The start and three log points: one is before any step whose metrics are not read yet.
            position = DataPosition(step, self._feed.position())
            self.positions = [*self.positions[:1], *self.positions[1:][-2:], position]
        epochs = self._schedule.epochs_done(step)
        saves = self.series is not None and self.series.due(step, epoch=epochs)
        evaluations = [e for e in self._evaluations if self._schedule.is_due(e, step)]
        ends_epoch = epochs is not None and self.hooks.wants_epochs
        if evaluations or saves or ends_epoch or not self._delay:
            self._log()
            self._stop_by_hook()
        if not is_last:  # `_finish` does it otherwise
            self._evaluate(evaluations)
        if self.stop is None:
            self._end_epoch()
        if saves and self.stop is None:
            self._save_or_stop(permanent=False)
        self._find_due()

    def _find_due(self) -> None:
        """Find the next step after which something is due, and use the programs of its batches."""
        self._due = self._schedule.next_after(self.step)
        if len(sizes := self._feed.batch_sizes) > 1:
            used, total = self._feed.used, math.inf if self.total is None else self.total
            end = total - self.step + used
            later = [size for start, size in sizes if used < start < end]
            self._run_step.set_batch_size(size_at(sizes, used), later)

    def _act_on_agreement(self) -> None:
        """Stop by a signal or a hook, or save by request."""
        preemption = self.preemption
        preemption.has_agreed = False  # first, since a thread or a signal may set it again
        self._stop_by_agreement()
        if not preemption.agreed_save:
            return
        preemption.agreed_save = False
        if self.series is None:
            if not self._warned_of_save:
                warnings.warn(
                    "SIGUSR1: expected a series to save in, got none; give checkpoints=…",
                    stacklevel=4,
                )
            self._warned_of_save = True
        elif self.stop is None:
            self._log()
            if self.stop is None:
                self._save_or_stop(permanent=True)

    def _stop_by_agreement(self) -> None:
        preemption = self.preemption
        if preemption.agreed is not None and (self.stop is None or self._is_by_hook()):
            self.stop = Stop("signal", f"{preemption.agreed.name} at step {self.step}")
        if preemption.agreed_stop is not None:
            self._request_stop(preemption.agreed_stop, self.step)

    def _request_stop(self, stop: Stop, step: int) -> None:
        """Stop at a step, for a reason of a hook. Corruption comes first, and at once."""
        if stop.kind == "corrupt" and (self.stop is None or self.stop.kind != "corrupt"):
            self._hook_stop, self.stop = (self.step, stop), None
        self._hook_stop = self._hook_stop or (step, stop)
        self._stop_by_hook()

    def _stop_by_hook(self) -> None:
        """Stop if a hook has given a reason, and the step has come at which it takes effect."""
        if self._hook_stop is not None and self.stop is None:
            step, stop = self._hook_stop
            if step <= self.step:
                self.stop = stop._replace(message=f"{stop.message}; stopped at step {self.step}")

    def _is_by_hook(self) -> bool:
        """Whether the run stops by a reason of a hook, which a resume can still act on."""
        if self._hook_stop is None or self.stop is None:
            return False
        return self.stop.kind == self._hook_stop[1].kind != "corrupt"

    # The end

    def _finish(self) -> None:
        """Log the rest, evaluate a last time, and save."""
        preemption = self.preemption
        preemption.agree()
        has_failed = preemption.failed_process is not None
        is_interrupted = has_failed or preemption.agreed is not None
        self._is_complete = (self._is_complete or self.step == self.total) and not has_failed
        if self._is_complete and not is_interrupted:
            self._buffer.close_interval(self.step)
        self._log()
        if self._agree_to_go_back():
            return
        if not self._is_complete:  # a resume continues the open interval, and logs it whole
            self._save()
        saved = None if self._is_complete or self._hook_stop is None else self._extra()
        if not is_interrupted:
            self._buffer.close_interval(self.step)
            self._log()
            self._evaluate(self._evaluations)
            self._end_epoch()
        if self._is_complete:
            self._is_complete = preemption.agreed is None
            self._hook_stop = self._hook_stop if preemption.agreed else None
            self._save()
        elif saved is not None and not preemption.agreed and not has_failed:
            self._forget_stop(saved)

    def _forget_stop(self, saved: dict[str, Any]) -> None:
        """Let a later run continue after a run that has ended by a hook."""
        self._hook_stop, saved["fit"]["stop"] = None, None
        if self.series is not None and self.step in (self.series.saved, self.resumed):
            self.hooks.flush()
            self.series.add_later(self.step, metrics={}, extra=saved)

    def _agree_to_go_back(self) -> bool:
        """Whether a hook of any process lets the run go back; if it cannot, stop instead."""
        # Not if the state is corrupt, or if another run may use the directory.
        kind = None if self.stop is None else self.stop.kind
        may_go_back = kind not in ("corrupt", "error") or self.preemption.failed_process is not None
        votes = KeyValues("fit").gather([self._request, may_go_back], "the end of its steps")
        request = next((GoBack(*request) for request, _ in votes if request is not None), None)
        if request is None or not all(may_go_back for _, may_go_back in votes):
            return False
        if self.rollbacks is None:
            raise ConfigError(
                "hooks: expected checkpoints=… for a hook that lets the run go back, got none; "
                f"give sf.Checkpoints(every=…): {request.why}"
            )
        target = self.rollbacks.find_target(request)
        if isinstance(target, Stop):
            self.stop = self._request = self._hook_stop = None
            self._request_stop(target, self.step)
        else:
            self.go_back = request._replace(to=target)
        return self.go_back is not None

    def _rescue(self, error: BaseException) -> None:
        """Save after an exception, but not with several processes: the others do not take part."""
        self._is_complete = False
        if isinstance(error, FloatingPointError):
            error.add_note(
                f"jax_debug_nans ended the run after step {self.step}. It ignores a NaN that "
                "skip_nonfinite or a loss scale skips. Turn it off to let stop_on_nonfinite end "
                "the run, with a capsule for sf.replay."
            )
        if not is_available(self.state):
            explanation = self._run_step.explain(error)
            if explanation is not None:
                raise explanation from error
        elif self.preemption.is_alone:
            try:
                try:
                    self._save()
                except ConfigError as failure:  # a position or hook state that JSON cannot hold
                    error.add_note(
                        f"the state is saved alone, for sf.restore, not for a resume: {failure}"
                    )
                    self._save(alone=True)
            except (StepfoldError, OSError) as failure:
                error.add_note(f"the state could not be saved: {type(failure).__name__}: {failure}")

    # Events

    @contextmanager
    def _defer_error(self) -> Iterator[None]:
        """With several processes, keep an error of hooks in one until all have stopped and saved.

        Until they have agreed to, this process takes part in the steps of the others. Its hooks see
        no more events; the checkpoint keeps these.
        """
        try:
            yield
        except Exception as error:
            if self.preemption.is_alone:
                raise
            self._defer(error)

    def _defer(self, error: Exception) -> None:
        self._deferred_error, self.preemption.has_failed = error, True
        self.preemption.add_event(None)  # so that the next vote is soon

    def _raise_deferred_error(self) -> None:
        if self._deferred_error is not None:
            raise self._deferred_error
        if self.preemption.failed_process is not None:
            raise StepfoldError(
                f"fit: expected no error in any process, got one in process "
                f"{self.preemption.failed_process}, which shows it; all stopped at step {self.step}"
            )

    def _log(self, until: int | None = None) -> None:
        """Send hooks the intervals that ended at or before a step, by default all."""
        if self._deferred_error is None:
            with self._defer_error():
                for interval in self._buffer.take(self.step if until is None else until):
                    with self.hooks.transaction():
                        self._dispatch(interval, "train")

    def _evaluate(self, evaluations: Sequence[Evaluation]) -> None:
        for evaluation in evaluations:
            if self._evaluated.get(evaluation.name) == self.step:
                continue
            metrics = self._interruptible(evaluation, self.state)
            if metrics is _END:
                return
            if self._deferred_error is not None:
                continue
            interval = Interval(self.step, metrics, {}, {}, perf_counter())
            with self._defer_error(), self.hooks.transaction():
                self._dispatch(interval, evaluation.name)
                self._evaluated[evaluation.name] = self.step

    def _end_epoch(self) -> None:
        """Call hooks at the end of an epoch, after all events of its last step."""
        epochs = self._schedule.epochs_done(self.step)
        if epochs is not None and self.step > self._epoch_ended_at and not self._deferred_error:
            with self._defer_error(), self.hooks.transaction():
                self.hooks.end_epoch(epochs - 1)
                self._epoch_ended_at = self.step

    def _dispatch(self, interval: Interval, kind: str) -> None:
        event = Event(
            **interval._asdict(),
            total=self.total,
            state=self.state,
            batch=self._batch,
            data_wait_seconds=self._feed.wait_seconds,
            kind=kind,
            hook_seconds=self.hooks.seconds,
        )
        event, stop = self.hooks.dispatch(event)
        self.history.add(event.step, event.metrics)
        is_new = event.step != self.logged_step
        self.logged_metrics = {**({} if is_new else self.logged_metrics), **event.metrics}
        self.logged_step, self._saw_event = event.step, True
        if isinstance(stop, GoBack):
            self._request, stop = self._request or stop, Stop("go_back", stop.why)
        if not self.preemption.is_alone:
            self.preemption.add_event(stop)
        elif stop is not None and stop.kind == "go_back":
            self.stop = self.stop or stop
        elif stop is not None:
            is_train = kind == "train"
            at = self._schedule.read_at(event.step, self._delay) if is_train else self.step
            self._request_stop(stop, at)

    # Checkpoints

    def restore(self, series: Series) -> None:
        """Restore the newest good checkpoint."""
        restored = series.restore(self.state)
        self.state, self.stop = restored.state, None
        self._request = self.go_back = self._hook_stop = None
        self.history.clear()
        self._buffer, self._saw_event = MetricBuffer(self._run_step.unpack), False
        self.positions = []
        self.preemption.restart(restored.step)
        self.step = self._first_step = self.resumed = self.logged_step = restored.step
        extra = restored.extra if isinstance(restored.extra, dict) else {}
        saved: Any = extra.get("fit") or {}
        if saved and (not isinstance(saved, dict) or saved.get("format") != _FORMAT):
            warnings.warn(
                f"{series.directory}: step {self.step} was saved by another version of "
                "stepfold: its state and data position are restored, but not its metrics and hooks",
                stacklevel=3,
            )
            saved = {}
        if saved:
            try:
                self._set_state(saved)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                if isinstance(error, StepfoldError):
                    raise
                raise CheckpointError(
                    f"{series.directory}: expected the state of a run as fit saves it in step "
                    f"{self.step}, got {error!r}; restore the state with sf.restore instead"
                ) from error
        self.was_complete = self._is_complete
        if self._more_steps is not None:  # an interrupted run keeps its target
            is_interrupted = saved.get("total") is not None and not self.was_complete
            self.total = saved["total"] if is_interrupted else self.step + self._more_steps
        needs_batches = self.total is None or self.step < self.total
        used = saved.get("batches_used")
        self._feed.seek(restored.data, self.step, used, needs_batches=needs_batches)

    def skip(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Skip ranges of batch indices, which begin after the position of the batches."""
        self._feed.skip(ranges)
        if self._feed.total is not None:  # the epochs to do are shorter now
            self.total = self._start + self._feed.total

    def get_state(self) -> dict[str, Any]:
        """Return the run state for a checkpoint; its size does not grow with the run."""
        return {
            "format": _FORMAT,
            "total": self.total,
            "is_complete": self._is_complete,
            "batches_used": self._feed.used,
            "evaluated": dict(self._evaluated),  # which changes before it is saved
            "epoch_ended_at": self._epoch_ended_at,
            "logged_step": self.logged_step,
            "logged_metrics": self.logged_metrics,
            "history": self.history.get_state() if self._save_history else {},
            "buffer": self._buffer.get_state(),
            "hooks": self.hooks.get_state(),
            "stop": None if self._hook_stop is None else [self._hook_stop[0], *self._hook_stop[1]],
            "go_back": None if self._request is None else list(self._request),
        }

    def _set_state(self, saved: Mapping[str, Any]) -> None:
        """Continue from a saved run state, which may have been written by others."""
        for name, value in self.get_state().items():
            types = (int, type(None)) if name == "total" else (type(value),)
            if name not in ("stop", "go_back") and type(saved[name]) not in types:
                raise TypeError(f"{name}: {tree.spell(saved[name])}")
        if stop := saved.get("stop"):  # these two are missing in a checkpoint of 0.1
            self._hook_stop = operator.index(stop[0]), Stop(str(stop[1]), str(stop[2]))
        if request := saved.get("go_back"):
            self._request = GoBack(*request)
        self._is_complete = saved["is_complete"]
        self._evaluated, self._epoch_ended_at = saved["evaluated"], saved["epoch_ended_at"]
        self.logged_step, self.logged_metrics = saved["logged_step"], saved["logged_metrics"]
        self.history.set_state(saved["history"])
        self._buffer.set_state(saved["buffer"])
        self.hooks.set_state(saved["hooks"])

    def _extra(self) -> dict[str, Any]:
        """Return what a checkpoint holds next to the state."""
        extra: dict[str, Any] = {"fit": self.get_state()}
        if self.rollbacks is not None and self.rollbacks.done:
            extra["rollbacks"] = len(self.rollbacks.done)
        return extra

    def _save_or_stop(self, *, permanent: bool) -> None:
        """Save the state; if a parameter is NaN, stop once hooks have seen the metrics."""
        if has_nan(self.state):  # `_finish` refuses to save it
            self._buffer.close_interval(self.step)
            self._log()
            self.stop = self.stop or Stop("nonfinite", f"stopped at step {self.step}")
        else:
            self._save(is_checked=True, permanent=permanent, requested=permanent)

    def _save(
        self,
        *,
        is_checked: bool = False,
        alone: bool = False,
        permanent: bool = True,
        requested: bool = False,
    ) -> None:
        """Save the state, unless it is saved already, corrupt or, if not checked before, has a NaN.

        `alone` leaves out what user code provides: the data position and the state of hooks.
        `permanent` is for saves that are not made by the schedule of the temporary directory.
        """
        is_corrupt = self.stop is not None and self.stop.kind == "corrupt"
        if self.series is None or self.step == self.series.saved or is_corrupt:
            return
        # A checkpoint in the temporary directory is saved again, since that may be lost.
        is_promoted = permanent and self.series.restored_temporary
        at_start = self.step == self._first_step and not is_promoted
        if at_start and (self.resumed is None or not self._saw_event):
            return
        if not is_checked and has_nan(self.state):
            stop = self.stop or Stop("nonfinite", f"stopped at step {self.step}")
            message = f"{stop.message}; not saved, because a parameter is NaN"
            self.stop = stop._replace(message=message)
            return
        metrics = self.logged_metrics if self.logged_step == self.step else {}
        extra = self._extra()
        if alone:
            extra["fit"]["hooks"] = []
        if at_start:  # add metrics to the checkpoint that the run resumed from
            self.hooks.flush()
            self.series.add_later(self.step, metrics=metrics, extra=extra)
            self._saw_event = False
            return
        self.series.save(
            self.state,
            step=self.step,
            data=None if alone else self._feed.position(),
            metrics=metrics,
            extra=extra,
            before_commit=self.hooks.flush,
            permanent=permanent,
            requested=requested,
        )
