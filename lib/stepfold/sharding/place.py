"""Placement of arrays on a mesh, or by a plan, from the data of each process."""

import math
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from stepfold import tree
from stepfold.core.processes import KeyValues, spell_processes
from stepfold.core.state import check_not_donated
from stepfold.errors import DataError, PeerTimeoutError, ShardingError, refuse
from stepfold.internals.jax import can_run
from stepfold.sharding.mesh import check_mesh, data_axes
from stepfold.sharding.plan import shardings_of
from stepfold.sharding.topology import check_here


def shard_batch(batch: Any, mesh: Mesh, *, axes: str | Sequence[str] | None = None) -> Any:
    """Combine the rows of all processes into a global batch, sharded over a mesh.

    The leading axis of every leaf is sharded over the data axes of the mesh; scalars are
    replicated. Each of several processes passes its own rows, the same number of them; the batch
    then holds the rows of all, in the order of the mesh. An abstract batch returns an abstract one
    with its shardings, for `describe` and `compile_step`; for `devices_of` its rows are all rows.
    As in jax itself, the result may alias a NumPy array: do not write to that array afterwards.

    Args:
      batch: a tree of arrays: the rows of this process.
      mesh: the mesh.
      axes: the mesh axes to shard over; by default those of "dp" (or, without it, "data") and
        "fsdp" that it has.

    Raises:
      DataError: if the leaves, or the processes, have different numbers of rows.
      PeerTimeoutError: if a process has no batch of this many rows in time; see
        `start_distributed(timeout=…)`.
      ShardingError: if the devices do not divide the rows, or the mesh has no axis to shard over.

    >>> import jax, numpy as np, stepfold as sf
    >>> mesh = sf.make_mesh()
    >>> batch = sf.shard_batch({"x": np.ones((16, 3)), "y": np.ones(16)}, mesh)
    >>> batch["x"].shape, batch["x"].sharding.shard_shape((16, 3)) == (16 // mesh.size, 3)
    ((16, 3), True)
    """
    check_mesh(mesh)
    sizes = row_counts("shard_batch", batch)
    replicated = NamedSharding(mesh, PartitionSpec())
    if not sizes:
        return jax.tree.map(lambda leaf: _put(leaf, replicated, 1), batch)
    names = data_axes(mesh, axes)
    (rows,) = sizes
    sharded, all_rows = NamedSharding(mesh, PartitionSpec(names)), _all_rows(mesh, names, rows)
    if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(batch)):
        _check_equal_rows(mesh, rows if _is_even(mesh) else all_rows)
    return jax.tree.map(
        lambda leaf: _put(leaf, sharded if np.ndim(leaf) else replicated, all_rows), batch
    )


def row_counts(function: str, batch: Any) -> set[int]:
    """Return the number of rows of all leaves as a set; empty without any. Runs on every batch."""
    leaves = jax.tree.leaves(batch)
    if not all(tree.is_data(leaf, abstract=True) for leaf in leaves):
        named = tree.named_leaves(batch, "batch")
        name, leaf = next(pair for pair in named if not tree.is_data(pair[1], abstract=True))
        refuse(name, "an array", tree.describe_value(leaf), kind=DataError)
    sizes = {np.shape(leaf)[0] for leaf in leaves if np.ndim(leaf)}
    if len(sizes) > 1:
        named = tree.named_leaves(batch, "batch")
        got = ", ".join(
            f"{name} {tree.describe_value(leaf)}" for name, leaf in named if np.ndim(leaf)
        )
        refuse(function, "the same number of rows in every leaf", got, kind=DataError)
    return sizes


@cache
def _all_rows(mesh: Mesh, names: tuple[str, ...], rows: int) -> int:
    """Return the rows of the global batch, from those of this process."""
    local, num_shards = _local_shards(mesh, names)
    num_local = len(local)
    if not can_run(mesh.devices.flat):
        num_local = num_shards  # no process runs there: the rows are those of the global batch
    if rows % num_local or rows == 0:
        expected = (
            f"a multiple of {num_local} rows, one for each shard of this process along {names}"
        )
        got, advice = f"{rows} rows", "drop or pad the last batch"
        refuse("shard_batch", expected, got, advice, kind=ShardingError)
    return rows // num_local * num_shards


def _local_shards(mesh: Mesh, names: tuple[str, ...]) -> tuple[list[int], int]:
    """Return which shards of a batch are on devices of this process, and how many there are."""
    num_shards: int = math.prod(mesh.shape[name] for name in names)
    sharding = NamedSharding(mesh, PartitionSpec(names))
    indices = sharding.addressable_devices_indices_map((num_shards,)).values()
    return sorted({index[0].start or 0 for index in indices if index is not None}), num_shards


def process_mesh() -> Mesh:
    """Return a mesh of one device of each process."""
    devices = {device.process_index: device for device in reversed(jax.devices())}
    return Mesh(np.array([devices[process] for process in sorted(devices)]), ("process",))


@cache
def _is_even(mesh: Mesh) -> bool:
    """Whether all processes have as many devices of a mesh."""
    return len(set(Counter(device.process_index for device in mesh.devices.flat).values())) == 1


_GRACE_SECONDS = 3.0  # a thread of a peer may be ahead with another number of rows for a moment


@cache
def _check_equal_rows(mesh: Mesh, rows: int) -> None:
    """Wait until every process of the mesh has had a batch of this many rows.

    Runs once for each number of rows, without a collective, so that it may run in a thread: a
    collective there would run in another order in each process.
    """
    check_here(mesh.devices.flat)
    processes = sorted({device.process_index for device in mesh.devices.flat})
    seen = KeyValues("shard_batch")
    if len(processes) == 1 or not seen:
        return
    me = jax.process_index()
    layout = (tuple(mesh.shape.items()), [device.id for device in mesh.devices.flat])
    folder = str(zlib.crc32(repr(layout).encode()))
    seen.set(f"{folder}/{me}/{rows}", True)
    counts: dict[int, set[int]] = {}  # of the batches so far
    differ_since = math.inf

    def is_over() -> bool:
        nonlocal differ_since
        pairs = [tuple(map(int, key.split("/"))) for key in seen.get(folder)]
        counts.update({index: {n for i, n in pairs if i == index} for index in processes})
        differ = any(rows not in got and got - counts[me] for got in counts.values())
        differ_since = min(differ_since, time.monotonic()) if differ else math.inf
        is_equal = all(rows in got for got in counts.values())
        return is_equal or time.monotonic() - differ_since > _GRACE_SECONDS

    answered = seen.wait(is_over)
    late = [process for process, got in counts.items() if rows not in got]
    if differ_since < math.inf:
        others = {process: max(counts[process] - counts[me], default=None) for process in late}
        expected = "the same number of rows in every process"
        got = f"{[others.get(process, rows) for process in processes]}"
        refuse("shard_batch", expected, got, "drop or pad the last batch", kind=DataError)
    if not answered:
        had = sorted(set().union(*(counts[process] for process in late)))
        before = f", only of {', '.join(map(str, had))} rows before" if had else ""
        raise PeerTimeoutError(
            f"shard_batch: {spell_processes(late)} gave no batch of {rows} rows, as this process "
            f"did, in {seen.timeout} s{before}; if a process was slow, wait longer with "
            "start_distributed(timeout=…), else drop or pad the last batch"
        )


def _put(leaf: Any, sharding: NamedSharding, rows: int) -> Any:
    shape = np.shape(leaf)
    if sharding.spec:
        shape = (rows, *shape[1:])
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(shape=shape, sharding=sharding)
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    return jax.make_array_from_process_local_data(sharding, np.asarray(leaf), shape)


def place_batch(batch: Any, mesh: Mesh) -> Any:
    """Place the leaves of a batch that are not yet on the state's mesh; check the others.

    Arrays that are committed to the mesh stay as they are, even if they are replicated.
    """
    leaves, structure = jax.tree.flatten(batch)
    shardings = [committed_sharding(leaf) for leaf in leaves]
    problems = [_placement_problem(sharding, mesh) for sharding in shardings]
    if any(problems):
        names = [name for name, _ in tree.named_leaves(batch, "batch")]
        named = zip(names, problems, strict=True)
        raise ShardingError(next(f"{name}: {problem}" for name, problem in named if problem))
    if all(shardings):
        return batch
    pairs = list(zip(leaves, shardings, strict=True))
    host = jax.tree.unflatten(structure, [None if sharding else leaf for leaf, sharding in pairs])
    sharded = iter(jax.tree.leaves(shard_batch(host, mesh)))
    return jax.tree.unflatten(
        structure, [leaf if sharding else next(sharded) for leaf, sharding in pairs]
    )


def committed_sharding(leaf: Any) -> Sharding | None:
    """Return the sharding of an array that is committed to devices, or of an abstract one."""
    return getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None


@cache
def _placement_problem(sharding: Sharding | None, mesh: Mesh) -> str | None:
    """Say why a step cannot take an array in this sharding with a state on a mesh."""
    if sharding is None:
        return None
    if sharding.device_set != set(mesh.devices.flat):
        return (
            f"expected it on the {mesh.size} devices of the state's mesh, got it on "
            f"{len(sharding.device_set)}; place each batch with sf.shard_batch(batch, mesh)"
        )
    own: Any = getattr(sharding, "mesh", mesh)
    if set(own.axis_types) == set(mesh.axis_types):
        return None
    return (
        f"expected it on a mesh with axes of the type {_spell_types(mesh)}, as that of the state, "
        f"got {_spell_types(own)}; place state and batches on one mesh"
    )


def _spell_types(mesh: Mesh) -> str:
    return "+".join(dict.fromkeys(kind.name for kind in mesh.axis_types))


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
    >>> placed = sf.sharding.place(params, sf.make_sharding(params, sf.make_mesh()))
    >>> len(placed["w"].sharding.device_set) == jax.device_count()
    True
    """
    check_not_donated(state)
    leaves, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(structure, map(_copied, leaves, shardings_of(state, plan)))


def _copied(leaf: Any, sharding: Sharding) -> jax.Array:
    check_here(sharding.device_set)
    # jax ignores may_alias=False for NumPy memory, and where the sharding changes: an array spread
    # from one device to several would share the buffer of the first.
    moves = isinstance(leaf, jax.Array) and leaf.sharding != sharding
    leaf = leaf if isinstance(leaf, jax.Array) else np.array(leaf)
    moved = jax.device_put(leaf, sharding, may_alias=False)
    return tree.strong(jnp.copy(moved) if moves else moved)  # type: ignore[no-any-return]
