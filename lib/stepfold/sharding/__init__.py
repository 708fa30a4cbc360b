"""Meshes, sharding rules, the placement of arrays, and gradients with the same bits on any mesh."""

from typing import TYPE_CHECKING

from stepfold.lazy import attach

if TYPE_CHECKING:
    from stepfold.sharding.mesh import make_mesh
    from stepfold.sharding.ordered import clip_by_ordered_norm, ordered, ordered_norm
    from stepfold.sharding.place import place, shard_batch
    from stepfold.sharding.plan import fsdp, make_sharding, sharding_table
    from stepfold.sharding.reduce import reduce_once
    from stepfold.sharding.topology import devices_of

__all__ = [
    "clip_by_ordered_norm",
    "devices_of",
    "fsdp",
    "make_mesh",
    "make_sharding",
    "ordered",
    "ordered_norm",
    "place",
    "reduce_once",
    "shard_batch",
    "sharding_table",
]
__getattr__, __dir__ = attach(
    __name__,
    {
        "sharding.mesh": "make_mesh",
        "sharding.ordered": "clip_by_ordered_norm ordered ordered_norm",
        "sharding.place": "place shard_batch",
        "sharding.plan": "fsdp make_sharding sharding_table",
        "sharding.reduce": "reduce_once",
        "sharding.topology": "devices_of",
    },
)
