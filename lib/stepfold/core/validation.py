"""Checks of arguments, with consistent error messages."""

import inspect
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from typing import Any

from stepfold.errors import ConfigError


def check_count(name: str, value: Any, minimum: int = 1) -> int:
    """Return a Python integer of at least `minimum`; refuse booleans and floats."""
    if type(value) is not int or value < minimum:
        raise ConfigError(f"{name}: expected an integer of at least {minimum}, got {value!r}")
    return value


def check_positive(name: str, value: Any, *, allow_zero: bool = False, unit: str = "") -> float:
    """Return a number above 0, or at least 0 with `allow_zero`; refuse NaN."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and (value > 0 or (allow_zero and value == 0))):
        what = f"{unit}, a number" if unit else "a number"
        raise ConfigError(
            f"{name}: expected {what} {'of at least 0' if allow_zero else 'above 0'}, got {value!r}"
        )
    return value  # type: ignore[no-any-return]


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function accepts this many positional arguments; True if it has no signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-ins have none; a wrong call will raise
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def spell_call(function: Callable[..., Any]) -> str:
    """Format the name and the parameters of a function, without types."""
    name = getattr(function, "__name__", type(function).__name__)
    signature = inspect.signature(function)
    empty = inspect.Parameter.empty
    plain = [each.replace(annotation=empty) for each in signature.parameters.values()]
    return f"{name}{signature.replace(parameters=plain, return_annotation=empty)}"


def suggest(name: Any, names: Collection[str]) -> str:
    """Suggest the name closest to a misspelled one; empty if none is close."""
    close = get_close_matches(str(name), names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""


def refuse_unknown(owner: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise a ConfigError for a name that is not known."""
    for name in names:
        if name not in known:
            advice = suggest(name, known) or f"there are {', '.join(known)}"
            raise ConfigError(f"{owner}: there is no {name!r}; {advice}")
