"""What hooks see, what they may return, and how `fit` calls them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from difflib import get_close_matches
from typing import Any, NamedTuple

import numpy as np

from stepfold import tree
from stepfold.errors import ConfigError
from stepfold.loop.metrics import metric_values


class Stop(NamedTuple):
    """Why a run stops. `str()` gives the message.

    A hook returns one to stop the run; a string is short for `Stop("hook", string)`. The kinds of
    stepfold's own are `completed` (all steps are done), `exhausted` (the batches ended),
    `already_completed`, `nonfinite`, `early_stop`, `spike`, `time_limit`, `signal` and `error`.

    Attributes:
      kind: a short name for programs.
      message: a sentence for people.

    >>> import stepfold as sf
    >>> reason = sf.Stop("plateau", "the loss is flat")
    >>> reason.kind, str(reason)
    ('plateau', 'the loss is flat')
    """

    kind: str
    message: str

    def __str__(self) -> str:
        return self.message


class Event(NamedTuple):
    """What a hook sees at a log point and after an evaluation.

    Attributes:
      step: the number of steps done.
      total: the step at which the run ends, or None if unknown.
      metrics: numbers by name: `train/loss` over the steps since the last log point, `eval/loss`.
      state: the state. At a log point it may be up to four steps ahead, because metrics are read
        while later steps run; a hook with `needs_exact_state = True` gets the state of `step`.
      per_step: the train metrics of each step since the last log point; empty for an evaluation.
      batch: the last batch.
      data_wait_seconds: the seconds spent waiting for batches since `fit` was called.
      weights: the weights of `per_step`; 0 for a skipped step, whose value is NaN.
      time: when the step was done, on the clock of `time.perf_counter`, or None.
      kind: `"train"`, or the name of the evaluation.

    >>> import stepfold as sf
    >>> def stop_if_high(event):
    ...     if event.kind == "eval" and event.metrics["eval/loss"] > 10:
    ...         return "the loss is above 10"
    >>> event = sf.Event(100, None, {"eval/loss": 12.0}, None, kind="eval")
    >>> stop_if_high(event)
    'the loss is above 10'
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

    @property
    def is_train(self) -> bool:
        """Whether it holds the metrics of train steps rather than of an evaluation."""
        return self.kind == "train"

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name}: {value:.4g}" for name, value in self.metrics.items())
        return f"Event({self.kind!r}, step={self.step}, total={self.total}, metrics={{{metrics}}})"


Hook = Callable[[Event], str | Stop | Mapping[str, Any] | None]
"""A function of an event. It returns nothing, numbers by name to log, or a reason to stop.

It may also have the methods and attributes of `BaseHook`; all of them are optional.
"""


class BaseHook:
    """Defaults for hooks that are classes. Any callable that has some of these is a hook too.

    Attributes:
      metric: the metric it watches. `fit` refuses a name that nothing measures.
      provides: prefixes of the names of the numbers it returns; `()` for none, None if unknown. A
        hook that provides none is called after those that may, so it sees all numbers.
      can_stop: whether it may return a reason to stop.
      needs_exact_state: whether `event.state` has to be that of `event.step`. Each log point then
        waits for the device before the next step is dispatched.
      replaces_nonfinite_stop: whether `fit` should leave out its own `stop_on_nonfinite`.
      writes_metrics: whether it writes `metrics.jsonl` itself, so that `fit` does not.

    A hook with a method `end_epoch(epoch)` is called after each epoch, counted from 0.
    """

    metric: str | None = None
    provides: Sequence[str] | None = ()
    can_stop: bool = False
    needs_exact_state: bool = False
    replaces_nonfinite_stop: bool = False
    writes_metrics: bool = False

    def __call__(self, event: Event) -> str | Stop | Mapping[str, Any] | None:
        """See an event."""
        raise NotImplementedError

    def open(self, step: int, total: int | None) -> None:
        """Prepare for a run that begins after `step`; called after `set_state`."""

    def flush(self) -> None:
        """Make what was written durable; called in a thread before a checkpoint commits."""

    def close(self) -> None:
        """Release resources; called once, however the run ends."""

    def get_state(self) -> Any:
        """Return what a checkpoint has to keep, as JSON."""
        return None

    def set_state(self, state: Any) -> None:
        """Continue from what `get_state` returned; called only when a run is resumed."""


class StatefulHook(BaseHook):
    """Base class of hooks with state. A run starts afresh, unless `set_state` restored the hook.

    Attributes:
      run_state: names of the attributes that a checkpoint keeps, with JSON values.
      state_key: names of the attributes that must be unchanged for a state to be restored.
    """

    run_state: Sequence[str] = ()
    state_key: Sequence[str] = ()
    _is_restored = False

    def reset(self, step: int) -> None:
        """Initialize all that belongs to one run, which begins after `step`."""
        raise NotImplementedError

    def open(self, step: int, total: int | None) -> None:  # noqa: ARG002
        if not self._is_restored:
            self.reset(step)
        self._is_restored = False

    def close(self) -> None:
        self._is_restored = False

    def get_state(self) -> dict[str, Any]:
        names = (*self.state_key, *self.run_state)
        return {name.lstrip("_"): copy(getattr(self, name)) for name in names}

    def set_state(self, state: Mapping[str, Any]) -> None:
        if all(state[name.lstrip("_")] == getattr(self, name) for name in self.state_key):
            self.reset(0)
            vars(self).update({name: copy(state[name.lstrip("_")]) for name in self.run_state})
            self._is_restored = True


def may_stop(hook: Hook) -> bool:
    """Whether a hook may stop a run, as far as it declares."""
    return bool(getattr(hook, "can_stop", True))


class HookDispatcher:
    """Call hooks in a fixed order, each once per event even when an exception cuts in.

    Hooks that may return numbers are called first, then those that declare to return none
    (`provides = ()`), so that a writer sees every number wherever it stands in the list.
    """

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self.hooks = hooks
        provides = [getattr(hook, "provides", None) for hook in hooks]
        self._order = sorted(
            range(len(hooks)), key=lambda i: provides[i] is not None and not provides[i]
        )
        self._named = _unique_names(hooks)
        self._snapshot: list[Any] | None = None
        self.wants_epochs = any(hasattr(hook, "end_epoch") for hook in hooks)
        self.needs_exact_state = any(getattr(h, "needs_exact_state", False) for h in hooks)

    def open(self, step: int, total: int | None) -> None:
        """Call every hook's `open`."""
        for hook in self.hooks:
            if hasattr(hook, "open"):
                hook.open(step, total)

    def flush(self) -> None:
        """Call every hook's `flush`."""
        for hook in self.hooks:
            if hasattr(hook, "flush"):
                hook.flush()

    def dispatch(self, event: Event) -> tuple[Event, Stop | None]:
        """Call every hook with an event.

        Returns:
          The event with the numbers that hooks returned, and the reason to stop of the first hook
          in the list that has one.

        Raises:
          ConfigError: if a hook returns anything else.
        """
        reasons: dict[int, Stop] = {}
        for index in self._order:
            hook = self.hooks[index]
            returned = hook(event)
            if returned is None:
                continue
            if isinstance(returned, str | Stop):
                if str(returned):
                    stop = returned if isinstance(returned, Stop) else Stop("hook", returned)
                    reasons[index] = stop
            elif isinstance(returned, Mapping):
                event = event._replace(metrics={**event.metrics, **metric_values(returned)})
            else:
                raise ConfigError(
                    f"{hook_name(hook)}: expected a hook to return None, a reason to stop, or "
                    f"numbers by name, got {tree.spell(returned)}"
                )
        return event, reasons[min(reasons)] if reasons else None

    def end_epoch(self, epoch: int) -> None:
        """Call `end_epoch` of the hooks that have it."""
        for hook in self.hooks:
            if hasattr(hook, "end_epoch"):
                hook.end_epoch(epoch)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Snapshot hook state until every hook has seen the event, so that a resume replays it."""
        self._snapshot = self._states()
        yield
        self._snapshot = None

    def get_state(self) -> list[Any]:
        """Return the state of all hooks, as it was before an event that some have not seen."""
        return self._states() if self._snapshot is None else self._snapshot

    def set_state(self, state: Sequence[Any]) -> None:
        """Give hooks back their state, by kind and order."""
        known = dict(state)
        for name, hook in self._named:
            if known.get(name) is not None and hasattr(hook, "set_state"):
                hook.set_state(known[name])

    def _states(self) -> list[Any]:
        states = [[name, hook.get_state()] for name, hook in self._named]
        return [state for state in states if state[1] is not None]


def hook_name(hook: Hook) -> str:
    """Name a hook by the function or class that made it."""
    name: str = getattr(hook, "__qualname__", type(hook).__qualname__)
    return name


def _unique_names(hooks: Sequence[Hook]) -> list[tuple[str, Any]]:
    """Name the hooks that have state, so that a resume finds them though others were added."""
    counts: Counter[str] = Counter()
    named = []
    for hook in hooks:
        counts[hook_name(hook)] += 1
        if hasattr(hook, "get_state"):
            named.append((f"{hook_name(hook)} {counts[hook_name(hook)]}", hook))
    return named


def check_spelling(metric: str, event: Event) -> None:
    """Refuse a metric whose name is nearly that of one in the event.

    Raises:
      ConfigError: if the event lacks the metric and has one of a very similar name.

    >>> check_spelling("eval/los", Event(10, None, {"eval/loss": 2.0}, None, kind="eval"))
    Traceback (most recent call last):
    ...
    stepfold.errors.ConfigError: eval/los: expected a metric that is measured; did you mean ...
    """
    if metric not in event.metrics:
        prefix = metric[: metric.rfind("/") + 1]
        similar = [name for name in event.metrics if name.startswith(prefix)]
        near = get_close_matches(metric, similar, n=1, cutoff=0.9) if similar else []
        if near:
            raise ConfigError(
                f"{metric}: expected a metric that is measured; did you mean {near[0]!r}?"
            )
