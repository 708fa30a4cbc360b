"""Bisect a batch for the rows that make a step fail.

Copies of the selected rows replace all others, so that shapes and random numbers stay the same.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree

Rows = tuple[int, ...]

_MOST_SETS = 16  # if more rows fail alone, the rows are hardly the cause
_MOST_SHOWN = 4


def find_bad_rows(batch: Any, is_bad: Callable[[Any], bool]) -> tuple[tuple[Rows, ...], list[str]]:
    """Find the rows that make a step fail; return sets of them, and notes for people."""
    sizes = _row_counts(batch)
    if len(set(sizes.values())) != 1:
        listed = ", ".join(f"{name} of {size}" for name, size in sizes.items()) or "none"
        return (), [
            "examples: rows cannot be separated: batch: expected one leading axis in all arrays, "
            f"got {listed}"
        ]
    count = next(iter(sizes.values()))
    sets = minimal_bad_rows(range(count), lambda rows: is_bad(select_rows(batch, rows)))
    examples = tuple(itertools.islice(sets, _MOST_SETS + 1))
    bad = list(dict.fromkeys(itertools.chain.from_iterable(examples)))
    if len(examples) <= _MOST_SETS and (len(bad) < count or count == 1):
        return examples, [f"row {row}: {_spell_row(batch, row)}" for row in bad[:_MOST_SHOWN]]
    many = f"more than {_MOST_SETS}" if len(examples) > _MOST_SETS else str(len(bad))
    return examples[:_MOST_SETS], [
        f"{many} of {count} rows make it fail: look at what they share, such as the parameters, "
        "the key, or statistics over the batch"
    ]


def minimal_bad_rows(rows: Sequence[int], is_bad: Callable[[Rows], bool]) -> Iterator[Rows]:
    """Find rows that are bad alone, and sets of rows that are bad only together.

    The number of runs for each set grows with the logarithm of the number of rows.
    """
    if len(rows) == 1:
        yield tuple(rows)
        return
    bad_halves = [half for half in _halves(rows) if is_bad(half)]
    for half in bad_halves:
        yield from minimal_bad_rows(half, is_bad)
    if not bad_halves:
        yield _smallest(tuple(rows), (), is_bad)


def _smallest(rows: Rows, context: Rows, is_bad: Callable[[Rows], bool]) -> Rows:
    """Reduce rows to as few as are bad together with a context."""
    if context and is_bad(context):
        return ()
    if len(rows) == 1:
        return rows
    first, second = _halves(rows)
    from_first = _smallest(first, tuple(sorted(context + second)), is_bad)
    from_second = _smallest(second, tuple(sorted(context + from_first)), is_bad)
    return from_first + from_second


def _halves(rows: Sequence[int]) -> tuple[Rows, Rows]:
    return tuple(rows[: len(rows) // 2]), tuple(rows[len(rows) // 2 :])


def select_rows(batch: Any, rows: Sequence[int]) -> Any:
    """Make a batch of the same form with some of the rows, and copies of them in other places."""
    count = next(iter(_row_counts(batch).values()))
    # Each row is replaced by the nearest selected one before it, or else by the first.
    nearest = np.searchsorted(rows, np.arange(count), side="right") - 1
    source = np.asarray(rows)[np.maximum(nearest, 0)]

    def select(leaf: Any) -> Any:
        if not getattr(leaf, "shape", ()):
            return leaf
        selected = leaf[source]
        return jax.device_put(selected, leaf.sharding) if isinstance(leaf, jax.Array) else selected

    return jax.tree.map(select, batch)


def without_rows(batch: Any, rows: Collection[int]) -> Any:
    """Make a batch of the same form without some rows, or return None if none are left."""
    count = next(iter(_row_counts(batch).values()))
    others = [row for row in range(count) if row not in rows]
    return select_rows(batch, others) if others else None


def _row_counts(batch: Any) -> dict[str, int]:
    leaves = tree.named_leaves(batch, "batch")
    return {name: leaf.shape[0] for name, leaf in leaves if getattr(leaf, "shape", ())}


def nonfinite_inputs(batch: Any, rows: Collection[int]) -> list[str]:
    """Name the arrays of a batch that contain NaN or inf in some rows, or anywhere without rows."""
    names = []
    for name, leaf in tree.named_leaves(batch, "batch"):
        if tree.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact):
            values = np.asarray(leaf)
            if not np.isfinite(values[sorted(rows)] if rows and values.ndim else values).all():
                names.append(f"{name} contains NaN or inf in the batch itself")
    return names


def _spell_row(batch: Any, row: int) -> str:
    """Describe a row, with the values of small arrays."""
    texts = []
    for name, leaf in tree.named_leaves(batch):
        if getattr(leaf, "shape", ()):
            value = leaf[row]
            text = tree.describe_value(value) if value.size > 8 else str(value).replace("\n", "")
            texts.append(f"{name}={text}" if name else text)
    return ", ".join(texts)
