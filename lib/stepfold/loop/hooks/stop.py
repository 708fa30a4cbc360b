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
    """Stop when a number of seconds has passed since the hook was created.

    >>> import stepfold as sf
    >>> str(sf.stop_after(0.0)(sf.Event(10, None, {}, None)))
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
    """A step, counted from 1, with a NaN or inf in a metric, and all metrics of that step."""

    step: int
    metric: str
    metrics: dict[str, float]


class stop_on_nonfinite(BaseHook):  # noqa: N801
    """Stop when a train metric is NaN or infinite in a step; one of weight 0 does not count.

    `found` is the first such step of the current run, a `Nonfinite`, or None. `fit` stores what it
    takes to rerun that step in a `Capsule`, for `replay`. `pattern` is the name of the metric.

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
        values = event.per_step.get(self.metric)
        # A finite mean implies that it is finite in each step.
        if values is None or math.isfinite(event.metrics.get(self.metric, math.nan)):
            return None
        has_weight = event.weights.get(self.metric, np.ones(len(values))) != 0
        (indices,) = np.nonzero(~np.isfinite(values) & has_weight)
        if not indices.size:
            return None
        bad = int(indices[0])
        step = event.step - len(values) + 1 + bad
        if self.found is None:
            rows = event.per_step.items()
            metrics = {name: float(row[bad]) for name, row in rows if np.ndim(row) == 1}
            self.found = Nonfinite(step, self.metric, metrics)
        return Stop("nonfinite", f"{self.metric} is {values[bad]} in step {step}")


class stop_early(StatefulHook):  # noqa: N801
    """Stop when a metric, such as `eval/loss`, has not improved for `patience` evaluations.

    A value improves if it is better than the best one by more than `min_delta`. With `mode="min"`,
    the default for a metric that is called a loss, lower is better; with `mode="max"` higher is.
    The hook has the `best` value of the current run (NaN before the first), its `best_step` (-1)
    and, with `keep_state`, the `best_state`: a copy on the host, or on the devices for arrays that
    are sharded over processes. To keep the best state on disk, use `sf.Checkpoints(best=metric)`.
    `keep_state` does not take a train metric, since at a log point the state is of a later step.

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
    ) -> None:
        self._patience = check_count("patience", patience)
        self._min_delta = check_positive("min_delta", min_delta, allow_zero=True)
        if not isinstance(metric, str):
            raise ConfigError(f"metric: expected the name of a metric, got {metric!r}")
        if keep_state and metric.startswith("train/"):
            raise ConfigError(f"keep_state: expected the metric of an evaluation, got {metric!r}")
        self.metric: str = metric
        self._sign = 1 if read_best(metric, mode) == (metric, "min") else -1
        self._keep_state = keep_state
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
        message = f"{self.metric} has not become better than {self.best:g} for {self._num_worse}"
        return Stop("early_stop", f"{message} evaluations, since step {self.best_step}")


class stop_on_spike(StatefulHook):  # noqa: N801
    """Stop when a train metric of one step is far above the `window` finite values before it.

    A value is too high if it is more than `deviations` median absolute deviations above the median
    of the window: neither is moved by a few outliers. Deviations are scaled to the standard
    deviation of a normal distribution, and are at least a hundredth of the median. No value is
    judged before the window is full. To see where it would have stopped, wrap it in `only_warn`.

    >>> import numpy as np, stepfold as sf
    >>> losses = {"train/loss": np.array([2.0, 2.1, np.nan, 1.9, 2.0, 9.0])}
    >>> str(sf.stop_on_spike(window=4)(sf.Event(6, None, {}, None, losses)))
    'train/loss is 9 in step 6, and the median of the 4 before it is 2 ± 0.07413'
    """

    can_stop = True
    run_state = ("_latest",)
    state_key = ("metric",)

    def __init__(
        self, metric: str = "train/loss", *, window: int = 100, deviations: float = 10.0
    ) -> None:
        _check_train_metric("metric", metric)
        self.metric: str = metric
        self._window = check_count("window", window, minimum=2)
        self._deviations = check_positive("deviations", deviations)
        self.reset(0)

    def reset(self, step: int) -> None:  # noqa: ARG002
        self._latest: list[float] = []

    def __call__(self, event: Event) -> Stop | None:
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
        step = event.step - len(values) + 1 + indices[i + self._window - len(latest)]
        before = f"the median of the {self._window} before it is {medians[i]:.4g}"
        message = f"{self.metric} is {judged[i]:.4g} in step {step}, and {before}"
        return Stop("spike", f"{message} ± {deviations[i]:.4g}")


def _check_train_metric(name: str, metric: Any) -> None:
    if not isinstance(metric, str) or not metric.startswith("train/"):
        raise ConfigError(f"{name}: expected a train metric, as 'train/loss', got {metric!r}")


def _copy_to_host(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if not leaf.is_fully_addressable or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.copy(leaf)
    return np.array(leaf)  # not device_get: on CPU its view would keep the buffer from donation
