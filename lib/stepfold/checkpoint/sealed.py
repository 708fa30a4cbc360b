"""JSON files with a checksum, and the values that they can hold."""

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
_BYTES = "bytes in base64"  # the JSON encoding of bytes, which grain's positions consist of


class DamageError(CheckpointError):
    """The stored data is not what was written; another step may be valid."""


def plain(value: Any, name: str) -> Any:
    """Convert a value to plain JSON, or raise with the path of what JSON cannot hold.

    Tuples become lists, numpy scalars Python numbers, and bytes a dict that `opened` decodes.
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
    """Invert `plain`, except that tuples stay lists."""
    if isinstance(value, dict):
        if value.keys() == {_BYTES}:
            return base64.b64decode(value[_BYTES])
        return {key: opened(item) for key, item in value.items()}
    return [opened(item) for item in value] if isinstance(value, list) else value


def seal(content: Any) -> bytes:
    """Serialize plain content as JSON, preceded by a line with its checksum."""
    text = json.dumps(content).encode()
    return _SEAL + f"{zlib.crc32(text):08x}\n".encode() + text


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Make the error for a file that may be intact, but cannot be read."""
    return CheckpointError(f"{path}: cannot be read: {error.strerror}; change the permission")


def unseal(path: Path) -> Any:
    """Read what `seal` wrote; raise `DamageError` if it is missing or its checksum differs."""
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
    """Convert an integer of Python, numpy or jax; return None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def number(value: Any) -> float | None:
    """Convert a finite number; return None for anything else, including NaN."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None
