"""Copies of arrays in memory that is kept from one save to the next.

On CPU, numpy reads an array of jax in place. As long as that view is held, as by a save in the
background, the array cannot be donated: the next step then gets new memory, and the system clears
it page by page, which takes several times as long as a copy. A copy into new memory takes as long.
So a save copies the state into buffers that an earlier save has used.
"""

from collections.abc import Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import numpy as np

from stepfold.checkpoint.leaves import Region, region

K = TypeVar("K", bound=Hashable)
_ALIGNMENT = 64  # bytes, from which jax uses the memory of numpy without a copy
_THREADS = 2  # one does not use all of the bandwidth of the memory


class HostBuffers:
    """Buffers for the arrays of a state, which are as large as the state once it was saved.

    >>> import jax.numpy as jnp
    >>> buffers, array = HostBuffers(), jnp.arange(3)
    >>> kept = buffers.keep({"w": array})
    >>> array.delete()  # as a step does to which it is donated
    >>> kept["w"]
    Array([0, 1, 2], dtype=int32)
    """

    def __init__(self) -> None:
        self._buffers: dict[Any, np.ndarray] = {}

    def keep(self, arrays: Mapping[K, Any]) -> dict[K, Any]:
        """Return the arrays, with those on CPU copied, so that the originals can be donated.

        The copies are valid until the next call. Arrays on other devices are copied to the host by
        those who read them.
        """
        kept, copies = dict(arrays), list[tuple[np.ndarray, np.ndarray]]()
        parts: dict[K, dict[Region, np.ndarray]] = {}
        for name, array in arrays.items():
            if not isinstance(array, jax.Array) or not _is_on_cpu(array):
                continue
            parts[name] = {}
            for shard in array.addressable_shards:
                part = region(shard.index, array.shape)
                if part not in parts[name]:
                    view = np.asarray(shard.data)
                    parts[name][part] = self._buffer((name, part), view)
                    copies.append((parts[name][part], view))
        with ThreadPoolExecutor(_THREADS, "stepfold-copy") as threads:
            for _ in threads.map(lambda pair: np.copyto(*pair), copies):
                pass
        for name, by_region in parts.items():
            array = arrays[name]
            shards = [
                jax.device_put(by_region[region(shard.index, array.shape)], shard.data.sharding)
                for shard in array.addressable_shards
            ]
            kept[name] = jax.make_array_from_single_device_arrays(
                array.shape, array.sharding, shards
            )
        return kept

    def _buffer(self, key: Any, like: np.ndarray) -> np.ndarray:
        """Return the buffer of a key, as an array like another one."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.size != like.nbytes:
            buffer = np.empty(like.nbytes + _ALIGNMENT, np.uint8)
            start = -buffer.ctypes.data % _ALIGNMENT
            buffer = self._buffers[key] = buffer[start : start + like.nbytes]
        return buffer.view(like.dtype).reshape(like.shape)


def _is_on_cpu(array: jax.Array) -> bool:
    devices: Any = array.sharding.device_set
    return all(device.platform == "cpu" for device in devices)
