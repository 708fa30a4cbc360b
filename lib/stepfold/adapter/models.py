"""Models that carry their parameters, and loss functions of outputs and targets."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.adapter.loading import num_rows
from stepfold.core.loss import LossFn, mean
from stepfold.errors import DataError, refuse

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
    """Return the parameters of a model, and the function that makes a model of parameters."""
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


# Batches, outputs and the loss


def split_batch(batch: Any, *, keep_labels: bool, method: str) -> tuple[Any, Any]:
    """Return the inputs and the targets of a batch; `method` is the one that others override.

    With `keep_labels`, the `labels` are an input too, of which the model computes the loss.
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


def loss_in(outputs: Any) -> Any:
    """Return the loss that a model computed itself, in a dict or as an attribute, or None."""
    is_dict = isinstance(outputs, Mapping)
    return outputs.get("loss") if is_dict else getattr(outputs, "loss", None)


def make_loss(
    compute: Callable[[Any, Any], Any], bind: Callable[[Any, Any], Any], *, is_training: bool
) -> LossFn:
    """Make a loss function of methods of a trainer.

    `compute(trainer, batch)` returns the loss, and `bind(params, key)` the trainer with these
    parameters in its model.
    """

    def loss_fn(params: Any, batch: Any, key: Any) -> Any:
        returned = compute(bind(params, key if is_training else None), batch)
        if not isinstance(returned, tuple):
            return _reduce("loss_fn", returned, batch)
        loss, *rest = returned
        reduced = [
            {name: _reduce(name, value, batch) for name, value in metrics.items()}
            if isinstance(metrics, Mapping)
            else metrics
            for metrics in rest
        ]
        return _reduce("loss_fn", loss, batch), *reduced

    return loss_fn


def count_examples(batch: Any) -> int:
    """Return the number of examples in a batch, without padding."""
    mask = _mask_of(batch)
    return num_rows(batch) if mask is None else int(np.sum(mask))


def _mask_of(batch: Any) -> Any:
    return batch.get("mask") if isinstance(batch, Mapping) else None


def _reduce(name: str, value: Any, batch: Any) -> Any:
    """Turn values of examples into a mean under the mask; weight a number by its examples."""
    from clu.metrics import Metric

    if isinstance(value, Metric) or not tree.is_data(value):
        return value  # which the step checks
    mask = _mask_of(batch)
    if jnp.ndim(value):
        return mean(value, mask)
    if mask is not None:
        expected = 'values of examples, or sf.mean(values, mask), for a batch with a "mask"'
        advice = "leave out the mean, which the trainer takes"
        refuse(name, expected, tree.describe_value(value), advice)
    return mean(value, jnp.float32(num_rows(batch)))
