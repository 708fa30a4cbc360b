"""Batches asked for once more, and left where they stood."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from stepfold import tree
from stepfold.errors import DataError
from stepfold.loop.feed import Feed


class Mark(NamedTuple):
    """Where batches stood after a step: the position of the next one, if they have positions."""

    step: int
    position: Any


def can_reread(batches: Any) -> bool:
    """Tell whether batches can be asked again for those that were given already."""
    return isinstance(batches, list | tuple) or hasattr(iter(batches), "set_state")


@contextmanager
def reread(batches: Any, mark: Mark, began: int) -> Iterator[Iterator[Any]]:
    """Give the batches that come after a mark, and then put them back to where they stand.

    Args:
      batches: what was folded over: a list, or what has `get_state` and `set_state`.
      mark: the step before the first that is wanted, and the position there.
      began: the step before that of a list's first batch.

    Raises:
      DataError: if they cannot be asked again.

    >>> with reread([10, 11, 12], Mark(step=4, position=None), began=0) as batches:
    ...     next(batches), next(batches)
    (11, 12)
    """
    if isinstance(batches, list | tuple):
        yield (batches[(step - began) % len(batches)] for step in itertools.count(mark.step))
        return
    if not can_reread(batches) or mark.position is None:
        raise DataError(
            "batches: expected some that can be asked again, a list, or with get_state and "
            f"set_state as sf.batches has them, got {tree.spell(batches)}"
        )
    feed = Feed(batches)
    stood = feed.position()
    try:
        feed.go_to(mark.position, mark.step)
        yield _pulled(feed, mark.step)
    finally:
        feed.go_to(stood, mark.step)


def _pulled(feed: Feed, step: int) -> Iterator[Any]:
    for number in itertools.count(step):
        try:
            batch = feed.pull(number)
        except StopIteration:
            return
        yield batch
