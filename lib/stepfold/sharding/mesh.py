"""Device meshes."""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding

from stepfold.core.axes import DATA_AXES, default_data_axes
from stepfold.core.validation import read_instance
from stepfold.errors import ShardingError, refuse
from stepfold.tree import describe_value


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
      names: the names of the axes. By default batches are sharded over "dp" (or, in a mesh without
        it, "data") and "fsdp", parameters over "fsdp".
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
    devices = jax.devices() if devices is None else devices
    is_device = lambda device: hasattr(device, "process_index")
    devices = [*_items("devices", "a list of jax devices", devices, is_device)]
    if not devices:
        refuse("make_mesh", "at least one device", "none", kind=ShardingError)
    names = _items("names", "names of axes", names, lambda name: isinstance(name, str))
    if len(set(names)) != len(names):
        refuse("make_mesh", "names that differ", f"{names}", kind=ShardingError)
    if dcn_dims is None:
        shape = _shape(dims, len(devices), names, "dims", "devices")
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        by_slice = len({getattr(device, "slice_index", 0) for device in devices}) > 1
        granule = "slice_index" if by_slice else "process_index"
        indices = [getattr(device, granule) for device in devices]
        sizes = [indices.count(index) for index in dict.fromkeys(indices)]
        if len(set(sizes)) > 1:
            refuse(
                "dcn_dims", "slices of one size", f"slices of {sizes} devices", kind=ShardingError
            )
        outer = _shape(dcn_dims, len(sizes), names, "dcn_dims", "slices")
        inner = _shape(dims, sizes[0], names, "dims", "devices of a slice")
        grid = mesh_utils.create_hybrid_device_mesh(
            inner, outer, devices, process_is_granule=not by_slice, allow_split_physical_axes=True
        )
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def _items(argument: str, expected: str, values: Any, is_valid: Callable[[Any], bool]) -> Any:
    """Return the items of an iterable as a tuple, if all are valid."""
    items = tuple(values) if isinstance(values, Iterable) else None
    if items is None or not all(map(is_valid, items)):
        refuse(argument, expected, describe_value(values), kind=ShardingError)
    return items


def _shape(
    dims: Sequence[int], count: int, names: Sequence[str], argument: str, counted: str
) -> tuple[int, ...]:
    """Replace the -1 by a size, such that the product is the count."""
    try:
        sizes = tuple(map(operator.index, dims))
    except TypeError:
        sizes = ()
    if not sizes or any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
        refuse(argument, "positive sizes, one at most -1", repr(dims), kind=ShardingError)
    if len(sizes) != len(names):
        refuse(argument, f"one size for each of {names}", f"{sizes}", kind=ShardingError)
    fixed = math.prod(size for size in sizes if size != -1)
    shape = tuple(count // fixed if size == -1 else size for size in sizes)
    if math.prod(shape) == count:
        return shape

    def distance(shape: tuple[int, ...]) -> float:
        pairs = zip(shape, sizes, strict=True)
        return sum(abs(math.log(size / wanted)) for size, wanted in pairs if wanted != -1)

    divisors = [size for size in range(1, count + 1) if count % size == 0]
    shapes = product(divisors, repeat=len(sizes))
    nearest = sorted((s for s in shapes if math.prod(s) == count), key=distance)
    raise ShardingError(
        f"{argument}={sizes} over {names} does not fit the {count} {counted} there are; "
        f"nearest that do: {', '.join(map(str, nearest[:3]))}, or give other devices="
    )


def check_mesh(mesh: Any) -> None:
    """Refuse anything but a mesh."""
    advice = "sf.make_mesh() makes one"
    read_instance("mesh", mesh, Mesh, "a jax.sharding.Mesh", advice, kind=ShardingError)


def data_axes(mesh: Mesh, axes: str | Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the axes to shard batches over: `axes`, or the default ones of the mesh."""
    wanted = DATA_AXES if axes is None else axes_of(axes)
    names = default_data_axes(mesh.axis_names)
    if axes is not None:
        names = tuple(name for name in wanted if name in mesh.axis_names)
    if not names or (axes is not None and len(names) < len(wanted)):
        raise ShardingError(
            f"axes: expected axes of the mesh {mesh.axis_names} to shard the batch over, got "
            f"{wanted}; place each batch with sf.shard_batch(batch, mesh, axes=…), or let "
            "sf.prefetch(batches, sharding=…) do it"
        )
    return names


def axes_of(entry: Any) -> tuple[Any, ...]:
    """Return the axes that an entry of a PartitionSpec names, as a tuple."""
    return () if entry is None else tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def common_mesh(plan: Any) -> Mesh | None:
    """Return the mesh of a tree of shardings, or None if it is not a tree of `NamedSharding`s."""
    shardings = jax.tree.leaves(plan)
    if not shardings or not all(isinstance(each, NamedSharding) for each in shardings):
        return None
    mesh: Mesh = shardings[0].mesh
    return mesh
