"""What ends a run that a trainer holds: a word of its methods, or a number that is none."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from stepfold.loop.event import Event


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


def stop_on_skipped(event: Event) -> str | None:
    """Stop after a step that was left out, since its loss or a gradient was not finite.

    The state is the one before that step, so that it is worth saving.

    >>> stop_on_skipped(Event(12, None, {}, None, {"train/skipped": np.array([0, 1, 0])}))
    'the loss or a gradient was not finite in step 11, which was left out'
    """
    (bad,) = np.nonzero(event.each.get("train/skipped", np.zeros(1)))
    if not bad.size:
        return None
    step = event.step - len(event.each["train/skipped"]) + 1 + int(bad[0])
    return f"the loss or a gradient was not finite in step {step}, which was left out"
