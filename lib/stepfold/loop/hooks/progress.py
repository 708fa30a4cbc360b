"""Progress of a run: a bar of tqdm or rich, or lines of JSON."""

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import NamedTuple, TextIO

import jax

from stepfold import tree
from stepfold.core.validation import check_count
from stepfold.errors import ConfigError
from stepfold.loop.hooks.base import Event, StatefulHook
from stepfold.loop.hooks.throughput import Pace


class progress(StatefulHook):  # noqa: N801
    """Show the step, the remaining time, a running average of the loss, and metrics.

    The average is over about the last `over` steps, those before a resume included; NaN and inf do
    not enter it. A bar is drawn on stderr, a few times per second at most, and only in a terminal
    or a notebook. Lines of JSON are printed on stdout, one for each event; NaN and inf are null
    there. Of several processes only the first shows anything.

    Args:
      kind: "tqdm" or "rich" for a bar, "json" for lines that a program can read.
      metrics: names of metrics to show, or patterns such as `eval/*`. If None, a bar shows those
        of evaluations and of hooks, and JSON all.
      average: the metric of the running average, which is shown by the last part of its name.
      over: the number of steps to average over.
      file: where to write, instead of stderr or stdout.

    >>> import stepfold as sf
    >>> hook = sf.progress("json", metrics=("*/accuracy",))
    >>> hook(sf.Event(10, 20, {"train/loss": 2.0, "train/accuracy": 0.5}, None))
    {"step": 10, "total": 20, "steps_per_second": null, ..., "loss": 2.0, "train/accuracy": 0.5}
    """

    run_state = ("_sum", "_weight", "_last_train_step")
    state_key = ("_average",)

    def __init__(
        self,
        kind: str = "tqdm",
        *,
        metrics: Sequence[str] | None = None,
        average: str = "train/loss",
        over: int = 100,
        file: TextIO | None = None,
    ) -> None:
        if kind not in _BARS:
            raise ConfigError(f"progress: expected 'tqdm', 'rich' or 'json', got {kind!r}")
        if kind != "json" and find_spec(kind) is None:
            raise ConfigError(
                f"progress: expected {kind}, which is not installed; install it with "
                f"pip install 'stepfold[{kind}]', or use 'json', which needs nothing"
            )
        if isinstance(metrics, str) or not all(isinstance(name, str) for name in metrics or ()):
            raise ConfigError(
                f"metrics: expected names or patterns, as ('eval/*',), got {tree.spell(metrics)}"
            )
        check_count("over", over)

        self._kind, self._metrics, self._file = kind, metrics, file
        self._average, self._over = average, over
        self._bar: _Bar | None = None
        self._is_open = False
        self.reset(0)

    def reset(self, step: int) -> None:
        self._sum, self._weight, self._last_train_step = 0.0, 0.0, step
        self._pace = Pace()

    def open(self, step: int, total: int | None) -> None:
        super().open(step, total)
        if jax.process_index() == 0:
            self._bar = _BARS[self._kind](self._file, step, total)
        self._is_open, self._step, self._drawn_at = True, step, -math.inf
        self._pending: dict[str, float] | None = None  # metrics that are not drawn yet

    def __call__(self, event: Event) -> None:
        if not self._is_open:
            self.open(event.step, event.total)
        self._pace.add(event)
        self._step = event.step
        if event.is_train:
            steps = max(event.step - self._last_train_step, 1)
            self._last_train_step = event.step
            value = event.metrics.get(self._average, math.nan)
            if math.isfinite(value):
                keep = (1 - 1 / self._over) ** steps
                self._sum = keep * self._sum + (1 - keep) * value
                self._weight = keep * self._weight + (1 - keep)
        if self._bar is not None:
            shown = {name: x for name, x in event.metrics.items() if self._is_shown(name)}
            self._pending = {**(self._pending or {}), **shown}
            if time.monotonic() - self._drawn_at >= self._bar.pause:
                self._draw(self._bar, self._pending)

    def _is_shown(self, name: str) -> bool:
        if self._metrics is None:
            return self._kind == "json" or not name.startswith("train/")
        return any(fnmatchcase(name, pattern) for pattern in self._metrics)

    def _draw(self, bar: "_Bar", metrics: Mapping[str, float]) -> None:
        name = self._average.rsplit("/", 1)[-1]
        average = {name: self._sum / self._weight} if self._weight else {}
        bar.draw(self._step, {**average, **metrics}, self._pace.rate)
        self._pending, self._drawn_at = None, time.monotonic()

    def close(self) -> None:
        super().close()
        if self._bar is not None:
            if self._pending is not None:
                self._draw(self._bar, self._pending)
            self._bar.close()
        self._bar, self._is_open = None, False


class _Bar(NamedTuple):
    """Functions that draw a step, new values and steps per second, and the least pause between."""

    draw: Callable[[int, Mapping[str, float], float | None], None]
    close: Callable[[], None]
    pause: float


def _tqdm_bar(file: TextIO | None, step: int, total: int | None) -> _Bar | None:
    from tqdm.auto import tqdm
    from tqdm.notebook import tqdm_notebook

    file = file or sys.stderr
    if not (file.isatty() or issubclass(tqdm, tqdm_notebook)):
        return None
    options = {"unit": "step", "dynamic_ncols": True, "mininterval": 0, "miniters": 1}
    bar = tqdm(initial=step, total=total, file=file, **options)
    texts: dict[str, str] = {}

    def draw(step: int, values: Mapping[str, float], _: float | None) -> None:
        texts.update({name: f"{value:.4g}" for name, value in values.items()})
        bar.set_postfix(texts, refresh=False)
        if not bar.update(step - bar.n):
            bar.refresh()

    return _Bar(draw, bar.close, pause=0.1)


def _rich_bar(file: TextIO | None, step: int, total: int | None) -> _Bar | None:
    from rich import progress as rich
    from rich.console import Console

    console = Console(file=file or sys.stderr)
    if not (console.is_terminal or console.is_jupyter):
        return None
    bar = rich.Progress(
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[rate]}  {task.fields[values]}", markup=False),
        console=console,
        auto_refresh=False,
        # What the program prints goes above the bar, unless stdout is redirected to a file.
        redirect_stdout=sys.stdout.isatty(),
    )
    task = bar.add_task("", total=total, completed=step, rate="", values="")
    bar.start()
    texts: dict[str, str] = {}

    def draw(step: int, values: Mapping[str, float], rate: float | None) -> None:
        texts.update({name: f"{name} {value:.4g}" for name, value in values.items()})
        text = "" if rate is None else f"{rate:.3g} step/s"
        bar.update(task, completed=step, rate=text, values="  ".join(texts.values()), refresh=True)

    return _Bar(draw, bar.stop, pause=0.25)  # drawing takes ten times as long as with tqdm


def _json_lines(file: TextIO | None, _: int, total: int | None) -> _Bar:
    file = file or sys.stdout

    def draw(step: int, values: Mapping[str, float], rate: float | None) -> None:
        left = None if total is None or not rate else (total - step) / rate
        line = {"step": step, "total": total, "steps_per_second": rate, "seconds_left": left}
        # JSON has no NaN, and many parsers reject one.
        numbers = {name: value if math.isfinite(value) else None for name, value in values.items()}
        file.write(json.dumps(line | numbers) + "\n")
        file.flush()

    return _Bar(draw, lambda: None, pause=0.0)


_BARS = {"tqdm": _tqdm_bar, "rich": _rich_bar, "json": _json_lines}
