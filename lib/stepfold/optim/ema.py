"""An exponential moving average (EMA) of the parameters, stored in `opt_state`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stepfold import tree
from stepfold.core.optimizer import apply_updates, as_optimizer, find_nodes
from stepfold.core.state import TrainState
from stepfold.core.validation import check_flags
from stepfold.errors import ConfigError, refuse


class EmaParamsState(NamedTuple):
    """State of `ema_params`: update count, average, its weight if debiased, and tx's state."""

    count: jax.Array  # type: ignore[assignment]  # shadows tuple.count, as in optax
    ema: Any
    mass: jax.Array | None
    inner: optax.OptState


def ema_params(
    tx: optax.GradientTransformation,
    decay: float | optax.Schedule,
    *,
    debias: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer to keep an exponential moving average (EMA) of the parameters.

    `optax.ema` averages updates; this averages the parameters after each update. The average is
    stored in at least float32, since bfloat16 would round most of its steps away. It is initialized
    with the parameters. With `debias` it is initialized with zeros and divided by its accumulated
    weight, so that the initial parameters do not contribute. Inside `optax.MultiSteps` the average
    advances once per update; around it, once per mini-step.

    Args:
      tx: the complete optimizer. `dynamic_loss_scale`, if used, goes around `ema_params`.
      decay: the decay rate, at least 0 and below 1; or a schedule of it by the update count, for
        example as a warm-up: `lambda count: jnp.minimum(0.999, (1 + count) / (10 + count))`.
      debias: whether to start from zeros instead of the initial parameters.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> tx = sf.ema_params(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), decay=0.5)
    >>> state = sf.init_state(jnp.array(4.0), tx, jax.random.key(0))
    >>> step = sf.make_train_step(lambda params, batch, key: params * batch, tx)
    >>> state, _ = step(state, jnp.array(1.0))
    >>> float(state.params), float(sf.get_ema(state))
    (3.0, 3.5)
    >>> smooth = state._replace(params=sf.get_ema(state))  # to evaluate with
    """
    check_flags(debias=debias)
    try:
        fits = callable(decay) or bool(0 <= decay < 1)
    except (TypeError, ValueError):  # of an array, for example
        fits = False
    if not fits:
        refuse("ema_params", "0 <= decay < 1 or a schedule", repr(decay))
    inner = as_optimizer(tx)
    rate = decay if callable(decay) else optax.constant_schedule(decay)

    def init_fn(params: Any) -> EmaParamsState:
        ema = tree.cast_floats(params, jnp.float32)
        return EmaParamsState(
            count=jnp.zeros((), jnp.int32),
            ema=jax.tree.map(jnp.zeros_like if debias else jnp.copy, ema),
            mass=jnp.zeros(()) if debias else None,
            inner=inner.init(params),
        )

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, EmaParamsState]:
        if params is None:
            raise ConfigError("ema_params: pass the parameters, tx.update(grads, state, params)")
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        arrived = apply_updates(params, updates)
        keep = jnp.asarray(rate(state.count))

        def blend(old: jax.Array, new: Any) -> jax.Array:
            share = keep.astype(old.dtype)
            return share * old + (1 - share) * jnp.asarray(new, old.dtype)

        return updates, EmaParamsState(
            count=optax.safe_increment(state.count),
            ema=jax.tree.map(blend, state.ema, arrived),
            mass=None if state.mass is None else blend(state.mass, 1.0),
            inner=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def get_ema(state: Any) -> Any:
    """Return the averaged parameters of a state, at any depth of its optimizer state.

    Args:
      state: a `TrainState`, or an optimizer state.

    Returns:
      A tree with the structure of the parameters. For a `TrainState` the leaves have the
      parameters' dtypes. Parameters that the average does not cover (masked out, frozen), or does
      not contain yet (debiased, before the first update), are returned themselves. For an
      optimizer state these leaves are an `optax.MaskedNode` and zeros.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> tx = optax.chain(optax.clip(1.0), sf.ema_params(optax.adam(1e-3), 0.99))
    >>> state = sf.init_state({"w": jnp.ones(2)}, tx, jax.random.key(0))
    >>> sf.get_ema(state)["w"].tolist()
    [1.0, 1.0]
    """
    opt_state = state.opt_state if isinstance(state, TrainState) else state
    nodes = _find_averages(opt_state)
    if len(nodes) != 1:
        advice = "wrap the optimizer once, tx = sf.ema_params(tx, decay), before init_state"
        refuse("get_ema", "one average in the optimizer's state", f"{len(nodes)}", advice)
    (node,) = nodes
    ema = jax.tree.map(jnp.copy, node.ema)  # the state may be donated
    if node.mass is not None:
        mass = jnp.where(node.mass == 0, 1, node.mass)
        ema = jax.tree.map(lambda e: e / mass.astype(e.dtype), ema)
    if not isinstance(state, TrainState):
        return ema

    def like(ema: Any, param: Any) -> Any:
        if isinstance(ema, optax.MaskedNode):
            return jax.tree.map(jnp.copy, param)
        ema = ema.astype(param.dtype)
        return ema if node.mass is None else jnp.where(node.mass == 0, param, ema)

    is_masked = lambda node: isinstance(node, optax.MaskedNode)
    return jax.tree.map(like, ema, state.params, is_leaf=is_masked)


def _find_averages(opt_state: Any) -> list[EmaParamsState]:
    """List the averages in an optimizer state, also inside each other."""
    nodes: list[EmaParamsState] = find_nodes(opt_state, EmaParamsState)
    return [each for node in nodes for each in (node, *_find_averages(node.inner))]
