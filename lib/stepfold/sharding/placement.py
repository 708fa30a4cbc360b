"""Placement of arrays on a mesh, or by a plan, from the data of each process."""

import math
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from stepfold import tree
from stepfold.errors import DataError, ShardingError
from stepfold.sharding.mesh import check_mesh, data_axes
from stepfold.sharding.plan import places_of


def shard_batch(batch: Any, mesh: Mesh, *, axes: str | Sequence[str] | None = None) -> Any:
    """Combine the rows of all processes into a global batch, sharded over a mesh.

    The leading axis of every leaf is sharded over the data axes of the mesh; scalars are
    replicated. With several processes each passes its own rows, equally many, and the global batch
    holds all of them, in the order of the mesh. An abstract batch returns an abstract one with its
    shardings, for `describe` and `compile_step`. As in jax itself, the result may alias a NumPy
    array: do not write to that array afterwards.

    Args:
      batch: a tree of arrays: the rows of this process.
      mesh: the mesh.
      axes: the mesh axes to shard over; by default those of "dp" and "fsdp" that it has.

    Raises:
      DataError: if the leaves, or the processes, have different numbers of rows.
      ShardingError: if the devices do not divide the rows, or the mesh has no axis to shard over.

    >>> import jax, numpy as np, stepfold as sf
    >>> mesh = sf.make_mesh()
    >>> batch = sf.shard_batch({"x": np.ones((16, 3)), "y": np.ones(16)}, mesh)
    >>> batch["x"].shape, batch["x"].sharding.shard_shape((16, 3)) == (16 // mesh.size, 3)
    ((16, 3), True)
    """
    check_mesh(mesh)
    names = data_axes(mesh, axes)
    sizes = _sizes(batch)
    if not sizes:
        return jax.tree.map(lambda leaf: _put(leaf, NamedSharding(mesh, PartitionSpec()), 1), batch)
    (rows,) = sizes
    spread, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec(names), PartitionSpec()))
    share = _share(mesh, names, rows)
    if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(batch)):
        _agree(mesh, rows)
    return jax.tree.map(lambda leaf: _put(leaf, spread if np.ndim(leaf) else whole, share), batch)


def _sizes(batch: Any) -> set[int]:
    """Return the number of rows of all leaves as a set; empty without any. Runs on every batch."""
    leaves = jax.tree.leaves(batch)
    if not all(tree.is_data(leaf, abstract=True) for leaf in leaves):
        named = tree.named_leaves(batch, "batch")
        name, leaf = next(pair for pair in named if not tree.is_data(pair[1], abstract=True))
        raise DataError(f"{name}: expected an array, got {tree.spell(leaf)}")
    sizes = {np.shape(leaf)[0] for leaf in leaves if np.ndim(leaf)}
    if len(sizes) > 1:
        named = tree.named_leaves(batch, "batch")
        got = ", ".join(f"{name} {tree.spell(leaf)}" for name, leaf in named if np.ndim(leaf))
        raise DataError(f"shard_batch: expected as many rows in every leaf, got {got}")
    return sizes


@cache
def _share(mesh: Mesh, names: tuple[str, ...], rows: int) -> int:
    """Return the size of the global batch in multiples of this process's rows."""
    parts: int = math.prod(mesh.shape[name] for name in names)
    cut = NamedSharding(mesh, PartitionSpec(names)).addressable_devices_indices_map((parts,))
    mine = len({index[0].start for index in cut.values() if index is not None})
    if rows % mine or rows == 0:
        raise ShardingError(
            f"shard_batch: {rows} rows do not divide by the {mine} parts that {names} cut them "
            f"into here; give a multiple of {mine}, or pad and mask the last rows"
        )
    return parts // mine


_PATIENCE = 60.0


@cache
def _agree(mesh: Mesh, rows: int) -> None:
    """Check that all processes have equally many rows, once for each number of rows."""
    processes = {device.process_index for device in mesh.devices.flat}
    if len(processes) == 1 or len(processes) < jax.process_count():  # the gather needs all
        return
    heard: list[Any] = []
    # In a thread, since the gather never returns if the other processes do not call it.
    ask = lambda: heard.append(multihost_utils.process_allgather(np.int32(rows)).tolist())
    thread = threading.Thread(target=ask, name="shard_batch", daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    every = heard[0] if heard else f"{rows} here, and no answer from the others in {_PATIENCE} s"
    if not heard or len(set(every)) > 1:
        raise DataError(
            f"shard_batch: expected as many rows in every process, got {every}; drop or pad the "
            "last batch"
        )


def _put(leaf: Any, place: NamedSharding, share: int) -> Any:
    shape = np.shape(leaf)
    if place.spec:
        shape = (shape[0] * share, *shape[1:])
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(shape=shape, sharding=place)
    if place.is_fully_addressable:
        return jax.device_put(leaf, place)
    if isinstance(leaf, jax.Array) and leaf.sharding == place:
        return leaf
    return jax.make_array_from_process_local_data(place, np.asarray(leaf), shape)


def place(state: Any, plan: Any) -> Any:
    """Copy a restored or hand-made state to the shardings of a plan.

    With several processes each passes the complete state, the same in all. The copy shares no
    buffer with the input, so that donating it deletes no array of the caller.

    Args:
      state: a tree of arrays.
      plan: a tree of shardings of the same structure, or one sharding for all leaves.

    Raises:
      TreeMismatchError: if the plan is for another tree.

    >>> import jax, jax.numpy as jnp, stepfold as sf
    >>> params = {"w": jnp.ones((128, 64))}
    >>> placed = sf.place(params, sf.make_sharding(params, sf.make_mesh()))
    >>> len(placed["w"].sharding.device_set) == jax.device_count()
    True
    """
    leaves, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(structure, map(_copied, leaves, places_of(state, plan)))


def _copied(leaf: Any, to: Sharding) -> jax.Array:
    # jax ignores may_alias=False for NumPy memory, and where the sharding changes: an array spread
    # from one device to several would share the buffer of the first.
    moves = isinstance(leaf, jax.Array) and leaf.sharding != to
    leaf = leaf if isinstance(leaf, jax.Array) else np.array(leaf)
    moved = jax.device_put(leaf, to, may_alias=False)
    return tree.strong(jnp.copy(moved) if moves else moved)  # type: ignore[no-any-return]
