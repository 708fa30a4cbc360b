"""Convert the leaves of a column to arrays of one dtype, and validate padding values."""

from array import array as buffer
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from stepfold.data.columns import Path, at, name_of
from stepfold.errors import ConfigError, DataError
from stepfold.tree import spell

Truncate = Literal["keep_end", "keep_start"] | None
Pad = float | Mapping[str, float]


def shortened(leaves: list[Any], lengths: list[int], length: int, truncate: Truncate) -> list[Any]:
    """Truncate leaves longer than `length`."""
    rows = zip(leaves, lengths, strict=True)
    if truncate == "keep_start":
        return [leaf if n <= length else leaf[:length] for leaf, n in rows]
    return [leaf if n <= length else leaf[n - length :] for leaf, n in rows]


def arrays_of(path: Path, leaves: list[Any], start: int = 0) -> list[Any]:
    """Convert the leaves of one column to numeric arrays of one dtype."""
    arrays = leaves
    if set(map(type, leaves)) != {np.ndarray}:
        arrays = [_array(path, i, leaf) for i, leaf in enumerate(leaves, start)]
        known = next((array for array in arrays if array is not None), None)
        if known is None:
            raise DataError(
                f"{at(start, path)}: expected a number somewhere, got only empty lists, which have "
                "no dtype; give empty arrays"
            )
        empty = np.empty((0, *known.shape[1:]), known.dtype)
        arrays = [empty if array is None else array for array in arrays]
    dtypes = [array.dtype for array in arrays]
    if dtypes.count(dtypes[0]) == len(dtypes) and _is_number(dtypes[0]):
        return arrays
    for index, (array, leaf) in enumerate(zip(arrays, leaves, strict=True), start):
        if not _is_number(array.dtype):
            raise _no_number(path, index, leaf)
    arrays = [narrowed(path, array, [array], [i]) for i, array in enumerate(arrays, start)]
    for index, array in enumerate(arrays, start):
        if array.dtype != arrays[0].dtype:
            raise DataError(
                f"{at(index, path)}: expected the dtype {arrays[0].dtype} of example {start}, got "
                f"{array.dtype}; a dtype that changes makes a step compile again: cast to one"
            )
    return arrays


def _array(path: Path, index: int, leaf: Any) -> Any:
    """Convert a leaf to an array, or to None if it is an empty list, which has no dtype."""
    if type(leaf) is np.ndarray:
        return leaf
    if isinstance(leaf, list | tuple) and not leaf:
        return None
    if type(leaf) is list and type(leaf[0]) is int:
        try:  # twice as fast as np.asarray, and as strict: it only accepts integers that fit
            return np.frombuffer(buffer("i", leaf), np.intc)
        except (TypeError, OverflowError):
            pass
    try:
        array = np.asarray(leaf)
    except ValueError:  # ragged lists
        raise _no_number(path, index, leaf) from None
    if not _is_number(array.dtype):
        raise _no_number(path, index, leaf)
    python = array.dtype == np.float64 and not hasattr(leaf, "dtype")
    return array.astype(np.float32) if python else array


def _is_number(dtype: Any) -> bool:
    return dtype.kind not in "OUSMmT" and dtype.type is not np.void


def _no_number(path: Path, index: int, leaf: Any) -> DataError:
    return DataError(
        f"{at(index, path)}: expected numbers in one shape, got {spell(leaf)}; encode it as "
        "integers or floats, or leave the key out"
    )


def joined(
    path: Path,
    pieces: list[Any],
    shape: Path,
    arrays: list[Any],
    owners: Iterable[int] | None = None,
) -> Any:
    """Concatenate `pieces`, the arrays of the examples and their padding."""
    batch = np.empty(shape, arrays[0].dtype)
    try:
        np.concatenate(pieces, out=batch)
    except ValueError:
        owned, rest = _owned(arrays, owners), shape[1:]
        index, other = next((i, x) for i, x in owned if x.ndim == 0 or x.shape[1:] != rest)
        raise DataError(
            f"{at(index, path)}: expected the shape ({', '.join(map(str, ('n', *rest)))}) as "
            f"example {owned[0][0]} has, got {other.shape}; only the first axis may differ"
        ) from None
    return narrowed(path, batch, arrays, owners)


def narrowed(
    path: Path, array: Any, parts: Iterable[Any], owners: Iterable[int] | None = None
) -> Any:
    """Cast 64-bit integers to 32 bits, as JAX does by default; raise if a value does not fit."""
    if array.dtype.kind not in "iu" or array.dtype.itemsize < 8:
        return array
    target = np.dtype(f"{array.dtype.kind}4")
    limits = np.iinfo(target)
    # Negative integers are large when viewed as unsigned: one pass is enough for most batches.
    suspect = array.size and array.view(f"u{array.itemsize}").max() > limits.max
    if suspect and (array.min() < limits.min or array.max() > limits.max):
        for index, part in _owned(parts, owners):
            if wide := part[(part < limits.min) | (part > limits.max)].tolist():
                raise DataError(
                    f"{at(index, path)}: expected integers that fit {target}, which is what jax "
                    f"takes, got {wide[0]}; make them smaller, or floats"
                )
    return array.astype(target)


def _owned(parts: Iterable[Any], owners: Iterable[int] | None) -> list[tuple[int, Any]]:
    """Pair each part with the index of its example, by default its own index."""
    return list(enumerate(parts) if owners is None else zip(owners, parts, strict=True))


def pads_of(role: str, pad: Pad, paths: Iterable[Path]) -> dict[Path, Any]:
    """Return the padding value of each sequence."""
    names = {name_of(path): path for path in paths}
    values = pad if isinstance(pad, Mapping) else dict.fromkeys(names, pad)
    for name, value in values.items():
        if name not in names:
            raise ConfigError(f"{role}: pad: expected some of {list(names)}, got {name!r}")
        if not isinstance(value, (int, float, np.number, np.bool_)):
            raise ConfigError(f"{role}: pad: expected a number for {name}, got {value!r}")
    return {path: values.get(name, 0) for name, path in names.items()}


def pad_value(path: Path, value: Any, dtype: Any) -> Any:
    """Return a padding value; raise if the dtype of the sequence cannot represent it."""
    if value != 0 and dtype.kind in "iub":
        if dtype.kind != "b" and dtype.itemsize == 8:
            dtype = np.dtype(f"{dtype.kind}4")
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        if not low <= value <= high or int(value) != value:
            raise ConfigError(
                f"pad: expected a value of {dtype} for {name_of(path)}, got {value!r}; give pad= a "
                "dict of values by key"
            )
    return value


def check_truncate(role: str, truncate: Any) -> None:
    """Raise if `truncate` is invalid."""
    if truncate not in ("keep_end", "keep_start", None):
        raise ConfigError(
            f"{role}: truncate: expected 'keep_end', 'keep_start' or None, got {truncate!r}"
        )
