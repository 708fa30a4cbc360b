"""Copies of arrays in memory that is kept from one save to the next.

On CPU, numpy reads an array of jax in place. While a save in the background holds such a view, the
array cannot be donated. The next step then gets new memory, which the system clears page by page;
that takes several times as long as a copy. Copying into new memory is as slow, so a save copies the
state into the buffers of an earlier save.
"""

from collections.abc import Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from stepfold.checkpoint.leaves import Region, region

K = TypeVar("K", bound=Hashable)
_ALIGNMENT = 64  # bytes, from which jax uses the memory of numpy without a copy
# One thread does not use all of the bandwidth of the memory: two share the pieces of large arrays.
_PIECE = 4 << 20  # bytes
_SMALL = 1 << 16  # bytes of an array for which a second thread is not worth it


class Layout(NamedTuple):
    """Where the slices of an array are on the devices of this process.

    Attributes:
      first: the first shard of each region.
      devices: the device and the region of each shard.
      recorded: the regions that this process records, as `leaves.shards_of` does.
    """

    first: dict[Region, int]
    devices: list[tuple[Any, Region]]
    recorded: frozenset[Region]


class HostCopy(NamedTuple):
    """A copy of the slices of an array that this process holds, by region."""

    shape: tuple[int, ...]
    sharding: Any
    layout: Layout
    slices: dict[Region, np.ndarray]

    def recorded(self) -> dict[Region, np.ndarray]:
        """Return the slices that this process records."""
        return {part: array for part, array in self.slices.items() if part in self.layout.recorded}


class HostBuffers:
    """Buffers for the arrays of a state, which are as large as the state once it was saved.

    >>> import jax.numpy as jnp
    >>> buffers, array = HostBuffers(), jnp.arange(3)
    >>> copies = buffers.copy({"w": array})
    >>> array.delete()  # as a step does to which it is donated
    >>> as_arrays(copies)["w"]
    Array([0, 1, 2], dtype=int32)
    """

    def __init__(self) -> None:
        self._buffers: dict[Any, np.ndarray] = {}
        self._layouts: dict[Any, Layout | None] = {}

    def copy(self, arrays: Mapping[K, Any]) -> dict[K, HostCopy]:
        """Copy the arrays that are on CPU, so that they can be donated; leave out all others.

        The copies are valid until the next call. They are numpy arrays, since making an array of
        jax takes 0.1 ms. The caller copies arrays on other devices to the host.
        """
        copies, pairs = dict[K, HostCopy](), list[tuple[np.ndarray, np.ndarray]]()
        for name, array in arrays.items():
            layout = self._layout(array) if isinstance(array, jax.Array) else None
            if layout is None:
                continue
            slices, shards = dict[Region, np.ndarray](), array.addressable_shards
            for part, number in layout.first.items():
                view = np.asarray(shards[number].data)
                buffer = self._buffer((name, part), view.nbytes)
                slices[part] = buffer.view(view.dtype).reshape(view.shape)
                pairs.append((buffer, view.reshape(-1).view(np.uint8)))
            copies[name] = HostCopy(array.shape, array.sharding, layout, slices)
        _copy(pairs)
        return copies

    def _layout(self, array: jax.Array) -> Layout | None:
        """Return the layout of an array; None if it is not on CPU."""
        key = array.sharding, array.shape
        if key not in self._layouts:
            layout = None
            devices: Any = array.sharding.device_set
            if all(device.platform == "cpu" for device in devices):
                layout = Layout({}, [], frozenset())
                for number, shard in enumerate(array.addressable_shards):
                    part = region(shard.index, array.shape)
                    layout.first.setdefault(part, number)
                    layout.devices.append((shard.device, part))
                    if shard.replica_id == 0:
                        layout = layout._replace(recorded=layout.recorded | {part})
            self._layouts[key] = layout
        return self._layouts[key]

    def _buffer(self, key: Any, size: int) -> np.ndarray:
        """Return the buffer of a key."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.size != size:
            buffer = np.empty(size + _ALIGNMENT, np.uint8)
            start = -buffer.ctypes.data % _ALIGNMENT
            buffer = self._buffers[key] = buffer[start : start + size]
        return buffer


def as_arrays(copies: Mapping[K, HostCopy]) -> dict[K, jax.Array]:
    """Return arrays of jax with the shardings of the originals, which read the copies in place."""
    shards = [(copy.slices[part], device) for copy in copies.values()
              for device, part in copy.layout.devices]  # fmt: skip
    if not shards:
        return {}
    on_devices = iter(jax.device_put(*map(list, zip(*shards, strict=True))))  # all at once
    return {
        name: jax.make_array_from_single_device_arrays(
            copy.shape, copy.sharding, [next(on_devices) for _ in copy.layout.devices]
        )
        for name, copy in copies.items()
    }


def _copy(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copy the second array of each pair to the first one; all are of bytes."""
    small: list[tuple[np.ndarray, np.ndarray]] = []
    large: list[tuple[np.ndarray, np.ndarray]] = []
    for target, source in pairs:
        for start in range(0, target.size, _PIECE):
            part = slice(start, start + _PIECE)
            (small if target.size < _SMALL else large).append((target[part], source[part]))

    def copy_large() -> None:
        with suppress(IndexError):  # the other thread has taken the last one
            while large:
                np.copyto(*large.pop())

    with ThreadPoolExecutor(1, "stepfold-copy") as thread:
        other = thread.submit(copy_large) if large else None
        for each in small:
            np.copyto(*each)
        copy_large()
        if other is not None:
            other.result()
