"""The loss contract: what a loss function may return, and what it means.

A loss function is `(params, batch, key) -> loss` or `-> (loss, metrics)`, and where it is stateful
`(params, batch, key, model_state) -> (loss, metrics, model_state)`. The loss is a scalar, an
`Average` (a total and a weight), or a dict of those, each with *its own* denominator. Keeping total
and weight apart until the whole batch is seen is what makes accumulation, devices and ragged
batches exact; dividing early is what makes them wrong elsewhere.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from clu.metrics import Average, Metric
from jax.typing import DTypeLike

from stepfold import tree
from stepfold.errors import LossError

LossFn = Callable[..., Any]
"""`(params, batch, key) -> loss | (loss, metrics)`; stateful with `model_state` in and out."""

Terms = dict[str, Average]
"""The terms of a loss by name; the loss is the sum of their means."""

Metrics = dict[str, Metric]
"""Mergeable metrics by name, as `clu.metrics` has them."""


def mean(values: Any, where: Any = None) -> Average:
    """Take the mean of values, as a total and a weight that can still be merged exactly.

    Use it for a loss and for metrics alike. Sums are taken in float32 at least; the mean of
    booleans counts in integers, so that an accuracy is exact whatever it is merged over.

    Args:
      values: an array, or a scalar.
      where: a mask or non-negative weights. Its shape is that of the values, or of their leading
        axes (one mask per example, say). What has weight zero does not enter, not even as a NaN.

    Returns:
      A `clu.metrics.Average`; `.compute()` divides, `.merge(other)` adds.

    >>> import jax.numpy as jnp, stepfold as sf
    >>> some = sf.mean(jnp.array([1.0, 2.0, 99.0]), where=jnp.array([1, 1, 0]))
    >>> rest = sf.mean(jnp.array([6.0]))
    >>> float(some.compute()), float(some.merge(rest).compute())
    (1.5, 3.0)
    """
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
        if not (
            tree.is_float(array) or array.dtype == bool or jnp.issubdtype(array.dtype, jnp.integer)
        ):
            raise LossError(f"mean: expected real numbers as {name}, got {tree.spell(array)}")
    if where.shape != values.shape[: where.ndim]:
        raise LossError(
            f"mean: where must have the shape of the values or of their leading axes, "
            f"got {tree.spell(where)} for values {tree.spell(values)}"
        )


@partial(jax.tree_util.register_dataclass, data_fields=["terms"], meta_fields=[])
@dataclass(frozen=True)
class TermSum(Metric):  # type: ignore[misc]
    """The sum of several means, merged term by term, so that each keeps its own denominator."""

    terms: Terms

    def merge(self, other: "TermSum") -> "TermSum":
        """Merge term by term."""
        return TermSum({name: term.merge(other.terms[name]) for name, term in self.terms.items()})

    def compute(self) -> jax.Array:
        """Add up the terms' means: NaN where no term has seen any weight, as an Average is."""
        seen = jnp.stack([term.count != 0 for term in self.terms.values()]).any()
        return jnp.where(seen, total_of(self.terms), jnp.nan)


def total_of(terms: Terms) -> jax.Array:
    """Add up the means of the terms.

    A term without weight (every example masked) is zero and has a zero gradient: a batch that
    says nothing must not turn the parameters into NaN.
    """
    return _add(term.total / _nonzero(term.count) for term in terms.values())


def share_of(part: Terms, whole: Terms) -> jax.Array:
    """Give a function whose gradients, summed over the parts, are those of `total_of(whole)`.

    By the quotient rule d(T / W) = dT / W - T / W^2 dW, with the totals T and weights W of the
    whole batch held fixed. Where a weight does not depend on the parameters the second summand
    has no gradient, and the compiler drops it along with all that only it needs.
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


def report(terms: Terms, metrics: Metrics, **more: Metric) -> Metrics:
    """Put the loss, its terms, the user's metrics and the step's own under one roof.

    Raises:
      LossError: where two of them have one name.
    """
    loss = next(iter(terms.values())) if len(terms) == 1 else TermSum(terms)
    reported: Metrics = {"loss": loss, **(terms if set(terms) != {"loss"} else {})}
    if "loss" in terms and len(terms) > 1:
        raise LossError(
            "loss: the sum of the terms is reported as 'loss', so a term among several cannot have "
            f"that name; got the terms {sorted(terms)}"
        )
    for name, metric in {**metrics, **more}.items():
        if name in reported or (name in metrics and name in more):
            raise LossError(
                f"metrics/{name}: the name is taken; the step itself reports "
                f"{sorted({*reported, *more})}, so call yours something else"
            )
        reported[name] = metric
    return reported


def checked(loss_fn: LossFn, *, stateful: bool = False) -> LossFn:
    """Hold a loss function to the contract, and its result to one form.

    Returns:
      A loss function that returns `(terms, metrics)`, stateful `(terms, metrics, model_state)`,
      with the terms a dict of `Average`s in float32 at least. Checking it again changes nothing.

    Raises:
      LossError: here, if the function cannot take the arguments; while tracing, if it returns
        something else than the contract says.
    """
    _check_signature(loss_fn, ["params", "batch", "key"] + ["model_state"] * stateful)

    def loss_in_form(params: Any, batch: Any, key: Any, *model_state: Any) -> tuple[Any, ...]:
        returned = loss_fn(params, batch, key, *model_state)
        if stateful:
            loss, metrics, new_state = _three(returned)
            _check_same(model_state[0], new_state)
            return read_terms(loss), _read_metrics(metrics), new_state
        loss, metrics = _two(returned)
        return read_terms(loss), _read_metrics(metrics)

    return loss_in_form


def _check_signature(loss_fn: LossFn, names: list[str]) -> None:
    wanted = f"loss_fn({', '.join(names)})"
    if not callable(loss_fn):
        raise LossError(f"expected a function {wanted}, got {tree.spell(loss_fn)}")
    try:
        signature = inspect.signature(loss_fn)
    except ValueError:  # some built-ins have none to look at; the call itself will tell
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        advice = (
            "; a loss with model_state needs stateful=True"
            if len(names) == 3
            else "; without model_state leave out stateful=True"
        )
        raise LossError(f"expected {wanted}, got {name}{signature}: {error}{advice}") from None


def _two(returned: Any) -> tuple[Any, Any]:
    if not isinstance(returned, tuple):
        return returned, {}
    if len(returned) != 2:
        raise LossError(
            f"expected the loss or (loss, metrics), got a tuple of {len(returned)}"
            + ("; a loss that returns model_state needs stateful=True" * (len(returned) == 3))
        )
    return returned[0], returned[1]


def _three(returned: Any) -> tuple[Any, Any, Any]:
    if not isinstance(returned, tuple) or len(returned) != 3:
        what = (
            f"a tuple of {len(returned)}" if isinstance(returned, tuple) else tree.spell(returned)
        )
        raise LossError(f"stateful=True: expected (loss, metrics, model_state), got {what}")
    return returned[0], returned[1], returned[2]


def _check_same(old: Any, new: Any) -> None:
    lines = tree.diff(old, new, "model_state")
    if lines:
        raise LossError(
            "model_state: expected the structure, shapes and dtypes that went in, got\n  "
            + "\n  ".join(lines)
            + "\nCast what is computed in another dtype back before returning it."
        )


def read_terms(loss: Any) -> Terms:
    """Read a loss in any of its forms as a dict of terms."""
    if not isinstance(loss, Mapping):
        return {"loss": _read_term("loss", loss)}
    if not loss:
        raise LossError("loss: expected at least one term, got an empty dict")
    bad = [name for name in loss if not isinstance(name, str)]
    if bad:
        raise LossError(f"loss: expected the terms' names as strings, got {bad}")
    return {name: _read_term(f"loss/{name}", term) for name, term in loss.items()}


def _read_term(path: str, term: Any) -> Average:
    if isinstance(term, Average):
        total, count = _scalar(path + ".total", term.total), jnp.asarray(term.count)
        if count.shape != () or jnp.iscomplexobj(count):
            raise LossError(f"{path}.count: expected a real scalar, got {tree.spell(count)}")
        return Average(total=total, count=count.astype(total.dtype))
    total = _scalar(path, term)
    return Average(total=total, count=jnp.ones_like(total))


def _scalar(path: str, value: Any) -> Any:
    advice = "return sf.mean(values, mask), a floating scalar, or a dict of those"
    if not (tree.is_array(value) or isinstance(value, int | float)):
        raise LossError(f"{path}: expected a number, got {tree.spell(value)}; {advice}")
    value = tree.strong(jnp.asarray(value))
    if value.shape != ():
        raise LossError(f"{path}: expected a scalar, got {tree.spell(value)}; {advice}")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise LossError(f"{path}: expected a floating number, got {tree.spell(value)}; {advice}")
    return value.astype(tree.widen(value.dtype))


def _read_metrics(metrics: Any) -> Metrics:
    if not isinstance(metrics, Mapping):
        raise LossError(
            f"metrics: expected a dict of clu.metrics.Metric, got {tree.spell(metrics)}"
        )
    for name, metric in metrics.items():
        if not isinstance(name, str):
            raise LossError(f"metrics: expected names as strings, got {name!r}")
        if not isinstance(metric, Metric):
            raise LossError(
                f"metrics/{name}: expected a clu.metrics.Metric, got {tree.spell(metric)}; wrap "
                "values as sf.mean(values, mask), so that they merge exactly"
            )
    return dict(metrics)
