"""Requirements on optimizers (optax transformations, or objects with the same methods), skipping.

optax does not support `jax_numpy_dtype_promotion="strict"` (its bias correction raises a float to
an integer), so optimizers run with standard promotion.
"""

import inspect
from collections.abc import Callable, Collection, Iterator
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from stepfold import tree
from stepfold.core.validation import takes_any_keyword
from stepfold.errors import ConfigError, refuse
from stepfold.internals import texts


def as_optimizer(tx: Any) -> optax.GradientTransformationExtraArgs:
    """Validate an optimizer; make it accept any keyword and run with standard promotion."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        advice = (
            "did you mean to call it, as in optax.adam(1e-3), or is it the rate, as in "
            "optax.adam(schedule)?"
            if callable(tx)
            else "give the optimizer itself, such as optax.adam(1e-3); init_state makes its state"
        )
        refuse("tx", "an optax transformation", tree.describe_value(tx), advice)
    if not isinstance(tx, optax.GradientTransformationExtraArgs):
        tx = optax.GradientTransformationExtraArgs(tx.init, tx.update)
    return tx._replace(init=_promoting(tx.init), update=_promoting(_taking_any(tx.update)))


def _taking_any(update: Callable[..., Any]) -> Callable[..., Any]:
    """Pass on the keywords in the signature of `update`.

    The type of an optimizer is not reliable: `optax.MultiSteps` takes any keyword without declaring
    it, `optax.contrib.sam` declares it and takes one.
    """
    if takes_any_keyword(update):
        return update
    names = inspect.signature(update).parameters

    @wraps(update)
    def updated(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        taken = {name: value for name, value in extra.items() if name in names}
        return update(updates, state, params, **taken)

    return updated


def _promoting(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def promoted(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return promoted


apply_updates = _promoting(optax.apply_updates)


def update(
    tx: optax.GradientTransformationExtraArgs, grads: Any, state: Any, params: Any, loss: Any
) -> tuple[Any, Any]:
    """Update as a step does, with `value=loss`, and explain why an optimizer is not supported.

    The signature of an `optax.chain` does not show which keywords its parts need, only a call does.
    """
    try:
        updates, state = tx.update(grads, state, params, value=loss)
    except (TypeError, ValueError) as error:
        message = str(error)
        if texts.NEEDS_LOSS.search(message):
            raise ConfigError(
                f"tx: expected an optimizer that needs only the gradients and the loss, got one "
                f"that evaluates the loss itself ({message}); turn off its line search or "
                "estimate, as optax.lbfgs(…, linesearch=None), or write the step by hand, around "
                "sf.make_grad"
            ) from error
        if texts.REFUSES_VALUE.search(message):
            raise ConfigError(
                f"tx: expected every part of the optimizer to take value=loss, got one that "
                f"declares any keyword and does not take it ({message}); put "
                "optax.GradientTransformation(part.init, part.update) in its place"
            ) from error
        raise
    return updates, state


def check_lookahead(params: Any, opt_state: Any) -> None:
    """Refuse parameters without the slow copy that `optax.lookahead` needs."""
    if find_nodes(opt_state, optax.LookaheadState) and not hasattr(params, "fast"):
        raise ConfigError(
            "tx: optax.lookahead expects optax.LookaheadParams.init_synced(params), got "
            f"{type(params).__name__}; its loss is one of params.fast, and its gradients are too: "
            "tx = ahead._replace(update=lambda grads, *rest: ahead.update(grads.fast, *rest))"
        )


def takes_examples(opt_state: Any) -> bool:
    """Whether an optimizer aggregates the gradients of single examples, as `dpsgd` does."""
    return bool(find_nodes(opt_state, optax.contrib.DifferentiallyPrivateAggregateState))


def find_nodes(opt_state: Any, kind: type) -> list[Any]:
    """List the nodes of a type in an optimizer state, at any depth, but not inside each other."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


def hyperparams_of(state: Any, root: str = "opt_state") -> dict[str, Any]:
    """Return what `optax.inject_hyperparams` holds, by path; schedules, which change, are left out.

    >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    >>> hyperparams_of(tx.init({"w": jnp.ones(2)}))
    {'opt_state/hyperparams/learning_rate': 0.5}
    """
    hyperparams: dict[str, Any] = {}
    for where, node in _injected(state, root):
        for name, value in node.hyperparams.items():
            if name not in getattr(node, "hyperparams_states", ()) and tree.is_data(value):
                hyperparams[f"{where}/hyperparams/{name}"] = np.asarray(
                    jax.device_get(value)
                ).tolist()
    return hyperparams


def learning_rates(opt_state: Any, but: Collection[str] = ()) -> dict[str, jax.Array]:
    """Return the learning rates in the states of `optax.inject_hyperparams`, by name of a metric.

    They are those of the last update, even if a schedule or a hook changes them. If there are
    several, each has the part of its path that is not common to all. Names in `but` are left out.
    """
    values = {
        path: node.hyperparams.get("learning_rate") for path, node in _injected(opt_state, "")
    }
    rates = {path: x for path, x in values.items() if tree.is_real(x) and jnp.shape(x) == ()}
    parts = [path.split("/") for path in rates]
    own = ["/".join(p for p in path if not all(p in each for each in parts)) for path in parts]
    names = own if len(set(own)) == len(own) else [*rates]
    names = [f"learning_rate/{name}".rstrip("/") for name in names]
    pairs = zip(names, rates.values(), strict=True)
    return {name: rate for name, rate in pairs if name not in but}


def _injected(state: Any, root: str) -> Iterator[tuple[str, Any]]:
    """Yield the states of `optax.inject_hyperparams` with their paths, also inside each other."""
    is_injected: Any = lambda node: hasattr(node, "hyperparams") and hasattr(node, "inner_state")
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_injected):
        if is_injected(node):
            where = "/".join(filter(None, (root, tree.path_name(path))))
            yield where, node
            yield from _injected(node.inner_state, "/".join(filter(None, (where, "inner_state"))))


def still_finite(old: Any, new: Any) -> jax.Array:
    """Whether no value became NaN or inf; one that was so before (a running minimum) may stay."""

    def still(old: Any, new: Any) -> Any:
        if not (tree.is_array(new) and jnp.issubdtype(new.dtype, jnp.inexact)):
            return True
        same = (new == old) | (jnp.isnan(new) & jnp.isnan(old))
        return (jnp.isfinite(new) | same).all()

    return jnp.array(jax.tree.leaves(jax.tree.map(still, old, new)), bool).all()
