"""Metrics on their way to a person: merged exactly, and read as numbers.

A total and a weight are added up in float64 and in whole numbers on the host, where a long
evaluation loses no digits; any other metric merges as its own class says, on the device.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from stepfold.errors import ConfigError

if TYPE_CHECKING:
    from clu.metrics import Metric

_WIDE = {"i": np.int64, "u": np.uint64, "b": np.int64}


def are_metrics(value: Any) -> bool:
    """Tell whether what a step gave is metrics by name."""
    from clu.metrics import Metric

    return isinstance(value, Mapping) and all(isinstance(one, Metric) for one in value.values())


def merged(metrics: Sequence[Mapping[str, "Metric"]]) -> dict[str, Any]:
    """Merge what several steps or batches said, each a dict of the same metrics.

    >>> import jax.numpy as jnp, stepfold as sf
    >>> seen = [{"loss": sf.mean(jnp.array([1.0, 3.0]))}, {"loss": sf.mean(jnp.array([8.0]))}]
    >>> values_of(merged(seen))
    {'loss': 4.0}
    """
    host: Any = jax.device_get(list(metrics))
    first = host[0]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *host)
    return {name: over_steps(stacked[name]) for name in first}


def over_steps(stacked: Any) -> Any:
    """Merge a metric whose leaves have a leading axis of steps."""
    if _adds_up(stacked):
        return jax.tree.map(_sum, stacked)
    count = len(jax.tree.leaves(stacked)[0])
    steps = [jax.tree.map(lambda leaf, k=k: leaf[k], stacked) for k in range(count)]
    return functools.reduce(lambda one, other: one.merge(other), steps)


def _adds_up(metric: Any) -> bool:
    """Tell whether merging is adding, and so can be done in more digits than the device has."""
    from clu.metrics import Average

    return _is_sum(metric) or (isinstance(metric, Average) and type(metric).merge is Average.merge)


def _sum(leaf: Any) -> Any:
    kind = np.asarray(leaf).dtype.kind
    with np.errstate(invalid="ignore"):  # infinities of both signs are NaN, and are shown as it
        return np.sum(leaf, axis=0, dtype=_WIDE.get(kind, np.float64))


class PerStep(Mapping[str, np.ndarray]):
    """What metrics were step by step, each read when it is asked for: most are not, at most times.

    >>> from clu.metrics import Average
    >>> stacked = {"loss": Average(total=np.array([2.0, 9.0]), count=np.array([1.0, 3.0]))}
    >>> PerStep(stacked, each_of, "train/")["train/loss"]
    array([2., 3.])
    """

    def __init__(
        self,
        stacked: Mapping[str, Any],
        read: Callable[[Any], np.ndarray | None],
        prefix: str = "",
    ) -> None:
        """Say of which metrics, with a leading axis of steps, and what is read of each."""
        self._stacked = {prefix + name: metric for name, metric in stacked.items()}
        self._read = read
        self._known: dict[str, np.ndarray | None] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._known:
            self._known[name] = self._read(self._stacked[name])
        found = self._known[name]
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._stacked if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def read_interval(stacked: Mapping[str, Any]) -> tuple[dict[str, float], PerStep, PerStep]:
    """Read train metrics with a leading axis of steps: merged, step by step, and the weights."""
    merged = {
        name: _mean(metric, _sum) if _is_mean(metric) and _adds_up(metric) else over_steps(metric)
        for name, metric in stacked.items()
    }
    each, weights = (PerStep(stacked, read, "train/") for read in (each_of, weights_of))
    return values_of(merged, "train/"), each, weights


def each_of(stacked: Any) -> np.ndarray | None:
    """Read a metric with a leading axis of steps step by step, if it is of totals and weights."""
    from clu.metrics import Average

    adds = _is_sum(stacked) or type(stacked) is Average
    return np.asarray(value_of(stacked)) if adds else None


def weights_of(stacked: Any) -> np.ndarray | None:
    """Read the weights step by step: 0 where a metric has seen nothing, as in a skipped step."""
    from clu.metrics import Average

    terms = stacked.terms.values() if _is_sum(stacked) else [stacked]
    if not all(isinstance(term, Average) for term in terms):
        return None
    return np.asarray(np.max([np.asarray(term.count) for term in terms], axis=0))


def values_of(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Read merged metrics as numbers; a metric of several numbers gets a name for each.

    Raises:
      ConfigError: if a metric is no number, and no dict or array of them, or its name not one line.
    """
    found: dict[str, float] = {}
    for name, metric in metrics.items():
        _spread(f"{prefix}{name}", value_of(metric), found)
    return found


def value_of(metric: Any) -> Any:
    """Read one metric; NaN, where it has seen nothing."""
    from clu.metrics import Metric

    if _is_mean(metric):
        return _mean(metric)
    return metric.compute() if isinstance(metric, Metric) else metric


def _is_sum(metric: Any) -> bool:
    from stepfold.core.report import TermSum

    return isinstance(metric, TermSum)


def _is_mean(metric: Any) -> bool:
    from clu.metrics import Average

    return _is_sum(metric) or (
        isinstance(metric, Average) and type(metric).compute is Average.compute
    )


def _mean(metric: Any, add: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """Divide totals by weights, after they are added up; what was not seen is left out of sums."""
    if not _is_sum(metric):
        return _over(add(metric.total), add(metric.count))
    counts = [add(term.count) for term in metric.terms.values()]
    means = [
        _over(add(term.total), n) for term, n in zip(metric.terms.values(), counts, strict=True)
    ]
    seen = [np.not_equal(count, 0) for count in counts]
    if len(means) == 1:  # as most losses are
        return np.where(seen[0], means[0], np.nan)
    return np.where(np.any(seen, 0), np.where(seen, means, 0).sum(0), np.nan)


def _over(total: Any, count: Any) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.divide(total, count, dtype=np.float64)


def _spread(name: str, value: Any, found: dict[str, float]) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _spread(f"{name}/{key}", inner, found)
    elif type(value) is not float and np.ndim(value):
        for index, inner in enumerate(np.ravel(value)):
            _spread(f"{name}/{index}", inner, found)
    elif name.splitlines() != [name]:  # no table has a place for it
        raise ConfigError(
            f"metrics: expected names of one line each, got {name!r}; give it another"
        )
    else:
        try:
            found[name] = float(value)
        except (TypeError, ValueError, OverflowError):
            text = str(value) if isinstance(value, str) else value
            raise ConfigError(f"{name}: expected a number, got {text!r}") from None
