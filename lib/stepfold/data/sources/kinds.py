"""Detect the kind of a source."""

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
    """Wrap a source as `Rows`.

    A source is an array, a tree of arrays (a tuple is a tree, a list is not), or any object with
    `len()` and `[i]`: a list of examples, `tfds.data_source`, a Hugging Face or grain dataset.
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
    """Return whether `source` is an iterator, or an iterable or function without `[i]`."""
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
    """Return advice for an error if `source` is not a source, otherwise None."""
    if isinstance(source, str | bytes):
        return "cut the text into a list of examples"
    if isinstance(source, set | frozenset):
        return "a set has no order: give a list of it, sorted"
    if isinstance(source, Mapping):
        return f"give one of its values, which are called {', '.join(map(repr, source))}"
    if is_stream(source):
        return "what can be read in order alone cannot be mixed: give a list of it"
    return None if _is_indexed(source) else "give it __len__ and __getitem__"
