"""Transformations of gradients and parameters for optax, and a loss over a large vocabulary."""

from typing import TYPE_CHECKING

from stepfold.lazy import attach

if TYPE_CHECKING:
    from stepfold.optim.at_home import at_home, orthogonalize
    from stepfold.optim.cross_entropy import linear_cross_entropy
    from stepfold.optim.ema import ema_params, get_ema
    from stepfold.optim.low_precision import low_precision
    from stepfold.optim.spikes import skip_spikes
    from stepfold.sharding.ordered import clip_by_ordered_norm, ordered_norm

__all__ = [
    "at_home",
    "clip_by_ordered_norm",
    "ema_params",
    "get_ema",
    "linear_cross_entropy",
    "low_precision",
    "ordered_norm",
    "orthogonalize",
    "skip_spikes",
]
__getattr__, __dir__ = attach(
    __name__,
    {
        "optim.at_home": "at_home orthogonalize",
        "optim.cross_entropy": "linear_cross_entropy",
        "optim.ema": "ema_params get_ema",
        "optim.low_precision": "low_precision",
        "optim.spikes": "skip_spikes",
        "sharding.ordered": "clip_by_ordered_norm ordered_norm",
    },
)
