"""Several processes: how they start, agree, wait for each other and end together."""

from typing import TYPE_CHECKING

from stepfold.lazy import attach

if TYPE_CHECKING:
    from stepfold.cluster.distributed import start_distributed

__all__ = [
    "start_distributed",
]
__getattr__, __dir__ = attach(
    __name__,
    {
        "cluster.distributed": "start_distributed",
    },
)
