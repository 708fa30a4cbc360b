"""Protect prefetched batches from sources that reuse their buffers."""

from typing import Any

import jax
import numpy as np


class Copying:
    """Copy batches if their source reuses its buffers.

    A source that cycles through one or a few buffers overwrites batches that wait in the prefetch
    queue. If the cycle is short enough to do so, an address repeats among the first `few` batches,
    where `few` is one more than the batches in flight. The first `few` batches are always copied,
    because a repeat shows only after the first batch has been overwritten. If an address repeats,
    all later batches are copied too, otherwise none.
    """

    def __init__(self, few: int) -> None:
        self._left = few
        self._always = False
        self._seen: dict[int, Any] = {}  # arrays by address; a reference keeps the address in use

    def __call__(self, batch: Any) -> Any:
        """Return a copy of a batch, or the batch itself if its source does not reuse buffers."""
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
