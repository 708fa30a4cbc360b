"""Runs that count in epochs: batches of any iterable, an evaluation and metrics for each epoch."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import jax
import numpy as np
from jax.sharding import Mesh

from stepfold.adapter.loading import TrainingLoader, check_examples, replicate_if_uneven
from stepfold.adapter.steps import name_in_run
from stepfold.core.validation import read_instance
from stepfold.data.batches import batches
from stepfold.errors import DataError, refuse
from stepfold.loop.data import check_batches
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.hooks.base import BaseHook, Event
from stepfold.tree import describe_value


class EpochBatches:
    """The batches of an iterable, epoch after epoch, with a position to resume from.

    A resume skips the batches of its epoch that were used. An iterable without a length is iterated
    once to count its batches.
    """

    endless = True

    def __init__(self, dataloader: Iterable[Any]) -> None:
        self._dataloader = dataloader
        length = getattr(dataloader, "__len__", None)
        self.steps_per_epoch: int = length() if length else sum(1 for _ in dataloader)
        if not self.steps_per_epoch:
            refuse("train_dataloader", "at least one batch", "none", kind=DataError)
        self.set_state({"step": 0})

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._step += 1
        return batch

    def get_state(self) -> dict[str, int]:
        return {"step": self._step}

    def set_state(self, state: Mapping[str, int]) -> None:
        self._step = state["step"]
        self._batches = self._iterate(self._step % self.steps_per_epoch)

    def _iterate(self, used: int) -> Iterator[Any]:
        while True:
            count = 0
            for batch in self._dataloader:
                count += 1
                if count > self.steps_per_epoch:
                    break
                if count > used:
                    yield batch
            if count != self.steps_per_epoch:
                expected = f"{self.steps_per_epoch} batches in each epoch, which it has by its len"
                got = "more" if count > self.steps_per_epoch else f"{count}"
                advice = "give an iterable that starts again, with the same number of batches"
                refuse("train_dataloader", expected, got, advice, kind=DataError)
            used = 0


def read_dataloader(dataloader: Any) -> Any:
    """Return batches that can be resumed and know their epochs."""
    check_batches(dataloader, "train_dataloader")
    if not hasattr(type(dataloader), "__next__"):
        return EpochBatches(dataloader)
    has_epochs = getattr(dataloader, "epoch_ends", None) is not None
    if not has_epochs or not getattr(dataloader, "endless", False):
        expected = "batches that start again in each epoch"
        advice = "give a list, an object whose __iter__ starts again, or sf.batches without epochs"
        refuse("train_dataloader", expected, describe_value(dataloader), advice)
    return dataloader


def make_loader(
    dataloader: Any, prepare: Callable[[Any], Any], method: str
) -> tuple[TrainingLoader, int]:
    """Apply a function to each batch of what a method made; return the steps of an epoch too."""
    dataloader = read_dataloader(dataloader)
    steps = getattr(dataloader, "steps_per_epoch", None)
    if steps is None:
        expected = "batches of which each epoch has the same number"
        refuse(method, expected, describe_value(dataloader))
    return TrainingLoader(dataloader, prepare, steps), steps


def evaluation_batches(
    dataset: Any,
    size: int,
    collate: Callable[[list[Any]], Any] | None,
    prepare: Callable[[Any], Any],
    mesh: Mesh | None,
) -> Iterator[Any]:
    """Yield all examples in order; with several processes, the last batch is padded."""
    check_examples(dataset)
    remainder: Literal["keep", "pad"] = "keep" if jax.process_count() == 1 else "pad"
    loader = batches(dataset, size, epochs=1, remainder=remainder, collate=collate)
    return (replicate_if_uneven(prepare(batch), mesh) for batch in loader)


def make_evaluation(trainer: Any, dataloader: Any) -> Evaluation:
    """Call `trainer.evaluate(dataloader)` after each epoch, each time with the same batches."""
    check_batches(dataloader, "eval_dataloader")
    is_iterator, start = hasattr(type(dataloader), "__next__"), None
    if is_iterator:
        if not hasattr(dataloader, "get_state") or getattr(dataloader, "endless", False):
            expected = "batches that end, and can be iterated again after each epoch"
            advice = "give a list, or sf.batches(data, …, epochs=1)"
            refuse("eval_dataloader", expected, describe_value(dataloader), advice)
        start = copy.deepcopy(dataloader.get_state())

    def measure(state: Any) -> dict[str, float]:
        if is_iterator:
            dataloader.set_state(copy.deepcopy(start))
        return call_evaluate(trainer, state, dataloader)

    return Evaluation(measure, every_epochs=1)


def call_evaluate(trainer: Any, state: Any, *data: Any) -> dict[str, float]:
    """Call `trainer.evaluate(*data)` in a run, with the state of its epoch."""
    trainer.state = state
    metrics = trainer.evaluate(*data)
    read_instance("evaluate", metrics, Mapping, "it to return metrics by name")
    return {name_in_run(name): value for name, value in metrics.items()}


class EpochHook(BaseHook):
    """Collect the metrics of each epoch, and call functions `(trainer, epoch, metrics)` after it.

    Train metrics are means over the examples of the epoch, those of evaluations the last values.
    They are named `train_loss`, `eval_loss` and so on.

    Attributes:
      history: lists with a value for each epoch, by name.
    """

    run_state = ("history", "_sums", "_evaluated")

    def __init__(self, trainer: Any, callbacks: Sequence[Callable[..., Any]]) -> None:
        self._trainer, self._callbacks = trainer, callbacks
        self.reset(0)

    def reset(self, step: int) -> None:  # noqa: ARG002
        self.history: dict[str, list[float]] = {}
        self._sums: dict[str, list[float]] = {}  # total and weight in the epoch so far
        self._evaluated: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        self._trainer.state = event.state
        for name, values in event.per_step.items():
            weights = np.asarray(event.weights.get(name, np.ones(len(values))), np.float64)
            total, weight = self._sums.get(name, (0.0, 0.0))
            total += float(np.where(weights, values, 0) @ weights)
            self._sums[name] = [total, weight + float(weights.sum())]
        if not event.is_train:
            self._evaluated.update(event.metrics)

    def end_epoch(self, epoch: int) -> None:
        means = {name: x / weight if weight else np.nan for name, (x, weight) in self._sums.items()}
        numbers = {**means, **self._evaluated}
        metrics = {name.replace("/", "_", 1): value for name, value in numbers.items()}
        past = self.history
        self.history = past | {name: [*past.get(name, []), x] for name, x in metrics.items()}
        self._sums, self._evaluated = {}, {}
        for callback in self._callbacks:
            callback(self._trainer, epoch, dict(metrics))
