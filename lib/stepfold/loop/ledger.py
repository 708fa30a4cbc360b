"""What steps said and nobody was shown yet, interval by interval; a checkpoint keeps it too."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stepfold.loop.metrics import read_interval


class Interval(NamedTuple):
    """What was measured: of train steps, up to a log point, or by an evaluation.

    Attributes:
      step: the last of them.
      metrics: their metrics, merged.
      each: the metrics step by step.
      weights: their weights step by step.
      time: when the last was done, as `time.perf_counter` counts: when it was called, unless
        what it said had to be waited for.
    """

    step: int
    metrics: Mapping[str, float]
    each: Mapping[str, np.ndarray]
    weights: Mapping[str, np.ndarray]
    time: float


class _Closed(NamedTuple):
    """An interval that is over: its last step, what was said before a resume, then, and when."""

    step: int
    carried: list[Any] | None
    said: list[Any]
    time: float


class Ledger:
    """Keep what steps say until it is read, so that nothing waits for the device before it must.

    It is saved with the state: an interval that a stop cut in two is shown whole after a resume.

    Attributes:
      closed: the intervals that are over.
    """

    def __init__(self, read: Callable[[Sequence[Any]], Any]) -> None:
        self._read = read
        self._open: list[Any] = []
        self._carried: list[Any] | None = None  # the leaves of the steps before a resume
        self._cut: Any = None  # the same as numbers, for when no step comes to tell what they are
        self.closed: list[_Closed | Interval] = []

    def add(self, said: Any) -> None:
        """Write down what a call said."""
        self._open.append(said)

    def close(self, step: int) -> None:
        """End the interval at a step, if there is one."""
        now = time.perf_counter()
        if self._open:
            self.closed.append(_Closed(step, self._carried, self._open, now))
        elif self._cut is not None:
            self.closed.append(Interval(step, *_numbers(self._cut), now))
        self._open, self._carried, self._cut = [], None, None

    def take(self, until: int) -> Iterator[Interval]:
        """Give the intervals that were over at a step.

        One that is given counts as shown only when the next is asked for.
        """
        while self.closed and self.closed[0].step <= until:
            first = self.closed[0]
            yield first if isinstance(first, Interval) else self._interval(first)
            self.closed.pop(0)

    def _interval(self, closed: _Closed) -> Interval:
        was_there = _is_there(closed.said)
        stacked = self._stacked(closed.carried, closed.said)
        done = closed.time if was_there else time.perf_counter()
        return Interval(closed.step, *read_interval(stacked), done)

    def _stacked(self, carried: list[Any] | None, said: list[Any]) -> Any:
        """Give the metrics of an interval's steps, those before a resume among them."""
        if carried is None:
            return self._read(said)
        leaves, structure = jax.tree.flatten(self._read(said))
        whole = [np.concatenate(pair) for pair in zip(carried, leaves, strict=True)]
        return jax.tree.unflatten(structure, whole)

    def get_state(self) -> dict[str, Any]:
        """Give all that nobody was shown, for a checkpoint, of the interval under way too."""
        opened, cut = self._carried or [], self._cut
        if self._open:
            stacked = self._stacked(self._carried, self._open)
            opened, cut = jax.tree.leaves(stacked), _words(*read_interval(stacked))
        closed = [one if isinstance(one, Interval) else self._interval(one) for one in self.closed]
        return {
            "ledger": [_plain(np.asarray(leaf)) for leaf in opened],
            "cut": cut,
            "unshown": [[one.step, *_words(*one[1:4])] for one in closed],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on with what was said before it was saved."""
        self._carried = [_array(leaf) for leaf in state["ledger"]] or None
        self._cut, now = state["cut"], time.perf_counter()
        self.closed = [Interval(step, *_numbers(found), now) for step, *found in state["unshown"]]


def _is_there(said: list[Any]) -> bool:
    """Tell whether the device has done what was said last."""
    leaves: list[Any] = [x for x in jax.tree.leaves(said[-1:]) if isinstance(x, jax.Array)]
    return all(leaf.is_ready() for leaf in leaves[:1])


def _words(*read: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Write what was read of an interval for JSON to hold."""
    return [{name: np.asarray(value).tolist() for name, value in one.items()} for one in read]


def _numbers(words: Sequence[Mapping[str, Any]]) -> tuple[Any, Any, Any]:
    metrics, *rows = words
    each, weights = ({name: np.asarray(row) for name, row in one.items()} for one in rows)
    return metrics, each, weights


def _plain(leaf: np.ndarray) -> list[Any]:
    return [str(leaf.dtype), list(leaf.shape), np.ascontiguousarray(leaf).tobytes()]


def _array(plain: Sequence[Any]) -> np.ndarray:
    dtype, shape, content = plain
    return np.frombuffer(content, jnp.dtype(dtype)).reshape(shape)
