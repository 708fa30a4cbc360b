"""A window of the run for the profiler."""

import os
from pathlib import Path
from typing import Any

import jax

from stepfold import tree
from stepfold.errors import ConfigError
from stepfold.loop.event import Event


class profile:  # noqa: N801  it is called as the functions beside it are
    """Trace some steps with jax's profiler, for TensorBoard, xprof or Perfetto to show.

    The trace begins at the first train event at or after step `first`, and ends at the first that
    is `count` steps later: it is exact to the log points. With `log_every=10`, `profile(100, 10,
    folder)` holds 10 steps, and with 3 in place of 10 too. At both ends, and only there, the device
    is waited for, so that each step is in it as a whole or not at all. An event comes when the next
    step is under way, so the trace begins with the one after that; where an evaluation or a save is
    due at one end and not at the other, it holds a step more or less. `begun` and `ended` tell.

    A run that ends before closes the trace, and one that is resumed does not trace again what was
    traced. Of several processes the first one is traced.

    Attributes:
      begun: how many steps were done when the trace began, or None.
      ended: how many when it ended, or None.

    >>> import stepfold as sf, tempfile
    >>> hook = sf.profile(100, 10, tempfile.mkdtemp())
    >>> hook(sf.Event(90, None, {"train/loss": 1.0}, None))
    >>> hook.close()
    """

    def __init__(self, first: int, count: int, folder: str | os.PathLike[str]) -> None:
        """Say which steps.

        Args:
          first: the step from which on to trace.
          count: how many steps.
          folder: where the trace goes; it is made if need be.

        Raises:
          ConfigError: if an argument is not as described.
        """
        if type(first) is not int or first < 0:
            raise ConfigError(f"first: expected an integer of at least 0, got {first!r}")
        if type(count) is not int or count < 1:
            raise ConfigError(f"count: expected an integer of at least 1, got {count!r}")
        if not isinstance(folder, str | os.PathLike) or Path(folder).is_file():
            raise ConfigError(f"folder: expected one for the trace, got {tree.spell(folder)}")
        self._first, self._count, self._folder = first, count, os.fspath(folder)
        self._end: int | None = None  # of the events, while it traces
        self._over = False
        self.begun: int | None = None
        self.ended: int | None = None

    def __call__(self, event: Event) -> None:
        """Begin or end the trace, if it is time."""
        if self._over or not event.is_train or event.step < self._first:
            return
        if self._end is None:
            self._begin(event)
        elif event.step >= self._end:
            self.ended = _steps_of(event.state)
            self.close()

    def _begin(self, event: Event) -> None:
        self._over = jax.process_index() != 0
        if not self._over:
            self.begun = _steps_of(event.state)
            jax.profiler.start_trace(self._folder)
            self._end = event.step + self._count

    def close(self) -> None:
        """End the trace, if there is one."""
        if self._end is not None:
            self._end, self._over = None, True
            jax.profiler.stop_trace()

    def get_state(self) -> dict[str, Any]:
        """Give what a resumed run has to know."""
        return {"over": self._over, "first": self._first}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there; another window is still to be traced."""
        self._over = state["over"] and state.get("first", self._first) == self._first


def _steps_of(state: Any) -> int | None:
    """Wait for a state, and tell its step."""
    jax.block_until_ready(state)
    step = getattr(state, "step", None)
    return None if step is None else int(step)
