"""Hooks and sinks: what they are, and how a run shows them events and checks what they return."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.core.state import step_of
from stepfold.core.validation import as_integer, read_integer
from stepfold.errors import TreeMismatchError, refuse, warn
from stepfold.loop.events import (
    Event,
    EventMetrics,
    GoBack,
    HookRequest,
    Replace,
    Returned,
    Reweight,
    Stop,
)
from stepfold.loop.metrics import metric_values
from stepfold.moved import current_hook_name

EventHook = Callable[[Event], Returned]
"""A function of an event, which is short for a `Hook` without a state."""


class Hook(NamedTuple):
    """A pure pair of a first state and an update, as an optimizer of optax is.

    The state of a hook is part of the run: a checkpoint has it, and a run that resumes or goes back
    continues with that of the checkpoint. So `update` must not keep state anywhere else. A plain
    function of an event is a hook without a state. `sf.hooks.from_object` makes one of an object.

    Attributes:
      init: the first state: what JSON can hold, with numpy arrays in it. In a dict, the values of
        keys that begin with an underscore stay in memory: no checkpoint has them, and they survive
        when a run goes back. Drop what is obsolete at the event `"start"`.
      update: a function `(state, event)` that returns the next state and a `Returned`: None, a
        reason to stop, a request, or numbers by name.
      name: the key of the state in a checkpoint; by default the name of the function.
      also: further kinds of events to see, of `"start"` and `"epoch"`. A hook that stops a run
        because of its state sees `"start"`, so that a resumed run does not train until the next
        event.
      exact: whether `event.state` has to be that of `event.step` at a log point. Each log point
        then waits for the device before the next step is dispatched.
      metric: the metric that it watches; `fit` refuses a name that nothing measures.
      provides: prefixes of the names of the numbers that it returns; None if unknown. A hook that
        provides none is called after those that may, so it sees all numbers.
      returns: the kinds of requests that it may return, such as `(Stop, GoBack)`; None if unknown.
        With several processes, `Replace` and `Reweight` have to be listed. A hook with `Nonfinite`
        replaces the one by which `fit` stops at a NaN.
      only: the kinds of events with metrics to see, such as `("eval",)`; None for all. A kind that
        a run does not have is refused.
      source: the object that it was made of.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> def update(best, event):
    ...     best = min(best, event.metrics["train/loss"])
    ...     return best, {"best/loss": best}
    >>> best_loss = sf.Hook(float("inf"), update, name="best_loss")
    >>> step = sf.make_train_step(lambda p, x, key: sf.mean(p * x), tx := optax.sgd(0.0))
    >>> state = sf.init_state(jnp.array(1.0), tx, jax.random.key(0))
    >>> batches = [np.full(4, x, np.float32) for x in (3, 1, 2)]
    >>> sf.fit(step, state, batches, hooks=best_loss, log_every=1).history["best/loss"]
    [3.0, 1.0, 1.0]
    """

    init: Any
    update: Callable[[Any, Event], tuple[Any, Returned]]
    name: str = ""
    also: Sequence[str] = ()
    exact: bool = False
    metric: str | None = None
    provides: Sequence[str] | None = None
    returns: Sequence[type] | None = None
    only: Sequence[str] | None = None
    source: Any = None

    def __repr__(self) -> str:
        return f"Hook({self.name!r})"

    def may_return(self, *kinds: type) -> bool:
        """Whether it may return a request of one of the kinds; True if that is unknown."""
        return self.returns is None or any(kind in self.returns for kind in kinds)

    def declares(self, *kinds: type) -> bool:
        """Whether it says that it returns a request of one of the kinds."""
        return any(kind in (self.returns or ()) for kind in kinds)

    @property
    def label(self) -> str:
        """The name of its function or class, for messages."""
        if self.source is not None:
            return hook_name(self.source)
        return self.name.removesuffix(f" {self.metric}")


class Sink:
    """Base class of what has effects and changes nothing of a run: writers, progress, files.

    Sinks get each event after all hooks, with their numbers, in order. The state of a sink is part
    of the run, like that of a `Hook`. With several processes, each calls its own sinks: check
    `jax.process_index()` for what only one of them should do. An exception ends the run.

    Attributes:
      name: the key of its state in a checkpoint; by default the name of the class.
      init: its first state.
      shows_progress: whether it shows the progress of a run, so that `fit` does not.
      writes_metrics: whether it writes `metrics.jsonl`, so that `fit` does not.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> class Count(sf.Sink):
    ...     init = 0
    ...     def write(self, count, event):
    ...         print(f"event {count + 1}: train/loss {event.metrics['train/loss']:g}")
    ...         return count + 1
    >>> step = sf.make_train_step(lambda p, x, key: sf.mean(p * x), tx := optax.sgd(0.0))
    >>> state = sf.init_state(jnp.array(1.0), tx, jax.random.key(0))
    >>> batches = [np.full(4, x, np.float32) for x in (3, 1)]
    >>> result = sf.fit(step, state, batches, hooks=Count(), log_every=1)
    event 1: train/loss 3
    event 2: train/loss 1
    >>> result.hooks["Count"]
    2
    """

    name: str = ""
    init: Any = None
    shows_progress: bool = False
    writes_metrics: bool = False

    def open(self, step: int, total: int | None, seen: int) -> None:
        """Prepare for a run that begins after `step`; called again if it goes back.

        `seen` is the step of the last event that the run keeps. Drop everything written for later
        steps: their events come again.
        """

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the config of a run, values by path; called once, after `open`."""

    def write(self, state: Any, event: Event) -> Any:  # noqa: ARG002
        """Write an event, and return the next state."""
        return state

    def end(self, state: Any) -> Any:
        """Act on the last train metrics of a run that is not interrupted, before it evaluates."""
        return state

    def flush(self) -> None:
        """Make what was written durable; called in a thread before a checkpoint commits."""

    def close(self) -> None:
        """Release resources; called once, however the run ends."""


AnyHook = Hook | Sink | EventHook
"""What `fit` takes as a hook; also parts of a run."""

EVENTS_WITHOUT_METRICS = "start", "epoch"  # kinds of events that hooks have to ask for


class _NoState:
    def __deepcopy__(self, _: Any) -> "_NoState":
        return self


NO_STATE = _NoState()
"""The first state of an object, before it is called. Checkpoints keep later ones as they are."""


def read_hook(hook: Any) -> Hook | None:
    """Return the `Hook` that a `Hook` or a plain function of an event means, with a name.

    The result is None for objects and for functions with attributes: `stepfold.hooks.objects`
    adapts those.
    """
    if isinstance(hook, Hook):
        if isinstance(hook.also, str) or not {*hook.also} <= {*EVENTS_WITHOUT_METRICS}:
            refuse("Hook: also", "some of ('start', 'epoch')", repr(hook.also))
        return hook if hook.name else hook._replace(name=hook_name(hook.update))
    if isinstance(hook, FunctionType) and not vars(hook):
        return Hook(None, lambda _, event: (None, hook(event)), hook_name(hook))
    return None


def hook_name(hook: Any) -> str:
    """Name a hook by its function or class."""
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def call_optional(owner: Any, method: str, *args: Any) -> Any:
    """Call a method of an object, if it has one of that name."""
    return getattr(owner, method)(*args) if hasattr(owner, method) else None


class Stopwatch:
    """The seconds that the loop spends outside of steps, by activity.

    The rest of the time, until `ended_at`, goes into dispatching steps and waiting for devices.
    """

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)
        self.counts = defaultdict[str, int](int)  # of measurements
        self.ended_at: float | None = None  # on the clock of `time.perf_counter`

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start
            self.counts[part] += 1

    def end(self) -> None:
        """Note the end of the loop; waiting for the last save and closing hooks follow."""
        self.ended_at = time.perf_counter()


States = tuple[Any, ...]


class Hooks:
    """The hooks and sinks of a run: show them events, and check what hooks return.

    Hooks that may return numbers come first, then those that declare that they return none, and
    then the sinks.

    Attributes:
      seconds: the time spent in them so far.
      wants_epochs, exact, replaces: what one of the hooks declares.
    """

    def __init__(
        self,
        hooks: Sequence[Hook],
        sinks: Sequence[Sink] = (),
        stopwatch: Stopwatch | None = None,
        check: Callable[[Event], None] | None = None,
    ) -> None:
        """`check` is called with each event that all of them have seen."""
        self.hooks, self.sinks, self.stopwatch = hooks, sinks, stopwatch or Stopwatch()
        self._check = check
        self._inits = [*(hook.init for hook in hooks), *(sink.init for sink in sinks)]
        self.names = [*(hook.name for hook in hooks), *map(sink_name, sinks)]
        self._parts = [f"hook {name.rpartition('.<locals>.')[2]}" for name in self.names]
        provides_none = [hook.provides is not None and not hook.provides for hook in hooks]
        self._order = sorted(range(len(hooks)), key=provides_none.__getitem__)
        numbered = enumerate(sinks, len(hooks))
        self._writers = [pair for pair in numbered if type(pair[1]).write is not Sink.write]
        self.wants_epochs = any("epoch" in hook.also for hook in hooks)
        self.exact = any(hook.exact for hook in hooks)
        self.replaces = any(hook.declares(Replace, Reweight) for hook in hooks)
        self.seconds = 0.0
        self._measured = set[str]()  # the names of metrics
        # By the name of a number: the last event and hook that returned it, and its value.
        self._returned: dict[str, tuple[int, int, float]] = {}

    @property
    def init(self) -> States:
        """Copies of the first states of the hooks, and of the sinks."""
        return tuple(x if x is NO_STATE else deepcopy(x) for x in self._inits)

    # Sinks

    def open(self, step: int, total: int | None, seen: int) -> None:
        for sink in self.sinks:
            sink.open(step, total, min(seen, step))

    def write_config(self, config: Mapping[str, Any]) -> None:
        for sink in self.sinks:
            sink.write_config(config)

    def end(self, states: States) -> States:
        """Return the states after the last train metrics of a run that is not interrupted."""
        count, ends = len(self.hooks), [sink.end for sink in self.sinks]
        return (*states[:count], *(end(s) for end, s in zip(ends, states[count:], strict=True)))

    def flush(self) -> None:
        for sink in self.sinks:
            sink.flush()

    # Events

    def update(self, states: States, event: Event) -> tuple[States, Event, list[HookRequest]]:
        """Return the next states, the event with the numbers of all hooks, and their requests."""
        has_metrics, new = event.kind not in EVENTS_WITHOUT_METRICS, [*states]
        requests: dict[int, HookRequest] = {}
        clock, seconds, parts = time.perf_counter, self.stopwatch.seconds, self._parts
        began = start = clock()
        if has_metrics:
            event = self._begin(event)
        index = 0
        try:
            for index in self._order:
                hook = self.hooks[index]
                kinds = hook.only if has_metrics else hook.also
                if kinds is not None and event.kind not in kinds:
                    continue
                pair = hook.update(new[index], event)
                if type(pair) is not tuple or len(pair) != 2:
                    expected = "a pair of the next state and what the hook returns"
                    refuse(f"{hook.label}: update", expected, tree.describe_value(pair))
                new[index], returned = pair
                now = clock()
                seconds[parts[index]] += now - start
                start = now
                if returned is None:
                    continue
                if not has_metrics:
                    _check_without_metrics(returned, event.kind, hook.label)
                if isinstance(returned, Mapping):
                    event = event._replace(metrics=self._add_numbers(event, returned, index))
                elif (request := _check_request(returned, event, hook)) is not None:
                    requests[index] = request
                    if isinstance(request, Replace):
                        event = event._replace(state=request.state)
            for index, sink in self._writers if has_metrics else ():
                new[index] = sink.write(new[index], event)
                now = clock()
                seconds[parts[index]] += now - start
                start = now
        except BaseException:
            seconds[parts[index]] += clock() - start
            raise
        if self._check is not None and has_metrics:
            self._check(event)
        self.seconds += start - began
        return tuple(new), event, [requests[index] for index in sorted(requests)]

    def _begin(self, event: Event) -> Event:
        self._measured.update(event.metrics)
        for name in self._returned.keys() & event.metrics.keys():
            self._refuse_measured(self._returned[name][1], name)
        if isinstance(event.metrics, EventMetrics):
            return event
        return event._replace(metrics=EventMetrics(event.metrics))

    def _add_numbers(self, event: Event, returned: Mapping[str, Any], index: int) -> EventMetrics:
        """Add what a hook returned to the metrics of an event, under new names."""
        numbers = metric_values(returned)
        for name, value in numbers.items():
            if name in self._measured:
                self._refuse_measured(index, name)
            if name == "step":
                expected = "names other than 'step', the name of the step in files"
                refuse(self.hooks[index].label, expected, "'step'", "rename the number")
            step, other, before = self._returned.get(name, (event.step, index, value))
            is_same = value == before or (math.isnan(value) and math.isnan(before))
            if step == event.step and other != index and not is_same:
                names = " and ".join(self.hooks[i].label for i in (other, index))
                got = f"{before:g} and {value:g} at step {step}"
                refuse(f"hooks: {names}: {name}", "one number", got, "rename one of them")
            self._returned[name] = event.step, index, value
        return EventMetrics({**event.metrics, **numbers})

    def _refuse_measured(self, index: int, name: str) -> None:
        expected = "names of numbers that no step and no evaluation measures"
        refuse(self.hooks[index].label, expected, repr(name), "rename the number")

    # Checkpoints

    def to_saved(self, states: States) -> list[Any]:
        """Return what a checkpoint keeps: pairs of a name and a state."""
        saved = []
        for name, state, init in zip(self.names, states, self._inits, strict=True):
            kept = _without_memory(state, init)
            # A hook without a state has none at first either.
            has_none = kept is None and (state is not None or init is None or init is NO_STATE)
            if not has_none and kept is not NO_STATE:
                saved.append([name, kept])
        return saved

    def from_saved(self, saved: Sequence[Any], before: States) -> States:
        """Return the states of a checkpoint, and first ones for those that it does not have.

        States of one name match in order. Entries that only memory has are taken from `before`.
        """
        names = self.names
        saved = [(current_hook_name(name, names), state) for name, state in saved]
        known = {*self.names, "progress"}  # the default one, which the user may have replaced
        missing = dict.fromkeys(name for name, _ in saved if name not in known)
        if missing:
            warn(
                f"hooks: the checkpoint has the state of {', '.join(missing)}, but fit has no such "
                "hook, so the state is dropped; a hook with another name or metric, or in a "
                "wrapper, starts over"
            )
        inits = self._inits
        states = [*inits]
        for name in dict.fromkeys(name for name, _ in saved if name in self.names):
            found = [state for other, state in saved if other == name]
            indices = [index for index, own in enumerate(self.names) if own == name]
            if len(indices) != len(found):
                warn(
                    f"hooks: expected {len(found)} {name}, as in the checkpoint, got "
                    f"{len(indices)}; they start over: give each a name=…"
                )
                continue
            for index, state in zip(indices, found, strict=True):
                states[index] = _checked(name, state, states[index])
        return tuple(map(_with_memory, states, before, inits))


def sink_name(sink: Sink) -> str:
    """Return the key of a sink's state in a checkpoint."""
    return sink.name or type(sink).__qualname__


def _checked(name: str, state: Any, init: Any) -> Any:
    """Return a saved state, or the first state if a key is missing."""
    keys = [key for key in init if not _is_memory(key)] if isinstance(init, dict) else []
    if not keys or state is None or (isinstance(state, dict) and state.keys() >= {*keys}):
        return state
    warn_of_other(name)
    return init


def warn_of_other(name: str) -> None:
    """Warn that a checkpoint has the state of another hook under a name."""
    warn(
        f"hooks: the state of {name} in the checkpoint is that of another hook of this name; "
        f"{name} starts over: give it another name"
    )


def _is_memory(key: Any) -> bool:
    return str(key).startswith("_")


def _has_memory(init: Any) -> bool:
    """Whether a first state, or that of a wrapped hook in it, has entries that stay in memory."""
    is_dict = isinstance(init, dict)
    return is_dict and any(_is_memory(key) or _has_memory(x) for key, x in init.items())


def _without_memory(state: Any, init: Any) -> Any:
    """Return a state without the entries that stay in memory; None if nothing is left.

    The state of an object is returned as it is.
    """
    if not isinstance(state, dict) or init is NO_STATE:
        return state
    inner = {key: x for key, x in init.items() if _has_memory(x)} if isinstance(init, dict) else {}
    kept = {key: x for key, x in state.items() if not _is_memory(key)}
    kept |= {key: _without_memory(kept[key], x) for key, x in inner.items() if key in kept}
    return kept if kept or not state else None


def _with_memory(state: Any, before: Any, init: Any) -> Any:
    """Return a state with the entries of `before` that stay in memory."""
    if not isinstance(state, dict) or not isinstance(before, dict) or init is NO_STATE:
        return state
    inner = {key: x for key, x in init.items() if _has_memory(x)} if isinstance(init, dict) else {}
    known = {key: _with_memory(state.get(key) or x, before.get(key), x) for key, x in inner.items()}
    return {**state, **known, **{key: x for key, x in before.items() if _is_memory(key)}}


def find_save_interval(saving: float, saves: int, rest: float, steps: int) -> int:
    """Return the number of steps between saves with which they take 5 % of the time.

    So far, `saves` took `saving` seconds, and `steps` the `rest` of the time.
    """
    return math.ceil(19 * saving / saves * steps / max(rest, 1e-6))


def _check_without_metrics(returned: Any, kind: str, label: str) -> None:
    """Refuse numbers at an event without metrics, and all but a reason to stop at the start."""
    if kind == "start" and not isinstance(returned, str | Stop):
        refuse(label, "a reason to stop or None at 'start'", tree.describe_value(returned))
    if isinstance(returned, Mapping):
        advice = "return them at an event with metrics"
        refuse(label, f"no numbers at {kind!r}", tree.describe_value(returned), advice)


def _check_request(returned: Any, event: Event, hook: Hook) -> HookRequest | None:
    """Check what a hook has returned, and return a request, or None for an empty reason."""
    if isinstance(returned, str):
        returned = Stop("hook", returned)
    if isinstance(returned, Stop):
        return returned if returned.message else None
    if isinstance(returned, GoBack):
        return _check_go_back(returned, event.step, hook.label)
    if isinstance(returned, Replace):
        return _check_replacement(returned, event, hook)
    if isinstance(returned, Reweight):
        return returned
    expected = "a hook to return None, a reason to stop, a request, or numbers by name"
    refuse(hook.label, expected, tree.describe_value(returned))


def _check_go_back(request: GoBack, step: int, name: str) -> GoBack:
    """Check a request to go back, convert `skip` to a pair of steps, and fill in `to`."""
    to, skip, why, limit = request
    count = as_integer(skip)
    pair: Any = skip if count is None else (step - count + 1, step + 1)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        pair = None, None
    first, stop = map(as_integer, pair)
    if first is None or stop is None or not 0 < first < stop:
        expected = f"a number of steps up to {step}, or a pair (first, stop) of steps from 1"
        refuse(f"{name}: GoBack(skip=…)", expected, repr(skip))
    target = first - 1 if to is None else as_integer(to)
    if target is None or not 0 <= target < first:
        expected = f"a step before {first}, the first whose batch is skipped"
        refuse(f"{name}: GoBack(to=…)", expected, repr(to))
    return GoBack(target, (first, stop), str(why), read_integer("GoBack(limit=…)", limit))


def _check_replacement(request: Replace, event: Event, hook: Hook) -> Replace:
    """Check a new state, and copy its arrays to the devices of the old ones."""
    if event.is_train and not hook.exact:
        expected = "Hook(exact=True), for a hook that returns Replace at a log point"
        advice = "set needs_exact_state = True on a function or an object, or return Replace"
        refuse(hook.label, expected, "none", f"{advice} after an evaluation")
    lines = tree.diff(event.state, request.state, "state")
    if not lines and step_of(request.state) != step_of(event.state):
        lines = [f"state/step: expected {step_of(event.state)}, got {step_of(request.state)}"]
    if lines:
        raise TreeMismatchError(
            "\n  ".join(
                [f"{hook.label}: Replace(state): expected a state like event.state, got", *lines]
            )
        )
    return Replace(jax.tree.map(_copy_like, request.state, event.state), str(request.why))


def _copy_like(new: Any, old: Any) -> Any:
    """Copy a new array, which a step will donate, to the devices of the old one."""
    if new is old or not isinstance(old, jax.Array):
        return new
    if isinstance(new, jax.Array):
        copied: Any = tree.strong(jnp.copy(new))
    else:
        copied = np.array(new, old.dtype)
    return jax.device_put(copied, old.sharding) if old.committed else jnp.asarray(copied)
