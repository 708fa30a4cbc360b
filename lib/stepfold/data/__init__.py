"""Input pipelines: sources, batching, mixing, packing, prefetching and worker processes.

`batches.py` makes the batch of a step: `order.py` shuffles, `sources.py` reads the examples, and
`collate.py` stacks them. `stream.py` does it for data without random access.
"""

from typing import TYPE_CHECKING

from stepfold.lazy import attach

if TYPE_CHECKING:
    from stepfold.data.batches import Batches, batches
    from stepfold.data.collate import collate
    from stepfold.data.files import files
    from stepfold.data.mixture import mix
    from stepfold.data.packing import block_diagonal_mask, pack
    from stepfold.data.prefetch import prefetch
    from stepfold.data.tfds import tfds_source
    from stepfold.data.workers import workers

__all__ = [
    "Batches",
    "batches",
    "block_diagonal_mask",
    "collate",
    "files",
    "mix",
    "pack",
    "prefetch",
    "tfds_source",
    "workers",
]
__getattr__, __dir__ = attach(
    __name__,
    {
        "data.batches": "Batches batches",
        "data.collate": "collate",
        "data.files": "files",
        "data.mixture": "mix",
        "data.packing": "block_diagonal_mask pack",
        "data.prefetch": "prefetch",
        "data.tfds": "tfds_source",
        "data.workers": "workers",
    },
)
