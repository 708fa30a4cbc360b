"""Read a run from its directory: finished, running, killed, or written by an older stepfold."""

import os
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stepfold.checkpoint.store import open_store
from stepfold.core.validation import is_url
from stepfold.errors import CheckpointError, DataError, refuse
from stepfold.loop.json_files import open_regular, parse_json
from stepfold.loop.run_info import read_run_info

_ENTRIES = 1000  # of a folder in which runs are looked for
_SIBLINGS = 7  # at most; the latest


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


def read_run(path: Path, *, remote: bool = True) -> Run:
    """Read a run from its directory; `remote` reads checkpoints in object storage as well."""
    curves, hparams, damaged_lines = read_metrics(path / "metrics.jsonl")
    saved: list[SavedStep] = []
    run = Run(path, read_run_info(path), curves, hparams, saved, damaged_lines)
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


def read_metrics(path: Path) -> tuple[dict[str, Curve], dict[str, Any], int]:
    """Read a `jsonl_writer` file: curves, hyper-parameters, and the number of damaged lines.

    A last line that is still being written is left out. Without a file, all are empty.
    """
    columns = defaultdict[str, Any](lambda: (array("d"), array("d")))  # steps, values
    hparams: dict[str, Any] = {}
    damaged_lines = 0
    if not path.exists():
        return {}, hparams, damaged_lines
    try:
        file = open_regular(path)
    except ValueError as error:
        advice = "move it away, and the rest of the run is shown without it"
        refuse(path, "lines of metrics", f"{error}", advice, kind=DataError)
    with file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                row = parse_json(line)
                step = float(row.pop("step"))
                numbers = {n: float(v) for n, v in row.items() if n and type(v) in (float, int)}
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
                step = -1.0
            if not 0 <= step < 2**63:
                damaged_lines += 1
                continue
            hparams |= row["hparams"] if isinstance(row.get("hparams"), dict) else {}
            for name, value in numbers.items():
                columns[name][0].append(step)
                columns[name][1].append(value)
    curves = {}
    for name, (at, values) in columns.items():
        order = np.argsort(at, kind="stable")  # a file may be assembled by hand
        curves[name] = Curve(np.array(at)[order], np.array(values)[order])
    return curves, hparams, damaged_lines


def siblings(run: Path) -> list[Path]:
    """Return the latest runs in the same folder."""
    times: dict[Path, float] = {}
    with suppress(OSError), os.scandir(run.parent) as entries:
        for entry in islice(entries, _ENTRIES):
            with suppress(OSError):  # not a run
                if entry.name != run.name:
                    times[Path(entry.path)] = os.stat(f"{entry.path}/metrics.jsonl").st_mtime
    return sorted(sorted(times, key=times.__getitem__)[-_SIBLINGS:])


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
