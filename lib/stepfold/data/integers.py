"""Integers, of whatever library they are."""

import operator
from typing import Any

import numpy as np

from stepfold.errors import ConfigError


def read_integer(name: str, value: Any, least: int) -> int:
    """Read an integer of any library's, and refuse what is none or too small."""
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ConfigError(f"{name}: expected an integer of at least {least}, got {value!r}")
    return number
