"""Hooks around another hook, and callbacks at the ends of epochs."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stepfold.core.validation import read_function, read_instance, read_integer
from stepfold.errors import refuse, warn
from stepfold.loop.hooks.base import (
    BaseHook,
    Event,
    GoBack,
    Hook,
    Replace,
    Returned,
    Reweight,
    Stop,
    call_optional,
    has_state_of,
    hook_name,
)
from stepfold.tree import describe_value


class HookWrapper:
    """Base class of hooks around another. Attributes that it lacks are read from the inner hook.

    The state of the inner hook is saved with its kind, and restored only to a hook of that kind.
    """

    def __init__(self, hook: Hook) -> None:
        name = type(self).__name__
        if not callable(hook) or isinstance(hook, type):
            refuse(name, "a hook, (event) -> …", describe_value(hook))
        if hasattr(hook, "end_epoch"):
            advice = "give one that is called after epochs to fit directly"
            refuse(name, "a hook that is called with events", describe_value(hook), advice)
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # special methods, and `_hook` itself during unpickling
            raise AttributeError(name)
        return getattr(self._hook, name)

    def __call__(self, event: Event) -> Returned:
        return self._hook(event)

    def get_state(self) -> dict[str, Any]:
        return {"hook": call_optional(self._hook, "get_state"), "kind": hook_name(self._hook)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        if not has_state_of(self, state, "kind", "hook"):
            return
        kind, inner = state["kind"], state["hook"]
        if inner is None:
            return
        if kind == hook_name(self._hook):
            call_optional(self._hook, "set_state", inner)
        else:
            warn(
                f"hooks: expected {kind} in {hook_name(self)}, as in the checkpoint, got "
                f"{hook_name(self._hook)}, which starts afresh"
            )


class every(HookWrapper):  # noqa: N801
    """Call a hook only at the first event at or after each multiple of `n` steps.

    The events of train steps and those of each evaluation count separately; with `kind`, such as
    "train" or "eval", the hook sees only those. It does not see skipped events, so do not wrap
    `stop_on_nonfinite`.

    >>> import stepfold as sf
    >>> hook = sf.every(100, lambda event: print(event.step))
    >>> for step in (60, 120, 180, 240):
    ...     hook(sf.Event(step, None, {}, None))
    120
    240
    """

    def __init__(self, n: int, hook: Hook, *, kind: str | None = None) -> None:
        super().__init__(hook)
        self._n = read_integer("every", n)
        if kind is not None:
            read_instance("kind", kind, str, "'train', or the name of an evaluation")
        self._kind = kind
        self._first: int | None = None  # the multiple at which the run began; None outside a run
        self._reached: dict[str, int] = {}  # the last multiple by kind of event

    def __call__(self, event: Event) -> Returned:
        if self._kind is not None and event.kind != self._kind:
            return None
        previous = self._reached.get(event.kind, self._first or 0)
        self._reached[event.kind] = event.step // self._n
        return super().__call__(event) if event.step // self._n > previous else None

    def open(self, step: int, total: int | None) -> None:
        if self._first is None:
            self._first, self._reached = step // self._n, {}
        call_optional(self._hook, "open", step, total)

    def close(self) -> None:
        self._first, self._reached = None, {}
        call_optional(self._hook, "close")

    def get_state(self) -> dict[str, Any]:
        reached = {"first": self._first or 0, "reached": dict(self._reached)}
        return {**super().get_state(), **reached, "n": self._n}

    def set_state(self, state: Mapping[str, Any]) -> None:
        if not has_state_of(self, state, "n", "first", "reached"):
            return
        is_same = state["n"] == self._n
        self._first = state["first"] if is_same else None
        self._reached = dict(state["reached"]) if is_same else {}
        super().set_state(state)


def check_kinds(hook: Any, kinds: Sequence[str]) -> None:
    """Refuse a hook that would never be called, since a run has no events of its kind."""
    while isinstance(hook, HookWrapper):
        kind = getattr(hook, "_kind", None)
        if kind is not None and kind not in kinds:
            refuse("every: kind", f"one of {', '.join(kinds)}", repr(kind))
        hook = hook._hook


class only_warn(HookWrapper):  # noqa: N801
    """Warn of a hook's reason to stop, to go back or to replace the state, instead of doing so.

    >>> import warnings, stepfold as sf
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     sf.only_warn(lambda event: "too high")(sf.Event(20, None, {}, None))
    >>> print(caught[0].message)
    step 20: too high
    """

    can_stop = False

    def __call__(self, event: Event) -> Mapping[str, Any] | None:
        returned = super().__call__(event)
        if not isinstance(returned, str | Stop | GoBack | Replace | Reweight):
            return returned
        reason = str(returned) if isinstance(returned, str | Stop) else returned.why
        if reason:
            warn(f"step {event.step}: {reason}")
        return None

    def still_stops(self) -> None:
        """Return None, since it does not stop the run."""


def weighted_sum(event: Event, name: str, part: slice = slice(None)) -> tuple[float, float]:
    """Return the total and the weight of a train metric over the steps of an event, or a part.

    A skipped step, of weight zero and value NaN, adds nothing.
    """
    values = np.asarray(event.per_step.get(name, ()), np.float64)
    weights = np.asarray(event.weights.get(name, np.ones(len(values))), np.float64)[part]
    return float(np.where(weights, values[part], 0.0) @ weights), float(weights.sum())


def add_sums(
    sums: Mapping[str, Sequence[float]], event: Event, part: slice = slice(None)
) -> dict[str, Sequence[float]]:
    """Return totals and weights by name, with those of the steps of an event added."""
    names = [name for name, values in event.per_step.items() if np.ndim(values) == 1]
    added = {name: weighted_sum(event, name, part) for name in names}
    before = {name: sums.get(name, (0.0, 0.0)) for name in names}
    return {**sums, **{name: [*map(operator.add, before[name], added[name])] for name in names}}


def means_of(sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Divide totals by weights; NaN if every step was skipped."""
    return {name: total / weight if weight else math.nan for name, (total, weight) in sums.items()}


class EpochMeans(BaseHook):
    """Base class of hooks that use the metrics of each epoch.

    Those of train steps are means over the examples of the epoch, all others the latest value.
    """

    run_state: Sequence[str] = ("_sums", "_latest")

    def reset(self, step: int) -> None:  # noqa: ARG002
        self._sums: dict[str, Sequence[float]] = {}  # totals and weights of the epoch so far
        self._latest: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        self._sums = add_sums(self._sums, event)
        self._latest.update(event.metrics)

    def take_means(self) -> dict[str, float]:
        """Return the metrics of the epoch so far, and begin the next one."""
        metrics = {**self._latest, **means_of(self._sums)}
        self._sums, self._latest = {}, {}
        return metrics


class callback(EpochMeans):  # noqa: N801
    """Call a function `(trainer, epoch, metrics)` after each epoch, including one the run stops at.

    Epochs count from 0. Metrics are named `train_loss`, `eval_loss` and so on. Those of train steps
    are means over the examples of the epoch, all others the latest value. An exception in the
    function ends the run, after a save. `trainer` is any object.

    >>> import numpy as np, stepfold as sf
    >>> hook = sf.callback(lambda trainer, epoch, metrics: print(epoch, metrics))
    >>> losses, rows = {"train/loss": np.array([3.0, 1.0])}, {"train/loss": np.array([2, 6])}
    >>> hook(sf.Event(2, None, {"eval/loss": 4.0}, None, losses, weights=rows))
    >>> hook.end_epoch(0)  # by fit
    0 {'eval_loss': 4.0, 'train_loss': 1.5}
    """

    def __init__(
        self,
        function: Callable[[Any, int, dict[str, float]], Any],
        trainer: Any = None,
        *,
        name: str | None = None,
    ) -> None:
        read_function("callback", function, "a function (trainer, epoch, metrics)")
        self._function, self._trainer, self.name = function, trainer, name
        self.reset(0)

    def end_epoch(self, epoch: int) -> None:
        metrics = {name.replace("/", "_"): value for name, value in self.take_means().items()}
        self._function(self._trainer, epoch, metrics)
