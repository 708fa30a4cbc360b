"""Show a person how far a run is, and whether it gets anywhere."""

import math
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, TextIO

import jax

from stepfold import tree
from stepfold.errors import ConfigError
from stepfold.loop.event import Event
from stepfold.loop.hooks.bars import Bar, read_kind
from stepfold.loop.hooks.pace import Pace


class progress:  # noqa: N801  it is called as the functions beside it are
    """Show the step, the time that is left, a running average of the loss, and metrics.

    The average is over about the last `over` steps, those before a resume too; what is not finite
    does not enter it. A bar is drawn on stderr, some times a second at most, and not at all where
    that is neither a terminal nor a notebook. Lines of JSON are printed on stdout, one an event,
    wherever it leads; what is not finite is null there. Of several processes the first one shows.

    >>> import stepfold as sf
    >>> hook = sf.progress("json", metrics=("*/accuracy",))
    >>> hook(sf.Event(10, 20, {"train/loss": 2.0, "train/accuracy": 0.5}, None))
    {"step": 10, "total": 20, "steps_per_second": null, ..., "loss": 2.0, "train/accuracy": 0.5}
    """

    def __init__(
        self,
        kind: str = "tqdm",
        *,
        metrics: Sequence[str] | None = None,
        average: str = "train/loss",
        over: int = 100,
        file: TextIO | None = None,
    ) -> None:
        """Say how to show what.

        Args:
          kind: "tqdm" or "rich", a bar; "json", lines for a program to read.
          metrics: names of metrics to show, as last seen, or patterns such as `eval/*`. If None, a
            bar shows those that are not of train steps, and JSON all.
          average: the metric of the running average, which is shown by the end of its name.
          over: how many steps make the average.
          file: where to draw or print, in place of stderr or stdout.

        Raises:
          ConfigError: if an argument is not as described, or the package is not installed.
        """
        self._make = read_kind(kind)
        if isinstance(metrics, str) or not all(isinstance(name, str) for name in metrics or ()):
            raise ConfigError(
                f"metrics: expected names or patterns, as ('eval/*',), got {tree.spell(metrics)}"
            )
        if type(over) is not int or over < 1:
            raise ConfigError(f"over: expected an integer of at least 1, got {over!r}")
        self._metrics, self._average, self._over, self._file = metrics, average, over, file
        self._all = kind == "json"
        self._wanted: dict[str, bool] = {}
        self._bar: Bar | None = None
        self._pace, self._sum, self._weight = Pace(), 0.0, 0.0
        self._opened, self._step = False, 0
        self._trained: int | None = None  # the step of the last train event
        self._new: dict[str, float] = {}  # not drawn yet
        self._waits, self._drawn_at = False, -math.inf

    def open(self, step: int, total: int | None) -> None:
        """Begin to show."""
        self._opened, self._step = True, step
        self._trained = step if self._trained is None else self._trained
        self._bar = self._make(self._file, step, total) if jax.process_index() == 0 else None

    def __call__(self, event: Event) -> None:
        """Show an event."""
        if not self._opened:
            self.open(event.step, event.total)
        self._pace.add(event)
        if event.is_train:
            steps, self._trained = event.step - (self._trained or 0), event.step
            self._take_in(event.metrics.get(self._average, math.nan), steps)
        self._step = event.step
        if self._bar is None:
            return
        self._waits = True
        self._new |= {name: x for name, x in event.metrics.items() if self._is_wanted(name)}
        if time.monotonic() - self._drawn_at >= self._bar.pause:
            self._draw(self._bar)

    def _take_in(self, value: float, steps: int) -> None:
        if math.isfinite(value):
            keep = (1 - 1 / self._over) ** max(steps, 1)
            self._sum = keep * self._sum + (1 - keep) * value
            self._weight = keep * self._weight + (1 - keep)

    def _is_wanted(self, name: str) -> bool:
        if name not in self._wanted:
            self._wanted[name] = (
                any(fnmatchcase(name, pattern) for pattern in self._metrics)
                if self._metrics is not None
                else self._all or not name.startswith("train/")
            )
        return self._wanted[name]

    def _draw(self, bar: Bar) -> None:
        running = {}
        if self._weight:
            running[self._average.rsplit("/", 1)[-1]] = self._sum / self._weight
        bar.draw(self._step, running | self._new, self._pace.rate)
        self._new, self._waits, self._drawn_at = {}, False, time.monotonic()

    def close(self) -> None:
        """Draw what was not yet, and leave it there."""
        if self._bar is not None:
            if self._waits:
                self._draw(self._bar)
            self._bar.close()
        self._bar = None

    def get_state(self) -> dict[str, Any]:
        """Give what a resumed run has to know."""
        running = {"average": self._average, "sum": self._sum, "weight": self._weight}
        return {**running, "trained": self._trained}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there; the average of another metric begins anew."""
        self._trained = state["trained"]
        if state.get("average", self._average) == self._average:
            self._sum, self._weight = state["sum"], state["weight"]
