"""Leaves of a state: how they are stored, as named arrays in regions, and how they are made again.

Checksums are computed from the values in memory, so that they also cover the way to the disk.
"""

import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from stepfold import tree
from stepfold.errors import ConfigError, ShardingError, TreeMismatchError

Region = tuple[tuple[int, int], ...]

# The dtypes that zarr, the storage format of orbax, has a name for.
STORED = (
    *("bool", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)


class Leaf(NamedTuple):
    """Metadata of a stored leaf; `key` is the implementation of a typed PRNG key."""

    shape: tuple[int, ...]
    dtype: str
    key: str | None = None

    def __str__(self) -> str:
        """Format as `tree.spell` formats an array."""
        shape = self.shape if self.key is None else self.shape[:-1]
        kind = self.dtype if self.key is None else f"key<{self.key}>"
        return f"{kind}[{','.join(map(str, shape))}]"

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * jnp.dtype(self.dtype).itemsize


def arrays_of(state: Any) -> dict[str, Any]:
    """Return the leaves of a state by path, as arrays that no one else modifies.

    Typed PRNG keys become their key data.
    """
    arrays: dict[str, Any] = {}
    seen: dict[str, str] = {}
    for name, leaf in tree.named_leaves(state):
        other = seen.setdefault(stored_name(name), name)
        if other is not name:
            raise ConfigError(
                f"state: expected a name of its own for every leaf, got {other!r} and {name!r}, "
                "which are stored under one; rename a key"
            )
        if not tree.is_data(leaf):
            raise ConfigError(
                f"{name}: expected an array, got {tree.spell(leaf)}; keep functions and settings "
                "out of the state, or give them as extra=…"
            )
        arrays[name] = _as_array(name, leaf)
        if str(arrays[name].dtype) not in STORED:
            raise ConfigError(
                f"{name}: expected a dtype that can be stored ({', '.join(STORED)}), got "
                f"{tree.spell(leaf)}; cast it"
            )
    _check_not_branches(arrays)
    if not any(array.size for array in arrays.values()):
        raise ConfigError("state: expected arrays to save, got none with elements")
    return arrays


def _check_not_branches(arrays: Mapping[str, Any]) -> None:
    """Check that no leaf has the path of a branch, as `a` and `a/b` would."""
    for name in arrays:
        for branch in accumulate(name.split("/")[:-1], "{}/{}".format):
            if branch in arrays:
                raise ConfigError(
                    f"state: expected a leaf or a branch at {branch!r}, got both, since there is "
                    f"{name!r}; rename a key"
                )


def leaves_of(state: Any) -> dict[str, Leaf]:
    """Return the metadata of every leaf, by path."""
    return {name: leaf_of(leaf) for name, leaf in tree.named_leaves(state)}


def stored_name(name: str) -> str:
    """Return the name under which orbax stores a leaf; orbax joins keys by dots."""
    return name.replace("/", ".")


def _as_array(name: str, leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        if isinstance(leaf, np.ma.MaskedArray):
            raise ConfigError(
                f"{name}: expected an array, got a masked one; save its data and its mask"
            )
        array = np.array(leaf)  # a copy: numpy arrays may change while they are written
        return array.astype(array.dtype.newbyteorder("="), copy=False)
    if jax.process_count() > 1 and leaf.is_fully_addressable:
        raise ConfigError(
            f"{name}: expected an array that all {jax.process_count()} processes have their part "
            "in, got one of this process alone; give the state a plan (init_state(…, "
            "sharding=plan)), or place it (place(state, plan))"
        )
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of typed PRNG keys, concrete or abstract."""
    return tree.is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def impl_of(key: Any) -> str:
    """Return the implementation of a key; unlike `jax.random.key_impl`, accepts abstract keys."""
    impls: list[str] = []
    jax.eval_shape(lambda key: impls.append(str(jax.random.key_impl(key))), key)
    return impls[0]


def leaf_of(leaf: Any) -> Leaf:
    """Return the metadata of a leaf, concrete or abstract."""
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return Leaf(data.shape, str(data.dtype), impl_of(leaf))
    if not tree.is_array(leaf):
        leaf = np.asarray(leaf)
    return Leaf(tuple(leaf.shape), leaf.dtype.name)


def shards_of(array: Any) -> dict[Region, Any]:
    """Return the parts of an array that this process records, on the host.

    Only one replica of each shard is recorded, and numpy arrays only by process 0.
    """
    if not isinstance(array, jax.Array):
        return {region((), array.shape): array} if jax.process_index() == 0 else {}
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    return {region(shard.index, array.shape): np.asarray(shard.data) for shard in shards}


def region(index: Sequence[slice], shape: Sequence[int]) -> Region:
    """Convert an index of slices to a start and a stop for each axis."""
    full = [*index, *[slice(None)] * (len(shape) - len(index))]
    return tuple(part.indices(size)[:2] for part, size in zip(full, shape, strict=True))


def as_slices(part: Region) -> tuple[slice, ...]:
    """Convert a region to an index."""
    return tuple(slice(*ends) for ends in part)


def checksum(array: np.ndarray) -> int:
    """Compute the CRC-32 of an array's elements in C order."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


# Making leaves again


def regions_of(name: str, saved: Leaf, like: Any) -> list[Region]:
    """List the distinct regions of a leaf that this process needs."""
    sharding = _sharding_of(like)
    if sharding is None:
        return [region((), saved.shape)]
    return list(dict.fromkeys(_by_device(name, saved, sharding).values()))


def make_leaf(name: str, saved: Leaf, like: Any, parts: Mapping[Region, np.ndarray]) -> Any:
    """Make a leaf with the kind, sharding and dtype of `like`.

    `like` is an array, an abstract array with or without a sharding, or a number. `parts` holds the
    data of each of `regions_of`, and may be used without a copy.
    """
    if is_key(like):
        like_data: Any
        if isinstance(like, jax.Array):
            like_data = jax.random.key_data(like)
        else:
            dtype = jnp.dtype(saved.dtype)
            like_data = jax.ShapeDtypeStruct(saved.shape, dtype, sharding=like.sharding)
        data = make_leaf(name, saved._replace(key=None), like_data, parts)
        return jax.random.wrap_key_data(data, impl=impl_of(like))
    parts = {part: _converted(name, saved, like, array) for part, array in parts.items()}
    sharding = _sharding_of(like)
    if sharding is not None:
        return _shard(_by_device(name, saved, sharding), sharding, saved.shape, parts)
    (array,) = parts.values()
    if isinstance(like, np.ndarray):
        return array
    if not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return type(like)(array.item())
    weak = like.weak_type and not array.ndim  # keep weak types: without, a step would retrace
    return jnp.asarray(array.item()) if weak else jax.device_put(array)


def _sharding_of(like: Any) -> Sharding | None:
    # Keep uncommitted arrays uncommitted: otherwise a step would recompile.
    committed = getattr(like, "committed", True)
    return getattr(like, "sharding", None) if committed else None


def _by_device(name: str, saved: Leaf, sharding: Sharding) -> dict[Any, Region]:
    try:
        index = sharding.addressable_devices_indices_map(saved.shape)
    except ValueError as error:
        raise ShardingError(
            f"{name}: expected a sharding that fits {saved}, got {sharding}: {error}"
        ) from error
    return {device: region(slices or (), saved.shape) for device, slices in index.items()}


def _converted(name: str, saved: Leaf, like: Any, array: np.ndarray) -> np.ndarray:
    wanted = leaf_of(like)
    dtype = jnp.dtype(wanted.dtype)
    on_device = isinstance(like, jax.Array | jax.ShapeDtypeStruct)
    if on_device and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TreeMismatchError(
            f"{name}: wanted {wanted}, which jax makes only with jax_enable_x64; turn it on, or "
            "use a narrower dtype with cast=True"
        )
    converted = array.astype(dtype, copy=False)
    if jnp.issubdtype(dtype, jnp.integer) and not np.array_equal(converted, array):
        raise TreeMismatchError(
            f"{name}: saved {saved}, wanted {wanted}, but not every value fits; use the dtype that "
            "was saved"
        )
    return converted


def _shard(
    regions: Mapping[Any, Region],
    sharding: Sharding,
    shape: tuple[int, ...],
    parts: Mapping[Region, np.ndarray],
) -> jax.Array:
    # jax may alias numpy memory, and a step may write into it: every device needs its own copy.
    first = {part: device for device, part in reversed(list(regions.items()))}
    arrays = [
        jax.device_put(
            parts[part] if first[part] == device else parts[part].copy(),
            SingleDeviceSharding(device, memory_kind=sharding.memory_kind),
        )
        for device, part in regions.items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)
