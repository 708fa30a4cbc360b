"""The metric of a number that a loss function returns. It imports clu, and so on first use."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from clu.metrics import Average


@partial(jax.tree_util.register_dataclass, data_fields=["total", "count"], meta_fields=[])
@dataclass(frozen=True)
class BatchMean(Average):  # type: ignore[misc]
    """A number that a loss function returned: a mean over a batch, whose weight it does not know.

    The microbatches of a step weigh the same, since they have the same number of rows. The step
    then weighs their mean by the examples of the whole batch; see `weigh_numbers`.
    """

    @classmethod
    def of(cls, value: jax.Array) -> "BatchMean":
        return cls(total=value, count=jnp.ones_like(value))
