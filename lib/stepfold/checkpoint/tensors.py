"""Read and write a safetensors file: an 8-byte length, a JSON header, and the bytes of the arrays.

Files are written array by array, because the writer of the safetensors package needs the whole file
in memory: 1.0 GB in ten sharded arrays took 1.0 GB more with it, and 0.3 GB this way. The package's
reader validates files before they are published and before they are read. Only the bytes are read
here, because that reader returns no float8 for numpy.
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
    """The header entry of an array, without its offset."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * int(self.dtype.itemsize)


def require_safetensors() -> Any:
    """Import safetensors, or raise a `ConfigError` that says how to install it."""
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
    """Write and sync a new file, holding one array at a time, and validate it.

    The file must not exist. `arrays` yields host arrays in the order of `specs`; each is requested
    after the one before is written.
    """
    header = json.dumps(_header(specs, metadata), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)  # aligns the arrays for readers that memory-map the file
    with file.open("xb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        for array in arrays:
            out.write(_bytes_of(array).data)
            del array  # free it before the next one is fetched
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
    """Return the bytes in C order and little-endian, the only layout of the format."""
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8)


def check_tensors(file: Path) -> None:
    """Validate the header, and that it accounts for every byte, with the safetensors package."""
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
    """Memory-map a file, so that only the bytes in use are read from disk.

    Returns views of the file by name. Copy whatever outlives the file. Raises `CheckpointError` if
    the file is unreadable or incomplete, or holds a dtype that jax does not have.
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
