"""Keep `run.json` and `report.html` up to date during a run, without slowing it down."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import jax

from stepfold.core.validation import is_url
from stepfold.errors import StepfoldError, warn
from stepfold.loop.events import Event, Stop
from stepfold.loop.hook import Sink, Stopwatch
from stepfold.runs.info import NAME, read_run_info, write_run_info
from stepfold.runs.programs import Programs
from stepfold.runs.report.read import read_run_data
from stepfold.runs.report.render import render
from stepfold.writers.base import replace_file

_SHARE = 0.01  # the largest share of the time to spend on pages
_MIN_PAUSE, _MAX_PAUSE = 2.0, 30.0  # seconds between pages, early and late in a run
_CLOCK_ROWS = 400  # samples of the clock; beyond that every second one is dropped


class ReportWriter(Sink):
    """Write `run.json` and `report.html` of a run from a thread, on process 0 only.

    A file that cannot be written causes one warning, and the run continues.
    """

    name = "report.html"

    def __init__(
        self,
        run_dir: Path,
        metadata: Mapping[str, Any],
        stopwatch: Stopwatch | None = None,
        programs: Programs | None = None,
    ) -> None:
        self._run_dir, self._metadata = run_dir, metadata
        self._stopwatch = stopwatch or Stopwatch()
        self._programs = programs
        settings = (metadata.get("arguments") or {}).get("checkpoints") or {}
        directory = settings.get("directory")
        if directory is not None and not is_url(directory):
            real, root = os.path.realpath(directory), os.path.realpath(run_dir)
            if Path(real).is_relative_to(root):  # the run can be moved
                settings["directory"] = os.path.relpath(real, root)
        # Between the last attempt and the next one: of the config, and of other settings.
        self.config_changes: Mapping[str, Any] = {}
        self.changes: Mapping[str, Any] = {}
        self._attempts: list[dict[str, Any]] = []
        self._attempt: dict[str, Any] = {}  # the last of them, once it is open
        self._opened_at = time.perf_counter()
        self._clock: list[tuple[int, float, float]] = []  # step, seconds, seconds of waiting
        self._last_row, self._row_count, self._stride = (0, 0.0, 0.0), 0, 1
        # The seconds of parts when the attempt began, and those until its first metrics.
        self._parts_before: dict[str, float] = {}
        self._saves_before = 0
        self._start: float | None = None
        self._pause = _MIN_PAUSE
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="stepfold-report", daemon=True)
        self._lock = threading.RLock()  # of the attempts and the files: the thread writes both
        self._failure: Exception | None = None
        self._has_warned = False

    def open(self, step: int, total: int | None, seen: int) -> None:  # noqa: ARG002
        if jax.process_index() != 0:
            return
        with self._lock:
            self._open_attempt(step, total)
        self._warn()
        if self._thread.ident is None:
            self._thread.start()

    def _open_attempt(self, step: int, total: int | None) -> None:
        if self._attempt:  # the run went back
            self._try(self._write_info)
        try:
            self._attempts = self._attempts or [*read_run_info(self._run_dir).get("attempts", [])]
        except (StepfoldError, OSError) as error:
            path = self._run_dir / NAME
            names = (path.with_name(f"{NAME}.aside{number or ''}") for number in count())
            aside = next(name for name in names if not name.exists())
            warn(f"{error}; it is now {aside}")
            self._try(lambda: os.replace(path, aside))
        if self._programs is not None and not self._attempt:
            compiled = [attempt.get("compiled") or {} for attempt in self._attempts]
            self._programs.before = [step for each in compiled for step in each.get("steps", ())]
        self._opened_at, self._clock, self._row_count, self._stride = time.perf_counter(), [], 0, 1
        self._parts_before = {**self._stopwatch.seconds, "batches": self._last_row[2]}
        self._saves_before = self._stopwatch.counts.get("saving", 0)
        self._start = None
        self._sample(step, 0.0)
        self._attempt = {"began": _utc_now(), "from": step, "to": step, "total": total}
        self._attempt |= {"updated": self._attempt["began"], "ended": None, "stop": None}
        if self.config_changes:
            self._attempt["config_changes"] = self.config_changes
        if self.changes:
            self._attempt["changes"] = self.changes
        self._attempts.append(self._attempt)
        self._try(self._write_info)

    def write(self, state: Any, event: Event) -> Any:
        if self._attempt and not event.is_late:
            self._attempt["to"] = event.step
            self._sample(event.step, event.data_wait_seconds)
            if self._start is None and event.is_train and event.step > self._attempt["from"]:
                self._start = self._last_row[1] - sum(self._spent().values())
            self._warn()
        return state

    def end_attempt(self, step: int, stop: Stop | None) -> None:
        """Describe how the attempt ended; another one follows if the run goes back."""
        if self._attempt:
            self._attempt |= {"to": step, "stop": stop and stop._asdict(), "ended": _utc_now()}
            self._attempt |= {"parts": self._parts(), "saves": self._saves()}

    def finish(self, step: int, stop: Stop | None, error: BaseException | None = None) -> None:
        """Write the last page, with the last step and the reason why the run ended."""
        if not self._attempt:
            return
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        if error is not None:
            stop = Stop("error", f"{type(error).__name__}: {error}".removesuffix(": "))
        self.end_attempt(step, stop)
        self._try(self._write_page)
        self._warn()

    def _sample(self, step: int, waited: float) -> None:
        """Record the time of a step, for at most `_CLOCK_ROWS` steps, evenly over the run."""
        seconds = time.perf_counter() - self._opened_at
        self._last_row = (step, round(seconds, 4), round(waited, 4))
        if self._row_count % self._stride == 0:
            self._clock.append(self._last_row)
            if len(self._clock) > _CLOCK_ROWS:
                self._clock = self._clock[::2]
                self._stride *= 2
        self._row_count += 1

    def _spent(self) -> dict[str, float]:
        """Return the seconds of the attempt that did not go into steps, by part."""
        spent = {**self._stopwatch.seconds, "batches": self._last_row[2]}
        if (ended_at := self._stopwatch.ended_at) is not None:
            spent["end"] = time.perf_counter() - ended_at
        before = self._parts_before
        return {part: max(0.0, all_ - before.get(part, 0.0)) for part, all_ in spent.items()}

    def _parts(self) -> list[tuple[str, float]]:
        """Return how the seconds of the attempt so far divide into parts."""
        spent, total = self._spent(), time.perf_counter() - self._opened_at
        rest = max(0.0, total - sum(spent.values()))
        start = rest if self._start is None else max(0.0, min(self._start, rest))
        parts = {"start": start, "steps": rest - start, **spent}
        return [(part, round(seconds, 4)) for part, seconds in parts.items()]

    def _saves(self) -> int:
        return self._stopwatch.counts.get("saving", 0) - self._saves_before

    def _work(self) -> None:
        pause = 0.0  # the first page is written at once
        while not self._closing.wait(pause):
            start = time.thread_time()  # CPU time, which the loop loses; waiting costs it nothing
            self._try(self._write_page)
            cost, age = time.thread_time() - start, time.perf_counter() - self._opened_at
            pause = self._pause = max(cost / _SHARE, min(_MAX_PAUSE, max(_MIN_PAUSE, age)))

    def _write_page(self) -> None:
        self._write_info()
        # Checkpoints in object storage are left out, since each request could delay the page.
        run, path = read_run_data(self._run_dir, remote=False), self._run_dir / "report.html"
        page = render([run], refresh_seconds=round(self._pause), path=path)
        replace_file(path, page.encode(errors="replace"))

    def _write_info(self) -> None:
        clock = [*self._clock]
        clock += [self._last_row] * (clock[-1] != self._last_row)
        updated = self._attempt["ended"] or _utc_now()
        self._attempt |= {"updated": updated, "pause": round(self._pause, 1), "clock": clock}
        if self._programs is not None:
            self._attempt["compiled"] = self._programs.summary()
        if self._attempt["ended"] is None:
            self._attempt |= {"parts": self._parts(), "saves": self._saves()}
        write_run_info(self._run_dir, {**self._metadata, "attempts": self._attempts})

    def _try(self, write: Callable[[], None]) -> None:
        with self._lock:
            try:
                write()
            except Exception as error:  # noqa: BLE001  a page must not end a run; see _warn
                self._failure = error

    def _warn(self) -> None:
        if self._failure is not None and not self._has_warned:
            self._has_warned = True
            warn(
                f"{self._run_dir}: run.json and report.html are not up to date: "
                f"{type(self._failure).__name__}: {self._failure}; the run continues; write the "
                "page later with python -m stepfold report",
            )


def _utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
