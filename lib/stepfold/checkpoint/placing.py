"""Create the wanted leaf from the parts read: its sharding, its dtype, its own memory."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from stepfold.checkpoint.leaves import Leaf, Region, impl_of, is_key, leaf_of, region
from stepfold.errors import ShardingError, TreeMismatchError


def regions_of(name: str, saved: Leaf, like: Any) -> list[Region]:
    """List the distinct regions of a leaf that this process needs."""
    place = _place_of(like)
    if place is None:
        return [region((), saved.shape)]
    return list(dict.fromkeys(_by_device(name, saved, place).values()))


def placed(name: str, saved: Leaf, like: Any, parts: Mapping[Region, np.ndarray]) -> Any:
    """Create a leaf with the kind, sharding and dtype of `like`.

    `like` is an array, an abstract array with or without a sharding, or a number. `parts` holds the
    data of each of `regions_of`, and may be used without a copy.
    """
    if is_key(like):
        numbers = placed(name, saved._replace(key=None), _numbers_of(like, saved), parts)
        return jax.random.wrap_key_data(numbers, impl=impl_of(like))
    parts = {part: _converted(name, saved, like, array) for part, array in parts.items()}
    place = _place_of(like)
    if place is not None:
        return _spread(_by_device(name, saved, place), place, saved.shape, parts)
    (array,) = parts.values()
    if isinstance(like, np.ndarray):
        return array
    if not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return type(like)(array.item())
    weak = like.weak_type and not array.ndim  # keep weak types: without, a step would retrace
    return jnp.asarray(array.item()) if weak else jax.device_put(array)


def _place_of(like: Any) -> Sharding | None:
    # Keep uncommitted arrays uncommitted: otherwise a step would recompile.
    committed = getattr(like, "committed", True)
    return getattr(like, "sharding", None) if committed else None


def _by_device(name: str, saved: Leaf, place: Sharding) -> dict[Any, Region]:
    try:
        index = place.addressable_devices_indices_map(saved.shape)
    except ValueError as error:
        raise ShardingError(
            f"{name}: expected a sharding that fits {saved}, got {place}: {error}"
        ) from error
    return {device: region(slices or (), saved.shape) for device, slices in index.items()}


def _numbers_of(like: Any, saved: Leaf) -> Any:
    if isinstance(like, jax.Array):
        return jax.random.key_data(like)
    return jax.ShapeDtypeStruct(saved.shape, jnp.dtype(saved.dtype), sharding=like.sharding)


def _converted(name: str, saved: Leaf, like: Any, array: np.ndarray) -> np.ndarray:
    wanted = leaf_of(like)
    dtype = jnp.dtype(wanted.dtype)
    on_device = isinstance(like, jax.Array | jax.ShapeDtypeStruct)
    if on_device and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TreeMismatchError(
            f"{name}: wanted {wanted}, which jax makes only with jax_enable_x64; turn it on, or "
            "wish for a narrower dtype with cast=True"
        )
    made = array.astype(dtype, copy=False)
    if jnp.issubdtype(dtype, jnp.integer) and not np.array_equal(made, array):
        raise TreeMismatchError(
            f"{name}: saved {saved}, wanted {wanted}, but not every value fits; wish for the dtype "
            "that was saved"
        )
    return made


def _spread(
    regions: Mapping[Any, Region],
    place: Sharding,
    shape: tuple[int, ...],
    parts: Mapping[Region, np.ndarray],
) -> jax.Array:
    # jax may alias numpy memory, and a step may write into it: every device needs its own copy.
    first = {part: device for device, part in reversed(list(regions.items()))}
    arrays = [
        jax.device_put(
            parts[part] if first[part] == device else parts[part].copy(),
            SingleDeviceSharding(device, memory_kind=place.memory_kind),
        )
        for device, part in regions.items()
    ]
    return jax.make_array_from_single_device_arrays(shape, place, arrays)
