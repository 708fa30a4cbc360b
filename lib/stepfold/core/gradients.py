"""Gradients of a loss function, over the whole batch or accumulated over microbatches.

With ragged masks, the mean of the microbatches' means is not the mean of the batch. So a first scan
over the microbatches sums the total and the weight of every term. A second scan differentiates each
microbatch's share of `total / weight`, and adds the gradients into one buffer. The first scan costs
next to nothing: where the weights depend on the batch alone, XLA eliminates its forward pass.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from stepfold import tree
from stepfold.core.loss import (
    LossFn,
    Metrics,
    Terms,
    checked,
    read_metrics,
    read_terms,
    share_of,
    total_of,
)
from stepfold.core.state import check_params
from stepfold.core.validation import check_flags, read_function, read_integer, takes_any_keyword
from stepfold.errors import ConfigError, DataError, LossError, TreeMismatchError, refuse

GradFn = Callable[[Any, Any, Any, Any], tuple[Any, Terms, Metrics, Any]]
"""`(params, batch, key, model_state) -> (grads, loss terms, metrics, model_state)`."""


def make_grad(
    loss_fn: LossFn,
    *,
    accumulate: int = 1,
    stateful: bool = False,
    accumulator_dtype: DTypeLike | None = jnp.float32,
) -> GradFn:
    """Make the gradient function of a loss, with exact accumulation.

    With `accumulate=n` the batch is processed in n sequential microbatches, with the memory of one.
    Loss, metrics and gradients equal those of the full batch up to rounding, since every term keeps
    its own denominator. This includes ragged masks, fully masked microbatches, and weights that
    depend on the parameters (only these cost a second forward pass). A scalar loss weighs all
    microbatches equally, since they have the same number of rows.

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
    ...     grad_fn = sf.make_grad(loss_fn, accumulate=n)
    ...     grads, terms, _, _ = grad_fn(jnp.array(2.0), batch, jax.random.key(0), ())
    ...     print(round(float(grads), 4), round(float(terms["loss"].compute()), 4))
    4.6667 3.6667
    4.6667 3.6667
    4.6667 3.6667
    """
    check_flags(stateful=stateful)
    if accumulator_dtype is not None and tree.floating(accumulator_dtype) is None:
        refuse("accumulator_dtype", "a floating dtype or None", repr(accumulator_dtype))
    if read_integer("accumulate", accumulate) > 1:
        return gradients_in_parts(
            loss_fn, accumulate, stateful=stateful, accumulator_dtype=accumulator_dtype
        )
    objective = objective_of(loss_fn, stateful)

    def at_once(params: Any, batch: Any, key: Any, model_state: Any) -> Any:
        def loss(params: Any) -> Any:
            aux = objective(params, batch, key, model_state)
            return total_of(aux[0]), aux

        check_params(params)
        grads, aux = differentiate(loss, params, stateful)
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
    """Accumulate gradients over `count` microbatches; see `make_grad`.

    `axes` names mapped axes (of `shard_map` or `vmap`) over which the examples are sharded. Terms
    and metrics are then those of the whole batch. The gradients are the local share, in the dtype
    of the accumulator; their sum over the axes is the gradient of the whole batch.
    """
    count = read_integer("accumulate", count)
    objective = objective_of(loss_fn, stateful)

    def in_parts(params: Any, batch: Any, key: Any, model_state: Any) -> Any:
        from stepfold.core.metrics import merged  # lazy: clu imports flax

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
                return share_of(aux[0], batch_terms), aux

            grads, (terms, metrics, after) = differentiate(share, params, stateful)
            total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)
            return (total, after), (terms, metrics)

        indices = jnp.arange(count)
        batch_terms = merged(jax.lax.scan(forward, model_state, indices)[1], axes)
        zeros = jax.tree.map(lambda p: _buffer(p, accumulator_dtype), params)
        (grads, model_state), stacked = jax.lax.scan(backward, (zeros, model_state), indices)
        if not axes:  # with axes, the caller casts their sum
            grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        return grads, *merged(stacked, axes), model_state

    return in_parts


def objective_of(loss_fn: LossFn, stateful: bool) -> Callable[..., tuple[Any, Any, Any]]:
    """Adapt a loss function to always take and return a model state."""
    loss_fn = checked(loss_fn, stateful=stateful)

    def objective(params: Any, batch: Any, key: Any, model_state: Any) -> tuple[Any, Any, Any]:
        if stateful:
            terms, metrics, model_state = loss_fn(params, batch, key, model_state)
        else:
            terms, metrics = loss_fn(params, batch, key)
        return terms, metrics, model_state

    return objective


def differentiate(loss: Callable[..., Any], params: Any, stateful: bool) -> tuple[Any, Any]:
    """Apply `jax.grad` with auxiliary output; refuse a loss that does not depend on the parameters.

    A stateful loss may: it may only update its model state, such as batch statistics.
    """
    reached = []

    def backward(_: None, grads: Any) -> tuple[Any]:
        reached.append(True)  # jax calls this only if a gradient may be other than zero
        return (grads,)

    probe = jax.custom_vjp(lambda params: params)
    probe.defvjp(lambda params: (params, None), backward)
    grads, aux = jax.grad(lambda params: loss(probe(params)), has_aux=True)(params)
    if not (reached or stateful):
        raise LossError(
            "loss: expected a function of the parameters, got one whose gradient is zero for "
            "every parameter; compute it from `params`, and not from other arrays of the model"
        )
    return grads, aux


def _microbatches(batch: Any, n: int) -> Callable[[Any], Any]:
    """Check that `n` divides the batch, and return a function that slices microbatch i."""
    leaves = tree.named_leaves(batch, "batch")
    sizes = {jnp.shape(leaf)[:1] for _, leaf in leaves}
    got = (
        ", ".join(f"{name} {tree.describe_value(leaf)}" for name, leaf in leaves)
        or "an empty batch"
    )
    if len(sizes) != 1 or () in sizes:
        refuse(f"accumulate={n}", "every leaf to have the same leading size", got, kind=DataError)
    ((size,),) = sizes
    if size % n or size == 0:
        fits = [k for k in range(1, size + 1) if size % k == 0]
        advice = f"use one of {fits}" if fits else "drop the empty batch"
        refuse(
            f"accumulate={n}", f"a divisor of the batch size {size}", got, advice, kind=DataError
        )
    split = jax.tree.map(lambda x: jnp.reshape(x, (size // n, n, *x.shape[1:])), batch)
    return lambda i: jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False), split
    )


def _buffer(param: Any, dtype: DTypeLike | None) -> jax.Array:
    """Make zeros to accumulate a parameter's gradient in, never narrower than the parameter."""
    narrow = dtype is not None and param.dtype.itemsize < jnp.dtype(dtype).itemsize
    return jnp.zeros_like(param, dtype=dtype if narrow else None)


RematPolicy = Literal[
    "nothing_saveable",
    "everything_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
]
"""The names of the policies of `jax.checkpoint_policies` that take no arguments."""


def rematerialized(loss_fn: LossFn, remat: str | bool | Callable[..., bool] | None) -> LossFn:
    """Wrap a loss function in `jax.checkpoint`; the backward pass recomputes the other values."""
    if remat is None or remat is False:
        return loss_fn
    names = get_args(RematPolicy)
    if isinstance(remat, str) and remat in names:
        remat = getattr(jax.checkpoint_policies, remat)
    # A policy takes any keyword, since jax passes a primitive's parameters; its factory does not.
    if remat is not True and not (callable(remat) and takes_any_keyword(remat)):
        expected = f"None, True, a policy of jax.checkpoint_policies, or one of {', '.join(names)}"
        refuse("remat", expected, repr(remat), "did you mean to call it?" * callable(remat))
    return jax.checkpoint(loss_fn, policy=None if remat is True else remat)


def options_of(grad: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Select the options that `grad` accepts; refuse a non-default one that it does not.

    The options of a step are those of `make_train_step`. A `functools.partial` that sets another
    value is refused: the loss function is checked for this one.
    """
    read_function("grad", grad, "a function of a loss function")
    bound = grad.keywords if isinstance(grad, partial) else {}
    for name, value in options.items():
        if name in bound and bound[name] != value:
            got = f"{name}={bound[name]!r}"
            advice = f"pass it as make_train_step(…, {got})"
            refuse("grad", f"a partial without {name}=", got, advice)
    if takes_any_keyword(grad):
        return options
    defaults = inspect.signature(make_grad).parameters
    parameters = inspect.signature(grad).parameters
    for name, value in options.items():
        if name not in parameters and value != defaults[name].default:
            got, advice = (
                f"{getattr(grad, '__name__', grad)}",
                "add the keyword, as sf.make_grad has",
            )
            refuse("grad", f"a function that accepts {name}=", got, advice)
    return {name: value for name, value in options.items() if name in parameters}


def read_gradients(
    returned: Any, params: Any, *, per_example: bool = False
) -> tuple[Any, Terms, Metrics, Any]:
    """Check and normalize the result of a `GradFn`; `per_example` expects a leading axis."""
    if not isinstance(returned, tuple) or len(returned) != 4:
        got = (
            f"a tuple of {len(returned)}"
            if isinstance(returned, tuple)
            else tree.describe_value(returned)
        )
        refuse("grad", "(grads, loss, metrics, model_state)", got)
    grads, loss, metrics, model_state = returned
    first = lambda grad: grad[0] if jnp.ndim(grad) else None
    lines = tree.diff(params, jax.tree.map(first, grads) if per_example else grads, "grads")
    if lines and per_example:
        raise ConfigError(
            "tx: optax.contrib.differentially_private_aggregate expects the gradient of each "
            "example, stacked along a leading axis, got one gradient of the whole batch; give "
            "make_train_step(…, grad=…) a function that maps the loss over the examples, as in "
            "examples/per_example_gradients.py"
        )
    if lines:
        raise TreeMismatchError(
            "grad: expected gradients in the form of the parameters, got\n  " + "\n  ".join(lines)
        )
    return jax.tree.map(jnp.asarray, grads), read_terms(loss), read_metrics(metrics), model_state
