"""JSON documents that carry their own checksum, and what may be in them."""

import base64
import json
import math
import operator
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stepfold import tree
from stepfold.errors import CheckpointError, ConfigError

_SEAL = b"stepfold crc32 "
_BYTES = "bytes in base64"  # how bytes, of which grain's positions are made, are written in JSON


class DamageError(CheckpointError):
    """Say that what is stored is not what was written: another step may be good."""


def plain(value: Any, name: str) -> Any:
    """Make of a value what JSON gives back as it is, or say at which path it cannot be.

    Tuples become lists, numpy's numbers Python's, and bytes a dict that `opened` reads again.

    >>> plain({"lengths": (3, np.int64(4)), "state": b"ab"}, "data")
    {'lengths': [3, 4], 'state': {'bytes in base64': 'YWI='}}
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{name}/{i}") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        if value.keys() == {_BYTES}:
            raise ConfigError(f"{name}: expected another key than {_BYTES!r}, which is taken")
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{name}: expected keys of text, got {key!r}; JSON has no others")
        return {key: plain(item, f"{name}/{key}") for key, item in value.items()}
    raise ConfigError(
        f"{name}: expected what JSON can hold, got {tree.spell(value)}; arrays belong into the "
        "state, and anything else is written as text or numbers"
    )


def opened(value: Any) -> Any:
    """Give back what `plain` was given, lists for tuples."""
    if isinstance(value, dict):
        if value.keys() == {_BYTES}:
            return base64.b64decode(value[_BYTES])
        return {key: opened(item) for key, item in value.items()}
    return [opened(item) for item in value] if isinstance(value, list) else value


def seal(content: Any) -> bytes:
    """Write plain content as JSON under a line with its checksum.

    >>> print(seal({"step": 3}).decode())
    stepfold crc32 08b1f3bf
    {"step": 3}
    """
    text = json.dumps(content).encode()
    return _SEAL + f"{zlib.crc32(text):08x}\n".encode() + text


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Say that something may be good, but cannot be read by us, or now."""
    return CheckpointError(f"{path}: cannot be read: {error.strerror}; change the permission")


def unseal(path: Path) -> Any:
    """Read what `seal` wrote.

    Raises:
      DamageError: if it is not there, or not what was written.
    """
    try:
        head, _, text = path.read_bytes().partition(b"\n")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise DamageError(f"{path.name}: missing") from None
    except OSError as error:
        raise unreadable(path, error) from error
    if head != _SEAL + f"{zlib.crc32(text):08x}".encode():
        raise DamageError(f"{path.name}: its checksum does not fit its content")
    return json.loads(text)


def integer(value: Any) -> int | None:
    """Read an integer of Python, numpy or jax, or None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def number(value: Any) -> float | None:
    """Read a finite number, or None for anything else, NaN too."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None
