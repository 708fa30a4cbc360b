"""Making the wanted leaf of what was read: in its place, of its dtype, and nobody else's."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from stepfold.checkpoint.manifest import Leaf, Region, impl_of, is_key, leaf_of, region
from stepfold.errors import TreeMismatchError


class Reader(Protocol):
    """What reads leaves by name: all of one, or parts of it, into arrays of nobody else's."""

    def whole(self, name: str) -> np.ndarray:
        """Read all of a leaf."""

    def parts(self, name: str, wanted: Sequence[Region]) -> list[np.ndarray]:
        """Read parts of a leaf, no two the same."""


def load(reader: Reader, name: str, saved: Leaf, like: Any) -> Any:
    """Read one leaf as `like` is: its kind, its sharding, its dtype.

    Args:
      reader: what reads it.
      name: its path in the checkpoint.
      saved: how it was saved.
      like: an array, an abstract one, with a sharding or without, or a number.
    """
    if is_key(like):
        numbers = load(reader, name, saved._replace(key=None), _numbers_of(like, saved))
        return jax.random.wrap_key_data(numbers, impl=impl_of(like))
    on_host = not isinstance(like, jax.Array | jax.ShapeDtypeStruct)
    convert = _conversion(name, saved, leaf_of(like), on_host=on_host)
    if on_host:
        array = convert(reader.whole(name))
        return array if isinstance(like, np.ndarray) else type(like)(array.item())
    # What was not committed to a device stays so: a step would compile anew for what is.
    placed = getattr(like, "committed", True)
    return _placed(reader, name, saved, like.sharding if placed else None, convert)


def _numbers_of(like: Any, saved: Leaf) -> Any:
    if isinstance(like, jax.Array):
        return jax.random.key_data(like)
    return jax.ShapeDtypeStruct(saved.shape, jnp.dtype(saved.dtype), sharding=like.sharding)


def _conversion(
    name: str, saved: Leaf, wanted: Leaf, *, on_host: bool
) -> Callable[[np.ndarray], np.ndarray]:
    dtype = jnp.dtype(wanted.dtype)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype and not on_host:
        raise TreeMismatchError(
            f"{name}: wanted {wanted}, which jax makes only with jax_enable_x64; turn it on, or "
            "wish for a narrower dtype with cast=True"
        )

    def convert(array: np.ndarray) -> np.ndarray:
        if array.dtype == dtype:
            return array
        made = array.astype(dtype)
        if jnp.issubdtype(dtype, jnp.integer) and not np.array_equal(made, array):
            raise TreeMismatchError(
                f"{name}: saved {saved}, wanted {wanted}, but not every value fits; "
                "wish for the dtype that was saved"
            )
        return made

    return convert


def _placed(
    reader: Reader,
    name: str,
    saved: Leaf,
    place: Sharding | None,
    convert: Callable[[np.ndarray], np.ndarray],
) -> jax.Array:
    if place is None:
        return jnp.asarray(convert(reader.whole(name)))
    index = place.addressable_devices_indices_map(saved.shape)
    regions: dict[Any, Region] = {
        device: region(slices or (), saved.shape) for device, slices in index.items()
    }
    wanted = list(dict.fromkeys(regions.values()))
    parts = dict(zip(wanted, map(convert, reader.parts(name, wanted)), strict=True))
    # jax may use memory of numpy's as its own, and a step write into it: one device a copy.
    first = {part: device for device, part in reversed(regions.items())}
    arrays = [
        jax.device_put(
            parts[part] if first[part] == device else parts[part].copy(),
            SingleDeviceSharding(device, memory_kind=place.memory_kind),
        )
        for device, part in regions.items()
    ]
    return jax.make_array_from_single_device_arrays(saved.shape, place, arrays)
