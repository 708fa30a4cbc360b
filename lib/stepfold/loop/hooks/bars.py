"""How progress is drawn: by tqdm, by rich, or as lines of JSON."""

import json
import math
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Protocol, TextIO

from stepfold.errors import ConfigError


class Bar(Protocol):
    """Draw where a run stands.

    Attributes:
      pause: the seconds from one drawing to the next, at least.
    """

    pause: float

    def draw(self, step: int, values: Mapping[str, float], rate: float | None) -> None:
        """Draw a step, what is new of values by name, and steps a second."""

    def close(self) -> None:
        """Leave the last drawing on the screen."""


Draw = Callable[[TextIO | None, int, int | None], Bar | None]


def read_kind(kind: Any) -> Draw:
    """Read how to draw.

    Raises:
      ConfigError: if there is no such kind, or what it needs is not installed.
    """
    if kind not in _KINDS:
        raise ConfigError(f"progress: expected 'tqdm', 'rich' or 'json', got {kind!r}")
    if kind != "json" and find_spec(kind) is None:
        raise ConfigError(
            f"progress: expected {kind}, which is not installed; install it with "
            f"pip install 'stepfold[{kind}]', or take another kind, 'json' needs nothing"
        )
    return _KINDS[kind]


def _spelled(values: Mapping[str, float]) -> dict[str, str]:
    return {name: f"{value:.4g}" for name, value in values.items()}


class _Tqdm:
    """A bar of tqdm's, in a terminal or in a notebook."""

    pause = 0.1

    def __init__(self, bar: Any) -> None:
        self._bar, self._spelled = bar, dict[str, str]()

    def draw(self, step: int, values: Mapping[str, float], _: float | None) -> None:
        self._spelled |= _spelled(values)
        self._bar.set_postfix(self._spelled, refresh=False)
        if step > self._bar.n:
            self._bar.update(step - self._bar.n)
        else:
            self._bar.refresh()

    def close(self) -> None:
        self._bar.close()


def _tqdm(file: TextIO | None, step: int, total: int | None) -> Bar | None:
    from tqdm.auto import tqdm
    from tqdm.notebook import tqdm_notebook

    file = file or sys.stderr
    if not (file.isatty() or issubclass(tqdm, tqdm_notebook)):
        return None
    always = {"mininterval": 0, "miniters": 1}  # when to draw is said by who calls
    return _Tqdm(
        tqdm(initial=step, total=total, unit="step", file=file, dynamic_ncols=True, **always)
    )


class _Rich:
    """A bar of rich's, in a terminal or in a notebook."""

    pause = 0.25  # a drawing takes ten times as long as one of tqdm's

    def __init__(self, bar: Any, step: int, total: int | None) -> None:
        self._bar, self._spelled = bar, dict[str, str]()
        self._task = bar.add_task("", total=total, completed=step, rate="", values="")
        bar.start()

    def draw(self, step: int, values: Mapping[str, float], rate: float | None) -> None:
        self._spelled |= _spelled(values)
        spelled = "  ".join(f"{name} {value}" for name, value in self._spelled.items())
        said = "" if rate is None else f"{rate:.3g} step/s"
        self._bar.update(self._task, completed=step, rate=said, values=spelled, refresh=True)

    def close(self) -> None:
        self._bar.stop()


def _rich(file: TextIO | None, step: int, total: int | None) -> Bar | None:
    from rich import progress
    from rich.console import Console

    console = Console(file=file or sys.stderr)
    if not (console.is_terminal or console.is_jupyter):
        return None
    columns = (
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[rate]}  {task.fields[values]}", markup=False),
    )
    # What is printed goes above the bar, and yet to a file where stdout leads to one.
    printed = sys.stdout.isatty()
    bar = progress.Progress(*columns, console=console, auto_refresh=False, redirect_stdout=printed)
    return _Rich(bar, step, total)


class _Json:
    """Lines for a program to read."""

    pause = 0.0

    def __init__(self, file: TextIO, total: int | None) -> None:
        self._file, self._total = file, total

    def draw(self, step: int, values: Mapping[str, float], rate: float | None) -> None:
        left = None if self._total is None or not rate else (self._total - step) / rate
        line = {"step": step, "total": self._total, "steps_per_second": rate, "seconds_left": left}
        # JSON knows no NaN, and many readers would stumble over one.
        known = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({**line, **known}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Do nothing: every line is out."""


def _json(file: TextIO | None, _: int, total: int | None) -> Bar:
    return _Json(file or sys.stdout, total)


_KINDS: Mapping[str, Draw] = {"tqdm": _tqdm, "rich": _rich, "json": _json}
