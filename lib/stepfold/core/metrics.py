"""The metrics that a step reports: the loss, its terms, the user's metrics, and the step's own.

This module subclasses a metric of clu, which imports flax. It is therefore imported where a step is
made or its metrics are read, not with the library.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from clu.metrics import Average, Metric

from stepfold import tree
from stepfold.core.batch_mean import BatchMean
from stepfold.core.loss import Metrics, Terms, total_of
from stepfold.core.perplexity import Perplexity
from stepfold.errors import LossError


@partial(jax.tree_util.register_dataclass, data_fields=["terms"], meta_fields=[])
@dataclass(frozen=True)
class TermSum(Metric):  # type: ignore[misc]
    """The sum of several means, merged term by term, so that each keeps its own denominator."""

    terms: Terms

    @classmethod
    def empty(cls) -> "TermSum":
        """Return the identity of `merge`, without any terms."""
        return cls({})

    def merge(self, other: "TermSum") -> "TermSum":
        if not (self.terms and other.terms):
            return self if self.terms else other
        return TermSum({name: term.merge(other.terms[name]) for name, term in self.terms.items()})

    def compute(self) -> jax.Array:
        """Sum the means of the terms; NaN if no term has any weight, as for an `Average`."""
        if not self.terms:
            return jnp.array(jnp.nan)
        seen = jnp.stack([term.count != 0 for term in self.terms.values()]).any(0)
        return jnp.where(seen, total_of(self.terms), jnp.nan)


@partial(jax.tree_util.register_dataclass, data_fields=["words"], meta_fields=[])
@dataclass(frozen=True)
class DifferentLeaves(Metric):  # type: ignore[misc]
    """The leaves of a state that differ between two runs of a step, a bit each; see `check_step`.

    Merged, it has the leaves that differ in any step.
    """

    words: jax.Array

    @classmethod
    def from_mask(cls, mask: jax.Array) -> "DifferentLeaves":
        """Pack a mask of the leaves, 32 into a word."""
        bits = jnp.pad(mask, (0, -len(mask) % 32)).reshape(-1, 32).astype(jnp.uint32)
        return cls((bits << jnp.arange(32, dtype=jnp.uint32)[None]).sum(1, dtype=jnp.uint32))

    @classmethod
    def empty(cls) -> "DifferentLeaves":
        return cls(jnp.zeros(1, jnp.uint32))

    def merge(self, other: "DifferentLeaves") -> "DifferentLeaves":
        return DifferentLeaves(self.words | other.words)

    def compute(self) -> jax.Array:
        """Count the leaves."""
        return jax.lax.population_count(jnp.asarray(self.words)).sum()

    def paths(self, state: Any) -> list[str]:
        """List the paths of the leaves, in a state of the same structure."""
        return tree.marked_paths(state, self.words)


def report(terms: Terms, metrics: Metrics, **more: Metric) -> Metrics:
    """Combine the loss, its terms, the user's metrics and the step's own; refuse equal names."""
    if "loss" in terms and len(terms) > 1:
        raise LossError(
            "loss: the sum of the terms is reported as 'loss', so a term among several cannot have "
            f"that name; got the terms {sorted(terms)}"
        )
    loss = next(iter(terms.values())) if len(terms) == 1 else TermSum(terms)
    own = {"loss": loss, **terms}
    for kind, names, taken in (("loss", terms, more), ("metrics", metrics, {**own, **more})):
        for name in sorted(names.keys() & taken.keys()):
            reported, yours = sorted(taken), "your term" if kind == "loss" else "yours"
            raise LossError(
                f"{kind}/{name}: the name is taken; the step itself reports {reported}, so call "
                f"{yours} something else"
            )
    return {**own, **metrics, **more}


def merged(stacked: Any, axes: tuple[str, ...] = ()) -> Any:
    """Merge the metrics stacked by a scan, and those of mapped axes; averages are summed."""

    def merge(metric: Any) -> Any:
        if type(metric) in (Average, BatchMean, Perplexity):
            total = jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), metric)
            return jax.lax.psum(total, axes) if axes else total
        reduced = metric.reduce()
        return jax.lax.all_gather(reduced, axes).reduce() if axes else reduced

    return jax.tree.map(merge, stacked, is_leaf=lambda x: isinstance(x, Metric))


def without_weight(good: jax.Array, metrics: Metrics) -> Metrics:
    """Zero the averages of a skipped step, so that they have no effect when merged."""

    def weightless(name: str, metric: Any) -> Any:
        if name == "skipped" or not isinstance(metric, Average | TermSum):
            return metric
        return jax.tree.map(lambda leaf: jnp.where(good, leaf, jnp.zeros_like(leaf)), metric)

    return {name: weightless(name, metric) for name, metric in metrics.items()}
