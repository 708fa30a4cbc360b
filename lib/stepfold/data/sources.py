"""What a source is, and how rows are taken from it.

A source has a length and gives example `i` for an integer: a tree of arrays that share their
leading axis, or anything with `len()` and `[i]`. A length of `sys.maxsize` says that it is endless,
as it does in grain.
"""

import sys
from collections.abc import Iterable, Sequence
from types import NoneType
from typing import Any

import jax
import numpy as np

from stepfold import tree
from stepfold.data.order import Indices
from stepfold.errors import DataError

ENDLESS = sys.maxsize
Where = slice | Indices


class Rows:
    """How examples are taken from a source; a subclass for each kind of source."""

    length: int
    fingerprint: Any = None
    """What a saved position is to belong to, besides the length: something JSON can hold."""

    def check(self) -> None:
        """Raise if the source is no longer what it was when this was made."""

    def examples(self, where: Where) -> list[Any]:
        """Give the examples one by one."""
        raise NotImplementedError

    def take(self, where: Where) -> Any:
        """Give the examples as one batch, each leaf with a new leading axis."""
        return stack(self.examples(where), numbers(where))


def numbers(where: Where) -> list[int]:
    """Spell out which indices are meant."""
    if isinstance(where, slice):
        return list(range(where.start, where.stop))
    return where.tolist()  # type: ignore[no-any-return]


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
    is_tree = not isinstance(source, list | NoneType) and not jax.tree_util.all_leaves([source])
    if is_tree or isinstance(source, np.ndarray | jax.Array):
        return _Arrays(source)
    return _Examples(source)


class _Arrays(Rows):
    """Rows of a tree of arrays: views where they are in order, one copy a leaf where not."""

    def __init__(self, source: Any) -> None:
        leaves = [_as_leaf(name, leaf) for name, leaf in tree.named_leaves(source, "source")]
        if len({len(leaf) for leaf in leaves}) > 1:
            got = [f"{n} {tree.spell(leaf)}" for n, leaf in tree.named_leaves(source, "source")]
            raise DataError(
                f"source: expected as many rows in every array, got {', '.join(got)}; give arrays "
                "that share their leading axis"
            )
        self.length = len(leaves[0]) if leaves else 0
        if not self.length:
            raise DataError(f"source: expected examples, got none: {tree.spell(source)}")
        self._leaves = leaves
        self._structure: Any = jax.tree.structure(source)
        self._text = [
            n for n, leaf in tree.named_leaves(source, "source") if not tree.is_data(leaf)
        ]
        # numpy's `take` is the faster one, but copies the whole of an array that is not in C order.
        self._takes = [
            leaf.take if leaf.flags.c_contiguous and leaf.flags.aligned else None for leaf in leaves
        ]

    def take(self, where: Where) -> Any:
        if self._text:
            raise DataError(
                f"{self._text[0]}: expected numbers to make batches of; make numbers of it with "
                "transform=… or collate=…, or leave it out"
            )
        if isinstance(where, slice):
            return self._structure.unflatten([leaf[where] for leaf in self._leaves])
        return self._structure.unflatten(
            [
                take(where, 0) if take else leaf[where]
                for leaf, take in zip(self._leaves, self._takes, strict=True)
            ]
        )

    def examples(self, where: Where) -> list[Any]:
        unflatten = self._structure.unflatten
        return [unflatten([leaf[i] for leaf in self._leaves]) for i in numbers(where)]


def _as_leaf(name: str, leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray | jax.Array) or isinstance(leaf, np.ma.MaskedArray):
        raise DataError(
            f"{name}: expected an array whose leading axis counts the examples, got "
            f"{tree.spell(leaf)}; convert it with np.asarray, or give a list of examples"
        )
    if not leaf.ndim:
        raise DataError(
            f"{name}: expected an array whose leading axis counts the examples, got the scalar "
            f"{tree.spell(leaf)}; give every example its own"
        )
    array = np.asarray(leaf).view()
    # A batch in order is a view: what writes into it shall not change the source.
    array.flags.writeable = False
    return array


class _Examples(Rows):
    """Rows of anything with `len()` and `[i]`."""

    def __init__(self, source: Any) -> None:
        advice = _no_source(source)
        if advice:
            raise DataError(
                "source: expected an array, a tree of arrays, or something with len() and [i], got "
                f"{tree.spell(source)}; {advice}"
            )
        self._source, self.length = source, len(source)
        if not self.length:
            raise DataError(f"source: expected examples, got none: {tree.spell(source)}")

    def check(self) -> None:
        if len(self._source) != self.length:
            raise DataError(
                f"source: expected the {self.length} examples it had when the batches were made, "
                f"got {len(self._source)}; make new batches when the source has changed"
            )

    def examples(self, where: Where) -> list[Any]:
        indices = numbers(where)
        several = getattr(self._source, "__getitems__", None)
        found = self._one_by_one(indices) if several is None else self._at_once(several, indices)
        if len(found) != len(indices):
            raise DataError(
                f"source: expected {len(indices)} examples of __getitems__({_short(indices)}), got "
                f"{len(found)}"
            )
        for index, example in zip(indices, found, strict=True):
            if example is None:
                raise DataError(
                    f"source: expected an example at index {index}, got None; leave out what is "
                    "missing before the source is given"
                )
        return found

    def _one_by_one(self, indices: list[int]) -> list[Any]:
        found: list[Any] = []
        try:
            for index in indices:
                found.append(self._source[index])  # noqa: PERF401  how far it came is told
        except Exception as error:
            row = len(found)
            error.add_note(
                f"reading index {indices[row]} of the source, row {row} of those asked for"
            )
            raise
        return found

    def _at_once(self, several: Any, indices: list[int]) -> list[Any]:
        try:
            return list(several(indices))
        except Exception as error:
            error.add_note(f"reading indices {_short(indices)} of the source at once")
            raise


def _short(indices: list[int]) -> str:
    return str(indices) if len(indices) <= 8 else f"[{str(indices[:8])[1:-1]}, …]"


def _no_source(source: Any) -> str | None:
    """Say what to do with something that is no source, or None if it is one."""
    if isinstance(source, str | bytes):
        return "cut the text into a list of examples"
    if isinstance(source, set | frozenset):
        return "a set has no order: give a list of it, sorted"
    if hasattr(type(source), "__next__"):
        return "what can be read only once cannot be shuffled or resumed: give a list of it"
    if hasattr(type(source), "__getitem__") and hasattr(type(source), "__len__"):
        return None
    if isinstance(source, Iterable):
        return "what can only be read in order cannot be shuffled: give a list of it"
    if callable(source):
        return "give what the function returns"
    return "give it __len__ and __getitem__"


def _is_row(example: Any) -> bool:
    # A list in an example is one row of numbers, as in Hugging Face datasets, and no container.
    return isinstance(example, list)


def stack(examples: Sequence[Any], indices: Sequence[int]) -> Any:
    """Stack examples leaf by leaf.

    Args:
      examples: trees of the same structure and shapes, of numbers.
      indices: where in the source they are from, for the message.

    Raises:
      DataError: if the examples differ, or hold something else than numbers.

    >>> stack([{"x": [1, 2]}, {"x": [3, 4]}], [0, 1])["x"].tolist()
    [[1, 2], [3, 4]]
    """
    flat: list[Any] = [jax.tree.flatten(example, is_leaf=_is_row) for example in examples]
    structure = flat[0][1]
    for (_, other), index in zip(flat, indices, strict=True):
        if other != structure:
            raise DataError(
                f"source: expected examples of one structure, got {structure} at index {indices[0]}"
                f" and {other} at index {index}; make them the same with transform=…"
            )
    paths, _ = jax.tree_util.tree_flatten_with_path(examples[0], is_leaf=_is_row)
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    stacked = [
        _stack_leaf(tree.path_name(path) or "example", column, indices)
        for (path, _), column in zip(paths, columns, strict=True)
    ]
    return structure.unflatten(stacked)


def _stack_leaf(name: str, values: Sequence[Any], indices: Sequence[int]) -> Any:
    try:
        arrays = [np.asarray(value) for value in values]
    except ValueError:  # lists in lists, of several lengths
        raise DataError(
            f"{name}: expected rows of one length, got {tree.spell(values[0])} at index "
            f"{indices[0]}; pad or cut them with collate=…"
        ) from None
    for value, array, index in zip(values, arrays, indices, strict=True):
        if not tree.is_data(array):
            raise DataError(
                f"{name}: expected numbers, got {tree.spell(value)} at index {index}; make numbers "
                "of it with transform=… or collate=…"
            )
        # To promote a type here would give batches of several types, and compile for each.
        if (array.shape, array.dtype) != (arrays[0].shape, arrays[0].dtype):
            raise DataError(
                f"{name}: expected one shape and dtype to stack, got {tree.spell(arrays[0])} at "
                f"index {indices[0]} and {tree.spell(array)} at index {index}; make them the same "
                "with transform=… or collate=…"
            )
    return np.stack(arrays)
