"""Train and eval steps: pure functions, not jitted."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from stepfold import tree
from stepfold.core.contract import checked, options_of, read_gradients
from stepfold.core.gradients import GradFn, value_and_grad
from stepfold.core.loss import LossFn, Metrics, mean, total_of
from stepfold.core.loss_scale import (
    LossScaled,
    check_outermost,
    norm,
    rescale,
    scaled,
    skipped,
    unscale,
)
from stepfold.core.optimizer import apply_updates, as_optimizer, update
from stepfold.core.precision import Precision, as_precision
from stepfold.core.remat import rematerialized
from stepfold.core.skipping import still_finite, without_weight
from stepfold.core.state import TrainState
from stepfold.errors import ConfigError, TreeMismatchError

StepFn = Callable[[TrainState, Any], tuple[TrainState, Metrics]]
"""`(state, batch) -> (state, metrics)`, pure and not jitted."""

EvalFn = Callable[[TrainState, Any], Metrics]
"""`(state, batch) -> metrics`, pure and not jitted."""


def make_train_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    *,
    accumulate: int = 1,
    precision: str | Precision = "f32",
    remat: str | bool | Callable[..., bool] | None = None,
    skip_nonfinite: bool = False,
    stateful: bool = False,
    grad: Callable[..., GradFn] = value_and_grad,
) -> StepFn:
    """Make a train step, a function `(state, batch) -> (state, metrics)`.

    It is pure and not jitted: apply `jax.jit` (donate the state), `lax.scan`, `vmap` or `shard_map`
    to it. Its metrics are `loss`, every term of the loss, the metrics of the loss function,
    `grad_norm`, and `skipped` if steps may be skipped. The loss function gets the key
    `fold_in(key, step)`. The optimizer gets `value=loss` if it accepts it.

    Args:
      loss_fn: a loss function.
      tx: the optimizer that the state was initialized with.
      accumulate: the number of microbatches to split a batch into; the result is the same.
      precision: "f32", "bf16", "f16" or a `Precision`: the dtype in which the loss function
        computes. If small gradients underflow in it, `tx` must be a `dynamic_loss_scale(…)`.
      remat: what to save for the backward pass: the name of one of `jax.checkpoint_policies`, such
        a policy itself, or True to save nothing.
      skip_nonfinite: whether to skip a step whose loss or gradients are not finite, or whose new
        parameters or model state would not be. A skipped step keeps parameters, optimizer state and
        model state bit for bit. It counts in `step` and in `skipped`; its loss and averages have
        weight zero when merged.
      stateful: whether the loss function carries a model state.
      grad: a function from a loss function to a `GradFn`. It gets those of the keywords
        `accumulate=` and `stateful=` that it accepts. It returns the gradients of the loss, also
        with `dynamic_loss_scale`: the loss function applies and removes the scale in its backward
        pass (and then supports no forward mode). It must propagate NaN and inf, since they signal
        an overflow.

    Raises:
      ConfigError, LossError: if the arguments do not fit together.
      LossError, DataError, TreeMismatchError: while tracing, if the loss, the batch or the state is
        invalid.
      ConfigError: while tracing, if the optimizer evaluates the loss itself.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> def loss_fn(params, batch, key):
    ...     error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    ...     return sf.mean(error**2), {"close": sf.mean(jnp.abs(error) < 0.1)}
    >>> params = {"w": jnp.zeros(2), "b": jnp.zeros(())}
    >>> x = jax.random.normal(jax.random.key(1), (64, 2))
    >>> batch = {"x": x, "y": x @ jnp.array([1.0, -2.0]) + 0.5}

    Use optax for schedules, clipping, weight decay, and freezing by path. Under `jit`, frozen
    parameters keep every bit, since it eliminates the zero that optax adds. Without `jit`, adding
    it turns -0.0 into 0.0, and on some devices denormals too.

    >>> rate = optax.warmup_cosine_decay_schedule(0.0, 0.2, warmup_steps=10, decay_steps=100)
    >>> tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=1e-4))
    >>> state = sf.init_state(params, tx, jax.random.key(0))
    >>> step = jax.jit(sf.make_train_step(loss_fn, tx, accumulate=4), donate_argnums=0)
    >>> for _ in range(100):
    ...     state, metrics = step(state, batch)
    >>> sorted(metrics), float(metrics["close"].compute())
    (['close', 'grad_norm', 'loss'], 1.0)

    >>> def group(path, leaf):
    ...     return "frozen" if jax.tree_util.keystr(path, simple=True) == "b" else "trained"
    >>> groups = {"trained": optax.sgd(0.1), "frozen": optax.set_to_zero()}
    >>> tx = optax.multi_transform(groups, jax.tree_util.tree_map_with_path(group, params))
    >>> state = sf.init_state(params, tx, jax.random.key(0))
    >>> state, _ = sf.make_train_step(loss_fn, tx)(state, batch)
    >>> float(state.params["b"]), bool((state.params["w"] != 0).all())
    (0.0, True)
    """
    from stepfold.core.report import report  # lazy: clu imports flax

    if not isinstance(skip_nonfinite, bool):
        raise ConfigError(f"skip_nonfinite: expected True or False, got {skip_nonfinite!r}")
    loss_fn = checked(loss_fn, stateful=stateful)
    tx = as_optimizer(tx)
    policy = as_precision(precision)
    if policy.needs_loss_scale and not isinstance(tx, LossScaled):
        raise ConfigError(
            f"precision={precision!r}: gradients underflow in {jnp.dtype(policy.compute).name}; "
            "wrap the whole optimizer, tx = sf.dynamic_loss_scale(tx), for init_state and for this"
        )
    loss_fn = rematerialized(policy.applied_to(loss_fn), remat)
    options = options_of(grad, accumulate=accumulate, stateful=stateful)
    grad_fn, scaling = grad(loss_fn, **options), isinstance(tx, LossScaled)

    def gradients(state: TrainState, batch: Any) -> Any:
        key = jax.random.fold_in(state.key, state.step)
        inputs = state.params, batch, key, state.model_state
        if not scaling:
            grads, *rest = read_gradients(grad_fn(*inputs), state.params)
            return grads, norm(grads), *rest
        scale = state.opt_state.scale
        scaled_fn = grad(scaled(loss_fn, scale), **options)
        grads, *rest = read_gradients(scaled_fn(*inputs), state.params)
        grads = rescale(grads, scale)  # the optimizer expects scaled gradients
        return grads, unscale(norm(grads), scale), *rest

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        _check_state(state, tx)
        grads, grad_norm, terms, metrics, model_state = gradients(state, batch)
        loss = total_of(terms)
        updates, opt_state = update(tx, grads, state.opt_state, state.params, loss)
        params = apply_updates(state.params, updates)
        new = TrainState(state.step + 1, params, opt_state, model_state, state.key)
        new = _settled(state, new)
        if not (skip_nonfinite or scaling):
            return new, report(terms, metrics, grad_norm=mean(grad_norm))
        good = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & still_finite(state, new)
        kept = skipped(state.opt_state, opt_state) if scaling else state.opt_state
        old = state._replace(step=new.step, opt_state=kept)
        metrics = report(terms, metrics, grad_norm=mean(grad_norm), skipped=mean(~good))
        return tree.select(good, new, old), without_weight(good, metrics)

    return train_step


def make_eval_step(
    loss_fn: LossFn, *, precision: str | Precision = "f32", stateful: bool = False
) -> EvalFn:
    """Make an eval step, a function `(state, batch) -> metrics`.

    Its metrics are `loss`, every term of the loss, and the metrics of the loss function. Merged
    over batches they are exact, for any batch sizes and masks. The loss function gets the key of
    the next train step; to evaluate without dropout, pass a loss function without it.

    Args:
      loss_fn: a loss function.
      precision: the dtype in which it computes, as in `make_train_step`.
      stateful: whether it carries a model state; the new model state is discarded.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> evaluate = jax.jit(sf.make_eval_step(lambda params, batch, key: sf.mean(params * batch)))
    >>> state = sf.init_state(jnp.array(2.0), optax.sgd(0.1), jax.random.key(0))
    >>> some, rest = evaluate(state, jnp.arange(4.0)), evaluate(state, jnp.array([9.0]))
    >>> float(some["loss"].merge(rest["loss"]).compute())
    6.0
    """
    from stepfold.core.report import report

    loss_fn = as_precision(precision).applied_to(checked(loss_fn, stateful=stateful))

    def eval_step(state: TrainState, batch: Any) -> Metrics:
        _check_kind(state)
        key = jax.random.fold_in(state.key, state.step)
        model_state = (state.model_state,) if stateful else ()
        terms, metrics, *_ = loss_fn(state.params, batch, key, *model_state)
        return report(terms, metrics)

    return eval_step


def _check_kind(state: Any) -> None:
    if not isinstance(state, TrainState):
        inner = getattr(state, "state", None)
        kind = type(state)
        advice = "give its .state" if isinstance(inner, TrainState) else "sf.init_state makes one"
        raise ConfigError(
            f"state: expected a TrainState, got {kind.__module__}.{kind.__name__}; {advice}"
        )


def _check_state(state: Any, tx: optax.GradientTransformation) -> None:
    _check_kind(state)
    check_outermost(state.opt_state)
    lines = tree.diff(jax.eval_shape(tx.init, state.params), state.opt_state, "opt_state")
    if lines:
        raise TreeMismatchError(
            "the state was made with another optimizer than the step, or for other parameters:\n  "
            + "\n  ".join(lines)
            + "\nGive sf.init_state and sf.make_train_step the same tx."
        )


def _settled(old: TrainState, new: TrainState) -> TrainState:
    """Check that the new state has the same structure, shapes and dtypes; remove weak types."""
    lines = tree.diff(old, new)
    if lines:
        raise TreeMismatchError(
            "the step would change the form of its state, and so compile again each time:\n  "
            + "\n  ".join(lines)
        )
    return TrainState(*jax.tree.map(tree.strong, new))
