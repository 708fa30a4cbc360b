"""Pass trees to another process in shared memory, as a pickle and the bytes of its arrays.

An array is written once, and read without a copy.
"""

import io
import marshal
import mmap
import os
import pickle
import sys
import tempfile
from importlib.util import find_spec
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import numpy as np

from stepfold.errors import ConfigError

Array = np.ndarray[Any, Any]

_ALIGNMENT = 64  # jax on CPU uses memory with this alignment without a copy
_PAGE = 4096


class SharedMemory:
    """Anonymous memory that processes share by its file descriptor, and that grows on demand.

    It has no name, so that nothing is left behind if all of its processes are killed.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = _allocate() if fd is None else fd
        self._map: mmap.mmap | None = None

    def view(self, size: int) -> Array:
        """Return the first bytes as an array, which keeps the memory alive."""
        if self._map is None or len(self._map) < size:
            # It never shrinks, since another process that reads beyond the end would be killed.
            if os.fstat(self.fd).st_size < size:
                os.ftruncate(self.fd, -(-size // _PAGE) * _PAGE)
            self._map = mmap.mmap(self.fd, os.fstat(self.fd).st_size)
        return np.frombuffer(self._map, np.uint8, size)

    def private_view(self) -> Array:
        """Return all bytes as an array whose changes no other process sees."""
        return np.frombuffer(mmap.mmap(self.fd, 0, access=mmap.ACCESS_COPY), np.uint8)

    def close(self) -> None:
        """Close the file descriptor. Arrays of the memory stay valid."""
        os.close(self.fd)


def _allocate() -> int:
    if sys.platform == "linux":
        return os.memfd_create("stepfold", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # has no name either
        return os.dup(file.fileno())


class Pickled(NamedTuple):
    """A pickled value, and the bytes of its arrays."""

    data: bytes
    buffers: list[Any]

    def write(self, memory: SharedMemory) -> None:
        """Write the value to the start of some memory."""
        parts = [np.frombuffer(part, np.uint8) for part in (self.data, *self.buffers)]
        header = np.array([len(parts), *(part.nbytes for part in parts)], np.int64).view(np.uint8)
        ranges = _ranges(header)
        target = memory.view(ranges[-1][1])
        target[: header.nbytes] = header
        for part, (start, stop) in zip(parts, ranges, strict=True):
            target[start:stop] = part


def read(memory: SharedMemory) -> Array:
    """Return the bytes that `Pickled.write` has written."""
    (count,) = memory.view(8).view(np.int64).tolist()
    return memory.view(_ranges(memory.view(8 * (1 + count)))[-1][1])


def load(root: Array) -> Any:
    """Return the value in the bytes of `read`; its arrays are views of them."""
    (start, stop), *ranges = _ranges(root)
    buffers = [root[first:last] for first, last in ranges]
    return pickle.loads(root[start:stop].tobytes(), buffers=buffers)


def _ranges(root: Array) -> list[tuple[int, int]]:
    """Return where the pickle and each array are; the bytes begin with their count and sizes."""
    (count,) = root[:8].view(np.int64).tolist()
    ranges, start = [], _aligned(8 * (1 + count))
    for size in root[8 : 8 * (1 + count)].view(np.int64).tolist():
        ranges.append((start, start + size))
        start += _aligned(size)
    return ranges


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def dump(value: Any) -> Pickled:
    """Pickle a value, functions and classes that other processes cannot import included.

    These are lambdas, closures, and what a script or a notebook defines. They need cloudpickle.

    Raises:
      ConfigError: if cloudpickle is needed, and not installed.
    """
    try:
        return _dump(_ByReference, value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if find_spec("cloudpickle") is None:
            raise ConfigError(
                "workers: expected batches that pickle can send to other processes, got some with "
                f"what only cloudpickle can send: {error}; run pip install 'stepfold[workers]', or "
                "define all functions and classes of the batches at the top level of a module that "
                "is imported"
            ) from error
        return _dump(_by_value(), value)


def _dump(pickler: Any, value: Any) -> Pickled:
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    pickler(file, 5, buffer_callback=buffers.append).dump(value)
    return Pickled(file.getvalue(), [buffer.raw() for buffer in buffers])


class _ByReference(pickle.Pickler):
    """Pickle functions and classes by their names, and refuse those of `__main__`."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType | type) and value.__module__ == "__main__":
            raise pickle.PicklingError(f"{value.__qualname__} of the script")
        return _reduce(value)


def _by_value() -> Any:
    import cloudpickle

    class ByValue(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, CodeType):  # cloudpickle drops the file, which tracebacks show
                return marshal.loads, (marshal.dumps(value),)
            reduced = _reduce(value)
            return super().reducer_override(value) if reduced is NotImplemented else reduced

    return ByValue


def _reduce(value: Any) -> Any:
    """Pickle an array as a reference to its bytes, or to its file if `np.memmap` opened it."""
    if type(value) is not np.ndarray or value.dtype.hasobject or not value.size:
        return NotImplemented
    file = _find_file(value)
    if file is not None:
        offset = file.offset + value.ctypes.data - file.ctypes.data
        return _map_file, (file.filename, value.dtype, value.shape, offset)
    order: Any = "F" if value.flags.fnc else "C"
    # As bytes, since datetime64 and bfloat16 have no buffer. Only a strided array is copied.
    data = pickle.PickleBuffer(value.ravel(order).view(np.uint8).data)
    return _make_array, (data, value.dtype, value.shape, order, value.flags.writeable)


def _find_file(array: Any) -> Any:
    """Return the mapped file that an array is a contiguous part of, or None."""
    base = array if array.flags.c_contiguous else None
    while isinstance(base, np.ndarray):
        # With mode "c", the array may differ from its file.
        if isinstance(base, np.memmap) and base.filename and base.mode != "c":
            return base
        base = base.base
    return None


def _map_file(filename: Any, dtype: Any, shape: Any, offset: int) -> Any:
    return np.memmap(filename, dtype, "r", offset, shape).view(np.ndarray)


def _make_array(data: Any, dtype: Any, shape: Any, order: Any, is_writeable: bool) -> Any:
    array = np.asarray(data).view(dtype).reshape(shape, order=order)
    if not is_writeable:
        array.flags.writeable = False
    return array
