"""What steps said and nobody was shown yet, interval by interval; a checkpoint keeps it too."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Ledger:
    """Keep what steps say until it is read, so that nothing waits for the device before it must.

    It is saved with the state: an interval that a stop cut in two is shown whole after a resume.

    Attributes:
      closed: the intervals that are over: the last step, and what was said.
    """

    def __init__(self, read: Callable[[Sequence[Any]], Any]) -> None:
        self._read = read
        self._open: list[Any] = []
        self._carried: list[Any] | None = None  # the leaves of the steps before a resume
        self.closed: list[tuple[int, list[Any] | None, list[Any]]] = []
        self._structure: Any = None

    def add(self, said: Any) -> None:
        """Write down what a call said."""
        self._open.append(said)

    def close(self, step: int) -> None:
        """End the interval at a step, if there is one."""
        if not self._open and self._carried is None:
            return
        self.closed.append((step, self._carried, self._open))
        self._open, self._carried = [], None

    def take(self) -> Iterator[tuple[int, Any]]:
        """Give the intervals that are over: the last step, and the metrics of its steps.

        One that is given counts as shown only when the next is asked for.
        """
        while self.closed:
            step, carried, said = self.closed[0]
            structure = self._structure_of(said or self._open)  # where a resume carried its steps
            yield step, jax.tree.unflatten(structure, self._leaves(carried, said))
            self.closed.pop(0)

    def _structure_of(self, said: list[Any]) -> Any:
        if said:
            self._structure = jax.tree.structure(self._read(said[:1]))
        return self._structure

    def _leaves(self, carried: list[Any] | None, said: list[Any]) -> list[Any]:
        new = [np.asarray(leaf) for leaf in jax.tree.leaves(self._read(said))] if said else []
        if carried is None or not new:
            return carried or new
        return [np.concatenate(pair) for pair in zip(carried, new, strict=True)]

    def get_state(self) -> list[Any]:
        """Give all that was not shown, for JSON to hold."""
        parts = [*self.closed, (0, self._carried, self._open)]
        return [[step, [_plain(x) for x in self._leaves(old, new)]] for step, old, new in parts]

    def set_state(self, state: list[Any]) -> None:
        """Go on with what was not shown when it was saved."""
        *closed, (_, carried) = state
        self.closed = [(step, [_array(x) for x in leaves], []) for step, leaves in closed]
        self._carried = [_array(x) for x in carried] or None


def _plain(leaf: np.ndarray) -> list[Any]:
    return [str(leaf.dtype), list(leaf.shape), np.ascontiguousarray(leaf).tobytes()]


def _array(plain: Sequence[Any]) -> np.ndarray:
    dtype, shape, content = plain
    return np.frombuffer(content, jnp.dtype(dtype)).reshape(shape)
