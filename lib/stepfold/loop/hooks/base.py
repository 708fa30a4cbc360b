"""Events, reasons to stop, and the dispatch of hooks."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.core.state import step_of
from stepfold.core.validation import as_integer, read_integer
from stepfold.errors import TreeMismatchError, refuse, warn
from stepfold.loop.metrics import metric_values


class Stop(NamedTuple):
    """Why a run stops: `kind` is a short name for programs, `message` a sentence for people.

    A string that a hook returns is short for `Stop("hook", string)`. The other kinds are
    `completed` (all steps are done), `exhausted` (the batches ended), `already_completed`,
    `nonfinite`, `early_stop`, `spike`, `corrupt`, `time_limit`, `signal` and `error`.

    >>> import stepfold as sf
    >>> str(sf.Stop("plateau", "the loss is flat"))
    'the loss is flat'
    """

    kind: str
    message: str

    def __str__(self) -> str:
        return self.message


class GoBack(NamedTuple):
    """A request of a hook: restore an earlier checkpoint, skip some batches, and continue.

    The run then has the bits and the history of one that has skipped these batches from the start.
    It needs `checkpoints`, and batches with `without`, such as those of `sf.batches`. Later
    checkpoints are deleted, writers with `resume` drop the metrics of later steps, and hooks
    continue as after a resume. The skipped batches are noted next to the checkpoints, so that a
    resume skips them too, in `run.json` and in the report. With several processes, all go back.

    Attributes:
      skip: the steps whose batches to skip, a half-open pair (first, stop) of numbers as in
        `Event.step`; or a number n, for the last n steps up to the event.
      to: the latest step to go back to; None for the newest checkpoint before those steps.
      why: a sentence for people.
      limit: how often a run goes back before it stops with the reason instead.

    >>> import stepfold as sf
    >>> def hook(event):
    ...     if event.metrics.get("eval/loss", 0.0) > 10:
    ...         return sf.GoBack(skip=100, why=f"eval/loss is too high at step {event.step}")
    >>> hook(sf.Event(1000, None, {"eval/loss": 12.0}, state=None)).skip
    100
    """

    to: int | None = None
    skip: int | tuple[int, int] = 1
    why: str = "a hook let the run go back"
    limit: int = 3


class Replace(NamedTuple):
    """A request of a hook: continue with another state, and say why.

    For what is decided between two steps: reset dead units, prune weights, reduce a rate of
    `optax.inject_hyperparams` when an evaluation does not improve. The new state has the structure,
    shapes and dtypes of `event.state`, and its step. Later hooks see it. Checkpoints hold it, so a
    resumed run has the same bits. `run.json` notes the step and the reason.

    After an evaluation the state is exact. At a log point it may be of a later step, so the hook
    needs `needs_exact_state = True` there. With several processes, the hook needs
    `replaces_state = True`, and all processes have to return the same. The last evaluation of a run
    that stops early comes after its state is saved, and replaces nothing.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    >>> def hook(event):
    ...     if event.kind == "eval" and event.metrics["eval/loss"] > 2:
    ...         opt_state = event.state.opt_state
    ...         rates = {"learning_rate": 0.5 * opt_state.hyperparams["learning_rate"]}
    ...         opt_state = opt_state._replace(hyperparams={**opt_state.hyperparams, **rates})
    ...         return sf.Replace(event.state._replace(opt_state=opt_state), "eval/loss is high")
    >>> state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    >>> event = sf.Event(100, None, {"eval/loss": 3.0}, state, kind="eval")
    >>> float(hook(event).state.opt_state.hyperparams["learning_rate"])
    0.05000000074505806
    """

    state: Any
    why: str


class Reweight(NamedTuple):
    """A request of a hook: change the weights of the mixture that the batches are made of.

    The batches have to be those of `sf.batches(sf.mix(…), …)`, prefetched or not. After an
    evaluation, the next batch is the first with the new weights. At a log point it is later,
    because metrics are read while later steps run: at the next log point, evaluation, save or end
    of the run, or 10 or 16 batches later. It does not depend on `steps_per_call`, nor on where an
    interrupted run resumes. The change is part of the position of the batches. So a resumed run has
    it, and one that goes back to a checkpoint before it does not. `run.json` notes the step and the
    reason.

    With several processes, the hook needs `replaces_state = True`, as for a `Replace`, and all
    processes have to return the same.

    Attributes:
      weights: the weights of all sources, by name or in their order; 0 leaves out a source.
      why: a sentence for people.

    >>> import stepfold as sf
    >>> def hook(event):
    ...     if event.metrics.get("train/loss/code", 9.0) < 1:
    ...         return sf.Reweight({"web": 3, "code": 1}, "the loss of code is low")
    >>> hook(sf.Event(100, None, {"train/loss/code": 0.5}, state=None)).weights
    {'web': 3, 'code': 1}
    """

    weights: Any
    why: str


class Event(NamedTuple):
    """What a hook sees at a log point and after an evaluation.

    Attributes:
      step, total: the number of steps done, and at the end of the run, or None if unknown.
      metrics: numbers by name: `train/loss` over the steps since the last log point, `eval/loss`.
        A hook cannot change them; it returns more numbers, under other names.
      state: the state. At a log point it may be up to 19 steps ahead, because metrics are read
        while later steps run; a hook with `needs_exact_state = True` gets the state of `step`.
        Its containers are the event's own, so that writing into them does not change the training;
        return a `Replace` for that.
      per_step: the train metrics of each step since the last log point; empty for an evaluation.
      batch: the last batch that was pulled, as the step got it; None before the first one.
      data_wait_seconds: the seconds spent waiting for batches since `fit` was called, up to `step`.
      hook_seconds: those spent in hooks, measured for hooks with `needs_hook_seconds = True`.
      weights: the weights of `per_step`; 0 for a skipped step, whose value is NaN.
      time: when the step was done, on the clock of `time.perf_counter`, or None.
      kind: `"train"`, or the name of the evaluation.
      is_late: whether it is an evaluation of an earlier step, which another process has made. The
        state is then that of the step at which its result arrived.

    >>> import stepfold as sf
    >>> sf.Event(100, None, {"eval/loss": 12.0}, state=None, kind="eval")
    Event('eval', step=100, total=None, metrics={eval/loss: 12})
    """

    step: int
    total: int | None
    metrics: Mapping[str, float]
    state: Any
    per_step: Mapping[str, np.ndarray] = {}
    batch: Any = None
    data_wait_seconds: float = 0.0
    weights: Mapping[str, np.ndarray] = {}
    time: float | None = None
    kind: str = "train"
    hook_seconds: float = 0.0
    is_late: bool = False

    @property
    def is_train(self) -> bool:
        return self.kind == "train"

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name}: {value:.4g}" for name, value in self.metrics.items())
        return f"Event({self.kind!r}, step={self.step}, total={self.total}, metrics={{{metrics}}})"


class EventMetrics(dict[str, float]):
    """The metrics of an event, which hooks, history and files share; a copy is a plain dict."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        advice = "return {name: number} from the hook to add numbers, or change dict(event.metrics)"
        refuse("event.metrics", "the numbers that were measured", "a change of them", advice)

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


Returned = str | Stop | GoBack | Replace | Reweight | Mapping[str, Any] | None
"""What a hook may return: a reason to stop, a request, or numbers by name."""

Hook = Callable[[Event], Returned]
"""A function that may also have attributes of `BaseHook`."""


class BaseHook:
    """Defaults for hooks with a state, or that declare what they need; to inherit is optional.

    Any callable with some of these attributes and methods is a hook too. A hook may also have a
    method `end_epoch(epoch)`. Each run calls `reset`, unless `set_state` was called before.

    Attributes:
      name: the key of its state, for two hooks of a class with one `metric`.
      metric: the metric it watches; `fit` refuses a name that nothing measures.
      provides: prefixes of the names of the numbers it returns; None if unknown. A hook that
        provides none is called after those that may, so it sees all numbers.
      can_stop: whether it may return a reason to stop.
      goes_back: whether it returns `GoBack`; `fit` then checks that the run can go back.
      replaces_state: whether it returns `Replace` or `Reweight`; needed with several processes.
      needs_exact_state: whether `event.state` has to be that of `event.step`. Each log point then
        waits for the device before the next step is dispatched.
      needs_hook_seconds: whether it reads `event.hook_seconds`.
      replaces_nonfinite_stop: whether `fit` leaves out its own `stop_on_nonfinite`.
      shows_progress: whether it shows the progress of a run, so that `fit` does not.
      writes_metrics: whether it writes `metrics.jsonl`, so that `fit` does not.
      run_state: the names of attributes that a checkpoint keeps, with JSON values.
      state_key: the names of attributes that must be unchanged for a state to be restored.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf
    >>> class BestLoss(sf.BaseHook):
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
    needs_hook_seconds: bool = False
    replaces_nonfinite_stop: bool = False
    shows_progress: bool = False
    writes_metrics: bool = False
    run_state: Sequence[str] = ()
    state_key: Sequence[str] = ()
    _stays = False

    def __call__(self, event: Event) -> Returned:
        raise NotImplementedError

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the config of a run, values by path; called once, after `open`."""

    def reset(self, step: int) -> None:
        """Initialize all that belongs to one run, which begins after `step`."""

    def open(self, step: int, total: int | None) -> None:  # noqa: ARG002
        """Prepare for a run that begins after `step`; called after `set_state`."""
        if not self._stays:
            self.reset(step)
        self._stays = False

    def rewind(self, step: int) -> None:
        """Drop what was written for events after `step`, since they come again.

        Called after `open` if a run resumes from a checkpoint with metrics that no hook has seen:
        those of an open interval, or of a log point before the checkpoint.
        """

    def still_stops(self) -> Stop | None:
        """Return why its state stops the run before any event, or None; called after `open`.

        A run that the hook has stopped then does not train until the next event when it is resumed.
        """
        return None

    def end_run(self) -> None:
        """Act on the last train metrics of a run that is not interrupted, before it evaluates."""

    def flush(self) -> None:
        """Make what was written durable; called in a thread before a checkpoint commits."""

    def close(self) -> None:
        """Release resources; called once, however the run ends."""
        self._stays = False

    def get_state(self) -> Any:
        """Return what a checkpoint has to keep, JSON with numpy arrays in it, or None.

        It is called at every event, so large arrays are better kept by the batches.
        """
        names = (*self.state_key, *self.run_state)
        return {name.lstrip("_"): copy(getattr(self, name)) for name in names} or None

    def set_state(self, state: Any) -> None:
        """Continue from what `get_state` returned; called only when a run is resumed."""
        names = (name.lstrip("_") for name in (*self.state_key, *self.run_state))
        if not has_state_of(self, state, *names):
            return
        if all(state[name.lstrip("_")] == getattr(self, name) for name in self.state_key):
            self.reset(0)
            vars(self).update({name: copy(state[name.lstrip("_")]) for name in self.run_state})
            self._stays = True


def may_stop(hook: Hook) -> bool:
    """Whether a hook may stop a run; True if it does not declare `can_stop`."""
    return bool(getattr(hook, "can_stop", True))


def hook_name(hook: Hook) -> str:
    """Name a hook by its function or class."""
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def hook_key(hook: Hook) -> str:
    """Return the key of a hook's state in a checkpoint.

    It is the hook's `name` if it has one, and otherwise its function or class and its `metric`. It
    does not depend on the other hooks.
    """
    if isinstance(name := getattr(hook, "name", None), str):
        return name
    watched = getattr(hook, "metric", None)
    return f"{hook_name(hook)} {watched}" if isinstance(watched, str) else hook_name(hook)


def has_state_of(hook: Hook, state: Any, *names: str) -> bool:
    """Whether a saved state has these names; if not, warn that it is of another hook."""
    if isinstance(state, Mapping) and state.keys() >= {*names}:
        return True
    warn(
        f"hooks: expected the state of {hook_name(hook)} {hook_key(hook)}, got that of another "
        "hook of this name in the checkpoint; it starts afresh: give it another name"
    )
    return False


def call_optional(owner: Any, method: str, *args: Any) -> Any:
    """Call a method of a hook or writer, if it has one of that name."""
    return getattr(owner, method)(*args) if hasattr(owner, method) else None


class Stopwatch:
    """The seconds that the loop spends in its parts, by name.

    The rest of its time, until `ended_at`, goes into steps: dispatching them and waiting for
    devices.
    """

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)
        self.counts = defaultdict[str, int](int)  # how often a part was measured
        self.ended_at: float | None = None  # on the clock of `time.perf_counter`

    def add(self, part: str, start: float) -> float:
        """Add the time since `start`, and return the present one."""
        now = time.perf_counter()
        self.seconds[part] += now - start
        self.counts[part] += 1
        return now

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, start)

    def end(self) -> None:
        """Note the end of the loop; waiting for the last save and closing hooks follow."""
        self.ended_at = time.perf_counter()


def find_save_interval(saving: float, saves: int, rest: float, steps: int) -> int:
    """Return how many steps apart saves would take 5 % of the time.

    So far, `saves` took `saving` seconds, and `steps` the `rest` of the time.
    """
    return math.ceil(19 * saving / saves * steps / max(rest, 1e-6))


class HookDispatcher:
    """Call hooks that may return numbers, then those that declare that they return none.

    A writer declares this by `provides = ()`, so it sees all numbers wherever it is in the list.
    `opened` is called once, after the hooks are opened, and `check` with each event that all hooks
    have seen.
    """

    def __init__(
        self,
        hooks: Sequence[Hook],
        stopwatch: Stopwatch | None = None,
        *,
        opened: Callable[[], None] | None = None,
        check: Callable[[Event], None] | None = None,
    ) -> None:
        self.hooks, self.stopwatch = hooks, stopwatch or Stopwatch()
        self._opened, self._check = opened, check
        self._keys = [hook_key(hook) for hook in hooks]
        self._parts = [f"hook {key.rpartition('.<locals>.')[2]}" for key in self._keys]
        provides_none = [getattr(hook, "provides", None) in ((), []) for hook in hooks]
        self._order = sorted(range(len(hooks)), key=provides_none.__getitem__)
        self.wants_epochs = any(hasattr(hook, "end_epoch") for hook in hooks)
        self.needs_exact_state = any(getattr(h, "needs_exact_state", False) for h in hooks)
        self.replaces_state = any(getattr(h, "replaces_state", False) for h in hooks)
        self._is_timed = any(getattr(h, "needs_hook_seconds", False) for h in hooks)
        self.seconds = 0.0  # spent in events and ends of epochs, if timed
        self._measured = set[str]()  # the names of metrics
        # By the name of a number: the last event and hook that returned it, and its value.
        self._returned: dict[str, tuple[int, int, float]] = {}

    def open(self, step: int, total: int | None, last_event: int | None = None) -> None:
        """Open the hooks of a run that begins after `step`; `last_event` is the last they saw."""
        for hook in self.hooks:
            call_optional(hook, "open", step, total)
            if last_event is not None and last_event < step:
                call_optional(hook, "rewind", last_event)
        opened, self._opened = self._opened, None  # once, even if the run goes back
        if opened is not None:
            opened()

    def still_stops(self) -> Stop | None:
        """Return why the state of a hook stops the run before any event, or None."""
        reasons = (call_optional(hook, "still_stops") for hook in self.hooks)
        return next((reason for reason in reasons if reason is not None), None)

    def flush(self) -> None:
        for hook in self.hooks:
            call_optional(hook, "flush")

    def end_run(self) -> None:
        for hook in self.hooks:
            call_optional(hook, "end_run")

    def end_epoch(self, epoch: int) -> None:
        start = time.perf_counter()
        for hook, part in zip(self.hooks, self._parts, strict=True):
            with self.stopwatch.measure(part):
                call_optional(hook, "end_epoch", epoch)
        self._add_seconds(start)

    def dispatch(self, event: Event) -> tuple[Event, list[Any]]:
        """Return the event with the numbers of all hooks, and their requests, in order."""
        requests: dict[int, Stop | GoBack | Replace | Reweight] = {}
        began = start = time.perf_counter()
        self._measured.update(event.metrics)
        for name in self._returned.keys() & event.metrics.keys():
            self._refuse_measured(self._returned[name][1], name)
        event = event._replace(metrics=EventMetrics(event.metrics))
        for index in self._order:
            try:  # cheaper than `measure`, since there may be an event for each step
                returned = self.hooks[index](event)
            finally:
                start = self.stopwatch.add(self._parts[index], start)
            if returned is None:
                continue
            if isinstance(returned, str):
                returned = Stop("hook", returned)
            if isinstance(returned, Stop):
                if returned.message:
                    requests[index] = returned
            elif isinstance(returned, GoBack):
                requests[index] = _check_request(returned, event.step, self.hooks[index])
            elif isinstance(returned, Replace):
                replacement = _check_replacement(returned, event, self.hooks[index])
                requests[index], event = replacement, event._replace(state=replacement.state)
            elif isinstance(returned, Reweight):
                requests[index] = returned
            elif isinstance(returned, Mapping):
                event = event._replace(metrics=self._add_numbers(event, returned, index))
            else:
                expected = "a hook to return None, a reason to stop, a request, or numbers by name"
                refuse(hook_name(self.hooks[index]), expected, tree.describe_value(returned))
        if self._check is not None:
            self._check(event)
        self._add_seconds(began)
        return event, [requests[index] for index in sorted(requests)]

    def _add_numbers(self, event: Event, returned: Mapping[str, Any], index: int) -> EventMetrics:
        """Add what a hook returned to the metrics of an event, under new names."""
        numbers = metric_values(returned)
        for name, value in numbers.items():
            if name in self._measured:
                self._refuse_measured(index, name)
            if name == "step":
                expected = "names other than 'step', the name of the step in files"
                refuse(hook_name(self.hooks[index]), expected, "'step'", "rename the number")
            step, other, before = self._returned.get(name, (event.step, index, value))
            is_same = value == before or (math.isnan(value) and math.isnan(before))
            if step == event.step and other != index and not is_same:
                names = " and ".join(hook_name(self.hooks[i]) for i in (other, index))
                got = f"{before:g} and {value:g} at step {step}"
                refuse(f"hooks: {names}: {name}", "one number", got, "rename one of them")
            self._returned[name] = event.step, index, value
        return EventMetrics({**event.metrics, **numbers})

    def _refuse_measured(self, index: int, name: str) -> None:
        expected = "names of numbers that no step and no evaluation measures"
        refuse(hook_name(self.hooks[index]), expected, repr(name), "rename the number")

    def _add_seconds(self, start: float) -> None:
        if self._is_timed:
            self.seconds += time.perf_counter() - start

    def get_state(self) -> list[Any]:
        """Return the states of hooks by their keys."""
        pairs = zip(self._keys, self.hooks, strict=True)
        states = [[key, hook.get_state()] for key, hook in pairs if hasattr(hook, "get_state")]
        return [state for state in states if state[1] is not None]

    def set_state(self, state: Sequence[Any]) -> None:
        """Restore the state of hooks by their keys; those of the same key match in order."""
        # The default line of progress may have given way to another hook.
        known = {*self._keys, "progress"}
        missing = dict.fromkeys(key for key, _ in state if key not in known)
        if missing:
            warn(
                f"hooks: expected {', '.join(missing)}, whose state is in the checkpoint, got no "
                "such hook, and the state is dropped; a hook with another name or metric, or in a "
                "wrapper, starts afresh"
            )
        for key in dict.fromkeys(key for key, _ in state):
            saved = [state for other, state in state if other == key]
            pairs = zip(self._keys, self.hooks, strict=True)
            hooks = [hook for own, hook in pairs if own == key]
            if hooks and len(hooks) != len(saved):
                warn(
                    f"hooks: expected {len(saved)} {key}, as in the checkpoint, got {len(hooks)}; "
                    "they start afresh: give each a name=…",
                )
                continue
            for hook, each in zip(hooks, saved, strict=bool(hooks)):
                call_optional(hook, "set_state", each)


def _check_request(request: GoBack, step: int, hook: Hook) -> GoBack:
    """Check a request to go back, convert `skip` to a pair of steps, and fill in `to`."""
    name, (to, skip, why, limit) = hook_name(hook), request
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
    name = hook_name(hook)
    if event.is_train and not getattr(hook, "needs_exact_state", False):
        expected = "needs_exact_state = True on a hook that returns Replace at a log point"
        refuse(name, expected, "none", "set it, or return Replace after an evaluation")
    lines = tree.diff(event.state, request.state, "state")
    if not lines and step_of(request.state) != step_of(event.state):
        lines = [f"state/step: expected {step_of(event.state)}, got {step_of(request.state)}"]
    if lines:
        raise TreeMismatchError(
            "\n  ".join([f"{name}: Replace(state): expected a state like event.state, got", *lines])
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
