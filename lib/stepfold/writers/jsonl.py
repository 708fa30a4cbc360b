"""JSON lines that survive a kill at any byte, and CSV files derived from them."""

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from stepfold.core.validation import read_integer
from stepfold.errors import ConfigError, refuse, warn
from stepfold.json_files import is_count, open_regular, parse_json
from stepfold.writers import base

_START = b'{"step": '  # of each line


def jsonl(path: base.PathLike, *, csv: bool | base.PathLike | None = False) -> base.Writer:
    r"""Write JSON lines, one for each step: `{"step": 10, "train/loss": 0.5}`.

    Names keep the order of their first write. Floats round-trip exactly; NaN and inf are written
    as `NaN`, `Infinity` and `-Infinity`, which is not strict JSON, but Python and pandas read it.
    A histogram is written as its `counts` and `edges`, an image as its shape. Hyper-parameters are
    in the line of the last step before the run starts or resumes, under `hparams`.

    The first write creates the file and its folders. The file is up to date after each write, even
    if the process is killed, and durable after `flush`. Rows that a full disk refuses raise an
    error and are written before the next row. An existing file is continued; a line that a kill
    left incomplete is removed, and so are the NUL bytes that a power loss leaves, with a warning.

    With `csv`, a CSV file with a column for each metric is derived from the lines at `flush` and
    `close`. It has numbers only.

    Args:
      path: the file of the lines.
      csv: the path of the CSV file. With True, the CSV of `metrics.jsonl` is `metrics.csv`; a
        `path` that does not end in `.jsonl` is that of the CSV, and the lines are in `path` +
        ``.jsonl``.

    >>> import pathlib, stepfold as sf, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> writer = sf.writers.jsonl(path, csv=True)
    >>> writer.write_scalars(20, {"train/loss": 0.25})
    >>> writer.write_scalars(20, {"eval/loss": 0.5})
    >>> writer.close()
    >>> path.read_text()
    '{"step": 20, "train/loss": 0.25, "eval/loss": 0.5}\n'
    >>> path.with_suffix(".csv").read_text()
    'step,train/loss,eval/loss\n20,0.25,0.5\n'
    """
    if csv is not True:
        return JsonlWriter(path, None if csv is False else csv)
    path = base.check_path("jsonl", path)
    if path.suffix == ".jsonl":
        return JsonlWriter(path, path.with_suffix(".csv"))
    return JsonlWriter(f"{path}.jsonl", path)


class JsonlWriter(base.FileWriter):
    """The writer of `jsonl`."""

    def __init__(self, path: base.PathLike, table: base.PathLike | None = None) -> None:
        super().__init__(base.check_path("jsonl", path))
        self._table = None if table is None else base.check_path("jsonl: csv", table)
        self._last_line, self._last_step, self._start = b"", -1, 0
        self._pending: list[tuple[int, dict[str, Any]]] = []  # rows that could not be written

    @property
    def _files(self) -> Sequence[Path]:
        return [self._path, *([] if self._table is None else [self._table])]

    def _write(self, step: int, values: Mapping[str, base.Value]) -> None:
        if "step" in values:
            expected, advice = "names other than 'step'", "rename the metric"
            refuse(self._path, expected, "'step'", advice, kind=ValueError)
        self._write_row(step, {name: _to_json(value) for name, value in values.items()})

    def _write_settings(self, settings: Mapping[str, float | str]) -> None:
        self._write_row(None, {"hparams": settings})

    def _write_row(self, step: int | None, row: dict[str, Any]) -> None:
        self._open()
        last = self._pending[-1][0] if self._pending else self._last_step
        step = max(self._start, last) if step is None else step
        if step < last:
            self._write_earlier(step, row, last)
        elif row:
            self._pending.append((step, row))
        self._write_pending()

    def _write_earlier(self, step: int, row: dict[str, Any], last: int) -> None:  # noqa: ARG002
        expected = f"step {last}, the last in the file, or a later one"
        advice = f"call resume({step}) first if the run resumes there, or write to another path"
        refuse(self._path, expected, f"{step}", advice, kind=ValueError)

    def resume(self, step: int) -> None:
        last = read_integer("step", step, -1)  # -1 if the row of step 0 is to be written again
        self._start = max(0, last)
        self._pending = [row for row in self._pending if row[0] <= last]
        self._close_file()  # it may have been moved aside
        self._truncate(self._open(), last)

    def flush(self) -> None:
        self._write_pending()
        super().flush()
        if self._file is not None:
            self._derive_table()

    def _derive_table(self) -> None:
        if self._table is not None:
            write_csv(self._path, self._table)

    def _write_pending(self) -> None:
        while self._pending:
            file = self._open()
            step, row = self._pending[0]
            replaced = b""
            if step == self._last_step:  # only the last line ever changes
                replaced = self._last_line
                row = {**_parse(self._path, replaced)[1], **row}
                self._pending[0] = step, row  # since a full disk may lose the line
            line = json.dumps({"step": step, **row}).encode() + b"\n"
            try:
                with base.explain_os_errors(self._path):
                    base.append(file, line, replaced=replaced)
            except OSError:
                self._truncate(file)
                raise
            del self._pending[0]
            self._last_line, self._last_step = line, step

    def _open(self) -> int:
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            warn(
                f"{self._path}: the file was deleted during the run, with the rows up to step "
                f"{self._last_step}; later rows are in a new file",
                RuntimeWarning,
            )
            self._close_file()
        elif self._file is None and self._table is not None:
            self._check_table(self._table)
        if self._file is None:
            with base.explain_os_errors(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                _check_kind(self._path, _START)
                file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                self._truncate(file)
            except ConfigError:
                os.close(file)
                raise
            self._file = file
        return self._file

    def _check_table(self, table: Path) -> None:
        _check_kind(table, b"step,")
        if table.exists() and not self._path.exists():
            raise ConfigError(
                f"jsonl: {table} is there without {self._path}, from which it is derived; move the "
                "table away, or give another path"
            )

    def _truncate(self, file: int, last: float = math.inf) -> None:
        """Remove an incomplete last line, and those of steps after the last to keep."""
        lines = (line for line in _lines_backwards(self._path, file) if line[2] <= last)
        end, self._last_line, self._last_step = next(lines, (0, b"", -1))
        with base.explain_os_errors(self._path):
            removed = os.pread(file, os.fstat(file).st_size - end, end)
            os.ftruncate(file, end)
        if _is_lost(removed):
            left = f"the last row is of step {self._last_step}" if end else "no row is left"
            warn(
                f"{self._path}: the file ended in NUL bytes, as after a power loss; they are "
                f"removed, and {left}",
                RuntimeWarning,
            )


class RunWriter(JsonlWriter):
    """Write the `metrics.jsonl` of a run, in which a row of an earlier step may come later."""

    takes_earlier_steps = True

    def flush(self) -> None:
        """Flush the lines alone; the table is derived when the run ends."""
        self._write_pending()
        base.FileWriter.flush(self)

    def close(self) -> None:
        is_used = self._file is not None or bool(self._pending)
        super().close()
        if is_used:
            self._derive_table()

    def _check_table(self, table: Path) -> None:
        _check_kind(table, b"step,")

    def _write_earlier(self, step: int, row: dict[str, Any], last: int) -> None:  # noqa: ARG002
        """Replace the file by one that has the row in its place."""
        self._write_pending()
        before, after = [], [{"step": step, **row}]
        with _open_regular(self._path) as file:
            for line in file:
                if not line.strip() or _is_lost(line):
                    continue
                number, known = _parse(self._path, line)
                if number == step:
                    after[0] = {"step": step, **known, **row}
                elif number < step:
                    before.append(line)
                else:
                    after.append({"step": number, **known})
        lines = [*before, *(json.dumps(each).encode() + b"\n" for each in after)]
        base.replace_file(self._path, b"".join(lines))
        self._close_file()  # that of the former file
        self._open()


def read_rows(
    path: base.PathLike, until: float = math.inf
) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield steps and their numbers from a file of `jsonl`, if it exists, up to a step."""
    path = Path(path)
    if path.exists():
        with _open_regular(path) as file:
            # A kill may leave the last line incomplete, and an editor blank lines.
            for line in file:
                if line.endswith(b"\n") and line.strip() and not _is_lost(line):
                    step, row = _parse(path, line)
                    if step > until:
                        return
                    yield step, {name: x for name, x in row.items() if type(x) in (int, float)}


def has_rows(path: Path) -> bool:
    """Whether a file is one of `jsonl`, by its first bytes or its name."""
    if path.suffix == ".jsonl" or not path.is_file():
        return path.suffix == ".jsonl"
    with _open_regular(path) as file:
        return file.read(len(_START)) == _START


def last_step(path: base.PathLike) -> int | None:
    """Return the last step in a file of `jsonl`, or None; reads only the end of the file."""
    path = Path(path)
    if not path.exists():
        return None
    with _open_regular(path) as file:
        return next((step for *_, step in _lines_backwards(path, file.fileno())), None)


def write_csv(jsonl_path: base.PathLike, csv_path: base.PathLike) -> None:
    """Replace a CSV file atomically by the numbers in a file of `jsonl`, if that exists.

    Columns are in order of first appearance, and a cell without a value is empty. Floats
    round-trip exactly; NaN and inf are `nan`, `inf` and `-inf`.
    """
    if Path(jsonl_path).exists():
        _check_kind(Path(csv_path), b"step,")
        names, pieces = dict[str, None](), list[tuple[int, bytearray]]()  # by number of names
        for step, row in read_rows(jsonl_path):
            names.update(dict.fromkeys(row))
            if row and (not pieces or pieces[-1][0] < len(names)):
                pieces.append((len(names), bytearray()))
            if row:
                cells = [str(step), *(repr(row[name]) if name in row else "" for name in names)]
                pieces[-1][1].extend((",".join(cells) + "\n").encode())
        # Not by `csv.writer`, which leaves a carriage return in a name unquoted.
        quoted = ('"' + n.replace('"', '""') + '"' if set(n) & set(',"\r\n') else n for n in names)
        head = ",".join(["step", *quoted]) + "\n" if names else ""
        # A column that comes later is empty in the lines before.
        lines = [
            piece.replace(b"\n", b"," * (len(names) - count) + b"\n") for count, piece in pieces
        ]
        base.replace_file(Path(csv_path), b"".join([head.encode(), *lines]))


def _to_json(value: base.Value) -> Any:
    if isinstance(value, base.Histogram):
        return {"counts": value.counts, "edges": value.edges, "nonfinite": value.nonfinite}
    return {"shape": list(value.shape)} if isinstance(value, np.ndarray) else value


def _parse(path: Path, line: bytes) -> tuple[int, dict[str, Any]]:
    row: Any = None
    with suppress(ValueError):
        row = parse_json(line)
    step = row.pop("step", None) if isinstance(row, dict) else None
    if not is_count(step):
        expected, got = f'{path} to hold lines like {{"step": 10, …}}', repr(line[:60])
        refuse("jsonl", expected, got, "correct it, or give another path")
    return step, dict(row)


def _is_lost(content: bytes) -> bool:
    """Whether there are NUL bytes, which a power loss leaves in place of data; JSON has none."""
    return b"\0" in content


def _lines_backwards(path: Path, file: int) -> Iterator[tuple[int, bytes, int]]:
    """Yield the end, the bytes and the step of each complete line, from the last one on."""
    end = os.fstat(file).st_size
    if end:
        with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as view:
            while end:
                start = view.rfind(b"\n", 0, end - 1) + 1
                line = view[start:end]
                if line.endswith(b"\n") and line.strip() and not _is_lost(line):
                    yield end, line, _parse(path, line)[0]
                end = start


def _open_regular(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except ValueError as error:
        refuse(path, "a file", f"{error}", "move it away, or give another path")


def _check_kind(path: Path, start: bytes) -> None:
    """Refuse a file that another program wrote."""
    if path.exists():
        with _open_regular(path) as file:
            head = file.read(len(start))
            is_lost = _is_lost(head) and not any(line.strip(b"\0\n") for line in [head, *file])
        if head != start[: len(head)] and not is_lost:
            expected = f"a file that begins with {start.decode()!r}, or none"
            refuse(path, expected, f"one that begins with {head!r}", "give another path")
