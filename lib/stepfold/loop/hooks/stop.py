"""Hooks that stop a run: out of time, a NaN or inf, no progress, a spike, corruption, a hang.

Hooks with a state take a `name`, its key in a checkpoint, so that a run can have two of a kind.
"""

import faulthandler
import math
import sys
import time
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.core.metric_modes import mode_of
from stepfold.core.validation import (
    check_flags,
    read_integer,
    read_positive,
    renamed,
)
from stepfold.errors import refuse
from stepfold.loop.hooks.base import BaseHook, Event, GoBack, Stop


class TimeLimit(BaseHook):
    """Stop when a number of seconds has passed since the hook was created."""

    can_stop = True

    def __init__(self, seconds: float) -> None:
        self._seconds = read_positive("time_limit", seconds, allow_zero=True, unit="seconds")
        self._end = time.monotonic() + seconds

    def __call__(self, event: Event) -> Stop | None:  # noqa: ARG002
        if time.monotonic() < self._end:
            return None
        return Stop("time_limit", f"the time limit of {self._seconds:g} s was reached")


class Nonfinite(NamedTuple):
    """A step, counted from 1, with a NaN or inf in a metric, and all metrics of that step.

    `before` holds the metrics of the previous step, if they are known.
    """

    step: int
    metric: str
    metrics: dict[str, float]
    before: dict[str, float] = {}  # noqa: RUF012  a default of a NamedTuple, never changed


class stop_on_nonfinite(BaseHook):  # noqa: N801
    """Stop when a train metric is NaN or infinite in a step.

    A metric of weight 0 does not count. Without `metric`, this is the loss, or each metric of a
    step that reports no `loss`. `found` is the first such step of the current run, a `Nonfinite`,
    or None. `fit` stores what it takes to rerun that step in a `Capsule`, for `replay`.

    >>> import numpy as np, stepfold as sf
    >>> losses = {"train/loss": np.array([1.0, np.nan, np.nan])}
    >>> str(sf.stop_on_nonfinite()(sf.Event(12, None, {"train/loss": np.nan}, None, losses)))
    'train/loss is nan in step 11'
    """

    can_stop = True
    replaces_nonfinite_stop = True

    @renamed(pattern="metric")
    def __init__(self, metric: str | None = None) -> None:
        if metric is not None:
            _check_train_metric(metric)
        self.metric: str | None = metric
        self.reset(0)

    def reset(self, step: int) -> None:  # noqa: ARG002
        self.found: Nonfinite | None = None
        self._last: Event | None = None  # the previous train event, without its state and batch

    def __call__(self, event: Event) -> Stop | None:
        if not event.per_step:
            return None
        last, self._last = self._last, event._replace(state=None, batch=None)
        first_steps = [self._first_step(event, name) for name in self._watched(event)]
        step, metric = min(filter(None, first_steps), default=(0, ""))
        if not step:
            return None
        metrics = _metrics_of_step(event, step)
        if self.found is None:
            # The step before it may be the last one of the previous event.
            is_first = event.step - step + 1 == len(event.per_step[metric])
            earlier = last if is_first and last is not None and last.step == step - 1 else event
            self.found = Nonfinite(step, metric, metrics, _metrics_of_step(earlier, step - 1))
        return Stop("nonfinite", f"{metric} is {metrics[metric]} in step {step}")

    def _watched(self, event: Event) -> list[str]:
        if self.metric is not None or "train/loss" in event.per_step:
            return [self.metric or "train/loss"]
        return [name for name, values in event.per_step.items() if np.ndim(values) == 1]

    def _first_step(self, event: Event, metric: str) -> tuple[int, str] | None:
        """Return the first step of an event in which a metric is not finite."""
        # A finite mean implies that it is finite in each step.
        if math.isfinite(event.metrics.get(metric, math.nan)):
            return None
        values = event.per_step.get(metric, np.zeros(0))
        has_weight = event.weights.get(metric, np.ones(len(values))) != 0
        (indices,) = np.nonzero(~np.isfinite(values) & has_weight)
        return (event.step - len(values) + 1 + int(indices[0]), metric) if indices.size else None


def _metrics_of_step(event: Event, step: int) -> dict[str, float]:
    """Return the metrics of a step up to the event, without those that only later steps have."""
    age = event.step - step
    rows = event.per_step.items()
    return {n: float(row[-1 - age]) for n, row in rows if np.ndim(row) == 1 and len(row) > age}


class stop_on_corruption(BaseHook):  # noqa: N801
    """Stop when the two runs of a step by `check_step` differ, and name the leaves.

    The state since that step may be wrong, so `fit` does not save it when it stops. A checkpoint
    that was saved between that step and the log point may be wrong too: go back to an earlier one.

    >>> import numpy as np, stepfold as sf
    >>> words = {"train/corrupt": np.array([[0], [0b10]])}  # a bit for each leaf, and step
    >>> state = {"step": np.array(12), "w": np.ones(2)}
    >>> str(sf.stop_on_corruption()(sf.Event(12, None, {"train/corrupt": 1.0}, state, words)))
    'step 12 was run twice, and 1 of 2 leaves differs: w; do not trust the states since then'
    """

    can_stop = True
    metric = "train/corrupt"

    def __call__(self, event: Event) -> Stop | None:
        if not event.metrics.get(self.metric):
            return None
        words = event.per_step[self.metric]
        bad = int(np.flatnonzero(words.any(1))[0])
        paths = tree.marked_paths(event.state, words[bad])
        names = ", ".join(paths[:8]) + ", …" * (len(paths) > 8)
        leaves = f"{len(paths)} of {len(jax.tree.leaves(event.state))} leaves"
        message = (
            f"step {event.step - len(words) + 1 + bad} was run twice, and {leaves} "
            f"{'differs' if len(paths) == 1 else 'differ'}: {names}; do not trust the states since "
            "then"
        )
        return Stop("corrupt", message)


class stop_early(BaseHook):  # noqa: N801
    """Stop when a metric, such as `eval/loss`, has not improved for `patience` evaluations.

    A value improves if it is better than the best one by more than `min_delta`. With `mode="min"`
    lower is better, with `mode="max"` higher is. Without, the name of the metric has to tell, such
    as that of a loss or an accuracy; others raise.
    The hook has the `best` value of the current run (NaN before the first), its `best_step` (-1)
    and, with `keep_state`, the `best_state`: a copy on the host, or on the devices for arrays that
    are sharded over processes. To keep the best state on disk, use `sf.Checkpoints(best=metric)`.
    `keep_state` does not take a train metric, since at a log point the state is of a later step,
    nor an evaluation elsewhere.
    A resumed run continues to count, so one that was stopped trains nothing, with a warning. To let
    it continue, give a larger `patience`, or another `name`, the hook's key in a checkpoint.

    >>> import stepfold as sf
    >>> hook = sf.stop_early("eval/loss", patience=2)
    >>> for step, loss in enumerate([3.0, 2.0, 2.5, 2.1]):
    ...     reason = hook(sf.Event(step, None, {"eval/loss": loss}, None))
    >>> str(reason)
    'eval/loss has not become better than 2 for 2 evaluations, since step 1'
    """

    can_stop = True
    run_state = ("best", "best_step", "_num_worse")
    state_key = ("metric", "_sign")

    def __init__(
        self,
        metric: str,
        *,
        patience: int,
        mode: str | None = None,
        min_delta: float = 0.0,
        keep_state: bool = False,
        name: str | None = None,
    ) -> None:
        check_flags(keep_state=keep_state)
        self._patience = read_integer("patience", patience)
        self._min_delta = read_positive("min_delta", min_delta, allow_zero=True)
        self._sign = 1 if mode_of("metric", metric, mode) == "min" else -1
        self.metric: str = metric
        if keep_state and metric.startswith("train/"):
            refuse("keep_state", "the metric of an evaluation", repr(metric))
        self._keep_state, self.name = keep_state, name
        self.reset(0)

    def reset(self, step: int) -> None:  # noqa: ARG002
        self.best, self.best_step, self._num_worse = math.nan, -1, 0
        self.best_state: Any = None

    def __call__(self, event: Event) -> Stop | None:
        value = event.metrics.get(self.metric)
        if value is None:
            return None
        is_better = math.isnan(self.best) or self._sign * (self.best - value) > self._min_delta
        if is_better and not math.isnan(value):
            self.best, self.best_step, self._num_worse = float(value), event.step, 0
            if self._keep_state and event.is_late:
                expected, advice = "an evaluation in this process", "use sf.Checkpoints(best=…)"
                refuse("keep_state", expected, "one elsewhere, without its state", advice)
            if self._keep_state:
                self.best_state = jax.tree.map(_copy_to_host, event.state)
            return None
        self._num_worse += 1
        return self.still_stops()

    def set_state(self, state: Any) -> None:
        best, best_state = (self.best, self.best_step), self.best_state
        super().set_state(state)
        if (self.best, self.best_step) == best:  # as in a run that goes back
            self.best_state = best_state

    def still_stops(self) -> Stop | None:
        if self._num_worse < self._patience:
            return None
        message = f"{self.metric} has not become better than {self.best:g} for {self._num_worse}"
        return Stop("early_stop", f"{message} evaluations, since step {self.best_step}")


class stop_on_spike(BaseHook):  # noqa: N801
    """Stop when a train metric is far above its recent values.

    A value is too high if it is more than `deviations` median absolute deviations above the median
    of the `window` finite values before it: neither is moved by a few outliers. Deviations are
    scaled to the standard deviation of a normal distribution, and are at least a hundredth of the
    median. No value is judged before the window is full. To see where it would have stopped, wrap
    it in `only_warn`.

    >>> import numpy as np, stepfold as sf
    >>> losses = {"train/loss": np.array([2.0, 2.1, np.nan, 1.9, 2.0, 9.0])}
    >>> str(sf.stop_on_spike(window=4)(sf.Event(6, None, {}, None, losses)))
    'train/loss is 9 in step 6, and the median of the 4 before it is 2 ± 0.07413'
    """

    can_stop = True
    run_state = ("_latest",)
    state_key = ("metric",)

    @renamed(sigma="deviations")
    def __init__(
        self,
        metric: str = "train/loss",
        *,
        window: int = 100,
        deviations: float = 10.0,
        name: str | None = None,
    ) -> None:
        _check_train_metric(metric)
        self.metric: str = metric
        self.name = name
        self._window = read_integer("window", window, minimum=2)
        self._deviations = read_positive("deviations", deviations)
        self.reset(0)

    def reset(self, step: int) -> None:  # noqa: ARG002
        self._latest: list[float] = []

    def __call__(self, event: Event) -> Stop | None:
        spike = self._find(event)
        return None if spike is None else Stop("spike", spike[1])

    def _find(self, event: Event) -> tuple[int, str] | None:
        """Add values to the window; return the step of the first spike, and a sentence."""
        values = np.asarray(event.per_step.get(self.metric, ()), np.float64)
        (indices,) = np.nonzero(np.isfinite(values))
        latest = self._latest[-self._window :]
        finite = np.concatenate([latest, values[indices]])
        self._latest = finite[-self._window :].tolist()
        if len(finite) <= self._window:
            return None
        windows = np.lib.stride_tricks.sliding_window_view(finite, self._window)[:-1]
        medians = np.median(windows, axis=1)
        deviations = 1.4826 * np.median(np.abs(windows - medians[:, None]), axis=1)
        deviations = np.maximum(deviations, 0.01 * np.abs(medians))
        judged = finite[self._window :]
        (spikes,) = np.nonzero(judged > medians + self._deviations * deviations)
        if not spikes.size:
            return None
        i = spikes[0]
        step = event.step - len(values) + 1 + int(indices[i + self._window - len(latest)])
        message = f"{self.metric} is {judged[i]:.4g} in step {step}, and the median of the "
        return step, message + f"{self._window} before it is {medians[i]:.4g} ± {deviations[i]:.4g}"


class roll_back_on_spike(stop_on_spike):  # noqa: N801
    """Go back to a checkpoint before a spike, and skip its batches.

    A spike is defined as in `stop_on_spike`. `skip` batches are left out: that of the spike, and
    those that follow it. After `limit` times the run stops at the next spike.

    >>> import numpy as np, stepfold as sf
    >>> losses = {"train/loss": np.array([2.0, 2.1, 1.9, 2.0, 9.0])}
    >>> request = sf.roll_back_on_spike(window=4, skip=3)(sf.Event(5, None, {}, None, losses))
    >>> request.skip, request.limit
    ((5, 8), 3)
    """

    goes_back = True

    @renamed(sigma="deviations")
    def __init__(
        self,
        metric: str = "train/loss",
        *,
        window: int = 100,
        deviations: float = 10.0,
        skip: int = 1,
        limit: int = 3,
        name: str | None = None,
    ) -> None:
        super().__init__(metric, window=window, deviations=deviations, name=name)
        self._skip, self._limit = read_integer("skip", skip), read_integer("limit", limit)

    def __call__(self, event: Event) -> GoBack | None:  # type: ignore[override]
        spike = self._find(event)
        if spike is None:
            return None
        step, message = spike
        return GoBack(None, (step, step + self._skip), message, self._limit)


class roll_back_on_nonfinite(stop_on_nonfinite):  # noqa: N801
    """Go back to a checkpoint before a NaN or inf, and skip its batch.

    `fit` then leaves out its own `stop_on_nonfinite`. `skip` batches are left out: that of the NaN,
    and those that follow it. After `limit` times the run stops at the next one, with a capsule.

    >>> import numpy as np, stepfold as sf
    >>> losses = {"train/loss": np.array([1.0, np.nan, np.nan])}
    >>> event = sf.Event(12, None, {"train/loss": np.nan}, None, losses)
    >>> sf.roll_back_on_nonfinite()(event).skip
    (11, 12)
    """

    goes_back = True

    @renamed(pattern="metric")
    def __init__(self, metric: str | None = None, *, skip: int = 1, limit: int = 3) -> None:
        super().__init__(metric)
        self._skip, self._limit = read_integer("skip", skip), read_integer("limit", limit)

    def __call__(self, event: Event) -> GoBack | None:  # type: ignore[override]
        stop = super().__call__(event)
        if stop is None or self.found is None:
            return None
        step = self.found.step
        return GoBack(None, (step, step + self._skip), stop.message, self._limit)


class watchdog(BaseHook):  # noqa: N801
    """Dump the stacks of all threads when no event has come for some seconds, or abort.

    The time starts with the run, and has to cover everything between two events: compiling, an
    evaluation, a save. The timer may fire up to a tenth later. It is that of `faulthandler`, so a
    process can have only one, and it fires even if a library hangs while it holds the GIL. With
    `abort` the process exits with code 1 and saves nothing: a launcher that starts it again resumes
    from the last checkpoint. Stacks go to stderr, or to a `file` that has a descriptor. It watches
    only its own process; `start_distributed(patience=…)` finds out which of several the
    others wait for.

    >>> import stepfold as sf
    >>> hook = sf.watchdog(600)
    >>> hook.open(0, None)
    >>> hook.close()
    """

    def __init__(self, seconds: float, abort: bool = False, *, file: TextIO | None = None) -> None:
        check_flags(abort=abort)
        self._seconds = read_positive("watchdog", seconds, unit="seconds")
        self._abort, self._file = abort, file
        self._started: float | None = None

    def open(self, step: int, total: int | None) -> None:  # noqa: ARG002
        self._started = time.monotonic()
        file = self._file or sys.__stderr__ or sys.stderr
        seconds, repeat = 1.1 * self._seconds, not self._abort
        faulthandler.dump_traceback_later(seconds, repeat=repeat, file=file, exit=self._abort)

    def __call__(self, event: Event) -> None:
        # Restarting the timer costs a thread, so not at every event.
        if self._started is None or time.monotonic() - self._started > 0.1 * self._seconds:
            self.open(event.step, event.total)

    def close(self) -> None:
        if self._started is not None:
            self._started = None
            faulthandler.cancel_dump_traceback_later()


def _check_train_metric(metric: Any) -> None:
    if not isinstance(metric, str) or not metric.startswith("train/"):
        refuse("metric", "a train metric such as 'train/loss'", repr(metric))


def _copy_to_host(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if not leaf.is_fully_addressable or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.copy(leaf)
    return np.array(leaf)  # not device_get: on CPU its view would keep the buffer from donation
