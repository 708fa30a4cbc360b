"""What a run calls of its trainer, why it stops, what it watches, and the bar it draws."""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TextIO

import numpy as np

from stepfold import tree
from stepfold.core.validation import check_count
from stepfold.errors import ConfigError, OutOfMemoryError
from stepfold.inspect.memory import is_exhausted
from stepfold.loop.hooks.base import BaseHook, Event, StatefulHook, Stop, call_optional
from stepfold.loop.hooks.progress import progress


class StopTraining(Exception):  # noqa: N818  not an error, as StopIteration is not
    """End the run after a save; for `apply_training_hooks`, `log_metrics`, `on_log`, watchers.

    `kind` is that of the `Stop` of the run.

    >>> raise StopTraining("good enough")
    Traceback (most recent call last):
    ...
    stepfold.adapter.hooks.StopTraining: good enough
    """

    def __init__(self, message: str = "StopTraining was raised", kind: str = "hook") -> None:
        super().__init__(message)
        self.kind = kind


def check_finite(metrics: Mapping[str, Any]) -> None:
    """Raise `StopTraining` if the loss is NaN or infinite.

    >>> check_finite({"train/loss": 0.5, "train/accuracy": float("nan")})
    """
    for name in ("loss", "train/loss"):
        value = metrics.get(name)
        if value is not None and not np.isfinite(value):
            raise StopTraining(f"{name} is {float(value)}", "nonfinite")


def check_time(seconds: float, limit: float | None) -> None:
    """Raise `StopTraining` if a time limit is reached."""
    if limit is not None and seconds >= limit:
        raise StopTraining(f"the time limit of {limit:g} s was reached", "time_limit")


class StopOnSkipped(StatefulHook):
    """Stop after `limit` skipped steps in a row, whose loss or gradients had a NaN or inf.

    The state is that before them, so it is worth saving. A dynamic loss scale skips some steps in
    a row until it is small enough; there the limit has to be higher than what that takes.

    >>> hook = StopOnSkipped()
    >>> str(hook(Event(12, None, {}, None, {"train/skipped": np.array([0, 1, 0])})))
    'the loss or a gradient was not finite in step 11, which was skipped'
    """

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


class Watcher(NamedTuple):
    """A function of the state whose numbers are logged at intervals; for `Trainer(watchers=…)`.

    Attributes:
      name: the numbers are called `watch/<name>`, with their own names behind it if there are
        several.
      function: a function of the state that returns a number, or numbers by name.
      every: the steps between two calls. It is called at the first log point at or after each
        multiple.

    >>> import jax.numpy as jnp
    >>> watcher = Watcher("norm", lambda state: jnp.linalg.norm(state.params), every=100)
    """

    name: str
    function: Callable[[Any], Any]
    every: int = 1

    def check(self) -> None:
        """Refuse values of other types.

        Raises:
          ConfigError: if one is.
        """
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"name: expected the name of a watcher, got {tree.spell(self.name)}")
        if not callable(self.function):
            got = tree.spell(self.function)
            raise ConfigError(f"function: expected a function of the state, got {got}")
        check_count("every", self.every)


class TrainerHook(BaseHook):
    """Call the methods of a trainer in its run: at each log point and after each evaluation.

    It comes after the hooks of the user, so `log_metrics` and `on_log` see their numbers. The
    trainer's state is that of the event. `StopTraining` of a method is the reason to stop.
    """

    can_stop = True
    writes_metrics = True  # by `log_metrics`
    provides = ("watch/",)

    def __init__(self, trainer: Any) -> None:  # a Trainer, whose module imports this one
        self._trainer = trainer
        self._bar_state: Any = None  # of the run that is resumed
        self.needs_exact_state = trainer.has_watchers

    def open(self, step: int, total: int | None) -> None:
        trainer = self._trainer
        bar = trainer.create_progress_bar(
            total, desc=trainer.arguments.model_name, disabled=not trainer.is_process_zero
        )
        if self._bar_state is not None:
            call_optional(bar, "set_state", self._bar_state)
        call_optional(bar, "open", step)
        trainer.open_run(bar, step, total)

    def __call__(self, event: Event) -> Mapping[str, float] | Stop | None:
        trainer = self._trainer
        trainer.model_state = event.state
        # A loss scale may skip all steps since the last log point, which then have no loss.
        skipped = [name for name, weights in event.weights.items() if not np.any(weights)]
        metrics: Mapping[str, float] = {n: x for n, x in event.metrics.items() if n not in skipped}
        numbers: Mapping[str, float] | None = None
        try:
            if event.is_train:
                changed = trainer.apply_training_hooks(dict(metrics))
                metrics = metrics if changed is None else changed
            mode = "train" if event.is_train else "eval"
            trainer.log_metrics(metrics, trainer.progress_bar, event.step, mode)
            if event.is_train and trainer.has_watchers:
                numbers = trainer.log_watchers(event.state, event.step)
            trainer.on_log(metrics, event.step)
        except StopTraining as reason:
            return Stop(reason.kind, str(reason))
        return numbers

    def flush(self) -> None:
        if self._trainer.writer is not None and self._trainer.is_enable:
            self._trainer.writer.flush()

    def close(self) -> None:
        call_optional(self._trainer.progress_bar, "close")
        self.flush()

    def get_state(self) -> dict[str, Any]:
        bar = self._trainer.progress_bar
        return {"bar": bar.get_state() if hasattr(bar, "get_state") else self._bar_state}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._bar_state = state["bar"]


class EpochTrainerHook(TrainerHook):
    """The same for batches that know their epochs; an epoch ends an interval of metrics."""

    def end_epoch(self, epoch: int) -> None:
        self._trainer.epochs_done = epoch + 1


def add_advice(error: BaseException) -> None:
    """Add a note to an out-of-memory error that says what to change in the arguments.

    >>> error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate ...")
    >>> add_advice(error)
    >>> error.__notes__[0].split(":")[0]
    'the device has too little memory for this step'
    """
    if isinstance(error, OutOfMemoryError) or is_exhausted(error):
        error.add_note(
            "the device has too little memory for this step: raise gradient_accumulation_steps, "
            "set gradient_checkpointing='nothing_saveable' or mixed_precision='bf16', shard the "
            "state by sharding_array, or lower total_batch_size; sf.describe shows what it takes"
        )


def epoch_means(history: Mapping[str, Any], epoch_steps: int) -> dict[str, list[float]]:
    """Return metrics by epoch, with names such as `train_loss`.

    A train metric is its mean over the steps of the epoch, any other its last value. An epoch in
    which a metric was not measured is not in its list.

    >>> from stepfold.loop.metrics import History
    >>> history = History()
    >>> for step, loss in zip((2, 4, 6, 8), (4.0, 2.0, 1.0, 1.0)):
    ...     history.add(step, {"train/loss": loss})
    >>> history.add(8, {"eval/loss": 1.5})
    >>> epoch_means(history, 4)
    {'train_loss': [3.0, 1.0], 'eval_loss': [1.5]}
    """
    means: dict[str, list[float]] = {}
    for name, curve in history.items():
        epochs: dict[int, list[tuple[float, int]]] = {}  # values, and the steps each stands for
        before = 0
        for step, value in zip(curve.steps, curve, strict=True):
            epochs.setdefault((step - 1) // epoch_steps, []).append((value, step - before))
            before = step
        if name.startswith("train/"):
            values = [sum(x * n for x, n in e) / sum(n for _, n in e) for e in epochs.values()]
        else:
            values = [rows[-1][0] for rows in epochs.values()]
        means[name.replace("/", "_")] = values
    return means


class ProgressBar:
    """A bar with `update` and `set_postfix`, drawn by `stepfold.progress`.

    >>> bar = ProgressBar("json", 20)
    >>> bar.set_postfix(loss=2.0)
    >>> bar.update(10)
    {"step": 10, "total": 20, "steps_per_second": null, ..., "loss": 2.0}
    >>> bar.close()
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
        self._make = functools.partial(progress, kind, metrics=metrics, file=file)
        self._hook, self._is_open = self._make(), False

    def open(self, step: int) -> None:
        """Start at a step."""
        self.step, self._is_open = step, True
        self._hook.open(step, self.total)

    def set_postfix(self, metrics: Mapping[str, float] | None = None, **more: float) -> None:
        """Set numbers to show with the next update."""
        self._metrics |= {**(metrics or {}), **more}

    def update(self, n: int = 1) -> None:
        """Advance by a number of steps, and draw."""
        if not self._is_open:
            self.open(self.step)
        self.step += n
        kind = "train" if any(name.startswith("train/") for name in self._metrics) else "eval"
        self._hook(Event(self.step, self.total, self._metrics, None, kind=kind))
        self._metrics = {}

    def reset(self) -> None:
        """Start again at step 0."""
        self.close()
        self.step, self._metrics, self._hook = 0, {}, self._make()

    def close(self) -> None:
        """Leave the last drawing where it is. Idempotent."""
        if self._is_open:
            self._hook.close()
        self._is_open = False

    def get_state(self) -> dict[str, Any]:
        """Return the running average, for a resumed run."""
        return self._hook.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue the running average."""
        self._hook.set_state(state)


class NullProgressBar:
    """A bar that draws nothing."""

    step = 0

    def open(self, step: int) -> None: ...

    def set_postfix(self, metrics: Mapping[str, float] | None = None, **more: float) -> None: ...

    def update(self, n: int = 1) -> None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


class CompilationTracker:
    """Count how often a function is traced, and so compiled.

    >>> import jax, numpy as np
    >>> tracker = CompilationTracker()
    >>> double = jax.jit(tracker.track(lambda x: 2 * x))
    >>> _ = double(np.ones(2)), double(np.ones(2)), double(np.ones(3))
    >>> tracker.compilations
    2
    """

    def __init__(self) -> None:
        self.compilations = 0

    def track(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with counting."""

        @functools.wraps(function)
        def counted(*args: Any) -> Any:
            self.compilations += 1
            return function(*args)

        return counted


class Timers:
    """Add up the seconds of blocks by name.

    >>> timer = Timers()
    >>> with timer("evaluation"):
    ...     pass
    >>> timer.seconds["evaluation"] < 1
    True
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._started[name] = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.running(name)
            del self._started[name]

    def running(self, name: str) -> float:
        """Return for how many seconds a block has been running; 0 if it is not."""
        return time.perf_counter() - self._started[name] if name in self._started else 0.0
