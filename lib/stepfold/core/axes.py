"""The names of mesh axes that have a meaning without being passed."""

from collections.abc import Collection

DATA_AXES = ("dp", "fsdp")
"""The mesh axes over which batches are sharded by default; "data" stands in for a missing "dp"."""

ACTIVATION_AXIS = "sp"
"""The mesh axis of sequence parallelism, which only constraints inside a model use."""


def default_data_axes(names: Collection[str]) -> tuple[str, ...]:
    """Return which of the axes of a mesh shard batches by default."""
    replicas = "data" if "dp" not in names else "dp"
    return tuple(name for name in (replicas, "fsdp") if name in names)
