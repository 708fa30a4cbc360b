"""Pack several sequences into each row, so that batches contain little padding.

Each window of examples is packed independently. So packing is deterministic, the rows of a window
depend only on its examples, and only one window is held in memory.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import jax.numpy as jnp
import numpy as np

from stepfold.core.validation import check_flags, read_integer
from stepfold.data.collate import (
    KeyPath,
    Pad,
    Truncate,
    check_longest,
    check_pad,
    check_truncate,
    columns_of,
    concatenate,
    lengths_of,
    locate,
    nested,
    pad_values,
    to_arrays,
)
from stepfold.errors import DataError, refuse

_ADDED = ("segment_ids", "positions", "mask")
PackedRows = dict[KeyPath, Any]
"""Packed rows: for each path, an array of shape (rows, length, …)."""


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
    takes fewer rows. Rows are in the input order of their longest examples. A larger window packs
    more tightly: the default fills rows of 1,024 tokens to more than 99.5 % with sequences of about
    200. Without `truncate` no token is dropped, and no sequence is split that fits into a row.

    Args:
      examples: an iterable of any length, of dicts with the same keys, whose leaves are sequences
        that have one length within an example; or of bare sequences, which get the key `tokens`.
        Dtypes are those of `batches`.
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
    check_flags(split=split)
    length = read_integer("pack: length", length, 1)
    window = read_integer("pack: window", window, 1)
    rows = None if rows is None else read_integer("pack: rows", rows, 1)
    check_truncate("pack", truncate)
    if split and truncate is not None:
        advice = "an example longer than a row is either kept in pieces or cut"
        refuse("pack", f"split=True or truncate={truncate!r}", "both", advice)
    if isinstance(examples, Mapping):
        refuse("pack", "an iterable of examples", "a dict of columns", kind=DataError)
    windows = _windows(iter(examples), length, window, split, truncate, pad)
    batches = _batches(windows, rows or 1, pad)
    if rows is None:
        batches = ({path: array[0] for path, array in batch.items()} for batch in batches)
    return map(nested, batches)


def block_diagonal_mask(segment_ids: Any, *, causal: bool = False) -> Any:
    """Make the attention mask that keeps the examples of packed rows apart.

    A token attends to the tokens of its own segment. Padding, segment 0, attends only to itself, so
    that no softmax is empty, and no other token attends to it.

    Args:
      segment_ids: integers of shape (…, length), as from `pack`.
      causal: whether a token attends only to itself and to earlier tokens.

    Returns:
      Booleans of shape (…, length, length), where `mask[…, i, j]` is true if position i attends to
      position j. A numpy array if `segment_ids` is one, otherwise a JAX array. Add an axis for the
      heads with `mask[:, None]`, as `jax.nn.dot_product_attention` expects.

    >>> import numpy as np
    >>> import stepfold as sf
    >>> sf.block_diagonal_mask(np.array([1, 1, 2, 0]), causal=True).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 0, 1, 0],
           [0, 0, 0, 1]])
    """
    check_flags(causal=causal)
    xp: Any = np if isinstance(segment_ids, np.ndarray) else jnp
    ids = xp.asarray(segment_ids)
    if ids.ndim == 0 or not jnp.issubdtype(ids.dtype, jnp.integer):
        got, advice = f"{ids.dtype}{list(ids.shape)}", "give the segment_ids that pack adds"
        expected = "integers of shape (…, length)"
        refuse("block_diagonal_mask", expected, got, advice, kind=DataError)
    length = ids.shape[-1]
    within = (ids[..., :, None] == ids[..., None, :]) & (ids != 0)[..., None]
    if causal:
        within = within & xp.tri(length, dtype=bool)
    return within | xp.eye(length, dtype=bool)


# Windows


def _windows(
    examples: Iterator[Any], length: int, window: int, split: bool, truncate: Truncate, pad: Pad
) -> Iterator[PackedRows]:
    """Yield the packed rows of each window."""
    start, kinds = 0, None
    while buffered := list(islice(examples, window)):
        columns = columns_of(buffered, start, reserved=_ADDED)
        pads = pad_values("pack", pad, columns)
        lengths = lengths_of(columns, start)
        if 0 in lengths:
            where, advice = locate(lengths.index(0) + start), "leave empty examples out"
            refuse(where, "at least one token", "none", advice, kind=DataError)
        if not split and truncate is None:
            check_longest(lengths, length, start, "split=True, ")
        arrays = {path: to_arrays(path, column, start) for path, column in columns.items()}
        parts = arrays
        if max(lengths) > length:
            pieces = _pieces(lengths, length, split, truncate)
            parts = {path: [x[i][a:b] for i, a, b in pieces] for path, x in arrays.items()}
            lengths = [b - a for _, a, b in pieces]
        plan = plan_rows(lengths, length)
        packed: PackedRows = {}
        for path, column in arrays.items():
            dtype, rest = column[0].dtype, column[0].shape[1:]
            padding = np.full((length, *rest), check_pad(path, pads[path], dtype), dtype)
            in_rows = _in_rows(parts[path], padding, lengths, plan)
            flat = concatenate(path, in_rows, len(plan) * length, column, start)
            packed[path] = flat.reshape(len(plan), length, *rest)
        packed.update(_segments(lengths, plan, length))
        kinds = _check_kinds(packed, kinds, start)
        yield packed
        start += len(buffered)


def _pieces(
    lengths: list[int], length: int, split: bool, truncate: Truncate
) -> list[tuple[int, int, int]]:
    """Split or truncate sequences to at most `length`, as (index, start, stop)."""
    pieces = []
    for index, n in enumerate(lengths):
        if split:
            starts = range(0, n, length)
        else:
            starts = range(max(n - length, 0) if truncate == "keep_end" else 0, n, n)
        pieces += [(index, start, min(start + length, n)) for start in starts]
    return pieces


def _in_rows(
    arrays: list[Any], padding: Any, lengths: list[int], plan: list[list[int]]
) -> list[Any]:
    """List the sequences of each row, followed by its padding."""
    parts = []
    for row in plan:
        parts += [arrays[i] for i in row]
        parts.append(padding[sum([lengths[i] for i in row]) :])
    return parts


def _segments(lengths: list[int], plan: list[list[int]], length: int) -> PackedRows:
    """Make the `segment_ids`, `positions` and `mask` of rows."""
    shape = len(plan), length
    ramp = np.arange(length, dtype=np.int32)
    ramps = [ramp[:n] for n in lengths]
    positions = np.concatenate(_in_rows(ramps, np.zeros(length, np.int32), lengths, plan))
    ids = [[*range(1, len(row) + 1), 0] for row in plan]
    counts = [[lengths[i] for i in row] for row in plan]
    repeats = [[*row, length - sum(row)] for row in counts]
    flat: Any = np.fromiter(chain.from_iterable(ids), np.int32)
    segment_ids = flat.repeat(np.fromiter(chain.from_iterable(repeats), np.intp)).reshape(shape)
    added = segment_ids, positions.reshape(shape), segment_ids > 0
    return {(name,): array for name, array in zip(_ADDED, added, strict=True)}


def _check_kinds(packed: PackedRows, seen: PackedRows | None, start: int) -> PackedRows:
    """Raise if the keys, shapes or dtypes of a window differ from those of earlier windows."""
    kinds: PackedRows = {path: (array.dtype, array.shape[1:]) for path, array in packed.items()}
    seen = seen or kinds
    for path in {**seen, **kinds}:
        if seen.get(path) != kinds.get(path):
            before, now = (
                f"{kind[0]} in rows of shape {kind[1]}" if kind else "nothing"
                for kind in (seen.get(path), kinds.get(path))
            )
            expected = f"{before} as in the windows before"
            advice = "give all examples the same keys, dtypes and shapes"
            refuse(locate(start, path), expected, now, advice, kind=DataError)
    return kinds


def _batches(windows: Iterator[PackedRows], rows: int, pad: Pad) -> Iterator[PackedRows]:
    left: list[PackedRows] = []  # the rows after the last batch
    for window in windows:
        packed = _join([*left, window])
        count = len(packed["mask",])
        last = count - count % rows
        for start in range(0, last, rows):
            yield {path: array[start : start + rows] for path, array in packed.items()}
        left = [{path: array[last:] for path, array in packed.items()}] if last < count else []
    for packed in left:
        yield _join([packed, _padding_rows(packed, rows - len(packed["mask",]), pad)])


def _join(parts: list[PackedRows]) -> PackedRows:
    if len(parts) == 1:
        return parts[0]
    return {path: np.concatenate([part[path] for part in parts]) for path in parts[0]}


def _padding_rows(like: PackedRows, rows: int, pad: Pad) -> PackedRows:
    pads = pad_values("pack", pad, [path for path in like if path[0] not in _ADDED])
    return {
        path: np.full((rows, *array.shape[1:]), pads.get(path, 0), array.dtype)
        for path, array in like.items()
    }


# Bin packing


def plan_rows(lengths: list[int], length: int) -> list[list[int]]:
    """Assign sequences to rows by best-fit decreasing, or first-fit decreasing if it needs fewer.

    No sequence may be longer than a row.

    Returns:
      The indices of the sequences in each row, ascending. Rows are in the input order of their
      longest sequences.
    """
    order = np.argsort(-np.array(lengths), kind="stable").tolist()
    plan = _best_fit(order, lengths, length)
    if len(plan) > -(-sum(lengths) // length):  # above the lower bound: first-fit may need fewer
        other = _first_fit(order, lengths, length)
        plan = plan if len(plan) <= len(other) else other
    plan.sort()  # by the index of the longest sequence, which comes first in each row
    return [sorted(row) for row in plan]


def _best_fit(order: list[int], lengths: list[int], length: int) -> list[list[int]]:
    """Put each sequence into the fullest row with room.

    Bit n of `rooms` is set if a row has room for exactly n more tokens.
    """
    plan: list[list[int]] = []
    rows_with: list[list[int]] = [[] for _ in range(length + 1)]  # rows by their room
    rooms = 0
    for index in order:
        size = lengths[index]
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = rows_with[room].pop()
            plan[row].append(index)
            if not rows_with[room]:
                rooms ^= 1 << room
        else:
            room, row = length, len(plan)
            plan.append([index])
        room -= size
        if room:
            rows_with[room].append(row)
            rooms |= 1 << room
    return plan


def _first_fit(order: list[int], lengths: list[int], length: int) -> list[list[int]]:
    """Put each sequence into the first row with room."""
    plan: list[list[int]] = []
    room = np.full(len(order), length)
    for index in order:
        row = int(np.argmax(room[: len(plan) + 1] >= lengths[index]))
        if row == len(plan):
            plan.append([])
        plan[row].append(index)
        room[row] -= lengths[index]
    return plan
