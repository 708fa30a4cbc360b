"""A loss that jumps."""

from typing import Any

import numpy as np

from stepfold.errors import ConfigError
from stepfold.loop.event import Event

_NORMAL = 1.4826  # the standard deviation of a normal distribution, in median deviations
_LEAST = 0.01  # of the median: what is flatter than this is taken for so wide


class stop_on_spike:  # noqa: N801  it is called as the functions beside it are
    """Stop when a metric of one step is far above those before it.

    Each finite value is held against the median of those before it, and against how far they lie
    from it: neither is moved by a few values that are far off, and no NaN enters. Nothing is said
    before the window is full. To see where it would have stopped, wrap it in `only_warn`.

    >>> import numpy as np, stepfold as sf
    >>> hook = sf.stop_on_spike(window=4)
    >>> each = {"train/loss": np.array([2.0, 2.1, np.nan, 1.9, 2.0, 9.0])}
    >>> hook(sf.Event(6, None, {"train/loss": 3.4}, None, each))
    'train/loss is 9 in step 6, and the median of the 4 before it is 2 ± 0.07413'
    """

    def __init__(
        self, metric: str = "train/loss", *, window: int = 100, deviations: float = 10.0
    ) -> None:
        """Say what is far.

        Args:
          metric: the name of a train metric.
          window: how many finite values there are to compare with.
          deviations: how many deviations above the median are too many. A deviation is estimated
            by the median of the distances, as of a normal distribution, and is at least a hundredth
            of the median.

        Raises:
          ConfigError: if an argument is not as described.
        """
        if not isinstance(metric, str) or not metric.startswith("train/"):
            raise ConfigError(f"metric: expected a train metric, as 'train/loss', got {metric!r}")
        if type(window) is not int or window < 2:
            raise ConfigError(f"window: expected an integer of at least 2, got {window!r}")
        if not deviations > 0:
            raise ConfigError(f"deviations: expected a number above 0, got {deviations!r}")
        self._metric, self._window, self._deviations = metric, window, deviations
        self._seen = np.zeros(0)

    def __call__(self, event: Event) -> str | None:
        """Look at the metric, step by step."""
        values = event.each.get(self._metric)
        if values is None:
            return None
        values = np.asarray(values, np.float64)
        (steps,) = np.nonzero(np.isfinite(values))
        known = np.concatenate([self._seen, values[steps]])
        first = max(self._window - len(self._seen), 0)  # of the new values, that can be judged
        before, self._seen = known, known[-self._window :]
        judged = values[steps][first:]
        if not len(judged):
            return None
        windows = np.lib.stride_tricks.sliding_window_view(before, self._window)[: len(judged)]
        middle = np.median(windows, axis=1)
        width = _NORMAL * np.median(np.abs(windows - middle[:, None]), axis=1)
        width = np.maximum(width, _LEAST * np.abs(middle))
        (bad,) = np.nonzero(judged > middle + self._deviations * width)
        if not bad.size:
            return None
        at = int(bad[0])
        step = event.step - len(values) + 1 + int(steps[first + at])
        return (
            f"{self._metric} is {judged[at]:.4g} in step {step}, and the median of the "
            f"{self._window} before it is {middle[at]:.4g} ± {width[at]:.4g}"
        )

    def get_state(self) -> dict[str, Any]:
        """Give what a resumed run has to know."""
        return {"metric": self._metric, "seen": self._seen.tolist()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there; what was seen of another metric says nothing of this one."""
        if state.get("metric", self._metric) == self._metric:
            self._seen = np.asarray(state["seen"], np.float64)[-self._window :]
