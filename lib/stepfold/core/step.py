"""Train and eval steps: pure functions, not jitted."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import optax

from stepfold import tree
from stepfold.core.gradients import GradFn, make_grad, options_of, read_gradients, rematerialized
from stepfold.core.loss import (
    LossFn,
    Metrics,
    checked,
    mean,
    total_of,
    warning_of_unread_mask,
    weigh_numbers,
)
from stepfold.core.optimizer import (
    apply_updates,
    as_optimizer,
    learning_rates,
    still_finite,
    takes_examples,
    update,
)
from stepfold.core.precision import (
    LossScaled,
    Precision,
    as_precision,
    check_outermost,
    norm,
    rescale,
    scaled,
    skipped,
    unscale,
)
from stepfold.core.state import TrainState, check_not_donated, strengthen
from stepfold.core.validation import check_flags, read_function
from stepfold.errors import ConfigError, ShardingError, TreeMismatchError, refuse, warn
from stepfold.internals.jax import has_collective, unchecked_axes, without_dead_code

StepFn = Callable[[TrainState, Any], tuple[TrainState, Metrics]]
"""`(state, batch) -> (state, metrics)`, pure and not jitted; `fit` takes numbers as metrics too."""

EvalFn = Callable[[TrainState, Any], Metrics]
"""`(state, batch) -> metrics`, pure and not jitted."""


def make_train_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    *,
    accumulate: int = 1,
    precision: str | Precision | None = None,
    remat: str | bool | Callable[..., bool] | None = None,
    skip_nonfinite: bool = False,
    stateful: bool = False,
    norms: str | None = None,
    grad: Callable[..., GradFn] = make_grad,
) -> StepFn:
    """Make a train step, a function `(state, batch) -> (state, metrics)`.

    It is pure and not jitted: apply `jax.jit` (donate the state), `lax.scan`, `vmap` or `shard_map`
    to it. Its metrics are `loss`, every term of the loss, the metrics of the loss function,
    `grad_norm`, `skipped` if steps may be skipped, and `learning_rate` if the optimizer knows it:
    if `optax.inject_hyperparams` keeps it in the state. A loss or metric that is a number is taken
    as a mean over the examples of its batch, which are its weight. The loss function gets the key
    `fold_in(key, step)`. The optimizer gets `value=loss` if it accepts it.

    Args:
      loss_fn: a loss function.
      tx: the optimizer that the state was initialized with.
      accumulate: the number of microbatches to split a batch into; the result is the same.
      precision: "f32", "bf16", "f16" or a `Precision`: the dtype that parameters and inputs are
        cast to for the loss function. Targets and weights are not; see `Precision`. If small
        gradients underflow in it, `tx` must be a `dynamic_loss_scale(…)`. By default nothing is
        cast: bfloat16 parameters compute in bfloat16, and float16 parameters need the loss scale
        too.
      remat: what to save for the backward pass of the whole loss function: the name of one of
        `jax.checkpoint_policies`, such a policy itself, or True to save nothing. For models of many
        layers, apply `jax.checkpoint` to the layer instead.
      skip_nonfinite: whether to skip a step whose loss, gradients or gradient norm are not finite,
        or whose new parameters or model state would not be. A skipped step keeps parameters,
        optimizer state and model state bit for bit, except for the loss scale and its count of
        finite updates. It counts in `step` and in `skipped`; its loss and averages have weight zero
        when merged.
      stateful: whether the loss function carries a model state.
      norms: a regular expression that groups the parameters, to report the norms of their
        gradients and updates. It is searched in the paths, such as `layers/0/kernel`, and the text
        that it matches names the group: `layers/[0-9]+` reports `grad_norm/layers/0`,
        `update_norm/layers/0` and so on, and the `update_norm` of all parameters. Updates are what
        the optimizer adds to them.
      grad: a function from a loss function to a `GradFn`, `make_grad` by default; the others are
        `ordered` and `reduce_once`. It gets those of the keywords `accumulate=` and `stateful=`
        that it accepts; set others with `functools.partial`. It must propagate NaN and inf, since
        they signal an overflow. For `optax.contrib.dpsgd` it returns the gradients of the examples,
        stacked along a leading axis; `grad_norm` is then the norm of their mean. If the `GradFn`
        has an attribute `norm`, a function of the gradients, it computes `grad_norm`.

    Raises:
      ConfigError, LossError: if the arguments do not fit together.
      LossError, DataError, TreeMismatchError: while tracing, if the loss, the batch or the state is
        invalid.
      ConfigError: while tracing, if the optimizer evaluates the loss itself.

    Warns:
      UserWarning: while tracing, if the batch has a `mask`, as padded batches have, that the loss,
        or the mean of a metric over its rows, does not depend on; and in a `shard_map` with
        `check_vma=False`, if gradients are not averaged over the devices.

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
    check_flags(skip_nonfinite=skip_nonfinite, stateful=stateful)
    from stepfold.core.metrics import report, without_weight  # lazy: clu imports flax

    loss_fn = warning_of_unread_mask(checked(loss_fn, stateful=stateful))
    tx = as_optimizer(tx)
    policy, pattern = as_precision(precision), _read_pattern(norms)
    if policy and policy.needs_loss_scale and not isinstance(tx, LossScaled):
        raise ConfigError(
            f"precision={precision!r}: gradients underflow in {jnp.dtype(policy.compute).name}; "
            "wrap the whole optimizer, tx = sf.dynamic_loss_scale(tx), for init_state and for this"
        )
    loss_fn = rematerialized(policy.applied_to(loss_fn) if policy else loss_fn, remat)
    options = options_of(grad, accumulate=accumulate, stateful=stateful)
    grad_fn, scaling = grad(loss_fn, **options), isinstance(tx, LossScaled)

    def gradients(state: TrainState, batch: Any) -> Any:
        key = jax.random.fold_in(state.key, state.step)
        per_example = takes_examples(state.opt_state)
        scale: Any = state.opt_state.scale if scaling else None
        fn = grad(scaled(loss_fn, scale), **options) if scaling else grad_fn
        returned = fn(state.params, batch, key, state.model_state)
        grads, *rest = read_gradients(returned, state.params, per_example=per_example)
        if scaling:  # the optimizer expects scaled gradients
            grads = rescale(grads, scale)
        norm_of = getattr(fn, "norm", norm)
        batch_grads = jax.tree.map(lambda g: g.mean(0), grads) if per_example else grads
        all_norms = _norms("grad_norm", batch_grads, pattern, norm_of)
        return grads, unscale(all_norms, scale) if scaling else all_norms, norm_of, *rest

    def first_updates(state: TrainState, batch: Any) -> Any:
        grads, _, _, terms, *_ = gradients(state, batch)
        return update(tx, grads, state.opt_state, state.params, total_of(terms))[0]

    @_explain_explicit_axes()
    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        _check_state(state, tx)
        if grad is make_grad and (axes := unchecked_axes()):
            _warn_of_local_gradients(axes, first_updates, state, batch)
        grads, all_norms, norm_of, terms, metrics, model_state = gradients(state, batch)
        loss, grad_norm = total_of(terms), all_norms["grad_norm"]
        terms, metrics = weigh_numbers(terms, batch), weigh_numbers(metrics, batch)
        updates, opt_state = update(tx, grads, state.opt_state, state.params, loss)
        all_norms |= _norms("update_norm", updates, pattern, norm_of) if pattern else {}
        rates = learning_rates(opt_state, but={**terms, **metrics})
        own = {name: mean(value) for name, value in {**all_norms, **rates}.items()}
        params = apply_updates(state.params, updates)
        new = type(state)(state.step + 1, params, opt_state, model_state, state.key)
        _check_unchanged_structure(state, new)
        new = strengthen(new)
        if not (skip_nonfinite or scaling):
            return new, report(terms, metrics, **own)
        # The norm is finite only if every gradient is; an update may still not be.
        still = still_finite((state.params, state.model_state), (new.params, new.model_state))
        good = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & still
        kept = skipped(state.opt_state, opt_state) if scaling else state.opt_state
        old = state._replace(step=new.step, opt_state=kept)
        metrics = report(terms, metrics, **own, skipped=mean(~good))
        return tree.select(good, new, old), without_weight(good, metrics)

    return train_step


def make_eval_step(
    loss_fn: LossFn, *, precision: str | Precision | None = None, stateful: bool = False
) -> EvalFn:
    """Make an eval step, a function `(state, batch) -> metrics`.

    Its metrics are `loss`, every term of the loss, and the metrics of the loss function. Merged
    over batches they are exact, for any batch sizes and masks; a loss or a mean that ignores the
    `mask` of its batch is warned of. A number is taken as a mean over the examples of its batch.
    The loss function gets the key of the next train step; to evaluate without dropout, pass a loss
    function without it.

    Args:
      loss_fn: a loss function.
      precision: the dtype that parameters and inputs are cast to, as in `make_train_step`.
      stateful: whether it carries a model state; the new model state is discarded.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> evaluate = jax.jit(sf.make_eval_step(lambda params, batch, key: sf.mean(params * batch)))
    >>> state = sf.init_state(jnp.array(2.0), optax.sgd(0.1), jax.random.key(0))
    >>> some, rest = evaluate(state, jnp.arange(4.0)), evaluate(state, jnp.array([9.0]))
    >>> float(some["loss"].merge(rest["loss"]).compute())
    6.0
    """
    check_flags(stateful=stateful)
    from stepfold.core.metrics import report

    loss_fn = warning_of_unread_mask(checked(loss_fn, stateful=stateful))
    policy = as_precision(precision)
    loss_fn = policy.applied_to(loss_fn) if policy else loss_fn

    @_explain_explicit_axes()
    def eval_step(state: TrainState, batch: Any) -> Metrics:
        _check_kind(state)
        key = jax.random.fold_in(state.key, state.step)
        model_state = (state.model_state,) if stateful else ()
        terms, metrics, *_ = loss_fn(state.params, batch, key, *model_state)
        return report(weigh_numbers(terms, batch), weigh_numbers(metrics, batch))

    return eval_step


def observe(
    step: Callable[[Any, Any], tuple[Any, Any]], /, **functions: Callable[[Any], Any]
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Add metrics of the new state to a step, such as the learning rate or the weight norm.

    The metrics are computed within the step: they belong to exactly that step, and the host does
    not wait for them. A schedule counts from zero, so the learning rate that led to a state is
    `schedule(state.step - 1)`, unless steps were skipped, which optimizers do not count. With
    `optax.inject_hyperparams`, `make_train_step` reports the rate by itself; a function called
    `learning_rate` takes its place.

    Args:
      step: a `StepFn`.
      **functions: functions of the state that return a number, by metric name.

    Raises:
      ConfigError: if an argument is not callable; while tracing, if a function does not return a
        number, or the step already has a metric of that name.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> schedule = optax.linear_schedule(1.0, 0.0, 10)
    >>> tx = optax.sgd(schedule)
    >>> step = sf.make_train_step(lambda params, batch, key: (params * batch).mean(), tx)
    >>> step = sf.observe(
    ...     step,
    ...     learning_rate=lambda state: schedule(state.step - 1),
    ...     weight_norm=lambda state: optax.tree.norm(state.params),
    ... )
    >>> state = sf.init_state(jnp.ones(4), tx, jax.random.key(0))
    >>> state, metrics = step(state, jnp.ones(4))
    >>> {name: float(metric.compute()) for name, metric in metrics.items()}
    {'loss': 1.0, 'grad_norm': 0.5, 'learning_rate': 1.0, 'weight_norm': 1.5}
    """
    read_function("observe", step, "a step (state, batch) -> …")
    for name, function in functions.items():
        read_function(name, function, "a function of the state")

    def observed(state: Any, batch: Any) -> tuple[Any, Any]:
        state, metrics = step(state, batch)
        taken = sorted(functions.keys() & metrics.keys() - {"learning_rate"})
        if taken:
            refuse("observe", "other names than the step's own metrics", f"{', '.join(taken)}")
        values = {name: function(state) for name, function in functions.items()}
        for name, value in values.items():
            if not tree.is_real(value) or jnp.shape(value) != ():
                refuse(name, "one number of the state", tree.describe_value(value))
        return state, {**metrics, **{name: mean(value) for name, value in values.items()}}

    return observed


def _warn_of_local_gradients(
    axes: Sequence[str], function: Callable[..., Any], state: TrainState, batch: Any
) -> None:
    """Warn if the updates in a `shard_map` without checks are those of the rows of one device."""
    traced = jax.make_jaxpr(function)(state, batch)
    if not has_collective(without_dead_code(traced.jaxpr)):
        names = ", ".join(axes)
        warn(
            f"step: expected gradients of the whole batch in shard_map over {names}, got those of "
            "the rows of each device, since check_vma=False leaves out the sum over devices, also "
            "after a pmean of the loss; apply jax.jit to the step instead, with a batch of "
            "sf.shard_batch, or give make_train_step(…, grad=…) a function whose gradients are "
            "averaged by jax.lax.pmean. If each device has its own parameters, ignore this",
        )


def _read_pattern(norms: Any) -> re.Pattern[str] | None:
    try:
        return None if norms is None else re.compile(norms)
    except (TypeError, re.error) as error:
        refuse("norms", "a regular expression", f"{norms!r}: {error}")


def _norms(
    name: str, arrays: Any, pattern: re.Pattern[str] | None, norm_of: Callable[[Any], jax.Array]
) -> dict[str, jax.Array]:
    """Return the norm of all arrays, and that of each group of them, by name."""
    groups: dict[str, list[Any]] = {}
    named = tree.named_leaves(arrays)
    for path, leaf in named:
        match = None if pattern is None else pattern.search(path)
        if match and match[0]:
            groups.setdefault(f"{name}/{match[0].strip('/')}", []).append(leaf)
    if pattern is not None and not groups:
        paths = ", ".join(path for path, _ in named[:5]) + ", …" * (len(named) > 5)
        expected = "a pattern that matches a part of the path of a parameter"
        refuse("norms", expected, repr(pattern.pattern), f"the paths are {paths}")
    return {name: norm_of(arrays), **{group: norm_of(leaves) for group, leaves in groups.items()}}


@contextmanager
def _explain_explicit_axes() -> Iterator[None]:
    """Add advice to jax's error about a function that was not written for Explicit axes."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "ShardingTypeError":  # jax does not export the class
            raise
        raise ShardingError(
            f"step: expected functions that are written for the Explicit axes of the mesh, got "
            f"this error of jax: {error}\nMake the mesh with sf.make_mesh, whose axes are Auto; or "
            "keep the mesh, and give the step as jax.sharding.auto_axes(step, "
            "out_sharding=(plan, PartitionSpec())) under jax.set_mesh(mesh)"
        ) from error


def _check_kind(state: Any) -> None:
    if not isinstance(state, TrainState):
        inner = getattr(state, "state", None)
        kind = type(state)
        advice = "give its .state" if isinstance(inner, TrainState) else "sf.init_state makes one"
        refuse("state", "a TrainState", f"{kind.__module__}.{kind.__name__}", advice)
    check_not_donated(state)


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


def _check_unchanged_structure(old: TrainState, new: TrainState) -> None:
    """Refuse a step that changes its state's structure, shapes or dtypes, and so compiles again."""
    lines = tree.diff(old, new, "state")
    if lines:
        raise TreeMismatchError(
            "state: expected the same structure, shapes and dtypes from the step, got\n  "
            + "\n  ".join(lines)
        )
