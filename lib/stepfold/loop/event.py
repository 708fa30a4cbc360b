"""What a hook is shown, and what it may say."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Event(NamedTuple):
    """What a hook is shown, at every log point and after every evaluation.

    Attributes:
      step: how many steps were done.
      total: how many there are to be, or None.
      metrics: numbers by name, such as `train/loss` of the steps since the last log point, or
        `eval/loss`.
      state: the state; at a log point it may be that of a later step, since the metrics of a step
        are read when the next ones are under way.
      each: the train metrics step by step, since the last log point; empty after an evaluation.
      batch: the last batch that was pulled.

    >>> import stepfold as sf
    >>> def patient(event):
    ...     if event.metrics.get("eval/loss", 0) > 10:
    ...         return "the loss is above 10"
    >>> patient(sf.Event(step=100, total=None, metrics={"eval/loss": 12.0}, state=None))
    'the loss is above 10'
    """

    step: int
    total: int | None
    metrics: Mapping[str, float]
    state: Any
    each: Mapping[str, np.ndarray] = {}
    batch: Any = None


Hook = Callable[[Event], str | None]
