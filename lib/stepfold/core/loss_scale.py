"""How float16 is kept from underflowing: a backward pass that runs scaled."""

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
    """State of `dynamic_loss_scale`: the scale, finite updates since it changed, and tx's state."""

    scale: jax.Array
    streak: jax.Array
    inner: optax.OptState


class LossScaled(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """An optimizer that takes gradients of the scaled loss; what a float16 step looks for."""


def dynamic_loss_scale(
    tx: optax.GradientTransformation,
    *,
    initial: float = 2.0**15,
    factor: float = 2.0,
    period: int = 2000,
    minimum: float = 1.0,
    maximum: float = 2.0**24,
) -> LossScaled:
    """Wrap an optimizer such that float16 gradients neither underflow nor overflow for long.

    A train step runs the backward pass scaled, and `update` takes gradients times the scale: it
    divides them by it before anything in `tx` (clipping, say) sees them. Where they are not finite,
    the update is skipped, every bit of `tx`'s state is kept, and the scale is backed off. After
    `period` finite updates in a row it grows. By hand: differentiate
    `loss * state.opt_state.scale`, then `update`.

    Args:
      tx: the whole optimizer. This wrapper goes around everything else.
      initial: the first scale.
      factor: what the scale is multiplied or divided by; powers of two are exact.
      period: how many finite updates in a row make the scale grow.
      minimum: the scale never falls below it.
      maximum: the scale never grows above it.

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
        # -0.0 and not 0.0: it is the number that leaves every bit of what it is added to.
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
    """Refuse a loss scale inside another optimizer, where a step cannot see it."""
    inner = opt_state.inner if _is_scale(opt_state) else opt_state
    if any(map(_is_scale, jax.tree.leaves(inner, is_leaf=_is_scale))):
        raise ConfigError(
            "dynamic_loss_scale: expected it once and around the whole optimizer, found it inside "
            "another, where the step cannot scale the loss; tx = sf.dynamic_loss_scale(the rest)"
        )


def _is_scale(node: object) -> bool:
    return isinstance(node, LossScaleState)


def skipped(old: LossScaleState, new: LossScaleState) -> LossScaleState:
    """Give the state after a step that is skipped: a scale that has backed off is to stay so."""
    return LossScaleState(jnp.minimum(old.scale, new.scale), 0 * new.streak, old.inner)


def norm(grads: Any) -> jax.Array:
    """Take the norm over all leaves in float32 at least: finite only if every leaf is."""
    total: jax.Array = optax.tree.norm(tree.cast_floats(grads, jnp.float32))
    return total


def rescale(grads: Any, scale: jax.Array) -> Any:
    """Multiply gradients by a scale, in float32 at least, and back into their own dtypes."""
    return _widely(jnp.multiply, grads, scale)


def unscale(grads: Any, scale: jax.Array) -> Any:
    """Divide gradients by a scale, in float32 at least, and back into their own dtypes."""
    return _widely(jnp.divide, grads, scale)


def _widely(operate: Callable[..., jax.Array], grads: Any, scale: jax.Array) -> Any:
    def one(grad: jax.Array) -> jax.Array:
        wide = tree.widen(grad.dtype)
        return operate(grad.astype(wide), scale.astype(wide)).astype(grad.dtype)

    return jax.tree.map(one, grads)


def scaled(loss_fn: LossFn, scale: jax.Array) -> LossFn:
    """Give the loss function whose backward pass runs scaled, and gives unscaled gradients.

    They are multiplied where the backward pass enters and divided where it leaves, which is before
    the parameters are cast down. So whoever differentiates it, and clips what comes of that, sees
    no scale; nothing has underflowed, and what has overflowed stays infinite.
    """

    def scaled_loss(*args: Any) -> Any:
        returned = loss_fn(*_on_the_way_back(unscale, args, scale))
        return _on_the_way_back(rescale, returned, scale)

    return scaled_loss


def _on_the_way_back(change: Callable[..., Any], values: Any, scale: jax.Array) -> Any:
    """Give a tree as it is, and change the gradients that come back through it."""
    return jax.tree.map(lambda x: _same(change, x, scale) if tree.is_float(x) else x, values)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _same(_change: Callable[..., Any], value: jax.Array, _scale: jax.Array) -> jax.Array:
    return value


def _forward(_change: Any, value: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    return value, scale


def _backward(change: Any, scale: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    return change(grad, scale), jnp.zeros_like(scale)


_same.defvjp(_forward, _backward)
