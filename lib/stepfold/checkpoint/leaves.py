"""Leaves of a state: stored as named arrays in regions, and made from them by a restore.

Values saved next to a state, such as the data position, are JSON with numpy arrays in it.

Checksums are computed from the values in memory, so that they also cover the way to the disk.
"""

import base64
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from stepfold import tree
from stepfold.errors import ConfigError, ShardingError, TreeMismatchError, refuse, warn

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
        """Format as `tree.describe_value` formats an array."""
        shape = self.shape if self.key is None else self.shape[:-1]
        kind = self.dtype if self.key is None else f"key<{self.key}>"
        return f"{kind}[{','.join(map(str, shape))}]"

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def arrays_of(state: Any) -> dict[str, Any]:
    """Return the leaves of a state by path, as arrays that no one else modifies.

    Typed PRNG keys become their key data. With several processes, every array must be global.
    """
    processes = jax.process_count()
    arrays: dict[str, Any] = {}
    paths: dict[str, str] = {}
    for path, leaf in tree.named_leaves(state):
        other = paths.setdefault(stored_name(path), path)
        if other is not path:
            got = f"{other!r} and {path!r}, which are stored under one"
            refuse("state", "a different name for every leaf", got, "rename a key")
        if not tree.is_data(leaf):
            advice = "keep functions and settings out of the state, or give them as extra=…"
            refuse(path, "an array", tree.describe_value(leaf), advice)
        arrays[path] = _as_array(path, leaf, processes)
    for path in arrays:
        for branch in accumulate(path.split("/")[:-1], "{}/{}".format):
            if branch in arrays:
                got = f"both, since there is {path!r}"
                refuse("state", f"a leaf or a branch at {branch!r}", got, "rename a key")
    if not any(array.size for array in arrays.values()):
        refuse("state", "arrays to save", "none with elements")
    return arrays


def leaves_of(state: Any) -> dict[str, Leaf]:
    """Return the metadata of every leaf, by path."""
    return {name: leaf_of(leaf) for name, leaf in tree.named_leaves(state)}


def stored_name(name: str) -> str:
    """Return the name under which orbax stores a leaf; orbax joins keys by dots."""
    return name.replace("/", ".")


def _as_array(name: str, leaf: Any, processes: int) -> Any:
    if not isinstance(leaf, jax.Array):
        return copy_array(name, leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf))
    if processes > 1 and leaf.is_fully_addressable:
        expected = f"an array over all {processes} processes"
        advice = (
            "give the state a plan (init_state(…, sharding=plan)), or place it (place(state, plan))"
        )
        refuse(name, expected, "one of this process alone", advice)
    if isinstance(leaf, jax.core.Tracer):
        refuse(name, "an array", "a tracer", "save outside of jit")
    array = jax.random.key_data(leaf) if is_key(leaf) else leaf
    check_array(name, array)
    return array


def copy_array(name: str, array: np.ndarray) -> np.ndarray:
    """Copy an array, since it may change while it is written; its byte order becomes native."""
    check_array(name, array)
    return np.array(array, array.dtype.newbyteorder("="), order="C")


def check_array(name: str, array: Any) -> None:
    """Refuse an array that cannot be stored."""
    if isinstance(array, np.ma.MaskedArray):
        refuse(name, "an array", "a masked one", "save its data and its mask")
    if array.dtype.name not in STORED:
        expected = f"a dtype that can be stored ({', '.join(STORED)})"
        refuse(name, expected, tree.describe_value(array), "cast it")


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of typed PRNG keys, concrete or abstract."""
    return tree.is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def leaf_of(leaf: Any) -> Leaf:
    """Return the metadata of a leaf, concrete or abstract."""
    if is_key(leaf):
        impls: list[str] = []  # jax.random.key_impl takes no abstract keys

        def key_data(key: jax.Array) -> jax.Array:
            impls.append(str(jax.random.key_impl(key)))
            return jax.random.key_data(key)

        data = jax.eval_shape(key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return Leaf(data.shape, str(data.dtype), impls[0])
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


def empty(part: Region, dtype: str) -> np.ndarray:
    """Allocate an array for a region of a leaf."""
    return np.empty([stop - start for start, stop in part], jnp.dtype(dtype))


def overlap(first: Region, second: Region) -> Region | None:
    """Return the intersection of two regions; None if it is empty."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return both if all(start < stop for start, stop in both) else None


def within(part: Region, outer: Region) -> Region:
    """Return where a region is in one that contains it."""
    return tuple((a - c, b - c) for (a, b), (c, _) in zip(part, outer, strict=True))


def bytes_of(array: np.ndarray) -> memoryview:
    """Return an array's elements in C order; a view of it, if it has that order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def checksum(array: np.ndarray) -> int:
    """Compute the CRC-32 of an array's elements in C order."""
    return zlib.crc32(bytes_of(array))


# Making leaves from stored arrays


def regions_of(name: str, saved: Leaf, like: Any) -> list[Region]:
    """List the distinct regions of a leaf that this process needs."""
    sharding = _sharding_of(like)
    if sharding is None:
        return [region((), saved.shape)]
    try:
        return list(dict.fromkeys(_by_device(saved.shape, sharding).values()))
    except ValueError as error:
        got = f"{sharding}: {error}"
        refuse(name, f"a sharding that fits {saved}", got, kind=ShardingError, cause=error)


def make_leaf(name: str, saved: Leaf, like: Any, parts: Mapping[Region, np.ndarray]) -> Any:
    """Make a leaf with the kind, sharding and dtype of `like`.

    `like` is an array, an abstract array with or without a sharding, or a number. `parts` holds the
    data of each of `regions_of`; the leaf may use its memory.
    """
    if is_key(like):
        like_data = jax.ShapeDtypeStruct(
            saved.shape, jnp.dtype(saved.dtype), sharding=_sharding_of(like)
        )
        data = make_leaf(name, saved._replace(key=None), like_data, parts)
        return jax.random.wrap_key_data(data, impl=saved.key)
    parts = {part: converted(name, saved, like, array) for part, array in parts.items()}
    sharding = _sharding_of(like)
    if sharding is not None:
        return _shard(saved.shape, sharding, parts)
    (array,) = parts.values()
    if isinstance(like, np.ndarray):
        return array
    if not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return type(like)(array.item())
    weak = like.weak_type and not array.ndim  # keep weak types: without, a step would retrace
    return jnp.asarray(array.item()) if weak else jax.device_put(array)


def converted(name: str, saved: Leaf, like: Any, array: np.ndarray) -> np.ndarray:
    """Convert an array to the dtype of `like`; refuse integers that it does not hold."""
    wanted = leaf_of(like)
    dtype = jnp.dtype(wanted.dtype)
    on_device = isinstance(like, jax.Array | jax.ShapeDtypeStruct)
    if on_device and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TreeMismatchError(
            f"{name}: wanted {wanted}, which jax makes only with jax_enable_x64; turn it on, or "
            "use a narrower dtype with cast=True"
        )
    with np.errstate(over="ignore"):  # counted below, also for dtypes that numpy does not have
        converted = array.astype(dtype, copy=False)
    is_cast = dtype != array.dtype and jnp.issubdtype(dtype, jnp.floating)
    if is_cast and (lost := np.count_nonzero(np.isfinite(array) & ~np.isfinite(converted))):
        warn(
            f"{name}: {lost:,} of {array.size:,} values are beyond the range of {dtype}, and are "
            f"not finite now; saved {saved}, wanted {wanted}",
            RuntimeWarning,
        )
    if jnp.issubdtype(dtype, jnp.integer) and not np.array_equal(converted, array):
        raise TreeMismatchError(
            f"{name}: saved {saved}, wanted {wanted}, but not every value fits; use the dtype that "
            "was saved"
        )
    return converted


def _sharding_of(like: Any) -> Sharding | None:
    # Keep uncommitted arrays uncommitted: otherwise a step would recompile.
    return getattr(like, "sharding", None) if getattr(like, "committed", True) else None


def _by_device(shape: tuple[int, ...], sharding: Sharding) -> dict[Any, Region]:
    index = sharding.addressable_devices_indices_map(shape)
    return {device: region(slices or (), shape) for device, slices in index.items()}


def _shard(
    shape: tuple[int, ...], sharding: Sharding, parts: Mapping[Region, np.ndarray]
) -> jax.Array:
    # jax may alias numpy memory, and a step may write into it: every device needs its own copy.
    unused = dict(parts)
    arrays = [
        jax.device_put(
            unused.pop(part) if part in unused else parts[part].copy(),
            SingleDeviceSharding(device, memory_kind=sharding.memory_kind),
        )
        for device, part in _by_device(shape, sharding).items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


# Values saved next to a state, such as the data position: JSON with numpy arrays in it
#
# The arrays of a save are written one after the other, as a stream of bytes. The JSON has the
# number of an array in its place, and the manifest the shapes, dtypes and checksums of all.

_BYTES = "bytes in base64"  # the JSON encoding of bytes, which grain's positions consist of
_ARRAY = "number of an array"
_DEPTH = 100  # levels of JSON, within Python's limit of recursion


@dataclass(frozen=True)
class StoredArray:
    """An array of a checkpoint that is not read yet: a shard of a leaf, or a value next to them.

    Its bytes are at an offset in a stream. Two of them are equal if their values are.
    """

    leaf: Leaf
    checksum: int
    stream: str = field(compare=False)
    offset: int = field(compare=False)

    def __str__(self) -> str:
        return str(self.leaf)


def check_values(value: Any, name: str) -> None:
    """Refuse what cannot be saved next to a state, with its path."""
    to_json(value, name, check_array)


def to_json(
    value: Any,
    name: str,
    keep_array: Callable[[str, np.ndarray], Any] | None = None,
    depth: int = _DEPTH,
) -> Any:
    """Convert a value to plain JSON, or raise with the path of what JSON cannot hold.

    Tuples become lists, numpy scalars Python numbers, and bytes a dict that `from_json` decodes.
    `keep_array(path, array)` returns what replaces a numpy array. Without it, numpy arrays are
    refused.
    """
    if not depth:
        refuse(name, f"at most {_DEPTH} levels", "more", "flatten it")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and keep_array is not None:
        return keep_array(name, value)
    if isinstance(value, list | tuple):
        return [to_json(item, f"{name}/{i}", keep_array, depth - 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        for taken in (_BYTES, _ARRAY):
            if value.keys() == {taken}:
                raise ConfigError(f"{name}: the key {taken!r} is reserved; use another")
        for key in value:
            if not isinstance(key, str):
                refuse(name, "keys of text", repr(key), "JSON has no others")
        return {
            key: to_json(item, f"{name}/{key}", keep_array, depth - 1)
            for key, item in value.items()
        }
    expected, advice = "what JSON can hold", "write it as text or numbers"
    if keep_array is not None:
        expected = "JSON or numpy arrays"
        convert = "jax.random.key_data for PRNG keys, and np.asarray for an array of jax"
        advice = f"use {convert}, and write anything else as text or numbers"
    refuse(name, expected, tree.describe_value(value), advice)


def from_json(value: Any, arrays: Mapping[int, StoredArray] | None = None) -> Any:
    """Invert `to_json`, except that tuples stay lists, and arrays are not read.

    Each of the numbered arrays may occur once.
    """
    unused = dict(arrays or {})

    def decode(value: Any, depth: int) -> Any:
        if not depth:
            raise ValueError(f"JSON of more than {_DEPTH} levels")
        if isinstance(value, dict):
            if value.keys() == {_BYTES}:
                return base64.b64decode(value[_BYTES])
            if value.keys() == {_ARRAY}:
                return unused.pop(value[_ARRAY])
            return {key: decode(item, depth - 1) for key, item in value.items()}
        return [decode(item, depth - 1) for item in value] if isinstance(value, list) else value

    return decode(value, _DEPTH)


def map_arrays(value: Any, name: str, function: Callable[[str, Any], Any]) -> Any:
    """Replace each array in a value by `function(path, array)`."""
    if isinstance(value, dict):
        return {key: map_arrays(item, f"{name}/{key}", function) for key, item in value.items()}
    if isinstance(value, list):
        return [map_arrays(item, f"{name}/{i}", function) for i, item in enumerate(value)]
    return function(name, value) if isinstance(value, np.ndarray | StoredArray) else value


def find_arrays(value: Any, name: str) -> dict[str, Any]:
    """Return the arrays in a value by their paths."""
    arrays: dict[str, Any] = {}
    map_arrays(value, name, arrays.__setitem__)
    return arrays


def take_arrays(value: Any, arrays: list[np.ndarray]) -> Any:
    """Append the arrays in a value to a list, and return JSON with their numbers in the list."""

    def take(_: str, array: np.ndarray) -> dict[str, int]:
        arrays.append(array)
        return {_ARRAY: len(arrays) - 1}

    return map_arrays(value, "", take)


def describe_arrays(arrays: list[np.ndarray]) -> list[Any]:
    """Return the shape, dtype and checksum of each array, for a manifest."""
    return [[array.shape, array.dtype.name, checksum(array)] for array in arrays]
