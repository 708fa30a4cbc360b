"""The training loop: the order of operations, and the state of a run in its checkpoints."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from signal import Signals as Signal
from time import perf_counter
from typing import Any, NamedTuple

import jax

from stepfold import tree
from stepfold.checkpoint.restore import Restored
from stepfold.checkpoint.series import Series
from stepfold.checkpoint.steps import order_by
from stepfold.core.optimizer import hyperparams_of
from stepfold.core.processes import (
    Disbanded,
    Group,
    KeyValues,
    Position,
    agreement,
    broadcast_from_first,
    spell_processes,
)
from stepfold.core.state import has_nan, is_available, step_of
from stepfold.data.epochs import EpochEnds, size_at
from stepfold.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    StepfoldError,
    TreeMismatchError,
    refuse,
)
from stepfold.loop.consensus import Alone, Several
from stepfold.loop.data import BatchFeed, DataPosition
from stepfold.loop.elastic import Attempts
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.hooks.base import (
    Event,
    GoBack,
    HookDispatcher,
    Replace,
    Reweight,
    Stop,
    find_save_interval,
)
from stepfold.loop.metrics import Curve, History, Interval, MetricBuffer
from stepfold.loop.replay.capsule import Capsule
from stepfold.loop.requests import Kind, Request, Signals, WaitInterrupted, of_hook
from stepfold.loop.rollback import Rollbacks
from stepfold.loop.step_runner import StepRunner

_MAX_DELAY = 4  # steps that are dispatched before the metrics of a log point are read
_FORMAT = 3  # of the run state in a checkpoint; incremented when its meaning changes
_ALL_BUT_OPT_STATE = ("params", "model_state", "step", "key")
_MAX_NOTES = 100  # on replacements of the state
_SLOW_SAVES = 30.0  # seconds in saves, from which on a fifth of the time is worth a warning
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
    which a call of several steps must not cross.
    """

    def __init__(
        self,
        log_every: int,
        recurring: Sequence[Any],
        *,
        total: int | None,
        epoch_ends: EpochEnds | None = None,
        first_step: int = 0,
        log_epochs: bool = False,
        size_changes: Sequence[int] = (),
        delay: int = 0,
    ) -> None:
        self._log_every, self._total, self._log_epochs = log_every, total, log_epochs
        self._epoch_ends, self._first_step = epoch_ends, first_step
        self._every = [item.every for item in recurring if item.every]
        self._every_epochs = [item.every_epochs for item in recurring if item.every_epochs]
        self._every_epochs += [1] if log_epochs else []
        self._size_changes = size_changes
        self.delay = delay  # of reading the metrics of a log point, in steps
        self.due = first_step  # the next step after which something is due

    def next_after(self, step: int) -> int:
        """Return the next step after which something is due."""
        steps = [step + self._log_every - step % self._log_every, *self._next_reads(step)]
        return min([*steps, *(change for change in self._size_changes if change > step)])

    def read_at(self, log_point: int, delay: int | None = None) -> int:
        """Return the step after which metrics of a log point are read, at most `delay` later."""
        delay = self.delay if delay is None else delay
        read = min(self._next_reads(log_point - 1), default=log_point + delay)
        return min(read, log_point + delay)

    def _next_reads(self, step: int) -> list[int]:
        """List the next evaluation, save, end of an epoch and of the run, which read metrics."""
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


class Options(NamedTuple):
    """Checked arguments of `fit` for the loop; `save_history` is set if no file has all metrics."""

    evaluations: Sequence[Evaluation] = ()
    log_every: int = 10
    steps_per_call: int = 1
    save_history: bool = True
    parts: Sequence[str] | None = None  # to restore, instead of the whole state


@dataclass
class Progress:
    """The progress of a run, which its checkpoints hold."""

    total: int | None  # the step at which the run ends
    epoch_ended_at: int  # the last step at which hooks were called for it
    logged_step: int  # of the last event
    began: int  # the step at which the run began
    is_complete: bool = False
    evaluated: dict[str, int] = field(default_factory=dict)  # the last step of each evaluation
    logged_metrics: dict[str, float] = field(default_factory=dict)  # all of `logged_step`
    # Of the state: pairs (step, why); with "weights" at the end, of those of a mixture.
    replacements: list[Any] = field(default_factory=list)
    # Of the optimizer: those that the script sets, with the values that the run uses.
    hyperparams: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, saved: Mapping[str, Any], current: "Progress") -> "Progress":
        """Read and check saved values; they must have the types of those in `current`."""
        values = {name: saved[name] for name in asdict(current)}
        for name, value in asdict(current).items():
            types = (int, type(None)) if name == "total" else (type(value),)
            if type(values[name]) not in types:
                raise TypeError(f"{name}: {tree.describe_value(values[name])}")
        return cls(**values)


class TrainLoop:
    """Run steps until something ends the run; log, evaluate and save where due."""

    def __init__(
        self,
        runner: StepRunner,
        state: Any,
        feed: BatchFeed,
        hooks: HookDispatcher,
        series: Series | None,
        options: Options,
        *,
        total: int | None,
        attempts: Attempts | None = None,
    ) -> None:
        self.state, self.step = state, step_of(state)
        self.hooks, self.series, self.history = hooks, series, History()
        self._run_step, self._feed, self._options = runner, feed, options
        self.attempts = attempts
        is_alone = jax.process_count() == 1 and attempts is None
        self.consensus = Alone() if is_alone else Several(self.group)
        # Not methods of this object: a cycle would keep the state until garbage is collected.
        self.signals = Signals(self.consensus.ask_to_end, self.consensus.ask_to_save)
        self.rollbacks = None if series is None else Rollbacks(series, feed)
        self.go_back: GoBack | None = None  # set if `run` returned in order to go back
        self.resumed: int | None = None  # the step of the checkpoint that it resumed from
        self.positions: list[DataPosition] = []  # at the start and at the last log points
        self.capsule: Capsule | None = None  # of the step that ended the run by a NaN or inf
        self.progress = Progress(total, self.step, self.step, self.step)
        self.progress.is_complete = total is not None and self.step >= total
        self.progress.hyperparams = hyperparams_of(getattr(state, "opt_state", ()))
        self._buffer = MetricBuffer(runner.unpack)
        self._end: Request | None = None  # the request that ends this attempt
        self.first_step = self.step  # of this attempt
        self._saw_event = False  # whether hooks saw an event that the last checkpoint lacks
        # With several processes, vote on each pull if one of them may have fewer batches.
        self._votes_on_batches = False
        self._deferred_error: Exception | None = None  # of user code, see `_defer_error`
        self._batch, self._warned_of_save = None, False
        # The step, time, seconds in saves and their number, after the first save.
        self._first_save: tuple[int, float, float, int] | None = None
        self._warned_of_saves = False
        if series is not None:
            series.on_request(self.consensus.ask_to_save)

    @property
    def group(self) -> Group | None:
        """The live processes of an elastic run."""
        return None if self.attempts is None else self.attempts.group

    @property
    def stop(self) -> Stop | None:
        """Why the run ends."""
        return None if self._end is None else self._end.reason

    def run(self) -> None:
        """Run to the end, or until `go_back` is set; save before an exception propagates."""
        total = self.progress.total
        self._compare_lengths()
        if self.progress.is_complete and total is not None and self.step >= total:
            message = f"step {self.step} of {total} was done before"
            self._end = Request(Kind.END, self.step, Stop("already_completed", message))
            return
        try:
            with agreement("hooks: not opened", self.group):
                self.hooks.open(self.step, total)
            self._begin()
            while self._end is None and (batches := self._next_batches()):
                self.state, metrics = self._run_step(self.state, batches)
                self.step += len(batches)
                self._move(Position.DEVICES)
                self._feed.used += len(batches)
                self._buffer.append(metrics)
                if self.step == self._schedule.due:
                    self._boundary()
                if self._buffer.closed:
                    self._log(self.step - self._schedule.delay)
                if not self.consensus.is_alone and not self._votes_on_batches:
                    self.consensus.poll(self.step)
                if self.consensus.requests.pending:  # a look-up, since this is for each step
                    self._act()
            self._finish()
            self._raise_deferred_error()
        except BaseException as error:
            if not self.signals.was_repeated:
                self._rescue(error)
            raise

    # Requests

    def _decide(self, *, has_reasons: bool = False) -> None:
        """End the attempt by the highest request that is due.

        `has_reasons` says that the reasons of other processes are known now, which votes leave out.
        """
        request = self.consensus.requests.due(self.step)
        if request is None or request.kind is Kind.SAVE:
            return
        is_known = self._end is not None and request.kind == self._end.kind and has_reasons
        if self._end is None or request.kind > self._end.kind or is_known:
            self._end = request._replace(reason=_as_stop(request, self.step))

    def _end_by(self, kind: Kind, stop: Stop) -> None:
        self.consensus.requests.add(Request(kind, self.step, stop))
        self._decide()

    def _act(self) -> None:
        """Act on the requests that all processes know of."""
        requests = self.consensus.requests
        self._decide()
        if Kind.SAVE not in requests:
            return
        requests.done(Kind.SAVE)  # first, since a thread or a signal may add another
        if self.series is None:
            if not self._warned_of_save:
                warnings.warn(
                    "SIGUSR1: expected checkpoints to save, got none; give checkpoints=…",
                    stacklevel=5,
                )
            self._warned_of_save = True
        elif self._end is None:
            self._log()
            if self._end is None:
                try:
                    self._save_or_stop(permanent=True)
                except Disbanded:
                    requests.add(Request(Kind.SAVE))
                    raise

    # The start

    def _compare_lengths(self) -> None:
        """Check that all processes have equally many batches; if unknown, vote on each pull."""
        left, total = self._feed.batches_left, self.progress.total
        if left is not None and total is not None:
            left = min(left, max(0, total - self.step))
        lengths = KeyValues("fit", self.group).gather([total, left], "the start of the run")
        totals, counts = ([length[i] for length in lengths] for i in range(2))
        self._votes_on_batches = not self.consensus.is_alone and None in counts
        if len(set(totals)) > 1 or (None not in counts and len(set(counts)) > 1):
            counts = totals if len(set(totals)) > 1 else [self.step + count for count in counts]
            known = [count for count in counts if count is not None]
            advice = f"give steps={min(known)}, or every process the same number of batches"
            expected = "the same number of steps in every process"
            refuse("batches", expected, f"{counts}", advice, kind=DataError)

    def _begin(self) -> None:
        """Start the schedule, and finish what an exception interrupted before a resume."""
        first_step, total = self.step - self._feed.used, self.progress.total
        evaluations = self._options.evaluations
        saves = [] if self.series is None else [self.series.policy, self.series.temporary]
        attempts = None if self.attempts is None else self.attempts.elastic
        # Metrics are read this many steps late, so that the device has work while hooks run. At a
        # log point that evaluates or saves, and at the end, they are read at once.
        delay = min(_MAX_DELAY, max(1, self._options.log_every // 2))
        self._schedule = Schedule(
            self._options.log_every,
            [*evaluations, *filter(None, [*saves, attempts])],
            total=total,
            epoch_ends=self._feed.epoch_ends,
            first_step=first_step,
            log_epochs=self.hooks.wants_epochs,
            size_changes=[first_step + start for start, _ in self._feed.batch_sizes[1:]],
            delay=0 if self.hooks.needs_exact_state or attempts else delay,
        )
        self._find_due()
        self._agree()
        is_start = self.step == self.progress.began
        is_repeated = self.attempts is not None and self.attempts.is_repeated
        if is_repeated and not is_start and self.step != self.resumed:
            self.positions.append(self._feed.mark(self.step))
            self._boundary()
            self._decide()
            return
        is_read = not is_start and self._schedule.read_at(self.step, 1) == self.step
        self._log(self.step if is_read else self.step - self._schedule.delay)
        is_best = False
        if self.step != total:
            is_due = self._schedule.is_due
            due = [e for e in evaluations if (e.at_start if is_start else is_due(e, self.step))]
            self._evaluate(due)
            is_best = bool(due) and self._is_best()
            self._end_epoch()
        self._save(permanent=is_start or is_best, is_best=is_best)
        self.positions.append(self._feed.mark(self.step))
        self._begin_attempt()
        if total is not None and self.step >= total and self._end is None:
            self._end_by(Kind.END, Stop("completed", f"all {total} steps were done"))
        self._decide()

    # The next batches

    def _next_batches(self) -> list[Any]:
        """Pull batches for a call; if there are none, end the attempt."""
        count = min(self._options.steps_per_call, self._schedule.due - self.step)
        if self._buffer.closed and self._deferred_error is None:  # hooks may stop the run there
            count = min(count, self._buffer.closed[0].step + self._schedule.delay - self.step)
        batches: list[Any] = []
        self._move(Position.BATCH)
        try:
            while len(batches) < count:
                step = self.step + len(batches)
                pull, may_interrupt = self._feed.next_batch, self._feed.can_go_back
                batch = self._interruptible(pull, step, self.state, may_interrupt=may_interrupt)
                if batch is _END:
                    break
                batches.append(batch)
        except Exception as error:
            if not self._votes_on_batches:  # the others may have dispatched this step already
                raise
            self._defer(error)
        self._move("a step")
        if self._votes_on_batches:
            batches = self._agree_on_batches(batches)
        if batches:
            self._batch, self.progress.is_complete = batches[-1], False
        else:
            self._decide()
            if self._end is None:
                self._end_exhausted()
        return batches

    def _interruptible(
        self, function: Callable[..., Any], *args: Any, may_interrupt: bool = True
    ) -> Any:
        """Call a function that may block; return `_END` on StopIteration or a signal."""
        signals, is_alone = self.signals, self.consensus.is_alone
        if is_alone and signals.received is not None:
            return _END
        try:
            signals.is_waiting = is_alone and may_interrupt
            value = function(*args)
            # Not only in `finally`, where a signal would raise outside of this `try`.
            signals.is_waiting = False
        except (StopIteration, WaitInterrupted):
            return _END
        finally:
            signals.is_waiting = False
        return value

    def _agree_on_batches(self, batches: list[Any]) -> list[Any]:
        """Keep as many batches as all processes have, so that all stop at the same step."""
        if self.step == self.first_step:  # a process may be minutes late
            KeyValues("fit", self.group).gather(None, "a first batch")
        counts = self.consensus.settle(len(batches))
        if min(counts) == 0 < max(counts) and self.consensus.failed_process is None:
            ended = [process for process, count in enumerate(counts) if not count]
            warnings.warn(
                f"batches: expected the same number in every process, got {self.step} in "
                f"{spell_processes(ended)}, and more in the others, which stop there too; give "
                "steps=…, or every process the same number",
                stacklevel=6,
            )
        return batches[: min(counts)]

    def _end_exhausted(self) -> None:
        if self.step == self.first_step and self.resumed is None:
            refuse("batches", "at least one", "none", kind=DataError)
        left = self._feed.batches_left
        if not self.consensus.is_alone and not self._votes_on_batches and left:
            more = "no end" if left == math.inf else f"{left} more"
            expected = f"{more} after step {self.step}, by their own count"
            advice = "give every process the same number"  # the others are in a step already
            refuse("batches", expected, "the end", advice, kind=DataError)
        self.progress.is_complete = True
        self._end_by(Kind.END, Stop("exhausted", f"the batches ended at step {self.step}"))
        if self.progress.total is not None and not self._feed.is_iterator:
            warnings.warn(
                f"batches: expected enough for {self.progress.total} steps, got {self._feed.used};"
                " give epochs=… to iterate them several times, or steps=None to use them once",
                stacklevel=6,
            )

    # After a step

    def _boundary(self) -> None:
        """Log, then evaluate, then save, each if it is due after this step."""
        step, is_last = self.step, self.step == self.progress.total
        self._agree()
        if is_last:
            self._end_by(Kind.END, Stop("completed", f"all {step} steps were done"))
        if self._schedule.is_log_point(step):
            self._buffer.close_interval(step)
            # The start and three log points: one of them precedes each step that is not logged yet.
            self.positions = [*self.positions[:1], *self.positions[1:][-2:], self._feed.mark(step)]
        epochs = self._schedule.epochs_done(step)
        saves = self.series is not None and self.series.due(step, epoch=epochs)
        evaluations = [e for e in self._options.evaluations if self._schedule.is_due(e, step)]
        ends_epoch = epochs is not None and self.hooks.wants_epochs
        if evaluations or saves or ends_epoch or not self._schedule.delay:
            self._log()
            if self.consensus.requests.pending:
                self._decide()
        if not is_last:  # `_finish` does it otherwise
            self._evaluate(evaluations)
        is_best = bool(evaluations) and self._end is None and self._is_best()
        if self._end is None:
            self._end_epoch()
        if (saves or is_best) and self._end is None:
            self._save_or_stop(permanent=is_best)
            self._warn_of_slow_saves()
        self._find_due()
        self._begin_attempt()

    def _agree(self) -> None:
        """In an elastic run, agree that all processes have done what they did since the last time.

        Only then, hooks see it.
        """
        if self.attempts is not None:
            self._buffer.wait(self.attempts.group.position.wait)
            self.attempts.agree(self.state, self.step)

    def _move(self, doing: str) -> None:
        """In an elastic run, count how far this process is, to find out which one is stuck."""
        if self.attempts is not None:
            self.attempts.group.position.move(doing, self.step)

    def _begin_attempt(self) -> None:
        """In an elastic run, note all that steps change, to repeat them."""
        if self.attempts is not None:
            self.attempts.begin(self)

    def _find_due(self) -> None:
        """Find the next step after which something is due, and use the programs of its batches."""
        self._schedule.due = self._schedule.next_after(self.step)
        if self.attempts is not None:
            self._schedule.due = int(min(self._schedule.due, self.attempts.next_end(self.step)))
        if len(sizes := self._feed.batch_sizes) > 1:
            used, total = self._feed.used, self.progress.total
            end = math.inf if total is None else total - self.step + used
            later = [size for start, size in sizes if used < start < end]
            self._run_step.set_batch_size(size_at(sizes, used), later)

    # The end

    def _finish(self) -> None:
        """Log the rest; then go back, or evaluate a last time and save."""
        self.consensus.settle()
        self._agree()
        progress = self.progress
        progress.is_complete = progress.is_complete or self.step == progress.total
        if progress.is_complete and not self._is_interrupted:
            self._buffer.close_interval(self.step)
        self._log()
        self.consensus.conclude()
        self._decide(has_reasons=not self.consensus.is_alone)
        if self._goes_back():
            return
        if progress.is_complete and Kind.ERROR not in self.consensus.requests:
            self._finish_complete()
        else:
            progress.is_complete = False
            self._finish_early()
        if self.attempts is not None and self.series is not None:
            self.series.wait()
            self._agree()

    @property
    def _is_interrupted(self) -> bool:
        """Whether a signal or an error ends the run, so that a resume has to finish it."""
        requests = self.consensus.requests
        return Kind.SIGNAL in requests or Kind.ERROR in requests

    def _finish_complete(self) -> None:
        """Evaluate and save after the last batch, unless a signal comes."""
        if not self._is_interrupted:
            self._log_end()
            self.consensus.conclude()
            self._decide()
            if self._goes_back():
                return
        if not self._is_interrupted:
            self.consensus.done(Kind.STOP)
        self.progress.is_complete = not self._is_interrupted
        self._save()

    def _finish_early(self) -> None:
        """Save, so that a resume continues the open interval; then evaluate, unless interrupted."""
        self._save()
        if self._end is not None and Kind.GO_BACK in self.consensus.requests:
            message = f"{self._end.reason.message}; not saved, because the run was to go back"
            self._end = self._end._replace(reason=self._end.reason._replace(message=message))
        extra = {} if self.series is None else self._extra()
        has_stop, known = self._stop_of_hook() is not None, self._rank()
        if not self._is_interrupted:
            state, notes = self.state, [*self.progress.replacements]
            self._log_end()
            self.state, self.progress.replacements[:] = state, notes  # as saved
            self.consensus.done(Kind.GO_BACK)
        if self._is_interrupted:
            return
        if has_stop:  # a later run continues after the stop
            self.consensus.done(Kind.STOP)
        is_wrong = Kind.CORRUPTION in self.consensus.requests
        has_news = (has_stop or self._rank() != known) and not is_wrong
        if has_news and self.series is not None and self.step in (self.series.saved, self.resumed):
            extra["fit"]["stop"] = None
            self.hooks.flush()
            self.series.add_later(self.step, metrics=self._rank(), extra=extra)

    def _rank(self) -> dict[str, float]:
        """Return the metric that ranks checkpoints, if an evaluation has measured it here."""
        name = None if self.series is None else self.series.policy.best
        metrics = self.progress.logged_metrics if self.progress.logged_step == self.step else {}
        is_known = name is not None and name in metrics and not name.startswith("train/")
        return {name: metrics[name]} if name is not None and is_known else {}

    def _log_end(self) -> None:
        """Log the open interval, and evaluate a last time."""
        self._buffer.close_interval(self.step)
        self._log()
        if self._deferred_error is None:
            with self._defer_error():
                self.hooks.end_run()
        self._evaluate(self._options.evaluations)
        self._end_epoch()

    def _goes_back(self) -> bool:
        """Find the checkpoint for a request to go back, unless a higher request is due."""
        requests = self.consensus.requests
        request = requests.get(Kind.GO_BACK)
        if request is None or self._is_interrupted:
            return False
        above = [requests.get(kind) for kind in (Kind.STOP, Kind.CORRUPTION)]
        if any(other is not None and other.step <= self.step for other in above):
            self.consensus.done(Kind.GO_BACK)
            return False
        if self.rollbacks is None:
            expected = "checkpoints=… for a hook that lets the run go back"
            advice = f"give sf.Checkpoints(every=…): {request.reason.why}"
            refuse("hooks", expected, "none", advice)
        target = self.rollbacks.find_target(request.reason)
        if isinstance(target, Stop):
            self.consensus.done(Kind.GO_BACK, Kind.END)
            self._end = Request(Kind.STOP, self.step, _stopped(target, self.step))
            return False
        self.go_back = request.reason._replace(to=target)
        return True

    def _rescue(self, error: BaseException) -> None:
        """Save after an exception, but not with several processes: the others do not take part."""
        self.progress.is_complete = False
        # By its message, since numpy raises this class too.
        if isinstance(error, FloatingPointError) and str(error).startswith("invalid value ("):
            error.add_note(
                f"jax_debug_nans ended the run after step {self.step}. It ignores a NaN that "
                "skip_nonfinite or a loss scale skips. Turn it off to let stop_on_nonfinite end "
                "the run, with a capsule for sf.replay."
            )
        if not is_available(self.state):
            explanation = self._run_step.explain(error)
            if explanation is not None:
                raise explanation from error
        elif self.consensus.is_alone and not self._feed.has_position:
            error.add_note(
                f"step {self.step} was not saved, since the batches are ahead of it and cannot go "
                "back: a resume starts from the previous checkpoint"
            )
        elif self.consensus.is_alone:
            try:
                try:
                    self._save()
                except ConfigError as failure:  # a position or hook state that cannot be saved
                    error.add_note(
                        f"only the state is saved, for sf.restore, not for a resume: {failure}"
                    )
                    self._save(alone=True)
            except Exception as failure:  # noqa: BLE001  it must not replace the error
                error.add_note(f"the state could not be saved: {type(failure).__name__}: {failure}")

    # Events

    @contextmanager
    def _defer_error(self) -> Iterator[None]:
        """With several processes, defer an error of a hook until all have stopped and saved.

        Until then, this process takes part in the steps of the others. Its hooks see no more
        events; a checkpoint keeps those, and a resume shows them.
        """
        try:
            yield
        except Exception as error:
            if self.consensus.is_alone or self.attempts is not None:
                raise
            self._defer(error)

    def _defer(self, error: Exception) -> None:
        self._deferred_error = error
        self.consensus.ask(Request(Kind.ERROR, 0, Stop("error", "user code raised an error")))

    def _raise_deferred_error(self) -> None:
        if self._deferred_error is not None:
            raise self._deferred_error
        if (process := self.consensus.failed_process) is not None:
            got = f"one in process {process}, which shows it; all stopped at step {self.step}"
            refuse("fit", "no error in any process", got, kind=StepfoldError)

    def _log(self, until: int | None = None) -> None:
        """Send hooks the intervals that ended at or before a step, by default all."""
        if self._deferred_error is None:
            with self._defer_error():
                for interval in self._buffer.take(self.step if until is None else until):
                    with self.hooks.transaction():
                        self._dispatch(interval, "train")

    def _evaluate(self, evaluations: Sequence[Evaluation]) -> None:
        for evaluation in evaluations:
            if self.progress.evaluated.get(evaluation.name) == self.step:
                continue
            self._move(f"evaluation {evaluation.name}")
            with self.hooks.stopwatch.measure(f"evaluation {evaluation.name}"):
                metrics = self._interruptible(evaluation, self.state, self.group)
            self._agree()
            if metrics is _END:
                return
            if self._deferred_error is not None:
                continue
            interval = Interval(self.step, metrics, {}, {}, perf_counter())
            with self._defer_error(), self.hooks.transaction():
                self._dispatch(interval, evaluation.name)
                self.progress.evaluated[evaluation.name] = self.step

    def _is_best(self) -> bool:
        """Whether the metric that ranks checkpoints is the best so far; the same in all processes.

        Call it after an evaluation. Metrics of train steps belong to the state before those steps.
        """
        ranking = None if self.series is None else self.series.ranking
        if ranking is None or ranking[0].startswith("train/"):
            return False
        curve = self.history.get(ranking[0], Curve())
        values = {step: {ranking[0]: x} for step, x in zip(curve.steps, curve, strict=True)}
        is_best = order_by(ranking, values)[:1] == [self.step]
        return (
            is_best if self.consensus.is_alone else broadcast_from_first([is_best], self.group)[0]
        )

    def _end_epoch(self) -> None:
        """Call hooks at the end of an epoch, after all events of its last step."""
        epochs, last = self._schedule.epochs_done(self.step), self.progress.epoch_ended_at
        if epochs is not None and self.step > last and not self._deferred_error:
            with self._defer_error(), self.hooks.transaction():
                self._move("hooks at the end of an epoch")
                self.hooks.end_epoch(epochs - 1)
                self._move("the loop")
                self.progress.epoch_ended_at = self.step

    def _dispatch(self, interval: Interval, kind: str) -> None:
        progress = self.progress
        event = Event(
            **interval._asdict(),
            total=progress.total,
            state=jax.tree.map(lambda leaf: leaf, self.state),  # hooks may change its containers
            batch=self._batch,
            data_wait_seconds=self._feed.wait_seconds,
            kind=kind,
            hook_seconds=self.hooks.seconds,
            processes=range(jax.process_count()) if self.group is None else self.group.processes,
            batch_share=self._feed.batch_share,
        )
        self._move("hooks")
        event, requests = self._call_hooks(event)
        self._move("the loop")
        self.history.add(event.step, event.metrics)
        before = {} if event.step != progress.logged_step else progress.logged_metrics
        progress.logged_metrics = {**before, **event.metrics}
        progress.logged_step, self._saw_event = event.step, True
        at = self._schedule.read_at(event.step) if kind == "train" else self.step
        for request in requests:
            if isinstance(request, Replace | Reweight):
                self._replace(request, at)
            else:
                self.consensus.ask(of_hook(request, event.step, at))
        if not self.consensus.is_alone:
            self.consensus.note_event()
        elif requests:
            self._decide()
        if kind == "train" and self._feed.recent and not self.consensus.requests.pending:
            self._feed.recent.drop_until(event.step)  # no hook asks for them

    def _call_hooks(self, event: Event) -> tuple[Event, list[Any]]:
        """Call the hooks; with several processes, either all or none replace the state."""
        if self.consensus.is_alone:
            return self.hooks.dispatch(event)
        group = self.group
        with agreement("hooks: failed", group) if self.hooks.replaces_state else nullcontext():
            event, requests = self.hooks.dispatch(event)
        reasons = [
            request.why if isinstance(request, Replace) else f"{request.why}: {request.weights}"
            for request in requests
            if isinstance(request, Replace | Reweight)
        ]
        if reasons and not self.hooks.replaces_state:
            advice = "set it, and return the same in all processes"
            refuse("hooks", "replaces_state = True on a hook that returns Replace", "none", advice)
        if self.hooks.replaces_state:
            gathered = KeyValues("fit", group).gather(reasons, "an event")
            if any(others != reasons for others in gathered):
                refuse("hooks", "the same replacements in every process", str(gathered))
        return event, requests

    def _replace(self, request: Replace | Reweight, at: int) -> None:
        """Continue with another state, unless that of this step was saved before.

        A `Reweight` has an effect on the batches of the steps after `at`.
        """
        if self.series is not None and self.step == self.series.saved:
            if self._end is None:
                warnings.warn(
                    f"step {self.step}: expected to replace the state before it is saved, got a "
                    f"request after that, which has no effect: {request.why}",
                    stacklevel=8,
                )
            return
        note: list[Any] = [self.step, request.why]
        if isinstance(request, Reweight):
            self._feed.reweight(request.weights, max(at, self.step) - self.step)
            note.append("weights")
        else:
            self.state = request.state
            if self.attempts is not None:
                self.attempts.keep(self.state, self.step)
        notes = self.progress.replacements
        notes[:] = [*notes[1 - _MAX_NOTES :], note]

    # Checkpoints

    def restore(self, series: Series, more_steps: int | None = None) -> bool:
        """Restore the newest good checkpoint; return whether the run was complete there."""
        self._move(Position.RESTORE)
        restored = self._restore_parts(series)
        self.first_step = self.resumed = restored.step
        self.consensus.restart(restored.step)
        return self.resume(restored, series.directory, more_steps)

    def restart(self) -> None:
        """Restore the newest checkpoint, as another job would that resumes the run."""
        if self.series is not None and self.rollbacks is not None:
            self.rollbacks.resume()
            self.restore(self.series)
            if self.rollbacks.done:  # the last of them may be new
                self.skip([rollback.skipped for rollback in self.rollbacks.done])

    def resume(self, restored: Restored, where: Any, more_steps: int | None = None) -> bool:
        """Continue from a state and what was kept with it; return whether the run is complete."""
        hyperparams = self.progress.hyperparams
        self.state, self._end, self.go_back = restored.state, None, None
        self._buffer, self._saw_event = MetricBuffer(self._run_step.unpack), False
        self.positions, self._first_save = [], None
        self.step = restored.step
        extra = restored.extra if isinstance(restored.extra, dict) else {}
        saved: Any = extra.get("fit") or {}
        if saved and (not isinstance(saved, dict) or saved.get("format") != _FORMAT):
            warnings.warn(
                f"{where}: step {self.step} was saved by another version of "
                "stepfold: its state and data position are restored, but not its metrics and hooks",
                stacklevel=5,
            )
            saved = {}
        if not saved:
            self.history.clear()
        total = self.progress.total
        self.progress = Progress(total, self.step, self.step, self.step)
        self.consensus.requests.set_state(None)
        if saved:
            try:
                self._set_state(saved)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                if isinstance(error, StepfoldError):
                    raise
                advice = "restore the state with sf.restore instead"
                expected = f"the state of a run as fit saves it in step {self.step}"
                refuse(where, expected, f"{error!r}", advice, kind=CheckpointError, cause=error)
        self._compare_hyperparams(hyperparams, restored)
        was_complete = self.progress.is_complete
        self.progress.total = total
        if more_steps is not None:  # an interrupted run keeps its target
            is_interrupted = saved.get("total") is not None and not was_complete
            self.progress.total = saved["total"] if is_interrupted else self.step + more_steps
        total = self.progress.total
        needs_batches = total is None or self.step < total
        used = saved.get("batches_used")
        self._feed.seek(restored.data, self.step, used, needs_batches=needs_batches)
        return was_complete

    def _restore_parts(self, series: Series) -> Restored:
        """Restore the state, or parts of it if the run that saved it did not."""
        parts = self._options.parts
        if parts is None:
            return series.restore(self.state, advice=_advise)
        restored = series.restore(self.state, parts=parts, advice=_advise)
        if "step" in restored.not_loaded:
            refuse("resume", "`step` among the parts, for the data position", repr(parts))
        saved = restored.extra.get("fit") if isinstance(restored.extra, dict) else None
        if isinstance(saved, dict) and saved.get("parts") == [*parts]:
            with suppress(TreeMismatchError):  # the optimizer has changed again since
                return series.restore(self.state)
        return restored

    def _compare_hyperparams(self, current: Mapping[str, Any], restored: Restored) -> None:
        """Warn of hyper-parameters that the script has changed; the restored ones are used."""
        saved = self.progress.hyperparams or hyperparams_of(getattr(self.state, "opt_state", ()))
        known = {name: saved[name] for name in current if name in saved and name in restored.loaded}
        changes = [
            f"{name}: expected {_short(value)} as in the checkpoint, got {_short(current[name])}"
            for name, value in known.items()
            if value != current[name]
        ]
        if changes:
            warnings.warn(
                f"{'; '.join(changes)}; the run continues with the value of the checkpoint; to use "
                "that of the script, give resume=('(?!.*/hyperparams/).*',)",
                stacklevel=6,
            )
        self.progress.hyperparams = {**current, **known}

    def continue_with(
        self, step: Callable[..., Any], share: tuple[int, int, int], *, at: int, lost: str
    ) -> None:
        """Use another step and share of the batches, with the processes that are left.

        All of them continue after the step `at`.
        """
        self._run_step = StepRunner(step)
        self._feed.share(share)
        if self.group is not None:
            self.consensus.regroup(self.group, at)
            if self.series is not None:
                self.series.join(self.group, lost=lost)

    def get_start(self) -> dict[str, Any]:
        """Return what a process has to know that steps in during the run."""
        done = [] if self.rollbacks is None else self.rollbacks.done
        saved = None if self.series is None else self.series.get_progress()
        return {
            "first_step": self.first_step,
            "resumed": self.resumed,
            "total": self.progress.total,
            "rollbacks": done,
            "saved": saved,
        }

    def set_start(self, start: Mapping[str, Any]) -> None:
        """Step in during a run, with the values of `get_start` in another process."""
        self.first_step, self.resumed = start["first_step"], start["resumed"]
        self.progress.total = start["total"]
        if self.series is not None and self.rollbacks is not None:
            self.series.set_progress(start["saved"])
            new = start["rollbacks"][len(self.rollbacks.done) :]
            self.rollbacks.done += new
            if new:
                self.skip([rollback.skipped for rollback in new])

    def end_as(self, step: int, stop: Stop, number: Signal | None) -> None:
        """End as the others have, in a process that did not take part."""
        self.step, self._end = step, Request(Kind.END, step, stop)
        if number is not None:
            self.consensus.requests.add(Request(Kind.SIGNAL, step, number))

    def position(self) -> Any:
        """Return the position of the next batch."""
        return self._feed.position()

    def skip(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Skip ranges of batch indices, which begin after the position of the batches."""
        self._feed.skip(ranges)
        if self._feed.total is not None:  # the epochs to do are shorter now
            self.progress.total = self.step - self._feed.used_here + self._feed.total

    def get_state(self) -> dict[str, Any]:
        """Return the run state for a checkpoint; its size does not grow with the run."""
        progress = asdict(self.progress)
        if not self.hooks.wants_epochs:  # a hook that a resume adds does not see this epoch's end
            progress["epoch_ended_at"] = self.step
        return {
            "format": _FORMAT,
            **progress,
            "batches_used": self._feed.used,
            "history": self.history.get_state() if self._options.save_history else {},
            "buffer": self._buffer.get_state(),
            "hooks": self.hooks.get_state(),
            "stop": self._stop_of_hook(),
            "parts": self._options.parts and [*self._options.parts],
        }

    def _stop_of_hook(self) -> list[Any] | None:
        """Return the step at which the run has yet to stop for a hook, and the reason."""
        stop = self.consensus.requests.pending.get(Kind.STOP)
        return [stop.step, *stop.reason] if stop is not None and stop.by_hook else None

    def _set_state(self, saved: Mapping[str, Any]) -> None:
        """Continue from a saved run state, which may hold anything."""
        self.progress = Progress.read(saved, self.progress)
        self.consensus.requests.set_state(saved["stop"])
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
        self._move("a save")
        if has_nan(self.state):  # `_save` refuses to save it
            self._buffer.close_interval(self.step)
            self._log()
            if self._end is None:
                stop = Stop("nonfinite", f"stopped at step {self.step}")
                self._end = Request(Kind.STOP, self.step, stop)
        else:
            self._save(is_checked=True, permanent=permanent, requested=permanent)

    def _warn_of_slow_saves(self) -> None:
        """Warn once if saves take much of the time since the first of them."""
        watch = self.hooks.stopwatch
        seconds, count = watch.seconds.get("saving", 0.0), watch.counts.get("saving", 0)
        now = self.step, perf_counter(), seconds, count
        first = self._first_save = self._first_save or now
        steps, elapsed, saving, saves = (end - start for start, end in zip(first, now, strict=True))
        if self._warned_of_saves or saving < _SLOW_SAVES or saving < 0.2 * elapsed or steps < 1:
            return
        self._warned_of_saves = True
        every = find_save_interval(saving, round(saves), elapsed - saving, round(steps))
        warnings.warn(
            f"checkpoints: {saves} saves took {saving:.0f} of the last {elapsed:.0f} s; every "
            f"{every} steps, they would take 5 % of the time",
            stacklevel=6,
        )

    def _what_to_save(self, *, permanent: bool, is_best: bool = False) -> str | None:
        """Return what a save writes at this step: "state", "metadata", or None for nothing.

        A state that may be wrong, or that the run is to go back from, is not saved. A resume
        repeats the steps since the previous checkpoint, with the same bits.
        """
        is_wrong = self.consensus.requests.pending.keys() & {Kind.CORRUPTION, Kind.GO_BACK}
        if self.series is None or is_wrong:
            return None
        if self.step == self.series.saved:  # the last evaluation may come after the save
            return "metadata" if self.progress.is_complete and self._saw_event else None
        # A checkpoint in the temporary directory is saved again, since that may be lost.
        is_promoted = permanent and self.series.restored_temporary
        is_start = self.resumed is None and (self.series.policy.at_start or is_best)
        if self.step not in (self.resumed, self.progress.began) or is_promoted or is_start:
            return "state"
        # A resume replays the events that have replaced the state since the checkpoint.
        is_replaced = [note[0] for note in self.progress.replacements[-1:]] == [self.step]
        has_news = self.resumed is not None and self._saw_event and not is_replaced
        return "metadata" if has_news else None

    def _save(
        self,
        *,
        is_checked: bool = False,
        alone: bool = False,
        permanent: bool = True,
        requested: bool = False,
        is_best: bool = False,
    ) -> None:
        """Save what is not saved yet, unless a parameter is NaN.

        `alone` leaves out what user code provides: the data position and the state of hooks.
        `permanent` saves are all but those by the schedule of the temporary directory. `requested`
        saves, and those of the best state, do not count as scheduled where old steps are deleted.
        """
        what = self._what_to_save(permanent=permanent, is_best=is_best)
        progress = self.progress
        if what is None or self.series is None:
            return
        self._move("a save")
        if what == "state" and not is_checked and has_nan(self.state):
            stop = self.stop or Stop("nonfinite", f"stopped at step {self.step}")
            message = f"{stop.message}; not saved, because a parameter is NaN"
            kind = Kind.STOP if self._end is None else self._end.kind
            self._end = Request(kind, self.step, stop._replace(message=message))
            return
        metrics = progress.logged_metrics if progress.logged_step == self.step else {}
        extra, self._saw_event = self._extra(), False
        if alone:
            extra["fit"]["hooks"] = []
        if what == "metadata":  # add to the checkpoint that the run resumed from
            self.hooks.flush()
            self.series.add_later(self.step, metrics=metrics, extra=extra)
            return
        with self.hooks.stopwatch.measure("saving"):
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


def _advise(paths: Sequence[str]) -> str:
    """Say what to do about a checkpoint whose state differs at some paths."""
    if all(path.startswith("opt_state") for path in paths):
        return (
            ": it was saved with another optimizer; to continue with this one, give "
            f"resume={_ALL_BUT_OPT_STATE}, and to start a new run, another directory"
        )
    return "; to train another model, give another directory; to resume, make the state as before"


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _as_stop(request: Request, step: int) -> Stop:
    """Return why a request ends the run."""
    if request.kind is Kind.SIGNAL:
        return Stop("signal", f"{Signal(request.reason).name} at step {step}")
    if request.kind is Kind.GO_BACK:
        why = request.reason.why if isinstance(request.reason, GoBack) else str(request.reason)
        return Stop("go_back", why)
    is_end = request.kind is Kind.END
    return request.reason if is_end else _stopped(request.reason, step)


def _stopped(stop: Stop, step: int) -> Stop:
    return stop._replace(message=f"{stop.message}; stopped at step {step}")
