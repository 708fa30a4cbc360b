"""Stack examples into a batch, leaf by leaf."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from stepfold import tree
from stepfold.errors import DataError


def _is_row(example: Any) -> bool:
    # A list in an example is a row of numbers, as in Hugging Face datasets, not a container.
    return isinstance(example, list)


def stack(examples: Sequence[Any], indices: Sequence[int]) -> Any:
    """Stack examples leaf by leaf; `indices` locate them in the source for error messages."""
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
    except ValueError:  # ragged nested lists
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
        # Type promotion here would vary the dtypes of batches, and compile the step for each.
        if (array.shape, array.dtype) != (arrays[0].shape, arrays[0].dtype):
            raise DataError(
                f"{name}: expected one shape and dtype to stack, got {tree.spell(arrays[0])} at "
                f"index {indices[0]} and {tree.spell(array)} at index {index}; make them the same "
                "with transform=… or collate=…"
            )
    return np.stack(arrays)
