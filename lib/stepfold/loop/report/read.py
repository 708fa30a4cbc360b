"""Read a run from its directory: finished, running, killed, or written by an older stepfold."""

import json
import os
from array import array
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stepfold.checkpoint import steps
from stepfold.checkpoint.manifest import read_words
from stepfold.errors import CheckpointError
from stepfold.loop.run_info import read_run_info


class Curve(NamedTuple):
    """The values of a metric, NaN and inf included, and their steps, in order."""

    steps: np.ndarray
    values: np.ndarray


class SavedStep(NamedTuple):
    """A checkpoint; `time` is in seconds since 1970, and `metrics` is None if it is damaged."""

    step: int
    time: float
    metrics: Mapping[str, Any] | None


class Run(NamedTuple):
    """All that is known of a run.

    Attributes:
      path: its directory.
      info: the content of `run.json`; empty if there is none.
      curves: the metrics by name.
      hparams: the hyper-parameters that were logged.
      checkpoints: the checkpoints that exist, in order.
      damaged_lines: the number of lines of `metrics.jsonl` that cannot be read.
    """

    path: Path
    info: Mapping[str, Any]
    curves: Mapping[str, Curve]
    hparams: Mapping[str, Any]
    checkpoints: Sequence[SavedStep]
    damaged_lines: int

    @property
    def attempts(self) -> Sequence[Mapping[str, Any]]:
        """The starts of the run, the first one first."""
        attempts: Sequence[Mapping[str, Any]] = self.info.get("attempts", ())
        return attempts

    def argument(self, name: str) -> Any:
        """Return an argument of `fit`, or None if it is unknown."""
        return (self.info.get("arguments") or {}).get(name)


def read_run(path: Path, tail: "Tail | None" = None) -> Run:
    """Read a run.

    Args:
      path: its directory.
      tail: a `Tail` of its metrics that has read some of them before.

    Raises:
      DataError: if `run.json` is damaged, edited to something else, or of a later stepfold.
    """
    tail = tail or Tail(path / "metrics.jsonl")
    run = Run(path, read_run_info(path), tail.read(), tail.hparams, (), tail.damaged_lines)
    directory = (run.argument("checkpoints") or {}).get("directory") or path / "checkpoints"
    return run._replace(checkpoints=_read_checkpoints(Path(directory)))


def _read_checkpoints(directory: Path) -> list[SavedStep]:
    saved = []
    with suppress(CheckpointError, ValueError):  # the directory cannot be read
        for step in steps.steps_in(directory):
            path = steps.path_of(directory, step)
            with suppress(FileNotFoundError):  # it was deleted meanwhile
                time, metrics = path.stat().st_mtime, None
                with suppress(CheckpointError):
                    metrics = read_words(path).metrics or {}
                saved.append(SavedStep(step, time, metrics))
    return saved


class Tail:
    r"""An incremental reader of `metrics.jsonl`, which parses each line only once.

    Only the last line is read again, since the writer may replace it by one with more metrics of
    the same step. A line that is still being written is left for later.

    Attributes:
      hparams: the hyper-parameters that were logged.
      damaged_lines: the number of lines that no writer wrote.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> tail = Tail(path)
    >>> _ = path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n{"step": 3, "lo')
    >>> tail.read()["loss"].values.tolist()
    [2.0, 1.0]
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reset()

    def _reset(self) -> None:
        self._columns: dict[str, tuple[array[float], array[float]]] = {}
        self._last_start = 0  # where the last line begins
        self._last_names: Collection[str] | None = ()  # the metrics in it; None if it is damaged
        self.hparams: dict[str, Any] = {}
        self.damaged_lines = 0

    def read(self) -> dict[str, Curve]:
        """Return all curves as they are now; empty if there is no file yet."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._last_start:
                    self._reset()
                self._remove_last()
                file.seek(self._last_start)
                end = self._last_start
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._last_start, end = end, end + len(line)
                    self._append(line)
        except FileNotFoundError:
            self._reset()
        return {name: _sorted(*column) for name, column in self._columns.items() if column[0]}

    def _remove_last(self) -> None:
        self.damaged_lines -= self._last_names is None
        for name in self._last_names or ():
            for column in self._columns[name]:
                column.pop()
        self._last_names = ()

    def _append(self, line: bytes) -> None:
        try:
            row = json.loads(line)
            step = float(row.pop("step"))
            numbers = {n: float(v) for n, v in row.items() if n and type(v) in (float, int)}
            damaged = not 0 <= step < 2**63
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            damaged = True
        if damaged:
            self._last_names = None
            self.damaged_lines += 1
            return
        self._last_names = numbers
        for name, value in numbers.items():
            if name not in self._columns:
                self._columns[name] = array("d"), array("d")
            steps, values = self._columns[name]
            steps.append(step)
            values.append(value)
        if isinstance(row.get("hparams"), dict):
            self.hparams |= row["hparams"]


def _sorted(*column: Sequence[float]) -> Curve:
    steps, values = map(np.array, column)
    if np.any(np.diff(steps) < 0):  # the file was assembled by hand
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
    return Curve(steps, values)


def thin(curve: Curve, columns: int, span: tuple[float, float]) -> Curve:
    """Keep the minimum, the maximum and the first NaN or inf of each pixel column.

    A chart of the result looks like one of all values, and shows every spike.

    Args:
      curve: all values.
      columns: the number of pixel columns.
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
    kept = {0, len(column) - 1}
    starts = np.flatnonzero(np.diff(column, prepend=column[0] - 1)).tolist()
    for start, stop in pairwise([*starts, len(column)]):
        values = curve.values[start:stop]
        finite = np.flatnonzero(np.isfinite(values))
        if len(finite):
            kept.add(start + int(finite[np.argmin(values[finite])]))
            kept.add(start + int(finite[np.argmax(values[finite])]))
        if len(finite) < len(values):
            kept.add(start + int(np.argmin(np.isfinite(values))))
    chosen = sorted(kept)
    return Curve(curve.steps[chosen], curve.values[chosen])
