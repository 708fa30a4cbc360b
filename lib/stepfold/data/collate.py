"""Collate examples into a batch: pad sequences to one length and stack the other leaves.

Examples become columns, lists of leaves by path. Sequences are chosen by rank or by name, never by
whether lengths differ within a batch. So every batch has the same structure, shapes and dtypes, and
the step compiles once. `pack` uses the same columns, dtypes and padding values.
"""

from array import array as c_array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from stepfold.core.validation import read_choice, read_integer
from stepfold.data.dtypes import dtype_in_jax, find_wrapped, refuse_keys, refuse_masked
from stepfold.errors import DataError, refuse
from stepfold.tree import describe_value, is_numeric, nested

KeyPath = tuple[Any, ...]
Truncate = Literal["keep_end", "keep_start"] | None
Pad = float | Mapping[str, float]


def collate(
    examples: Iterable[Any],
    *,
    length: int,
    truncate: Truncate = "keep_end",
    side: Literal["right", "left"] = "right",
    pad: Pad = 0,
    keys: str | Sequence[str] | None = None,
) -> dict[Any, Any]:
    """Pad sequences to one length, stack other leaves, and add a `mask`.

    Without `keys`, every leaf with at least one axis is a sequence. It is truncated and padded
    along its first axis; the other axes (the features of a frame, say) must have the same sizes in
    all examples. Scalars are stacked. With `keys`, only the named leaves are padded, and all others
    are stacked and must have one shape: `keys="tokens"` stacks an image next to the tokens. All
    sequences of an example share one mask, so they have the same length. The mask is bool, and
    false at padding.

    Dtypes are those of `batches`; an integer that jax would wrap around is an error. An empty
    sequence becomes a row of padding. Leaves that are jax arrays are stacked by jax, and keep the
    dtypes of jax, so this works under `jit` and `vmap`. The others are stacked by numpy.

    Args:
      examples: dicts with the same keys, which may be nested, or bare sequences, which get the key
        `tokens`. A dict of columns works too, such as the batches of Hugging Face and tf.data.
      length: the length of every row.
      truncate: which end of a longer sequence to keep, "keep_end" or "keep_start"; with None, a
        longer sequence is an error.
      side: the side of the padding, "right" or "left".
      pad: the padding value, or values by key, with 0 for the other keys. Nested keys are written
        as `text/ids`.
      keys: the keys of the leaves to pad, or of dicts of them. With `()` nothing is padded, and no
        mask is added.

    Returns:
      A dict of arrays, nested like the examples, with the key `mask` added.

    Raises:
      ConfigError: if an argument is invalid or names a missing key.
      DataError: if the examples cannot be batched; the message names the example and the key.

    >>> import stepfold as sf
    >>> examples = [{"ids": [5, 6, 7], "labels": [6, 7, 8], "source": 0},
    ...             {"ids": [9], "labels": [1], "source": 2}]
    >>> batch = sf.collate(examples, length=4, pad={"labels": -100})
    >>> batch["labels"].tolist(), batch["source"].tolist()
    ([[6, 7, 8, -100], [1, -100, -100, -100]], [0, 2])
    >>> batch["mask"].sum(), batch["ids"].dtype.name
    (np.int64(4), 'int64')
    >>> sf.collate([[1, 2, 3], [4]], length=2, side="left")["tokens"].tolist()
    [[2, 3], [0, 4]]

    In a grain pipeline, pass it as `dataset.batch(64, batch_fn=to_batch)`:

    >>> from functools import partial
    >>> to_batch = partial(sf.collate, length=4, truncate="keep_start")
    >>> [batch["tokens"].shape for batch in map(to_batch, [[[1], [2, 3]], [[4, 5], [6]]])]
    [(2, 4), (2, 4)]
    """
    length = read_integer("collate: length", length, 1)
    if length >= 1 << 31:
        refuse("collate: length", "at most 2**31 - 1", f"{length}")
    read_choice("collate: side", side, ("right", "left"))
    check_truncate("collate", truncate)
    columns = columns_of(examples, reserved=("mask",))
    padded = _padded_paths(columns, keys)
    pads = pad_values("collate", pad, padded)
    lengths = lengths_of({path: columns[path] for path in padded})
    is_longer = bool(lengths) and max(lengths) > length
    kept = [n if n < length else length for n in lengths] if is_longer else lengths
    if truncate is None:
        check_longest(lengths, length)
    batch: dict[KeyPath, Any] = {}
    for path, leaves in columns.items():
        in_jax = _are_in_jax(leaves)
        convert = _to_jax_arrays if in_jax else to_arrays
        if path not in pads:
            batch[path] = _stack(path, convert(path, leaves), jnp if in_jax else np)
            continue
        if is_longer:
            leaves = _truncate(leaves, lengths, length, truncate)
        arrays = convert(path, leaves)
        value = check_pad(path, pads[path], arrays[0].dtype)
        pad_rows = _pad_in_jax if in_jax else _pad
        batch[path] = pad_rows(path, arrays, kept, length, side, value)
    if padded:
        batch["mask",] = _mask(kept, length, side)
    return nested(batch)


def check_truncate(role: str, truncate: Any) -> None:
    """Raise if `truncate` is invalid."""
    if truncate not in ("keep_end", "keep_start", None):
        refuse(f"{role}: truncate", "'keep_end', 'keep_start' or None", repr(truncate))


def check_longest(lengths: list[int], length: int, start: int = 0, advice: str = "") -> None:
    """Raise if a sequence is longer than a row."""
    for index, n in enumerate(lengths, start):
        if n > length:
            choices = f"give {advice}truncate='keep_end' or 'keep_start', or a greater length"
            expected = f"at most length={length} tokens"
            refuse(locate(index), expected, f"{n}", choices, kind=DataError)


def _padded_paths(
    columns: Mapping[KeyPath, list[Any]], keys: str | Sequence[str] | None
) -> list[KeyPath]:
    """Choose the leaves to pad, by rank or by name."""
    if keys is None:
        padded = [path for path, leaves in columns.items() if _is_sequence(leaves[0])]
        if not padded:
            got, advice = f"only scalars under {names_of(columns)}", "give keys=() to stack them"
            refuse("examples", "a sequence to pad", got, advice, kind=DataError)
        return padded
    names = {keys} if isinstance(keys, str) else keys
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        refuse("collate: keys", "names of keys", repr(keys))
    names = set(names)
    prefixes = {path: {name_of(path[:n]) for n in range(1, len(path) + 1)} for path in columns}
    for name in sorted(names - set().union(*prefixes.values())):
        refuse("collate: keys", f"some of {names_of(columns)}", repr(name))
    return [path for path in columns if prefixes[path] & names]


def _truncate(leaves: list[Any], lengths: list[int], length: int, truncate: Truncate) -> list[Any]:
    pairs = zip(leaves, lengths, strict=True)
    if truncate == "keep_start":
        return [leaf if n <= length else leaf[:length] for leaf, n in pairs]
    return [leaf if n <= length else leaf[n - length :] for leaf, n in pairs]


def _pad(
    path: KeyPath, arrays: list[Any], lengths: list[int], length: int, side: str, value: Any
) -> Any:
    """Pad rows with one concatenation, which is faster than an assignment per row."""
    rest = arrays[0].shape[1:]
    padding = np.empty((length, *rest), arrays[0].dtype)
    padding.fill(value)  # three times as fast as np.full
    fills = [padding[n:] for n in lengths]
    pieces: list[Any] = [None] * (2 * len(arrays))
    pieces[side == "left" :: 2], pieces[side != "left" :: 2] = arrays, fills
    batch = concatenate(path, pieces, len(arrays) * length, arrays)
    return batch.reshape(len(arrays), length, *rest)


def _pad_in_jax(
    path: KeyPath, arrays: list[Any], lengths: list[int], length: int, side: str, value: Any
) -> Any:
    """Pad each row, which outside of `jit` compiles one program for each length."""
    _check_shapes(path, arrays)
    rows = []
    for array, n in zip(arrays, lengths, strict=True):
        room = (0, length - n) if side == "right" else (length - n, 0)
        widths = [room, *[(0, 0)] * (array.ndim - 1)]
        rows.append(jnp.pad(array, widths, constant_values=value))
    return jnp.stack(rows)


def _mask(lengths: list[int], length: int, side: str) -> Any:
    """Gather the mask from windows of a step function, which is twice as fast as comparing."""
    edge = np.zeros(2 * length, np.bool_)
    edge[slice(length) if side == "right" else slice(length, None)] = True
    windows: Any = np.ndarray((length + 1, length), np.bool_, edge, strides=(1, 1))
    ends = np.array(lengths)
    return windows[length - ends if side == "right" else ends]


def _stack(path: KeyPath, arrays: list[Any], xp: Any) -> Any:
    try:
        batch = xp.stack(arrays)
    except ValueError:
        index = next(i for i, array in enumerate(arrays) if array.shape != arrays[0].shape)
        expected, got = f"the shape {arrays[0].shape} of example 0", f"{arrays[index].shape}"
        advice = "name the keys to pad in keys=, and give the rest one shape"
        refuse(locate(index, path), expected, got, advice, kind=DataError)
    if xp is np:
        _check_fit(path, batch, arrays)
    return batch


# Columns


def columns_of(
    examples: Iterable[Any], start: int = 0, reserved: Sequence[str] = ()
) -> dict[KeyPath, list[Any]]:
    """Convert examples to lists of leaves by path; `start` is the index of the first example."""
    columns: dict[KeyPath, list[Any]] = {}
    if isinstance(examples, Mapping):
        _split(examples, (), columns)
        sizes = {name_of(path): len(column) for path, column in columns.items()}
        if len(set(sizes.values())) > 1:
            refuse("examples", "columns of one length", f"{sizes}", kind=DataError)
    else:
        rows = _to_list(examples, "")
        if rows and isinstance(rows[0], Mapping):
            _transpose(rows, (), start, columns)
        elif rows:
            columns["tokens",] = rows
    if not columns or not all(columns.values()):
        refuse("examples", "at least one with at least one key", "none", kind=DataError)
    for name in reserved:
        if any(path[0] == name for path in columns):
            raise DataError(
                f"examples: the key {name!r} is reserved for an added column; rename yours"
            )
    return columns


def _split(examples: Mapping[Any, Any], path: KeyPath, columns: dict[KeyPath, list[Any]]) -> None:
    """Add the columns of a dict of columns."""
    for name, column in examples.items():
        if isinstance(column, Mapping):
            _split(column, (*path, name), columns)
        else:  # a ragged tensor has `to_list`
            values = column.to_list() if hasattr(column, "to_list") else column
            columns[*path, name] = _to_list(values, f" under {name_of((*path, name))!r}")


def _to_list(examples: Any, where: str) -> list[Any]:
    if not (hasattr(type(examples), "__iter__") or hasattr(type(examples), "__getitem__")):
        got, advice = f"{describe_value(examples)}{where}", "put a single example in a list"
        refuse("examples", "a list of them, or a dict of columns", got, advice, kind=DataError)
    return list(examples)


def _transpose(
    rows: list[Any], path: KeyPath, start: int, columns: dict[KeyPath, list[Any]]
) -> None:
    """Add the columns of a list of dicts."""
    first = rows[0]
    if not isinstance(first, Mapping):
        columns[path] = rows
        return
    try:
        leaves = {name: [row[name] for row in rows] for name in first}
        is_complete = sum(map(len, rows)) == len(rows) * len(first)
    except (KeyError, TypeError, IndexError):
        is_complete = False
    if not is_complete:
        raise _other_keys(rows, path, start)
    for name, column in leaves.items():
        _transpose(column, (*path, name), start, columns)


def _other_keys(rows: list[Any], path: KeyPath, start: int) -> DataError:
    first = rows[0]
    index, row = next(
        (index, row)
        for index, row in enumerate(rows, start)
        if not isinstance(row, Mapping) or row.keys() != first.keys()
    )
    if not isinstance(row, Mapping):
        what = f"expected a dict with the keys {list(first)}, got {describe_value(row)}"
    elif missing := [name for name in first if name not in row]:
        path, what = (*path, missing[0]), f"missing, but example {start} has it"
    else:
        extra = next(name for name in row if name not in first)
        path, what = (*path, extra), f"unexpected, for example {start} lacks it"
    return DataError(f"{locate(index, path)}: {what}; give every example the same keys")


def _is_sequence(leaf: Any) -> bool:
    """Return whether a leaf has an axis, without converting it to an array."""
    rank = getattr(leaf, "ndim", None)
    if rank is None:
        return hasattr(leaf, "__len__") and not isinstance(leaf, str | bytes | Mapping)
    return bool(rank)


def lengths_of(columns: Mapping[KeyPath, list[Any]], start: int = 0) -> list[int]:
    """Return the length of every example, which all its sequences must share."""
    lengths: list[int] = []
    for path, leaves in columns.items():
        try:
            own = list(map(len, leaves))
            is_valid = {str, bytes, dict}.isdisjoint(map(type, leaves))  # these have a length too
        except TypeError:
            is_valid = False
        if not is_valid:
            index = next(i for i, leaf in enumerate(leaves) if not _is_sequence(leaf))
            advice = "give every example one, or (in collate) name in keys= the sequences alone"
            where = locate(index + start, path)
            refuse(where, "a sequence", describe_value(leaves[index]), advice, kind=DataError)
        lengths = lengths or own
        if own != lengths:
            index = next(i for i, n in enumerate(own) if n != lengths[i])
            first = name_of(next(iter(columns)))
            where, expected = locate(index + start, path), f"the length {lengths[index]} of {first}"
            advice = (
                "all sequences of an example share one mask: make them as long, or (in collate) "
                "name in keys= the sequences alone"
            )
            refuse(where, expected, f"{own[index]}", advice, kind=DataError)
    return lengths


def name_of(path: KeyPath) -> str:
    """Format a path as `text/ids`."""
    return "/".join(map(str, path))


def names_of(paths: Iterable[KeyPath]) -> list[str]:
    """Format paths."""
    return [name_of(path) for path in paths]


def locate(index: int, path: KeyPath = ()) -> str:
    """Format the location of an error."""
    return f"example {index}, {name_of(path)}" if path else f"example {index}"


# Arrays


def to_arrays(path: KeyPath, leaves: list[Any], start: int = 0) -> list[Any]:
    """Convert the leaves of one column to numeric arrays of one dtype."""
    arrays = leaves
    types = set(map(type, leaves))
    if types != {np.ndarray}:
        refuse_masked(name_of(path), types)
        arrays = [_to_array(path, i, leaf) for i, leaf in enumerate(leaves, start)]
        known = next((array for array in arrays if array is not None), None)
        if known is None:
            where, got = locate(start, path), "only empty lists, which have no dtype"
            refuse(where, "a number somewhere", got, "give empty arrays", kind=DataError)
        empty = np.empty((0, *known.shape[1:]), known.dtype)
        arrays = [empty if array is None else array for array in arrays]
    dtypes = [array.dtype for array in arrays]
    if dtypes.count(dtypes[0]) < len(dtypes) or not is_numeric(dtypes[0]):
        _refuse_dtypes(path, leaves, dtypes, start)
    return arrays


def _refuse_dtypes(path: KeyPath, leaves: list[Any], dtypes: list[Any], start: int) -> None:
    for index, dtype in enumerate(dtypes):
        if not is_numeric(dtype):
            _refuse_leaf(path, start + index, leaves[index])
        if dtype != dtypes[0]:
            expected = f"the dtype {dtypes[0]} of example {start}"
            advice = "a dtype that changes makes a step compile again: cast to one"
            refuse(locate(start + index, path), expected, f"{dtype}", advice, kind=DataError)


def _are_in_jax(leaves: list[Any]) -> bool:
    """Whether a leaf is an array of jax, or a list of them, as `jit` makes of a list of numbers."""
    if set(map(type, leaves)) == {np.ndarray}:
        return False
    return any(
        isinstance(each, jax.Array) for each in {type(x): x for x in map(_first, leaves)}.values()
    )


def _first(leaf: Any) -> Any:
    while isinstance(leaf, list | tuple) and leaf:
        leaf = leaf[0]
    return leaf


def _to_jax_arrays(path: KeyPath, leaves: list[Any]) -> list[Any]:
    """Convert the leaves of one column to arrays of one dtype of jax."""
    refuse_masked(name_of(path), set(map(type, leaves)))
    arrays: list[Any] = []
    for index, leaf in enumerate(leaves):
        if not isinstance(_first(leaf), jax.Array):
            array = _to_array(path, index, leaf)
            if array is not None:
                _check_fit(path, array, [array], index)
        else:
            refuse_keys(locate(index, path), [_first(leaf)])
            try:
                array = jnp.asarray(leaf)
                array = jnp.asarray(array, array.dtype)  # not weak, which is another type
            except (ValueError, TypeError):  # ragged lists
                _refuse_leaf(path, index, leaf)
        arrays.append(array)
    known = next(array for array in arrays if isinstance(array, jax.Array))
    for index, array in enumerate(arrays):
        if array is None:
            arrays[index] = jnp.empty((0, *known.shape[1:]), known.dtype)
    _refuse_dtypes(path, leaves, [dtype_in_jax(array.dtype) for array in arrays], 0)
    return arrays


def _to_array(path: KeyPath, index: int, leaf: Any) -> Any:
    """Convert a leaf to an array, or to None if it is an empty list, which has no dtype."""
    if type(leaf) is np.ndarray:
        return leaf
    if isinstance(leaf, list | tuple) and not leaf:
        return None
    if type(leaf) is list and type(leaf[0]) is int:
        try:  # twice as fast as np.asarray, and as strict: it only accepts integers that fit
            return np.frombuffer(c_array("q", leaf), np.int64)
        except (TypeError, OverflowError):
            pass
    try:
        array = np.asarray(leaf)
    except ValueError:  # ragged lists
        _refuse_leaf(path, index, leaf)
    except TypeError:
        refuse_keys(locate(index, path), [leaf])
        raise
    if not is_numeric(array.dtype):
        _refuse_leaf(path, index, leaf)
    return array


def _refuse_leaf(path: KeyPath, index: int, leaf: Any) -> NoReturn:
    got, advice = describe_value(leaf), "encode it as integers or floats, or leave the key out"
    refuse(locate(index, path), "numbers in one shape", got, advice, kind=DataError)


def concatenate(
    path: KeyPath, pieces: list[Any], rows: int, arrays: list[Any], start: int = 0
) -> Any:
    """Concatenate pieces of the arrays of one column, and their padding."""
    batch = np.empty((rows, *arrays[0].shape[1:]), arrays[0].dtype)
    try:
        np.concatenate(pieces, out=batch)
    except ValueError:
        _check_shapes(path, arrays, start)
        raise
    _check_fit(path, batch, arrays, start)
    return batch


def _check_shapes(path: KeyPath, arrays: list[Any], start: int = 0) -> None:
    """Raise if arrays differ in other axes than the first."""
    rest = arrays[0].shape[1:]
    for index, array in enumerate(arrays, start):
        if not array.shape or array.shape[1:] != rest:
            where, advice = locate(index, path), "only the first axis may differ"
            expected = f"the shape ({', '.join(map(str, ('n', *rest)))}) as example {start} has"
            refuse(where, expected, f"{array.shape}", advice, kind=DataError)


def _check_fit(path: KeyPath, batch: Any, arrays: list[Any], start: int = 0) -> None:
    """Raise if jax would wrap an integer around; name the example that has it."""
    if find_wrapped(batch) is None:
        return
    for index, array in enumerate(arrays, start):
        if (wrapped := find_wrapped(array)) is not None:
            expected = f"integers that fit {dtype_in_jax(array.dtype)}, which jax reads them as"
            advice = "make them smaller, or floats, or enable x64"
            refuse(locate(index, path), expected, f"{wrapped}", advice, kind=DataError)


def pad_values(role: str, pad: Pad, paths: Iterable[KeyPath]) -> dict[KeyPath, Any]:
    """Return the padding value of each sequence."""
    if isinstance(pad, int | float):
        return dict.fromkeys(paths, pad)
    names = {name_of(path): path for path in paths}
    values = pad if isinstance(pad, Mapping) else dict.fromkeys(names, pad)
    for name, value in values.items():
        if name not in names:
            refuse(f"{role}: pad", f"some of {list(names)}", repr(name))
        if not isinstance(value, int | float | np.number | np.bool_):
            refuse(f"{role}: pad", f"a number for {name}", repr(value))
    return {path: values.get(name, 0) for name, path in names.items()}


def check_pad(path: KeyPath, value: Any, dtype: Any) -> Any:
    """Return a padding value; raise if the dtype of the sequence cannot represent it."""
    if value != 0 and dtype.kind in "iub":
        dtype = dtype_in_jax(dtype)
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        if not low <= value <= high or int(value) != value:
            expected = f"a value of {dtype} for {name_of(path)}"
            refuse("pad", expected, repr(value), "give pad= a dict of values by key")
    return value
