"""Read a run from its directory: finished, running, killed, or written by an older stepfold."""

import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from stepfold.core.validation import is_url
from stepfold.errors import CheckpointError, DataError, refuse
from stepfold.json_files import open_regular, parse_json

_ENTRIES = 1000  # of a folder in which runs are looked for
_SIBLINGS = 7  # at most; the latest
_BLOCK = 1 << 18  # bytes of lines that are parsed at once


class CurveArrays(NamedTuple):
    """The values of a metric, NaN and inf included, and their steps, in order."""

    steps: np.ndarray
    values: np.ndarray


class SavedStep(NamedTuple):
    """A checkpoint; `time` is in seconds since 1970, and `metrics` is None if it is damaged."""

    step: int
    time: float
    metrics: Mapping[str, Any] | None


class RunData(NamedTuple):
    """The content of the files of a run; `info` is that of `run.json`, or empty without one."""

    path: Path
    info: Mapping[str, Any]
    curves: Mapping[str, CurveArrays]
    hparams: Mapping[str, Any]
    checkpoints: Sequence[SavedStep]
    damaged_lines: int  # of metrics.jsonl

    @property
    def attempts(self) -> Sequence[Mapping[str, Any]]:
        attempts: Sequence[Mapping[str, Any]] = self.info.get("attempts", ())
        return attempts

    def argument(self, name: str) -> Any:
        return (self.info.get("arguments") or {}).get(name)


def read_run_data(path: Path, *, remote: bool = True) -> RunData:
    """Read a run from its directory; `remote` reads checkpoints in object storage as well."""
    from stepfold.checkpoint.store import open_store  # lazy: imports jax
    from stepfold.runs.info import read_run_info

    curves, hparams, damaged_lines = read_metrics_file(path / "metrics.jsonl")
    saved: list[SavedStep] = []
    run = RunData(path, read_run_info(path), curves, hparams, saved, damaged_lines)
    directory = (run.argument("checkpoints") or {}).get("directory") or "checkpoints"
    if not is_url(directory):
        directory = os.path.normpath(path / directory)
    elif not remote:
        return run
    with suppress(CheckpointError, ValueError):  # the directory cannot be read
        store = open_store(directory)
        for step in store.steps():
            metrics = None
            with suppress(CheckpointError):  # it was deleted meanwhile
                time = store.saved_at(step)
                with suppress(CheckpointError):
                    metrics = store.read_metadata(step).metrics or {}
                saved.append(SavedStep(step, time, metrics))
    return run


def read_metrics_file(path: Path) -> tuple[dict[str, CurveArrays], dict[str, Any], int]:
    """Read a file of `sf.writers.jsonl`: curves, hyper-parameters, and the number of damaged lines.

    A last line that is still being written is left out. Without a file, all are empty.
    """
    rows = _Rows()
    if path.exists():
        try:
            file = open_regular(path)
        except ValueError as error:
            advice = "move it away, and the rest of the run is shown without it"
            refuse(path, "lines of metrics", f"{error}", advice, kind=DataError)
        with file:
            rows.read(file)
    return rows.curves(), rows.hparams, rows.damaged_lines


def read_curves(
    file: BinaryIO, until: float = math.inf, name: str | None = None
) -> tuple[dict[str, CurveArrays], int]:
    """Read the curves of a `metrics.jsonl` up to a step, or one of them; count damaged lines.

    For one curve only the lines that have its name are parsed.
    """
    rows = _Rows()
    rows.read(file, until, b"" if name is None else json.dumps(name).encode())
    curves = rows.curves().items()
    kept = {
        n: CurveArrays(*(x[c.steps <= until] for x in c)) for n, c in curves if name in (None, n)
    }
    return {n: curve for n, curve in kept.items() if len(curve.steps)}, rows.damaged_lines


class _Rows:
    """The rows of a file, as columns."""

    def __init__(self) -> None:
        self.hparams: dict[str, Any] = {}
        self.damaged_lines = 0
        self._columns = defaultdict[str, list[CurveArrays]](list)  # pieces of curves

    def read(self, file: BinaryIO, until: float = math.inf, needle: bytes = b"") -> None:
        """Read the lines with `needle` in them, up to a step or a block further."""
        while lines := file.readlines(_BLOCK):
            last = lines.pop() if not lines[-1].endswith(b"\n") else lines[-1]
            lines = [line for line in lines if needle in line]
            if not self._add_at_once(lines):
                for line in lines:
                    self._add(line)
            if until < math.inf and last.endswith(b"\n") and _step_of(last) > until:
                return

    def _add_at_once(self, lines: Sequence[bytes]) -> bool:
        """Add lines that hold nothing but numbers; a fifth of the time of one after the other."""
        text = b",".join(lines)
        if text.count(b"{") != len(lines) or b"[" in text or b"\\" in text:
            return False
        rows_by_names = defaultdict[tuple[str, ...], list[dict[str, Any]]](list)
        pieces = []
        try:
            for row in json.loads(f"[{text.decode()}]"):
                rows_by_names[tuple(row)].append(row)
            for names, rows in rows_by_names.items():
                steps = np.array([row["step"] for row in rows])
                for name in names:
                    values = [row[name] for row in rows]
                    if not {*map(type, values)} <= {int, float} or not name:
                        return False
                    pieces.append((name, CurveArrays(steps, np.array(values, np.float64))))
                if steps.dtype != np.int64 or steps.min() < 0:
                    return False
        except (ValueError, TypeError, KeyError, OverflowError):
            return False
        for name, piece in pieces:
            if name != "step":
                self._columns[name].append(piece)
        return True

    def _add(self, line: bytes) -> None:
        try:
            row = parse_json(line)
            step = float(row.pop("step"))
            numbers = {n: float(v) for n, v in row.items() if n and type(v) in (float, int)}
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            step = -1.0
        if not 0 <= step < 2**63:
            self.damaged_lines += 1
            return
        self.hparams |= row["hparams"] if isinstance(row.get("hparams"), dict) else {}
        for name, value in numbers.items():
            self._columns[name].append(CurveArrays(np.array([step]), np.array([value])))

    def curves(self) -> dict[str, CurveArrays]:
        """Return the columns in order of their steps, since a file may be assembled by hand."""
        curves = {}
        for name, pieces in self._columns.items():
            steps, values = (np.concatenate([*each]) for each in zip(*pieces, strict=True))
            order = np.argsort(steps, kind="stable")
            curves[name] = CurveArrays(steps[order].astype(np.float64), values[order])
        return curves


def _step_of(line: bytes) -> float:
    """Return the step of a line, or -1 if it is damaged."""
    try:
        return float(parse_json(line)["step"])
    except (ValueError, TypeError, LookupError):
        return -1.0


def siblings(run: Path) -> list[Path]:
    """Return the latest runs in the same folder."""
    times: dict[Path, float] = {}
    with suppress(OSError), os.scandir(run.parent) as entries:
        for entry in islice(entries, _ENTRIES):
            with suppress(OSError):  # not a run
                if entry.name != run.name:
                    times[Path(entry.path)] = os.stat(f"{entry.path}/metrics.jsonl").st_mtime
    return sorted(sorted(times, key=times.__getitem__)[-_SIBLINGS:])


def shared_rows(
    name: str, a: CurveArrays, b: CurveArrays
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the steps of rows that mean the same in both runs, and their values.

    A metric of train steps is a mean over the steps since the previous row.
    """
    last = [np.append(np.diff(each.steps) != 0, [True] * (len(each.steps) > 0)) for each in (a, b)]
    a = CurveArrays(a.steps[last[0]], a.values[last[0]])
    b = CurveArrays(b.steps[last[1]], b.values[last[1]])
    steps, at, other = np.intersect1d(a.steps, b.steps, return_indices=True)
    if name.startswith("train/"):
        is_same = np.append(-1, a.steps)[at] == np.append(-1, b.steps)[other]
        steps, at, other = steps[is_same], at[is_same], other[is_same]
    return steps, a.values[at], b.values[other]


def relative_difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the difference relative to the larger value; NaN if one of them is not finite."""
    with np.errstate(invalid="ignore", divide="ignore"):
        relative: np.ndarray = np.abs(a - b) / np.maximum(np.abs(a), np.abs(b))
    return np.where(a == b, 0.0, relative)


def thin(curve: CurveArrays, columns: int, span: tuple[float, float]) -> CurveArrays:
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
    return CurveArrays(curve.steps[chosen], curve.values[chosen])
