"""The metrics of dispatched steps, as values: nothing is read from the device before `read`.

Intervals are part of a checkpoint, so that a resume logs an interrupted one as a whole.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.errors import warn
from stepfold.loop.metrics import Interval, read_interval, traits_of
from stepfold.loop.step_runner import unpack


class Saved(NamedTuple):
    """Metrics of the steps of an interval before a resume."""

    chunks: list[dict[str, np.ndarray]]  # leaves by path, without structure until a step has run
    values: tuple[Any, Any, Any]  # metrics, per_step and weights of an `Interval`


class Steps(NamedTuple):
    """The steps of an interval; it is true if there are any.

    Attributes:
      returned: what the calls of the step returned, as nested pairs with the last call first, so
        that adding a call takes constant time.
      before: the metrics of the steps before a resume, if it has some.
      step, time: the log point that ends the interval, and when that was.
      waited: the seconds spent waiting for batches by then; None if unknown.
    """

    returned: tuple[Any, ...] = ()
    before: Saved | None = None
    step: int = 0
    time: float = 0.0
    waited: float | None = None

    def __repr__(self) -> str:  # that of a tuple would recurse into each call
        return f"Steps({len(self.calls)} calls, step={self.step})"

    def __bool__(self) -> bool:
        return bool(self.returned) or self.before is not None

    @property
    def calls(self) -> list[Any]:
        """What the calls returned, in order."""
        count, rest = 0, self.returned
        while rest:
            count, rest = count + 1, rest[1]
        calls: list[Any] = [None] * count
        rest = self.returned
        while rest:
            count -= 1
            calls[count], rest = rest
        return calls

    def read(self) -> Interval:
        """Wait for the device, and merge the metrics exactly."""
        if not self.returned and self.before is not None:
            return Interval(self.step, *self.before.values, self.time)
        last: list[Any] = [x for x in jax.tree.leaves(self.returned[:1]) if hasattr(x, "is_ready")]
        was_done = all(array.is_ready() for array in last[:1])
        values = read_interval(self._chunks())
        return Interval(self.step, *values, self.time if was_done else time.perf_counter())

    def save(self) -> Saved | None:
        """Read what a checkpoint keeps of an open interval."""
        if not self.returned:
            return self.before
        chunks = self._chunks()
        leaves = [
            {path: np.asarray(leaf) for path, leaf in tree.named_leaves(chunk)} for chunk in chunks
        ]
        return Saved(leaves, read_interval(chunks))

    def _chunks(self) -> list[Any]:
        chunks = unpack(self.calls)
        if self.before is None:
            return chunks
        return [*(_rebuild(chunk, chunks[0]) for chunk in self.before.chunks), *chunks]


def intervals_to_json(current: Steps, closed: Sequence[Steps]) -> dict[str, Any]:
    """Convert the open interval, and closed ones that hooks have not seen, to JSON."""
    saved = current.save()
    read = [each.read() for each in closed]
    return {
        "chunks": [
            {path: [x.dtype.name, x.shape, x.tobytes()] for path, x in chunk.items()}
            for chunk in ([] if saved is None else saved.chunks)
        ],
        "values": None if saved is None else _to_json(*saved.values),
        "closed": [[interval.step, *_to_json(*interval[1:4])] for interval in read],
    }


def intervals_from_json(saved: Mapping[str, Any]) -> tuple[Steps, tuple[Steps, ...]]:
    """Return the open interval and the closed ones."""
    chunks = [
        {
            path: np.frombuffer(content, jnp.dtype(dtype)).reshape(shape)
            for path, (dtype, shape, content) in chunk.items()
        }
        for chunk in saved["chunks"]
    ]
    now, values = time.perf_counter(), saved["values"]
    current = Steps((), None if values is None else Saved(chunks, _from_json(values)))
    closed = [Steps((), Saved([], _from_json(rest)), step, now) for step, *rest in saved["closed"]]
    return current, tuple(closed)


def _rebuild(leaves: dict[str, np.ndarray], like: Mapping[str, Any]) -> dict[str, Any]:
    """Build the metrics of a chunk from leaves by path; drop metrics that the step lacks."""
    metrics, used = {}, set[str]()
    for name, metric in like.items():
        expected = tree.named_leaves({name: metric})
        saved = [leaves.get(path) for path, _ in expected]
        # Averages are added up, so shapes must match. Others may collect any number of values.
        form = _row_form if traits_of(metric).merges else np.ndim
        if all(
            old is not None and (old.dtype, form(old)) == (leaf.dtype, form(leaf))
            for old, (_, leaf) in zip(saved, expected, strict=True)
        ):
            metrics[name] = jax.tree.unflatten(jax.tree.structure(metric), saved)
            used |= {path for path, _ in expected}
    if lost := sorted(leaves.keys() - used):
        warn(
            f"metrics: the step does not return {lost[0]}{', …' * (len(lost) > 1)} as in the "
            "resumed run; the values since the last log point are dropped",
        )
        for path in lost:
            del leaves[path]
    return metrics


def _to_json(*mappings: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{name: np.asarray(x).tolist() for name, x in values.items()} for values in mappings]


def _from_json(values: Sequence[Mapping[str, Any]]) -> tuple[Any, Any, Any]:
    metrics, *rows = values
    per_step, weights = ({name: np.asarray(x) for name, x in row.items()} for row in rows)
    return metrics, per_step, weights


def _row_form(leaf: np.ndarray) -> tuple[int, ...]:
    return leaf.shape[1:]
