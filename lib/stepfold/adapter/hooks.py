"""Hooks, progress bars and timers of the trainer."""

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TextIO

import numpy as np

from stepfold.adapter.protocol import BaseTrainerProtocol
from stepfold.adapter.steps import by_name
from stepfold.adapter.validation import check_list
from stepfold.core.validation import read_integer
from stepfold.data.epochs import EpochEnds
from stepfold.errors import OutOfMemoryError, refuse
from stepfold.hooks.objects import BaseHook
from stepfold.hooks.progress import progress
from stepfold.hooks.wrappers import add_sums, means_of, weighted_sum
from stepfold.inspect.memory import is_exhausted
from stepfold.loop.events import Event, Returned, Stop
from stepfold.loop.hook import AnyHook, Hook, call_optional
from stepfold.tree import describe_value


class StopTraining(Exception):  # noqa: N818  not an error, as StopIteration is not
    """End the run after a save; for `apply_training_hooks`, `log_metrics`, `on_log`, watchers.

    `kind` is the kind of the run's `Stop`.

    >>> raise StopTraining("good enough")
    Traceback (most recent call last):
    ...
    stepfold.adapter.hooks.StopTraining: good enough
    """

    def __init__(self, message: str = "StopTraining was raised", kind: str = "hook") -> None:
        super().__init__(message)
        self.kind = kind


class StopOnSkipped(BaseHook):
    """Stop after `limit` steps in a row that were skipped for a NaN or inf."""

    can_stop = True
    run_state = ("_in_a_row",)

    def __init__(self, limit: int = 1) -> None:
        self._limit, self._in_a_row = limit, 0

    def reset(self, step: int) -> None:  # noqa: ARG002
        self._in_a_row = 0

    def __call__(self, event: Event) -> Stop | None:
        skipped = event.per_step.get("train/skipped", np.zeros(0))
        for step, was_skipped in enumerate(skipped, event.step - len(skipped) + 1):
            self._in_a_row = self._in_a_row + 1 if was_skipped else 0
            if self._in_a_row == self._limit:
                message = f"the loss or a gradient was not finite in step {step}, which was skipped"
                in_a_row = "" if self._limit == 1 else f", the last of {self._limit} in a row"
                return Stop("nonfinite", message + in_a_row)
        return None


class LossTracker(BaseHook):
    """Average the loss over all examples since the start of the training."""

    run_state = ("_total", "_weight")

    def __init__(self) -> None:
        self._total = self._weight = 0.0

    @property
    def average(self) -> float:
        """The average, or NaN before the first step."""
        return self._total / self._weight if self._weight else math.nan

    def reset(self, step: int) -> None:
        if not step:  # otherwise the training continues
            self._total = self._weight = 0.0

    def __call__(self, event: Event) -> None:
        total, weight = weighted_sum(event, "train/loss")
        self._total += total
        self._weight += weight


def note_best_state(hook: AnyHook, best_states: dict[str, Any]) -> AnyHook:
    """Return a hook that also stores its best state in `best_states`, if it keeps one."""
    if not (isinstance(hook, Hook) and isinstance(hook.init, dict) and "_best_state" in hook.init):
        return hook
    update, name = hook.update, hook.name
    best_states[name] = None

    def note(state: Any, event: Event) -> tuple[Any, Returned]:
        state, returned = update(state, event)
        best_states[name] = state.get("_best_state")
        return state, returned

    return hook._replace(update=note)


class Watcher(NamedTuple):
    """A function of the state whose numbers are logged at intervals; for `Trainer(watchers=…)`.

    Attributes:
      name: the name after `watch/`, followed by those of the numbers if there are several.
      function: a function of the state that returns a number, or numbers by name.
      every: the interval in steps; each call is at the first log point at or after a multiple of
        it.

    >>> import jax.numpy as jnp
    >>> watcher = Watcher("norm", lambda state: jnp.linalg.norm(state.params), every=100)
    """

    name: str
    function: Callable[[Any], Any]
    every: int = 1


def check_watchers(watchers: Any) -> list[Watcher]:
    """Check the attributes of watchers, and that their names differ."""
    checked = check_list("watchers", watchers, "Watcher(name, function, every)", Watcher)
    for name, function, interval in checked:
        if not isinstance(name, str) or not name:
            refuse("name", "the name of a watcher", describe_value(name))
        if not callable(function):
            refuse("function", "a function of the state", describe_value(function))
        read_integer("every", interval)
    names = [watcher.name for watcher in checked]
    if len(set(names)) < len(names):
        refuse("watchers", "different names", f"{', '.join(names)}")
    return checked


class Methods(BaseTrainerProtocol, Protocol):
    """What a run uses of a trainer besides the protocol."""

    writer: Any
    watched_step: int
    sizes: Any

    @property
    def epochs_done(self) -> int: ...
    def on_log(self, metrics: Mapping[str, float], step: int) -> None: ...
    def eval_batches(self) -> Iterator[Any]: ...
    def overrides(self, method: str) -> bool: ...


class TrainerHook(BaseHook):
    """Call a trainer's methods at each log point and after each evaluation.

    It runs after the user's hooks, so `log_metrics` and `on_log` see their metrics.

    Attributes:
      bar: the progress bar.
      start_step, last_step: the first and the last step of the run.
      epochs_done: the number of epochs that have ended; only `has_epochs` counts them.
    """

    can_stop = True
    shows_progress = True  # by the bar
    writes_metrics = True  # by `log_metrics`
    provides = ("watch/",)

    def __init__(self, trainer: Methods, *, has_epochs: bool, needs_exact_state: bool) -> None:
        self._trainer, self.needs_exact_state = trainer, needs_exact_state
        if has_epochs:
            self.end_epoch = self._end_epoch  # which ends an interval of metrics
        self.bar: Any = None
        self.start_step, self.epochs_done = 0, trainer.epochs_done
        self.last_step: int | None = None
        self._bar_state: Any = None  # of the resumed run
        self._event_step = 0  # of the last event in this run, or before a resume

    def open(self, step: int, total: int | None) -> None:
        trainer = self._trainer
        self.close_bar()  # if the run goes back
        self.bar = trainer.create_progress_bar(
            total, desc=trainer.arguments.model_name, disabled=not trainer.is_process_zero
        )
        call_optional(self.bar, "open", step)
        self.start_step, self.last_step, trainer.watched_step = step, total, step
        self.rewind(step)

    def rewind(self, step: int) -> None:
        self._event_step = step
        if self._trainer.is_enable:
            call_optional(self._trainer.writer, "resume", step)

    def __call__(self, event: Event) -> Mapping[str, float] | Stop | None:
        trainer = self._trainer
        step = max(self._event_step, event.step)  # a remote evaluation is of an earlier one
        trainer.model_state, self._event_step = event.state, step
        if not (event.is_train or event.metrics):  # after a `save_pretrained`
            return None
        metrics: Mapping[str, float] = dict(event.metrics)  # a subclass may change it
        numbers: Mapping[str, float] | None = None
        stop: Stop | None = None
        try:
            if event.is_train:
                # If a loss scale skipped all steps since the last log point, there is no loss.
                skipped = {n: x for n, x in metrics.items() if not np.any(event.weights.get(n, 1))}
                measured = {name: x for name, x in metrics.items() if name not in skipped}
                changed = trainer.apply_training_hooks(measured)
                if changed is not None:
                    metrics = {**skipped, **by_name(changed, "apply_training_hooks")}
        except StopTraining as reason:  # the metrics that ended the run are logged too
            stop = Stop(reason.kind, str(reason))
        try:
            mode = "train" if event.is_train else "eval"
            trainer.log_metrics(metrics, self.bar, step, mode)
            if event.is_train and self.needs_exact_state:
                numbers = trainer.log_watchers(event.state, event.step)
            trainer.on_log(metrics, step)
        except StopTraining as reason:
            stop = stop or Stop(reason.kind, str(reason))
        return stop or numbers

    def flush(self) -> None:
        if self._trainer.is_enable:
            call_optional(self._trainer.writer, "flush")

    def close_bar(self) -> None:
        bar, self.bar = self.bar, None
        call_optional(bar, "close")

    def close(self) -> None:
        self.close_bar()
        self.flush()

    def _end_epoch(self, epoch: int) -> None:
        self.epochs_done = epoch + 1

    def get_state(self) -> dict[str, Any]:
        bar = self.bar.get_state() if hasattr(self.bar, "get_state") else self._bar_state
        return {"bar": bar}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._bar_state = state["bar"]
        if self._bar_state is not None:
            call_optional(self.bar, "set_state", self._bar_state)


def add_advice(error: BaseException) -> None:
    """Add a note to an out-of-memory error on which arguments to change."""
    if isinstance(error, OutOfMemoryError) or is_exhausted(error):
        error.add_note(
            "the device has too little memory for this step: raise gradient_accumulation_steps, "
            "set gradient_checkpointing='nothing_saveable' or mixed_precision='bf16', shard the "
            "state with sharding_array, or lower total_batch_size; sf.describe lists what takes it"
        )


class EpochHistory(BaseHook):
    """Collect metrics by epoch: the mean of train metrics, and the last value of others.

    Means are over the examples of the epoch. `find_ends` is called at each event, since a rollback
    skips batches. `offset` is the number of batches that the data are ahead of the step.
    """

    run_state = ("_epochs",)

    def __init__(self, find_ends: Callable[[], EpochEnds], offset: int = 0) -> None:
        self._find_ends, self._offset = find_ends, offset
        self.reset(0)

    def reset(self, step: int) -> None:  # noqa: ARG002
        # Numbers of epochs, with totals and weights by name, and latest values by name.
        self._epochs: list[Sequence[Any]] = []

    def __call__(self, event: Event) -> None:
        ends, offset = self._find_ends(), self._offset
        start = event.step - max(map(len, event.per_step.values()), default=0)
        step = start
        while step < event.step:  # an interval may be of several epochs
            epoch = ends.done(step + offset)
            stop = min(event.step, max(step + 1, ends.end(epoch + 1) - offset))
            sums, latest = self._of(epoch)
            self._put(epoch, add_sums(sums, event, slice(step - start, stop - start)), latest)
            step = stop
        epoch = ends.done(max(0, event.step - 1 + offset))
        sums, latest = self._of(epoch)
        self._put(epoch, sums, {**latest, **event.metrics})

    def _of(self, epoch: int) -> Sequence[Any]:
        is_known = self._epochs and self._epochs[-1][0] == epoch
        return self._epochs[-1][1:] if is_known else ({}, {})

    def _put(self, epoch: int, *values: Any) -> None:
        is_known = self._epochs and self._epochs[-1][0] == epoch
        self._epochs = [*(self._epochs[:-1] if is_known else self._epochs), (epoch, *values)]

    def by_name(self) -> dict[str, list[float]]:
        """Return the values of the epochs, with names such as `train_loss`.

        Epochs without a value are left out.
        """
        values: dict[str, list[float]] = {}
        for _, sums, latest in self._epochs:
            for name, value in {**latest, **means_of(sums)}.items():
                values.setdefault(name.replace("/", "_"), []).append(value)
        return values


class ProgressBar:
    """A bar with the methods of tqdm that trainers use, drawn by `stepfold.progress`.

    Numbers of `set_postfix` are shown with the next update. A bar that was closed or reset opens
    again at the next one.
    """

    def __init__(
        self,
        kind: str,
        total: int | None,
        desc: str = "",
        *,
        metrics: Sequence[str] | None = None,
        file: TextIO | None = None,
    ) -> None:
        self.total, self.desc, self.step = total, desc, 0
        self._metrics: dict[str, float] = {}
        self._sink, self._is_open = progress(kind, metrics=metrics, file=file), False
        self._state = self._sink.init  # the running average

    def get_state(self) -> Any:
        return self._state

    def set_state(self, state: Any) -> None:
        self._state = state

    def open(self, step: int) -> None:
        self.step, self._is_open = step, True
        self._sink.open(step, self.total, step)

    def set_postfix(self, metrics: Mapping[str, float] | None = None, **more: float) -> None:
        self._metrics |= {**(metrics or {}), **more}

    def update(self, n: int = 1) -> None:
        if not self._is_open:
            self.open(self.step)
        self.step += n
        kind = "train" if any(name.startswith("train/") for name in self._metrics) else "eval"
        event = Event(self.step, self.total, self._metrics, None, kind=kind)
        self._state = self._sink.write(self._state, event)
        self._metrics = {}

    def reset(self) -> None:
        self.close()
        self.step, self._metrics = 0, {}

    def close(self) -> None:
        self._sink.close()
        self._is_open = False


class NullProgressBar:
    """A bar that draws nothing."""

    step = 0

    def _do_nothing(self, *_: Any, **__: Any) -> None: ...

    open = set_postfix = update = reset = close = _do_nothing


class CompilationTracker:
    """Count how often a function is traced, and so compiled."""

    def __init__(self) -> None:
        self.compilations = 0

    def track(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function to count its calls."""

        @functools.wraps(function)
        def counted(*args: Any) -> Any:
            self.compilations += 1
            return function(*args)

        return counted


class Timers:
    """Add up the seconds of `with timer(name):` blocks by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if name in self._started:  # the outer block is timed
            yield
            return
        self._started[name] = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.running(name)
            del self._started[name]

    def running(self, name: str) -> float:
        """Return the seconds that a block has been running; 0 if it is not."""
        return time.perf_counter() - self._started[name] if name in self._started else 0.0
