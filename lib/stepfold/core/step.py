"""The step itself: one batch folded into a state, as a pure function that nobody has jitted yet."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from clu.metrics import Average, Metric

from stepfold import tree
from stepfold.core.contract import checked, read_metrics, read_terms
from stepfold.core.gradients import GradFn, value_and_grad
from stepfold.core.loss import (
    LossFn,
    Metrics,
    Terms,
    TermSum,
    mean,
    report,
    total_of,
)
from stepfold.core.optimizer import apply_updates, as_optimizer, takes_any_keyword
from stepfold.core.precision import (
    LossScaled,
    LossScaleState,
    Precision,
    as_precision,
    norm,
    rescale,
    scaled,
    unscale,
)
from stepfold.core.state import TrainState
from stepfold.errors import ConfigError, TreeMismatchError

StepFn = Callable[[TrainState, Any], tuple[TrainState, Metrics]]
"""`(state, batch) -> (state, metrics)`, pure and un-jitted."""

EvalFn = Callable[[TrainState, Any], Metrics]
"""`(state, batch) -> metrics`, pure and un-jitted."""


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
    """Make the function that folds one batch into a state.

    It is pure and un-jitted: `jax.jit` (donate the state), `lax.scan`, `vmap` and `shard_map` all
    take it. Its metrics are `loss`, every term of the loss, the loss function's own, `grad_norm`,
    and `skipped` where steps may be. The loss is called with the key `fold_in(key, step)`, and the
    optimizer with `value=loss` for those that want it.

    Args:
      loss_fn: a loss function.
      tx: the optimizer that the state was initialized with.
      accumulate: into how many microbatches to split a batch; the result is the same.
      precision: "f32", "bf16", "f16" or a `Precision`: what the loss function computes in. What
        underflows in it needs `dynamic_loss_scale(tx)`.
      remat: what to keep for the backward pass: the name of one of `jax.checkpoint_policies`, such
        a policy itself, or True to keep nothing.
      skip_nonfinite: whether a step whose loss or gradients are not finite, or whose new parameters
        or model state would not be, leaves parameters, optimizer and model state as they were, bit
        for bit. It is counted in `step` and in `skipped`, and its loss and averages weigh nothing
        when merged.
      stateful: whether the loss function carries a model state.
      grad: a function from a loss function to a `GradFn`. Of the keywords `accumulate=` and
        `stateful=` it is given those that it takes. Its gradients are the loss's own, with
        `dynamic_loss_scale` too, whose scale the loss function hides (in reverse mode; there is no
        forward mode then). A NaN or an infinity must come through it, to tell of an overflow.

    Raises:
      ConfigError, LossError: here, where the arguments do not fit together.
      LossError, DataError, TreeMismatchError: when traced, where loss, batch or state do not.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> def loss_fn(params, batch, key):
    ...     error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    ...     return sf.mean(error**2), {"close": sf.mean(jnp.abs(error) < 0.1)}
    >>> params = {"w": jnp.zeros(2), "b": jnp.zeros(())}
    >>> x = jax.random.normal(jax.random.key(1), (64, 2))
    >>> batch = {"x": x, "y": x @ jnp.array([1.0, -2.0]) + 0.5}

    Whatever else optimization needs, optax has: schedules, clipping, weight decay, and freezing
    by path.

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
    loss_fn = _rematerialized(policy.applied_to(loss_fn), remat)
    options = _taken_by(grad, accumulate=accumulate, stateful=stateful)
    grad_fn, scaling = grad(loss_fn, **options), isinstance(tx, LossScaled)

    def gradients(state: TrainState, batch: Any) -> Any:
        key = jax.random.fold_in(state.key, state.step)
        inputs = state.params, batch, key, state.model_state
        if not scaling:
            grads, *rest = _four(grad_fn(*inputs), state.params)
            return grads, norm(grads), *rest
        scale = state.opt_state.scale
        grads, *rest = _four(grad(scaled(loss_fn, scale), **options)(*inputs), state.params)
        grads = rescale(grads, scale)  # as the optimizer takes them
        return grads, unscale(norm(grads), scale), *rest

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        _check_state(state, tx)
        grads, grad_norm, terms, metrics, model_state = gradients(state, batch)
        loss = total_of(terms)
        updates, opt_state = tx.update(grads, state.opt_state, state.params, value=loss)
        params = apply_updates(state.params, updates)
        new = TrainState(state.step + 1, params, opt_state, model_state, state.key)
        new = _settled(state, new)
        if not (skip_nonfinite or scaling):
            return new, report(terms, metrics, grad_norm=mean(grad_norm))
        good = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & _still_finite(state, new)
        old = state._replace(step=new.step)
        if scaling:  # a scale that has backed off is to stay so
            scale = jnp.minimum(opt_state.scale, state.opt_state.scale)
            old = old._replace(
                opt_state=LossScaleState(scale, 0 * opt_state.streak, state.opt_state.inner)
            )
        metrics = report(terms, metrics, grad_norm=mean(grad_norm), skipped=mean(~good))
        return tree.select(good, new, old), _weighed(good, metrics)

    return train_step


def make_eval_step(
    loss_fn: LossFn, *, precision: str | Precision = "f32", stateful: bool = False
) -> EvalFn:
    """Make the function that measures a state on one batch and changes nothing.

    Its metrics are `loss`, every term of the loss, and the loss function's own. Merged over batches
    they are exact, whatever the batches' sizes and masks. The key is that of the step to come; for
    an evaluation without dropout give a loss function without it.

    Args:
      loss_fn: a loss function.
      precision: what it computes in.
      stateful: whether it carries a model state; what it makes of it is dropped.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> evaluate = jax.jit(sf.make_eval_step(lambda params, batch, key: sf.mean(params * batch)))
    >>> state = sf.init_state(jnp.array(2.0), optax.sgd(0.1), jax.random.key(0))
    >>> some, rest = evaluate(state, jnp.arange(4.0)), evaluate(state, jnp.array([9.0]))
    >>> float(some["loss"].merge(rest["loss"]).compute())
    6.0
    """
    loss_fn = as_precision(precision).applied_to(checked(loss_fn, stateful=stateful))

    def eval_step(state: TrainState, batch: Any) -> Metrics:
        _check_kind(state)
        key = jax.random.fold_in(state.key, state.step)
        model_state = (state.model_state,) if stateful else ()
        terms, metrics, *_ = loss_fn(state.params, batch, key, *model_state)
        return report(terms, metrics)

    return eval_step


_PLAIN = {"accumulate": 1, "stateful": False}


def _taken_by(grad: Callable[..., GradFn], **options: Any) -> dict[str, Any]:
    """Choose the options that a way to a gradient takes; it must take what is not the default."""
    if not callable(grad):
        raise ConfigError(f"grad: expected a function of a loss function, got {tree.spell(grad)}")
    if takes_any_keyword(grad):
        return options
    parameters = inspect.signature(grad).parameters
    for name, value in options.items():
        if name not in parameters and value != _PLAIN[name]:
            raise ConfigError(
                f"grad: {getattr(grad, '__name__', grad)} was asked for {name}={value!r} and takes "
                f"no such keyword; let it take {name}=, as sf.value_and_grad does"
            )
    return {name: value for name, value in options.items() if name in parameters}


def _four(returned: Any, params: Any) -> tuple[Any, Terms, Metrics, Any]:
    """Hold what `grad` made to what a `GradFn` returns."""
    if not isinstance(returned, tuple) or len(returned) != 4:
        got = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else tree.spell(returned)
        raise ConfigError(f"grad: expected (grads, loss, metrics, model_state), got {got}")
    grads, loss, metrics, model_state = returned
    lines = tree.diff(params, grads, "grads")
    if lines:
        raise TreeMismatchError(
            "grad: expected gradients in the form of the parameters, got\n  " + "\n  ".join(lines)
        )
    return jax.tree.map(jnp.asarray, grads), read_terms(loss), read_metrics(metrics), model_state


_POLICIES = (
    "nothing_saveable",
    "everything_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
)


def _rematerialized(loss_fn: LossFn, remat: str | bool | Callable[..., bool] | None) -> LossFn:
    if remat is None or remat is False:
        return loss_fn
    if isinstance(remat, str) and remat in _POLICIES:
        remat = getattr(jax.checkpoint_policies, remat)
    # jax calls a policy with an operation's parameters; what makes a policy does not take them.
    if remat is not True and not (callable(remat) and takes_any_keyword(remat)):
        raise ConfigError(
            f"remat: expected None, True, a policy of jax.checkpoint_policies, or the name of one "
            f"({', '.join(_POLICIES)}), got {remat!r}"
            + ("; did you mean to call it?" * callable(remat))
        )
    return jax.checkpoint(loss_fn, policy=None if remat is True else remat)


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
    inner = state.opt_state.inner if _is_scale(state.opt_state) else state.opt_state
    if any(_is_scale(node) for node in jax.tree.leaves(inner, is_leaf=_is_scale)):
        raise ConfigError(
            "dynamic_loss_scale: expected it once and around the whole optimizer, found it inside "
            "another, where the step cannot scale the loss; tx = sf.dynamic_loss_scale(the rest)"
        )
    lines = tree.diff(jax.eval_shape(tx.init, state.params), state.opt_state, "opt_state")
    if lines:
        raise TreeMismatchError(
            "the state was made with another optimizer than the step, or for other parameters:\n  "
            + "\n  ".join(lines)
            + "\nGive sf.init_state and sf.make_train_step the same tx."
        )


def _is_scale(node: object) -> bool:
    return isinstance(node, LossScaleState)


def _settled(old: TrainState, new: TrainState) -> TrainState:
    """Hold a step to its promise: a state in, a state of the same form out."""
    lines = tree.diff(old, new)
    if lines:
        raise TreeMismatchError(
            "the step would change the form of its state, and so compile again each time:\n  "
            + "\n  ".join(lines)
        )
    return TrainState(*jax.tree.map(tree.strong, new))


def _still_finite(old: TrainState, new: TrainState) -> jax.Array:
    """Tell whether nothing turned non-finite; what was so before (a running minimum) may stay."""

    def still(old: Any, new: Any) -> Any:
        if not (tree.is_array(new) and jnp.issubdtype(new.dtype, jnp.inexact)):
            return True
        same = (new == old) | (jnp.isnan(new) & jnp.isnan(old))
        return (jnp.isfinite(new) | same).all()

    pairs = (old.params, old.model_state), (new.params, new.model_state)
    leaves = jax.tree.leaves(jax.tree.map(still, *pairs))
    return jnp.array(leaves, bool).all()


def _weighed(good: jax.Array, metrics: Metrics) -> Metrics:
    """Take the weight from the averages of a skipped step, so that they merge as nothing."""

    def weighed(name: str, metric: Metric) -> Metric:
        if name == "skipped" or not isinstance(metric, Average | TermSum):
            return metric
        return jax.tree.map(lambda leaf: jnp.where(good, leaf, jnp.zeros_like(leaf)), metric)

    return {name: weighed(name, metric) for name, metric in metrics.items()}
