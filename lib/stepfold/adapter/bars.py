"""A bar as trainers call one, drawn by `stepfold.progress`."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from stepfold.loop.hooks.base import Event
from stepfold.loop.hooks.progress import progress


class ProgressBar:
    """Show a step and numbers, by `update` and `set_postfix`.

    >>> bar = ProgressBar("json", 20)
    >>> bar.set_postfix(loss=2.0)
    >>> bar.update(10)
    {"step": 10, "total": 20, "steps_per_second": null, ..., "loss": 2.0}
    >>> bar.close()
    """

    def __init__(
        self,
        kind: str,
        total: int | None,
        desc: str = "",
        *,
        metrics: Sequence[str] | None = None,
        file: TextIO | None = None,
    ) -> None:
        """Say how to draw what; the arguments are those of `stepfold.progress`."""
        self.total, self.desc, self.step = total, desc, 0
        self._shown: dict[str, float] = {}
        self._make = functools.partial(progress, kind, metrics=metrics, file=file)
        self._hook, self._opened = self._make(), False

    def open(self, step: int) -> None:
        """Begin at a step."""
        self.step, self._opened = step, True
        self._hook.open(step, self.total)

    def set_postfix(self, metrics: Mapping[str, float] | None = None, **more: float) -> None:
        """Say numbers, which are shown with the next step."""
        self._shown |= {**(metrics or {}), **more}

    def update(self, n: int = 1) -> None:
        """Go on by so many steps."""
        if not self._opened:
            self.open(self.step)
        self.step += n
        kind = "train" if any(name.startswith("train/") for name in self._shown) else "eval"
        self._hook(Event(self.step, self.total, self._shown, None, kind=kind))
        self._shown = {}

    def reset(self) -> None:
        """Begin anew at step 0."""
        self.close()
        self.step, self._shown, self._hook = 0, {}, self._make()

    def close(self) -> None:
        """Leave the last drawing where it is; to call it twice is well."""
        if self._opened:
            self._hook.close()
        self._opened = False

    def get_state(self) -> dict[str, Any]:
        """Give the running average, for a resumed run."""
        return self._hook.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on with the running average."""
        self._hook.set_state(state)


class NullProgressBar:
    """Show nothing, and be called as a bar is."""

    step = 0

    def open(self, step: int) -> None:
        """Do nothing."""

    def set_postfix(self, metrics: Mapping[str, float] | None = None, **more: float) -> None:
        """Do nothing."""

    def update(self, n: int = 1) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
