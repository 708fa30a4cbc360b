"""Checks of arguments, so that every module refuses them in the same words."""

import inspect
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from typing import Any

from stepfold.errors import ConfigError


def check_count(name: str, value: Any, minimum: int = 1) -> int:
    """Return a Python integer of at least `minimum`.

    Raises:
      ConfigError: if it is anything else; booleans and floats are not counts.

    >>> check_count("depth", 3)
    3
    """
    if type(value) is not int or value < minimum:
        raise ConfigError(f"{name}: expected an integer of at least {minimum}, got {value!r}")
    return value


def check_positive(name: str, value: Any, *, allow_zero: bool = False, unit: str = "") -> float:
    """Return a number above 0, or of at least 0.

    Raises:
      ConfigError: if it is anything else, NaN included.

    >>> check_positive("deviations", 2.5)
    2.5
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and (value > 0 or (allow_zero and value == 0))):
        what = f"{unit}, a number" if unit else "a number"
        raise ConfigError(
            f"{name}: expected {what} {'of at least 0' if allow_zero else 'above 0'}, got {value!r}"
        )
    return value  # type: ignore[no-any-return]


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with this many positional arguments, as far as is known.

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


def suggest(name: Any, names: Collection[str]) -> str:
    """Suggest the name closest to a misspelt one.

    >>> suggest("learning_rat", ["learning_rate", "seed"]), suggest("x", ["seed"])
    ("did you mean 'learning_rate'?", '')
    """
    close = get_close_matches(str(name), names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""


def refuse_unknown(owner: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise a ConfigError for a name that is not known.

    >>> refuse_unknown("Trainer", ["dataset_trian"], ["dataset_train", "dataset_eval"])
    Traceback (most recent call last):
    ...
    stepfold.errors.ConfigError: Trainer: there is no 'dataset_trian'; did you mean 'dataset_train'?
    """
    for name in names:
        if name not in known:
            advice = suggest(name, known) or f"there are {', '.join(known)}"
            raise ConfigError(f"{owner}: there is no {name!r}; {advice}")
