"""What the trainers of qurious and Hezar have in common.

Models carry their parameters, loss functions take outputs and targets, and runs count in epochs.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from stepfold import tree
from stepfold.adapter.steps import call_evaluate
from stepfold.core.loss import LossFn, mean
from stepfold.core.state import TrainState
from stepfold.errors import DataError, refuse, warn
from stepfold.hooks.objects import BaseHook
from stepfold.hooks.wrappers import NO_MEANS, add_event, epoch_means
from stepfold.loop.evaluate import Evaluation
from stepfold.loop.events import Event
from stepfold.loop.feed import check_batches
from stepfold.runs.fit import FitResult, fit

# Models: callable pytrees


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["params"], meta_fields=["apply", "loss_fn"]
)
@dataclass(frozen=True)
class Model:
    """A function `apply(params, *inputs)` with its parameters, as a callable pytree.

    For a flax linen module, `Model(module.apply, variables)`. `loss_fn(outputs, labels)` is for
    trainers that take the loss function from the model.

    >>> import jax.numpy as jnp
    >>> model = Model(lambda params, x: x @ params["w"], {"w": jnp.ones((3, 1))})
    >>> model(jnp.ones((2, 3))).shape
    (2, 1)
    """

    apply: Callable[..., Any]
    params: Any
    loss_fn: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.apply(self.params, *args, **kwargs)

    def eval(self) -> Self:
        """Do nothing: in an evaluation, `Trainer.key` is None."""
        return self

    def train(self) -> Self:
        """Do nothing: in a training step, `Trainer.key` is a PRNG key."""
        return self


def split_model(model: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return the parameters of a model, and a function from parameters to the model."""
    refuse_torch("model", model, "write it in JAX")
    if isinstance(model, Model):
        _check_collections(model.params)
        return model.params, functools.partial(type(model), model.apply, loss_fn=model.loss_fn)
    kinds = [f"{base.__module__}.{base.__name__}" for base in type(model).__mro__]
    advice = "give Model(apply, params)"
    if any(kind.startswith("flax.nnx") for kind in kinds):
        advice = (
            "split it, as graph, params, rest = nnx.split(model, nnx.Param, ...), and give "
            "Model(lambda params, *x: nnx.merge(graph, params, rest, copy=True)(*x), params)"
        )
    elif callable(getattr(model, "apply", None)):
        advice = "give Model(model.apply, model.init(key, example))"
    elif callable(model) and not jax.tree_util.all_leaves([model]):
        params = jax.tree.map(lambda leaf: leaf if tree.is_float(leaf) else None, model)
        rest = jax.tree.map(lambda leaf: None if tree.is_float(leaf) else leaf, model)
        is_none = lambda leaf: leaf is None
        pick = lambda leaf, other: other if leaf is None else leaf
        return params, lambda params: jax.tree.map(pick, params, rest, is_leaf=is_none)
    expected = "a callable pytree, such as an equinox module or a Model"
    refuse("model", expected, type(model).__name__, advice)


def _check_collections(variables: Any) -> None:
    """Refuse variables of flax that are not parameters, such as batch statistics."""
    others = {*variables} - {"params"} if isinstance(variables, Mapping) else set()
    if others and "params" in variables:
        advice = (
            "give Model(lambda params, *x: module.apply({**variables, 'params': params}, *x), "
            "variables['params']), which does not change the others"
        )
        refuse("model", "parameters alone", f"params and {', '.join(sorted(others))}", advice)


def refuse_torch(argument: str, value: Any, advice: str) -> None:
    """Refuse an object of torch, which need not be installed."""
    if any(base.__module__.split(".")[0] == "torch" for base in type(value).__mro__):
        refuse(argument, "one for JAX", f"torch's {type(value).__name__}", advice)


# Trainers


class ModelTrainer:
    """Base class of both trainers: it keeps a model's parameters in a state, and calls `fit`."""

    state: TrainState
    key: jax.Array | None = None  # while a training step is traced
    result: FitResult | None = None
    _build: Callable[[Any], Any]  # a model of parameters

    @property
    def model(self) -> Any:
        """The model with the current parameters, which the next step donates."""
        return self._build(self.state.params)

    def _bind(self, params: Any, key: Any) -> Self:
        """Return the trainer with these parameters in its model."""
        bound = copy.copy(self)
        bound.state, bound.key = self.state._replace(params=params), key
        return bound

    def _make_loss(self, compute: Callable[[Any, Any], Any], *, is_training: bool) -> LossFn:
        """Make a loss function of `compute(trainer, batch)`, which calls methods of the trainer."""

        def loss_fn(params: Any, batch: Any, key: Any) -> Any:
            returned = compute(self._bind(params, key if is_training else None), batch)
            loss, *rest = returned if isinstance(returned, tuple) else (returned,)
            reduced = [
                {name: _reduce(name, value, batch) for name, value in metrics.items()}
                if isinstance(metrics, Mapping)
                else metrics
                for metrics in rest
            ]
            loss = _reduce("loss_fn", loss, batch)
            return (loss, *reduced) if isinstance(returned, tuple) else loss

        return loss_fn

    def _overrides(self, method: str) -> bool:
        """Whether a method is that of a subclass."""
        own = next(kind for kind in type(self).__mro__ if kind.__module__.startswith("stepfold."))
        return getattr(type(self), method) is not getattr(own, method)

    def _fit(self, step: Any, batches: Any, **options: Any) -> None:
        """Call `fit`, and keep its result, also after an exception."""
        try:
            result = fit(step, self.state, batches, **options)
        except BaseException as error:
            if hasattr(error, "result"):
                self.result, self.state = error.result, error.result.state
            raise
        self.result, self.state = result, result.state
        if result.stop_reason.kind == "nonfinite":
            text = f"train: {result.stop_reason}, which ended the run"
            warn(text)


# Batches, outputs and the loss


def split_batch(batch: Any, *, keep_labels: bool, method: str) -> tuple[Any, Any]:
    """Return the inputs and the targets of a batch; the error names the `method` to override.

    With `keep_labels`, the `labels` stay an input too, for a model that computes its own loss.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    if not isinstance(batch, Mapping):
        expected, got = "a pair (inputs, targets) or a dict", tree.describe_value(batch)
        refuse("batch", expected, got, f"override {method}", kind=DataError)
    if "inputs" in batch:
        return batch["inputs"], batch.get("targets", batch.get("labels"))
    unused = {"mask"} if keep_labels else {"mask", "labels"}
    inputs = {name: value for name, value in batch.items() if name not in unused}
    return inputs, batch.get("labels")


def call_model(model: Any, inputs: Any) -> Any:
    """Return the outputs of a model; a dict of inputs is passed as keyword arguments."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def output_of(outputs: Any, name: str) -> Any:
    """Return an output of a model by name, from a dict or an attribute; None if it is missing."""
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def mask_of(batch: Any) -> Any:
    """Return the mask of a batch, or None."""
    return batch.get("mask") if isinstance(batch, Mapping) else None


def _reduce(name: str, value: Any, batch: Any) -> Any:
    """Turn values of examples into a mean under the mask; a number is their mean already."""
    from clu.metrics import Metric

    if isinstance(value, Metric) or not tree.is_data(value):
        return value  # which the step checks
    mask = mask_of(batch)
    if jnp.ndim(value):
        return mean(value, mask)
    if mask is not None:
        expected = 'values of examples, or sf.mean(values, mask), for a batch with a "mask"'
        advice = "leave out the mean, which the trainer takes"
        refuse(name, expected, tree.describe_value(value), advice)
    return value


# Epochs


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
        refuse("train_dataloader", expected, tree.describe_value(dataloader), advice)
    return dataloader


def make_evaluation(trainer: Any, dataloader: Any) -> Evaluation:
    """Call `trainer.evaluate(dataloader)` after each epoch, each time with the same batches."""
    check_batches(dataloader, "eval_dataloader")
    is_iterator, start = hasattr(type(dataloader), "__next__"), None
    if is_iterator:
        if not hasattr(dataloader, "get_state") or getattr(dataloader, "endless", False):
            expected = "batches that end, and can be iterated again after each epoch"
            advice = "give a list, or sf.batches(data, …, epochs=1)"
            refuse("eval_dataloader", expected, tree.describe_value(dataloader), advice)
        start = copy.deepcopy(dataloader.get_state())

    def measure(state: Any) -> dict[str, float]:
        if is_iterator:
            dataloader.set_state(copy.deepcopy(start))
        return call_evaluate(trainer, state, dataloader)

    return Evaluation(measure, every_epochs=1)


class EpochHook(BaseHook):
    """Collect the metrics of each epoch, and call functions `(trainer, epoch, metrics)` after it.

    They are named `train_loss`, `eval_loss` and so on.

    Attributes:
      history: lists with a value for each epoch, by name.
    """

    run_state = ("history", "_means")

    def __init__(self, trainer: Any, callbacks: Sequence[Callable[..., Any]]) -> None:
        self._trainer, self._callbacks = trainer, callbacks
        self.reset(0)

    def reset(self, step: int) -> None:  # noqa: ARG002
        self.history: dict[str, list[float]] = {}
        self._means = NO_MEANS

    def __call__(self, event: Event) -> None:
        self._trainer.state = event.state
        event = event._replace(metrics={}) if event.is_train else event
        self._means = add_event(self._means, event)

    def end_epoch(self, epoch: int) -> None:
        means, self._means = epoch_means(self._means), NO_MEANS
        metrics = {name.replace("/", "_", 1): x for name, x in means.items()}
        past = self.history
        self.history = past | {name: [*past.get(name, []), x] for name, x in metrics.items()}
        for callback in self._callbacks:
            callback(self._trainer, epoch, dict(metrics))
