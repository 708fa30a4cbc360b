"""Device meshes."""

import math
import operator
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from stepfold.errors import ShardingError

DATA_AXES = ("dp", "fsdp")
"""The mesh axes over which batches are sharded by default."""


def axes_of(entry: Any) -> tuple[Any, ...]:
    """Return the axes that an entry of a PartitionSpec names: none, one, or several."""
    return () if entry is None else tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def data_axes(mesh: Mesh, axes: str | Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the axes to shard batches over: `axes`, or those of `DATA_AXES` in the mesh."""
    wanted = DATA_AXES if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    names = tuple(name for name in wanted if name in mesh.shape)
    if not names or (axes is not None and len(names) < len(wanted)):
        raise ShardingError(
            f"axes: expected axes of the mesh to spread examples over, got {wanted}; the mesh has "
            f"{mesh.axis_names}, so give axes=…"
        )
    return names


def check_mesh(mesh: Any) -> None:
    """Refuse anything but a mesh."""
    if not isinstance(mesh, Mesh):
        raise ShardingError(f"mesh: expected one, as sf.make_mesh() makes it, got {mesh!r:.80}")


def make_mesh(
    dims: Sequence[int] = (1, -1, 1, 1),
    names: Sequence[str] = ("dp", "fsdp", "tp", "sp"),
    *,
    dcn_dims: Sequence[int] | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Create a mesh, with devices in the order of the network topology.

    The order is that of jax's mesh utilities, which know the topology. Put the axes with the most
    communication (`tp`) last. The axes have the type Auto: the compiler chooses shardings where no
    rule does.

    Args:
      dims: the number of devices along each axis; one may be -1, for all that remain.
      names: the names of the axes. By default batches are sharded over "dp" and "fsdp", parameters
        over "fsdp".
      dcn_dims: for several slices (or hosts) with a slower network in between: the number of slices
        along each axis; one may be -1. `dims` is then the mesh within one slice, and the size of an
        axis is the product of both.
      devices: the devices; all by default.

    Raises:
      ShardingError: if the devices do not fit the mesh; the message suggests shapes that do.

    >>> import jax, stepfold as sf
    >>> sf.make_mesh().shape == {"dp": 1, "fsdp": jax.device_count(), "tp": 1, "sp": 1}
    True
    >>> sf.make_mesh((-1,), ("data",), devices=jax.devices()[:1]).shape["data"]
    1
    """
    devices = list(jax.devices() if devices is None else devices)
    if not devices:
        raise ShardingError("make_mesh: expected at least one device, got none")
    names = tuple(names)
    if len(set(names)) != len(names):
        raise ShardingError(f"make_mesh: expected names that differ, got {names}")
    dims = _sizes(dims, names, "dims")
    if dcn_dims is None:
        shape = _solved(dims, len(devices), names, "dims", "devices")
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        dcn_dims = _sizes(dcn_dims, names, "dcn_dims")
        by_slice = len({getattr(device, "slice_index", 0) for device in devices}) > 1
        slices = _slices(devices, "slice_index" if by_slice else "process_index")
        outer = _solved(dcn_dims, len(slices), names, "dcn_dims", "slices")
        inner = _solved(dims, len(slices[0]), names, "dims", "devices of a slice")
        grid = mesh_utils.create_hybrid_device_mesh(
            inner, outer, devices, process_is_granule=not by_slice, allow_split_physical_axes=True
        )
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def _sizes(dims: Sequence[int], names: tuple[str, ...], what: str) -> tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, dims))
    except TypeError:
        sizes = ()
    if not sizes or any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
        raise ShardingError(f"{what}: expected positive sizes, one at most -1, got {dims!r}")
    if len(sizes) != len(names):
        raise ShardingError(f"{what}: expected one size for each of {names}, got {sizes}")
    return sizes


def _slices(devices: list[Any], attribute: str) -> list[list[Any]]:
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, attribute), []).append(device)
    sizes = [len(members) for members in slices.values()]
    if len(set(sizes)) != 1:
        raise ShardingError(f"dcn_dims: expected slices of one size, got slices of {sizes} devices")
    return list(slices.values())


def _solved(
    dims: Sequence[int], count: int, names: tuple[str, ...], what: str, of: str
) -> tuple[int, ...]:
    """Replace the -1 by a size, such that the product is the count."""
    fixed = math.prod(size for size in dims if size != -1)
    solved = tuple(count // fixed if size == -1 else size for size in dims)
    if math.prod(solved) == count:
        return solved
    nearest = sorted(_factorizations(count, len(dims)), key=lambda shape: _distance(shape, dims))
    raise ShardingError(
        f"{what}={tuple(dims)} over {names} does not fit the {count} {of} there are; "
        f"nearest that do: {', '.join(map(str, nearest[:3]))}, or give other devices="
    )


def _factorizations(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    return (shape for shape in product(divisors, repeat=parts) if math.prod(shape) == count)


def _distance(shape: Sequence[int], dims: Sequence[int]) -> float:
    """Measure the distance of a shape to the requested sizes, by their ratios."""
    pairs = zip(shape, dims, strict=True)
    return sum(abs(math.log(size / wanted)) for size, wanted in pairs if wanted != -1)
