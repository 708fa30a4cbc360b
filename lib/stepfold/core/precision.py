"""The dtypes in which a step computes, and dynamic loss scaling for float16.

Parameters and optimizer state keep the dtypes that they were created with. A `Precision` casts
parameters and inputs on entry to the loss function; without one, they enter as they are. Gradients
have the parameters' dtypes in either case. Losses, means and, by default, accumulated gradients are
at least float32. A loss scale keeps float16 gradients from underflowing.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from stepfold import tree
from stepfold.core.loss import LossFn
from stepfold.core.optimizer import as_optimizer, find_nodes
from stepfold.errors import ConfigError, refuse


@dataclass(frozen=True)
class Precision:
    """The dtype in which a loss function computes.

    The names "f32", "bf16" and "f16" stand for `Precision(jnp.float32)` and so on. Floating leaves
    of the parameters and the inputs in the batch are cast. What the loss compares or weighs with is
    not narrowed, since in bfloat16 100.7 is 100.5: leaves with at most one axis, and leaves with a
    name in their path that is or ends in `target`, `label`, `weight`, `mask` (or their plural) or
    `y`. In a batch that is a tuple or list `(x, y)` or `(x, y, weight)`, only `x` is an input. A
    batch that is a single array is an input. Integers, booleans, keys and the model state are not
    cast. "f32" casts narrower dtypes up and leaves float64 unchanged.

    Attributes:
      compute: a floating dtype.
      keep: a regular expression, searched in the leaf paths (`params/norm/scale`, `batch/target`).
        Leaves that match are not cast, for example to keep norms or routers in float32, or targets
        of other names.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> seen = {}
    >>> def loss_fn(params, batch, key):
    ...     seen.update(jax.tree.map(lambda x: x.dtype.name, params))
    ...     return sf.mean(batch @ params["w"])
    >>> params = {"w": jnp.ones((2, 2)), "norm": jnp.ones(2)}
    >>> state = sf.init_state(params, optax.sgd(0.1), jax.random.key(0))
    >>> mixed = sf.Precision(jnp.bfloat16, keep="norm")
    >>> step = sf.make_train_step(loss_fn, optax.sgd(0.1), precision=mixed)
    >>> state, _ = step(state, jnp.ones((4, 2)))
    >>> seen["w"], seen["norm"], state.params["w"].dtype.name
    ('bfloat16', 'float32', 'float32')
    """

    compute: DTypeLike = jnp.float32
    keep: str | None = None

    def __post_init__(self) -> None:
        dtype = tree.floating(self.compute)
        if dtype is None:
            refuse("Precision.compute", "a floating dtype", repr(self.compute))
        object.__setattr__(self, "compute", dtype)
        try:
            re.compile("" if self.keep is None else self.keep)
        except (re.error, TypeError) as error:
            refuse("Precision.keep", "a regular expression", f"{self.keep!r}: {error}")

    @property
    def needs_loss_scale(self) -> bool:
        """Whether small gradients underflow: the exponent range is smaller than float32's."""
        return bool(jnp.finfo(self.compute).minexp > jnp.finfo(jnp.float32).minexp)

    def applied_to(self, loss_fn: LossFn) -> LossFn:
        """Wrap a loss function to cast its parameters and its batch."""

        def cast_loss(params: Any, batch: Any, *rest: Any) -> Any:
            params = tree.cast_floats(params, self.compute, self.keep, "params")
            inputs = tree.cast_floats(batch, self.compute, self.keep, "batch")
            return loss_fn(params, _keep_targets(batch, inputs), *rest)

        return cast_loss


_TARGETS = re.compile(r"(^|[/_])(y|(target|label|weight|mask)s?)(/|$)")


def _keep_targets(batch: Any, cast: Any) -> Any:
    """Return a batch that is cast, except for targets and weights that the cast narrows."""
    is_pair = type(batch) in (tuple, list) and len(batch) in (2, 3)

    def choose(path: tuple[Any, ...], leaf: Any, cast: Any) -> Any:
        is_narrowed = tree.is_float(leaf) and cast.dtype.itemsize < leaf.dtype.itemsize
        is_named = bool(_TARGETS.search(tree.path_name(path)))
        is_target = is_named or jnp.ndim(leaf) < 2 or (is_pair and path[0].idx > 0)
        return leaf if is_narrowed and is_target and path else cast

    return jax.tree_util.tree_map_with_path(choose, batch, cast)


def as_precision(precision: str | Precision | None) -> Precision | None:
    """Look up a precision by its name; return a `Precision`, or None for no casts, unchanged."""
    names = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
    if precision is None or isinstance(precision, Precision):
        return precision
    if not isinstance(precision, str) or precision not in names:
        refuse("precision", f"one of {', '.join(names)}, a Precision or None", repr(precision))
    return Precision(names[precision])


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
        fits = all(map(math.isfinite, (minimum, initial, factor, period)))
        fits = fits and 0 < minimum <= initial <= float(maximum) and factor > 1 and period >= 1
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        expected = "0 < minimum <= initial <= maximum, factor > 1 and period >= 1"
        got = f"{minimum=}, {initial=}, {maximum=}, {factor=}, {period=}"
        refuse("dynamic_loss_scale", expected, got)
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
    is_outermost = isinstance(opt_state, LossScaleState)
    if find_nodes(opt_state.inner if is_outermost else opt_state, LossScaleState):
        raise ConfigError(
            "dynamic_loss_scale is inside another optimizer, where the step cannot scale the loss; "
            "wrap the whole optimizer, once: tx = sf.dynamic_loss_scale(tx)"
        )


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
    def apply(grad: jax.Array) -> jax.Array:
        wide = tree.widen(grad.dtype)
        return operate(grad.astype(wide), scale.astype(wide)).astype(grad.dtype)

    return jax.tree.map(apply, grads)


def scaled(loss_fn: LossFn, scale: jax.Array) -> LossFn:
    """Return a loss function with a scaled backward pass and unscaled gradients.

    The backward pass multiplies cotangents by the scale where it starts. It divides gradients by
    the scale where it ends, outside of the cast of the parameters to the compute dtype. So a caller
    that differentiates the function and clips the gradients sees no scale. Nothing underflows in
    between, and what overflows stays inf.
    """
    inputs, outputs = _in_backward_pass(unscale), _in_backward_pass(rescale)

    def scaled_loss(*args: Any) -> Any:
        return outputs(loss_fn(*inputs(args, scale)), scale)

    return scaled_loss


def _in_backward_pass(change: Callable[..., Any]) -> Callable[[Any, jax.Array], Any]:
    """Return values unchanged, and apply `change` to the gradients that flow back through them."""

    @jax.custom_vjp
    def same(value: jax.Array, _scale: jax.Array) -> jax.Array:
        return value

    same.defvjp(
        lambda value, scale: (value, scale),
        lambda scale, grad: (change(grad, scale), jnp.zeros_like(scale)),
    )
    return lambda values, scale: jax.tree.map(
        lambda x: same(x, scale) if tree.is_float(x) else x, values
    )
