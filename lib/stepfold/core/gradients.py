"""Gradients of a loss function, over the whole batch or accumulated over microbatches.

With ragged masks, the mean of the microbatches' means is not the mean of the batch. So a first scan
over the microbatches sums the total and the weight of every term. A second scan differentiates each
microbatch's share of `total / weight`, and adds the gradients into one buffer. The first scan costs
next to nothing: where the weights depend on the batch alone, XLA eliminates its forward pass.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from stepfold import tree
from stepfold.core.contract import checked
from stepfold.core.loss import LossFn, Metrics, Terms, share_of, total_of
from stepfold.core.state import check_params
from stepfold.errors import ConfigError, DataError

GradFn = Callable[[Any, Any, Any, Any], tuple[Any, Terms, Metrics, Any]]
"""`(params, batch, key, model_state) -> (grads, loss terms, metrics, model_state)`."""


def value_and_grad(
    loss_fn: LossFn,
    *,
    accumulate: int = 1,
    stateful: bool = False,
    accumulator_dtype: DTypeLike | None = jnp.float32,
) -> GradFn:
    """Differentiate a loss function with respect to the parameters, with exact accumulation.

    With `accumulate=n` the batch is processed in n sequential microbatches, with the memory of one.
    Loss, metrics and gradients equal those of the full batch up to rounding, since every term keeps
    its own denominator. This includes ragged masks, fully masked microbatches, and weights that
    depend on the parameters (only these cost a second forward pass). A scalar loss weighs all
    microbatches equally.

    Microbatch i holds the examples i, i + n, i + 2n, …, so that each device keeps its own rows of a
    sharded batch. Its key is `fold_in(key, i)`; without accumulation it is the key itself. The
    model state is passed from each microbatch to the next.

    Args:
      loss_fn: a loss function.
      accumulate: the number of microbatches. It must divide the leading axis of every leaf.
      stateful: whether the loss function carries a model state.
      accumulator_dtype: the narrowest dtype to accumulate gradients in; None for their own dtypes.

    Returns:
      A function `(params, batch, key, model_state) -> (grads, terms, metrics, model_state)`. The
        gradients have the parameters' dtypes. Without `stateful`, `model_state` is `()`.

    >>> import jax, jax.numpy as jnp, stepfold as sf
    >>> def loss_fn(params, batch, key):
    ...     return sf.mean((params * batch["x"] - 1.0) ** 2, batch["mask"])
    >>> batch = {"x": jnp.arange(4.0), "mask": jnp.array([1, 1, 1, 0])}
    >>> for n in (1, 2, 4):
    ...     grad_fn = sf.value_and_grad(loss_fn, accumulate=n)
    ...     grads, terms, _, _ = grad_fn(jnp.array(2.0), batch, jax.random.key(0), ())
    ...     print(round(float(grads), 4), round(float(terms["loss"].compute()), 4))
    4.6667 3.6667
    4.6667 3.6667
    4.6667 3.6667
    """
    if accumulator_dtype is not None and tree.floating(accumulator_dtype) is None:
        raise ConfigError(
            f"accumulator_dtype: expected a floating dtype or None, got {accumulator_dtype!r}"
        )
    if _count(accumulate) > 1:
        return gradients_in_parts(
            loss_fn, accumulate, stateful=stateful, accumulator_dtype=accumulator_dtype
        )
    objective = _objective(loss_fn, stateful)

    def at_once(params: Any, batch: Any, key: Any, model_state: Any) -> Any:
        def loss(params: Any) -> Any:
            aux = objective(params, batch, key, model_state)
            return total_of(aux[0]), aux

        check_params(params)
        grads, aux = jax.grad(loss, has_aux=True)(params)
        return grads, *aux

    return at_once


def gradients_in_parts(
    loss_fn: LossFn,
    count: int,
    *,
    stateful: bool = False,
    accumulator_dtype: DTypeLike | None = jnp.float32,
    axes: tuple[str, ...] = (),
) -> GradFn:
    """Accumulate gradients over `count` microbatches; see `value_and_grad`.

    `axes` names mapped axes (of `shard_map` or `vmap`) over which the examples are sharded. Terms
    and metrics are then those of the whole batch. The gradients are the local share, in the dtype
    of the accumulator; their sum over the axes is the gradient of the whole batch.
    """
    count = _count(count)
    objective = _objective(loss_fn, stateful)

    def in_parts(params: Any, batch: Any, key: Any, model_state: Any) -> Any:
        check_params(params)
        params = jax.tree.map(jnp.asarray, params)
        take = _microbatches(batch, count)
        if axes:
            key = jax.random.fold_in(key, jax.lax.axis_index(axes))

        def forward(model_state: Any, i: Any) -> Any:
            micro = take(i), jax.random.fold_in(key, i)
            terms, _, model_state = objective(params, *micro, model_state)
            return model_state, terms

        def backward(carry: Any, i: Any) -> Any:
            total, before = carry

            def share(params: Any) -> Any:
                micro = take(i), jax.random.fold_in(key, i)
                aux = objective(params, *micro, before)
                return share_of(aux[0], whole), aux

            grads, (terms, metrics, after) = jax.grad(share, has_aux=True)(params)
            total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)
            return (total, after), (terms, metrics)

        parts = jnp.arange(count)
        whole = _merged(jax.lax.scan(forward, model_state, parts)[1], axes)
        start = jax.tree.map(lambda p: _buffer(p, accumulator_dtype), params)
        (grads, model_state), seen = jax.lax.scan(backward, (start, model_state), parts)
        if not axes:  # with axes, the caller casts their sum
            grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        return grads, *_merged(seen, axes), model_state

    return in_parts


def _objective(loss_fn: LossFn, stateful: bool) -> Callable[..., tuple[Any, Any, Any]]:
    """Adapt a loss function to always take and return a model state."""
    loss_fn = checked(loss_fn, stateful=stateful)

    def objective(params: Any, batch: Any, key: Any, model_state: Any) -> tuple[Any, Any, Any]:
        if stateful:
            terms, metrics, model_state = loss_fn(params, batch, key, model_state)
        else:
            terms, metrics = loss_fn(params, batch, key)
        return terms, metrics, model_state

    return objective


def _count(accumulate: Any) -> int:
    try:
        count = 0 if isinstance(accumulate, bool) else operator.index(accumulate)
    except TypeError:
        count = 0
    if count < 1:
        raise ConfigError(f"accumulate: expected an integer of at least 1, got {accumulate!r}")
    return count


def _microbatches(batch: Any, n: int) -> Callable[[Any], Any]:
    """Check that `n` divides the batch, and return a function that slices microbatch i."""
    leaves = tree.named_leaves(batch, "batch")
    sizes = {name: jnp.shape(leaf)[:1] for name, leaf in leaves}
    if len(set(sizes.values())) != 1 or () in sizes.values():
        got = ", ".join(f"{name} {tree.spell(leaf)}" for name, leaf in leaves) or "an empty batch"
        raise DataError(
            f"accumulate={n} splits the leading axis, which must be there and have one size on "
            f"every leaf of the batch; got {got}"
        )
    ((size,),) = set(sizes.values())
    if size % n or size == 0:
        fits = [k for k in range(1, size + 1) if size % k == 0]
        raise DataError(
            f"accumulate={n} does not divide the leading axis of {size} "
            f"({', '.join(sizes)}); what would: {fits or 'nothing, the batch is empty'}"
        )
    split = jax.tree.map(lambda x: jnp.reshape(x, (size // n, n, *x.shape[1:])), batch)
    return lambda i: jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False), split
    )


def _buffer(param: Any, dtype: DTypeLike | None) -> jax.Array:
    """Make zeros to accumulate a parameter's gradient in, never narrower than the parameter."""
    narrow = dtype is not None and param.dtype.itemsize < jnp.dtype(dtype).itemsize
    return jnp.zeros_like(param, dtype=dtype if narrow else None)


def _merged(stacked: Any, axes: tuple[str, ...] = ()) -> Any:
    """Merge the metrics stacked by a scan, and those of mapped axes; an `Average` is summed."""
    from clu.metrics import Average, Metric

    def merge(metric: Any) -> Any:
        if type(metric) is Average:
            total = jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), metric)
            return jax.lax.psum(total, axes) if axes else total
        merged = metric.reduce()
        return jax.lax.all_gather(merged, axes).reduce() if axes else merged

    return jax.tree.map(merge, stacked, is_leaf=lambda x: isinstance(x, Metric))
