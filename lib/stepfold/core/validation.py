"""Checks of arguments, with consistent error messages."""

import inspect
import operator
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from typing import Any

import numpy as np

from stepfold import tree
from stepfold.errors import ConfigError


def mismatch(argument: str, expected: str, got: Any, advice: str = "") -> str:
    """Format the message of an error: `{argument}: expected …, got …; {advice}`."""
    return f"{argument}: expected {expected}, got {tree.spell(got)}{advice and '; '}{advice}"


def check_count(name: str, value: Any, minimum: int = 1) -> int:
    """Return a Python integer of at least `minimum`; refuse integers of other types, and floats."""
    if type(value) is not int or value < minimum:
        raise ConfigError(f"{name}: expected an integer of at least {minimum}, got {value!r}")
    return value


def read_integer(name: str, value: Any, minimum: int = 1) -> int:
    """Convert an integer of any library to an int; refuse booleans and less than `minimum`."""
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    return check_count(name, value if number is None else number, minimum)


def check_positive(name: str, value: Any, *, allow_zero: bool = False, unit: str = "") -> float:
    """Return a number above 0, or at least 0 with `allow_zero`; refuse NaN."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits_float = is_number and (isinstance(value, float) or value < 1 << 1023)
    if not (fits_float and (value > 0 or (allow_zero and value == 0))):
        what = f"{unit}, a number" if unit else "a number"
        raise ConfigError(
            f"{name}: expected {what} {'of at least 0' if allow_zero else 'above 0'}, got {value!r}"
        )
    return value  # type: ignore[no-any-return]


def check_flags(**flags: Any) -> None:
    """Refuse anything but booleans, such as a name that would count as True."""
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise ConfigError(mismatch(name, "True or False", value))


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


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    """Whether a function takes `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def spell_call(function: Callable[..., Any]) -> str:
    """Format the name and the parameters of a function, without types."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-ins have none
        return f"{name}(…)"
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
