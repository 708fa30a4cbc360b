"""Hooks that end a run: no progress, numbers that are none, time that is up."""

import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stepfold.checkpoint.retention import read_best
from stepfold.errors import ConfigError
from stepfold.loop.event import Event, Hook, expect


def stop_after(seconds: float) -> Hook:
    """Stop when so much time has gone by, counted from when this is made.

    >>> import stepfold as sf
    >>> hook = sf.stop_after(0.0)
    >>> hook(sf.Event(step=10, total=None, metrics={}, state=None))
    'the time limit of 0 s was reached'
    """
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds >= 0:
        raise ConfigError(f"stop_after: expected seconds, a number of at least 0, got {seconds!r}")
    end = time.monotonic() + seconds

    def stop_when_late(_: Event) -> str | None:
        late = time.monotonic() >= end
        return f"the time limit of {seconds:g} s was reached" if late else None

    return stop_when_late


class Nonfinite(NamedTuple):
    """A step with a metric that is not finite.

    Attributes:
      step: which one, the first being 1.
      metric: the name of the metric.
      metrics: what the step said, by name.
    """

    step: int
    metric: str
    metrics: dict[str, float]


class stop_on_nonfinite:  # noqa: N801  it is called as the functions beside it are
    """Stop when a metric, looked at step by step, is NaN or infinite.

    `fit` keeps what it takes to go back to that step in a `Capsule`, for `replay`.

    Attributes:
      found: the first step in which it was, of the run under way; None before.

    >>> import numpy as np, stepfold as sf
    >>> each = {"train/loss": np.array([1.0, np.nan, np.nan])}
    >>> sf.stop_on_nonfinite()(sf.Event(12, None, {"train/loss": np.nan}, None, each))
    'train/loss is nan in step 11'
    """

    def __init__(self, pattern: str = "train/loss") -> None:
        """Say what to watch.

        Args:
          pattern: the name of a metric of train steps.

        Raises:
          ConfigError: if it is none.
        """
        if not isinstance(pattern, str) or not pattern.startswith("train/"):
            raise ConfigError(
                f"pattern: expected a metric of train steps, as 'train/loss', got {pattern!r}"
            )
        self._name = pattern
        self.found: Nonfinite | None = None

    def open(self, step: int, total: int | None) -> None:
        """Forget a run before this one."""
        del step, total
        self.found = None

    def __call__(self, event: Event) -> str | None:
        """Look at the values of the metric, if there are any."""
        merged = event.metrics.get(self._name)
        if merged is None:
            expect(self._name, event)
        elif math.isfinite(merged):  # then it was in each step
            return None
        values = event.each.get(self._name)
        if values is None:
            return None
        seen = event.weights.get(self._name, np.ones(len(values))) != 0  # skipped, it saw nothing
        (bad,) = np.nonzero(~np.isfinite(values) & seen)
        if not bad.size:
            return None
        step = event.step - len(values) + 1 + int(bad[0])
        if self.found is None:
            rows = {name: row[bad[0]] for name, row in event.each.items() if np.ndim(row) == 1}
            said = {name: float(value) for name, value in rows.items()}
            self.found = Nonfinite(step, self._name, said)
        return f"{self._name} is {values[bad[0]]} in step {step}"


class stop_early:  # noqa: N801  it is called as the functions beside it are
    """Stop when a metric has not become better for so many evaluations.

    Attributes:
      metric: the name of the metric that is looked at.
      best: the best value so far.
      best_step: the step that it is of.
      best_state: a copy of the state of that step, if it was to be kept.

    >>> import stepfold as sf
    >>> hook = sf.stop_early("eval/loss", patience=2, keep_state=False)
    >>> for step, loss in enumerate([3.0, 2.0, 2.5, 2.1]):
    ...     said = hook(sf.Event(step, None, {"eval/loss": loss}, None))
    >>> said, hook.best_step
    ('eval/loss has not become better than 2 for 2 evaluations, since step 1', 1)
    """

    def __init__(
        self,
        metric: str,
        *,
        patience: int,
        mode: str | None = None,
        min_delta: float = 0.0,
        keep_state: bool | None = None,
    ) -> None:
        """Say what to watch.

        Args:
          metric: the name of the metric, such as `eval/loss`.
          patience: after how many values that are no better to stop.
          mode: whether less ("min") or more ("max") is better; if None, less of what is called a
            loss, and more of anything else.
          min_delta: by how much a value has to be better to count.
          keep_state: whether to keep a copy of the best state, which takes the memory of one; by
            default for the metric of an evaluation. At a log point the state is of a later step.

        Raises:
          ConfigError: if an argument is not as described.
        """
        if type(patience) is not int or patience < 1:
            raise ConfigError(f"patience: expected an integer of at least 1, got {patience!r}")
        if not isinstance(min_delta, int | float) or not min_delta >= 0:
            raise ConfigError(f"min_delta: expected a number of at least 0, got {min_delta!r}")
        found = read_best(metric, mode)
        if found is None:
            raise ConfigError("metric: expected the name of one, got None")
        is_train = metric.startswith("train/")
        if is_train and keep_state:
            raise ConfigError(
                f"keep_state: expected the metric of an evaluation for it, got {metric!r}: the "
                "state at hand is of a later step by then; leave it out"
            )
        keep_state = not is_train if keep_state is None else keep_state
        self.metric, self._sign = metric, 1 if found[1] == "min" else -1
        self._patience, self._delta, self._keep = patience, min_delta, keep_state
        self.best, self.best_step, self.best_state, self._worse = math.nan, -1, None, 0

    def __call__(self, event: Event) -> str | None:
        """Look at a value of the metric, if there is one."""
        value = event.metrics.get(self.metric)
        if value is None:
            expect(self.metric, event)
            return None
        better = math.isnan(self.best) or self._sign * (self.best - value) > self._delta
        if better and not math.isnan(value):
            self.best, self.best_step, self._worse = float(value), event.step, 0
            if self._keep:
                self.best_state = jax.tree.map(jnp.copy, event.state)
            return None
        self._worse += 1
        if self._worse < self._patience:
            return None
        return (
            f"{self.metric} has not become better than {self.best:g} for {self._worse} "
            f"evaluations, since step {self.best_step}"
        )

    def get_state(self) -> dict[str, Any]:
        """Give what a resumed run has to know."""
        watched = {"metric": self.metric, "sign": self._sign}
        return {**watched, "best": self.best, "best_step": self.best_step, "worse": self._worse}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there, unless it was of another metric.

        The best state itself is in a checkpoint, if anywhere.
        """
        here = self.metric, self._sign
        if (state.get("metric", here[0]), state.get("sign", here[1])) == here:
            self.best, self.best_step = state["best"], state["best_step"]
            self._worse = state["worse"]
