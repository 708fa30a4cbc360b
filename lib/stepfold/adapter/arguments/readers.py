"""Readers: functions that take a value as a field wants it, or say what is wrong with it.

A reader is given the field's name, for the message, and a value. It returns the value as it is kept
(a list becomes a tuple, an integer learning rate a float), so that two ways to write the same are
equal, and so that what JSON makes of a value comes back as it was.
"""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from jax.sharding import PartitionSpec

from stepfold import tree
from stepfold.errors import ConfigError

Reader = Callable[[str, Any], Any]


def refuse(name: str, wanted: str, value: Any, advice: str = "") -> ConfigError:
    """Make the error that names field, value and what is allowed."""
    return ConfigError(
        f"{name}: expected {wanted}, got {value!r:.80}" + ("; " + advice) * bool(advice)
    )


def nearest(name: str, names: Sequence[str]) -> str:
    """Give the question that names the nearest neighbour of a misspelt name, or nothing."""
    close = get_close_matches(str(name), names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""


def optional(read: Reader, *, none: tuple[Any, ...] = ()) -> Reader:
    """Take None too, and other values that stand for it, such as the −1 of other libraries."""

    def read_optional(name: str, value: Any) -> Any:
        if value is None or any(type(value) is type(word) and value == word for word in none):
            return None
        return read(name, value)

    return read_optional


def flag(name: str, value: Any) -> bool:
    """Take True or False, and no number or text in their place."""
    if not isinstance(value, bool):
        raise refuse(name, "True or False", value)
    return value


def integer(least: int) -> Reader:
    """Take an integer of at least so much."""

    def read_integer(name: str, value: Any) -> int:
        if type(value) is not int or value < least:
            raise refuse(name, f"an integer of at least {least}", value)
        return value

    return read_integer


def seed(name: str, value: Any) -> int:
    """Take an integer that jax makes a random key of."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise refuse(name, f"an integer from 0 to {(1 << 63) - 1}", value)
    return value


def amount(name: str, value: Any) -> int | float:
    """Take a count of at least 1, or a fraction between 0 and 1."""
    counts = type(value) is int and value >= 1
    if not counts and not (type(value) is float and 0 < value < 1):
        raise refuse(name, "an integer of at least 1, or a fraction between 0 and 1", value)
    return value  # type: ignore[no-any-return]


def number(*, above: float | None = None, least: float = 0.0) -> Reader:
    """Take a finite number, as a float."""
    bound = f"above {above:g}" if above is not None else f"of at least {least:g}"

    def read_number(name: str, value: Any) -> float:
        try:
            found = float(value) if type(value) in (int, float) else math.nan
        except OverflowError:  # an integer beyond all floats
            found = math.inf
        if not math.isfinite(found) or (found <= above if above is not None else found < least):
            raise refuse(name, f"a number {bound}", value)
        return found

    return read_number


def text(name: str, value: Any) -> str:
    """Take a text that says something."""
    if not isinstance(value, str) or not value.strip():
        raise refuse(name, "a text", value)
    return value


def path(name: str, value: Any) -> str:
    """Take a path, and keep it as a text."""
    if not isinstance(value, str | os.PathLike) or not str(value).strip():
        raise refuse(name, "a path", value)
    return os.fspath(value) if isinstance(value, str) else str(value)


def one_of(*allowed: str) -> Reader:
    """Take one of some words."""

    def read_word(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise refuse(name, f"one of {', '.join(allowed)}", value, nearest(value, allowed))
        return value

    return read_word


def several(read: Reader, what: str, *, least: int = 0) -> Reader:
    """Take a sequence of things that each can be read, as a tuple."""

    def read_several(name: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or len(value) < least:
            raise refuse(name, what, value)
        return tuple(read(f"{name}[{index}]", one) for index, one in enumerate(value))

    return read_several


def listed(name: str, value: Any, what: str, kind: type | None = None) -> list[Any]:
    """Take a list of functions, or of what is of a kind."""

    def read(name: str, one: Any) -> Any:
        if kind is not None and not isinstance(one, kind):
            raise refuse(name, what, one)
        return function(name, one)

    return list(several(read, f"a list of {what}")(name, value))


def dims(name: str, value: Any) -> tuple[int, ...]:
    """Take sizes of the axes of a mesh, one of them -1 for what is left; "1,-1,1,1" too."""
    if isinstance(value, str) and re.fullmatch(r"\s*-?\d+(\s*,\s*-?\d+)*\s*", value):
        value = [int(size) for size in value.split(",")]
    fits = isinstance(value, list | tuple) and all(type(size) is int for size in value)
    if not fits or not value or any(size < 1 and size != -1 for size in value):
        raise refuse(name, "sizes of at least 1, one at most -1, as (1, -1, 1, 1)", value)
    if list(value).count(-1) > 1:
        raise refuse(name, "one -1 at most, as in (1, -1, 1, 1)", value)
    return tuple(value)


def partition(name: str, value: Any) -> tuple[Any, ...]:
    """Take a PartitionSpec, or a sequence like one, as a tuple of None, names, and tuples."""

    def entry(one: Any) -> Any:
        if one is None or (isinstance(one, str) and one):
            return one
        return several(text, "names of axes", least=1)(name, one)

    if not isinstance(value, PartitionSpec | list | tuple):
        raise refuse(name, 'a PartitionSpec, or a tuple as (("dp", "fsdp"), "sp")', value)
    return tuple(entry(one) for one in value)


def pattern(name: str, value: Any) -> str:
    """Take a regular expression."""
    try:
        re.compile(text(name, value))
    except re.error as error:
        raise refuse(name, "a regular expression", value, str(error)) from None
    return str(value)


def floating(name: str, value: Any) -> str:
    """Take a floating dtype, or the name of one, and keep its name."""
    short = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16"}
    short |= {"fp32": "float32", "f32": "float32", "fp64": "float64", "f64": "float64"}
    found = tree.floating(short.get(value, value) if isinstance(value, str) else value)
    if found is None or value is float or str(value) == "float":  # which are float64 to numpy
        raise refuse(name, "a floating dtype, as 'float32' or 'bfloat16'", value)
    return str(found.name)


def mapping(name: str, value: Any) -> dict[str, Any]:
    """Take values by name."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise refuse(name, "a dict with names as keys", value)
    return dict(value)


def function(name: str, value: Any) -> Callable[..., Any]:
    """Take a function."""
    if not callable(value) or isinstance(value, type):
        raise refuse(name, "a function", value)
    return value  # type: ignore[no-any-return]


_SECONDS = {"d": 86400, "h": 3600, "m": 60, "min": 60, "s": 1, "sec": 1}
_PART = r"(\d+(?:\.\d+)?)\s*(d|h|min|m|sec|s)"


def duration(name: str, value: Any) -> float | str:
    """Take seconds, or a text as "1h30m"; `seconds` says how many those are."""
    if isinstance(value, str):
        seconds(name, value)
        return value
    return number(above=0)(name, value)  # type: ignore[no-any-return]


def seconds(name: str, value: float | str) -> float:
    """Give the seconds of a duration.

    >>> seconds("training_time_limit", "1h30m"), seconds("training_time_limit", 20)
    (5400.0, 20.0)
    """
    if not isinstance(value, str):
        return float(value)
    spelled = value.strip().lower()
    if not re.fullmatch(rf"({_PART}\s*)+", spelled):
        raise refuse(name, "seconds, or a text as '90s', '45min', '1h30m' or '2d'", value)
    total = sum(float(count) * _SECONDS[unit] for count, unit in re.findall(_PART, spelled))
    if not total > 0:
        raise refuse(name, "a time above 0", value)
    return total
