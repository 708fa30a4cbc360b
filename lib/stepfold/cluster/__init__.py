"""Several processes: how they start, agree, wait for each other and end together.

`launcher.py` starts them, and `distributed.py` connects them. `voting.py` lets them agree between
two steps, and `patience.py` ends all if one has failed or is stuck.
"""

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
