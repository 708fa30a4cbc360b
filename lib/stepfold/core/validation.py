"""Readers of arguments: each returns the checked value, or raises an error that names it."""

import functools
import inspect
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, cast

import numpy as np

from stepfold.errors import ConfigError, refuse, warn

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def as_integer(value: Any) -> int | None:
    """Convert an integer of Python, numpy or jax; return None for anything else."""
    try:
        return None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        return None


def read_integer(name: str, value: Any, minimum: int = 1) -> int:
    """Convert an integer of any library; refuse booleans, and numbers below `minimum`."""
    number = as_integer(value)
    if number is None or number < minimum:
        refuse(name, f"an integer of at least {minimum}", repr(value))
    return number


def read_positive(name: str, value: Any, *, allow_zero: bool = False, unit: str = "") -> float:
    """Return a number above 0, or at least 0 with `allow_zero`; refuse NaN."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits_float = is_number and (isinstance(value, float) or value < 1 << 1023)
    if not (fits_float and (value > 0 or (allow_zero and value == 0))):
        what = f"{unit}, a number" if unit else "a number"
        refuse(name, f"{what} {'of at least 0' if allow_zero else 'above 0'}", repr(value))
    return value  # type: ignore[no-any-return]


def read_choice(name: str, value: Any, choices: Collection[str]) -> Any:
    """Return one of several strings."""
    if not isinstance(value, str) or value not in choices:
        expected = f"one of {', '.join(map(repr, choices))}"
        refuse(name, expected, repr(value), suggest(value, choices))
    return value


def read_instance(
    name: str,
    value: Any,
    types: type[T] | tuple[type[T], ...],
    expected: str,
    advice: str = "",
    *,
    kind: type[Exception] = ConfigError,
) -> T:
    """Return an instance of one of the types."""
    if not isinstance(value, types):
        refuse(name, expected, _describe(value), advice, kind=kind)
    return value


def _describe(value: Any) -> str:
    from stepfold.tree import describe_value  # lazy: imports jax

    return describe_value(value)


def read_function(
    name: str, value: Any, expected: str = "a function", advice: str = ""
) -> Callable[..., Any]:
    """Return anything that can be called."""
    if not callable(value):
        refuse(name, expected, _describe(value), advice)
    return value  # type: ignore[no-any-return]


def absolute_path(argument: str, path: str | os.PathLike[str]) -> Path:
    """Return a path from the current working directory as an absolute one, without `~` and `..`.

    It is not resolved: links keep their names, by which users and messages know a directory.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        refuse(argument, "a path", repr(path), "give a str or a Path")
    if re.match(r"\w{2,}:/", text):
        advice = "mount the bucket, or give it to Checkpoints, as a str such as 's3://bucket/run'"
        refuse(argument, "a path on a file system", repr(text), advice)
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        refuse(argument, "a path", f"{text!r}, but no user has this name", "give the absolute path")
    try:
        anchor, *names = Path(expanded).absolute().parts
    except FileNotFoundError as error:
        expected = "an absolute path, since the working directory was deleted"
        refuse(argument, expected, repr(text), "give one", cause=error)
    absolute = Path(anchor.replace("//", "/"))  # tensorstore takes // for an empty name
    for name in names:
        if name != "..":
            absolute /= name
        # As the system does: the directory above the target of a link, not above the link.
        elif os.path.islink(absolute):
            absolute = Path(os.path.realpath(absolute)).parent
        else:
            absolute = absolute.parent
    return absolute


def is_url(directory: Any) -> TypeGuard[str]:
    """Return whether a series is in object storage, as in `s3://bucket/run`."""
    return isinstance(directory, str) and re.match(r"\w{2,}://", directory) is not None


def check_flags(**flags: Any) -> None:
    """Refuse anything but booleans, such as a name that would count as True."""
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            refuse(name, "True or False", _describe(value))


def renamed(**names: str) -> Callable[[F], F]:
    """Decorate a function to take arguments by their old names too, with a warning."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for old, new in names.items():
                if old in kwargs:
                    message = f"{function.__name__}: {old}=… is now {new}=…"
                    if new in kwargs:
                        raise ConfigError(f"{message}; leave {old} out")
                    warn(message, DeprecationWarning)
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return cast(F, wrapper)

    return decorate


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


def refuse_unknown(
    owner: str,
    names: Iterable[str],
    known: Collection[str],
    elsewhere: Mapping[str, str] | None = None,
) -> None:
    """Raise a ConfigError for names that are not known, all of them at once.

    `elsewhere` has advice for names of other libraries.
    """
    advice = {
        name: (elsewhere or {}).get(name) or suggest(name, known) or f"there are {', '.join(known)}"
        for name in names
        if name not in known
    }
    if advice:
        unknown = [f"no {name!r}; {text}" for name, text in advice.items()]
        raise ConfigError(f"{owner}: there is {', and '.join(unknown)}")
