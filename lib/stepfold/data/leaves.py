"""The leaves of one column as arrays of numbers in one dtype, and what they are filled up with."""

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
    """Keep one end of what is longer."""
    rows = zip(leaves, lengths, strict=True)
    if truncate == "keep_start":
        return [leaf if n <= length else leaf[:length] for leaf, n in rows]
    return [leaf if n <= length else leaf[n - length :] for leaf, n in rows]


def arrays_of(path: Path, leaves: list[Any], start: int = 0) -> list[Any]:
    """Make arrays of numbers, all of one dtype, of the leaves under one key."""
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
    """Make an array of a leaf, or None where an empty list does not say of what."""
    if type(leaf) is np.ndarray:
        return leaf
    if isinstance(leaf, list | tuple) and not leaf:
        return None
    if type(leaf) is list and type(leaf[0]) is int:
        try:  # twice as fast as numpy, and as strict: it takes nothing but integers that fit
            return np.frombuffer(buffer("i", leaf), np.intc)
        except (TypeError, OverflowError):
            pass
    try:
        array = np.asarray(leaf)
    except ValueError:  # of lists of several lengths
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
    """Concatenate the arrays of examples, and the padding that is among the pieces."""
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
    """Give integers in 32 bits, as jax takes them, if they fit."""
    if array.dtype.kind not in "iu" or array.dtype.itemsize < 8:
        return array
    target = np.dtype(f"{array.dtype.kind}4")
    limits = np.iinfo(target)
    # Seen as unsigned, what is negative is great: one look is enough for most batches.
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
    """Put its example's index beside each part: that of the part itself, where no owners are."""
    return list(enumerate(parts) if owners is None else zip(owners, parts, strict=True))


def pads_of(role: str, pad: Pad, paths: Iterable[Path]) -> dict[Path, Any]:
    """Give each sequence its padding value."""
    names = {name_of(path): path for path in paths}
    values = pad if isinstance(pad, Mapping) else dict.fromkeys(names, pad)
    for name, value in values.items():
        if name not in names:
            raise ConfigError(f"{role}: pad: expected some of {list(names)}, got {name!r}")
        if not isinstance(value, (int, float, np.number, np.bool_)):
            raise ConfigError(f"{role}: pad: expected a number for {name}, got {value!r}")
    return {path: values.get(name, 0) for name, path in names.items()}


def pad_value(path: Path, value: Any, dtype: Any) -> Any:
    """Refuse a value that is another one in the dtype of what it pads."""
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
    """Refuse what is no way to truncate."""
    if truncate not in ("keep_end", "keep_start", None):
        raise ConfigError(
            f"{role}: truncate: expected 'keep_end', 'keep_start' or None, got {truncate!r}"
        )
