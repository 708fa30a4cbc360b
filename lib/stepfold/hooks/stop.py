"""Hooks that stop a run or go back: out of time, a NaN or inf, a spike, corruption, a hang.

Hooks with a state take a `name`, its key in a checkpoint, so that a run can have two of a kind.
"""

import faulthandler
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.core.metric_modes import mode_of
from stepfold.core.validation import check_flags, read_integer, read_positive, renamed
from stepfold.errors import refuse
from stepfold.loop.events import Event, GoBack, HookRequest, Nonfinite, Returned, Stop
from stepfold.loop.hook import Hook, Sink
from stepfold.tree import describe_value

Action = Literal["stop", "go_back"]


def time_limit(seconds: float) -> Hook:
    """Stop when a number of seconds has passed since the hook was made."""
    read_positive("time_limit", seconds, allow_zero=True, unit="seconds")
    end = time.monotonic() + seconds

    def update(state: Any, event: Event) -> tuple[Any, Returned]:  # noqa: ARG001
        if time.monotonic() < end:
            return state, None
        return state, Stop("time_limit", f"the time limit of {seconds:g} s was reached")

    return Hook(None, update, "time_limit", provides=(), returns=(Stop,))


@renamed(pattern="metric")
def on_nonfinite(
    metric: str | None = None,
    *,
    action: Action = "stop",
    skip: int | None = None,
    limit: int | None = None,
) -> Hook:
    """Stop or go back when a train metric is NaN or infinite in a step.

    A metric of weight 0 does not count. Without `metric`, this is the loss, or each metric of a
    step that reports no `loss`. `fit` has such a hook for the loss unless `hooks` has one. It
    stores what it takes to rerun the step in a `Capsule`, for `replay`.

    Args:
      metric: the train metric.
      action: "stop" the run, or "go_back" to a checkpoint before that step and skip its batch.
      skip: the number of batches to skip: that of the step and those that follow it; by default 1.
      limit: how often to go back before the run stops, with a capsule; by default 3.

    >>> import numpy as np, stepfold as sf
    >>> losses = {"train/loss": np.array([1.0, np.nan, np.nan])}
    >>> event = sf.Event(12, None, {"train/loss": np.nan}, None, losses)
    >>> hook = sf.hooks.on_nonfinite()
    >>> str(hook.update(hook.init, event)[1])
    'train/loss is nan in step 11'
    >>> hook = sf.hooks.on_nonfinite(action="go_back")
    >>> hook.update(hook.init, event)[1].skip
    (11, 12)
    """
    if metric is not None:
        _check_train_metric(metric)
    make_request, kinds = _read_action(action, skip, limit)
    init = {"_found": None, "_last": None}  # of this run, so in memory alone

    def update(state: Any, event: Event) -> tuple[Any, Returned]:
        if event.kind == "start":
            return init, None
        if event.kind != "train":
            return state, None
        last, found = state["_last"], state["_found"]
        state = {"_found": found, "_last": event._replace(state=None, batch=None)}
        first_steps = [_first_nonfinite(event, name) for name in _watched(event, metric)]
        step, where = min(filter(None, first_steps), default=(0, ""))
        if not step:
            return state, None
        metrics = _metrics_of_step(event, step)
        if found is None:
            # The step before it may be the last one of the previous event.
            is_first = event.step - step + 1 == len(event.per_step[where])
            earlier = last if is_first and last is not None and last.step == step - 1 else event
            found = Nonfinite(step, where, metrics, _metrics_of_step(earlier, step - 1))
        stop = Stop("nonfinite", f"{where} is {metrics[where]} in step {step}")
        return {**state, "_found": found}, make_request(stop, found.step)

    name = "on_nonfinite" if metric is None else f"on_nonfinite {metric}"
    kinds = (*kinds, Nonfinite)
    return Hook(init, update, name, ("start",), metric=metric, provides=(), returns=kinds)


def _read_action(
    action: Action, skip: int | None, limit: int | None
) -> tuple[Callable[[Stop, int], HookRequest], Sequence[type]]:
    """Return a function that makes the request of a reason to stop and its step, and its kinds."""
    if action not in ("stop", "go_back"):
        refuse("action", "'stop' or 'go_back'", describe_value(action))
    if action == "stop":
        for name, value in (("skip", skip), ("limit", limit)):
            if value is not None:
                refuse(name, "action='go_back' with it", "action='stop'", f"leave {name} out")
        return lambda stop, _: stop, (Stop,)
    count = read_integer("skip", 1 if skip is None else skip)
    most = read_integer("limit", 3 if limit is None else limit)
    return lambda stop, step: GoBack(None, (step, step + count), stop.message, most), (Stop, GoBack)


def _watched(event: Event, metric: str | None) -> list[str]:
    loss = metric or "train/loss"
    # A finite mean is enough, so that values per step are read only if something is wrong.
    if metric or math.isfinite(event.metrics.get(loss, math.nan)) or loss in event.per_step:
        return [loss]
    return [name for name, values in event.per_step.items() if np.ndim(values) == 1]


def _first_nonfinite(event: Event, metric: str) -> tuple[int, str] | None:
    """Return the first step of an event in which a metric is not finite."""
    # A finite mean implies that it is finite in each step.
    if math.isfinite(event.metrics.get(metric, math.nan)):
        return None
    values = event.per_step.get(metric, np.zeros(0))
    has_weight = event.weights.get(metric, np.ones(len(values))) != 0
    (indices,) = np.nonzero(~np.isfinite(values) & has_weight)
    return (event.step - len(values) + 1 + int(indices[0]), metric) if indices.size else None


def _metrics_of_step(event: Event, step: int) -> dict[str, float]:
    """Return the metrics of a step up to the event, without those that only later steps have."""
    age = event.step - step
    rows = event.per_step.items()
    return {n: float(row[-1 - age]) for n, row in rows if np.ndim(row) == 1 and len(row) > age}


def stop_on_corruption() -> Hook:
    """Stop when the two runs of a step by `check_step` differ, and name the leaves.

    The state since that step may be wrong, so `fit` does not save it when it stops. A checkpoint
    that was saved between that step and the log point may be wrong too: go back to an earlier one.

    >>> import numpy as np, stepfold as sf
    >>> words = {"train/corrupt": np.array([[0], [0b10]])}  # a bit for each leaf, and step
    >>> state = {"step": np.array(12), "w": np.ones(2)}
    >>> event = sf.Event(12, None, {"train/corrupt": 1.0}, state, words)
    >>> str(sf.hooks.stop_on_corruption().update(None, event)[1])
    'step 12 was run twice, and 1 of 2 leaves differs: w; do not trust the states since then'
    """
    metric = "train/corrupt"

    def update(state: Any, event: Event) -> tuple[Any, Returned]:
        if not event.metrics.get(metric):
            return state, None
        words = event.per_step[metric]
        bad = int(np.flatnonzero(words.any(1))[0])
        paths = tree.marked_paths(event.state, words[bad])
        names = ", ".join(paths[:8]) + ", …" * (len(paths) > 8)
        leaves = f"{len(paths)} of {len(jax.tree.leaves(event.state))} leaves"
        message = (
            f"step {event.step - len(words) + 1 + bad} was run twice, and {leaves} "
            f"{'differs' if len(paths) == 1 else 'differ'}: {names}; do not trust the states since "
            "then"
        )
        return state, Stop("corrupt", message)

    name = f"stop_on_corruption {metric}"
    return Hook(None, update, name, metric=metric, provides=(), returns=(Stop,))


def stop_early(
    metric: str,
    *,
    patience: int,
    mode: str | None = None,
    min_delta: float = 0.0,
    keep_state: bool = False,
    name: str | None = None,
) -> Hook:
    """Stop when a metric, such as `eval/loss`, has not improved for `patience` evaluations.

    A value improves if it is better than the best one by more than `min_delta`. With `mode="min"`
    lower is better, with `mode="max"` higher is. Without, the name of the metric has to tell, such
    as that of a loss or an accuracy; others raise.
    The state of the hook has the `best` value of the run (NaN before the first), its `best_step`
    (-1) and, with `keep_state`, the `_best_state`: a pair of its step and a copy on the host, or on
    the devices for arrays that are sharded over processes. `FitResult.hooks` has it by the name of
    the hook, such as `"stop_early eval/loss"`. To keep the best state on disk, use
    `sf.Checkpoints(best=metric)`. `keep_state` does not take a train metric, since at a log point
    the state is of a later step, nor a remote evaluation.
    A resumed run continues to count, so one that was stopped trains nothing, with a warning. To let
    it continue, give a larger `patience`, or another `name`, the hook's key in a checkpoint.

    >>> import stepfold as sf
    >>> hook = sf.hooks.stop_early("eval/loss", patience=2)
    >>> state = hook.init
    >>> for step, loss in enumerate([3.0, 2.0, 2.5, 2.1]):
    ...     state, reason = hook.update(state, sf.Event(step, None, {"eval/loss": loss}, None))
    >>> str(reason)
    'eval/loss has not become better than 2 for 2 evaluations, since step 1'
    """
    check_flags(keep_state=keep_state)
    most, delta = (
        read_integer("patience", patience),
        read_positive("min_delta", min_delta, allow_zero=True),
    )
    sign = 1 if mode_of("metric", metric, mode) == "min" else -1
    if keep_state and metric.startswith("train/"):
        refuse("keep_state", "the metric of an evaluation", repr(metric))
    init = {"metric": metric, "sign": sign, "best": math.nan, "best_step": -1, "num_worse": 0}
    init |= {"_best_state": None} if keep_state else {}

    def update(state: Any, event: Event) -> tuple[Any, Returned]:
        if event.kind == "start":
            state = _same_or_first(state, init, "metric", "sign")
            kept = state.get("_best_state")
            if kept is not None and kept[0] != state["best_step"]:
                state = {**state, "_best_state": None}  # the run went back before it
            return state, stop_of(state)
        value, best = event.metrics.get(metric), state["best"]
        if value is None:
            return state, None
        is_better = math.isnan(best) or sign * (best - value) > delta
        if not is_better or math.isnan(value):
            state = {**state, "num_worse": state["num_worse"] + 1}
            return state, stop_of(state)
        state = {**state, "best": float(value), "best_step": event.step, "num_worse": 0}
        if keep_state and event.is_late:
            expected, advice = "an evaluation in this process", "use sf.Checkpoints(best=…)"
            refuse("keep_state", expected, "a remote one, without its state", advice)
        if keep_state:
            state["_best_state"] = event.step, jax.tree.map(_copy_to_host, event.state)
        return state, None

    def stop_of(state: Any) -> Stop | None:
        worse = state["num_worse"]
        if worse < most:
            return None
        message = f"{metric} has not become better than {state['best']:g} for {worse}"
        return Stop("early_stop", f"{message} evaluations, since step {state['best_step']}")

    key = f"stop_early {metric}" if name is None else name
    return Hook(init, update, key, ("start",), metric=metric, provides=(), returns=(Stop,))


def _same_or_first(state: Any, init: Any, *names: str) -> Any:
    """Return a state if it has the settings of the first one; it starts afresh otherwise."""
    return state if all(state[name] == init[name] for name in names) else init


@renamed(sigma="deviations")
def on_spike(
    metric: str = "train/loss",
    *,
    action: Action = "stop",
    window: int = 100,
    deviations: float = 10.0,
    skip: int | None = None,
    limit: int | None = None,
    name: str | None = None,
) -> Hook:
    """Stop or go back when a train metric is far above its recent values.

    A value is too high if it is more than `deviations` median absolute deviations above the median
    of the `window` finite values before it: neither is moved by a few outliers. Deviations are
    scaled to the standard deviation of a normal distribution, and are at least a hundredth of the
    median. No value is judged before the window is full. To see where it would have stopped, wrap
    it in `only_warn`.

    Args:
      metric: the train metric.
      action: "stop" the run, or "go_back" to a checkpoint before the spike and skip its batch.
      window: the number of values that a value is compared with.
      deviations: how far above their median a spike is.
      skip: the number of batches to skip: that of the spike and those that follow it; by default 1.
      limit: how often to go back before the run stops; by default 3.
      name: the key of the hook in a checkpoint, for two of a metric.

    >>> import numpy as np, stepfold as sf
    >>> losses = {"train/loss": np.array([2.0, 2.1, np.nan, 1.9, 2.0, 9.0])}
    >>> event = sf.Event(6, None, {}, None, losses)
    >>> hook = sf.hooks.on_spike(window=4)
    >>> str(hook.update(hook.init, event)[1])
    'train/loss is 9 in step 6, and the median of the 4 before it is 2 ± 0.07413'
    >>> hook = sf.hooks.on_spike(window=4, action="go_back", skip=3)
    >>> request = hook.update(hook.init, event)[1]
    >>> request.skip, request.limit
    ((6, 9), 3)
    """
    _check_train_metric(metric)
    make_request, kinds = _read_action(action, skip, limit)
    size = read_integer("window", window, minimum=2)
    most = read_positive("deviations", deviations)
    init: dict[str, Any] = {"metric": metric, "latest": []}

    def update(state: Any, event: Event) -> tuple[Any, Returned]:
        if event.kind == "start":
            return _same_or_first(state, init, "metric"), None
        latest, spike = _find_spike(event, metric, state["latest"], size, most)
        request = None
        if spike is not None:
            step, message = spike
            request = make_request(Stop("spike", message), step)
        return {"metric": metric, "latest": latest}, request

    key = f"on_spike {metric}" if name is None else name
    return Hook(init, update, key, ("start",), metric=metric, provides=(), returns=kinds)


def _find_spike(
    event: Event, metric: str, latest: Sequence[float], size: int, most: float
) -> tuple[list[float], tuple[int, str] | None]:
    """Add values to the window; return it, and the step of the first spike with a sentence."""
    values = np.asarray(event.per_step.get(metric, ()), np.float64)
    (indices,) = np.nonzero(np.isfinite(values))
    before = latest[-size:]
    finite = np.concatenate([before, values[indices]])
    window = finite[-size:].tolist()
    if len(finite) <= size:
        return window, None
    windows = np.lib.stride_tricks.sliding_window_view(finite, size)[:-1]
    medians = np.median(windows, axis=1)
    deviations = 1.4826 * np.median(np.abs(windows - medians[:, None]), axis=1)
    deviations = np.maximum(deviations, 0.01 * np.abs(medians))
    judged = finite[size:]
    (spikes,) = np.nonzero(judged > medians + most * deviations)
    if not spikes.size:
        return window, None
    i = spikes[0]
    step = event.step - len(values) + 1 + int(indices[i + size - len(before)])
    message = f"{metric} is {judged[i]:.4g} in step {step}, and the median of the "
    message += f"{size} before it is {medians[i]:.4g} ± {deviations[i]:.4g}"
    return window, (step, message)


def watchdog(seconds: float, abort: bool = False, *, file: TextIO | None = None) -> "Watchdog":
    """Dump the stacks of all threads when no event has come for some seconds, or abort.

    The time starts with the run, and has to cover everything between two events: compiling, an
    evaluation, a save. The timer may fire up to a tenth later. It is that of `faulthandler`, so a
    process can have only one, and it fires even if a library hangs while it holds the GIL. With
    `abort` the process exits with code 1 and saves nothing: a launcher that starts it again resumes
    from the last checkpoint. Stacks go to stderr, or to a `file` that has a descriptor. It watches
    only its own process; `start_distributed(patience=…)` finds out which of several the others wait
    for.

    >>> import stepfold as sf
    >>> sink = sf.hooks.watchdog(600)
    >>> sink.open(0, None, 0)
    >>> sink.close()
    """
    check_flags(abort=abort)
    return Watchdog(read_positive("watchdog", seconds, unit="seconds"), abort, file)


class Watchdog(Sink):
    """What `watchdog` returns."""

    name = "watchdog"

    def __init__(self, seconds: float, abort: bool, file: TextIO | None) -> None:
        self._seconds, self._abort, self._file = seconds, abort, file
        self._started: float | None = None

    def open(self, step: int, total: int | None, seen: int) -> None:  # noqa: ARG002
        self._start()

    def _start(self) -> None:
        self._started = time.monotonic()
        file = self._file or sys.__stderr__ or sys.stderr
        seconds, repeat = 1.1 * self._seconds, not self._abort
        faulthandler.dump_traceback_later(seconds, repeat=repeat, file=file, exit=self._abort)

    def write(self, state: Any, event: Event) -> Any:  # noqa: ARG002
        # Restarting the timer costs a thread, so not at every event.
        if self._started is None or time.monotonic() - self._started > 0.1 * self._seconds:
            self._start()
        return state

    def close(self) -> None:
        if self._started is not None:
            self._started = None
            faulthandler.cancel_dump_traceback_later()


def _check_train_metric(metric: Any) -> None:
    if not isinstance(metric, str) or not metric.startswith("train/"):
        refuse("metric", "a train metric such as 'train/loss'", repr(metric))


def _copy_to_host(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if not leaf.is_fully_addressable or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.copy(leaf)
    return np.array(leaf)  # not device_get: on CPU its view would keep the buffer from donation
