"""Copy the files of a run from its local directory to object storage."""

import warnings
from pathlib import Path
from typing import Any

import jax

from stepfold import tree
from stepfold.checkpoint.series import Series
from stepfold.checkpoint.steps import is_url
from stepfold.core.processes import agreement
from stepfold.errors import CheckpointError, ConfigError
from stepfold.loop.hooks.base import BaseHook, Event

_FILES = ("run.json", "metrics.jsonl", "metrics.csv", "report.html")


class Upload(BaseHook):
    """Copy the files before each checkpoint commits, and when the run ends; on process 0 only.

    The first copy, before step 1, raises if the URL is not writable. Later, a copy that fails
    causes a warning, and the run continues.
    """

    provides = ()

    def __init__(self, run_dir: Path | None, url: Any, series: Series | None = None) -> None:
        if not is_url(url):
            raise ConfigError(
                f"upload: expected a URL such as 's3://bucket/run', got {tree.spell(url)}; give "
                "run_dir=… alone to keep the files of a run on a file system"
            )
        if run_dir is None:
            raise ConfigError(
                "upload: expected run_dir=… to go with it, got none; give a directory"
            )
        from stepfold.checkpoint.bucket import Bucket  # lazy: imports tensorstore

        # If the server fails, the series and this do not wait for it one after the other.
        self._run_dir, self._bucket = run_dir, Bucket(url, series and series.store)
        self._problem: CheckpointError | OSError | None = None  # of a copy in a thread
        self._is_open = False

    def __call__(self, event: Event) -> None:  # noqa: ARG002
        self._warn()

    def open(self, step: int, total: int | None) -> None:  # noqa: ARG002
        with agreement("upload: not started"):
            self._copy()
        self._is_open = True

    def fetch(self) -> None:
        """Copy the metrics back if they are not here, as after a restart on another host."""
        path = self._run_dir / "metrics.jsonl"
        if jax.process_index() == 0 and not path.exists():
            content = self._bucket.read(path.name)
            if content is not None:
                path.write_bytes(content)

    def flush(self) -> None:
        try:
            self._copy()
        except (CheckpointError, OSError) as error:
            self._problem = error

    def finish(self) -> None:
        """Copy a last time, after all else is written."""
        if self._is_open:
            self.flush()
            self._warn()

    def _copy(self) -> None:
        if jax.process_index() == 0:
            for path in map(self._run_dir.joinpath, _FILES):
                if path.exists():
                    self._bucket.write(path.name, path.read_bytes())

    def _warn(self) -> None:
        problem, self._problem = self._problem, None
        if problem is not None:
            warnings.warn(
                f"upload: the files of the run are not up to date: {problem}; they are copied "
                f"again at the next checkpoint and at the end, from {self._run_dir}",
                RuntimeWarning,
                stacklevel=2,
            )
