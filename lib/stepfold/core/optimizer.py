"""What stepfold asks of an optimizer: to be one of optax's, or to look like it."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import optax

from stepfold import tree
from stepfold.errors import ConfigError


def as_optimizer(tx: Any) -> optax.GradientTransformationExtraArgs:
    """Refuse what is no optimizer, and let any take extra arguments and strict promotion.

    optax is not written for `jax_numpy_dtype_promotion="strict"` (its bias correction raises a
    float to an integer), so the strictness of those who ask for it ends where the optimizer begins.
    """
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        advice = (
            "did you mean to call it, as in optax.adam(1e-3), or is it the rate, as in "
            "optax.adam(schedule)?"
            if callable(tx)
            else "give the optimizer itself, such as optax.adam(1e-3); init_state makes its state"
        )
        raise ConfigError(f"tx: expected an optax transformation, got {tree.spell(tx)}; {advice}")
    taking = optax.GradientTransformationExtraArgs
    if not isinstance(tx, taking) and takes_any_keyword(tx.update):
        tx = taking(tx.init, tx.update)  # optax.MultiSteps, which does not say so by its type
    tx = optax.with_extra_args_support(tx)
    return tx._replace(init=_promoting(tx.init), update=_promoting(tx.update))


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    """Tell whether a function ends in `**something`."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _promoting(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def promoted(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return promoted


apply_updates = _promoting(optax.apply_updates)
