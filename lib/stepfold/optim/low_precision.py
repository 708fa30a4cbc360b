"""Optimizer state, and parameters on request, in bfloat16 with stochastic rounding.

A moment moves by a small part of itself: with `b2=0.999` by at most a thousandth, if gradients
vanish. A bfloat16 has 8 bits, so rounding to the nearest undoes every such update, and the moment
stalls. Stochastic rounding rounds up with the probability of the remainder. Its expected value is
the exact one, so small updates add up.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

from stepfold import tree
from stepfold.core.optimizer import as_optimizer
from stepfold.errors import ConfigError, refuse, warn
from stepfold.optim.ema import EmaParamsState
from stepfold.optim.spikes import SkipSpikesState

F = TypeVar("F", bound=Callable[..., Any])


class LowPrecisionState(NamedTuple):
    """State of `low_precision`: the update count, and tx's state with its moments rounded."""

    count: jax.Array  # type: ignore[assignment]  # shadows tuple.count, as in optax
    inner: optax.OptState


def _accept_dtype(function: F) -> F:
    """Decorate `low_precision` to accept the `dtype` of version 0.2, with a warning."""

    @functools.wraps(function)
    def wrapper(tx: Any, dtype: Any = ...) -> Any:
        if dtype is not ...:
            if tree.floating(dtype) != jnp.bfloat16:
                advice = (
                    "second moments underflow in float16 and float8, and float32 needs no wrapper"
                )
                refuse("low_precision", "the dtype jnp.bfloat16", repr(dtype), advice)
            warn("low_precision: leave out dtype, which is always bfloat16", DeprecationWarning)
        return function(tx)

    return cast(F, wrapper)


@_accept_dtype
def low_precision(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer to store its moments in bfloat16, with stochastic rounding.

    `tx` computes in float32. Between updates, the leaves of its state that mirror a parameter (the
    same path and shape, more than one element, such as `mu` and `nu` of Adam) are bfloat16. Counts,
    keys, hyper-parameters and factored moments are stored as they are. So are leaves initialized
    from the values of the parameters, such as a slow copy, and the averages of `ema_params`.

    Parameters are stored in bfloat16 if `init` makes them so. Their updates are then float32, and
    chosen such that adding them, as `optax.apply_updates` does, gives parameters that are rounded
    stochastically. Nothing may change these updates, so wrap the complete optimizer, and put
    clipping and schedules inside. `ema_params` and `skip_spikes` may go inside or around it, and
    `dynamic_loss_scale` around it. Float32 parameters and their updates are not rounded.

    The random bits are a hash of the update count, the leaf and the position in it. They do not
    depend on the mesh, and a resumed run draws the same. What is representable in bfloat16, zero
    included, is not changed, and no sign changes. NaN and inf stay what they are.

    Args:
      tx: the complete optimizer.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> tx = sf.optim.low_precision(optax.adamw(1e-3))
    >>> state = sf.init_state({"w": jnp.ones((4, 4))}, tx, jax.random.key(0))
    >>> step = jax.jit(sf.make_train_step(lambda params, batch, key: (params["w"] ** 2).sum(), tx))
    >>> state, _ = step(state, None)
    >>> state.opt_state.inner[0].nu["w"].dtype.name, state.params["w"].dtype.name
    ('bfloat16', 'float32')
    """
    inner = as_optimizer(tx)

    def init_fn(params: Any) -> LowPrecisionState:
        _check_dtypes(params)
        params = tree.cast_floats(params, jnp.float32)
        moments = _moments(inner.init, params)
        state = jax.tree.map(
            lambda leaf, is_moment: leaf.astype(jnp.bfloat16) if is_moment else leaf,
            inner.init(params),
            moments,
        )
        return LowPrecisionState(jnp.zeros((), jnp.int32), state)

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, LowPrecisionState]:
        if params is None:
            raise ConfigError("low_precision: pass the parameters, tx.update(grads, state, params)")
        wide = tree.cast_floats(params, jnp.float32)
        # `tx` gets the dtypes that it made: some of its leaves may be bfloat16 by themselves.
        like = jax.eval_shape(inner.init, wide)
        inner_state = jax.tree.map(_cast_like, state.inner, like)
        grads = tree.cast_floats(updates, jnp.float32)
        updates, inner_state = inner.update(grads, inner_state, wide, **extra)
        number = itertools.count()  # each leaf has its own random bits

        def store(old: Any, new: Any) -> Any:
            if not tree.is_float(old) or old.dtype != jnp.bfloat16 or new.dtype == jnp.bfloat16:
                return new
            return _round(new, state.count, next(number))

        def move(param: Any, update: Any) -> Any:
            if param.dtype != jnp.bfloat16:
                return update
            old = param.astype(jnp.float32)
            new = store(param, old + update).astype(jnp.float32)
            # Exact, or close enough that the sum rounds to `new`. -0.0 preserves the sign of -0.0.
            return jnp.where(new == old, -0.0, new - old)

        inner_state = jax.tree.map(store, state.inner, inner_state)
        updates = jax.tree.map(move, params, updates)
        return updates, LowPrecisionState(optax.safe_increment(state.count), inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_dtypes(params: Any) -> None:
    for name, leaf in tree.named_leaves(params, "params"):
        if getattr(leaf, "dtype", None) not in (jnp.float32, jnp.bfloat16):
            expected = "float32 or bfloat16 for sf.optim.low_precision"
            refuse(name, expected, tree.describe_value(leaf), "cast it where it is initialized")


def _moments(init: Callable[[Any], Any], params: Any) -> Any:
    """Return a tree like the state that says which leaves are rounded."""
    jaxpr, state = jax.make_jaxpr(init, return_shape=True)(params)
    copies = jax.tree.unflatten(jax.tree.structure(state), _read_inputs(jaxpr.jaxpr))
    shapes = {path: x.shape for path, x in jax.tree_util.tree_leaves_with_path(params)}
    # These have leaves of their own that may mirror a parameter: averages, losses, parameters.
    kept = (EmaParamsState, SkipSpikesState, optax.ScaleByLBFGSState)
    is_kept: Any = lambda node: isinstance(node, kept)

    def is_moment(path: tuple[Any, ...], leaf: Any) -> bool:
        mirrors = any(shapes.get(path[start:]) == leaf.shape for start in range(len(path) + 1))
        return mirrors and leaf.size > 1 and leaf.dtype == jnp.float32

    def mark(path: tuple[Any, ...], node: Any) -> Any:
        if not is_kept(node):
            return is_moment(path, node)
        nothing: Any = jax.tree.map(lambda _: False, node)
        return nothing._replace(inner=marks(node.inner)) if hasattr(node, "inner") else nothing

    def marks(node: Any) -> Any:
        return jax.tree_util.tree_map_with_path(mark, node, is_leaf=is_kept)

    return jax.tree.map(lambda moment, copy: moment and not copy, marks(state), copies)


def _read_inputs(jaxpr: Any) -> list[bool]:
    """Say for each output of a program whether it depends on the values of the inputs."""
    dependent = set(map(id, jaxpr.invars))  # literals cannot be hashed
    for equation in jaxpr.eqns:
        if dependent & set(map(id, equation.invars)):
            dependent |= set(map(id, equation.outvars))
    return [id(variable) in dependent for variable in jaxpr.outvars]


def _cast_like(leaf: Any, like: Any) -> Any:
    return leaf.astype(like.dtype) if tree.is_float(leaf) and leaf.dtype != like.dtype else leaf


def _round(x: jax.Array, count: jax.Array, number: int) -> jax.Array:
    """Round float32 to bfloat16, its upper half: up with the probability of the lower half."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) + _random_bits(
        x.shape, count, number
    )
    rounded = lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    # An infinity has no lower half, but that of a NaN could become an infinity or a number.
    return jnp.where(jnp.isnan(x), jnp.bfloat16(jnp.nan), rounded)


def _random_bits(shape: tuple[int, ...], count: jax.Array, number: int) -> jax.Array:
    """Hash update count, leaf and position to 16 random bits for each element.

    The position is made of iotas, which every device computes for its own shard, fused into the
    rounding. jax's threefry has the same bits on any mesh too, but on CPU it takes 24 bytes of
    temporaries for an element, and 20 times the time of the whole Adam update with these bits.
    """
    position = jnp.zeros((), jnp.uint32)
    for dim, size in enumerate(shape):
        position = position * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, shape, dim)
    salt = _mix(_mix(count.astype(jnp.uint32)) ^ jnp.uint32(number))
    return _mix(_mix(position) ^ salt) >> 16


def _mix(x: jax.Array) -> jax.Array:
    """Permute 32-bit words such that every bit depends on all (Wellons' "lowbias32")."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
