"""What a function takes, asked before it is called: so that a wrong one is refused by its name."""

import inspect
from collections.abc import Callable
from typing import Any


def takes(function: Callable[..., Any], count: int) -> bool:
    """Tell whether a function can be called with so many arguments, as far as can be known.

    >>> takes(lambda state, batch: state, 2), takes(lambda params, batch, key: 0.0, 2)
    (True, False)
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some have none to look at; the call itself will tell
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def spell_call(function: Callable[..., Any]) -> str:
    """Spell a function by its name and what it takes, without types.

    >>> def loss_fn(params: dict, batch: dict) -> float: ...
    >>> spell_call(loss_fn)
    'loss_fn(params, batch)'
    """
    name = getattr(function, "__name__", type(function).__name__)
    signature = inspect.signature(function)
    empty = inspect.Parameter.empty
    plain = [each.replace(annotation=empty) for each in signature.parameters.values()]
    return f"{name}{signature.replace(parameters=plain, return_annotation=empty)}"
