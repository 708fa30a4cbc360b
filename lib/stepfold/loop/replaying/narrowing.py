"""Which rows of a batch make a step go wrong, found by running it on some of them at a time.

A batch of some rows has the form of the whole: they stay in their places, and the other places are
filled with copies of them. So the compiled step runs on it, and a row sees the same random numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from stepfold import tree
from stepfold.errors import DataError

Rows = tuple[int, ...]
IsBad = Callable[[Rows], bool]


def rows_of(batch: Any) -> int:
    """Count the rows of a batch: the leading axis that all its arrays share.

    Raises:
      DataError: if they share none.
    """
    axes = {name: leaf.shape[0] for name, leaf in tree.named_leaves(batch, "batch") if _ndim(leaf)}
    if len(set(axes.values())) == 1:
        return int(next(iter(axes.values())))
    got = ", ".join(f"{name} of {size}" for name, size in axes.items()) or "no array with an axis"
    raise DataError(f"batch: expected one leading axis, to take rows of, got {got}")


def only(batch: Any, rows: Sequence[int]) -> Any:
    """Make a batch of the same form in which there is nothing but some rows.

    >>> only({"x": np.array([10, 11, 12, 13]), "scale": 2.0}, (1, 3))
    {'scale': 2.0, 'x': array([11, 11, 11, 13])}
    """
    places = np.arange(rows_of(batch))
    # The nearest of them at or before each place, or else the first.
    nearest = np.searchsorted(np.asarray(rows), places, side="right") - 1
    source = np.asarray(rows)[np.maximum(nearest, 0)]
    return jax.tree.map(lambda leaf: _taken(leaf, source) if _ndim(leaf) else leaf, batch)


def _taken(leaf: Any, source: np.ndarray) -> Any:
    taken = leaf[source]
    return jax.device_put(taken, leaf.sharding) if isinstance(leaf, jax.Array) else taken


def _ndim(leaf: Any) -> int:
    return len(getattr(leaf, "shape", ()))


def culprits(rows: Rows, is_bad: IsBad) -> Iterator[Rows]:
    """Find the rows that are bad alone, and sets of them that are bad only together.

    Halves are tried, and halves of those. Each set that comes takes a number of runs that grows
    with the logarithm of the rows, so that one can stop after a few.

    Args:
      rows: rows that are bad together.
      is_bad: whether a step goes wrong on some rows.

    >>> list(culprits((0, 1, 2, 3, 4, 5, 6, 7), lambda rows: 2 in rows or {3, 4} <= set(rows)))
    [(2,)]
    >>> list(culprits((0, 1, 2, 3, 4, 5, 6, 7), lambda rows: {1, 4} <= set(rows)))
    [(1, 4)]
    """
    if len(rows) == 1:
        yield rows
        return
    bad_halves = [half for half in _halves(rows) if is_bad(half)]
    for half in bad_halves:
        yield from culprits(half, is_bad)
    if not bad_halves:
        yield _least(rows, (), is_bad)


def _least(rows: Rows, beside: Rows, is_bad: IsBad) -> Rows:
    """Give as few of the rows as are bad beside others; with all of them it is bad."""
    if beside and is_bad(beside):
        return ()
    if len(rows) == 1:
        return rows
    first, second = _halves(rows)
    from_first = _least(first, tuple(sorted(beside + second)), is_bad)
    from_second = _least(second, tuple(sorted(beside + from_first)), is_bad)
    return from_first + from_second


def _halves(rows: Rows) -> tuple[Rows, Rows]:
    return rows[: len(rows) // 2], rows[len(rows) // 2 :]


def spelled(batch: Any, row: int) -> str:
    """Write what is in a row, the small arrays with their numbers."""
    leaves = [(name, leaf[row]) for name, leaf in tree.named_leaves(batch) if _ndim(leaf)]
    return ", ".join(f"{name}={_short(leaf)}".removeprefix("=") for name, leaf in leaves)


def _short(leaf: Any) -> str:
    return tree.spell(leaf) if leaf.size > 8 else str(leaf).replace("\n", "")
