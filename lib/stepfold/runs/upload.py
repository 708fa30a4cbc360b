"""Copy the files of a run from its local directory to object storage."""

import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

from stepfold.checkpoint.series import Series
from stepfold.checkpoint.steps import sync
from stepfold.errors import CheckpointError, StepfoldError, warn
from stepfold.loop.events import Event
from stepfold.loop.hook import Sink
from stepfold.runs.info import NAME, read_run_info
from stepfold.writers.jsonl import read_rows

_FILES = ("run.json", "metrics.jsonl", "metrics.csv", "report.html")


class Upload(Sink):
    """Copy the files before each checkpoint commits, and when the run ends; on process 0 only.

    The first copy, before step 1, raises if the URL is not writable. Later, a copy that fails
    causes a warning, and the run continues.
    """

    name = "upload"

    def __init__(self, run_dir: Path, url: str, series: Series | None = None) -> None:
        from stepfold.object_storage import Bucket  # lazy: imports tensorstore

        # If the server fails, the series and this do not wait for it one after the other.
        self._run_dir, self._bucket = run_dir, Bucket(url, series and series.store)
        self._problem: CheckpointError | OSError | None = None  # of a copy in a thread
        self._is_open = False

    def write(self, state: Any, event: Event) -> Any:  # noqa: ARG002
        self._warn()
        return state

    def open(self, step: int, total: int | None, seen: int) -> None:  # noqa: ARG002
        self._copy()  # an error here is one of all processes, which open their sinks together
        self._is_open = True

    def fetch(self, step: float = math.inf) -> None:
        """Copy back files that another host has continued; call it before a run resumes at `step`.

        The metrics are replaced if the copy reaches a later step, up to that step, or has more
        rows; `run.json` is replaced if the copy has more attempts.
        """
        if jax.process_index() == 0:
            self._fetch("metrics.jsonl", lambda path: _extent(path, step))
            self._fetch(NAME, lambda path: len(read_run_info(path.parent).get("attempts", ())))

    def _fetch(self, name: str, extent: Callable[[Path], Any]) -> None:
        """Replace a local file by its copy in the bucket if that extends further."""
        path, content = self._run_dir / name, self._bucket.read(name)
        if content is None:
            return
        # On the same file system, so that it is complete under its name, or missing.
        with TemporaryDirectory(dir=self._run_dir, prefix=f".{name}-") as folder:
            copy = Path(folder, name)
            copy.write_bytes(content)
            try:
                fetched = extent(copy)
            except StepfoldError as error:
                reason = str(error).replace(str(copy), f"{self._bucket.location}: {name}")
                warn(
                    f"upload: {reason}; the run continues with the local file, and replaces it",
                    RuntimeWarning,
                )
                return
            with suppress(StepfoldError):  # a damaged local file raises where it is used
                if path.exists() and extent(path) >= fetched:
                    return
                sync(copy)
                os.replace(copy, path)
                sync(self._run_dir)

    def flush(self) -> None:
        try:
            self._copy()
        except (CheckpointError, OSError) as error:
            self._problem = error

    def finish(self) -> None:
        """Copy a last time, after everything else is written."""
        if self._is_open:
            self.flush()
            self._warn()

    def _copy(self) -> None:
        if jax.process_index() == 0:
            for path in map(self._run_dir.joinpath, _FILES):
                if path.is_file():
                    self._bucket.write(path.name, path.read_bytes())

    def _warn(self) -> None:
        problem, self._problem = self._problem, None
        if problem is not None:
            warn(
                f"upload: the files of the run are not up to date: {problem}; they are copied "
                f"again at the next checkpoint and at the end, from {self._run_dir}",
                RuntimeWarning,
            )


def _extent(path: Path, until: float) -> tuple[int, int]:
    """Return the last step of a file of metrics up to a step, and the number of rows."""
    last, count = -1, 0
    for step, _ in read_rows(path, until):
        last, count = step, count + 1
    return last, count
