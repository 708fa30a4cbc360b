"""Requirements on optimizers: optax transformations, or objects with the same methods."""

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import optax

from stepfold import tree
from stepfold.errors import ConfigError


def as_optimizer(tx: Any) -> optax.GradientTransformationExtraArgs:
    """Validate an optimizer; make it accept any keyword and run under strict promotion.

    `update` receives the keywords in its signature. Its type is not reliable: `optax.MultiSteps`
    takes any keyword without declaring it, `optax.contrib.sam` declares it and takes one.

    optax does not support `jax_numpy_dtype_promotion="strict"` (its bias correction raises a float
    to an integer), so optimizers run with standard promotion.
    """
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        advice = (
            "did you mean to call it, as in optax.adam(1e-3), or is it the rate, as in "
            "optax.adam(schedule)?"
            if callable(tx)
            else "give the optimizer itself, such as optax.adam(1e-3); init_state makes its state"
        )
        raise ConfigError(f"tx: expected an optax transformation, got {tree.spell(tx)}; {advice}")
    if not isinstance(tx, optax.GradientTransformationExtraArgs):
        tx = optax.GradientTransformationExtraArgs(tx.init, tx.update)
    return tx._replace(init=_promoting(tx.init), update=_promoting(_taking_any(tx.update)))


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    """Whether a function takes `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _taking_any(update: Callable[..., Any]) -> Callable[..., Any]:
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

# Messages of optax and Python if `update` lacks an argument, or does not take `value`.
_MISSING = re.compile("missing .*keyword-only argument|(obj|grad|value)_fn must be provided")
_UNWANTED = re.compile("unexpected keyword argument 'value'")


def update(
    tx: optax.GradientTransformationExtraArgs, grads: Any, state: Any, params: Any, loss: Any
) -> tuple[Any, Any]:
    """Update as a step does, with `value=loss`, and explain why an optimizer is not supported.

    The signature of an `optax.chain` does not show which keywords its parts need, only a call does.
    """
    try:
        updates, state = tx.update(grads, state, params, value=loss)
    except (TypeError, ValueError) as error:
        if _MISSING.search(str(error)):
            raise ConfigError(
                f"tx: expected an optimizer that makes do with the gradients and the loss, got one "
                f"that evaluates the loss itself ({error}); do without its line search or estimate,"
                " as optax.lbfgs(…, linesearch=None), or write the step by hand, around "
                "sf.value_and_grad"
            ) from error
        if _UNWANTED.search(str(error)):
            raise ConfigError(
                f"tx: expected every part of the optimizer to take value=loss, got one that says "
                f"that it takes any keyword, and does not ({error}); put "
                "optax.GradientTransformation(part.init, part.update) in its place"
            ) from error
        raise
    return updates, state


def check_lookahead(params: Any, opt_state: Any) -> None:
    """Refuse parameters without the slow copy that `optax.lookahead` needs."""
    nodes = jax.tree.leaves(opt_state, is_leaf=_is_lookahead)
    if any(map(_is_lookahead, nodes)) and not hasattr(params, "fast"):
        raise ConfigError(
            "tx: optax.lookahead expects optax.LookaheadParams.init_synced(params), got "
            f"{type(params).__name__}; its loss is one of params.fast, and its gradients are too: "
            "tx = ahead._replace(update=lambda grads, *rest: ahead.update(grads.fast, *rest))"
        )


def _is_lookahead(node: object) -> bool:
    return isinstance(node, optax.LookaheadState)
