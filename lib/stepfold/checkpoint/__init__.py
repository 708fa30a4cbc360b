"""Checkpoints that are verified when read, and parameters as safetensors.

`policy.py` says when to save and what to keep, and `series.py` does it. `writer.py` writes a step,
with the checksums in `manifest.py`. `restore.py` finds a step and makes a state of it, and
`arrays.py` reads its arrays and compares the checksums. `tier.py` keeps steps in the memory of
hosts, and fetches those of other hosts.
"""

from typing import TYPE_CHECKING

from stepfold.lazy import attach

if TYPE_CHECKING:
    from stepfold.checkpoint.average import average_checkpoints
    from stepfold.checkpoint.checkpoints import Checkpoints, save
    from stepfold.checkpoint.names import NameMap, NameRule
    from stepfold.checkpoint.restore import Restored, restore
    from stepfold.checkpoint.safetensors import export_params, load_params
    from stepfold.checkpoint.series import Series
    from stepfold.checkpoint.temporary import Temporary
    from stepfold.checkpoint.verify import Contents, contents, latest_step, verify

__all__ = [
    "Checkpoints",
    "Contents",
    "NameMap",
    "NameRule",
    "Restored",
    "Series",
    "Temporary",
    "average_checkpoints",
    "contents",
    "export_params",
    "latest_step",
    "load_params",
    "restore",
    "save",
    "verify",
]
__getattr__, __dir__ = attach(
    __name__,
    {
        "checkpoint.average": "average_checkpoints",
        "checkpoint.checkpoints": "Checkpoints save",
        "checkpoint.names": "NameMap NameRule",
        "checkpoint.restore": "Restored restore",
        "checkpoint.safetensors": "export_params load_params",
        "checkpoint.series": "Series",
        "checkpoint.temporary": "Temporary",
        "checkpoint.verify": "Contents contents latest_step verify",
    },
)
