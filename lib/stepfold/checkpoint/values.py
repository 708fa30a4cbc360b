"""Values saved next to a state, such as the data position: JSON with numpy arrays in it.

Each process writes its arrays one after the other, as a stream of bytes. In the JSON, a number
stands for each array. The manifest lists their shapes, dtypes and checksums.
"""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stepfold import tree
from stepfold.checkpoint.leaves import Leaf, check_array, checksum
from stepfold.errors import ConfigError, refuse

_BYTES = "bytes in base64"  # the JSON encoding of bytes, which grain's positions consist of
_ARRAY = "number of an array"
_DEPTH = 100  # levels of JSON, within Python's limit of recursion


@dataclass(frozen=True)
class StoredArray:
    """A numpy array of a checkpoint that is not read yet, at an offset in a stream.

    Two of them are equal if their values are.
    """

    leaf: Leaf
    checksum: int
    stream: str = field(compare=False)
    offset: int = field(compare=False)

    def __str__(self) -> str:
        return str(self.leaf)


def check_values(value: Any, name: str) -> None:
    """Refuse what cannot be saved next to a state, with its path."""
    to_json(value, name, check_array)


def to_json(
    value: Any,
    name: str,
    keep_array: Callable[[str, np.ndarray], Any] | None = None,
    depth: int = _DEPTH,
) -> Any:
    """Convert a value to plain JSON, or raise with the path of what JSON cannot hold.

    Tuples become lists, numpy scalars Python numbers, and bytes a dict that `from_json` decodes.
    Numpy arrays are replaced by what `keep_array` returns for their path and themselves; without
    it, they are refused.
    """
    if not depth:
        refuse(name, f"at most {_DEPTH} levels", "more", "flatten it")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and keep_array is not None:
        return keep_array(name, value)
    if isinstance(value, list | tuple):
        return [to_json(item, f"{name}/{i}", keep_array, depth - 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        for taken in (_BYTES, _ARRAY):
            if value.keys() == {taken}:
                raise ConfigError(f"{name}: expected another key than {taken!r}, which is taken")
        for key in value:
            if not isinstance(key, str):
                refuse(name, "keys of text", repr(key), "JSON has no others")
        return {
            key: to_json(item, f"{name}/{key}", keep_array, depth - 1)
            for key, item in value.items()
        }
    expected, advice = "what JSON can hold", "write it as text or numbers"
    if keep_array is not None:
        expected = "JSON or numpy arrays"
        advice = "use np.asarray for an array of jax, and write anything else as text or numbers"
    refuse(name, expected, tree.describe_value(value), advice)


def from_json(value: Any, arrays: Mapping[int, StoredArray] | None = None) -> Any:
    """Invert `to_json`, except that tuples stay lists, and arrays are not read.

    Each of the numbered arrays may occur once.
    """
    unused = dict(arrays or {})

    def decode(value: Any, depth: int) -> Any:
        if not depth:
            raise ValueError(f"JSON of more than {_DEPTH} levels")
        if isinstance(value, dict):
            if value.keys() == {_BYTES}:
                return base64.b64decode(value[_BYTES])
            if value.keys() == {_ARRAY}:
                return unused.pop(value[_ARRAY])
            return {key: decode(item, depth - 1) for key, item in value.items()}
        return [decode(item, depth - 1) for item in value] if isinstance(value, list) else value

    return decode(value, _DEPTH)


def map_arrays(value: Any, name: str, function: Callable[[str, Any], Any]) -> Any:
    """Replace each array in a value by what a function of its path and itself returns."""
    if isinstance(value, dict):
        return {key: map_arrays(item, f"{name}/{key}", function) for key, item in value.items()}
    if isinstance(value, list):
        return [map_arrays(item, f"{name}/{i}", function) for i, item in enumerate(value)]
    return function(name, value) if isinstance(value, np.ndarray | StoredArray) else value


def find_arrays(value: Any, name: str) -> dict[str, Any]:
    """Return the arrays in a value by their paths."""
    arrays: dict[str, Any] = {}
    map_arrays(value, name, arrays.__setitem__)
    return arrays


def take_arrays(value: Any, arrays: list[np.ndarray]) -> Any:
    """Append the arrays in a value to a list, and return JSON with their numbers in the list."""

    def take(_: str, array: np.ndarray) -> dict[str, int]:
        arrays.append(array)
        return {_ARRAY: len(arrays) - 1}

    return map_arrays(value, "", take)


def describe_arrays(arrays: list[np.ndarray]) -> list[Any]:
    """Return the shape, dtype and checksum of each array, for a manifest."""
    return [[array.shape, array.dtype.name, checksum(array)] for array in arrays]
