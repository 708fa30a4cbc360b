"""Metrics on their way from the device: buffered, merged exactly, and read as numbers.

Totals and weights are added in 64 bits on the host, so that a long evaluation loses no digits. Any
other metric merges by its own method.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import numpy as np

from stepfold import tree
from stepfold.core.transfers import allow_transfers
from stepfold.errors import refuse, warn

if TYPE_CHECKING:
    from clu.metrics import Metric

_SAVED_POINTS = 5000  # of each curve in a checkpoint
_SUM_DTYPES: dict[str, Any] = {"i": np.int64, "u": np.uint64, "b": np.int64}


class Interval(NamedTuple):
    """The metrics of the steps since the last log point, merged and of each step; see `Event`."""

    step: int
    metrics: Mapping[str, float]
    per_step: Mapping[str, np.ndarray]
    weights: Mapping[str, np.ndarray]
    time: float


class PerStepMetrics(Mapping[str, np.ndarray]):
    """Metrics step by step, each computed from its chunks when it is first looked up.

    A metric is left out unless `can_read` accepts all of its chunks, which the first lookup checks.
    """

    def __init__(
        self,
        stacked: Mapping[str, Sequence[Any]],
        can_read: Callable[[Any], bool],
        read: Callable[[Any], np.ndarray],
        prefix: str = "",
    ) -> None:
        self._all, self._can_read, self._prefix = stacked, can_read, prefix
        self._read, self._values = read, dict[str, np.ndarray]()

    @cached_property
    def _stacked(self) -> Mapping[str, Sequence[Any]]:
        all_chunks = self._all.items()
        return {
            f"{self._prefix}{name}": chunks
            for name, chunks in all_chunks
            if all(map(self._can_read, chunks))
        }

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._values:
            values = np.concatenate([self._read(chunk) for chunk in self._stacked[name]])
            values.flags.writeable = False  # since all hooks share it
            self._values[name] = values
        return self._values[name]

    def __contains__(self, name: object) -> bool:  # that of `Mapping` computes the value
        return name in self._stacked

    def __iter__(self) -> Iterator[str]:
        return iter(self._stacked)

    def __len__(self) -> int:
        return len(self._stacked)


def read_interval(chunks: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], Any, Any]:
    """Read chunks of train metrics: merged, per step, and their weights.

    A metric that only later steps return is merged over those.
    """
    stacked = {name: [chunk[name] for chunk in chunks if name in chunk] for name in chunks[-1]}
    with _quiet():
        merged = {name: _merge_chunks(metrics) for name, metrics in stacked.items()}
    values = PerStepMetrics(stacked, has_values, per_step_values, "train/")
    weights = PerStepMetrics(stacked, has_weights, per_step_weights, "train/")
    return metric_values(merged, "train/"), values, weights


def _merge_chunks(chunks: Sequence[Any]) -> Any:
    joined, traits = chunks[0], traits_of(chunks[0])
    if not traits.merges:
        return _reduce([_merge(chunk) for chunk in chunks])
    if len(chunks) > 1:
        joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *chunks)
    return _mean(joined, traits, _sum) if traits.computes else _merge(joined)


def _reduce(metrics: Sequence[Any]) -> Any:
    return functools.reduce(lambda merged, metric: merged.merge(metric), metrics)


def has_values(stacked: Any) -> bool:
    """Whether a metric can be read step by step: one of totals and weights, or of bits."""
    traits = traits_of(stacked)
    return traits.is_bits or traits.computes


def per_step_values(stacked: Any) -> np.ndarray:
    """Return the value of each step of a metric that `has_values`."""
    return np.asarray(stacked.words if traits_of(stacked).is_bits else metric_value(stacked))


def has_weights(stacked: Any) -> bool:
    """Whether all that a metric adds up has weights."""
    return all(traits_of(term).is_average for term in _terms(stacked))


def per_step_weights(stacked: Any) -> np.ndarray:
    """Return the weight of each step of a metric that `has_weights`; 0 for a skipped step."""
    return np.asarray(np.max([np.asarray(term.count) for term in _terms(stacked)], axis=0))


def _terms(metric: Any) -> Collection[Any]:
    return metric.terms.values() if traits_of(metric).is_term_sum else (metric,)


def is_metric(value: Any) -> bool:
    """Whether a value is a metric of clu."""
    return traits_of(value).is_metric


def are_metrics(value: Any) -> bool:
    """Whether a value is metrics by name, as an evaluation step returns them."""
    return isinstance(value, Mapping) and all(map(is_metric, value.values()))


def as_metric(stacked: Any) -> Any:
    """Return the metric of some steps; plain numbers, one of each step, have weight one."""
    if not isinstance(stacked, np.ndarray):
        return stacked
    from clu.metrics import Average

    return Average(total=stacked, count=np.ones(len(stacked), np.float32))


def merge_metrics(metrics: Sequence[Mapping[str, "Metric"]]) -> dict[str, Any]:
    """Merge the metrics of several batches exactly, each over the batches that have it."""
    host: Any = jax.device_get(list(metrics))
    names = dict.fromkeys(name for each in host for name in each)
    with _quiet():
        return {name: _merge_batches([m[name] for m in host if name in m]) for name in names}


def _merge_batches(metrics: Sequence[Any]) -> Any:
    if traits_of(metrics[0]).merges:
        return jax.tree.map(lambda *leaves: _sum(np.stack(leaves)), *metrics)
    return _reduce(metrics)


def _merge(stacked: Any) -> Any:
    """Merge a metric over its leading axis."""
    if traits_of(stacked).merges:
        return jax.tree.map(_sum, stacked)
    count = len(jax.tree.leaves(stacked)[0])
    return _reduce([jax.tree.map(lambda leaf, k=k: leaf[k], stacked) for k in range(count)])


def _sum(leaf: Any) -> Any:
    array = np.asarray(leaf)
    add: Any = np.add.reduce  # half of the calls of `array.sum`
    return add(array, axis=0, dtype=_SUM_DTYPES.get(array.dtype.kind, np.float64))


# Infinities of both signs add up to NaN, and a metric that has seen nothing is 0 / 0.
_quiet = functools.partial(np.errstate, divide="ignore", invalid="ignore")


def metric_values(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Read merged metrics as numbers; each number of a metric of several gets its own name."""
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        _flatten(f"{prefix}{name}", metric_value(metric), values)
    return values


def metric_value(metric: Any) -> Any:
    """Read one metric; NaN if its weight is zero."""
    if isinstance(metric, float | int | np.ndarray):  # read, or a number of a hook
        return metric
    traits = traits_of(metric)
    if traits.computes:
        with _quiet():
            return _mean(metric, traits)
    if traits.is_metric:
        with allow_transfers("host_to_device"):  # it was merged on the host
            metric = metric.compute()
    return jax.device_get(metric)


class Traits(NamedTuple):
    """Properties of a class of metrics.

    `merges` and `computes` say whether it has these methods from `Average`: adding totals and
    weights, and dividing them.
    """

    is_metric: bool
    is_average: bool
    is_term_sum: bool
    is_bits: bool
    merges: bool
    computes: bool


def traits_of(metric: Any) -> Traits:
    """Return the traits of the class of a metric."""
    cls: Any = type(metric)
    return _traits_of_class(cls)


@functools.lru_cache(maxsize=256)  # called for each metric at each log point
def _traits_of_class(cls: type) -> Traits:
    from clu.metrics import Average, Metric

    from stepfold.core.metrics import DifferentLeaves, TermSum

    is_sum, is_average = issubclass(cls, TermSum), issubclass(cls, Average)
    inherits = [
        is_sum or (is_average and getattr(cls, method) is getattr(Average, method))
        for method in ("merge", "compute")
    ]
    is_bits = issubclass(cls, DifferentLeaves)
    return Traits(issubclass(cls, Metric), is_average, is_sum, is_bits, *inherits)


def _mean(metric: Any, traits: Traits, add: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """Divide totals by weights after adding them up; leave out terms of weight zero."""
    if not traits.is_term_sum:
        return _divide(add(metric.total), add(metric.count))
    counts = [add(term.count) for term in metric.terms.values()]
    totals = [add(term.total) for term in metric.terms.values()]
    means = [_divide(total, count) for total, count in zip(totals, counts, strict=True)]
    seen = [np.not_equal(count, 0) for count in counts]
    return np.where(np.any(seen, 0), np.where(seen, means, 0).sum(0), np.nan)


def _divide(total: Any, count: Any) -> Any:
    return np.divide(total, count, dtype=np.float64)


def _flatten(name: str, value: Any, values: dict[str, float]) -> None:
    is_number = isinstance(value, float)  # in most cases; the other tests take longer
    if not is_number and isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten(f"{name}/{key}", inner, values)
    elif not is_number and np.ndim(value):
        if np.ndim(value) > 1:
            warn(
                f"{name}: expected a number or a vector, got {tree.describe_value(value)}, which "
                f"is logged as {np.size(value)} numbers {name}/0 and so on; return a dict of "
                "numbers by name",
            )
        for index, inner in enumerate(np.ravel(value)):
            _flatten(f"{name}/{index}", inner, values)
    elif name.splitlines() != [name]:  # tables have no place for line breaks
        refuse("metrics", "names of one line", repr(name), "rename it")
    elif name in values:  # such as {"a": {"b": 1}, "a/b": 2}
        refuse("metrics", "a name for each number", f"{name!r} for two", "rename one of them")
    else:
        try:
            values[name] = float(value)
        except (TypeError, ValueError, OverflowError):
            got = repr(str(value)) if isinstance(value, str) else tree.describe_value(value)
            refuse(name, "a number", got)


class Curve(list[float]):
    """The values of one metric; `steps` has the step of each."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def add(self, step: int, value: float) -> None:
        """Add a value, or replace that of the last step; a value of an earlier step is dropped."""
        if self.steps and step == self.steps[-1]:
            self[-1] = value
        elif not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.append(value)


class Points(Protocol):
    """Steps and values of a curve, as arrays."""

    @property
    def steps(self) -> np.ndarray: ...
    @property
    def values(self) -> np.ndarray: ...


ReadPoints = Callable[[str | None], Mapping[str, Points]]
"""Reads all curves of a file, or the one of a name."""


class History(dict[str, Curve]):
    """The curve of each metric by name.

    A run that resumes with a file of metrics reads the file only when the history is used.
    """

    _read: ReadPoints | None = None  # reads the file, unless that is done

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            curve = dict.get(self, name)
            if curve is None:
                self[name] = curve = Curve()
            curve.add(step, float(value))

    def read_later(self, read: ReadPoints) -> None:
        """Set the function that reads the earlier points when they are needed."""
        self._read = read
        self._are_read = set[str]()  # names of curves

    def curve(self, name: str) -> Curve:
        """Return one curve without reading the others; an unknown metric has an empty one."""
        if self._read is not None and name not in self._are_read:
            self._prepend(self._read(name))
            self._are_read.add(name)
        return dict.get(self, name, Curve())

    def complete(self) -> None:
        """Read the earlier points, unless that is done."""
        if (read := self._read) is None:
            return
        earlier = read(None)
        self._prepend(earlier)
        self._read = None
        known = dict(self)
        self.clear()
        self.update({name: known[name] for name in [*earlier, *known]})

    def _prepend(self, earlier: Mapping[str, Points]) -> None:
        for name in earlier.keys() - self._are_read:
            curve, points, later = Curve(), earlier[name], dict.get(self, name, Curve())
            curve.steps = points.steps.astype(np.int64).tolist()
            curve.extend(points.values.tolist())
            for step, value in zip(later.steps, later, strict=True):
                curve.add(step, value)
            self[name] = curve

    def __bool__(self) -> bool:
        return dict.__len__(self) > 0 or len(self) > 0

    def __reduce__(self) -> tuple[Any, ...]:
        return History, (dict(self),)

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
        """Restore a saved state; keep the points here that are earlier than those it has."""
        before, cut = dict(self), []
        self.clear()
        for name, (steps, values) in state.items():
            first, *_ = saved = np.frombuffer(steps, np.int64).tolist()
            known = before.get(name, Curve())
            for step, value in zip(known.steps, known, strict=True):
                if step < first:
                    self.add(step, {name: value})
            if len(saved) == _SAVED_POINTS and name not in self:
                cut.append(name)
            for step, value in zip(saved, np.frombuffer(values).tolist(), strict=True):
                self.add(step, {name: value})
        if cut:
            warn(
                f"history: only the last {_SAVED_POINTS} points of {cut[0]}"
                f"{', …' * (len(cut) > 1)} are left, as a checkpoint keeps no more; give run_dir=… "
                "to keep all"
            )


def _after_reading(name: str) -> Callable[..., Any]:
    """Return a method of `dict` that first completes the histories that it gets."""
    method = getattr(dict, name)

    @functools.wraps(method)
    def look(*histories: Any) -> Any:
        for history in histories:
            if isinstance(history, History):
                history.complete()
        return method(*histories)

    return look


for _name in (
    *("__contains__", "__eq__", "__getitem__", "__iter__", "__len__", "__ne__", "__or__"),
    *("__repr__", "__reversed__", "__ror__", "copy", "get", "items", "keys", "values"),
    *("__delitem__", "clear", "pop", "popitem", "setdefault"),
):
    setattr(History, _name, _after_reading(_name))
