"""The metric that `perplexity` returns. It imports clu, and so is imported on first use."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from clu.metrics import Average


@partial(jax.tree_util.register_dataclass, data_fields=["total", "count"], meta_fields=[])
@dataclass(frozen=True)
class Perplexity(Average):  # type: ignore[misc]
    """The exponential of a mean, which merges as its total and its weight."""

    def compute(self) -> Any:
        """Compute it, in float64 if it is on the host, where `fit` and `evaluate` merge."""
        if not isinstance(self.total, np.ndarray | np.generic):
            return jnp.exp(self.total / self.count)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return np.exp(np.divide(self.total, self.count, dtype=np.float64))
