"""Dynamic loss scaling, which keeps float16 gradients from underflowing."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stepfold import tree
from stepfold.core.loss import LossFn
from stepfold.core.optimizer import as_optimizer
from stepfold.errors import ConfigError


class LossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`: scale, finite updates since it changed, and tx's state."""

    scale: jax.Array
    streak: jax.Array
    inner: optax.OptState


class LossScaled(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """An optimizer that expects gradients of the scaled loss; float16 steps require it."""


def dynamic_loss_scale(
    tx: optax.GradientTransformation,
    *,
    initial: float = 2.0**15,
    factor: float = 2.0,
    period: int = 2000,
    minimum: float = 1.0,
    maximum: float = 2.0**24,
) -> LossScaled:
    """Wrap an optimizer with dynamic loss scaling, for gradients in float16.

    A train step scales the backward pass, and `update` expects gradients times the scale. It
    divides them by the scale before `tx` sees them, so that clipping, for example, is unaffected.
    If they are not finite, the update is skipped, the state of `tx` is kept bit for bit, and the
    scale is reduced. After `period` consecutive finite updates the scale grows. Without a train
    step, differentiate `loss * state.opt_state.scale`, then call `update`.

    Args:
      tx: the complete optimizer. This wrapper must be the outermost one.
      initial: the initial scale.
      factor: the factor by which the scale grows or is reduced; powers of two are exact.
      period: the number of consecutive finite updates after which the scale grows.
      minimum: the lower bound of the scale.
      maximum: the upper bound of the scale.

    Returns:
      An optax transformation.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> tx = sf.dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))
    >>> state = sf.init_state(jnp.ones(2), tx, jax.random.key(0))
    >>> step = sf.make_train_step(lambda p, x, key: sf.mean((p * x) ** 2), tx, precision="f16")
    >>> state, metrics = step(state, jnp.array([1.0, jnp.inf]))
    >>> float(state.opt_state.scale), int(metrics["skipped"].total), state.params.tolist()
    (16384.0, 1, [1.0, 1.0])
    """
    try:
        fits = 0 < minimum <= initial <= maximum and factor > 1 and period >= 1
    except TypeError:
        fits = False
    if not fits:
        raise ConfigError(
            "dynamic_loss_scale: expected 0 < minimum <= initial <= maximum, factor > 1 and "
            f"period >= 1, got {minimum=}, {initial=}, {maximum=}, {factor=}, {period=}"
        )
    inner = as_optimizer(tx)

    def init_fn(params: Any) -> LossScaleState:
        scale, streak = jnp.array(initial, jnp.float32), jnp.zeros((), jnp.int32)
        return LossScaleState(scale, streak, inner.init(params))

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, LossScaleState]:
        finite = jnp.isfinite(norm(updates))
        grads = unscale(updates, state.scale)
        updates, inner_state = inner.update(grads, state.inner, params, **extra)
        # -0.0, not 0.0: adding it preserves every bit, also the sign of -0.0.
        updates = jax.tree.map(lambda u: jnp.where(finite, u, -jnp.zeros_like(u)), updates)
        due = state.streak + 1 >= period
        grown = jnp.where(due, jnp.minimum(state.scale * factor, maximum), state.scale)
        backed_off = jnp.maximum(state.scale / factor, minimum)
        return updates, LossScaleState(
            scale=jnp.where(finite, grown, backed_off),
            streak=jnp.where(finite & ~due, state.streak + 1, 0),
            inner=tree.select(finite, inner_state, state.inner),
        )

    return LossScaled(init_fn, update_fn)


def check_outermost(opt_state: Any) -> None:
    """Refuse a loss scale inside another optimizer, where the step cannot see it."""
    inner = opt_state.inner if _is_scale(opt_state) else opt_state
    if any(map(_is_scale, jax.tree.leaves(inner, is_leaf=_is_scale))):
        raise ConfigError(
            "dynamic_loss_scale: expected it once and around the whole optimizer, found it inside "
            "another, where the step cannot scale the loss; tx = sf.dynamic_loss_scale(the rest)"
        )


def _is_scale(node: object) -> bool:
    return isinstance(node, LossScaleState)


def skipped(old: LossScaleState, new: LossScaleState) -> LossScaleState:
    """Return the state after a skipped step: keep a reduced scale, reset the streak."""
    return LossScaleState(jnp.minimum(old.scale, new.scale), 0 * new.streak, old.inner)


def norm(grads: Any) -> jax.Array:
    """Compute the global norm in at least float32; it is finite only if every leaf is."""
    total: jax.Array = optax.tree.norm(tree.cast_floats(grads, jnp.float32))
    return total


def rescale(grads: Any, scale: jax.Array) -> Any:
    """Multiply gradients by a scale in at least float32, and cast back to their dtypes."""
    return _widely(jnp.multiply, grads, scale)


def unscale(grads: Any, scale: jax.Array) -> Any:
    """Divide gradients by a scale in at least float32, and cast back to their dtypes."""
    return _widely(jnp.divide, grads, scale)


def _widely(operate: Callable[..., jax.Array], grads: Any, scale: jax.Array) -> Any:
    def one(grad: jax.Array) -> jax.Array:
        wide = tree.widen(grad.dtype)
        return operate(grad.astype(wide), scale.astype(wide)).astype(grad.dtype)

    return jax.tree.map(one, grads)


def scaled(loss_fn: LossFn, scale: jax.Array) -> LossFn:
    """Return a loss function with a scaled backward pass and unscaled gradients.

    The backward pass multiplies cotangents by the scale where it starts. It divides gradients by
    the scale where it ends, outside of the cast of the parameters to the compute dtype. So a caller
    that differentiates the function and clips the gradients sees no scale. Nothing underflows in
    between, and what overflows stays inf.
    """

    def scaled_loss(*args: Any) -> Any:
        returned = loss_fn(*_on_the_way_back(unscale, args, scale))
        return _on_the_way_back(rescale, returned, scale)

    return scaled_loss


def _on_the_way_back(change: Callable[..., Any], values: Any, scale: jax.Array) -> Any:
    """Return values unchanged, and apply `change` to the gradients that flow back through them."""
    return jax.tree.map(lambda x: _same(change, x, scale) if tree.is_float(x) else x, values)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _same(_change: Callable[..., Any], value: jax.Array, _scale: jax.Array) -> jax.Array:
    return value


def _forward(_change: Any, value: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    return value, scale


def _backward(change: Any, scale: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    return change(grad, scale), jnp.zeros_like(scale)


_same.defvjp(_forward, _backward)
