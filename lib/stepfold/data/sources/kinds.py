"""What kind of source something is, or what to do where it is none."""

from collections.abc import Mapping
from types import NoneType
from typing import Any

import jax
import numpy as np

from stepfold import tree
from stepfold.data.sources.arrays import Arrays
from stepfold.data.sources.examples import Examples
from stepfold.data.sources.rows import Rows
from stepfold.errors import DataError


def read_source(source: Any) -> Rows:
    """Find out what kind of source something is.

    Args:
      source: an array, a tree of arrays (a tuple is one, a list is not), or anything with `len()`
        and `[i]`: a list of examples, `tfds.data_source`, a Hugging Face or grain dataset. Where it
        has `__getitems__`, that is given all the indices of a batch at once.

    Raises:
      DataError: if it is no source, or an empty one.

    >>> rows = read_source({"x": np.arange(12).reshape(6, 2), "y": np.arange(6)})
    >>> rows.length, rows.take(np.array([5, 0]))["x"].tolist()
    (6, [[10, 11], [0, 1]])
    >>> read_source([{"x": 1}, {"x": 2}, {"x": 3}]).take(slice(1, 3))
    {'x': array([2, 3])}
    """
    if isinstance(source, Rows):
        return source
    if _is_arrays(source):
        return Arrays(source)
    advice = _no_source(source)
    if advice:
        raise DataError(
            "source: expected an array, a tree of arrays, or something with len() and [i], got "
            f"{tree.spell(source)}; {advice}"
        )
    return Examples(source)


def is_stream(source: Any) -> bool:
    """Tell whether something is no source, but can be read in order, as `Stream` does.

    >>> is_stream(iter([1, 2])), is_stream(lambda: [1, 2]), is_stream([1, 2]), is_stream("text")
    (True, True, False, False)
    """
    if isinstance(source, Rows | str | bytes | set | frozenset) or _is_arrays(source):
        return False
    kind = type(source)
    if hasattr(kind, "__next__"):
        return True
    return not _is_indexed(source) and (hasattr(kind, "__iter__") or callable(source))


def _is_arrays(source: Any) -> bool:
    if isinstance(source, list | NoneType):
        return False
    array = isinstance(source, np.ndarray | jax.Array)
    return array or not jax.tree_util.all_leaves([source])


def _is_indexed(source: Any) -> bool:
    return hasattr(type(source), "__getitem__") and hasattr(type(source), "__len__")


def _no_source(source: Any) -> str | None:
    """Say what to do with something that is no source, or None if it is one."""
    if isinstance(source, str | bytes):
        return "cut the text into a list of examples"
    if isinstance(source, set | frozenset):
        return "a set has no order: give a list of it, sorted"
    if isinstance(source, Mapping):
        return f"give one of its values, which are called {', '.join(map(repr, source))}"
    if is_stream(source):
        return "what can be read in order alone cannot be mixed: give a list of it"
    return None if _is_indexed(source) else "give it __len__ and __getitem__"
