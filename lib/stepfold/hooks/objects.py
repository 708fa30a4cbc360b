"""Objects that are called with events, as hooks: adapters for what has a mutable state."""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from stepfold.loop.events import Event, GoBack, Nonfinite, Replace, Returned, Reweight, Stop
from stepfold.loop.hook import (
    NO_STATE,
    Hook,
    Sink,
    call_optional,
    hook_name,
    read_hook,
    warn_of_other,
)


class BaseHook:
    """Defaults for objects that are called with events; to inherit is optional.

    `fit` makes a `Hook` of an object by `from_object`. `get_state` and `set_state` get and set its
    state. The other methods have effects, as those of a `Sink`, and it may have `end_epoch(epoch)`.

    Attributes:
      name, metric, provides: those of a `Hook`.
      can_stop, goes_back, replaces_state: whether it may return a reason to stop, a `GoBack`, or a
        `Replace` or `Reweight`, as `returns` of a `Hook` says.
      needs_exact_state: `exact` of a `Hook`.
      replaces_nonfinite_stop: whether `fit` leaves out its own `on_nonfinite`.
      shows_progress, writes_metrics: those of a `Sink`.
      run_state: the names of attributes that are its state, with JSON values.
      state_key: the names of attributes that must be unchanged for a state to be restored.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> class BestLoss(sf.hooks.BaseHook):
    ...     provides, run_state = ["best/"], ["best"]
    ...     def reset(self, step):
    ...         self.best = float("inf")
    ...     def __call__(self, event):
    ...         self.best = min(self.best, event.metrics["train/loss"])
    ...         return {"best/loss": self.best}
    >>> step = sf.make_train_step(lambda p, x, key: sf.mean(p * x), tx := optax.sgd(0.0))
    >>> state = sf.init_state(jnp.array(1.0), tx, jax.random.key(0))
    >>> batches = [np.full(4, x, np.float32) for x in (3, 1, 2)]
    >>> sf.fit(step, state, batches, hooks=BestLoss(), log_every=1).history["best/loss"]
    [3.0, 1.0, 1.0]
    """

    name: str | None = None
    metric: str | None = None
    provides: Sequence[str] | None = ()
    can_stop: bool = False
    goes_back: bool = False
    replaces_state: bool = False
    needs_exact_state: bool = False
    replaces_nonfinite_stop: bool = False
    shows_progress: bool = False
    writes_metrics: bool = False
    run_state: Sequence[str] = ()
    state_key: Sequence[str] = ()

    def __call__(self, event: Event) -> Returned:
        raise NotImplementedError

    def reset(self, step: int) -> None:
        """Initialize all that belongs to one run, which begins after `step`."""

    def open(self, step: int, total: int | None) -> None:  # noqa: ARG002
        """Prepare for a run that begins after `step`; `set_state` is called after it."""
        self.reset(step)

    def get_state(self) -> Any:
        """Return its state: what JSON can hold, with numpy arrays in it; None if it has none.

        It is called after each event, so large arrays are better kept by the batches.
        """
        names = (*self.state_key, *self.run_state)
        return {name.lstrip("_"): copy(getattr(self, name)) for name in names} or None

    def set_state(self, state: Any) -> None:
        """Continue from what `get_state` has returned."""
        names = (name.lstrip("_") for name in (*self.state_key, *self.run_state))
        if not has_state_of(self, state, *names):
            return
        if all(state[name.lstrip("_")] == getattr(self, name) for name in self.state_key):
            vars(self).update({name: copy(state[name.lstrip("_")]) for name in self.run_state})


def from_object(hook: Any, name: str | None = None) -> Hook:
    """Make a `Hook` of an object that is called with events, such as one with a mutable state.

    Its state is what `get_state` returns after each event. `set_state` is called when the run
    continues from another state: after a resume, or if it goes back. Its other methods have effects
    like those of a `Sink`; `fit` calls them too.

    Args:
      hook: a callable of an event, with any of the attributes and methods of `BaseHook`.
      name: the key of its state in a checkpoint; by default its attribute `name`, or its function
        or class and the `metric` that it watches.

    >>> class Count:
    ...     n = 0
    ...     def __call__(self, event):
    ...         self.n += 1
    ...     def get_state(self):
    ...         return self.n
    ...     def set_state(self, state):
    ...         self.n = state
    >>> import stepfold as sf
    >>> hook, event = sf.hooks.from_object(Count()), sf.Event(10, None, {}, None)
    >>> hook.update(4, event), hook.name
    ((5, None), 'Count')
    """
    last: list[Any] = [NO_STATE]
    has_state = callable(getattr(hook, "get_state", None))

    def update(state: Any, event: Event) -> tuple[Any, Returned]:
        is_opened = event.kind == "start"  # then it may have been reset
        if state is not NO_STATE and (is_opened or state is not last[0]):
            call_optional(hook, "set_state", state)
        returned = None
        if is_opened:
            returned = call_optional(hook, "still_stops")
        elif event.kind == "epoch":
            call_optional(hook, "end_epoch", event.epoch)
        else:
            returned = hook(event)
        last[0] = hook.get_state() if has_state else None
        return last[0], returned

    kinds = {
        "start": has_state or hasattr(hook, "still_stops"),
        "epoch": hasattr(hook, "end_epoch"),
    }
    return Hook(
        init=NO_STATE if has_state else None,
        update=update,
        name=hook_key(hook) if name is None else name,
        also=[kind for kind, is_wanted in kinds.items() if is_wanted],
        exact=bool(getattr(hook, "needs_exact_state", False)),
        metric=getattr(hook, "metric", None),
        provides=getattr(hook, "provides", None),
        returns=_declared_returns(hook),
        source=hook,
    )


def _declared_returns(hook: Any) -> Sequence[type] | None:
    """Return the kinds of requests that the attributes of an object declare."""
    names = "can_stop", "goes_back", "replaces_state", "replaces_nonfinite_stop"
    stops, goes_back, replaces, handles = (getattr(hook, name, None) for name in names)
    if not any((goes_back, replaces, handles)) and stops is None:
        return None
    returns: list[type] = [] if stops is False else [Stop]
    returns += [GoBack] if goes_back else []
    returns += [Replace, Reweight] if replaces else []
    return [*returns, *([Nonfinite] if handles else [])]


def as_hook(hook: Any) -> Hook:
    """Return a `Hook` of a function of an event, of an object, or of a `Hook`."""
    return read_hook(hook) or from_object(hook)


class ObjectEffects(Sink):
    """The effects of an object that `from_object` has made a hook of."""

    def __init__(self, source: Any) -> None:
        self.source, self.name = source, f"effects of {hook_key(source)}"
        self.shows_progress = bool(getattr(source, "shows_progress", False))
        self.writes_metrics = bool(getattr(source, "writes_metrics", False))

    def open(self, step: int, total: int | None, seen: int) -> None:
        call_optional(self.source, "open", step, total)
        if seen < step:
            call_optional(self.source, "rewind", seen)

    def write_config(self, config: Mapping[str, Any]) -> None:
        call_optional(self.source, "write_config", config)

    def end(self, state: Any) -> Any:
        call_optional(self.source, "end_run")
        return state

    def flush(self) -> None:
        call_optional(self.source, "flush")

    def close(self) -> None:
        call_optional(self.source, "close")


def hook_key(hook: Any) -> str:
    """Return the key of an object's state in a checkpoint.

    It is its `name` if it has one, and otherwise its function or class and its `metric`. It does
    not depend on the other hooks.
    """
    if isinstance(name := getattr(hook, "name", None), str):
        return name
    watched = getattr(hook, "metric", None)
    return f"{hook_name(hook)} {watched}" if isinstance(watched, str) else hook_name(hook)


def has_state_of(hook: Any, state: Any, *names: str) -> bool:
    """Whether a saved state has these names; if not, warn that it is of another hook."""
    if isinstance(state, Mapping) and state.keys() >= {*names}:
        return True
    warn_of_other(hook_key(hook))
    return False
