"""A safetensors file: eight bytes of length, a header in JSON, and the bytes of named arrays.

Files are written here array by array, since the package's own writer wants all of a file in memory
at once: 1.0 GB in ten sharded arrays took 1.0 GB more with it, and 0.3 GB so. They are judged by
the package's reader, before they are published and before they are read; only the bytes are taken
here, because that reader gives numpy no float8.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from stepfold.errors import CheckpointError, ConfigError

CODES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
_DTYPES = {code: jnp.dtype(name) for name, code in CODES.items()}


class Spec(NamedTuple):
    """What the header says of an array, besides where it is."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def size(self) -> int:
        """Count the bytes."""
        return int(np.prod(self.shape, dtype=object)) * int(self.dtype.itemsize)


def require_safetensors() -> Any:
    """Import the package, or say how to install it.

    Raises:
      ConfigError: if it is not installed.
    """
    try:
        import safetensors
    except ImportError as error:
        raise ConfigError(
            "safetensors files need the package of that name, which is not installed: "
            'pip install "stepfold[safetensors]"'
        ) from error
    return safetensors


def write_tensors(
    file: Path,
    specs: Mapping[str, Spec],
    arrays: Iterable[np.ndarray[Any, Any]],
    metadata: Mapping[str, str],
) -> None:
    """Write a new file, holding one array at a time, and see it safe on the disk.

    Args:
      file: where to; nothing may be there.
      specs: the arrays by name, in the order in which they come.
      arrays: the arrays, on the host; each is asked for when the one before is written.
      metadata: what the header says besides.

    Raises:
      OSError: if the disk does not take it.
      CheckpointError: if the package cannot read what was written.
    """
    header = json.dumps(_header(specs, metadata), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)  # so that the arrays are aligned for who maps them
    with file.open("xb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        for array in arrays:
            out.write(_bytes_of(array).data)
            del array  # not to hold it while the next one is fetched
        out.flush()
        os.fsync(out.fileno())
    check_tensors(file)


def _header(specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> dict[str, Any]:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, spec in specs.items():
        entries[name] = {
            "dtype": CODES[spec.dtype.name],
            "shape": list(spec.shape),
            "data_offsets": [start, start + spec.size],
        }
        start += spec.size
    return entries


def _bytes_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Give the bytes in C order and little-endian, which is all that the format knows."""
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8)


def check_tensors(file: Path) -> None:
    """Have the package check the header, and that it accounts for every byte of the file.

    Raises:
      CheckpointError: if the file cannot be read, or is no whole safetensors file.
    """
    safetensors = require_safetensors()
    if file.is_dir():
        raise CheckpointError(f"{file}: expected a safetensors file, got a directory")
    try:
        with safetensors.safe_open(file, framework="numpy"):
            pass
    except safetensors.SafetensorError as error:
        raise CheckpointError(
            f"{file}: expected a whole safetensors file, got one of {file.stat().st_size} bytes of "
            f"which the safetensors package says: {error}; export or copy it again"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error


def read_tensors(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Map a file into memory: of what is looked at, the disk reads only what is used.

    Args:
      file: a safetensors file.

    Returns:
      Views of the file by name; what is kept of them has to be copied.

    Raises:
      CheckpointError: if the file cannot be read, is no whole safetensors file, or holds a dtype
        that jax has not.
    """
    check_tensors(file)
    raw = np.asarray(np.memmap(file, np.uint8, mode="r"))
    start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    header = json.loads(raw[8:start].tobytes())
    header.pop("__metadata__", None)
    return {name: _view(file, name, entry, raw[start:]) for name, entry in header.items()}


def _view(
    file: Path, name: str, entry: Mapping[str, Any], data: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    if entry["dtype"] not in _DTYPES:
        raise CheckpointError(
            f"{file}: {name}: expected a dtype of {', '.join(_DTYPES)}, got {entry['dtype']}; "
            "convert it with what wrote the file"
        )
    first, last = entry["data_offsets"]
    return data[first:last].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
