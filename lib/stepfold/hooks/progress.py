"""Progress of a run: a bar of tqdm or rich, or lines of text or JSON."""

import json
import math
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TextIO

import jax

from stepfold.core.validation import read_choice, read_integer
from stepfold.errors import refuse, warn
from stepfold.loop.events import Event
from stepfold.loop.hook import Sink
from stepfold.tree import describe_value
from stepfold.writers.base import require


def progress(
    kind: str = "tqdm",
    *,
    metrics: Sequence[str] | None = None,
    average: str = "train/loss",
    over: int = 100,
    file: TextIO | None = None,
    name: str | None = None,
) -> "Progress":
    """Show the step, the remaining time, a running average of the loss, and metrics.

    The average is over about the last `over` steps of the metric `average`, including those before
    a resume; NaN and inf are left out. A "tqdm" or "rich" bar is drawn on stderr, at most four
    times per second, in a terminal or a notebook. In a pipe or a file it becomes "lines": a line of
    text every second at first, later every minute. Lines of "json" are printed on stdout, one for
    each event, with null for NaN and inf. `file` replaces both streams. If the stream is missing or
    closed, nothing is shown; if a write fails, there is a warning, and the rest is not shown. With
    several processes, only the first shows anything. `metrics` are names or patterns, such as
    `eval/*`, of the metrics to show; by default JSON shows all metrics, and a bar shows those of
    evaluations and hooks.

    Without such a sink, `fit` prints "lines" on stderr if the run takes longer than a few seconds.
    With "none" nothing is shown.

    >>> import stepfold as sf
    >>> sink = sf.progress("json", metrics=("*/accuracy",))
    >>> metrics = {"train/loss": 2.0, "train/accuracy": 0.5}
    >>> state = sink.write(sink.init, sf.Event(10, 20, metrics, None))
    {"step": 10, "total": 20, "steps_per_second": null, ..., "loss": 2.0, "train/accuracy": 0.5}
    """
    if read_choice("progress", kind, _BARS) in ("tqdm", "rich"):
        require(kind, "progress", kind)
    names = () if metrics is None else metrics
    is_list = isinstance(names, Collection) and not isinstance(names, str)
    if not is_list or not all(isinstance(name, str) for name in names):
        refuse("metrics", "names or patterns, such as ('eval/*',)", describe_value(metrics))
    over = read_integer("over", over)
    return Progress(kind, metrics, average, over, file, "progress" if name is None else name)


class Progress(Sink):
    """What `progress` returns; its state is the running average."""

    shows_progress = True
    _quiet_seconds = 0.0  # at the start of a run; one that ends sooner opens and shows nothing

    def __init__(
        self,
        kind: str,
        metrics: Sequence[str] | None,
        average: str,
        over: int,
        file: TextIO | None,
        name: str,
    ) -> None:
        self._kind, self._metrics, self._file, self.name = kind, metrics, file, name
        self._average, self._over = average, over
        self.init = {"average": average, "sum": 0.0, "weight": 0.0, "last_train_step": None}
        self._is_running = False
        self._bar: _Bar | None = None  # from its first drawing, if it is quiet at first
        self._stream: _Stream | None = None
        self._pace: Pace | None = None

    def open(self, step: int, total: int | None, seen: int) -> None:  # noqa: ARG002
        if self._bar is not None:  # the run goes back
            self._bar.close()
        self._bar = self._stream = self._pace = None
        self._is_running, self._total = True, total
        self._step = self._opened_step = step
        self._opened_at = time.monotonic()
        self._pending: dict[str, float] | None = None  # values that are not drawn yet
        if self._quiet_seconds:
            self._drawn_at = self._opened_at + self._quiet_seconds
        else:
            self._drawn_at = -math.inf
            self._open_bar()

    def _open_bar(self) -> "_Bar":
        default = sys.stdout if self._kind == "json" else sys.stderr
        file = self._file or (default if _is_open(default) else None)
        self._bar = _HIDDEN
        if file is not None and jax.process_index() == 0:
            self._stream = _Stream(file)
            self._bar = _BARS[self._kind](self._stream, self._step, self._total)
            self._check_stream()
        return self._bar

    def write(self, state: Any, event: Event) -> Any:
        if not self._is_running:
            self.open(event.step, event.total, event.step)
        self._pace, _ = pace_after(self._pace, event)
        self._step = self._step if event.is_late else event.step
        state = state if state["average"] == self._average else self.init
        if event.kind == "train":
            state = self._add(state, event)
        self._pending = self._pending or {}
        if state["weight"]:
            self._pending[self._average.rsplit("/", 1)[-1]] = state["sum"] / state["weight"]
        self._pending |= {name: x for name, x in event.metrics.items() if self._is_shown(name)}
        now = time.monotonic()
        pause = _PAUSE
        if self._bar is not None and self._bar.is_lines:
            pause = min(max(1.0, (now - self._opened_at) / 10), 60.0)
        if self._kind == "json" or now - self._drawn_at >= pause:
            self._draw()
        return state

    def _add(self, state: Mapping[str, Any], event: Event) -> dict[str, Any]:
        """Add the value of some steps to the average."""
        last = state["last_train_step"]
        last = self._opened_step if last is None else last
        keep = (1 - 1 / self._over) ** max(event.step - last, 1)
        total, weight, value = state["sum"], state["weight"], event.metrics.get(self._average)
        if value is not None and math.isfinite(value):
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        return {**state, "sum": total, "weight": weight, "last_train_step": event.step}

    def show(self, line: str) -> None:
        """Print how a run starts; on stderr, since lines of JSON are for programs."""
        file = sys.stderr if self._kind == "json" or self._file is None else self._file
        if self._kind != "none" and _is_open(file) and jax.process_index() == 0:
            _Stream(file).write(f"{line}\n")

    def _draw(self) -> None:
        if self._pending is not None:
            bar = self._bar or self._open_bar()
            bar.draw(self._step, self._pending, self._pace and self._pace.rate)
            self._pending, self._drawn_at = None, time.monotonic()
            self._check_stream()

    def _check_stream(self) -> None:
        """Hide the bar once its stream has failed."""
        error = None if self._stream is None else self._stream.error
        if error is None or self._bar is None:
            return
        self._bar.close()
        self._bar, self._stream = _HIDDEN, None
        # If stderr is what failed, a warning would fail as well.
        if _is_open(sys.stderr) and (self._file is not None or self._kind == "json"):
            warn(
                f"progress: cannot write to the stream: {error}; the run continues without "
                "showing its progress",
                RuntimeWarning,
            )

    def _is_shown(self, name: str) -> bool:
        if self._metrics is None:
            return self._kind == "json" or not name.startswith("train/")
        return any(fnmatchcase(name, pattern) for pattern in self._metrics)

    def close(self) -> None:
        if self._is_running and time.monotonic() >= self._drawn_at:
            self._draw()
        if self._bar is not None:
            self._bar.close()
            self._check_stream()
        self._bar, self._is_running = None, False


class DefaultProgress(Progress):
    """What `fit` shows without a sink of this kind: lines, and nothing of a run of few seconds."""

    _quiet_seconds = 2.0

    def __init__(self) -> None:
        super().__init__("lines", None, "train/loss", 100, None, "progress")


class Pace(NamedTuple):
    """The pace of train steps: the step and time of the last event, and smoothed steps a second."""

    step: int
    time: float
    rate: float | None = None


def pace_after(before: Pace | None, event: Event) -> tuple[Pace, tuple[int, float] | None]:
    """Return the pace after an event, and the steps and seconds since the last one if known."""
    now = time.perf_counter() if event.time is None else event.time
    if before is None:
        return Pace(event.step, now), None
    steps = event.step - before.step
    if event.kind != "train" or steps < 1 or now <= before.time:
        return Pace(event.step, now, before.rate), None
    seconds = (now - before.time) / steps
    rate = 1 / (seconds if before.rate is None else 0.7 / before.rate + 0.3 * seconds)
    return Pace(event.step, now, rate), (steps, now - before.time)


class _Bar(NamedTuple):
    """What draws a step, metrics and steps per second; a bar keeps the metrics of earlier calls."""

    draw: Callable[[int, Mapping[str, float], float | None], None]
    close: Callable[[], None]
    is_lines: bool = False


_HIDDEN = _Bar(lambda *_: None, lambda: None)
_PAUSE = 0.25  # least seconds between two drawings of a bar


def _is_open(file: Any) -> bool:
    return file is not None and not getattr(file, "closed", False)


class _Stream:
    """A stream that keeps the first error of a write instead of raising it, and then drops text.

    A bar may also write when it is deleted, where an error cannot be caught.
    """

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.error: OSError | ValueError | None = None  # the latter if it is closed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __eq__(self, other: object) -> bool:  # `tqdm.write` compares streams
        return other is self or other is self.file

    def __hash__(self) -> int:
        return hash(self.file)

    def _try(self, call: Callable[..., Any], *args: Any) -> Any:
        if self.error is None:
            try:
                return call(*args)
            except (OSError, ValueError) as error:
                self.error = error
        return None

    def write(self, text: str) -> int:
        self._try(self.file.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self.file.flush)

    def isatty(self) -> bool:
        return bool(self._try(self.file.isatty))


def _is_notebook() -> bool:
    """Whether this is a kernel of Jupyter, which shows what is written to stderr."""
    # Without ipywidgets, `tqdm.auto` is the bar of terminals, which notebooks show too.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def _tqdm_bar(file: Any, step: int, total: int | None) -> _Bar:
    from tqdm.auto import tqdm
    from tqdm.notebook import tqdm_notebook

    if issubclass(tqdm, tqdm_notebook):
        file = file.file  # tqdm only compares it with stderr, and draws with widgets
    elif not (file.isatty() or _is_notebook()):
        return _text_lines(file, step, total)
    options = {"unit": "step", "dynamic_ncols": True, "mininterval": 0, "miniters": 1}
    bar = tqdm(initial=step, total=total, file=file, **options)
    texts: dict[str, str] = {}

    def draw(step: int, values: Mapping[str, float], _: float | None) -> None:
        texts.update({name: f"{value:.4g}" for name, value in values.items()})
        bar.set_postfix(texts, refresh=False)
        if not bar.update(step - bar.n):
            bar.refresh()

    return _Bar(draw, bar.close)


def _rich_bar(file: Any, step: int, total: int | None) -> _Bar:
    from rich import progress as rich
    from rich.console import Console

    console = Console(file=file)
    if not (console.is_terminal or console.is_jupyter):
        return _text_lines(file, step, total)
    columns = [rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn()]
    columns += [rich.TimeRemainingColumn(), rich.TextColumn("{task.description}", markup=False)]
    # What the program prints on a terminal goes above the bar.
    stdout = _is_open(sys.stdout) and sys.stdout.isatty()
    bar = rich.Progress(*columns, console=console, auto_refresh=False, redirect_stdout=stdout)
    task = bar.add_task("", total=total, completed=step)
    bar.start()
    texts: dict[str, str] = {}

    def draw(step: int, values: Mapping[str, float], rate: float | None) -> None:
        texts.update({name: f"{name} {value:.4g}" for name, value in values.items()})
        speed = "" if rate is None else f"{rate:.3g} step/s"
        text = "  ".join([speed, *texts.values()])
        bar.update(task, completed=step, description=text, refresh=True)

    return _Bar(draw, bar.stop)


def _text_lines(file: Any, _: int, total: int | None) -> _Bar:
    def draw(step: int, values: Mapping[str, float], rate: float | None) -> None:
        texts = [f"step {step}" if total is None else f"step {step} of {total}"]
        texts += [f"{name} {value:.4g}" for name, value in values.items()]
        texts += [] if rate is None else [f"{rate:.3g} steps/s"]
        if rate is not None and total is not None and step < total:
            texts.append(f"{timedelta(seconds=round((total - step) / rate))} left")
        print("  ".join(texts), file=file, flush=True)

    return _Bar(draw, lambda: None, is_lines=True)


def _json_lines(file: Any, _: int, total: int | None) -> _Bar:
    def draw(step: int, values: Mapping[str, float], rate: float | None) -> None:
        left = None if total is None or not rate else (total - step) / rate
        line = {"step": step, "total": total, "steps_per_second": rate, "seconds_left": left}
        # JSON has no NaN, and many parsers reject one.
        numbers = {name: value if math.isfinite(value) else None for name, value in values.items()}
        print(json.dumps(line | numbers), file=file, flush=True)

    return _Bar(draw, lambda: None)


_BARS = {
    "tqdm": _tqdm_bar,
    "rich": _rich_bar,
    "lines": _text_lines,
    "json": _json_lines,
    "none": lambda *_: _HIDDEN,
}
