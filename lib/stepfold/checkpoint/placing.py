"""Making the wanted leaf of what was read: in its place, of its dtype, and nobody else's."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from stepfold.checkpoint.leaves import Leaf, Region, impl_of, is_key, leaf_of, region
from stepfold.errors import ShardingError, TreeMismatchError


def regions_of(name: str, saved: Leaf, like: Any) -> list[Region]:
    """List the parts of a leaf that are needed here, each once.

    Raises:
      ShardingError: if the wanted sharding does not fit its shape.
    """
    place = _place_of(like)
    if place is None:
        return [region((), saved.shape)]
    return list(dict.fromkeys(_by_device(name, saved, place).values()))


def placed(name: str, saved: Leaf, like: Any, parts: Mapping[Region, np.ndarray]) -> Any:
    """Make a leaf as `like` is: its kind, its sharding, its dtype.

    Args:
      name: its path, for messages.
      saved: how it was saved.
      like: an array, an abstract one, with a sharding or without, or a number.
      parts: what was read, for each of `regions_of`; it is used where it is.

    Raises:
      TreeMismatchError: if a value does not fit the wanted dtype, or jax has none such.
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
    weak = like.weak_type and not array.ndim  # as a Python number is, which a step would know
    return jnp.asarray(array.item()) if weak else jax.device_put(array)


def _place_of(like: Any) -> Sharding | None:
    # What was not committed to a device stays so: a step would compile anew for what is.
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
    # jax may use memory of numpy's as its own, and a step write into it: one device a copy.
    first = {part: device for device, part in reversed(list(regions.items()))}
    arrays = [
        jax.device_put(
            parts[part] if first[part] == device else parts[part].copy(),
            SingleDeviceSharding(device, memory_kind=place.memory_kind),
        )
        for device, part in regions.items()
    ]
    return jax.make_array_from_single_device_arrays(shape, place, arrays)
