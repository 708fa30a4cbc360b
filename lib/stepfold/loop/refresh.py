"""Keep `run.json` and `report.html` up to date while a run goes on, never in the loop's way."""

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from stepfold.errors import StepfoldError
from stepfold.loop.event import Event
from stepfold.loop.record import NAME, read_record, replace, write_record
from stepfold.loop.report.curves import Tail
from stepfold.loop.report.page import render
from stepfold.loop.report.reading import read_run

_SOON, _PAUSE = 2.0, 30.0  # seconds from one page to the next, of a new run and of an old one
_SHARE = 100  # and at least as many times as long as the last one took
_SAMPLES = 400  # of where the clock stood; beyond that every second one is dropped


class Refresh:
    """Tell how a run goes, from the first step to how it stopped; a hook of the first process.

    It is entered before anything else and left after it, so that the last page has all. Whatever
    cannot be written is warned of once, and the run goes on: metrics and checkpoints have ways of
    their own to say so.
    """

    def __init__(self, run_dir: Path, facts: Mapping[str, Any], *, goes_on: bool) -> None:
        """Say where, and what the run is begun with.

        Args:
          run_dir: where the files go.
          facts: what `facts_of` gives.
          goes_on: whether earlier attempts in the directory belong to this run: with checkpoints
            they do, and without any it begins anew.
        """
        self._place, self._facts, self._goes_on = run_dir, dict(facts), goes_on
        self._tail = Tail(run_dir / "metrics.jsonl")
        self._attempts: list[dict[str, Any]] = []
        self._now: dict[str, Any] | None = None  # the attempt under way
        self._samples = Samples()
        self._end, self._thread = (
            threading.Event(),
            threading.Thread(target=self._work, name="stepfold-report", daemon=True),
        )
        self._began, self._pause = time.perf_counter(), _SOON  # until the next page, in seconds
        self._failure: BaseException | None = None
        self._warned = False

    def __enter__(self) -> Self:
        return self

    def open(self, step: int, total: int | None) -> None:
        """Begin an attempt at a step."""
        if jax.process_index() != 0:
            return
        self._attempts = self._earlier() if self._goes_on else []
        self._samples.add(step, 0.0)
        self._now = {
            "began": _time(),
            "from": step,
            "to": step,
            "total": total,
            "updated": _time(),
            "ended": None,
            "stopped": None,
            "error": None,
        }
        self._attempts.append(self._now)
        self._try(self._record)
        self._say()
        self._thread.start()

    def _earlier(self) -> list[dict[str, Any]]:
        """Give the attempts before; what cannot be read is put beside, and not overwritten."""
        path = self._place / NAME
        try:
            return list(read_record(self._place).get("attempts", []))
        except (StepfoldError, OSError) as error:
            warnings.warn(f"{error}; it is now {path}.aside", stacklevel=2)
            self._try(lambda: os.replace(path, f"{path}.aside"))
            return []

    def __call__(self, event: Event) -> None:
        """Note where the clock stands; what failed in the background is warned of here."""
        if self._now is not None:
            self._now["to"] = event.step
            self._samples.add(event.step, event.waited)
            self._say()

    def tell(self, step: int, stopped: str | None) -> None:
        """Hear where the run stopped, and why."""
        if self._now is not None:
            self._now["to"], self._now["stopped"] = step, stopped

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._now is None:
            return
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._now["ended"] = _time()
        if error is not None:
            self._now["error"] = {"type": type(error).__name__, "message": str(error)}
        self._try(self._refresh)
        self._say()

    def _work(self) -> None:
        pause = 0.0  # the first page comes at once
        while not self._end.wait(pause):
            start = time.thread_time()  # what it takes from the loop; waiting takes nothing
            self._try(self._refresh)
            cost, age = time.thread_time() - start, time.perf_counter() - self._began
            pause = self._pause = pause_after(cost, age)

    def _refresh(self) -> None:
        self._record()
        run = read_run(self._place, self._tail)
        replace(self._place / "report.html", render([run], every=max(1, round(self._pause))))

    def _record(self) -> None:
        if self._now is not None:
            self._now["updated"], self._now["pause"] = _time(), round(self._pause, 1)
            self._now["clock"] = self._samples.rows()
        write_record(self._place, {**self._facts, "attempts": self._attempts})

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # noqa: BLE001  no page is worth a run; it is warned of
            self._failure = error

    def _say(self) -> None:
        if self._failure is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._place}: run.json and report.html are not up to date: "
                f"{type(self._failure).__name__}: {self._failure}; the run goes on, and "
                "python -m stepfold.loop report makes the page anew",
                stacklevel=2,
            )


def pause_after(cost: float, age: float) -> float:
    """Give the seconds from a page that took some to the next one, by the age of the run too.

    >>> pause_after(0.01, 0.5), pause_after(0.01, 8.0), pause_after(0.01, 3600.0)
    (2.0, 8.0, 30.0)
    >>> pause_after(3.0, 3600.0)
    300.0
    """
    return max(_SHARE * cost, min(_PAUSE, max(_SOON, age)))


class Samples:
    """Know where the clock stood at some of the steps, and how long batches were waited for.

    >>> samples = Samples(limit=4)
    >>> for step in range(10):
    ...     samples.add(step, 0.0)
    >>> [step for step, _, _ in samples.rows()]
    [0, 4, 8, 9]
    """

    def __init__(self, limit: int = _SAMPLES) -> None:
        self._limit, self._stride, self._seen = limit, 1, 0
        self._began: float | None = None
        self._rows: list[tuple[int, float, float]] = []
        self._last: tuple[int, float, float] | None = None

    def add(self, step: int, waited: float) -> None:
        """Note a step that is done, and the seconds that were waited for batches so far."""
        now = time.perf_counter()
        self._began = now if self._began is None else self._began
        self._last = (step, round(now - self._began, 4), round(waited, 4))
        if self._seen % self._stride == 0:
            if len(self._rows) == self._limit:
                self._rows = self._rows[::2]
                self._stride *= 2
            if self._seen % self._stride == 0:
                self._rows.append(self._last)
        self._seen += 1

    def rows(self) -> list[tuple[int, float, float]]:
        """Give the step, the seconds since the first, and those waited; the last one too."""
        rows, last = list(self._rows), self._last
        return rows if last is None or (rows and rows[-1] == last) else [*rows, last]


def _time() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
