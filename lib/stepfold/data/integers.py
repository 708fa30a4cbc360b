"""Validation of integer arguments."""

import operator
from typing import Any

import numpy as np

from stepfold.errors import ConfigError


def read_integer(name: str, value: Any, least: int) -> int:
    """Convert an integer of any library to an int; raise if it is not one or below `least`."""
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ConfigError(f"{name}: expected an integer of at least {least}, got {value!r}")
    return number
