"""CSV: a row for every step, and a column for every metric."""

import csv
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stepfold.errors import ConfigError
from stepfold.loop.writers import values
from stepfold.loop.writers.lines import Lines, read_path
from stepfold.loop.writers.owed import Owed

_BEGINS = b"step,"


def csv_writer(path: str | os.PathLike[str]) -> "CsvWriter":
    """Write to a CSV file, with a row for every step and a column for every metric.

    Columns are in the order in which names come, and a cell without a value is empty. When a new
    name comes, the file is replaced at once by one that has its column, so that whoever reads it
    finds as many cells in every row as in the first. Floats are read back to the last bit, and what
    is not finite is written as `nan`, `inf` and `-inf`.

    Only numbers have a place in such a table: texts, histograms, images and hyper-parameters are
    left out, with one warning for each kind. `jsonl_writer` keeps them.

    Nothing is touched before the first write, and every write is with the system when the call
    returns. What a full disk refuses is raised, and goes before the next write. A file that is
    there is gone on with, and what a kill left half written is cut off.

    Args:
      path: the file; folders that it needs are made.

    Raises:
      ConfigError: if there can be no such file; with the first write, if there is another kind of
        file.

    >>> import pathlib, stepfold as sf, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.csv"
    >>> writer = sf.csv_writer(path)
    >>> writer.write_scalars(10, {"train/loss": 0.5})
    >>> writer.write_scalars(20, {"train/loss": 0.25})
    >>> writer.write_scalars(20, {"eval/loss": 0.375})
    >>> print(path.read_text(), end="")
    step,train/loss,eval/loss
    10,0.5,
    20,0.25,0.375
    >>> writer.resume(10)
    >>> print(path.read_text(), end="")
    step,train/loss
    10,0.5
    """
    return CsvWriter(read_path("csv_writer", path))


class CsvWriter:
    """Write to a CSV file; `csv_writer` makes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: Lines | None = None
        self._owed = Owed(self._put)
        self._columns: list[str] = []
        self._left_out: set[str] = set()

    def _lines(self) -> Lines:
        if self._opened is None:
            self._opened = Lines(self._path, _BEGINS, self._step_of)
            self._columns = _cells(next(iter(self._opened), b"step\n"))
        return self._opened

    def _step_of(self, line: bytes) -> int:
        if line.startswith(_BEGINS):
            return -1
        try:
            return int(line.partition(b",")[0])
        except ValueError:
            raise ConfigError(
                f"csv_writer: expected {self._path} to hold rows that begin with a step, got "
                f"{line[:60]!r}; mend it, or give another path"
            ) from None

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Write numbers."""
        self._owed.put(values.number_of_step(step), values.numbers(scalars))

    def _put(self, step: int, numbers: Mapping[str, Any]) -> None:
        lines = self._lines()
        lines.see_order(step)
        self._see_names(numbers)
        if not numbers:
            return
        there = _cells(lines.last) if step == lines.step else [str(step)]
        row = dict(zip(self._columns, there, strict=False))
        row.update({name: repr(number) for name, number in numbers.items()})
        new = [name for name in numbers if name not in self._columns]
        if new:
            lines.rewrite(self._widened(lines, step, new, row))
            self._columns += new
        else:
            lines.put(step, _line([row.get(name, "") for name in self._columns]))

    def _see_names(self, numbers: Mapping[str, int | float]) -> None:
        for name in numbers:
            if name == "step" or "\n" in name or "\r" in name:
                raise ValueError(
                    f"{self._path}: expected names other than 'step' and on one line, got "
                    f"{name!r}; give it another"
                )

    def _widened(
        self, lines: Lines, step: int, new: list[str], row: Mapping[str, str]
    ) -> Iterator[bytes]:
        """Give the lines with more columns, and with the row of a step at the end."""
        columns = self._columns + new
        yield _line(columns)
        for line in lines:
            if self._step_of(line) not in (-1, step):
                yield line[:-1] + b"," * len(new) + b"\n"
        yield _line([row.get(name, "") for name in columns])

    def resume(self, step: int) -> None:
        """Go on from a step: drop what is there of later ones, and the columns that only they had.

        Args:
          step: the last that is kept.
        """
        self._owed.drop_after(step)
        step, lines = values.number_of_step(step), self._lines()
        if lines.step <= step:
            return
        rows = [_cells(line) for line in lines if 0 <= self._step_of(line) <= step]
        used = [at for at in range(len(self._columns)) if any(row[at] for row in rows)]
        self._columns = [self._columns[at] for at in used]
        kept = [self._columns, *([row[at] for at in used] for row in rows)] if rows else []
        lines.rewrite(map(_line, kept))
        self._columns = self._columns or ["step"]

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:  # noqa: ARG002
        """Leave texts out, with a warning."""
        self._leave_out("texts")

    def write_histograms(
        self,
        step: int,  # noqa: ARG002
        arrays: Mapping[str, Any],  # noqa: ARG002
        num_buckets: Mapping[str, int] | None = None,  # noqa: ARG002
    ) -> None:
        """Leave histograms out, with a warning."""
        self._leave_out("histograms")

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Leave images out, with a warning."""
        self._leave_out("images")

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Leave hyper-parameters out, with a warning."""
        self._leave_out("hyper-parameters")

    def _leave_out(self, kind: str) -> None:
        if kind not in self._left_out:
            self._left_out.add(kind)
            warnings.warn(
                f"csv_writer: {self._path} leaves out {kind}, since a table of numbers has no "
                "place for them; jsonl_writer has",
                stacklevel=3,
            )

    def flush(self) -> None:
        """Return when all is on the disk, and would outlive a power cut."""
        self._owed.settle()
        if self._opened is not None:
            self._opened.sync()

    def close(self) -> None:
        """Flush, and close the file; to write again opens it again."""
        try:
            self._owed.settle()
        finally:
            if self._opened is not None:
                opened, self._opened = self._opened, None
                opened.close()


def _cells(line: bytes) -> list[str]:
    return next(csv.reader([line.decode()]))


def _line(cells: list[str]) -> bytes:
    return (",".join(map(_quoted, cells)) + "\n").encode()


def _quoted(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"' if '"' in cell or "," in cell else cell
