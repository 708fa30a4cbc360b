"""Sources with random access: arrays and sequences of examples.

A source is anything with a length and rows by index. `read_source` finds out which kind it is.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any

import jax
import numpy as np

from stepfold import tree
from stepfold.data.copies import RefillGuard
from stepfold.data.dtypes import refuse_keys, refuse_masked
from stepfold.data.order import Rows
from stepfold.errors import DataError, refuse

ENDLESS = sys.maxsize
"""The length of an infinite source, as in grain."""


class Source:
    """Base class of sources, with a subclass for each kind.

    `name` begins the error of an index that is out of range.
    """

    name = "source"
    length: int = 0
    fingerprint: Any = None
    """A JSON value that identifies the source in saved positions, together with its length."""
    keeps_arrays = False
    """Whether the arrays in its examples are its own, so that writing to them would change it."""

    def difference(self, saved: Any) -> str:
        """Describe how the source differs from one with a saved fingerprint; empty if it does not.

        A source without a fingerprint saves None.
        """
        if saved is None or saved == self.fingerprint:
            return ""
        return f"source was {saved!r:.300} and is {self.fingerprint!r:.300}"

    def check_length(self) -> None:
        """Raise if the source has changed its length since this object was created."""

    def examples(self, rows: Rows) -> list[Any]:
        """Return the examples as a list."""
        raise NotImplementedError

    def take(self, rows: Rows) -> Any:
        """Return the examples as one batch, each leaf with a new leading axis."""
        return stack(self.examples(rows), row_list(rows))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if not -self.length <= index < self.length:
            refuse(self.name, f"an index below {self.length}", f"{index}", kind=IndexError)
        return self.examples(slice(index % self.length, index % self.length + 1))[0]


def differences(
    saved: Mapping[str, Any], now: Mapping[str, Any], source: Source | None = None
) -> list[str]:
    """Describe how settings differ from saved ones; the source compares its fingerprint."""
    texts = [
        f"{name} was {saved.get(name)!r} and is {now.get(name)!r}"
        for name in {**now, **saved}
        if saved.get(name) != now.get(name) and (name != "source" or source is None)
    ]
    text = "" if source is None else source.difference(saved.get("source"))
    return [*texts, text] if text else texts


def row_list(rows: Rows) -> list[int]:
    """Convert a range or an array of indices to a list."""
    if isinstance(rows, slice):
        return list(range(rows.start, rows.stop))
    return rows.tolist()  # type: ignore[no-any-return]


def read_source(source: Any) -> Source:
    """Wrap a source.

    A source is an array, a tree of arrays (a tuple is a tree, a list is not), or any object with
    `len()` and `[i]`: a list of examples, `tfds.data_source`, a Hugging Face or grain dataset.
    """
    if isinstance(source, Source):
        return source
    if _is_arrays(source):
        return ArraySource(source)
    if isinstance(source, str | bytes):
        advice = "cut the text into a list of examples"
    elif isinstance(source, set | frozenset):
        advice = "a set has no order: give a list of it, sorted"
    elif isinstance(source, Mapping):
        advice = f"give one of its values, which are called {', '.join(map(repr, source))}"
    elif hasattr(type(source), "iloc"):  # pandas, whose [i] is a label or a column
        advice = "give a dict of its columns, each as np.asarray(column)"
    elif is_stream(source):
        advice = "a stream has no random access: give a list of it"
    elif not _is_indexed(source):
        advice = "give it __len__ and __getitem__"
    else:
        return SequenceSource(source)
    expected = "an array, a tree of arrays, or something with len() and [i]"
    refuse("source", expected, tree.describe_value(source), advice, kind=DataError)


def is_stream(source: Any) -> bool:
    """Return whether `source` is an iterator, or an iterable or function without `[i]`."""
    if isinstance(source, Source | str | bytes | set | frozenset) or _is_arrays(source):
        return False
    kind = type(source)
    if hasattr(kind, "__next__"):
        return True
    return not _is_indexed(source) and (hasattr(kind, "__iter__") or callable(source))


def _is_arrays(source: Any) -> bool:
    if isinstance(source, list | NoneType):
        return False
    is_array = isinstance(source, np.ndarray | jax.Array)
    return is_array or not jax.tree_util.all_leaves([source])


def _is_indexed(source: Any) -> bool:
    return hasattr(type(source), "__getitem__") and hasattr(type(source), "__len__")


class ArraySource(Source):
    """A tree of arrays that share their leading axis."""

    keeps_arrays = True

    def __init__(self, source: Any) -> None:
        named = tree.named_leaves(source, "source")
        self._leaves = [_read_only(name, leaf) for name, leaf in named]
        if len({len(leaf) for leaf in self._leaves}) > 1:
            got = ", ".join(f"{name} {tree.describe_value(leaf)}" for name, leaf in named)
            advice = "give arrays that share their leading axis"
            refuse("source", "arrays with the same number of rows", got, advice, kind=DataError)
        self.length = len(self._leaves[0]) if named else 0
        if not self.length:
            refuse("source", "examples", f"none: {tree.describe_value(source)}", kind=DataError)
        self._readers = [_reader(leaf) for leaf in self._leaves]
        self._structure: Any = jax.tree.structure(source)
        self._unusable = next(((name, x) for name, x in named if not tree.is_data(x)), None)

    def take(self, rows: Rows) -> Any:
        """Return a batch: a read-only view for a range of rows, otherwise a copy."""
        if self._unusable is not None:
            name, leaf = self._unusable
            got = tree.describe_value(leaf)
            advice = "make numbers of it with transform=… or collate=…, or leave it out"
            refuse(name, "numbers to make batches of", got, advice, kind=DataError)
        if isinstance(rows, slice):
            return self._structure.unflatten([leaf[rows] for leaf in self._leaves])
        return self._structure.unflatten([read(rows, 0) for read in self._readers])

    def examples(self, rows: Rows) -> list[Any]:
        return [self[i] for i in row_list(rows)]

    def __getitem__(self, index: int) -> Any:
        return self._structure.unflatten([leaf[index] for leaf in self._leaves])


def _reader(leaf: Any) -> Callable[[Any, int], Any]:
    """Return `take` of an array, or indexing if `take` would first copy the whole array."""
    is_plain = leaf.flags.c_contiguous and leaf.flags.aligned
    return leaf.take if is_plain else partial(_index, leaf)


def _index(leaf: Any, rows: Any, _: int) -> Any:
    return leaf[rows]


def _read_only(name: str, leaf: Any) -> Any:
    """Return a read-only view, so that writing to a batch cannot change the source."""
    expected = "an array whose leading axis counts the examples"
    if not isinstance(leaf, np.ndarray | jax.Array) or isinstance(leaf, np.ma.MaskedArray):
        advice = "convert it with np.asarray, or give a list of examples, or one source alone"
        refuse(name, expected, tree.describe_value(leaf), advice, kind=DataError)
    if not leaf.ndim:
        got = f"the scalar {tree.describe_value(leaf)}"
        refuse(name, expected, got, "give every example its own", kind=DataError)
    refuse_keys(name, [leaf])
    array = np.asarray(leaf).view()
    array.flags.writeable = False
    return array


class SequenceSource(Source):
    """Any object with `len()` and `[i]`, read in one call if it has `__getitems__`."""

    def __init__(self, source: Any) -> None:
        self._source, self.length = source, len(source)
        if not self.length:
            refuse("source", "examples", f"none: {tree.describe_value(source)}", kind=DataError)
        self.fingerprint = _read_fingerprint(source)
        self.keeps_arrays = isinstance(source, list)

    def check_length(self) -> None:
        if len(self._source) != self.length:
            expected = f"the {self.length} examples it had when the batches were made"
            advice = "make new batches when the source has changed"
            refuse("source", expected, f"{len(self._source)}", advice, kind=DataError)

    def examples(self, rows: Rows) -> list[Any]:
        indices, examples = row_list(rows), list[Any]()
        is_batched = hasattr(self._source, "__getitems__")
        try:
            if is_batched:
                examples = list(self._source.__getitems__(indices))
            else:
                guard = None if self.keeps_arrays else RefillGuard()
                for index in indices:
                    example = self._source[index]
                    examples.append(example if guard is None else guard(example))
        except Exception as error:
            if is_batched:
                error.add_note(f"reading indices {_abridge(indices)} of the source at once")
            else:
                row = len(examples)
                note = f"reading index {indices[row]} of the source, row {row} of those requested"
                error.add_note(note)
            raise
        if len(examples) != len(indices):
            expected = f"{len(indices)} examples of __getitems__({_abridge(indices)})"
            refuse("source", expected, f"{len(examples)}", kind=DataError)
        check_examples(
            examples,
            indices,
            "source",
            " (of a filtered grain dataset, give dataset.to_iter_dataset())",
        )
        return examples


def _read_fingerprint(source: Any) -> Any:
    """Return the `fingerprint` of a user's source, as JSON returns it."""
    fingerprint = getattr(source, "fingerprint", None)
    try:
        return json.loads(json.dumps(fingerprint))
    except (TypeError, ValueError):
        got, advice = tree.describe_value(fingerprint), "give a str, such as a digest of its files"
        refuse("source: fingerprint", "a value that JSON can hold", got, advice, kind=DataError)


def check_examples(
    examples: Sequence[Any], indices: Sequence[int], origin: str, advice: str = ""
) -> None:
    """Raise if an example of a source or a stream is missing."""
    for index, example in zip(indices, examples, strict=True):
        if example is None:
            got = f"None as example {index} of the {origin}"
            advice = f"filter out missing examples first{advice}"
            refuse("source", "an example", got, advice, kind=DataError)


def _abridge(indices: list[int]) -> str:
    return str(indices) if len(indices) <= 8 else f"[{str(indices[:8])[1:-1]}, …]"


def stack(examples: Sequence[Any], indices: Sequence[int]) -> Any:
    """Stack examples leaf by leaf into new arrays.

    A list in an example is a row of numbers, as in Hugging Face datasets, not a container.
    `indices` locate the examples in error messages.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(examples[0], is_leaf=_is_row)
    structure: Any = jax.tree.structure(examples[0], is_leaf=_is_row)
    stacked = [
        _stack_leaf(tree.path_name(path) or "example", column, indices)
        for (path, _), column in zip(paths, _columns(examples, structure, indices), strict=True)
    ]
    return structure.unflatten(stacked)


def _is_row(node: Any) -> bool:
    return isinstance(node, list)


def _columns(
    examples: Sequence[Any], structure: Any, indices: Sequence[int]
) -> list[tuple[Any, ...]]:
    """Return each leaf of all examples; raise if one has another structure than the first."""
    try:  # several times as fast as flattening each, but a leaf may still be a tree
        columns = list(zip(*map(structure.flatten_up_to, examples), strict=True))
        if all(len(set(map(type, column))) == 1 for column in columns):
            return columns
    except (ValueError, TypeError):  # the structures differ
        pass
    leaves = []
    for example, index in zip(examples, indices, strict=True):
        own, other = jax.tree.flatten(example, is_leaf=_is_row)
        if other != structure:
            got = f"{structure} at index {indices[0]} and {other} at index {index}"
            advice = "make them the same with transform=…"
            refuse("source", "examples of one structure", got, advice, kind=DataError)
        leaves.append(own)
    return list(zip(*leaves, strict=True))


def _stack_leaf(name: str, values: Sequence[Any], indices: Sequence[int]) -> Any:
    kind, *others = set(map(type, values))
    refuse_masked(name, (kind, *others))
    if not others and issubclass(kind, int | float | complex | np.number | np.bool_):
        batch = np.array(values)  # scalars of one type have one dtype, unless integers are huge
        is_huge = issubclass(kind, int) and batch.dtype not in (np.int_, np.bool_)
        if not is_huge and tree.is_numeric(batch.dtype):
            return batch
    try:
        arrays = [np.asarray(value) for value in values]
    except ValueError:  # ragged nested lists
        got = f"{tree.describe_value(values[0])} at index {indices[0]}"
        refuse(name, "rows of one length", got, "pad or cut them with collate=…", kind=DataError)
    except TypeError:
        refuse_keys(name, values)
        raise
    dtypes = [array.dtype for array in arrays]
    is_alike = dtypes.count(dtypes[0]) == len(dtypes) and len({each.shape for each in arrays}) == 1
    if not is_alike or not tree.is_numeric(dtypes[0]):
        _refuse_unlike(name, values, arrays, indices)
    return np.stack(arrays)


def _refuse_unlike(
    name: str, values: Sequence[Any], arrays: list[Any], indices: Sequence[int]
) -> None:
    first = f"{tree.describe_value(arrays[0])} at index {indices[0]}"
    for value, array, index in zip(values, arrays, indices, strict=True):
        if not tree.is_data(array):
            got = f"{tree.describe_value(value)} at index {index}"
            advice = "make numbers of it with transform=… or collate=…"
            refuse(name, "numbers", got, advice, kind=DataError)
        # Type promotion here would vary the dtypes of batches, and compile the step for each.
        if (array.shape, array.dtype) != (arrays[0].shape, arrays[0].dtype):
            got = f"{first} and {tree.describe_value(array)} at index {index}"
            advice = "make them the same with transform=… or collate=…"
            refuse(name, "one shape and dtype to stack", got, advice, kind=DataError)
