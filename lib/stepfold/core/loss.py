"""The loss contract: what a loss function may return, and what it means.

A loss function is `(params, batch, key) -> loss` or `-> (loss, metrics)`. A stateful one is
`(params, batch, key, model_state) -> (loss, metrics, model_state)`. The loss is a scalar, an
`Average` (a total and a weight), or a dict of these, each with *its own* denominator. Totals and
weights stay separate until the whole batch is reduced. This makes the loss exact under gradient
accumulation, on several devices and with ragged batches; dividing earlier would not.
"""

from collections.abc import Callable, Iterable
from functools import reduce
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from stepfold import tree
from stepfold.errors import LossError

if TYPE_CHECKING:
    from clu.metrics import Average, Metric

LossFn = Callable[..., Any]
"""`(params, batch, key) -> loss | (loss, metrics)`; stateful with `model_state` in and out."""

Terms = dict[str, "Average"]
"""The terms of a loss by name; the loss is the sum of their means."""

Metrics = dict[str, "Metric"]
"""Mergeable metrics by name, as `clu.metrics` has them."""


def mean(values: Any, where: Any = None) -> "Average":
    """Compute the mean of values as a total and a weight, so that means merge exactly.

    Use it for losses and for metrics. Sums are computed in at least float32. The mean of booleans
    counts in integers unless `where` is floating, so that an accuracy is exact in any merge order.

    Args:
      values: an array, or a scalar.
      where: a mask or weights. Its shape is that of the values, with size 1 for axes to broadcast,
        or that of their leading axes (for example one mask per example). Elements of weight zero
        are ignored, even NaN.

    Returns:
      A `clu.metrics.Average`; `.compute()` divides, `.merge(other)` adds.

    >>> import jax.numpy as jnp, stepfold as sf
    >>> some = sf.mean(jnp.array([1.0, 2.0, 99.0]), where=jnp.array([1, 1, 0]))
    >>> rest = sf.mean(jnp.array([6.0]))
    >>> float(some.compute()), float(some.merge(rest).compute())
    (1.5, 3.0)
    """
    from clu.metrics import Average  # lazy: imports flax, a quarter of jax's import time

    values = jnp.asarray(values)
    if where is None:
        where = jnp.ones(values.shape, bool)
    where = jnp.asarray(where)
    _check_mean(values, where)
    where = where.reshape(where.shape + (1,) * (values.ndim - where.ndim))
    where = jnp.broadcast_to(where, values.shape)
    counting = values.dtype == bool and not tree.is_float(where)
    dtype = jnp.int32 if counting else tree.widen(_float_dtype(values, where))
    weight = where.astype(dtype)
    total = jnp.where(weight != 0, values.astype(dtype) * weight, 0)
    return Average(total=total.sum(dtype=dtype), count=weight.sum(dtype=dtype))


def _float_dtype(values: jax.Array, where: jax.Array) -> DTypeLike:
    return next((x.dtype for x in (values, where) if tree.is_float(x)), jnp.float32)


def _check_mean(values: jax.Array, where: jax.Array) -> None:
    for name, array in (("values", values), ("where", where)):
        if not tree.is_real(array):
            raise LossError(f"mean: expected real numbers as {name}, got {tree.spell(array)}")
    repeats = where.ndim == values.ndim and all(
        size in (1, wanted) for size, wanted in zip(where.shape, values.shape, strict=True)
    )
    if not repeats and where.shape != values.shape[: where.ndim]:
        raise LossError(
            f"mean: where must have the shape of the values or of their leading axes, "
            f"got {tree.spell(where)} for values {tree.spell(values)}"
        )


def total_of(terms: Terms) -> jax.Array:
    """Sum the means of the terms.

    A term of weight zero (every example masked) is zero and has a zero gradient, so that a fully
    masked batch does not turn the parameters into NaN.
    """
    return _add(term.total / _nonzero(term.count) for term in terms.values())


def share_of(part: Terms, whole: Terms) -> jax.Array:
    """Return a scalar whose gradients, summed over the parts, are those of `total_of(whole)`.

    By the quotient rule d(T / W) = dT / W - T / W^2 dW, with the totals T and weights W of the
    whole batch held constant. If a weight does not depend on the parameters, the second summand has
    no gradient, and the compiler eliminates it with everything that only it needs.
    """

    def share(name: str) -> Any:
        weight = _nonzero(whole[name].count)
        slope = jnp.where(whole[name].count == 0, 0, whole[name].total / weight**2)
        return part[name].total / weight - slope * part[name].count

    return _add(share(name) for name in part)


def _add(values: Iterable[Any]) -> jax.Array:
    values = list(values)
    dtype = max((value.dtype for value in values), key=lambda dtype: dtype.itemsize)
    total: jax.Array = reduce(jnp.add, [value.astype(dtype) for value in values])
    return total


def _nonzero(weight: jax.Array) -> jax.Array:
    return jnp.where(weight == 0, jnp.ones_like(weight), weight)
