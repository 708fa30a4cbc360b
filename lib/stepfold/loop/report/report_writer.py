"""Keep `run.json` and `report.html` up to date during a run, without slowing it down."""

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Self

import jax

from stepfold.errors import StepfoldError
from stepfold.loop.hooks.base import BaseHook, Event, Stop
from stepfold.loop.report.read import Tail, read_run
from stepfold.loop.report.render import render
from stepfold.loop.run_info import NAME, read_run_info, replace_file, write_run_info

_SHARE = 0.01  # the largest share of the time to spend on pages
_MIN_PAUSE, _MAX_PAUSE = 2.0, 30.0  # seconds between pages, early and late in a run
_CLOCK_ROWS = 400  # samples of the clock; beyond that every second one is dropped


class ReportWriter(BaseHook):
    """Write `run.json` and `report.html` of a run from a thread, on process 0 only.

    `fit` enters it first, so that the last page shows how everything ended. A file that cannot be
    written causes one warning, and the run continues.
    """

    provides = ()

    def __init__(self, run_dir: Path, metadata: Mapping[str, Any]) -> None:
        self._run_dir, self._metadata = run_dir, metadata
        self._tail = Tail(run_dir / "metrics.jsonl")
        self._attempts: list[dict[str, Any]] = []
        self._attempt: dict[str, Any] = {}  # the last of them, once it is open
        self._opened_at = time.perf_counter()
        self._clock: list[tuple[int, float, float]] = []  # step, seconds, seconds of waiting
        self._last_row, self._row_count, self._stride = (0, 0.0, 0.0), 0, 1
        self._pause = _MIN_PAUSE
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="stepfold-report", daemon=True)
        self._failure: Exception | None = None
        self._has_warned = False

    def __enter__(self) -> Self:
        return self

    def open(self, step: int, total: int | None) -> None:
        if jax.process_index() != 0:
            return
        try:
            self._attempts = list(read_run_info(self._run_dir).get("attempts", []))
        except (StepfoldError, OSError) as error:
            path = self._run_dir / NAME
            names = (path.with_name(f"{NAME}.aside{number or ''}") for number in count())
            aside = next(name for name in names if not name.exists())
            warnings.warn(f"{error}; it is now {aside}", stacklevel=2)
            self._try(lambda: os.replace(path, aside))
        self._opened_at = time.perf_counter()
        self._sample(step, 0.0)
        self._attempt = {"began": _utc_now(), "from": step, "to": step, "total": total}
        self._attempt |= {"updated": self._attempt["began"], "ended": None, "stop": None}
        self._attempts.append(self._attempt)
        self._try(self._write_info)
        self._warn()
        self._thread.start()

    def __call__(self, event: Event) -> None:
        if self._attempt:
            self._attempt["to"] = event.step
            self._sample(event.step, event.data_wait_seconds)
            self._warn()

    def finish(self, step: int, stop: Stop | None) -> None:
        """Record the last step, and why the run stopped; None if an exception ended it."""
        if self._attempt:
            self._attempt |= {"to": step, "stop": None if stop is None else stop._asdict()}

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._attempt:
            return
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._attempt["ended"] = _utc_now()
        if error is not None:
            message = f"{type(error).__name__}: {error}".removesuffix(": ")
            self._attempt["stop"] = Stop("error", message)._asdict()
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

    def _work(self) -> None:
        pause = 0.0  # the first page is written at once
        while not self._closing.wait(pause):
            start = time.thread_time()  # CPU time, which the loop loses; waiting costs it nothing
            self._try(self._write_page)
            cost, age = time.thread_time() - start, time.perf_counter() - self._opened_at
            pause = self._pause = max(cost / _SHARE, min(_MAX_PAUSE, max(_MIN_PAUSE, age)))

    def _write_page(self) -> None:
        self._write_info()
        page = render([read_run(self._run_dir, self._tail)], refresh_seconds=round(self._pause))
        replace_file(self._run_dir / "report.html", page)

    def _write_info(self) -> None:
        clock = [*self._clock]
        clock += [self._last_row] * (clock[-1] != self._last_row)
        updated = self._attempt["ended"] or _utc_now()
        self._attempt |= {"updated": updated, "pause": round(self._pause, 1), "clock": clock}
        write_run_info(self._run_dir, {**self._metadata, "attempts": self._attempts})

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # noqa: BLE001  a page must not end a run; see _warn
            self._failure = error

    def _warn(self) -> None:
        if self._failure is not None and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._run_dir}: run.json and report.html are not up to date: "
                f"{type(self._failure).__name__}: {self._failure}; the run continues; write the "
                "page later with python -m stepfold.loop report",
                stacklevel=2,
            )


def _utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
