"""JSON lines: an object for every step."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepfold.errors import ConfigError
from stepfold.loop.writers import values
from stepfold.loop.writers.lines import Lines, read_path
from stepfold.loop.writers.owed import Owed

_STEP, _SETTINGS = "step", "hparams"
_BEGINS = b'{"step": '


def jsonl_writer(path: str | os.PathLike[str]) -> "JsonlWriter":
    """Write to a file of JSON lines, one for every step: `{"step": 10, "train/loss": 0.5}`.

    Names are in the order in which they come, and floats are read back to the last bit. What is
    not finite is written as `NaN`, `Infinity` and `-Infinity`, which JSON has not, and Python's
    `json`, pandas and most others read. Texts are kept as they are, arrays as the `counts` and
    `edges` of a histogram, images by their shape alone. What the run was begun with is under
    `hparams`, in the line of the step at which it begins or goes on.

    Nothing is touched before the first write, and every write is with the system when the call
    returns. What a full disk refuses is raised, and goes before the next write. A file that is
    there is gone on with, and what a kill left half written is cut off.

    Args:
      path: the file; folders that it needs are made.

    Raises:
      ConfigError: if there can be no such file; with the first write, if there is another kind of
        file.

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
    return JsonlWriter(read_path("jsonl_writer", path))


class JsonlWriter:
    """Write to a file of JSON lines; `jsonl_writer` makes it."""

    def __init__(self, path: Path) -> None:
        self._path, self._begin = path, 0
        self._opened: Lines | None = None
        self._owed = Owed(self._put)

    def _lines(self) -> Lines:
        if self._opened is None:
            self._opened = Lines(self._path, _BEGINS, self._step_of)
        return self._opened

    def _step_of(self, line: bytes) -> int:
        try:
            return values.number_of_step(json.loads(line)[_STEP])
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f'jsonl_writer: expected {self._path} to hold lines as {{"step": 10, …}}, got '
                f"{line[:60]!r}; mend it, or give another path"
            ) from None

    def _write(self, step: int, kept: Mapping[str, Any]) -> None:
        self._owed.put(values.number_of_step(step), kept)

    def _put(self, step: int, kept: Mapping[str, Any]) -> None:
        lines = self._lines()
        if not kept:
            return
        if _STEP in kept:
            raise ValueError(
                f"{self._path}: expected names other than 'step', which each line has; give it "
                "another"
            )
        row = json.loads(lines.last) if step == lines.step else {_STEP: step}
        lines.put(step, json.dumps({**row, **kept}).encode() + b"\n")

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Write numbers."""
        self._write(step, values.numbers(scalars))

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Write texts."""
        self._write(step, values.texts(texts))

    def write_histograms(
        self,
        step: int,
        arrays: Mapping[str, Any],
        num_buckets: Mapping[str, int] | None = None,
    ) -> None:
        """Write the counts and edges of histograms, and how many elements are not finite."""
        found = values.histograms(arrays, num_buckets)
        self._write(
            step,
            {
                name: {"counts": one.counts, "edges": one.edges, "nonfinite": one.nonfinite}
                for name, one in found.items()
            },
        )

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        """Write that there were images, and their shapes [N, H, W, C]."""
        found = values.pixels(images)
        self._write(step, {name: {"shape": list(one.shape)} for name, one in found.items()})

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Write what the run was begun with."""
        kept = values.settings(hparams)
        self._write(max(self._begin, self._lines().step), {_SETTINGS: kept})

    def resume(self, step: int) -> None:
        """Go on from a step: drop what is there of later ones.

        Args:
          step: the last that is kept.
        """
        self._begin = values.number_of_step(step)
        self._owed.drop_after(step)
        self._lines().drop_after(self._begin)

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
