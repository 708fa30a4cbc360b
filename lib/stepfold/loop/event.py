"""What a hook is shown, and what it may say."""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import numpy as np

from stepfold import tree
from stepfold.errors import ConfigError
from stepfold.loop.metrics import values_of


class Event(NamedTuple):
    """What a hook is shown, at every log point and after every evaluation.

    Attributes:
      step: how many steps were done.
      total: how many there are to be, or None.
      metrics: numbers by name, such as `train/loss` of the steps since the last log point, or
        `eval/loss`.
      state: the state; at a log point it may be that of a later step, since the metrics of a step
        are read when up to four others are under way.
      each: the train metrics step by step, since the last log point; empty after an evaluation.
      batch: the last batch that was pulled.
      waited: the seconds spent waiting for batches, since `fit` was called.
      weights: the weights of `each`: 0 where a step has seen nothing, and its value is NaN.
      time: when the step was done, as `time.perf_counter` counts; None if nobody looked.

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
    waited: float = 0.0
    weights: Mapping[str, np.ndarray] = {}
    time: float | None = None

    @property
    def is_train(self) -> bool:
        """Whether it is of train steps, and not of an evaluation."""
        return any(name.startswith("train/") for name in self.metrics)


Hook = Callable[[Event], str | Mapping[str, Any] | None]
"""What is shown an event, and says nothing, why to stop, or numbers to show with the others.

Where a hook has them, `fit` calls besides: `open(step, total)` before the first batch is pulled,
`close()` at the end, whatever happened, `end_epoch(epoch)` after each epoch and what was measured
at its end, the first being 0, `get_state()` for a checkpoint to keep, and
`set_state(state)`, before `open`, when a run goes on from one. Where one has a true
`writes_metrics`, it writes the `metrics.jsonl` of the `run_dir` itself, and `fit` does not.
"""


def expect(metric: str, event: Event) -> None:
    """See that a metric which is looked for is not one that is measured, misspelt.

    Raises:
      ConfigError: if the event has not the metric, but one that is called nearly so.

    >>> expect("eval/los", Event(10, None, {"eval/loss": 2.0}, None))
    Traceback (most recent call last):
    ...
    stepfold.errors.ConfigError: eval/los: expected a metric that is measured; did you mean ...
    """
    if metric not in event.metrics:  # most events are of another kind, and are passed over soon
        kind = metric[: metric.rfind("/") + 1]
        alike = [name for name in event.metrics if name.startswith(kind)]
        near = alike and get_close_matches(metric, alike, n=1, cutoff=0.9)
        if near:
            raise ConfigError(
                f"{metric}: expected a metric that is measured; did you mean {near[0]!r}?"
            )


def check_measured(looked_for: Sequence[str], name: str, found: Mapping[str, float]) -> None:
    """See that what is looked for among the metrics of an evaluation is among them.

    Raises:
      ConfigError: if it is not.

    >>> check_measured(["eval/accuracy"], "eval", {"eval/loss": 2.0})
    Traceback (most recent call last):
    ...
    stepfold.errors.ConfigError: eval/accuracy: expected a metric that is measured, got eval/loss
    """
    for metric in looked_for:
        if metric.rpartition("/")[0] == name and metric not in found:
            raise ConfigError(
                f"{metric}: expected a metric that is measured, got {', '.join(sorted(found))}"
            )


def show(event: Event, hooks: Sequence[Hook]) -> tuple[Event, list[str]]:
    """Show an event to hooks one by one; numbers that one gives are shown to those after it.

    Returns:
      The event with all of the numbers, and the reasons to stop.

    Raises:
      ConfigError: if a hook says anything else.

    >>> event = Event(10, None, {"train/loss": 2.0}, None)
    >>> hooks = [lambda event: {"half": event.metrics["train/loss"] / 2}, lambda event: "enough"]
    >>> event, reasons = show(event, hooks)
    >>> event.metrics, reasons
    ({'train/loss': 2.0, 'half': 1.0}, ['enough'])
    """
    reasons = []
    for hook in hooks:
        said = hook(event)
        if isinstance(said, str):
            reasons.append(said)
        elif isinstance(said, Mapping):
            event = event._replace(metrics={**event.metrics, **values_of(said)})
        elif said is not None:
            raise ConfigError(
                f"{getattr(hook, '__qualname__', hook)}: expected a hook to return None, why to "
                f"stop in words, or numbers by name, got {tree.spell(said)}"
            )
    return event, reasons
