"""The source for a tree of arrays that share their leading axis."""

from typing import Any

import jax
import numpy as np

from stepfold import tree
from stepfold.data.sources.rows import Rows, Where, numbers
from stepfold.errors import DataError


class Arrays(Rows):
    """Rows of a tree of arrays: views if in order, otherwise one copy per leaf."""

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
        # numpy's `take` is faster than indexing, but first copies an array that is not in C order.
        self._takes = [
            leaf.take if leaf.flags.c_contiguous and leaf.flags.aligned else None for leaf in leaves
        ]

    def take(self, where: Where) -> Any:
        """Return the examples as one batch; a view of the source if they are in order."""
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
        """Return the examples as a list."""
        unflatten = self._structure.unflatten
        return [unflatten([leaf[i] for leaf in self._leaves]) for i in numbers(where)]


def _as_leaf(name: str, leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray | jax.Array) or isinstance(leaf, np.ma.MaskedArray):
        raise DataError(
            f"{name}: expected an array whose leading axis counts the examples, got "
            f"{tree.spell(leaf)}; convert it with np.asarray, or give a list of examples, or one "
            "source alone"
        )
    if not leaf.ndim:
        raise DataError(
            f"{name}: expected an array whose leading axis counts the examples, got the scalar "
            f"{tree.spell(leaf)}; give every example its own"
        )
    array = np.asarray(leaf).view()
    # In-order batches are views: writing to a batch must not change the source.
    array.flags.writeable = False
    return array
