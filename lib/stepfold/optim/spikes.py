"""Skip updates by batches whose loss is a spike."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stepfold import tree
from stepfold.core.optimizer import as_optimizer
from stepfold.core.validation import read_integer, read_positive, renamed
from stepfold.errors import refuse


class SkipSpikesState(NamedTuple):
    """State of `skip_spikes`; the latest losses are last.

    Attributes:
      accepted: the last `window` losses of updates that were not skipped.
      num_accepted: how many of them there are.
      above: the last `window` losses above the threshold.
      num_above: how many of them came in a row.
      skipped: the number of updates that were skipped.
      inner: the state of the wrapped optimizer.
    """

    accepted: jax.Array
    num_accepted: jax.Array
    above: jax.Array
    num_above: jax.Array
    skipped: jax.Array
    inner: optax.OptState


@renamed(sigma="deviations")
def skip_spikes(
    tx: optax.GradientTransformation, window: int = 100, deviations: float = 10.0
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer to skip updates whose loss is a spike, NaN or infinite.

    A loss is a spike if it is more than `deviations` median absolute deviations above the median of
    the last `window` losses that were accepted, as for `on_spike`. Deviations are scaled to
    the standard deviation of a normal distribution, and are at least a hundredth of the median, so
    that a rise within rounding after a constant loss is no spike. The update is then zero, so that
    the parameters keep every bit, and so does the state of `tx`. Skipped losses do not enter the
    window. No finite loss is judged before the window is full, or while most of it is zero. If
    `window` finite losses in a row are spikes, the level of the loss has changed: they become the
    window, and updates continue.

    A train step passes the loss as `value=`. Its model state, if it has one, is that of the skipped
    batch. To keep that too when a loss is NaN or infinite, and so that `fit` does not stop there,
    set `make_train_step(…, skip_nonfinite=True)` as well.

    Args:
      tx: the complete optimizer. `dynamic_loss_scale`, if used, goes around `skip_spikes`.
      window: the number of accepted losses to compare with.
      deviations: the number of deviations above which a loss is a spike.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> tx = sf.optim.skip_spikes(optax.sgd(0.1), window=4, deviations=3.0)
    >>> step = sf.make_train_step(lambda params, batch, key: sf.mean((params - batch) ** 2), tx)
    >>> step = jax.jit(sf.observe(step, spikes=lambda state: state.opt_state.skipped))
    >>> state = sf.init_state(jnp.zeros(2), tx, jax.random.key(0))
    >>> for x in [1.0, 1.1, 0.9, 1.0, 50.0]:
    ...     state, metrics = step(state, jnp.full(2, x))
    >>> int(metrics["spikes"].total), float(state.params[0]) < 1
    (1, True)
    """
    read_integer("window", window, minimum=2)
    read_positive("deviations", deviations)
    inner = as_optimizer(tx)

    def init_fn(params: Any) -> SkipSpikesState:
        return SkipSpikesState(
            accepted=jnp.zeros(window, jnp.float32),
            num_accepted=jnp.zeros((), jnp.int32),
            above=jnp.zeros(window, jnp.float32),
            num_above=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            inner=inner.init(params),
        )

    def update_fn(
        updates: Any, state: Any, params: Any = None, *, value: Any = None, **extra: Any
    ) -> tuple[Any, SkipSpikesState]:
        if value is None or jnp.shape(value) != ():
            advice = "pass it as tx.update(grads, state, params, value=loss)"
            refuse("value", "the loss, a number", tree.describe_value(value), advice)
        updates, new = inner.update(updates, state.inner, params, value=value, **extra)
        loss = jnp.asarray(value).astype(jnp.float32)
        median = jnp.median(state.accepted)
        spread = 1.4826 * jnp.median(jnp.abs(state.accepted - median))
        deviation = jnp.maximum(spread, 0.01 * jnp.abs(median))
        is_finite, can_judge = jnp.isfinite(loss), (state.num_accepted == window) & (deviation > 0)
        is_above = is_finite & can_judge & (loss > median + deviations * deviation)
        is_good = is_finite & ~is_above
        above = jnp.where(is_above, jnp.append(state.above[1:], loss), state.above)
        num_above = jnp.where(is_good, 0, state.num_above + is_above.astype(jnp.int32))
        has_moved = num_above == window
        accepted = jnp.where(is_good, jnp.append(state.accepted[1:], loss), state.accepted)
        # -0.0, not 0.0: adding it preserves every bit, also the sign of -0.0.
        updates = jax.tree.map(lambda u: jnp.where(is_good, u, -jnp.zeros_like(u)), updates)
        return updates, SkipSpikesState(
            accepted=jnp.where(has_moved, above, accepted),
            num_accepted=jnp.minimum(state.num_accepted + is_good.astype(jnp.int32), window),
            above=above,
            num_above=jnp.where(has_moved, 0, num_above),
            skipped=state.skipped + (~is_good).astype(jnp.int32),
            inner=tree.select(is_good, new, state.inner),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
