"""Which metrics are shown and written, when, and by what names."""

from collections.abc import Mapping
from typing import Any

_INTERNAL = "mlperf"
_NORM = "grad_norm"


def named(metrics: Mapping[str, Any], mode: str) -> dict[str, float]:
    """Name metrics by the mode, unless they have a first name, and leave out internal ones.

    >>> named({"loss": 1.0, "train/accuracy": 0.5, "mlperf/step": 1}, "train")
    {'train/loss': 1.0, 'train/accuracy': 0.5}
    """
    return {
        name if "/" in name else f"{mode}/{name}": float(value)
        for name, value in metrics.items()
        if _INTERNAL not in name
    }


def without_norms(metrics: Mapping[str, float]) -> dict[str, float]:
    """Leave out the norms of gradients."""
    return {name: value for name, value in metrics.items() if _NORM not in name}


def is_due(step: int, every: int, plan: Any, mode: str) -> bool:
    """Tell whether a step is one to show or write: of train steps each so many, and the last.

    Where they are shown at each log point, those at the ends of epochs are shown too.
    """
    return mode != "train" or every == plan.log_every or step % every == 0 or step == plan.steps


def show(metrics: Mapping[str, float], bar: Any, step: int) -> None:
    """Show metrics on a bar: one of ours, or whatever has tqdm's methods."""
    bar.set_postfix(dict(without_norms(metrics)))
    bar.update(step - getattr(bar, "step", getattr(bar, "n", 0)))
