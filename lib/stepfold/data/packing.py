"""Pack several sequences into each row, so that batches contain little padding.

Each window of examples is packed independently. So packing is deterministic, the rows of a window
depend only on its examples, and only one window is held in memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from stepfold.data.columns import Path, at, columns_of, lengths_of, nested
from stepfold.data.fitting import plan_rows
from stepfold.data.integers import read_integer
from stepfold.data.leaves import (
    Pad,
    Truncate,
    arrays_of,
    check_truncate,
    joined,
    pad_value,
    pads_of,
)
from stepfold.errors import ConfigError, DataError

_ADDED = ("segment_ids", "positions", "mask")
Rows = dict[Path, Any]


def pack(
    examples: Iterable[Any],
    *,
    length: int,
    rows: int | None = None,
    window: int = 2048,
    split: bool = False,
    truncate: Truncate = None,
    pad: Pad = 0,
) -> Iterator[dict[Any, Any]]:
    """Pack the sequences of examples into rows of one length.

    Every row gets three more keys. `segment_ids` numbers the examples in the row 1, 2, … in input
    order, with 0 at padding. `positions` restart at 0 in each example. `mask` (bool) is false at
    padding. Use `block_diagonal_mask` to restrict attention to within an example.

    Each window of examples is packed by best-fit decreasing, or by first-fit decreasing if that
    takes fewer rows. Rows are in the input order of their longest examples. Only the last row of a
    window stays rather empty, so choose a window of many rows: the default fills rows of 1,024
    tokens to more than 99.5 % with sequences of about 200. Without `truncate` no token is dropped,
    and no sequence is split that fits into a row.

    Args:
      examples: an iterable of any length, of dicts with the same keys, whose leaves are sequences
        that have one length within an example; or of bare sequences, which get the key `tokens`.
        Dtypes are as in `collate`.
      length: the length of a row.
      rows: the number of rows per batch. Rows of padding fill the last batch. By default, the
        iterator yields single rows.
      window: the number of examples that are buffered and packed together.
      split: whether to split a sequence longer than a row into pieces of `length` and a remainder,
        each of which becomes its own segment.
      truncate: which end of a sequence longer than a row to keep, "keep_end" or "keep_start".
        Without `truncate` or `split`, a longer sequence is an error.
      pad: the padding value, or values by key, with 0 for the other keys.

    Returns:
      An iterator of dicts of numpy arrays. It reads the next window when the current one is
      exhausted.

    Raises:
      ConfigError: if an argument is invalid or names a missing key.
      DataError: if examples cannot be packed; the message names the example and the key.

    >>> import stepfold as sf
    >>> first, second = sf.pack([[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]], length=5)
    >>> first["tokens"].tolist(), first["segment_ids"].tolist(), first["positions"].tolist()
    ([5, 6, 7, 8, 9], [1, 1, 1, 2, 2], [0, 1, 2, 0, 1])
    >>> second["tokens"].tolist()
    [10, 11, 12, 13, 14]

    Several keys are packed together, and `rows` makes batches:

    >>> stream = ({"ids": [n] * n, "labels": [1] * n} for n in (4, 3, 2, 1))
    >>> batch = next(sf.pack(stream, length=6, rows=2, pad={"labels": -100}))
    >>> batch["labels"].tolist()
    [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, -100, -100]]
    """
    read_integer("pack: length", length, 1)
    read_integer("pack: window", window, 1)
    if rows is not None:
        read_integer("pack: rows", rows, 1)
    check_truncate("pack", truncate)
    if split and truncate is not None:
        raise ConfigError(
            f"pack: expected split=True or truncate={truncate!r}, got both; what is longer than a "
            "row is either kept in pieces or cut"
        )
    if isinstance(examples, Mapping):
        raise DataError("pack: expected an iterable of examples, got a dict of columns")
    windows = _windows(iter(examples), length, window, split, truncate, pad)
    return map(nested, _single(windows) if rows is None else _batches(windows, rows, pad))


def _windows(
    examples: Iterator[Any], length: int, window: int, split: bool, truncate: Truncate, pad: Pad
) -> Iterator[Rows]:
    """Yield the packed rows of each window, one array per key."""
    start, seen = 0, None
    while taken := list(islice(examples, window)):
        columns = columns_of(taken, start, reserved=_ADDED)
        pads = pads_of("pack", pad, columns)
        lengths = lengths_of(columns, start)
        _check_lengths(lengths, length, split or truncate is not None, start)
        owners: Sequence[int] = range(start, start + len(taken))
        arrays = {path: arrays_of(path, column, start) for path, column in columns.items()}
        if max(lengths) > length:
            cuts = _pieces_of(lengths, length) if split else _ends_of(lengths, length, truncate)
            arrays = {path: [x[i][a:b] for i, a, b in cuts] for path, x in arrays.items()}
            owners, lengths = [start + i for i, _, _ in cuts], [b - a for _, a, b in cuts]
        plan = plan_rows(lengths, length)
        packed: Rows = {
            path: _filled(path, column, lengths, plan, length, pads[path], owners)
            for path, column in arrays.items()
        }
        packed.update(_segments(lengths, plan, length))
        seen = _as_before(packed, seen, start)
        yield packed
        start += len(taken)


def _check_lengths(lengths: list[int], length: int, shorten: bool, start: int) -> None:
    if 0 in lengths:
        raise DataError(
            f"example {lengths.index(0) + start}: expected at least one token, got none; leave "
            "empty examples out"
        )
    if not shorten and max(lengths) > length:
        index = next(i for i, n in enumerate(lengths) if n > length)
        raise DataError(
            f"example {index + start}: expected at most length={length} tokens, got "
            f"{lengths[index]}; give split=True, truncate='keep_end' or 'keep_start', or a greater "
            "length"
        )


def _pieces_of(lengths: list[int], length: int) -> list[tuple[int, int, int]]:
    """Split sequences into pieces of at most `length`, as (index, start, stop)."""
    return [
        (i, start, min(start + length, n))
        for i, n in enumerate(lengths)
        for start in range(0, n, length)
    ]


def _ends_of(lengths: list[int], length: int, truncate: Truncate) -> list[tuple[int, int, int]]:
    """Truncate sequences to `length`, as (index, start, stop)."""
    starts = [max(n - length, 0) if truncate == "keep_end" else 0 for n in lengths]
    return [
        (i, a, min(a + length, n)) for i, (a, n) in enumerate(zip(starts, lengths, strict=True))
    ]


def _filled(
    path: Path,
    arrays: list[Any],
    lengths: list[int],
    plan: list[list[int]],
    length: int,
    pad: Any,
    owners: Sequence[int],
) -> Any:
    """Fill all rows with one concatenation of sequences and padding."""
    dtype, rest = arrays[0].dtype, arrays[0].shape[1:]
    padding = np.full((length, *rest), pad_value(path, pad, dtype), dtype)
    pieces = _pieces(arrays, padding, lengths, plan)
    packed = joined(path, pieces, (len(plan) * length, *rest), arrays, owners)
    return packed.reshape(len(plan), length, *rest)


def _pieces(
    arrays: list[Any], padding: Any, lengths: list[int], plan: list[list[int]]
) -> list[Any]:
    pieces = []
    for row in plan:
        pieces += [arrays[i] for i in row]
        pieces.append(padding[sum([lengths[i] for i in row]) :])
    return pieces


def _segments(lengths: list[int], plan: list[list[int]], length: int) -> Rows:
    shape = len(plan), length
    ramp = np.arange(length, dtype=np.int32)
    ramps = [ramp[:n] for n in lengths]
    positions = np.concatenate(_pieces(ramps, np.zeros(length, np.int32), lengths, plan))
    counts = [[lengths[i] for i in row] for row in plan]
    ids = [[*range(1, len(row) + 1), 0] for row in plan]
    repeats = [[*row, length - sum(row)] for row in counts]
    flat: Any = np.fromiter(chain.from_iterable(ids), np.int32)
    segment_ids = flat.repeat(np.fromiter(chain.from_iterable(repeats), np.intp)).reshape(shape)
    added = segment_ids, positions.reshape(shape), segment_ids > 0
    return {(name,): array for name, array in zip(_ADDED, added, strict=True)}


def _as_before(packed: Rows, seen: Rows | None, start: int) -> Rows:
    """Raise if the keys, shapes or dtypes of a window differ from those of earlier windows."""
    kinds: Rows = {path: (array.dtype, array.shape[1:]) for path, array in packed.items()}
    for path in {**(seen or kinds), **kinds}:
        before, now = (seen or kinds).get(path), kinds.get(path)
        if before != now:
            told = [f"{k[0]} in rows of shape {k[1]}" if k else "nothing" for k in (before, now)]
            raise DataError(
                f"{at(start, path)}: expected {told[0]} as in the windows before, got {told[1]}; "
                "give all examples the same keys, dtypes and shapes"
            )
    return kinds


def _single(windows: Iterator[Rows]) -> Iterator[Rows]:
    for packed in windows:
        for i in range(len(packed["mask",])):
            yield {path: array[i] for path, array in packed.items()}


def _batches(windows: Iterator[Rows], rows: int, pad: Pad) -> Iterator[Rows]:
    held: list[Rows] = []  # rows of earlier windows, fewer than a batch
    missing = rows
    for packed in windows:
        start, count = 0, len(packed["mask",])
        while count - start >= missing:
            held.append(_some(packed, start, start + missing))
            yield _together(held)
            start, held, missing = start + missing, [], rows
        if start < count:
            held.append(_some(packed, start, count))
            missing -= count - start
    if held:
        yield _together([*held, _empty(held[0], missing, pad)])


def _some(packed: Rows, start: int, stop: int) -> Rows:
    return {path: array[start:stop] for path, array in packed.items()}


def _together(parts: list[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    return {path: np.concatenate([part[path] for part in parts]) for path in parts[0]}


def _empty(like: Rows, rows: int, pad: Pad) -> Rows:
    """Make rows of padding."""
    own = [path for path in like if path[0] not in _ADDED]
    pads = {**pads_of("pack", pad, own), **{(name,): 0 for name in _ADDED}}
    return {
        path: np.full((rows, *array.shape[1:]), pads[path], array.dtype)
        for path, array in like.items()
    }
