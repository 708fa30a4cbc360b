"""Detect steps to skip, and remove their weight from the metrics."""

from typing import Any

import jax
import jax.numpy as jnp

from stepfold import tree
from stepfold.core.loss import Metrics
from stepfold.core.state import TrainState


def still_finite(old: TrainState, new: TrainState) -> jax.Array:
    """Whether no value became NaN or inf; one that was so before (a running minimum) may stay."""

    def still(old: Any, new: Any) -> Any:
        if not (tree.is_array(new) and jnp.issubdtype(new.dtype, jnp.inexact)):
            return True
        same = (new == old) | (jnp.isnan(new) & jnp.isnan(old))
        return (jnp.isfinite(new) | same).all()

    pairs = (old.params, old.model_state), (new.params, new.model_state)
    leaves = jax.tree.leaves(jax.tree.map(still, *pairs))
    return jnp.array(leaves, bool).all()


def without_weight(good: jax.Array, metrics: Metrics) -> Metrics:
    """Zero the averages of a skipped step, so that they have no effect when merged."""
    from clu.metrics import Average

    from stepfold.core.report import TermSum

    def weightless(name: str, metric: Any) -> Any:
        if name == "skipped" or not isinstance(metric, Average | TermSum):
            return metric
        return jax.tree.map(lambda leaf: jnp.where(good, leaf, jnp.zeros_like(leaf)), metric)

    return {name: weightless(name, metric) for name, metric in metrics.items()}
