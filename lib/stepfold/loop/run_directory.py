"""The directory of a run: its lock, metric files, `run.json`, report, and their upload."""

import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, TypedDict

import jax

from stepfold.checkpoint.claims import Claim, ClaimedError
from stepfold.checkpoint.series import Series
from stepfold.checkpoint.steps import check_shared, read_directory
from stepfold.core.processes import agreement
from stepfold.core.validation import absolute_path, check_flags, is_url, read_positive
from stepfold.errors import StepfoldError, refuse, warn
from stepfold.loop.hooks.base import Hook, Stop, Stopwatch
from stepfold.loop.json_files import open_regular
from stepfold.loop.programs import Programs
from stepfold.loop.report.read import Curve, read_curves
from stepfold.loop.report.report_writer import ReportWriter
from stepfold.loop.run import Run
from stepfold.loop.run_info import (
    changes_of,
    config_changes,
    flatten_config,
    flatten_settings,
    move_previous_run,
    read_config,
    read_key,
    read_run_info,
)
from stepfold.loop.session import Session
from stepfold.loop.upload import Upload
from stepfold.loop.writers.combinators import async_writer, log_to
from stepfold.loop.writers.jsonl import RunWriter, jsonl_writer
from stepfold.tree import describe_value


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run, and what `fit` writes there: `fit(run_dir=RunDirectory(…))`.

    It gets `metrics.jsonl` and `metrics.csv`, `run.json` (arguments, versions, how the run ended),
    `report.html`, checkpoints unless they have a directory, and the capsule of a step that went
    wrong. A resumed run appends. Files of an earlier run that is not resumed are moved to
    `previous-1` and so on, with a warning. One run at a time may use it.

    Attributes:
      path: the directory. None writes no files, for a `config` that only writers get.
      upload: a URL in object storage, such as `s3://bucket/run`, to which metrics, `run.json` and
        the report are copied at each checkpoint and at the end. A run that resumes on another host
        gets them from there.
      config: the hyper-parameters of the run, a mapping or a dataclass, possibly nested, of values
        that JSON can hold. They are written to `run.json`, shown and compared in the report, and
        passed to the writers of `log_to`, such as W&B. A resume warns of changes.
      compilation_cache: whether jax's compilation cache is kept in `compiled` in the directory
        during the run, at most 1 GiB, so that a restart loads its programs. A cache that the user
        configured, by `jax_compilation_cache_dir`, is used in its place. Off for virtual devices.
        Whoever may write there can run code.

    Raises:
      ConfigError: if an argument is not as described.

    >>> import stepfold as sf
    >>> sf.RunDirectory("runs/a", config={"rate": 0.1}).config["rate"]
    0.1
    """

    path: str | os.PathLike[str] | None = None
    _: KW_ONLY
    upload: str | None = None
    config: Any = None
    compilation_cache: bool = True

    def __post_init__(self) -> None:
        if self.path is not None:
            absolute_path("path", self.path)
        if self.upload is not None:
            if not is_url(self.upload):
                advice = "give the path alone to keep the files of a run on a file system"
                got = describe_value(self.upload)
                refuse("upload", "a URL such as 's3://bucket/run'", got, advice)
            if self.path is None:
                advice = "write sf.RunDirectory('runs/a', upload=…)"
                refuse("upload", "the path of a directory to copy", "none", advice)
        read_config(self.config)
        check_flags(compilation_cache=self.compilation_cache)


class Moved(TypedDict, total=False):
    """Arguments of `fit` in version 0.2, which are arguments of others now."""

    upload: str | None
    config: Any
    compilation_cache: bool
    patience: float | None


def read_run_directory(run_dir: Any, moved: Moved) -> RunDirectory:
    """Return the directory of a run, of a path or of arguments of version 0.2; warn of these."""
    if unknown := [name for name in moved if name not in Moved.__annotations__]:
        raise TypeError(f"fit() got an unexpected keyword argument {unknown[0]!r}")
    if run_dir is not None and not isinstance(run_dir, RunDirectory):
        absolute_path("run_dir", run_dir)
    if "patience" in moved:
        if moved["patience"] is not None:
            read_positive("patience", moved["patience"], unit="seconds")
        got = "got an argument of fit; write sf.start_distributed(patience=…)"
        warn(f"patience: expected an argument of start_distributed, {got}", DeprecationWarning)
    options: dict[str, Any] = {**moved}
    options.pop("patience", None)
    if isinstance(run_dir, RunDirectory):
        if options:
            names = ", ".join(options)
            advice = "give them to RunDirectory"
            refuse(names, "arguments of RunDirectory", "arguments of fit beside one", advice)
        return run_dir
    directory = RunDirectory(run_dir, **options)
    if options:
        path = [] if run_dir is None else [repr(os.fspath(run_dir))]
        new = ", ".join([*path, *(f"{name}=…" for name in options)])
        got = f"got arguments of fit; write run_dir=sf.RunDirectory({new})"
        names = ", ".join(options)
        warn(f"{names}: expected arguments of RunDirectory, {got}", DeprecationWarning)
    return directory


class RunFiles:
    """What a run writes besides checkpoints; in a `RunDirectory` without a path nothing.

    `programs` are those that it compiles, and jax's compilation cache.

    With `has_writer`, a hook of the user writes the metrics, so there is no metrics file here. It
    is a part of the run, so that `run.json` has the notes on replaced states.
    """

    name = "the files of the run"

    def __init__(self, directory: RunDirectory, *, has_writer: bool = False) -> None:
        self.path = None
        with agreement("fit: not started"):
            if directory.path is not None:
                self.path = read_directory(directory.path, make=True, name="run_dir")
        if self.path is not None:
            check_shared(self.path)
        self.programs = Programs(self.path, has_cache=directory.compilation_cache)
        self._url = directory.upload
        self._upload: Upload | None = None
        writes = self.path is not None and not has_writer
        self.metrics_path = self.path / "metrics.jsonl" if self.path and writes else None
        self._metadata: dict[str, Any] = {}  # of run.json
        self._report: ReportWriter | None = None
        self.stopwatch = Stopwatch()  # of the loop, for the report

    def make_hooks(
        self,
        others: Sequence[Hook],
        describe: Callable[[Sequence[Hook]], Mapping[str, Any]],
        series: Series | None,
    ) -> list[Hook]:
        """Make the hooks that write the files; `describe` returns the metadata for `run.json`."""
        if self.path is None:
            return []
        if self._url is not None:
            self._upload = Upload(self.path, self._url, series)
        hooks: list[Hook] = []
        if self.metrics_path is not None:
            _check_files(others, [self.metrics_path, self.path / "metrics.csv"])
            writer = RunWriter(self.metrics_path, csv=self.path / "metrics.csv")
            # Named, so that its state is not confused with that of a user's writer.
            hooks.append(log_to(async_writer(writer), name="metrics.jsonl"))
        self._metadata = {**describe([*others, *hooks])}
        self._report = ReportWriter(self.path, self._metadata, self.stopwatch, self.programs)
        # They are flushed in this order.
        return [*hooks, self._report, *([] if self._upload is None else [self._upload])]

    @contextmanager
    def lock(
        self, on_loss: Callable[[Stop], None], ended: Callable[[], tuple[Run, Stop | None]]
    ) -> Iterator[None]:
        """Hold the lock of a run; at the end, write and upload the last page.

        `on_loss` is called, in a thread, if another run may use the directory. `ended` returns the
        run, and why it stopped.
        """
        if self.path is None:
            yield
            return
        with ExitStack() as stack:
            lock = RunLock(self.path, on_loss)
            stack.callback(lock.release)
            with agreement(f"run_dir: {self.path}: not opened"):
                if jax.process_index() == 0:
                    lock.acquire()
                    self.programs.clean()
            if self._upload is not None:
                stack.callback(self._upload.finish)
            if self._report is not None:
                stack.push(lambda _, error, __: self._finish(*ended(), error))
            stack.enter_context(self.programs.use())
            yield

    def _finish(self, run: Run, stop: Stop | None, error: BaseException | None) -> None:
        self(run)
        if self._report is not None:
            self._report.finish(run.step, stop, error)

    def next(self, run: Run) -> float:  # noqa: ARG002
        return math.inf

    def is_due(self, run: Run) -> bool:
        return len(run.notes) > 0

    def __call__(self, run: Run) -> Run:
        """Note why the state was replaced, for `run.json`."""
        self._metadata["replacements"] = [*run.notes]
        return run

    def start(self, session: Session) -> None:
        """Start a run that does not resume; move the files of an earlier run aside."""
        self(session.run)
        self._note_key(session.run)
        hooks = [hook for hook in session.hooks.hooks if getattr(hook, "writes_here", False)]
        files = [file for hook in hooks for file in getattr(hook, "written_files", ())]
        path = self.path if jax.process_index() == 0 else None
        with agreement(f"run_dir: {self.path}: not opened"):
            move_previous_run(path, session.run.step, files)

    def continue_from(self, session: Session) -> None:
        """Continue from the run of a session, which was restored from a checkpoint.

        The history has the rows up to there. Later ones are dropped, since they will be logged
        again.
        """
        self(session.run)
        self._note_key(session.run)
        self._compare_config()
        if session.rollbacks is not None and session.rollbacks.done:
            self._metadata["rollbacks"] = [each._asdict() for each in session.rollbacks.done]
        with agreement(f"run_dir: {self.path}: not opened"):
            self._continue_metrics(session.run)

    def _note_key(self, run: Run) -> None:
        """Note the key of the state, which is not known before if that was given as a function."""
        if (seeds := self._metadata.get("seed")) and seeds["key"] is None:
            self._metadata["seed"] = {**seeds, "key": read_key(run.state)}

    def _compare_config(self) -> None:
        """Warn of changes of the config since the previous attempt."""
        if self.path is None or self._report is None or jax.process_index() != 0:
            return
        try:
            info = read_run_info(self.path)
        except (StepfoldError, OSError):
            return  # the report warns of it
        before, after = info.get("config"), self._metadata["config"]
        changes = config_changes(before, after)
        self._report.config_changes = changes
        settings = flatten_settings(info), flatten_settings(self._metadata)
        self._report.changes = changes_of(*settings) if info else {}
        if changes and before is not None:
            old, new = flatten_config(before), flatten_config(after)
            text = ", ".join(_describe_change(name, old, new) for name in changes)
            if after is None:
                text = f"expected that of the checkpoint, got none; give it again: {text}"
            else:
                text = f"changed since the checkpoint: {text}"
            warn(f"config: {text}")

    def fetch(self, session: Session) -> None:
        """Fetch what another host has uploaded, before a run resumes."""
        if self._upload is not None:
            with agreement(f"run_dir: {self.path}: not resumed"):
                self._upload.fetch(session.run.step)

    def end_attempt(self, step: int, stop: Stop) -> None:
        """Note where the run goes back, and why."""
        if self._report is not None:
            self._report.end_attempt(step, stop)

    def _continue_metrics(self, run: Run) -> None:
        path = self.metrics_path
        if path is None:
            return
        # The checkpoint has the last row; later events may have changed it in the file.
        step, metrics = run.logged_step, run.logged_metrics
        last_row = step - 1 if metrics else step
        if path.exists() and jax.process_index() == 0:
            writer = jsonl_writer(path)
            writer.resume(last_row)
            writer.write_scalars(step, metrics)
            writer.close()
        if path.exists():
            run.history.read_later(_EarlierRows(path, last_row))
        run.history.add(step, metrics)


class _EarlierRows:
    """The curves of `metrics.jsonl` up to a step, read when they are asked for.

    The file is open until then, since a later run may move it aside.
    """

    def __init__(self, path: Path, until: int) -> None:
        self._path, self._until = path, until
        with open_regular(path) as file:
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def __call__(self, name: str | None) -> Mapping[str, Curve]:
        with open(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            curves, damaged_lines = read_curves(file, self._until, name)
        if damaged_lines:
            warn(
                f"{self._path}: expected lines of metrics, got {damaged_lines} that are damaged; "
                "they are left out of the history",
                RuntimeWarning,
            )
        return curves


class RunLock(Claim):
    """A claim on a directory; see `Claim`.

    `stop` is called, in a thread, if the file of the lock was deleted.
    """

    def __init__(self, directory: Path, stop: Callable[[Stop], None]) -> None:
        self._stop = stop
        super().__init__(directory, ".lock", self._stop_run)

    def acquire(self) -> None:
        """Acquire the lock, or raise ConfigError with the process that holds it."""
        try:
            super().acquire()
        except OSError as error:
            got = f"{self._directory}: {error.strerror}"
            advice = "make room, change the permission, or give another"
            refuse("run_dir", "a directory to write in", got, advice, cause=error)
        except ClaimedError as error:
            got = f"{self._directory}, in use by {error}"
            advice = "wait until it ends, stop it, or give another directory"
            refuse("run_dir", "a directory that no other run uses", got, advice)

    def _stop_run(self) -> None:
        text = f"another run may use {self._directory}: {self.path.name} was deleted"
        self._stop(Stop("error", text))


def _describe_change(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if name not in new:
        return f"{name}, which was {old[name]}, is left out"
    return f"{name} from {old[name]} to {new[name]}" if name in old else f"{name} is new"


def _check_files(hooks: Sequence[Hook], own: Sequence[Path]) -> None:
    """Refuse hooks that write the files of the run too."""
    real = {os.path.realpath(file) for file in own}
    for file in (file for hook in hooks for file in getattr(hook, "written_files", ())):
        if os.path.realpath(file) in real:
            expected = "writers to other files than those that fit writes in run_dir"
            refuse("hooks", expected, f"{file}", "drop it, or give another path")
