"""Pack several sequences into each row, so that batches contain little padding.

Each window of examples is packed independently. So packing is deterministic, the rows of a window
depend only on its examples, and only one window is held in memory. A position is that of the
examples before a window, and a number of rows: a resume reads and packs the window again.
"""

import json
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np

from stepfold import tree
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
    pad_values,
    to_arrays,
)
from stepfold.data.order import Order
from stepfold.data.sources import ENDLESS, SequenceSource, Source, differences
from stepfold.data.stream import Stream
from stepfold.errors import DataError, refuse

_ADDED = ("segment_ids", "positions", "mask")
PackedRows = dict[KeyPath, Any]
"""Packed rows: for each path, an array of shape (rows, length, …)."""


def pack(
    examples: Iterable[Any] | Source,
    *,
    length: int,
    rows: int | None = None,
    window: int = 2048,
    split: bool = False,
    truncate: Truncate = None,
    pad: Pad = 0,
    seed: int | None = None,
) -> "Packed":
    """Pack the sequences of examples into rows of one length.

    Every row gets three more keys. `segment_ids` numbers the examples in the row 1, 2, … in input
    order, with 0 at padding. `positions` restart at 0 in each example. `mask` (bool) is false at
    padding. Use `block_diagonal_mask` to restrict attention to within an example.

    Each window of examples is packed by best-fit decreasing, or by first-fit decreasing if that
    takes fewer rows. Rows are in the input order of their longest examples. A larger window packs
    more tightly: the default fills rows of 1,024 tokens to more than 99.5 % with sequences of about
    200. Without `truncate` no token is dropped, and no sequence is split that fits into a row.

    The iterator can be saved and restored at any row, by `get_state` and `set_state`, if `examples`
    have `len()` and `[i]`, or are a stream with its own state. So `sf.batches(sf.pack(…), 8)`
    resumes. It reads the examples once. `sf.batches(lambda: sf.pack(…), 8)` repeats them. To pack
    examples of several sources, give `sf.mix(…)`.

    Args:
      examples: examples with `len()` and `[i]`, a mixture, or a stream, of any length. An example
        is a dict, with the same keys in all examples, whose leaves are sequences that have one
        length within an example; or a bare sequence, which gets the key `tokens`. Dtypes are those
        of `batches`.
      length: the length of a row.
      rows: the number of rows per batch. Rows of padding fill the last batch. By default, the
        iterator yields single rows.
      window: the number of examples that are buffered and packed together.
      split: whether to split a sequence longer than a row into pieces of `length` and a remainder,
        each of which becomes its own segment.
      truncate: which end of a sequence longer than a row to keep, "keep_end" or "keep_start".
        Without `truncate` or `split`, a longer sequence is an error.
      pad: the padding value, or values by key, with 0 for the other keys.
      seed: the seed of the order in which examples with `len()` and `[i]` are read, another one in
        each epoch of `sf.batches(lambda: sf.pack(…), …)`. None keeps their order.

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
    seed = None if seed is None else read_integer("pack: seed", seed, 0)
    source = _read_source(examples, seed)
    reader = Stream(examples) if source is None else _Indexed(source, seed)
    settings: dict[str, Any] = {"length": length, "rows": rows, "window": window, "split": split}
    settings |= {"truncate": truncate, "seed": seed, "examples": None, "source": None}
    if source is not None:
        settings |= {"examples": source.length, "source": source.fingerprint}
    return Packed(reader, source, _Packer(length, split, truncate, pad), settings)


class Packed:
    """An iterator over packed rows, or over batches of them; returned by `pack`.

    It is resumable by grain's protocol, `get_state` and `set_state`. After an error, the next call
    to `next` tries the same window again.

    >>> import stepfold as sf
    >>> make = lambda: sf.pack([[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]], length=5)
    >>> packed, resumed = make(), make()
    >>> first = next(packed)
    >>> resumed.set_state(packed.get_state())
    >>> next(resumed)["tokens"].tolist()
    [10, 11, 12, 13, 14]
    """

    reuses_buffers = False

    def __init__(
        self,
        reader: "_Indexed | Stream",
        source: Source | None,
        packer: "_Packer",
        settings: dict[str, Any],
    ) -> None:
        self._reader, self._source = reader, source
        self._packer, self._settings = packer, settings
        self._reset(0)

    def _reset(self, epoch: int) -> None:
        self._epoch = epoch
        self._position: _Position | None = None  # of the next row; None if nothing was read
        self._next = _Position("", 0, 0)  # of the first row to take from the next window
        self._examples: list[Any] = []  # of the next window, read and not packed yet
        self._window: PackedRows = {}  # the last window,
        self._at = self._next  # and the position of the first of its rows that is not taken
        self._parts: list[PackedRows] = []  # the rows that were taken for the next batch
        self._kinds: PackedRows | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[Any, Any]:
        rows = self._settings["rows"] or 1
        while (left := rows - sum(map(_count, self._parts))) and self._find_row():
            start = self._at.row
            stop = min(start + left, _count(self._window))
            self._parts.append({path: array[start:stop] for path, array in self._window.items()})
            self._at = self._at._replace(row=stop)
        if not self._parts:
            raise StopIteration
        if left:
            self._parts.append(_padding_rows(self._parts[0], left, self._packer.pad))
        batch, self._parts = _join(self._parts), []
        self._position = self._at
        if self._settings["rows"] is None:
            batch = {path: array[0] for path, array in batch.items()}
        return tree.nested(batch)

    def _find_row(self) -> bool:
        """Whether there is another row, in this window or a later one."""
        while self._at.row == _count(self._window):
            if not self._read_window():
                return False
        return True

    def _read_window(self) -> bool:
        """Read and pack the next window; return whether there is one."""
        if not self._examples:  # otherwise, the last call has failed
            self._next = self._next._replace(examples=self._reader.position())
            self._position = self._position or self._next
        self._reader.fill(self._examples, self._settings["window"])
        if not self._examples and not self._next.row:
            return False
        start = self._next.start
        packed = self._packer.pack(self._examples, start) if self._examples else {}
        if self._next.row > _count(packed):
            expected = f"a window of at least {self._next.row} rows from example {start} on"
            advice = "give the examples that the position was saved with"
            refuse("pack", expected, f"{_count(packed)}", advice, kind=DataError)
        self._kinds = _check_kinds(packed, self._kinds, start)
        self._window, self._at = packed, self._next
        self._next = _Position("", start + len(self._examples), 0)
        self._examples = []
        return True

    @property
    def endless(self) -> bool:
        """Whether the examples never end, as those of a mixture."""
        return self._reader.endless

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch from its beginning, in its own order if there is a seed."""
        self._reset(read_integer("epoch", epoch, 0))
        self._reader.start(epoch)

    def get_state(self) -> dict[str, Any]:
        """Return the position and the settings of the packing, serializable as JSON."""
        position = self._position or _Position(self._reader.position(), 0, 0)
        return {
            "epoch": self._epoch,
            "examples": json.loads(position.examples),
            "start": position.start,
            "row": position.row,
            "settings": dict(self._settings),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a position from `get_state`.

        Raises:
          DataError: if the state was saved with other settings, or the examples are a stream
            without a state.
        """
        is_position = isinstance(state, dict) and state.keys() == self.get_state().keys()
        if not is_position or not isinstance(state["settings"], dict):
            expected, got = "a state that get_state() of sf.pack gave", tree.describe_value(state)
            advice = "it was saved by another kind of iterator"
            refuse("pack", expected, got, advice, kind=DataError)
        differing = differences(state["settings"], self._settings, self._source)
        if differing:
            expected = "the settings that the position was saved with"
            refuse("pack", expected, "; ".join(differing), "pack as before", kind=DataError)
        epoch, start, row = (
            read_integer(f"state: {name}", state[name], 0) for name in ("epoch", "start", "row")
        )
        examples = state["examples"]
        if isinstance(examples, dict) and "lost" in examples:
            if start or row or self._position:
                advice = "give examples with len() and [i], or a stream with a state"
                got = f"example {start} of a stream, but {examples['lost']}"
                expected = "a position that can be restored"
                refuse("pack", expected, got, advice, kind=DataError)
            return
        self._reader.restore(epoch, examples)
        self._reset(epoch)
        self._position = self._next = _Position(json.dumps(examples), start, row)


class _Position(NamedTuple):
    """The position of a row."""

    examples: str  # that of the reader before the window, as JSON
    start: int  # the index of the first example of the window
    row: int  # in the window


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
    >>> sf.data.block_diagonal_mask(np.array([1, 1, 2, 0]), causal=True).astype(int)
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


# Readers of examples


def _read_source(examples: Any, seed: int | None) -> Source | None:
    """Return examples with random access as a source, and None for a stream."""
    kind, source = type(examples), None
    is_indexed = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    if isinstance(examples, Source):
        source = examples
    elif is_indexed and not hasattr(kind, "iloc"):  # the [i] of pandas is a label or a column
        source = SequenceSource(examples) if len(examples) else Source()
    if seed is not None and source is None:
        expected = "none for a stream, which has its own order"
        advice = "shuffle it where it is made, or give a list of it"
        refuse("pack: seed", expected, f"{seed}", advice)
    if seed is not None and source is not None and source.length == ENDLESS:
        expected = "none for an infinite source, which has its own order"
        refuse("pack: seed", expected, f"{seed}", "give the seed to the function that made it")
    return source


class _Indexed:
    """Read a source with random access, in the order of an epoch."""

    def __init__(self, source: Source, seed: int | None) -> None:
        self._source, self._order = source, Order(source.length, seed)
        self.endless = source.length == ENDLESS
        self.start(0)

    def start(self, epoch: int) -> None:
        self._epoch, self._at = epoch, 0

    def position(self) -> str:
        return json.dumps(self._at)

    def restore(self, epoch: int, position: Any) -> None:
        self._epoch, self._at = epoch, read_integer("state: examples", position, 0)

    def fill(self, examples: list[Any], count: int) -> None:
        """Append the next examples, until there are `count` or the epoch ends."""
        stop = min(self._at + count - len(examples), self._source.length)
        if self._at < stop:
            self._source.check_length()
            rows = self._order(self._epoch, slice(self._at, stop))
            examples += self._source.examples(rows)
            self._at = stop


# Windows


class _Packer(NamedTuple):
    """Pack the examples of a window."""

    length: int
    split: bool
    truncate: Truncate
    pad: Pad

    def pack(self, buffered: list[Any], start: int) -> PackedRows:
        """Return the packed rows; `start` is the index of the first example."""
        length, split, truncate = self.length, self.split, self.truncate
        columns = columns_of(buffered, start, reserved=_ADDED)
        pads = pad_values("pack", self.pad, columns)
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
        rows = assign_rows(lengths, length)
        packed: PackedRows = {}
        for path, column in arrays.items():
            dtype, rest = column[0].dtype, column[0].shape[1:]
            padding = np.full((length, *rest), check_pad(path, pads[path], dtype), dtype)
            in_rows = _in_rows(parts[path], padding, lengths, rows)
            flat = concatenate(path, in_rows, len(rows) * length, column, start)
            packed[path] = flat.reshape(len(rows), length, *rest)
        packed.update(_segments(lengths, rows, length))
        return packed


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
    arrays: list[Any], padding: Any, lengths: list[int], rows: list[list[int]]
) -> list[Any]:
    """List the sequences of each row, followed by its padding."""
    parts = []
    for row in rows:
        parts += [arrays[i] for i in row]
        parts.append(padding[sum([lengths[i] for i in row]) :])
    return parts


def _segments(lengths: list[int], rows: list[list[int]], length: int) -> PackedRows:
    """Make the `segment_ids`, `positions` and `mask` of rows."""
    shape = len(rows), length
    ramp = np.arange(length, dtype=np.int32)
    ramps = [ramp[:n] for n in lengths]
    positions = np.concatenate(_in_rows(ramps, np.zeros(length, np.int32), lengths, rows))
    ids = [[*range(1, len(row) + 1), 0] for row in rows]
    counts = [[lengths[i] for i in row] for row in rows]
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


def _count(rows: PackedRows) -> int:
    return len(rows["mask",]) if rows else 0


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


def assign_rows(lengths: list[int], length: int) -> list[list[int]]:
    """Assign sequences to rows by best-fit decreasing, or first-fit decreasing if it needs fewer.

    No sequence may be longer than a row.

    Returns:
      The indices of the sequences in each row, ascending. Rows are in the input order of their
      longest sequences.
    """
    order = np.argsort(-np.array(lengths), kind="stable").tolist()
    rows = _best_fit(order, lengths, length)
    if len(rows) > -(-sum(lengths) // length):  # above the lower bound: first-fit may need fewer
        other = _first_fit(order, lengths, length)
        rows = rows if len(rows) <= len(other) else other
    rows.sort()  # by the index of the longest sequence, which comes first in each row
    return [sorted(row) for row in rows]


def _best_fit(order: list[int], lengths: list[int], length: int) -> list[list[int]]:
    """Put each sequence into the fullest row with room.

    Bit n of `rooms` is set if a row has room for exactly n more tokens.
    """
    rows: list[list[int]] = []
    rows_with: list[list[int]] = [[] for _ in range(length + 1)]  # rows by their room
    rooms = 0
    for index in order:
        size = lengths[index]
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = rows_with[room].pop()
            rows[row].append(index)
            if not rows_with[room]:
                rooms ^= 1 << room
        else:
            room, row = length, len(rows)
            rows.append([index])
        room -= size
        if room:
            rows_with[room].append(row)
            rooms |= 1 << room
    return rows


def _first_fit(order: list[int], lengths: list[int], length: int) -> list[list[int]]:
    """Put each sequence into the first row with room."""
    rows: list[list[int]] = []
    room = np.full(len(order), length)
    for index in order:
        row = int(np.argmax(room[: len(rows) + 1] >= lengths[index]))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows
