"""Batches that are read ahead keep what is in them, whatever their source does to its memory."""

from typing import Any

import jax
import numpy as np


class Copying:
    """Copy batches for as long as their source may still write into them.

    A source that fills one buffer again and again, or a few in turns, writes into batches that wait
    to be used. A buffer that comes round later than that is harmless, and one that comes round
    sooner does so among the first few batches. Hence those are copied, since it is too late for the
    first when the second is there; after them either all are copied or none is.

    Args:
      few: how many batches may be under way at once, and one more.

    >>> buffer, copied = np.zeros(2), Copying(few=3)
    >>> one = copied(buffer)
    >>> buffer += 1
    >>> two = copied(buffer)
    >>> buffer += 1
    >>> one, two
    (array([0., 0.]), array([1., 1.]))
    """

    def __init__(self, few: int) -> None:
        self._left = few
        self._always = False
        self._seen: dict[int, Any] = {}  # arrays by address; held, so that it stays their own

    def __call__(self, batch: Any) -> Any:
        """Give a copy of a batch, or the batch itself where nothing writes into it."""
        if self._left:
            self._left -= 1
            self._look(batch)
        elif not self._always:
            return batch
        return jax.tree.map(_copied, batch)

    def _look(self, batch: Any) -> None:
        arrays = [leaf for leaf in jax.tree.leaves(batch) if isinstance(leaf, np.ndarray)]
        here = {leaf.__array_interface__["data"][0]: leaf for leaf in arrays if leaf.size}
        self._always = self._always or not here.keys().isdisjoint(self._seen)
        self._seen = {**self._seen, **here} if self._left else {}


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
