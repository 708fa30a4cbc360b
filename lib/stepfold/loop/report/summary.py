"""The key figures of a run: what is read first, and what runs are compared by."""

from typing import NamedTuple

import numpy as np

from stepfold.checkpoint.retention import read_best
from stepfold.loop.report.reading import Run
from stepfold.loop.report.scales import spell
from stepfold.loop.report.sections import main_metrics
from stepfold.loop.report.standing import (
    clock_of,
    duration,
    goodput_of,
    overall,
    seconds_of,
)
from stepfold.table import amount, size

_METRICS = 8  # that have a figure, at most


class Figure(NamedTuple):
    """A number with its name.

    Attributes:
      name: what it is.
      value: the number.
      more: what else is to be said of it.
    """

    name: str
    value: str
    more: str = ""


class Extent(NamedTuple):
    """How a metric went.

    Attributes:
      last: its last value.
      low: the least value that is finite; None, if none is.
      high: the greatest.
      mode: whether the least ("min") or the greatest ("max") is the best; None, if neither is.
      step: the step of the best.
    """

    last: float
    low: float | None
    high: float | None
    mode: str | None
    step: float

    @property
    def best(self) -> float | None:
        """The best value, where one is better than another."""
        return {"min": self.low, "max": self.high}.get(self.mode or "")

    @property
    def told(self) -> str:
        """How it went, in words."""
        if self.low is None or self.high is None:
            return "never finite"
        if self.best is None:
            ends = spell(self.low), spell(self.high)
            return f"always {ends[0]}" if ends[0] == ends[1] else f"between {ends[0]} and {ends[1]}"
        word = "lowest" if self.mode == "min" else "highest"
        return f"{word} {spell(self.best)} at step {self.step:,.0f}"


def extent_of(run: Run, metric: str) -> Extent | None:
    """Tell how a metric went; None, where it was not measured."""
    curve = run.curves.get(metric)
    if curve is None or not len(curve.steps):
        return None
    mode, last = _mode(run, metric), float(curve.values[-1])
    finite = np.flatnonzero(np.isfinite(curve.values))
    if not len(finite):
        return Extent(last, None, None, mode, 0.0)
    values = curve.values[finite]
    at = finite[np.argmax(values) if mode == "max" else np.argmin(values)]
    low, high, step = values.min(), values.max(), curve.steps[at]
    return Extent(last, float(low), float(high), mode, float(step))


def _mode(run: Run, metric: str) -> str | None:
    """Tell which end of a metric is the better one, where it is a loss or evaluations have it.

    Of what is measured in training alone, as the norm of a gradient, nobody knows.
    """
    said = run.argument("checkpoints") or {}
    best = read_best(metric, said.get("mode") if said.get("best") == metric else None)
    mode = best[1] if best else None
    name = metric.partition("/")[2]
    others = [other for other in run.curves if other.partition("/")[2] == name]
    measured = name and (len(others) > 1 or not metric.startswith("train/"))
    return mode if mode == "min" or measured or said.get("best") == metric else None


def steps_of(run: Run) -> int:
    """Tell how many steps were done."""
    if run.attempts:
        return int(run.attempts[-1]["to"])
    return max(
        (int(curve.steps[-1]) for curve in run.curves.values() if len(curve.steps)), default=0
    )


def wall_of(run: Run) -> float:
    """Tell how many seconds all attempts took together."""
    return sum(seconds_of(attempt) for attempt in run.attempts)


def figures_of(run: Run) -> list[Figure]:
    """List what is to be read first, besides the metrics."""
    return [*_progress(run), *_speed(run), *_size(run)]


def _progress(run: Run) -> list[Figure]:
    total = run.attempts[-1].get("total") if run.attempts else None
    found = [Figure("steps", f"{steps_of(run):,}", f"of {total:,}" if total else "")]
    if run.attempts:
        count = len(run.attempts)
        more = _left(run) or (f"in {count} attempts" if count > 1 else "")
        found.append(Figure("time", duration(wall_of(run)), more))
    share = goodput_of(run)
    if share is not None:
        found.append(Figure("goodput", f"{share:.0%}", "of all time, in steps kept"))
    return found


def _left(run: Run) -> str:
    """Say how long the rest will take at the pace so far, while a run goes on."""
    attempt, found = run.attempts[-1], overall(run)
    if attempt.get("ended") or not attempt.get("total") or found is None:
        return ""
    return f"about {duration((attempt['total'] - attempt['to']) / found[0])} to go"


def _speed(run: Run) -> list[Figure]:
    found, speed = overall(run), []
    if found is not None:
        compiling = clock_of(run.attempts[-1])[1, 1]
        more = f"first metrics after {duration(compiling)}"
        speed.append(Figure("steps a second", spell(found[0]), more))
    examples = run.curves.get("throughput/examples_per_second")
    if examples is not None and not np.isnan(examples.values).all():
        speed.append(
            Figure("examples a second", spell(float(np.nanmedian(examples.values))), "the median")
        )
    if found is not None:
        speed.append(Figure("waiting for batches", f"{found[1]:.1%}", "of the time"))
    return speed


def _size(run: Run) -> list[Figure]:
    parameters = run.record.get("parameters")
    if not parameters:
        return []
    return [Figure("parameters", amount(parameters["count"]), size(parameters["bytes"]))]


def metric_figures(run: Run) -> list[Figure]:
    """List the last and the best value of each main metric."""
    found = []
    for name in main_metrics([run])[:_METRICS]:
        extent = extent_of(run, name)
        if extent is not None:
            found.append(Figure(name, spell(extent.last), extent.told))
    return found
