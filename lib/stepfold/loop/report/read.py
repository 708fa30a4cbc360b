"""Read a run from its directory: finished, running, killed, or written by an older stepfold."""

import json
import os
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
    """The files of a run; `info` is the content of `run.json`, empty if there is none."""

    path: Path
    info: Mapping[str, Any]
    curves: Mapping[str, Curve]
    hparams: Mapping[str, Any]
    checkpoints: Sequence[SavedStep]
    damaged_lines: int  # of metrics.jsonl

    @property
    def attempts(self) -> Sequence[Mapping[str, Any]]:
        attempts: Sequence[Mapping[str, Any]] = self.info.get("attempts", ())
        return attempts

    def argument(self, name: str) -> Any:
        return (self.info.get("arguments") or {}).get(name)


def read_run(path: Path, tail: "Tail | None" = None) -> Run:
    """Read a run from its directory; with a `tail`, parse only new lines of its metrics."""
    tail = tail or Tail(path / "metrics.jsonl")
    saved: list[SavedStep] = []
    run = Run(path, read_run_info(path), tail.read(), tail.hparams, saved, tail.damaged_lines)
    directory = (run.argument("checkpoints") or {}).get("directory") or path / "checkpoints"
    with suppress(CheckpointError, ValueError):  # the directory cannot be read
        for step in steps.steps_in(Path(directory)):
            folder, metrics = steps.path_of(Path(directory), step), None
            with suppress(FileNotFoundError):  # it was deleted meanwhile
                time = folder.stat().st_mtime
                with suppress(CheckpointError):
                    metrics = read_words(folder).metrics or {}
                saved.append(SavedStep(step, time, metrics))
    return run


class Tail:
    """An incremental reader of `metrics.jsonl`, which parses each line only once.

    Only the last line is read again, since the writer may replace it by one with more metrics of
    the same step. A line that is still being written is left for later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reset()

    def _reset(self) -> None:
        self._columns = defaultdict[str, Any](lambda: (array("d"), array("d")))  # steps, values
        self._last_start = 0  # where the last line begins
        self._last: Mapping[str, float] | None = {}  # its metrics; None if it is damaged
        self.hparams: dict[str, Any] = {}
        self.damaged_lines = 0

    def read(self) -> dict[str, Curve]:
        """Return all curves as they are now; empty if there is no file yet."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._last_start:
                    self._reset()
                self.damaged_lines -= self._last is None
                for name in self._last or ():
                    for column in self._columns[name]:
                        column.pop()
                self._last = {}
                end = file.seek(self._last_start)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._last_start, end = end, end + len(line)
                    self._append(line)
        except FileNotFoundError:
            self._reset()
        curves = {}
        for name, columns in self._columns.items():
            order = np.argsort(columns[0], kind="stable")  # a file may be assembled by hand
            if len(order):
                curves[name] = Curve(*(np.array(column)[order] for column in columns))
        return curves

    def _append(self, line: bytes) -> None:
        self._last = None
        with suppress(ValueError, TypeError, KeyError, AttributeError, OverflowError):
            row = json.loads(line)
            step = float(row.pop("step"))
            numbers = {n: float(v) for n, v in row.items() if n and type(v) in (float, int)}
            if 0 <= step < 2**63:
                self._last = numbers
                self.hparams |= row["hparams"] if isinstance(row.get("hparams"), dict) else {}
        self.damaged_lines += self._last is None
        for name, value in (self._last or {}).items():
            for column, number in zip(self._columns[name], (step, value), strict=True):
                column.append(number)


def thin(curve: Curve, columns: int, span: tuple[float, float]) -> Curve:
    """Keep the minimum, maximum and first NaN or inf of each pixel column; `span` is in steps."""
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
