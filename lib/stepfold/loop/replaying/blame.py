"""What a step that goes wrong owes it to: rows of its batch, what they hold, or an operation."""

import itertools
from collections.abc import Callable, Collection
from typing import Any

import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.errors import DataError
from stepfold.loop.replaying.narrowing import Rows, culprits, rows_of, spelled

_MOST = 16  # sets of rows: where there are more, the rows are hardly what is wrong
_SHOWN = 4


def name_rows(batch: Any, is_bad: Callable[[Rows], bool]) -> tuple[tuple[Rows, ...], list[str]]:
    """Find the rows that make a step go wrong, and say what is in them, or why they are not known.

    >>> batch = {"x": np.array([3, 0, 5])}
    >>> name_rows(batch, lambda rows: 1 in rows)
    (((1,),), ['row 1: x=0'])
    """
    try:
        count = rows_of(batch)
    except DataError as error:
        return (), [f"examples: cannot be told apart: {error}"]
    found = list(itertools.islice(culprits(tuple(range(count)), is_bad), _MOST + 1))
    guilty = list(dict.fromkeys(itertools.chain.from_iterable(found)))
    if len(found) <= _MOST and (len(guilty) < count or count == 1):
        return tuple(found), [f"row {row}: {spelled(batch, row)}" for row in guilty[:_SHOWN]]
    many = f"more than {_MOST}" if len(found) > _MOST else str(len(guilty))
    return tuple(found[:_MOST]), [
        f"{many} of {count} rows make it go wrong: look at what they share, the parameters, the "
        "key, the statistics of a batch"
    ]


def name_inputs(batch: Any, guilty: Collection[int]) -> list[str]:
    """Name the arrays of a batch that are not finite as they came, in the rows that are guilty.

    >>> name_inputs({"x": np.array([1, np.nan]), "y": np.ones(2)}, guilty={1})
    ['batch/x is not finite as it came']
    """
    return [
        f"{name} is not finite as it came"
        for name, leaf in tree.named_leaves(batch, "batch")
        if tree.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
        if _is_spoilt(np.asarray(leaf), guilty)
    ]


def _is_spoilt(leaf: Any, guilty: Collection[int]) -> bool:
    places = np.argwhere(~np.isfinite(leaf))
    if not guilty or not leaf.ndim:
        return len(places) > 0
    return not set(places[:, 0].tolist()).isdisjoint(guilty)


def name_line(step: Any, state: Any, batch: Any, good: Any) -> tuple[list[str], list[str]]:
    """Find the operation that makes the first number that is not finite.

    Args:
      step: the step, which jax can trace.
      state: the state before it.
      batch: the batch that goes wrong.
      good: one that does not, or None.

    Returns:
      The operation and its line, if there is one; and if not, why.
    """
    # Here, since it brings in jax.extend, and that all of Pallas.
    from stepfold.loop.replaying.origin import first_site

    try:
        site = first_site(step, (state, batch), None if good is None else (state, good))
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        line = str(error).partition("\n")[0]
        return [], [f"where: the step cannot be gone through by operations: {line}"]
    if site is None:
        return [], ["where: operation by operation, none made what is not finite of what is"]
    return [str(site)], []
