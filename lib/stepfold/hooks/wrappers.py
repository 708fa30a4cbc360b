"""Hooks around another hook, and callbacks at the ends of epochs."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stepfold.core.validation import read_function, read_instance, read_integer
from stepfold.errors import refuse, warn
from stepfold.hooks.objects import as_hook
from stepfold.loop.events import Event, HookRequest, Nonfinite, Returned, Stop
from stepfold.loop.hook import Hook, Sink
from stepfold.tree import describe_value


def every(n: int, hook: Any, *, kind: str | None = None) -> Hook:
    """Call a hook only at the first event at or after each multiple of `n` steps.

    The events of train steps and those of each evaluation count separately; with `kind`, such as
    "train" or "eval", the hook sees only those. It does not see skipped events, so do not wrap
    `on_nonfinite`.

    >>> import stepfold as sf
    >>> hook = sf.hooks.every(100, lambda event: print(event.step))
    >>> state = hook.init
    >>> for step in (60, 120, 180, 240):
    ...     state, _ = hook.update(state, sf.Event(step, None, {}, None))
    120
    240
    """
    inner, steps = _read_hook("every", hook), read_integer("every", n)
    if kind is not None:
        read_instance("kind", kind, str, "'train', or the name of an evaluation")
    # The multiple at which the run began, and by kind of event the last one that was reached.
    init = {"n": steps, "first": 0, "reached": {}, "hook": inner.init, "is_new": True}

    def update(state: Any, event: Event) -> tuple[Any, Returned]:
        if event.kind == "start":
            if state["n"] != steps:
                state = {**init, "hook": state["hook"]}
            if state["is_new"]:
                state = {**state, "first": event.step // steps, "is_new": False}
            return call(state, event) if "start" in inner.also else (state, None)
        if kind is not None and event.kind != kind:
            return state, None
        reached, before = event.step // steps, state["reached"].get(event.kind, state["first"])
        state = {**state, "reached": {**state["reached"], event.kind: reached}}
        return call(state, event) if reached > before else (state, None)

    def call(state: Any, event: Event) -> tuple[Any, Returned]:
        own, returned = inner.update(state["hook"], event)
        return {**state, "hook": own}, returned

    return inner._replace(
        init=init,
        update=update,
        name=_name_of("every", inner),
        also=("start",),
        only=inner.only if kind is None else (kind,),
    )


def only_warn(hook: Any) -> Hook:
    """Warn of a hook's reason to stop, to go back or to replace the state, instead of doing so.

    >>> import warnings, stepfold as sf
    >>> hook = sf.hooks.only_warn(lambda event: "too high")
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     _ = hook.update(hook.init, sf.Event(20, None, {}, None))
    >>> print(caught[0].message)
    step 20: too high
    """
    inner = _read_hook("only_warn", hook)

    def update(state: Any, event: Event) -> tuple[Any, Returned]:
        state, returned = inner.update(state, event)
        if not isinstance(returned, str | HookRequest):
            return state, returned
        reason = str(returned) if isinstance(returned, str | Stop) else returned.why
        if reason and event.kind != "start":
            warn(f"step {event.step}: {reason}")
        return state, None

    returns = [Nonfinite] if inner.declares(Nonfinite) else []
    return inner._replace(update=update, name=_name_of("only_warn", inner), returns=returns)


def _name_of(wrapper: str, inner: Hook) -> str:
    """Name a hook around another; the state of that is kept only for a hook of its name."""
    return wrapper if inner.init is None else f"{wrapper} {inner.name}"


def _read_hook(name: str, hook: Any) -> Hook:
    is_hook = isinstance(hook, Hook)
    if not is_hook and (not callable(hook) or isinstance(hook, type)):
        advice = ""
        if isinstance(hook, Sink):
            advice = "give it to fit itself; sf.log_to has every=…"
        refuse(name, "a hook, (event) -> …", describe_value(hook), advice)
    inner = as_hook(hook)
    if "epoch" in inner.also:
        advice = "give one that is called after epochs to fit directly"
        refuse(name, "a hook that is called with events", describe_value(hook), advice)
    return inner


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


Means = Mapping[str, Any]
"""Metrics of an epoch so far: `sums` of train metrics by name, and the `latest` of all."""

NO_MEANS: Means = {"sums": {}, "latest": {}}


def add_event(means: Means, event: Event) -> Means:
    """Add the metrics of an event to those of the epoch so far."""
    latest = {**means["latest"], **event.metrics}
    return {**means, "sums": add_sums(means["sums"], event), "latest": latest}


def epoch_means(means: Means) -> dict[str, float]:
    """Return the metrics of an epoch.

    Those of train steps are means over the examples of the epoch, all others the latest value.
    """
    return {**means["latest"], **means_of(means["sums"])}


def callback(
    function: Callable[[Any, int, dict[str, float]], Any],
    trainer: Any = None,
    *,
    name: str | None = None,
) -> Hook:
    """Call a function `(trainer, epoch, metrics)` after each epoch, including one the run stops at.

    Epochs count from 0. Metrics are named `train_loss`, `eval_loss` and so on. Those of train steps
    are means over the examples of the epoch, all others the latest value. An exception in the
    function ends the run, after a save. `trainer` is any object.

    >>> import numpy as np, stepfold as sf
    >>> hook = sf.hooks.callback(lambda trainer, epoch, metrics: print(epoch, metrics))
    >>> losses, rows = {"train/loss": np.array([3.0, 1.0])}, {"train/loss": np.array([2, 6])}
    >>> event = sf.Event(2, None, {"eval/loss": 4.0}, None, losses, weights=rows)
    >>> state, _ = hook.update(hook.init, event)
    >>> _ = hook.update(state, sf.Event(2, None, {}, None, kind="epoch", epoch=0))
    0 {'eval_loss': 4.0, 'train_loss': 1.5}
    """
    read_function("callback", function, "a function (trainer, epoch, metrics)")

    def update(state: Means, event: Event) -> tuple[Means, None]:
        if event.kind != "epoch" or event.epoch is None:
            return add_event(state, event), None
        metrics = {name.replace("/", "_"): value for name, value in epoch_means(state).items()}
        function(trainer, event.epoch, metrics)
        return NO_MEANS, None

    name = "callback" if name is None else name
    return Hook(NO_MEANS, update, name, ("epoch",), provides=(), returns=())
