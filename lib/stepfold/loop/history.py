"""What was measured in the course of a run, by name."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class Curve(list[float]):
    """The values of one metric; `steps` says of which steps they are.

    >>> curve = Curve()
    >>> curve.add(10, 0.5)
    >>> curve, curve.steps
    ([0.5], [10])
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def add(self, step: int, value: float) -> None:
        """Add a value, unless it is of a step that was there before."""
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.append(value)


class History(dict[str, Curve]):
    """A curve for each metric.

    >>> history = History()
    >>> history.add(10, {"train/loss": 0.5})
    >>> history["train/loss"]
    [0.5]
    """

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step."""
        for name, value in metrics.items():
            self.setdefault(name, Curve()).add(step, float(value))

    def get_state(self) -> list[Any]:
        """Give all of it as bytes, in little room: metrics that have the same steps share them."""
        groups: dict[bytes, dict[str, bytes]] = {}
        for name, curve in self.items():
            steps = np.array(curve.steps, np.int64).tobytes()
            groups.setdefault(steps, {})[name] = np.array(curve, np.float64).tobytes()
        return [list(self), *([steps, values] for steps, values in groups.items())]

    def set_state(self, state: Sequence[Any]) -> None:
        """Go on with what was measured before."""
        names, *groups = state
        self.clear()
        self.update({name: Curve() for name in names})
        for steps, curves in groups:
            for name, values in curves.items():
                self[name].steps = np.frombuffer(steps, np.int64).tolist()
                self[name].extend(np.frombuffer(values, np.float64).tolist())
