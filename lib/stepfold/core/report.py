"""The metrics that a step reports: the loss, its terms, the user's metrics, and the step's own.

This module subclasses a metric of clu, which imports flax. It is therefore imported where a step is
made or its metrics are read, not with the library.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from clu.metrics import Metric

from stepfold.core.loss import Metrics, Terms, total_of
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


def report(terms: Terms, metrics: Metrics, **more: Metric) -> Metrics:
    """Combine the loss, its terms, the user's metrics and the step's own; refuse equal names."""
    loss = next(iter(terms.values())) if len(terms) == 1 else TermSum(terms)
    reported: Metrics = {"loss": loss, **(terms if set(terms) != {"loss"} else {})}
    if "loss" in terms and len(terms) > 1:
        raise LossError(
            "loss: the sum of the terms is reported as 'loss', so a term among several cannot have "
            f"that name; got the terms {sorted(terms)}"
        )
    for name in sorted(terms.keys() & more.keys()):
        raise LossError(
            f"loss/{name}: the name is taken; the step itself reports {sorted(more)}, so call your "
            "term something else"
        )
    for name, metric in {**metrics, **more}.items():
        if name in reported or (name in metrics and name in more):
            raise LossError(
                f"metrics/{name}: the name is taken; the step itself reports "
                f"{sorted({*reported, *more})}, so call yours something else"
            )
        reported[name] = metric
    return reported
