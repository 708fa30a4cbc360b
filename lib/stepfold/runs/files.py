"""The files of a run: its lock, metrics, `run.json`, report, and their upload."""

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax

from stepfold.checkpoint.claims import Claim, ClaimedError
from stepfold.checkpoint.series import Series
from stepfold.checkpoint.steps import check_shared, read_directory
from stepfold.core.processes import agreement
from stepfold.errors import StepfoldError, refuse, warn
from stepfold.hooks.objects import ObjectEffects
from stepfold.json_files import open_regular
from stepfold.loop.events import Stop
from stepfold.loop.hook import Hook, Sink, Stopwatch, sink_name
from stepfold.loop.run import Run
from stepfold.runs.directory import RunDirectory
from stepfold.runs.info import (
    changes_of,
    config_changes,
    flatten_config,
    flatten_settings,
    move_previous_run,
    read_config,
    read_key,
    read_run_info,
    run_metadata,
)
from stepfold.runs.programs import Programs
from stepfold.runs.report.read import CurveArrays, read_curves
from stepfold.runs.report.report_writer import ReportWriter
from stepfold.runs.rollback import Rollback
from stepfold.runs.upload import Upload
from stepfold.writers.combinators import async_writer, log_to
from stepfold.writers.jsonl import RunWriter, jsonl


class RunFiles:
    """What a run writes besides checkpoints, in a `RunDirectory` with a path.

    With `has_writer`, a sink of the user writes the metrics, so there is no metrics file here.

    Attributes:
      programs: those that the run compiles, and jax's compilation cache.
    """

    def __init__(self, directory: RunDirectory, *, has_writer: bool = False) -> None:
        path: Any = directory.path
        with agreement("fit: not started"):
            self.path = read_directory(path, make=True, name="run_dir")
        check_shared(self.path)
        self.programs = Programs(self.path, has_cache=directory.compilation_cache)
        self._url, self._config = directory.upload, read_config(directory.config)
        self._upload: Upload | None = None
        self.metrics_path = None if has_writer else self.path / "metrics.jsonl"
        self._metadata: dict[str, Any] = {}  # of run.json
        self._report: ReportWriter | None = None
        self.stopwatch = Stopwatch()  # of the loop, for the report

    def make_sinks(
        self,
        hooks: Sequence[Hook],
        sinks: Sequence[Sink],
        series: Series | None,
        described: Mapping[str, Any],
    ) -> list[Sink]:
        """Make the sinks that write the files.

        `hooks` and `sinks` are the others of the run, and `described` arguments of
        `run_metadata` for `run.json`.
        """
        if self._url is not None:
            self._upload = Upload(self.path, self._url, series)
        own: list[Sink] = []
        if self.metrics_path is not None:
            _check_files(sinks, [self.metrics_path, self.path / "metrics.csv"])
            writer = RunWriter(self.metrics_path, self.path / "metrics.csv")
            # Named, so that its state is not confused with that of a user's writer.
            own.append(log_to(async_writer(writer), name="metrics.jsonl"))
        written = [sink_name(sink) for sink in sinks if not isinstance(sink, ObjectEffects)]
        names = [*(hook.label for hook in hooks), *written]
        self._metadata = run_metadata(
            **described, config=self._config, hooks=names, upload=self._url
        )
        self._report = ReportWriter(self.path, self._metadata, self.stopwatch, self.programs)
        # They are flushed in this order.
        return [*own, self._report, *([] if self._upload is None else [self._upload])]

    @contextmanager
    def lock(
        self, on_loss: Callable[[Stop], None], ended: Callable[[], tuple[Run, Stop | None]]
    ) -> Iterator[None]:
        """Hold the lock of a run; at the end, write and upload the last page.

        `on_loss` is called, in a thread, if another run may use the directory. `ended` returns the
        run, and why it stopped.
        """
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
        self.note(run)
        if self._report is not None:
            self._report.finish(run.step, stop, error)

    def note(self, run: Run) -> None:
        """Copy the notes on replaced states to `run.json`."""
        if run.notes:
            self._metadata["replacements"] = [*run.notes]

    def start(self, run: Run) -> None:
        """Note how a run that does not resume starts."""
        self.note(run)
        self._note_key(run)

    def continue_from(self, run: Run, rollbacks: Sequence[Rollback]) -> None:
        """Continue from a run that was restored from a checkpoint.

        The history has the rows up to there. Later ones are dropped, since they will be logged
        again.
        """
        self.note(run)
        self._note_key(run)
        self._compare_config()
        if rollbacks:
            self._metadata["rollbacks"] = [each._asdict() for each in rollbacks]
        with agreement(f"run_dir: {self.path}: not opened"):
            self._continue_metrics(run)

    def _note_key(self, run: Run) -> None:
        """Note the key of the state, which is not known before if that was given as a function."""
        if (seeds := self._metadata.get("seed")) and seeds["key"] is None:
            self._metadata["seed"] = {**seeds, "key": read_key(run.state)}

    def _compare_config(self) -> None:
        """Warn of changes of the config since the previous attempt."""
        if self._report is None or jax.process_index() != 0:
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

    def fetch(self, step: int) -> None:
        """Fetch what another host has uploaded, before a run resumes."""
        if self._upload is not None:
            with agreement(f"run_dir: {self.path}: not resumed"):
                self._upload.fetch(step)

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
            writer = jsonl(path)
            writer.resume(last_row)
            writer.write_scalars(step, metrics)
            writer.close()
        if path.exists():
            run.history.read_later(_EarlierRows(path, last_row))
        run.history.add(step, metrics)


def move_earlier_files(files: RunFiles | None, sinks: Sequence[Sink], step: int) -> None:
    """Move the files of an earlier run aside: those in the directory, and those of writers."""
    here = [sink for sink in sinks if getattr(sink, "writes_here", False)]
    written = [file for sink in here for file in getattr(sink, "written_files", ())]
    own = None if files is None else files.path
    with agreement(f"run_dir: {own}: not opened"):
        move_previous_run(own if jax.process_index() == 0 else None, step, written)


class _EarlierRows:
    """The curves of `metrics.jsonl` up to a step, read when they are needed.

    The file is open until then, since a later run may move it aside.
    """

    def __init__(self, path: Path, until: int) -> None:
        self._path, self._until = path, until
        with open_regular(path) as file:
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def __call__(self, name: str | None) -> Mapping[str, CurveArrays]:
        with open(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            curves, damaged_lines = read_curves(file, self._until, name)
        if damaged_lines:
            warn(
                f"{self._path}: damaged lines are left out of the history: {damaged_lines}",
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


def _check_files(sinks: Sequence[Sink], own: Sequence[Path]) -> None:
    """Refuse sinks that write the files of the run too."""
    real = {os.path.realpath(file) for file in own}
    for file in (file for sink in sinks for file in getattr(sink, "written_files", ())):
        if os.path.realpath(file) in real:
            expected = "writers to other files than those that fit writes in run_dir"
            refuse("hooks", expected, f"{file}", "drop it, or give another path")
