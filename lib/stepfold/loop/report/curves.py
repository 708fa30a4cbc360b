"""The curves of a run, from `metrics.jsonl`, while it grows too."""

import json
import os
from array import array
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Curve(NamedTuple):
    """The values of one metric.

    Attributes:
      steps: the steps, in order.
      values: a value for each; NaN and infinite ones too.
    """

    steps: np.ndarray
    values: np.ndarray


class Tail:
    r"""Read a file of metrics again and again, and of what was read before only the last line.

    The last line may be replaced by one that has more of the same step; all above it stays, as
    `jsonl_writer` promises. A line that was cut off while it was written is left for later.

    Attributes:
      settings: what was written as hyper-parameters.
      damaged: how many lines are none of a writer's.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> tail = Tail(path)
    >>> _ = path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n{"step": 3, "lo')
    >>> tail.read()["loss"].values.tolist()
    [2.0, 1.0]
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self._at, self._lost, self.damaged = 0, 0, 0
        self._columns: dict[str, tuple[array[float], array[float]]] = {}
        self.settings: dict[str, Any] = {}

    def read(self) -> dict[str, Curve]:
        """Give all curves as they are now; none, where there is no file yet."""
        last = b""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._at:
                    self._begin()
                file.seek(self._at)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    if last:
                        self._add(last)
                        self._at += len(last)
                    last = line
        except FileNotFoundError:
            self._begin()
        row = self._parse(last) if last else (0.0, {})
        self.damaged = self._lost + (row is None)
        return self._curves(*(row or (0.0, {})))

    def _add(self, line: bytes) -> None:
        row = self._parse(line)
        self._lost += row is None
        step, numbers = row or (0.0, {})
        for name, value in numbers.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = array("d"), array("d")
            column[0].append(step)
            column[1].append(value)

    def _parse(self, line: bytes) -> tuple[float, dict[str, float]] | None:
        """Take the numbers of a line; of the rest only hyper-parameters have a place on a page."""
        try:
            row = json.loads(line)
            step = float(row.pop("step"))
            numbers = {n: float(v) for n, v in row.items() if n and type(v) in (float, int)}
            if not 0 <= step < 2**63:
                return None
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return None
        if len(numbers) < len(row) and isinstance(row.get("hparams"), dict):
            self.settings |= row["hparams"]
        return step, numbers

    def _curves(self, step: float, numbers: Mapping[str, float]) -> dict[str, Curve]:
        found = {}
        for name in [*self._columns, *(name for name in numbers if name not in self._columns)]:
            steps, values = (np.array(one) for one in self._columns.get(name, ((), ())))
            if name in numbers:
                steps, values = np.append(steps, step), np.append(values, numbers[name])
            found[name] = _in_order(Curve(steps, values))
        return found


def _in_order(curve: Curve) -> Curve:
    """Sort by steps, which are in order already unless the file was put together by hand."""
    if np.all(np.diff(curve.steps) >= 0):
        return curve
    order = np.argsort(curve.steps, kind="stable")
    return Curve(curve.steps[order], curve.values[order])


def thin(curve: Curve, columns: int, span: tuple[float, float]) -> Curve:
    """Leave the least, the greatest and the first that is not finite of each column of pixels.

    So no spike is lost, however many values there are, and what is drawn looks as if all were.

    Args:
      curve: all values.
      columns: how many columns there are.
      span: the steps at the left and at the right edge.

    >>> values = np.where(np.arange(100_000) == 54_321, 7.0, 1.0)
    >>> few = thin(Curve(np.arange(100_000.0), values), 100, (0, 99_999))
    >>> len(few.steps) < 300, few.values.max(), few.steps[few.values.argmax()]
    (True, np.float64(7.0), np.float64(54321.0))
    """
    if len(curve.steps) <= 2 * columns:
        return curve
    width = (span[1] - span[0]) / columns or 1.0
    column = ((curve.steps - span[0]) / width).astype(np.int64)
    bounds = [*np.flatnonzero(np.diff(column, prepend=column[0] - 1)), len(column)]
    kept = {0, len(column) - 1}
    for first, last in pairwise(bounds):
        values = curve.values[first:last]
        finite = np.flatnonzero(np.isfinite(values))
        if len(finite):
            kept |= {int(first + finite[np.argmin(values[finite])])}
            kept |= {int(first + finite[np.argmax(values[finite])])}
        if len(finite) < len(values):
            kept |= {int(first + np.flatnonzero(~np.isfinite(values))[0])}
    chosen = np.array(sorted(kept))
    return Curve(curve.steps[chosen], curve.values[chosen])
