"""Hezar's metrics by name, computed at once over all examples of an evaluation."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from stepfold import tree
from stepfold.adapter.loading import num_rows
from stepfold.core.validation import read_choice, suggest
from stepfold.errors import DataError, refuse

CLASS_METRICS = ("accuracy", "f1", "precision", "recall")
TEXT_METRICS = ("cer", "wer")

TASKS = MappingProxyType(
    {
        "text_classification": CLASS_METRICS,
        "audio_classification": CLASS_METRICS,
        "image_classification": CLASS_METRICS,
        "sequence_labeling": CLASS_METRICS,
        "language_modeling": CLASS_METRICS,
        "mask_filling": CLASS_METRICS,
        "image2text": TEXT_METRICS,
        "speech_recognition": TEXT_METRICS,
        "text_generation": TEXT_METRICS,
    }
)
"""The metrics of each task."""


@dataclass(frozen=True)
class MetricConfig:
    """A metric with options.

    Attributes:
      name: accuracy, f1, precision, recall, cer or wer.
      average: how f1, precision and recall combine the classes: `"macro"` is their mean, `"micro"`
        counts all classes together, `"weighted"` weights them by their number of labels.

    >>> MetricConfig("f1", average="micro").name
    'f1'
    """

    name: str
    average: str = "macro"

    def __post_init__(self) -> None:
        read_choice("metrics", self.name, (*CLASS_METRICS, *TEXT_METRICS))
        read_choice("average", self.average, ("macro", "micro", "weighted"))


class MetricsHandler:
    """Compute metrics by name; a custom handler has the same `compute_metrics`.

    >>> handler = MetricsHandler(["accuracy", "recall"])
    >>> handler.compute_metrics(predictions=[0, 1, 1, 1], labels=[0, 0, 1, 1])
    {'accuracy': 0.75, 'recall': 0.75}
    """

    def __init__(
        self,
        metrics: Sequence[str | MetricConfig],
        decode: Callable[[Any], Sequence[str]] | None = None,
    ) -> None:
        """Check the metrics.

        Args:
          metrics: the metrics, by name or as `MetricConfig`.
          decode: a function from a list of token ids to texts, which `wer` needs unless predictions
            and labels are texts.
        """
        self.metrics, self._decode = [_read_metric(metric) for metric in metrics], decode

    def predict(self, outputs: Any) -> Any:
        """Return the most likely class along the last axis of logits; integers are unchanged."""
        return outputs.argmax(-1) if tree.is_float(outputs) and jnp.ndim(outputs) > 1 else outputs

    def compute_metrics(
        self, predictions: Sequence[Any], labels: Sequence[Any]
    ) -> dict[str, float]:
        """Return the metrics of all examples, by name.

        An example is a class, a sequence of classes, or a text. Negative classes are padding.
        """
        return {
            metric.name: _class_metric(metric, predictions, labels)
            if metric.name in CLASS_METRICS
            else error_rate(*self._tokens(metric.name, predictions, labels))
            for metric in self.metrics
        }

    def _tokens(
        self, name: str, predictions: Sequence[Any], labels: Sequence[Any]
    ) -> tuple[list[Sequence[Any]], list[Sequence[Any]]]:
        """Return sequences of words; for `cer` of characters, or of ids without `decode`."""
        both: list[list[Sequence[Any]]] = []
        for examples in (predictions, labels):
            texts: Any = [x if isinstance(x, str) else _without_padding(x) for x in examples]
            if self._decode is not None and not all(isinstance(x, str) for x in texts):
                texts = list(self._decode(texts))
            if name == "wer":
                if not all(isinstance(text, str) for text in texts):
                    expected = "texts, or a preprocessor with decode(ids)"
                    refuse("wer", expected, tree.describe_value(examples[0]), kind=DataError)
                texts = [text.split() for text in texts]
            both.append(texts)
        return both[0], both[1]


# Predictions


class Recorder:
    """An evaluation step that keeps the predictions and the labels of all examples."""

    def __init__(self, measure: Any, generate: Callable[[Any], Any] | None) -> None:
        self._measure, self._generate, self.lower = measure, generate, measure.lower
        self.predictions: list[Any] = []
        self.labels: list[Any] = []

    def __call__(self, state: Any, batch: Any) -> Any:
        metrics, predictions, labels, mask = self._measure(state, batch)
        if labels is None:
            advice = "name them so, or override prepare_input_batch"
            refuse("batch", "labels, to compute metrics of", "none", advice, kind=DataError)
        rows = _rows(labels)
        if self._generate is not None:
            predictions = self._generate(batch)
        is_list = isinstance(predictions, list | tuple)
        predicted = list(predictions) if is_list else _rows(predictions)
        if len(predicted) != len(rows):
            expected = f"a prediction for each of {len(rows)} examples"
            refuse("evaluate", expected, f"{len(predicted)}", kind=DataError)
        kept = np.ones(len(rows), bool) if mask is None else _to_host(mask)
        self.predictions += itertools.compress(predicted, kept)
        self.labels += itertools.compress(rows, kept)
        return metrics


def _rows(arrays: Any) -> list[Any]:
    """Return the examples of a batch, on the host."""
    arrays = jax.tree.map(_to_host, arrays)
    count = num_rows(arrays)
    return [jax.tree.map(lambda leaf: leaf[i], arrays) for i in range(count)]  # noqa: B023


def _to_host(array: Any) -> np.ndarray:
    """Return an array with the rows of all processes."""
    is_local = getattr(array, "is_fully_addressable", True)
    return np.asarray(array if is_local else process_allgather(array, tiled=True))


# The metrics of a config


def read_metric_configs(metrics: Sequence[Any], task: str | None) -> list[MetricConfig]:
    """Return the metrics of a config; refuse those that the task does not have."""
    valid = (*CLASS_METRICS, *TEXT_METRICS) if task is None else TASKS[task]
    configs = []
    for metric in metrics:
        name = getattr(metric, "name", metric)
        if not isinstance(name, str) or name not in valid:
            of_task = "" if task is None else f", which {task} has"
            advice = suggest(name, valid) or "give a metrics_handler for others"
            refuse("metrics", f"some of {', '.join(valid)}{of_task}", repr(name), advice)
        configs.append(_read_metric(metric))
    names = [config.name for config in configs]
    if len({*names}) < len(names):
        refuse("metrics", "each metric once", ", ".join(names))
    return configs


def read_handler(handler: Any, metrics: Sequence[MetricConfig], preprocessor: Any) -> Any:
    """Return what computes the metrics of evaluations, or None."""
    if handler is None:
        decode = getattr(preprocessor, "decode", None)
        return MetricsHandler(metrics, decode) if metrics else None
    if metrics:
        got = ", ".join(metric.name for metric in metrics)
        refuse("metrics", "none with a metrics_handler", got, "leave out one of them")
    if not callable(getattr(handler, "compute_metrics", None)):
        expected = "an object with compute_metrics(predictions, labels)"
        refuse("metrics_handler", expected, tree.describe_value(handler))
    return handler


def read_generate(
    is_wanted: bool | None, generate: Callable[[Any, Any], Any] | None, model: Any
) -> Callable[[Any, Any], Any] | None:
    """Return the function of a model and a batch that predicts, or None for its outputs."""
    if generate is None and callable(getattr(model, "generate", None)):
        generate = lambda model, batch: model.generate(batch)
    if is_wanted and generate is None:
        expected = "generate=, a function (model, batch) -> predictions"
        refuse("evaluate_with_generate", expected, "none")
    return None if is_wanted is False else generate


def _read_metric(metric: Any) -> MetricConfig:
    return metric if isinstance(metric, MetricConfig) else MetricConfig(metric)


# Edit distances


def edit_distance(prediction: Sequence[Any], label: Sequence[Any]) -> int:
    """Count the fewest insertions, deletions and substitutions between two sequences.

    >>> edit_distance("kitten", "sitting")
    3
    """
    previous = list(range(len(label) + 1))
    for row, token in enumerate(prediction, 1):
        current = [row]
        for column, other in enumerate(label, 1):
            substituted = previous[column - 1] + (token != other)
            current.append(min(substituted, previous[column] + 1, current[-1] + 1))
        previous = current
    return previous[-1]


def error_rate(predictions: Sequence[Sequence[Any]], labels: Sequence[Sequence[Any]]) -> float:
    """Return the edit distance of all examples over the length of all labels.

    >>> error_rate(["ab", "c"], ["abc", "c"])
    0.25
    """
    length = sum(map(len, labels))
    if not length:
        advice = "an error rate is a share of them"
        refuse("labels", "at least one character or word", "none", advice, kind=DataError)
    return sum(map(edit_distance, predictions, labels)) / length


def _without_padding(example: Any) -> list[int]:
    return [int(token) for token in np.ravel(np.asarray(example)) if token >= 0]


# Counts of classes


def _class_metric(metric: MetricConfig, predictions: Sequence[Any], labels: Sequence[Any]) -> float:
    predicted, wanted = _classes(predictions), _classes(labels)
    if predicted.shape != wanted.shape:
        expected = f"one prediction for each of {wanted.size} labels"
        advice = "return logits of the shape (*labels.shape, classes) from the model"
        refuse(metric.name, expected, f"{predicted.size}", advice, kind=DataError)
    is_label = wanted >= 0
    if not is_label.any():
        refuse("labels", "at least one that is not negative", "none", kind=DataError)
    predicted, wanted = predicted[is_label], wanted[is_label]
    if metric.name == "accuracy":
        return float(np.mean(predicted == wanted))
    classes, codes = np.unique(np.concatenate([predicted, wanted]), return_inverse=True)
    predicted, wanted = np.split(codes, 2)
    hits, predictions_of, labels_of = (
        np.bincount(values, minlength=len(classes)).astype(np.float64)
        for values in (predicted[predicted == wanted], predicted, wanted)
    )
    if metric.average == "micro":
        hits, predictions_of, labels_of = (
            counts.sum(keepdims=True) for counts in (hits, predictions_of, labels_of)
        )
    totals = {
        "precision": predictions_of,
        "recall": labels_of,
        "f1": (predictions_of + labels_of) / 2,
    }
    total = totals[metric.name]
    scores = np.divide(hits, total, out=np.zeros_like(hits), where=total > 0)
    return float(np.average(scores, weights=labels_of if metric.average == "weighted" else None))


def _classes(examples: Sequence[Any]) -> np.ndarray:
    """Return the classes of all examples, one after the other."""
    return np.concatenate([np.ravel(np.asarray(example)) for example in examples])
