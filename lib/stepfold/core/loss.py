"""The loss contract: what a loss function may return, and what it means.

A loss function is `(params, batch, key) -> loss` or `-> (loss, metrics)`. A stateful one is
`(params, batch, key, model_state) -> (loss, metrics, model_state)`. The loss is a scalar, an
`Average` (a total and a weight), or a dict of these, each with *its own* denominator. Totals and
weights stay separate until the whole batch is reduced. This makes the loss exact under gradient
accumulation, on several devices and with ragged batches; dividing earlier would not. A metric is a
`clu.metrics.Metric`, or a number. A number, as a loss or a metric, is taken as a mean over the
examples of its batch: microbatches weigh the same, and batches by `count_examples`.

The contract is checked when a step is made and while jax traces it, so that the checks cost nothing
in a compiled step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce, wraps
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import ConcretizationTypeError, TracerArrayConversionError

from stepfold import tree
from stepfold.core.validation import spell_call, takes
from stepfold.errors import LossError, StepfoldError, refuse, warn
from stepfold.internals import texts
from stepfold.internals.jax import sum_over_shards, used_inputs

if TYPE_CHECKING:
    from clu.metrics import Average, Metric  # imports flax, a quarter of jax's import time

LossFn = Callable[..., Any]
"""`(params, batch, key) -> loss | (loss, metrics)`; stateful with `model_state` in and out."""

Terms = dict[str, "Average"]
"""The terms of a loss by name; the loss is the sum of their means."""

Metrics = dict[str, "Metric"]
"""Mergeable metrics by name, as `clu.metrics` has them."""


def mean(values: Any, where: Any = None) -> "Average":
    """Compute the mean of values as a total and a weight, so that means merge exactly.

    Use it for losses and for metrics. Totals and weights are at least float32, so that they never
    wrap around, however many means are merged. `fit` and `evaluate` merge in float64. Booleans are
    counted in integers first, so that the counts of a batch are exact up to 2**24, and to rounding
    above.

    Args:
      values: an array, or a scalar.
      where: a mask or weights. Its shape is that of the values, with size 1 for axes to broadcast,
        or that of their leading axes (for example one mask per example). Elements of weight zero
        do not contribute to the mean, even if they are NaN. The gradient may still be NaN, since
        zero times an infinite derivative (of `log(0)`, for example) is NaN: replace the inputs of
        such elements with `jnp.where` too.

    Returns:
      A `clu.metrics.Average`; `.compute()` divides, `.merge(other)` adds.

    >>> import jax.numpy as jnp, stepfold as sf
    >>> some = sf.mean(jnp.array([1.0, 2.0, 99.0]), where=jnp.array([1, 1, 0]))
    >>> rest = sf.mean(jnp.array([6.0]))
    >>> float(some.compute()), float(some.merge(rest).compute())
    (1.5, 3.0)
    """
    from clu.metrics import Average

    values = jnp.asarray(values)
    where = _spread("mean", "where", True if where is None else where, values)
    floats = [x.dtype for x in (values, where) if tree.is_float(x)]
    dtype = tree.widen(floats[0] if floats else jnp.float32)
    # A float32 that counts one by one stands still at 2**24.
    sum_dtype = jnp.int32 if values.dtype == bool and not floats else dtype
    weight = where.astype(sum_dtype)
    total = jnp.where(weight != 0, values.astype(sum_dtype) * weight, 0)
    sums = total.sum(dtype=sum_dtype), weight.sum(dtype=sum_dtype)
    return Average(total=sums[0].astype(dtype), count=sums[1].astype(dtype))


def perplexity(nll: Any, where: Any = None) -> "Average":
    """Compute the perplexity, the exponential of a mean, as a total and a weight.

    Return it as a metric of a loss function, next to the loss. It merges exactly, as a `mean` does:
    over microbatches, steps, batches, devices and processes it is the exponential of the total loss
    divided by the total weight, never a mean of perplexities. `Checkpoints(best="eval/perplexity")`
    keeps the lowest.

    Args:
      nll: negative log-likelihoods in nats, such as the cross-entropy of each token.
      where: a mask or weights, as in `mean`.

    >>> import jax.numpy as jnp, stepfold as sf
    >>> some = sf.perplexity(jnp.log(jnp.array([2.0, 8.0, 99.0])), jnp.array([1, 1, 0]))
    >>> rest = sf.perplexity(jnp.log(jnp.array([4.0])))
    >>> [f"{metric.compute():.4f}" for metric in (some, rest, some.merge(rest))]
    ['4.0000', '4.0000', '4.0000']
    """
    from stepfold.core.perplexity import Perplexity

    total = mean(nll, where)
    return Perplexity(total=total.total, count=total.count)


def mean_by(
    values: Any, labels: Any, names: Sequence[str], where: Any = None, *, prefix: str = ""
) -> "dict[str, Average]":
    """Compute a `mean` for each label, such as the loss of each source of a mixture.

    Return it as metrics of a loss function. Like every `mean` it merges exactly. A label without
    values has weight zero: it does not change the mean of a longer interval, and if the whole
    interval has none, the metric is NaN.

    Args:
      values: an array.
      labels: integers in the shape of the values or of their leading axes, for example one per
        example. Values of a label that has no name are left out.
      names: the name of label 0, 1, …, such as the `names` of a mixture.
      where: a mask or weights, as in `mean`.
      prefix: what the names of the metrics begin with, such as `loss/`.

    >>> import jax.numpy as jnp, stepfold as sf
    >>> loss, source = jnp.array([1.0, 2.0, 6.0, 99.0]), jnp.array([0, 0, 1, 1])
    >>> means = sf.mean_by(loss, source, ["web", "code"], jnp.array([1, 1, 1, 0]), prefix="loss/")
    >>> {name: float(mean.compute()) for name, mean in means.items()}
    {'loss/web': 1.5, 'loss/code': 6.0}
    """
    values = jnp.asarray(values)
    labels = _spread("mean_by", "labels", labels, values)
    where = _spread("mean_by", "where", True if where is None else where, values)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        refuse("mean_by", "integers as labels", tree.describe_value(labels), kind=LossError)
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        refuse("mean_by", "a list of names", tree.describe_value(names), kind=LossError)
    if len(set(names)) < len(names):
        expected = "a different name for each label"
        refuse("mean_by", expected, f"{', '.join(names)}", kind=LossError)
    nothing = jnp.zeros((), where.dtype)
    return {
        f"{prefix}{name}": mean(values, jnp.where(labels == label, where, nothing))
        for label, name in enumerate(names)
    }


def _spread(function: str, name: str, array: Any, values: jax.Array) -> jax.Array:
    """Broadcast an array to the shape of values, of which it may have the leading axes alone."""
    array = jnp.asarray(array)
    for what, each in (("values", values), (name, array)):
        if not tree.is_real(each):
            expected, got = f"real numbers as {what}", tree.describe_value(each)
            refuse(function, expected, got, kind=LossError)
    sizes = zip(array.shape, values.shape, strict=False)
    repeats = array.ndim == values.ndim and all(size in (1, wanted) for size, wanted in sizes)
    if not repeats and array.shape != values.shape[: array.ndim]:
        expected = f"{name} in the shape of the values or of their leading axes"
        got = f"{tree.describe_value(array)} for values {tree.describe_value(values)}"
        refuse(function, expected, got, kind=LossError)
    array = array.reshape(array.shape + (1,) * (values.ndim - array.ndim))
    return jnp.broadcast_to(array, values.shape)


def checked(loss_fn: LossFn, *, stateful: bool = False) -> LossFn:
    """Wrap a loss function to check the contract and normalize its result.

    The result returns `(terms, metrics)`, or `(terms, metrics, model_state)` if stateful; `terms`
    is a dict of `Average`s in at least float32; numbers are `BatchMean`s. A wrong signature raises
    here, a wrong result while tracing. Idempotent.
    """
    names = ["params", "batch", "key", "model_state"]
    wanted = f"loss_fn({', '.join(names[: 3 + stateful])})"
    if not callable(loss_fn):
        got = tree.describe_value(loss_fn)
        refuse("loss_fn", f"a function {wanted}", got, kind=LossError)
    if not takes(loss_fn, 3 + stateful):
        other = "leave out stateful=True" if stateful else "give stateful=True, for a model state"
        advice = other if takes(loss_fn, 4 - stateful) else ""
        refuse("loss_fn", wanted, spell_call(loss_fn), advice, kind=LossError)

    def checked_loss(params: Any, batch: Any, key: Any, *model_state: Any) -> tuple[Any, ...]:
        try:
            returned = loss_fn(params, batch, key, *model_state)
        except StepfoldError:
            raise
        except Exception as error:
            _check_axis_names(error)
            advice = _advice_on(error, batch)
            if advice not in getattr(error, "__notes__", ()):  # a function may be checked twice
                error.add_note(advice)
            raise
        loss, metrics, *new_state = _parts(returned, stateful)
        if stateful:
            _check_model_state(model_state[0], new_state[0])
        return read_terms(loss), read_metrics(metrics), *new_state

    return without_padding(checked_loss) if has_no_padding(loss_fn) else checked_loss


def warning_of_unread_mask(loss_fn: LossFn) -> LossFn:
    """Wrap a checked loss function to warn, when it is traced, of what counts padding as data.

    `sf.batches(remainder="pad")` and `sf.collate` mark padding by `mask`. To see what the loss and
    its metrics depend on, it is traced once more, the first time that a batch has one. What is
    traced is then dropped, so that the step is compiled from the same program.
    """
    is_checked = has_no_padding(loss_fn)

    def loss(params: Any, batch: Any, *rest: Any) -> tuple[Any, ...]:
        nonlocal is_checked
        mask = batch.get("mask") if type(batch) is dict else None
        if isinstance(mask, jax.core.Tracer) and not is_checked:
            is_checked = True
            _warn_of_padding(lambda batch: loss_fn(params, batch, *rest)[:2], batch)
        return loss_fn(params, batch, *rest)  # type: ignore[no-any-return]

    return loss


def _warn_of_padding(function: Callable[[Any], tuple[Terms, Metrics]], batch: Any) -> None:
    """Warn if a loss, or else the mean of a metric, depends on a batch and not on its mask.

    A mask of rows says which of them are data. One of another shape may be of tokens, so that a
    mean over the rows is right without it.
    """
    from clu.metrics import Average

    traced_batch = {
        name: value
        for name, value in batch.items()
        if all(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))
    }
    masks = [path[0].key == "mask" for path, _ in jax.tree_util.tree_leaves_with_path(traced_batch)]
    traced = lambda traced_batch: function({**batch, **traced_batch})
    jaxpr, (terms, metrics) = jax.make_jaxpr(traced, return_shape=True)(traced_batch)
    count = len(jax.tree.leaves(terms))

    def depends(begin: int, end: int) -> tuple[bool, bool]:
        """Whether some outputs depend on the mask, and on the rest of the batch."""
        wanted = [begin <= index < end for index in range(len(jaxpr.jaxpr.outvars))]
        used = used_inputs(jaxpr.jaxpr, wanted)
        pairs = [*zip(used, masks, strict=True)]
        of_mask = [is_used for is_used, is_one in pairs if is_one]
        return any(of_mask), any(is_used for is_used, is_one in pairs if not is_one)

    if not depends(0, count)[0]:
        warn(_UNREAD_MASK)
        return
    unmasked, begin = [], count
    for name in sorted(metrics):  # the order of the outputs
        end = begin + len(jax.tree.leaves(metrics[name]))
        is_mean = isinstance(metrics[name], Average) and metrics[name].total.ndim == 0
        if is_mean and batch["mask"].ndim == 1:
            uses_mask, uses_data = depends(begin, end)
            unmasked += [name] if uses_data and not uses_mask else []
        begin = end
    if unmasked:
        warn(_UNMASKED_METRICS.format(", ".join(unmasked)))


_UNREAD_MASK = (
    'loss_fn: expected a loss that depends on batch["mask"], got one that counts padding as data; '
    'return sf.mean(values, batch["mask"]), or drop the rows that do not fill a batch with '
    'sf.batches(…, remainder="drop"). If other values mark the padding, leave the mask out of the '
    "batch"
)
_UNMASKED_METRICS = (
    'loss_fn: expected metrics that depend on batch["mask"], as the loss does, got means that '
    'count padding as data: {}; return sf.mean(values, batch["mask"])'
)


def without_padding(loss_fn: LossFn) -> LossFn:
    """Mark a loss function whose batches are never padded, so that it may ignore their mask."""

    @wraps(loss_fn)
    def loss(*arguments: Any) -> Any:
        return loss_fn(*arguments)

    loss.has_no_padding = True  # type: ignore[attr-defined]
    return loss


def has_no_padding(loss_fn: LossFn) -> bool:
    """Whether `without_padding` has marked a loss function."""
    return getattr(loss_fn, "has_no_padding", False)


def _check_axis_names(error: Exception) -> None:
    """Replace jax's error on a collective over an axis that is not mapped."""
    match = texts.UNBOUND_AXIS.search(str(error))
    if isinstance(error, NameError) and match:
        axis = match[1]
        raise LossError(
            f"loss_fn: expected collectives over axes of shard_map or vmap, got axis {axis!r}, "
            "which is not mapped; under jit leave it out (axis_name=None in a BatchNorm), since "
            "the mean over a sharded batch is global already, or run the step in jax.shard_map "
            f"over a mesh with the axis {axis!r}"
        ) from error


def _advice_on(error: Exception, batch: Any) -> str:
    """Return advice on an exception in a loss function."""
    if isinstance(error, ConcretizationTypeError | TracerArrayConversionError):
        return (
            "loss_fn: it is traced, and its arrays have no values yet; keep to jax.numpy, return "
            "arrays without float() or .item(), and choose by jnp.where instead of if"
        )
    if isinstance(error, TypeError) and texts.AVERAGE_OPERAND.search(str(error)):
        return (
            "loss_fn: sf.mean gives a total and a weight, to be divided when the whole batch is "
            'seen; scale the values in it, and return several as {"a": sf.mean(…), "b": sf.mean(…)}'
        )
    leaves = [
        f"{name} {tree.describe_value(leaf)}" for name, leaf in tree.named_leaves(batch, "batch")
    ]
    got = ", ".join(leaves[:8]) + ", …" * (len(leaves) > 8)
    no_mask = isinstance(error, KeyError) and "mask" in error.args
    advice = '; sf.batches(…, remainder="pad") and sf.collate add a mask' * no_mask
    if isinstance(error, TypeError) and texts.INTEGER_LABELS.search(str(error)):
        advice = "; labels of classes are integers: cast them, as batch[…].astype(jnp.int32)"
    return f"loss_fn was called with {got}{advice}"


def _parts(returned: Any, stateful: bool) -> tuple[Any, ...]:
    """Split what a loss function returned into loss, metrics and model state."""
    count = len(returned) if isinstance(returned, tuple) else None
    got = tree.describe_value(returned) if count is None else f"a tuple of {count}"
    if stateful and count != 3:
        refuse("stateful=True", "(loss, metrics, model_state)", got, kind=LossError)
    if not stateful and count not in (None, 2):
        advice = "a loss that returns model_state needs stateful=True" * (count == 3)
        refuse("loss_fn", "the loss or (loss, metrics)", got, advice, kind=LossError)
    return (returned, {}) if count is None else tuple(returned)


def _check_model_state(old: Any, new: Any) -> None:
    lines = tree.diff(old, new, "model_state")
    if not lines:
        return
    structures: list[Any] = [jax.tree.structure(old), jax.tree.structure(new)]
    shapes = [[getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(s)] for s in (old, new)]
    if structures[0] != structures[1]:
        advice = "Return every leaf that went in, in the same containers, and no other."
    elif shapes[0] != shapes[1]:
        advice = "A state keeps its shapes: make room in init for what grows."
    else:
        advice = "Cast each leaf back to its dtype before returning it."
    raise LossError(
        "model_state: expected the structure, shapes and dtypes that went in, got\n  "
        + "\n  ".join(lines)
        + f"\n{advice}"
    )


def read_terms(loss: Any) -> Terms:
    """Convert a loss of any allowed form to a dict of terms."""
    if not isinstance(loss, Mapping):
        return {"loss": _read_term("loss", loss)}
    if not loss:
        refuse("loss", "at least one term", "an empty dict", kind=LossError)
    bad = [name for name in loss if not isinstance(name, str)]
    if bad:
        refuse("loss", "the terms' names as strings", f"{bad}", kind=LossError)
    return {name: _read_term(f"loss/{name}", term) for name, term in loss.items()}


def _read_term(path: str, term: Any) -> "Average":
    from clu.metrics import Average

    from stepfold.core.batch_mean import BatchMean

    if not isinstance(term, Average):
        return BatchMean.of(_read_scalar(path, term))
    total = _read_scalar(f"{path}.total", term.total)
    if not tree.is_real(term.count) or jnp.shape(term.count) != ():
        refuse(f"{path}.count", "a real scalar", tree.describe_value(term.count), kind=LossError)
    kind = BatchMean if isinstance(term, BatchMean) else Average
    return kind(total=total, count=jnp.asarray(term.count).astype(total.dtype))


def _read_scalar(path: str, value: Any) -> Any:
    advice = "return sf.mean(values, mask), a floating scalar, or a dict of those"
    if not tree.is_data(value):
        refuse(path, "a number", tree.describe_value(value), advice, kind=LossError)
    value = jnp.asarray(value)
    if value.shape != ():
        refuse(path, "a scalar", tree.describe_value(value), advice, kind=LossError)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        refuse(path, "a floating number", tree.describe_value(value), advice, kind=LossError)
    return value.astype(tree.widen(value.dtype))


def read_metrics(metrics: Any) -> Metrics:
    """Check the metrics of a loss function, and return them as a dict; numbers are `BatchMean`s.

    A field `loss` of a `Collection` is called `metrics/loss`, since `loss` is that of the step: the
    one that is minimized, and that hooks watch.
    """
    from clu.metrics import Collection, Metric

    from stepfold.core.batch_mean import BatchMean

    if isinstance(metrics, Collection):
        # Its private field only counts merges.
        fields = {name: m for name, m in vars(metrics).items() if not name.startswith("_")}
        metrics = {"metrics/loss" if name == "loss" else name: m for name, m in fields.items()}
    if not isinstance(metrics, Mapping):
        advice = 'return (loss, metrics) in this order, as in loss, {"accuracy": sf.mean(hit)}'
        got = tree.describe_value(metrics)
        refuse("metrics", "a dict of metrics by name", got, advice, kind=LossError)
    read: Metrics = {}
    for name, metric in metrics.items():
        path, got = f"metrics/{name}", tree.describe_value(metric)
        if not isinstance(name, str):
            refuse("metrics", "names as strings", repr(name), kind=LossError)
        if tree.is_real(metric) and jnp.shape(metric) == ():
            metric = BatchMean.of(mean(metric).total)
        if not isinstance(metric, Metric):
            advice = "wrap values as sf.mean(values, mask), so that they merge exactly"
            refuse(path, "a number or a clu.metrics.Metric", got, advice, kind=LossError)
        if jax.tree_util.all_leaves([metric]):
            advice = "make its class a flax.struct.dataclass, or register it with jax"
            refuse(path, "a metric that is a pytree", got, advice, kind=LossError)
        read[name] = metric
    return read


def count_examples(batch: Any) -> Any:
    """Count the examples of a batch, which is the weight of a number that was computed from it.

    It is the sum of the `mask` if the batch is a dict with one, whatever its shape. Otherwise it is
    the size of the leading axis of the first leaf that has axes, and 1 if none has.
    """
    mask = batch.get("mask") if isinstance(batch, Mapping) else None
    if mask is not None and tree.is_real(mask):
        mask = jnp.asarray(mask)
        return mask.sum(dtype=jnp.int32 if mask.dtype == bool else None)
    sizes = [np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
    return int(sizes[0]) if sizes else 1


def weigh_numbers(metrics: Mapping[str, Any], batch: Any) -> dict[str, Any]:
    """Weigh the terms or metrics that are numbers by the examples of their batch."""
    from stepfold.core.batch_mean import BatchMean

    def weigh(metric: Any) -> Any:
        if not isinstance(metric, BatchMean):
            return metric
        value, weight = metric.compute(), jnp.asarray(count_examples(batch), jnp.float32)
        return mean(value, sum_over_shards(weight, batch, value))

    return {name: weigh(metric) for name, metric in metrics.items()}


def total_of(terms: Terms) -> jax.Array:
    """Sum the means of the terms.

    A term of weight zero (every example masked) is zero and has a zero gradient, so that a fully
    masked batch does not turn the parameters into NaN.
    """
    return _add(term.total / _nonzero(term.count) for term in terms.values())


def share_of(terms: Terms, batch_terms: Terms) -> jax.Array:
    """Return a microbatch's share of the loss; the gradients of all shares sum to the batch's.

    By the quotient rule d(T / W) = dT / W - T / W^2 dW, with the totals T and weights W of the
    full batch held constant. If a weight does not depend on the parameters, the second summand has
    no gradient, and the compiler eliminates it with everything that only it needs.
    """

    def share(name: str) -> Any:
        total, count = batch_terms[name].total, batch_terms[name].count
        weight = _nonzero(count)
        slope = jnp.where(count == 0, 0, total / weight**2)
        return terms[name].total / weight - slope * terms[name].count

    return _add(share(name) for name in terms)


def _add(values: Iterable[Any]) -> jax.Array:
    values = list(values)
    dtype = max((value.dtype for value in values), key=lambda dtype: dtype.itemsize)
    total: jax.Array = reduce(jnp.add, [value.astype(dtype) for value in values])
    return total


def _nonzero(weight: jax.Array) -> jax.Array:
    return jnp.where(weight == 0, jnp.ones_like(weight), weight)
