"""What ends a run that a trainer holds: a word of its methods, or a number that is none."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from stepfold.errors import OutOfMemoryError
from stepfold.inspect.memory import is_exhausted
from stepfold.loop.hooks.base import Event


class StopTraining(Exception):  # noqa: N818  it is no error, as StopIteration is none
    """End the run, after a save; raised by `apply_training_hooks`, `on_log` and callbacks.

    >>> raise StopTraining("good enough")
    Traceback (most recent call last):
    ...
    stepfold.adapter.stopping.StopTraining: good enough
    """


def refuse_nonfinite(metrics: Mapping[str, Any]) -> None:
    """Refuse a loss that is NaN or infinite.

    Raises:
      StopTraining: with the loss.

    >>> refuse_nonfinite({"train/loss": 0.5, "train/accuracy": float("nan")})
    """
    for name in ("loss", "train/loss"):
        value = metrics.get(name)
        if value is not None and not np.isfinite(value):
            raise StopTraining(f"{name} is {float(value)}")


def refuse_late(seconds: float, limit: float | None) -> None:
    """Refuse to go on when the time is up.

    Raises:
      StopTraining: with the limit.

    >>> refuse_late(10.0, None), refuse_late(10.0, 20.0)
    (None, None)
    """
    if limit is not None and seconds >= limit:
        raise StopTraining(f"the time limit of {limit:g} s was reached")


class StopOnSkipped:
    """Stop after steps that were left out, since their loss or a gradient was not finite.

    The state is the one before them, so that it is worth saving. A dynamic loss scale leaves out
    some steps in a row until it is small enough; there the limit is above what that takes.

    >>> hook = StopOnSkipped()
    >>> hook(Event(12, None, {}, None, {"train/skipped": np.array([0, 1, 0])}))
    'the loss or a gradient was not finite in step 11, which was left out'
    """

    def __init__(self, limit: int = 1) -> None:
        self._limit, self._row = limit, 0

    def __call__(self, event: Event) -> str | None:
        """Look at what was left out since the last event."""
        skipped = event.per_step.get("train/skipped", np.zeros(0))
        for step, left_out in enumerate(skipped, event.step - len(skipped) + 1):
            self._row = self._row + 1 if left_out else 0
            if self._row == self._limit:
                since = "" if self._limit == 1 else f", the last of {self._limit} in a row"
                return (
                    f"the loss or a gradient was not finite in step {step}, which was left out"
                    f"{since}"
                )
        return None

    def get_state(self) -> dict[str, int]:
        """Give what a resumed run has to know."""
        return {"row": self._row}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Go on from there."""
        self._row = state["row"]


def advise(error: BaseException) -> None:
    """Say with an error of the device's what to do about it, if it is for want of memory.

    >>> error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate ...")
    >>> advise(error)
    >>> error.__notes__[0].split(":")[0]
    'the device has too little memory for this step'
    """
    if isinstance(error, OutOfMemoryError) or is_exhausted(error):
        error.add_note(
            "the device has too little memory for this step: raise gradient_accumulation_steps, "
            "set gradient_checkpointing='nothing_saveable' or mixed_precision='bf16', spread the "
            "state by sharding_array, or lower total_batch_size; sf.describe tells what it takes"
        )
