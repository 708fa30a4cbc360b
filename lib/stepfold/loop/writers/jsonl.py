"""JSON lines that survive a kill at any byte, and CSV files derived from them."""

import csv
import io
import json
import math
import mmap
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stepfold.errors import ConfigError
from stepfold.loop.writers import base


class jsonl_writer(base.FileWriter):  # noqa: N801
    r"""Write JSON lines, one for each step: `{"step": 10, "train/loss": 0.5}`.

    Names keep the order of their first write. Floats round-trip exactly; NaN and inf are written
    as `NaN`, `Infinity` and `-Infinity`, which is not strict JSON, but Python and pandas read it.
    A histogram is written as its `counts` and `edges`, an image as its shape. Hyper-parameters are
    in the line of the step at which the run starts or resumes, under `hparams`.

    The first write creates the file and its folders. The file is up to date after each write, even
    if the process is killed, and durable after `flush`. Rows that a full disk refuses raise an
    error and are written before the next row. An existing file is continued; a line that a kill
    left incomplete is removed. When the writer is closed, a file `csv` is derived from the lines.

    >>> import pathlib, stepfold as sf, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> writer = sf.jsonl_writer(path)
    >>> writer.write_scalars(20, {"train/loss": 0.25})
    >>> writer.write_scalars(20, {"eval/loss": 0.5})
    >>> path.read_text()
    '{"step": 20, "train/loss": 0.25, "eval/loss": 0.5}\n'
    """

    def __init__(self, path: base.PathLike, *, csv: base.PathLike | None = None) -> None:
        super().__init__(base.check_path("jsonl_writer", path))
        self._csv = None if csv is None else base.check_path("jsonl_writer: csv", csv)
        self._last_line, self._last_step, self._start = b"", -1, 0
        self._pending: list[tuple[int, dict[str, Any]]] = []  # rows that could not be written

    def _write(self, step: int, values: Mapping[str, base.Value]) -> None:
        if "step" in values:
            raise ValueError(f"{self._path}: expected names other than 'step'; rename the metric")
        self._pending.append((step, {name: _to_json(value) for name, value in values.items()}))
        self._write_pending()

    def _write_settings(self, settings: Mapping[str, float | str]) -> None:
        self._open()
        self._pending.append((max(self._start, self._last_step), {"hparams": settings}))
        self._write_pending()

    def resume(self, step: int) -> None:
        self._start = base.check_step(step)
        here = self._path.stat() if self._path.exists() else None
        if self._file is not None and not (here and os.path.samestat(here, os.fstat(self._file))):
            os.close(self._file)  # it was moved aside, and must not be truncated there
            self._file, self._last_line, self._last_step = None, b"", -1
        self._pending = [row for row in self._pending if row[0] <= self._start]
        self._truncate(self._open(), self._start)

    def flush(self) -> None:
        self._write_pending()
        super().flush()

    def close(self) -> None:
        """Flush, close the file and derive the CSV. A later write opens the file again."""
        is_used = self._file is not None or bool(self._pending)
        if self._file is not None:
            self._open()  # notices a deletion
        super().close()
        if is_used and self._csv is not None:
            write_csv(self._path, self._csv)

    def _write_pending(self) -> None:
        while self._pending:
            step, row = self._pending.pop(0)
            try:
                file = self._open()
                if step < self._last_step:
                    raise ValueError(
                        f"{self._path}: expected step {self._last_step}, the last in the file, or "
                        f"a later one, got {step}; call resume({step}) first if the run resumes "
                        "there, or write to another path"
                    )
                if row:  # only the last line ever changes, when its step gets more values
                    replaced = self._last_line if step == self._last_step else b""
                    if replaced:
                        row = {**_parse(self._path, replaced)[1], **row}
                    line = _to_line(step, row)
                    with base.explain_os_errors(self._path):
                        base.append(file, line, replaced=replaced)
                    self._last_line, self._last_step = line, step
            except OSError:
                self._pending.insert(0, (step, row))
                if self._file is not None:  # the last line may be lost, but is part of the row
                    self._truncate(self._file)
                raise

    def _open(self) -> int:
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            warnings.warn(
                f"{self._path}: it was deleted with the rows up to step {self._last_step} while it "
                "was written; later rows are in a new file",
                RuntimeWarning,
                stacklevel=4,
            )
            os.close(self._file)
            self._file, self._last_line, self._last_step = None, b"", -1
        if self._file is None:
            with base.explain_os_errors(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                _check_kind(self._path, b'{"step": ')
                if self._csv is not None:
                    _check_kind(self._csv, b"step,")
                file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                self._truncate(file)
            except ConfigError:
                os.close(file)
                raise
            self._file = file
        return self._file

    def _truncate(self, file: int, last: float = math.inf) -> None:
        """Remove an incomplete last line, and those of steps after the last to keep."""
        size, last_line, last_step = os.fstat(file).st_size, b"", -1
        for line in _lines_backwards(file):
            if (
                line.strip()
                and line.endswith(b"\n")
                and (step := _parse(self._path, line)[0]) <= last
            ):
                last_line, last_step = line, step
                break
            size -= len(line)
        with base.explain_os_errors(self._path):
            os.ftruncate(file, size)
        self._last_line, self._last_step = last_line, last_step


def read_rows(
    path: base.PathLike, until: float = math.inf
) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield steps and their numbers from a `jsonl_writer` file, if it exists, up to a step."""
    path = Path(path)
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    return
                if not line.strip():  # left by an editor
                    continue
                step, row = _parse(path, line)
                if step > until:
                    return
                yield step, {name: x for name, x in row.items() if type(x) in (int, float)}


def last_step(path: base.PathLike) -> int | None:
    """Return the last step in a `jsonl_writer` file, or None; reads only the end of the file."""
    path = Path(path)
    if not path.exists():
        return None
    with path.open("rb") as file:
        lines = (
            line
            for line in _lines_backwards(file.fileno())
            if line.endswith(b"\n") and line.strip()
        )
        return next((_parse(path, line)[0] for line in lines), None)


def last_csv_step(path: base.PathLike) -> int | None:
    """Return the last step in a `csv_writer` file, or None."""
    rows = _read_csv(Path(path)) if Path(path).exists() else ()
    return max((step for step, _ in rows), default=None)


def write_csv(jsonl_path: base.PathLike, csv_path: base.PathLike) -> None:
    """Replace a CSV file atomically by the numbers in a `jsonl_writer` file, if that exists.

    Columns are in order of first appearance, and a cell without a value is empty. Floats
    round-trip exactly; NaN and inf are `nan`, `inf` and `-inf`.
    """
    if Path(jsonl_path).exists():
        _check_kind(Path(csv_path), b"step,")
        names = list(dict.fromkeys(name for _, row in read_rows(jsonl_path) for name in row))
        # Not by `csv.writer`, which leaves a carriage return in a name unquoted.
        quoted = ('"' + n.replace('"', '""') + '"' if set(n) & set(',"\r\n') else n for n in names)
        lines = [",".join(["step", *quoted])] if names else []
        for step, row in read_rows(jsonl_path):
            if row:
                cells = (repr(row[name]) if name in row else "" for name in names)
                lines.append(",".join([str(step), *cells]))
        base.replace_file(Path(csv_path), "".join(line + "\n" for line in lines).encode())


class csv_writer(jsonl_writer):  # noqa: N801
    r"""Write the numbers of each step as a row of a CSV file, with a column for each metric.

    The CSV file is up to date after `flush` and `close`. Until `close`, rows are appended to
    `path` + `.jsonl`, as by `jsonl_writer`, so that a kill loses nothing: the next writer for the
    same path continues from there. An existing CSV file of increasing steps and numbers is
    continued; any other is refused. Texts, histograms, images and hyper-parameters are left out,
    with a warning for each kind.

    >>> import pathlib, stepfold as sf, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.csv"
    >>> writer = sf.csv_writer(path)
    >>> writer.write_scalars(10, {"train/loss": 0.5})
    >>> writer.close()
    >>> path.read_text()
    'step,train/loss\n10,0.5\n'
    """

    def __init__(self, path: base.PathLike) -> None:
        self._table, self._warned = base.check_path("csv_writer", path), set[str]()
        super().__init__(f"{self._table}.jsonl")

    def flush(self) -> None:
        super().flush()
        if self._file is not None:
            write_csv(self._path, self._table)

    def close(self) -> None:
        if self._path.exists():  # maybe from a process that was killed
            self._open()
        super().close()
        self._path.unlink(missing_ok=True)

    def _open(self) -> int:
        if self._file is None and self._table.exists() and not self._path.exists():
            base.replace_file(
                self._path, b"".join(_to_line(*row) for row in _read_csv(self._table))
            )
        return super()._open()

    def _write(self, step: int, values: Mapping[str, base.Value]) -> None:
        kinds = {str: "texts", base.Histogram: "histograms", np.ndarray: "images"}
        kind = next((kinds[type(value)] for value in values.values() if type(value) in kinds), None)
        if kind is None:
            super()._write(step, values)
        else:
            self._leave_out(kind)

    def _write_settings(self, settings: Mapping[str, float | str]) -> None:  # noqa: ARG002
        self._leave_out("hyper-parameters")

    def _leave_out(self, kind: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(
                f"csv_writer: {self._table} leaves out {kind}, since a table of numbers has no "
                "place for them; jsonl_writer has",
                stacklevel=4,
            )


def _read_csv(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the rows of a CSV file, without an incomplete last one."""
    _check_kind(path, b"step,")
    text = path.read_bytes().decode()
    rows = csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
    names, last = next(rows, ["step"])[1:], -1
    for cells in rows:
        try:
            step, named = int(cells[0]), zip(names, cells[1:], strict=True)
            row = {n: float(x) if x.strip("-0123456789") else int(x) for n, x in named if x}
            is_valid = step > last
        except (ValueError, IndexError):
            is_valid = False
        if not is_valid:
            raise ConfigError(
                f"csv_writer: expected {path} to hold rows of increasing steps and numbers, got "
                f"{','.join(cells)!r}; correct it, or give another path"
            )
        last = step
        yield step, row


def _to_json(value: base.Value) -> Any:
    if isinstance(value, base.Histogram):
        return {"counts": value.counts, "edges": value.edges, "nonfinite": value.nonfinite}
    return {"shape": list(value.shape)} if isinstance(value, np.ndarray) else value


def _to_line(step: int, row: Mapping[str, Any]) -> bytes:
    return json.dumps({"step": step, **row}).encode() + b"\n"


def _parse(path: Path, line: bytes) -> tuple[int, dict[str, Any]]:
    try:
        row = json.loads(line)
        return base.check_step(row.pop("step")), row
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f'jsonl_writer: expected {path} to hold lines like {{"step": 10, …}}, got '
            f"{line[:60]!r}; correct it, or give another path"
        ) from None


def _lines_backwards(file: int) -> Iterator[bytes]:
    end = os.fstat(file).st_size
    if end:
        with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as view:
            while end:
                start = view.rfind(b"\n", 0, end - 1) + 1
                yield view[start:end]
                end = start


def _check_kind(path: Path, start: bytes) -> None:
    """Refuse a file that another program wrote."""
    if path.exists():
        with path.open("rb") as file:
            head = file.read(len(start))
        if head != start[: len(head)]:
            raise ConfigError(
                f"{path}: expected a file that begins with {start.decode()!r}, or none, got one "
                f"that begins with {head!r}; give another path"
            )
