"""What was measured in the course of a run, by name."""

from collections.abc import Mapping
from typing import Any


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

    def get_state(self) -> dict[str, Any]:
        """Give all of it, for JSON to hold."""
        return {name: [list(curve.steps), list(curve)] for name, curve in self.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on with what was measured before."""
        self.clear()
        for name, (steps, values) in state.items():
            for step, value in zip(steps, values, strict=True):
                self.add(step, {name: value})
