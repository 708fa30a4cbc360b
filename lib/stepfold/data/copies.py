"""Copy examples: a transform may change its example, and a stream may refill one buffer."""

import copy
import dataclasses
from collections.abc import Callable, MutableMapping, MutableSequence, MutableSet
from typing import Any

import jax
import numpy as np

_SCALARS = {*np.sctypeDict.values()} - {np.void, np.object_}  # those are views of their arrays
_IMMUTABLE = frozenset((int, float, complex, bool, str, bytes, type(None), *_SCALARS))


def copy_example(value: Any, copy_array: Callable[[Any], Any]) -> Any:
    """Copy the containers of an example, and its arrays with `copy_array`.

    Containers are those of Python and of jax, and dataclasses. Other objects stay.
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is np.ndarray:
        return copy_array(value)
    if kind is dict:
        return {name: copy_example(each, copy_array) for name, each in value.items()}
    if kind is list and value and {type(value[0]), type(value[-1])} <= _IMMUTABLE:
        return value.copy()  # a row of numbers: looking at each would take as long as stacking
    if kind in (list, tuple):
        return kind([copy_example(each, copy_array) for each in value])
    return _copy_other(value, copy_array)


def _copy_other(value: Any, copy_array: Callable[[Any], Any]) -> Any:
    if isinstance(value, np.ndarray):
        return copy_array(value)
    if isinstance(value, np.void):  # a view of a row of a structured array
        return value.copy()
    if isinstance(value, jax.Array):
        return value
    if not jax.tree_util.all_leaves([value]):  # a node of jax, such as a namedtuple
        inner = lambda node: node is not value
        return jax.tree.map(lambda each: copy_example(each, copy_array), value, is_leaf=inner)
    new: Any
    if isinstance(value, MutableMapping):
        new = copy.copy(value)
        for name, each in value.items():
            new[name] = copy_example(each, copy_array)
        return new
    if isinstance(value, MutableSequence | MutableSet):
        return copy.copy(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        new = copy.copy(value)
        for field in dataclasses.fields(value):
            each = copy_example(getattr(value, field.name), copy_array)
            object.__setattr__(new, field.name, each)  # it may be frozen
        return new
    if hasattr(value, "clone") and hasattr(value, "__array__"):  # a tensor of torch
        return value.clone()
    return value


def copy_array(array: Any) -> Any:
    """Copy an array, and keep its subclass."""
    return array.copy()


def copy_writeable(array: Any) -> Any:
    """Copy an array, unless it is read-only."""
    return array.copy() if array.flags.writeable else array


def view_read_only(array: Any) -> Any:
    """Return a view of an array that cannot be written to."""
    view = array.view()
    view.setflags(write=False)
    return view


class RefillGuard:
    """Copy the examples of a function that refills one buffer for each.

    The second example shows whether it does, so the first one is always copied.
    """

    def __init__(self) -> None:
        self._count, self._first, self._copies = 0, None, True

    def __call__(self, example: Any) -> Any:
        if self._count == 0:
            self._first = example
        elif self._count == 1:
            self._copies = _are_one_buffer(self._first, example)
        self._count += 1
        return copy_example(example, copy_array) if self._copies else example


def _are_one_buffer(first: Any, second: Any) -> bool:
    """Whether two examples are one object or share memory."""
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        if not (first.size and second.size):
            return False
        return bool(first.ctypes.data == second.ctypes.data)
    if isinstance(first, dict) and isinstance(second, dict):
        pairs = [(first[name], second[name]) for name in first.keys() & second.keys()]
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple):
        pairs = list(zip(first, second, strict=False))
    else:
        return False
    return first is second or any(_are_one_buffer(a, b) for a, b in pairs)
