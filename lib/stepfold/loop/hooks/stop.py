"""Hooks that stop a run: out of time, a NaN or inf, no progress, a loss spike."""

import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stepfold.checkpoint.retention import read_best
from stepfold.core.validation import check_count, check_positive
from stepfold.errors import ConfigError
from stepfold.loop.hooks.base import BaseHook, Event, StatefulHook, Stop


class stop_after(BaseHook):  # noqa: N801
    """Stop when a number of seconds has passed since the hook was made.

    >>> import stepfold as sf
    >>> hook = sf.stop_after(0.0)
    >>> str(hook(sf.Event(step=10, total=None, metrics={}, state=None)))
    'the time limit of 0 s was reached'
    """

    can_stop = True

    def __init__(self, seconds: float) -> None:
        check_positive("stop_after", seconds, allow_zero=True, unit="seconds")
        self._seconds, self._end = seconds, time.monotonic() + seconds

    def __call__(self, event: Event) -> Stop | None:  # noqa: ARG002
        if time.monotonic() < self._end:
            return None
        return Stop("time_limit", f"the time limit of {self._seconds:g} s was reached")


class Nonfinite(NamedTuple):
    """A step with a NaN or inf in a metric.

    Attributes:
      step: the step, counted from 1.
      metric: the name of the metric.
      metrics: the metrics of that step, by name.
    """

    step: int
    metric: str
    metrics: dict[str, float]


class stop_on_nonfinite(BaseHook):  # noqa: N801
    """Stop when a train metric is NaN or infinite in a step; one of weight 0 does not count.

    `fit` stores what it takes to rerun that step in a `Capsule`, for `replay`.

    Attributes:
      metric: the name of the metric, given as `pattern`.
      found: the first such step of the current run, a `Nonfinite`, or None.

    >>> import numpy as np, stepfold as sf
    >>> losses = {"train/loss": np.array([1.0, np.nan, np.nan])}
    >>> str(sf.stop_on_nonfinite()(sf.Event(12, None, {"train/loss": np.nan}, None, losses)))
    'train/loss is nan in step 11'
    """

    can_stop = True
    replaces_nonfinite_stop = True

    def __init__(self, pattern: str = "train/loss") -> None:
        _check_train_metric("pattern", pattern)
        self.metric: str = pattern
        self.found: Nonfinite | None = None

    def open(self, step: int, total: int | None) -> None:  # noqa: ARG002
        self.found = None

    def __call__(self, event: Event) -> Stop | None:
        if math.isfinite(event.metrics.get(self.metric, math.nan)):  # then it is in each step
            return None
        values = event.per_step.get(self.metric)
        if values is None:
            return None
        has_weight = event.weights.get(self.metric, np.ones(len(values))) != 0
        (indices,) = np.nonzero(~np.isfinite(values) & has_weight)
        if not indices.size:
            return None
        bad = int(indices[0])
        step = event.step - len(values) + 1 + bad
        if self.found is None:
            scalars = {name: row for name, row in event.per_step.items() if np.ndim(row) == 1}
            metrics = {name: float(row[bad]) for name, row in scalars.items()}
            self.found = Nonfinite(step, self.metric, metrics)
        return Stop("nonfinite", f"{self.metric} is {values[bad]} in step {step}")


class stop_early(StatefulHook):  # noqa: N801
    """Stop when a metric has not improved for `patience` evaluations.

    To keep the best state on disk, give `fit` an `sf.Checkpoints(best=metric)`.

    Attributes:
      metric: the name of the metric.
      best: the best value of the current run, NaN before the first.
      best_step: the step of the best value, -1 before the first.
      best_state: with `keep_state`, a copy of the state of that step on the host; otherwise None.
        Arrays that are sharded over processes are copied on their devices. No checkpoint keeps it.

    Args:
      metric: the name of the metric, such as `eval/loss`.
      patience: the number of values without improvement after which to stop.
      mode: whether lower ("min") or higher ("max") is better. If None, lower for a metric that is
        called a loss, and higher for any other.
      min_delta: by how much a value has to be better to count.
      keep_state: whether to keep the best state. Not for a train metric: at a log point the state
        is that of a later step.

    >>> import stepfold as sf
    >>> hook = sf.stop_early("eval/loss", patience=2)
    >>> for step, loss in enumerate([3.0, 2.0, 2.5, 2.1]):
    ...     reason = hook(sf.Event(step, None, {"eval/loss": loss}, None))
    >>> str(reason), hook.best_step
    ('eval/loss has not become better than 2 for 2 evaluations, since step 1', 1)
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
    ) -> None:
        check_count("patience", patience)
        check_positive("min_delta", min_delta, allow_zero=True)
        if not isinstance(metric, str):
            raise ConfigError(f"metric: expected the name of a metric, got {metric!r}")
        if keep_state and metric.startswith("train/"):
            raise ConfigError(
                f"keep_state: expected the metric of an evaluation, got {metric!r}, at whose log "
                "points the state is that of a later step; leave it out"
            )
        self.metric: str = metric
        self._sign = 1 if read_best(metric, mode) == (metric, "min") else -1
        self._patience, self._min_delta, self._keep_state = patience, min_delta, keep_state
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
            if self._keep_state:
                self.best_state = jax.tree.map(_copy_to_host, event.state)
            return None
        self._num_worse += 1
        if self._num_worse < self._patience:
            return None
        return Stop(
            "early_stop",
            f"{self.metric} has not become better than {self.best:g} for {self._num_worse} "
            f"evaluations, since step {self.best_step}",
        )


class stop_on_spike(StatefulHook):  # noqa: N801
    """Stop when a train metric of one step is far above the finite values before it.

    Each value is compared with the median of a window, in units of the window's median deviation:
    neither is moved by a few outliers. No value is judged before the window is full. To see where
    it would have stopped, wrap it in `only_warn`.

    Args:
      metric: the name of a train metric.
      window: the number of finite values to compare with.
      deviations: how many deviations above the median are too many. They are scaled to the standard
        deviation of a normal distribution, and are at least a hundredth of the median.

    >>> import numpy as np, stepfold as sf
    >>> hook = sf.stop_on_spike(window=4)
    >>> losses = {"train/loss": np.array([2.0, 2.1, np.nan, 1.9, 2.0, 9.0])}
    >>> str(hook(sf.Event(6, None, {"train/loss": 3.4}, None, losses)))
    'train/loss is 9 in step 6, and the median of the 4 before it is 2 ± 0.07413'
    """

    can_stop = True
    run_state = ("_latest",)
    state_key = ("metric",)

    def __init__(
        self, metric: str = "train/loss", *, window: int = 100, deviations: float = 10.0
    ) -> None:
        _check_train_metric("metric", metric)
        check_count("window", window, minimum=2)
        check_positive("deviations", deviations)
        self.metric: str = metric
        self._window, self._deviations = window, deviations
        self.reset(0)

    def reset(self, step: int) -> None:  # noqa: ARG002
        self._latest: list[float] = []

    def __call__(self, event: Event) -> Stop | None:
        values = np.asarray(event.per_step.get(self.metric, ()), np.float64)
        (indices,) = np.nonzero(np.isfinite(values))
        latest = self._latest[-self._window :]
        finite = np.concatenate([latest, values[indices]])
        self._latest = finite[-self._window :].tolist()
        indices = indices[self._window - len(latest) :]  # those with a full window before them
        if not indices.size:
            return None
        windows = np.lib.stride_tricks.sliding_window_view(finite, self._window)[:-1]
        medians = np.median(windows, axis=1)
        widths = 1.4826 * np.median(np.abs(windows - medians[:, None]), axis=1)
        widths = np.maximum(widths, 0.01 * np.abs(medians))
        (spikes,) = np.nonzero(values[indices] > medians + self._deviations * widths)
        if not spikes.size:
            return None
        first = spikes[0]
        step = event.step - len(values) + 1 + indices[first]
        return Stop(
            "spike",
            f"{self.metric} is {values[indices[first]]:.4g} in step {step}, and the median of the "
            f"{self._window} before it is {medians[first]:.4g} ± {widths[first]:.4g}",
        )


def _check_train_metric(name: str, metric: Any) -> None:
    if not isinstance(metric, str) or not metric.startswith("train/"):
        raise ConfigError(f"{name}: expected a train metric, as 'train/loss', got {metric!r}")


def _copy_to_host(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if not leaf.is_fully_addressable or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.copy(leaf)
    return np.array(leaf)  # not device_get: on CPU its view would keep the buffer from donation
