"""JSON lines that survive a kill at any byte, and CSV files derived from them."""

import csv
import io
import json
import mmap
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from stepfold.errors import ConfigError
from stepfold.loop.writers.base import (
    ConvertingWriter,
    Histogram,
    PathLike,
    Value,
    append,
    check_path,
    check_step,
    explain_os_errors,
)


def jsonl_writer(path: PathLike, *, csv: PathLike | None = None) -> "JsonlWriter":
    """Write JSON lines, one for each step: `{"step": 10, "train/loss": 0.5}`.

    Names keep the order of their first write. Floats round-trip exactly; NaN and inf are written
    as `NaN`, `Infinity` and `-Infinity`, which is not strict JSON, but Python and pandas read it.
    A histogram is written as its `counts` and `edges`, an image as its shape. Hyper-parameters are
    in the line of the step at which the run starts or resumes, under `hparams`.

    The first write creates the file. It is up to date after each write, even if the process is
    killed, and durable after `flush`. Rows that a full disk refuses raise an error and are written
    before the next row. An existing file is continued; a line that a kill left incomplete is
    removed.

    Args:
      path: the file. Missing folders are created.
      csv: a CSV file to derive from the lines when the writer is closed.

    Raises:
      ConfigError: if a path cannot be written to; at the first write, if a file is of another kind.

    >>> import numpy as np, pathlib, stepfold as sf, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> writer = sf.jsonl_writer(path)
    >>> writer.write_scalars(10, {"train/loss": 0.5})
    >>> writer.write_scalars(20, {"train/loss": 0.25})
    >>> writer.write_scalars(20, {"eval/loss": np.float32(0.5)})
    >>> print(path.read_text(), end="")
    {"step": 10, "train/loss": 0.5}
    {"step": 20, "train/loss": 0.25, "eval/loss": 0.5}
    >>> writer.resume(10)
    >>> print(path.read_text(), end="")
    {"step": 10, "train/loss": 0.5}
    """
    csv_path = None if csv is None else check_path("jsonl_writer: csv", csv)
    return JsonlWriter(check_path("jsonl_writer", path), csv_path)


class JsonlWriter(ConvertingWriter):
    """Write JSON lines; made by `jsonl_writer`.

    Only the last line ever changes: it is replaced when its step gets more values.
    """

    def __init__(self, path: Path, csv: Path | None = None) -> None:
        self._path, self._csv = path, csv
        self._file: int | None = None
        self._last_line, self._last_step, self._start = b"", -1, 0
        self._pending: list[tuple[int, dict[str, Any]]] = []  # rows that could not be written

    def _write(self, step: int, values: Mapping[str, Value]) -> None:
        if "step" in values:
            raise ValueError(f"{self._path}: expected names other than 'step'; rename the metric")
        self._add_row(step, {name: _to_json(value) for name, value in values.items()})

    def _write_settings(self, settings: Mapping[str, float | str]) -> None:
        self._open()
        self._add_row(max(self._start, self._last_step), {"hparams": settings})

    def resume(self, step: int) -> None:
        self._start = check_step(step)
        self._pending = [row for row in self._pending if row[0] <= self._start]
        self._truncate(self._open(), lambda line: _parse(self._path, line)[0] <= self._start)

    def flush(self) -> None:
        self._write_pending()
        if self._file is not None:
            with explain_os_errors(self._path):
                os.fsync(self._file)

    def close(self) -> None:
        """Flush, close the file and derive the CSV. A later write opens the file again."""
        try:
            self.flush()
        finally:
            file, self._file = self._file, None
            if file is not None:
                os.close(file)
        if file is not None and self._csv is not None:
            write_csv(self._path, self._csv)

    def _add_row(self, step: int, row: dict[str, Any]) -> None:
        self._pending.append((step, row))
        self._write_pending()

    def _write_pending(self) -> None:
        while self._pending:
            step, row = self._pending.pop(0)
            previous = b""
            try:
                file = self._open()
                if step < self._last_step:
                    raise ValueError(
                        f"{self._path}: expected step {self._last_step}, the last in the file, or "
                        f"a later one, got {step}; call resume({step}) first if the run resumes "
                        "there, or write to another path"
                    )
                if not row:
                    continue
                with explain_os_errors(self._path):
                    if step == self._last_step:
                        row = {**_parse(self._path, self._last_line)[1], **row}
                        os.ftruncate(file, os.fstat(file).st_size - len(self._last_line))
                        previous = self._last_line
                    line = _to_line(step, row)
                    append(file, line)
            except OSError:
                self._pending.insert(0, (step, row))
                if previous:
                    with suppress(OSError):  # it is part of the pending row, too
                        append(file, previous)
                    self._truncate(file, _is_complete)
                raise
            self._last_line, self._last_step = line, step

    def _open(self) -> int:
        if self._file is None:
            with explain_os_errors(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                _check_kind(self._path, b'{"step": ')
                if self._csv is not None:
                    _check_kind(self._csv, b"step,")
                file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                self._truncate(file, _is_complete)
            except ConfigError:
                os.close(file)
                raise
            self._file = file
        return self._file

    def _truncate(self, file: int, is_kept: Callable[[bytes], bool]) -> None:
        """Remove lines from the end, up to one that is kept."""
        size, last_line, last_step = os.fstat(file).st_size, b"", -1
        for line in _lines_backwards(file):
            if is_kept(line):
                last_line, last_step = line, _parse(self._path, line)[0]
                break
            size -= len(line)
        with explain_os_errors(self._path):
            os.ftruncate(file, size)
        self._last_line, self._last_step = last_line, last_step


def read_rows(path: PathLike, until: int | None = None) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the step and the numbers of each row of a `jsonl_writer` file, if the file exists.

    Args:
      path: the file. An incomplete last line is ignored.
      until: the last step to read, or None for all.

    Raises:
      ConfigError: if another line cannot be read.
    """
    path = Path(path)
    if path.exists():
        with path.open("rb") as file:
            for line in filter(_is_complete, file):
                step, row = _parse(path, line)
                if until is not None and step > until:
                    return
                yield step, {name: x for name, x in row.items() if type(x) in (int, float)}


def last_step(path: PathLike) -> int | None:
    """Return the last step in a `jsonl_writer` file, or None; reads only the end of the file."""
    path = Path(path)
    if path.exists():
        with path.open("rb") as file:
            for line in filter(_is_complete, _lines_backwards(file.fileno())):
                return _parse(path, line)[0]
    return None


def write_csv(jsonl_path: PathLike, csv_path: PathLike) -> None:
    """Replace a CSV file atomically by the numbers in a `jsonl_writer` file, if that exists.

    Columns are in order of first appearance, and a cell without a value is empty. Floats
    round-trip exactly; NaN and inf are `nan`, `inf` and `-inf`.

    Raises:
      ConfigError: if the CSV file exists and does not begin with `step,`.
    """

    def lines() -> Iterator[bytes]:
        names = list(dict.fromkeys(name for _, row in read_rows(jsonl_path) for name in row))
        if names:
            yield _to_csv_line(["step", *names])
        for step, row in read_rows(jsonl_path):
            if row:
                cells = (repr(row[name]) if name in row else "" for name in names)
                yield _to_csv_line([str(step), *cells])

    if Path(jsonl_path).exists():
        _check_kind(Path(csv_path), b"step,")
        _replace(Path(csv_path), lines())


def csv_writer(path: PathLike) -> "CsvWriter":
    """Write the numbers of each step as a row of a CSV file, with a column for each metric.

    The CSV file is up to date after `flush` and `close`. Until `close`, rows are appended to
    `path` + `.jsonl`, as by `jsonl_writer`, so that a kill loses nothing: the next writer for the
    same path continues from there. An existing CSV file of steps and numbers is continued.

    Texts, histograms, images and hyper-parameters are left out, with a warning for each kind.

    Args:
      path: the file. Missing folders are created.

    Raises:
      ConfigError: if the path cannot be written to; at the first write, if the file exists and
        does not hold rows of increasing steps and numbers.

    >>> import pathlib, stepfold as sf, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.csv"
    >>> writer = sf.csv_writer(path)
    >>> writer.write_scalars(10, {"train/loss": 0.5})
    >>> writer.write_scalars(20, {"train/loss": 0.25, "eval/loss": 0.375})
    >>> writer.close()
    >>> print(path.read_text(), end="")
    step,train/loss,eval/loss
    10,0.5,
    20,0.25,0.375
    """
    return CsvWriter(check_path("csv_writer", path))


class CsvWriter(JsonlWriter):
    """Write JSON lines, derive a CSV file from them, and remove them; made by `csv_writer`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.with_name(path.name + ".jsonl"))
        self._table, self._warned = path, set[str]()

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
            _replace(self._path, (_to_line(*row) for row in _read_csv(self._table)))
        return super()._open()

    def _write(self, step: int, values: Mapping[str, Value]) -> None:
        kinds = {str: "texts", Histogram: "histograms", np.ndarray: "images"}
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
            step, *numbers = [float(x) if x.strip("-0123456789") else int(x or 0) for x in cells]
            is_valid = len(numbers) == len(names) and check_step(step) > last
        except ValueError:
            is_valid = False
        if not is_valid:
            raise ConfigError(
                f"csv_writer: expected {path} to hold rows of increasing steps and numbers, got "
                f"{','.join(cells)!r}; correct it, or give another path"
            )
        last = int(step)
        yield last, {n: x for n, x, c in zip(names, numbers, cells[1:], strict=True) if c}


def _to_json(value: Value) -> Any:
    if isinstance(value, Histogram):
        return {"counts": value.counts, "edges": value.edges, "nonfinite": value.nonfinite}
    return {"shape": list(value.shape)} if isinstance(value, np.ndarray) else value


def _to_line(step: int, row: Mapping[str, Any]) -> bytes:
    return json.dumps({"step": step, **row}).encode() + b"\n"


def _to_csv_line(cells: list[str]) -> bytes:
    special = set(',"\r\n')
    quoted = ['"' + c.replace('"', '""') + '"' if special & set(c) else c for c in cells]
    return (",".join(quoted) + "\n").encode()


def _parse(path: Path, line: bytes) -> tuple[int, dict[str, Any]]:
    try:
        row = json.loads(line)
        return check_step(row.pop("step")), row
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f'jsonl_writer: expected {path} to hold lines like {{"step": 10, …}}, got '
            f"{line[:60]!r}; correct it, or give another path"
        ) from None


def _is_complete(line: bytes) -> bool:
    return line.endswith(b"\n")


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


def _replace(path: Path, lines: Iterable[bytes]) -> None:
    """Replace a file atomically."""
    path = path.resolve()
    new = path.with_name(path.name + ".new")
    with explain_os_errors(path):
        try:
            with new.open("wb", buffering=0) as file:
                for line in lines:
                    append(file.fileno(), line)
                os.fsync(file.fileno())
            if path.exists():
                shutil.copymode(path, new)
            os.replace(new, path)
        except (OSError, ConfigError):
            new.unlink(missing_ok=True)
            raise
