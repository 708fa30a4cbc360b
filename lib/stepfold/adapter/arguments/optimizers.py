"""Optimizers by their names in optax: which there are, and what each takes."""

import inspect
from collections.abc import Callable
from typing import Any

import optax
from optax import contrib

from stepfold.adapter.arguments.readers import nearest, text
from stepfold.errors import ConfigError

_RATES = ("learning_rate", "max_learning_rate")
_NEEDS_MORE = {
    "dpsgd": "it takes the gradient of each example; give make_train_step a grad= of your own",
    "schedule_free": "it wraps an optimizer; take schedule_free_adamw or schedule_free_sgd, or "
    "give tx= one of your own",
}


def optimizer_names() -> list[str]:
    """List the optimizers of optax and of optax.contrib that can be made by name."""
    names = {*dir(optax), *dir(contrib)}
    return sorted(name for name in names if _found(name) is not None and name not in _NEEDS_MORE)


def _found(name: str) -> Callable[..., Any] | None:
    if name.startswith(("_", "scale_by_")):
        return None
    # By `dir`, since asking optax for a name that it has deprecated warns.
    for module in (optax, contrib):
        if name in dir(module) and inspect.isfunction(getattr(module, name)):
            make: Callable[..., Any] = getattr(module, name)
            if any(rate in inspect.signature(make).parameters for rate in _RATES):
                return make
    return None


def find_optimizer(name: str) -> Callable[..., Any]:
    """Find what makes an optimizer, by its name.

    Raises:
      ConfigError: if neither optax nor optax.contrib has it.

    >>> find_optimizer("adamw").__name__
    'adamw'
    """
    found = _found(name)
    if found is None:
        names = optimizer_names()
        raise ConfigError(
            f"optimizer: expected one of {', '.join(names)}, got {name!r}; "
            + (nearest(name, names) or "give the Trainer tx= for one of your own")
        )
    return found


def read_optimizer(field: str, name: Any) -> str:
    """Read the name of an optimizer."""
    text(field, name)
    if name in _NEEDS_MORE:
        raise ConfigError(f"{field}: {name} cannot be made by its name: {_NEEDS_MORE[name]}")
    find_optimizer(name)
    return str(name)


def options_of(name: str) -> dict[str, Any]:
    """Give what an optimizer takes besides a rate, with the defaults."""
    parameters = inspect.signature(find_optimizer(name)).parameters.values()
    return {one.name: one.default for one in parameters if one.name != "learning_rate"}


def check_options(name: str, given: dict[str, Any]) -> None:
    """Refuse options that the optimizer does not take, and lack of those that it must have.

    Raises:
      ConfigError: with the options that there are.
    """
    known = options_of(name)
    for option in given:
        if option not in known:
            what = "; the rate is of learning_rate and scheduler" * (option == "learning_rate")
            raise ConfigError(
                f"extra_optimizer_kwargs: {name} takes {', '.join(known) or 'none'}, got "
                f"{option!r}" + (what or f"; {nearest(option, [*known])}".rstrip("; "))
            )
    lacking = [
        option
        for option, default in known.items()
        if default is inspect.Parameter.empty and option not in given
    ]
    if lacking:
        raise ConfigError(
            f"extra_optimizer_kwargs: {name} must be given {', '.join(lacking)}, got "
            f"{', '.join(given) or 'none'}"
        )
    if name == "lbfgs" and given.get("linesearch", "zoom") is not None:
        raise ConfigError(
            "optimizer: lbfgs searches along a line with a function of the value, which a step "
            "does not give; write extra_optimizer_kwargs={'linesearch': None}"
        )
    if name == "sophia" and "hessian_diagonal_fn" not in given:
        raise ConfigError(
            "optimizer: sophia estimates curvature with a function of the value, which a step does "
            "not give; write extra_optimizer_kwargs={'hessian_diagonal_fn': …} that needs none"
        )
