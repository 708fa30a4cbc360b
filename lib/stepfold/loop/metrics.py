"""Metrics on their way from the device: buffered, merged exactly, and read as numbers.

Totals and weights are added in 64 bits on the host, so that a long evaluation loses no digits. Any
other metric merges by its own method.
"""

import functools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.core.transfers import allow_transfers
from stepfold.errors import ConfigError

if TYPE_CHECKING:
    from clu.metrics import Metric

_SAVED_POINTS = 5000  # of each curve in a checkpoint
_SUM_DTYPES = {"i": np.int64, "u": np.uint64, "b": np.int64}


class Interval(NamedTuple):
    """The metrics of the steps since the last log point, merged and of each step; see `Event`."""

    step: int
    metrics: Mapping[str, float]
    per_step: Mapping[str, np.ndarray]
    weights: Mapping[str, np.ndarray]
    time: float


class _Restored(NamedTuple):
    """Metrics of the steps of an interval before a resume."""

    leaves: list[np.ndarray]  # their structure is known once a step has returned
    values: tuple[Any, Any, Any]  # metrics, per_step and weights of an `Interval`


class _Closed(NamedTuple):
    """An interval that is over, but not read from the device."""

    step: int
    restored: _Restored | None
    packed: list[Any]  # what its steps returned
    time: float


class MetricBuffer:
    """Metrics of dispatched steps, buffered until their interval is logged.

    Nothing is read from the device before an interval is taken; `unpack` reads, and adds a leading
    axis of steps. The buffer is part of a checkpoint, so that a resume logs an interrupted interval
    as one.
    """

    def __init__(self, unpack: Callable[[Sequence[Any]], Any]) -> None:
        self._unpack = unpack
        self._open: list[Any] = []
        self._restored: _Restored | None = None  # belongs to the open interval
        self.closed: list[_Closed] = []  # intervals that wait to be logged

    def append(self, packed: Any) -> None:
        self._open.append(packed)

    def close_interval(self, step: int) -> None:
        """End the interval at a step; a no-op if it is empty."""
        if self._open or self._restored is not None:
            self.closed.append(_Closed(step, self._restored, self._open, time.perf_counter()))
            self._open, self._restored = [], None

    def take(self, until: int) -> Iterator[Interval]:
        """Yield the intervals that ended at or before a step."""
        while self.closed and self.closed[0].step <= until:
            yield self._read(self.closed[0])
            self.closed.pop(0)  # only now, so that one whose logging fails is yielded again

    def _read(self, closed: _Closed) -> Interval:
        step, restored, packed, done_at = closed
        if not packed and restored is not None:
            return Interval(step, *restored.values, done_at)
        last: list[Any] = [x for x in jax.tree.leaves(packed[-1:]) if hasattr(x, "is_ready")]
        was_done = all(array.is_ready() for array in last[:1])
        values = read_interval(self._stack(restored, packed))
        return Interval(step, *values, done_at if was_done else time.perf_counter())

    def _stack(self, restored: _Restored | None, packed: list[Any]) -> Any:
        stacked = self._unpack(packed)
        if restored is None:
            return stacked
        leaves, structure = jax.tree.flatten(stacked)
        joined = [np.concatenate(pair) for pair in zip(restored.leaves, leaves, strict=True)]
        return jax.tree.unflatten(structure, joined)

    def get_state(self) -> dict[str, Any]:
        opened = self._restored
        if self._open:
            stacked = self._stack(opened, self._open)
            opened = _Restored(jax.tree.leaves(stacked), read_interval(stacked))
        leaves = [] if opened is None else map(np.asarray, opened.leaves)
        closed = map(self._read, self.closed)
        return {
            "leaves": [[x.dtype.name, x.shape, x.tobytes()] for x in leaves],
            "values": None if opened is None else _to_json(*opened.values),
            "closed": [[interval.step, *_to_json(*interval[1:4])] for interval in closed],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        leaves = [
            np.frombuffer(content, jnp.dtype(dtype)).reshape(shape)
            for dtype, shape, content in state["leaves"]
        ]
        now, values = time.perf_counter(), state["values"]
        self._restored = None if values is None else _Restored(leaves, _from_json(values))
        self.closed = [
            _Closed(step, _Restored([], _from_json(rest)), [], now)
            for step, *rest in state["closed"]
        ]


def _to_json(*mappings: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{name: np.asarray(x).tolist() for name, x in values.items()} for values in mappings]


def _from_json(values: Sequence[Mapping[str, Any]]) -> tuple[Any, Any, Any]:
    metrics, *rows = values
    per_step, weights = ({name: np.asarray(x) for name, x in row.items()} for row in rows)
    return metrics, per_step, weights


class PerStepMetrics(Mapping[str, np.ndarray]):
    """Metrics with a leading axis of steps, each computed when it is first looked up."""

    def __init__(
        self, stacked: Mapping[str, Any], read: Callable[[Any], np.ndarray | None], prefix: str = ""
    ) -> None:
        self._stacked = {prefix + name: metric for name, metric in stacked.items()}
        self._read, self._values = read, dict[str, np.ndarray | None]()

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._values:
            self._values[name] = self._read(self._stacked[name])
        value = self._values[name]
        if value is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._stacked if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def read_interval(stacked: Mapping[str, Any]) -> tuple[dict[str, float], Any, Any]:
    """Read train metrics with a leading axis of steps: merged, per step, and their weights."""
    merged = {
        name: _mean(metric, _sum)
        if _inherits_from_average(metric, "compute") and _inherits_from_average(metric, "merge")
        else _merge(metric)
        for name, metric in stacked.items()
    }
    values = PerStepMetrics(stacked, per_step_values, "train/")
    weights = PerStepMetrics(stacked, per_step_weights, "train/")
    return metric_values(merged, "train/"), values, weights


def per_step_values(stacked: Any) -> np.ndarray | None:
    """Read a metric of totals and weights, or of bits, step by step; None for other metrics."""
    from stepfold.core.metrics import DifferentLeaves

    if isinstance(stacked, DifferentLeaves):
        return np.asarray(stacked.words)
    is_mean = _inherits_from_average(stacked, "compute")
    return np.asarray(metric_value(stacked)) if is_mean else None


def per_step_weights(stacked: Any) -> np.ndarray | None:
    """Read the weights step by step; 0 where a metric has seen nothing, as in a skipped step."""
    from clu.metrics import Average

    terms = stacked.terms.values() if _is_term_sum(stacked) else [stacked]
    if not all(isinstance(term, Average) for term in terms):
        return None
    return np.asarray(np.max([np.asarray(term.count) for term in terms], axis=0))


def are_metrics(value: Any) -> bool:
    """Whether a value is metrics by name, as a step returns them."""
    from clu.metrics import Metric

    return isinstance(value, Mapping) and all(isinstance(m, Metric) for m in value.values())


def merge_metrics(metrics: Sequence[Mapping[str, "Metric"]]) -> dict[str, Any]:
    """Merge the metrics of several steps or batches exactly."""
    host: Any = jax.device_get(list(metrics))
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *host)
    return {name: _merge(stacked[name]) for name in host[0]}


def _merge(stacked: Any) -> Any:
    if _inherits_from_average(stacked, "merge"):
        return jax.tree.map(_sum, stacked)
    count = len(jax.tree.leaves(stacked)[0])
    steps = [jax.tree.map(lambda leaf, k=k: leaf[k], stacked) for k in range(count)]
    return functools.reduce(lambda merged, metric: merged.merge(metric), steps)


def _sum(leaf: Any) -> Any:
    kind = np.asarray(leaf).dtype.kind
    with np.errstate(invalid="ignore"):  # infinities of both signs add up to NaN
        return np.sum(leaf, axis=0, dtype=_SUM_DTYPES.get(kind, np.float64))


def metric_values(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Read merged metrics as numbers; a metric of several numbers gets a name for each."""
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        _flatten(f"{prefix}{name}", metric_value(metric), values)
    return values


def metric_value(metric: Any) -> Any:
    """Read one metric; NaN if it has seen nothing."""
    from clu.metrics import Metric

    if _inherits_from_average(metric, "compute"):
        return _mean(metric)
    if isinstance(metric, Metric):
        with allow_transfers("host_to_device"):  # it was merged on the host
            metric = metric.compute()
    return jax.device_get(metric)


def _is_term_sum(metric: Any) -> bool:
    from stepfold.core.metrics import TermSum

    return isinstance(metric, TermSum)


def _inherits_from_average(metric: Any, method: str) -> bool:
    """Whether a method of a metric just adds or divides totals and weights, as in `Average`."""
    from clu.metrics import Average

    cls = type(metric)
    is_average = isinstance(metric, Average) and getattr(cls, method) is getattr(Average, method)
    return _is_term_sum(metric) or is_average


def _mean(metric: Any, add: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """Divide totals by weights after adding them up; terms that have seen nothing are left out."""
    if not _is_term_sum(metric):
        return _divide(add(metric.total), add(metric.count))
    counts = [add(term.count) for term in metric.terms.values()]
    totals = [add(term.total) for term in metric.terms.values()]
    means = [_divide(total, count) for total, count in zip(totals, counts, strict=True)]
    seen = [np.not_equal(count, 0) for count in counts]
    if len(means) == 1:  # most losses have one term
        return np.where(seen[0], means[0], np.nan)
    return np.where(np.any(seen, 0), np.where(seen, means, 0).sum(0), np.nan)


def _divide(total: Any, count: Any) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.divide(total, count, dtype=np.float64)


def _flatten(name: str, value: Any, values: dict[str, float]) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten(f"{name}/{key}", inner, values)
    elif type(value) is not float and np.ndim(value):
        if np.ndim(value) > 1:
            warnings.warn(
                f"{name}: expected a number or a vector, got {tree.spell(value)}, which is logged "
                f"as {np.size(value)} numbers {name}/0 and so on; return a dict of numbers by name",
                stacklevel=2,
            )
        for index, inner in enumerate(np.ravel(value)):
            _flatten(f"{name}/{index}", inner, values)
    elif name.splitlines() != [name]:  # a table has no place for it
        raise ConfigError(f"metrics: expected names of one line, got {name!r}; rename it")
    else:
        try:
            values[name] = float(value)
        except (TypeError, ValueError, OverflowError):
            text = str(value) if isinstance(value, str) else value
            raise ConfigError(f"{name}: expected a number, got {text!r}") from None


class Curve(list[float]):
    """The values of one metric; `steps` has the step of each."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def add(self, step: int, value: float) -> None:
        """Add a value, unless there is one of this step or a later one."""
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.append(value)


class History(dict[str, Curve]):
    """The curve of each metric by name."""

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.setdefault(name, Curve()).add(step, float(value))

    def get_state(self) -> dict[str, list[bytes]]:
        """Return the last points of each curve, as bytes of steps and values."""
        return {
            name: [
                np.array(curve.steps[-_SAVED_POINTS:], np.int64).tobytes(),
                np.array(curve[-_SAVED_POINTS:], np.float64).tobytes(),
            ]
            for name, curve in self.items()
        }

    def set_state(self, state: Mapping[str, Sequence[bytes]]) -> None:
        for name, (steps, values) in state.items():
            for step, value in zip(
                np.frombuffer(steps, np.int64), np.frombuffer(values), strict=True
            ):
                self.add(int(step), {name: value})
