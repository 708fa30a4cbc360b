"""Profiler traces of some steps."""

import os
from pathlib import Path
from typing import Any

import jax

from stepfold import tree
from stepfold.core.validation import check_count
from stepfold.errors import ConfigError
from stepfold.loop.hooks.base import Event, StatefulHook


class profile(StatefulHook):  # noqa: N801
    """Trace some steps with jax's profiler, for TensorBoard, xprof or Perfetto.

    The trace starts at the first train event at or after step `first` and ends at the first one
    `count` steps later: with `log_every=10`, both `profile(100, 10, folder)` and `profile(100, 3,
    folder)` trace 10 steps. It waits for the device at both ends, so no step is traced in part. At
    an event the next step has been dispatched, so the trace starts with the one after that; where
    an evaluation or a save is due at one end only, it has a step more or less. `begun` and `ended`
    are the steps done at both ends, or None. The end of the run ends an open trace. A resumed run
    does not trace the same steps again. Of several processes the first is traced.

    >>> import stepfold as sf, tempfile
    >>> hook = sf.profile(100, 10, tempfile.mkdtemp())
    >>> hook(sf.Event(90, None, {"train/loss": 1.0}, None))
    """

    run_state = ("_is_done",)
    state_key = ("_first",)

    def __init__(self, first: int, count: int, folder: str | os.PathLike[str]) -> None:
        self._first = check_count("first", first, minimum=0)
        self._count = check_count("count", count)
        if not isinstance(folder, str | os.PathLike) or Path(folder).is_file():
            raise ConfigError(f"folder: expected one for the trace, got {tree.spell(folder)}")
        self._folder = os.fspath(folder)
        self.reset(0)

    def reset(self, step: int) -> None:  # noqa: ARG002
        self._is_done = False
        self._end: int | None = None  # the step of the event that ends the trace, while it is open
        self.begun: int | None = None
        self.ended: int | None = None

    def __call__(self, event: Event) -> None:
        is_due = event.is_train and event.step >= self._first
        if not is_due or self._is_done or jax.process_index() > 0:
            return
        if self._end is None:
            self.begun = _steps_done(event.state)
            jax.profiler.start_trace(self._folder)
            self._end = event.step + self._count
        elif event.step >= self._end:
            self.ended = _steps_done(event.state)
            self.close()

    def close(self) -> None:
        super().close()
        if self._end is not None:
            self._end, self._is_done = None, True
            jax.profiler.stop_trace()


def _steps_done(state: Any) -> int | None:
    """Wait for a state and return its step."""
    step = getattr(jax.block_until_ready(state), "step", None)
    return None if step is None else int(step)
