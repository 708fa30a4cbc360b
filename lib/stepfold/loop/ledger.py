"""What steps said and nobody was shown yet, interval by interval; a checkpoint keeps it too."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Interval(NamedTuple):
    """What steps said up to a log point.

    Attributes:
      step: the last of them.
      metrics: their metrics, with a leading axis of steps.
      time: when the last was done, as `time.perf_counter` counts: when it was called, unless
        what it said had to be waited for.
    """

    step: int
    metrics: Any
    time: float


class Ledger:
    """Keep what steps say until it is read, so that nothing waits for the device before it must.

    It is saved with the state: an interval that a stop cut in two is shown whole after a resume.

    Attributes:
      closed: the intervals that are over: the last step, what was said, and when.
    """

    def __init__(self, read: Callable[[Sequence[Any]], Any]) -> None:
        self._read = read
        self._open: list[Any] = []
        self._carried: list[Any] | None = None  # the leaves of the steps before a resume
        self.closed: list[tuple[int, list[Any] | None, list[Any], float]] = []
        self._structure: Any = None

    def add(self, said: Any) -> None:
        """Write down what a call said."""
        self._open.append(said)

    def close(self, step: int) -> None:
        """End the interval at a step, if there is one."""
        if not self._open and (self._carried is None or self._structure is None):
            return
        self.closed.append((step, self._carried, self._open, time.perf_counter()))
        self._open, self._carried = [], None

    def take(self, until: int) -> Iterator[Interval]:
        """Give the intervals that were over at a step.

        One that is given counts as shown only when the next is asked for.
        """
        while self.closed and self.closed[0][0] <= until:
            step, carried, said, closed = self.closed[0]
            was_there = _is_there(said)
            stacked = self._stacked(carried, said)
            yield Interval(step, stacked, closed if was_there else time.perf_counter())
            self.closed.pop(0)

    def _stacked(self, carried: list[Any] | None, said: list[Any]) -> Any:
        """Give the metrics of an interval's steps, those before a resume among them."""
        if carried is None:
            return self._read(said)
        if self._structure is None:  # of what a resume carried, known by what came since
            self._structure = jax.tree.structure(self._read((said or self._open)[:1]))
        return jax.tree.unflatten(self._structure, self._leaves(carried, said))

    def _leaves(self, carried: list[Any] | None, said: list[Any]) -> list[Any]:
        new = [np.asarray(leaf) for leaf in jax.tree.leaves(self._read(said))] if said else []
        if carried is None or not new:
            return carried or new
        return [np.concatenate(pair) for pair in zip(carried, new, strict=True)]

    def waiting(self) -> list[tuple[int, Any]]:
        """Give the intervals that are over, and leave them to be shown."""
        return [(step, self._stacked(carried, said)) for step, carried, said, _ in self.closed]

    def opened(self) -> Any:
        """Give the interval under way, as far as it is, and leave it; None before its first step.

        Also None of what a resume carried, before a step tells what it is.
        """
        return self._stacked(self._carried, self._open) if self._open else None

    def get_state(self) -> list[Any]:
        """Give what was said since the last interval, for JSON to hold."""
        return [_plain(leaf) for leaf in self._leaves(self._carried, self._open)]

    def set_state(self, state: list[Any]) -> None:
        """Go on with what was said before it was saved."""
        self._carried = [_array(leaf) for leaf in state] or None


def _is_there(said: list[Any]) -> bool:
    """Tell whether the device has done what was said last."""
    leaves: list[Any] = [x for x in jax.tree.leaves(said[-1:]) if isinstance(x, jax.Array)]
    return all(leaf.is_ready() for leaf in leaves[:1])


def _plain(leaf: np.ndarray) -> list[Any]:
    return [str(leaf.dtype), list(leaf.shape), np.ascontiguousarray(leaf).tobytes()]


def _array(plain: Sequence[Any]) -> np.ndarray:
    dtype, shape, content = plain
    return np.frombuffer(content, jnp.dtype(dtype)).reshape(shape)
