"""Formats of files with rows: how to number the rows, and how to read some of them by number.

A line is found by an index, which has the offset of every n-th line. The lines in between are a
block, which is read as a whole.
"""

import itertools
import json
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec
from threading import RLock
from typing import IO, Any, NamedTuple

import numpy as np

from stepfold.data.file_reader import Cache, FileReader, Stamp, refuse_changed
from stepfold.errors import ConfigError, DataError, refuse

HEADER_BYTES = 4096
"""The size of the header of an index, after which the offsets come."""

_CACHE_BYTES = 1 << 26
_BLOCK_BYTES = 4096  # approximate; the index takes 8 bytes for each block
_BLOCK_LINES = 64  # the maximum, since lines further on in the file may be far longer
# Rows in order are read in larger pieces, up to these numbers of blocks and of bytes.
_BLOCKS_IN_ORDER = 64
_BYTES_IN_ORDER = 1 << 18
_MARKS = 1024  # offsets of the index in one read
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
}

Rows = list[list[Any]]
"""The rows that were read of each file."""


class IndexedFile(NamedTuple):
    """A file, and what its index records about it."""

    location: str
    index_location: str
    stamp: Stamp
    size: int
    rows: int
    stride: int  # the number of lines in a block


class FileRows(NamedTuple):
    """Rows of a file to read."""

    file: IndexedFile
    rows: Sequence[int]


class Lines:
    """Lines of text, as `str` without their ends, or the JSON in them."""

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json
        self._reader, self._cache = FileReader(), Cache(_CACHE_BYTES)

    def index(self, location: str, marks: IO[bytes]) -> tuple[int, int, int]:
        """Write the offsets of blocks, and where the last one ends.

        Returns:
          The size of the file, its number of lines, and the number of them in a block.
        """
        count = size = last = 0  # lines that have started, and where the last of them did
        stride = 1
        for chunk in self._reader.chunks(location):
            starts = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + (size + 1)
            if not size:
                _refuse_compressed(location, chunk)
                stride = max(1, min(_BLOCK_LINES, _BLOCK_BYTES * len(starts) // len(chunk)))
                first = len(_BYTE_ORDER_MARK) if chunk.startswith(_BYTE_ORDER_MARK) else 0
                starts = np.concatenate([[first], starts])
            marks.write(_encode(starts[-count % stride :: stride]))
            count, size = count + len(starts), size + len(chunk)
            last = int(starts[-1]) if len(starts) else last
        rows = count if last < size else max(0, count - 1)
        if not size or rows % stride or last < size:  # otherwise, it is the start after the last
            marks.write(_encode(np.array([size])))
        return size, rows, stride

    def read(self, requests: Sequence[FileRows]) -> Rows:
        """Read rows of several files, all at once."""
        contents: dict[Hashable, bytes] = {}
        missing = list[_Blocks]()
        for file, rows in requests:
            wanted = sorted({row // file.stride for row in rows})
            cached = {block: self._cache.get((file.location, block)) for block in wanted}
            absent = [block for block in wanted if cached[block] is None]
            contents.update({(file.location, block): cached[block] for block in wanted})
            if absent and len(rows) > 1 and rows[-1] - rows[0] == len(rows) - 1:  # in order
                count, needed = _count_blocks(file), absent[-1] + 1 - absent[0]
                stop = min(absent[0] + max(needed, _BLOCKS_IN_ORDER), count)
                missing.append(_Blocks(file, range(absent[0], stop), needed))
            else:
                missing += [_Blocks(file, range(block, block + 1), 1) for block in absent]
        contents.update(self._read_blocks(missing))
        return [self._rows(request, contents) for request in requests]

    def _read_blocks(self, wanted: Sequence["_Blocks"]) -> Iterator[tuple[Hashable, bytes]]:
        """Read blocks of several files, first their offsets and then what is in them."""
        marks = self._read_marks(wanted)
        reads = list[tuple[IndexedFile, range, list[int], Callable[[], bytes]]]()
        for file, blocks, needed in wanted:
            chunks = range(blocks.start // _MARKS, blocks.stop // _MARKS + 1)
            parts = [marks[file.index_location, chunk] for chunk in chunks]
            known = parts[0] if len(parts) == 1 else np.concatenate(parts)
            first = blocks.start - chunks.start * _MARKS
            offsets = known[first : first + len(blocks) + 1].tolist()
            count = max(needed, bisect_right(offsets, offsets[0] + _BYTES_IN_ORDER) - 1)
            offsets, blocks = offsets[: count + 1], blocks[:count]
            is_ascending = all(a < b for a, b in itertools.pairwise([-1, *offsets]))
            end, is_last = offsets[-1], blocks.stop == _count_blocks(file)
            if not is_ascending or end > file.size or (end == file.size) != is_last:
                _refuse_index(file)
            start = offsets[0] - 1 if blocks.start else 0  # with the end of the line before
            wait = self._reader.start_read(file.location, start, offsets[-1], file.stamp)
            reads.append((file, blocks, [offset - start for offset in offsets], wait))
        for file, blocks, offsets, wait in reads:
            content, pairs = wait(), itertools.pairwise(offsets)
            for block, (start, stop) in zip(blocks, pairs, strict=True):
                piece, key = content[start:stop], (file.location, block)
                before = content[start - 1 : start] if block else content[:start]
                is_start = before == b"\n" if block else before in (b"", _BYTE_ORDER_MARK)
                is_end = block == _count_blocks(file) - 1 or piece.endswith(b"\n")
                if not (is_start and is_end):
                    _refuse_index(file)
                self._cache.put(key, piece, len(piece))
                yield key, piece

    def _read_marks(self, wanted: Sequence["_Blocks"]) -> dict[Hashable, Any]:
        """Read the parts of indexes that have the offsets of blocks."""
        marks, waits = dict[Hashable, Any](), dict[Hashable, Callable[[], bytes]]()
        for file, blocks, _ in wanted:
            end = HEADER_BYTES + 8 * (_count_blocks(file) + 1)
            for chunk in range(blocks.start // _MARKS, blocks.stop // _MARKS + 1):
                key: Hashable = (file.index_location, chunk)
                start = HEADER_BYTES + 8 * _MARKS * chunk
                marks[key] = self._cache.get(key)
                if marks[key] is None and key not in waits:
                    stop = min(start + 8 * _MARKS, end)
                    waits[key] = self._reader.start_read(file.index_location, start, stop)
        for key, wait in waits.items():
            marks[key] = np.frombuffer(wait(), "<i8")
            self._cache.put(key, marks[key], marks[key].nbytes)
        return marks

    def _rows(self, request: FileRows, contents: dict[Hashable, bytes]) -> list[Any]:
        file, by_block = request.file, dict[int, list[bytes]]()
        for block in {row // file.stride for row in request.rows}:
            lines = contents[file.location, block].split(b"\n")
            if not lines[-1]:
                lines.pop()
            if len(lines) != min(file.stride, file.rows - block * file.stride):
                _refuse_index(file)
            by_block[block] = lines
        return [
            self._parse(file, row, by_block[row // file.stride][row % file.stride])
            for row in request.rows
        ]

    def _parse(self, file: IndexedFile, row: int, line: bytes) -> Any:
        try:
            text = line.removesuffix(b"\r").decode()
            return json.loads(text) if self._is_json else text
        except ValueError as error:  # of UTF-8 or of JSON
            expected = "JSON" if self._is_json else "UTF-8 text"
            got = f"{line[:80]!r}: {error}"
            advice = "" if line.strip() else "delete blank lines, since each line is a row"
            where = f"{file.location}, row {row}"
            refuse(where, expected, got, advice, kind=DataError, cause=error)


class _Blocks(NamedTuple):
    """Consecutive blocks of a file to read at once."""

    file: IndexedFile
    blocks: range
    needed: int  # the first of them; the others are read ahead


def _count_blocks(file: IndexedFile) -> int:
    return -(-file.rows // file.stride)


def _encode(offsets: Any) -> bytes:
    encoded: bytes = offsets.astype("<i8").tobytes()
    return encoded


def _refuse_compressed(location: str, start: bytes) -> None:
    for magic, name in _COMPRESSED.items():
        if start.startswith(magic):
            refuse_compressed(location, name)


def refuse_compressed(location: str, name: str) -> None:
    """Raise because rows in the middle of a compressed file cannot be found."""
    advice = "decompress it, or read it in order, as in sf.batches(lambda: gzip.open(path), …)"
    refuse(location, "rows that can be found by number", f"a {name} file", advice, kind=DataError)


def _refuse_index(file: IndexedFile) -> None:
    raise DataError(
        f"{file.index_location}: the index does not fit the lines of {file.location}; delete the "
        "index, and make the source again"
    )


class Parquet:
    """Rows of Parquet as dicts, whose groups of rows are the blocks."""

    def __init__(self) -> None:
        _require("pyarrow", "'stepfold[parquet]'")
        self._reader, self._cache, self._lock = FileReader(), Cache(_CACHE_BYTES), RLock()
        self._open = lru_cache(16)(_open_parquet)

    def __reduce__(self) -> Any:
        return Parquet, ()

    def index(self, location: str, _: IO[bytes]) -> tuple[int, int, int]:
        """Return the size of the file, its number of rows, and 1."""
        return _size_of(self._reader, location), int(self._open(location)[1][-1]), 1

    def read(self, requests: Sequence[FileRows]) -> Rows:
        """Read rows of several files."""
        return [self._read(file, np.asarray(rows)) for file, rows in requests]

    def _read(self, file: IndexedFile, rows: Any) -> list[Any]:
        _check_unchanged(self._reader, file)
        with self._lock:
            parquet, starts = self._open(file.location)
            groups, read = np.searchsorted(starts, rows, "right") - 1, dict[int, Any]()
            for group in np.unique(groups).tolist():
                table = self._cache.get((file.location, group))
                if table is None:
                    table = parquet.read_row_group(group)
                    self._cache.put((file.location, group), table, table.nbytes)
                (mine,) = np.nonzero(groups == group)
                values = table.take(rows[mine] - starts[group]).to_pylist()
                read |= dict(zip(mine.tolist(), values, strict=True))
        return [read[i] for i in range(len(rows))]


class ArrayRecord:
    """Records of ArrayRecord, as bytes."""

    def __init__(self) -> None:
        _require("array_record", "array_record")
        self._reader, self._lock = FileReader(), RLock()
        self._open = lru_cache(16)(_open_array_record)

    def __reduce__(self) -> Any:
        return ArrayRecord, ()

    def index(self, location: str, _: IO[bytes]) -> tuple[int, int, int]:
        """Return the size of the file, its number of records, and 1."""
        return _size_of(self._reader, location), self._open(location).num_records(), 1

    def read(self, requests: Sequence[FileRows]) -> Rows:
        """Read records of several files."""
        for file, _ in requests:
            _check_unchanged(self._reader, file)
        with self._lock:
            return [self._open(file.location).read([*rows]) for file, rows in requests]


Format = Lines | Parquet | ArrayRecord


def _open_parquet(location: str) -> tuple[Any, Any]:
    """Open a file; return it, and the first row of each group."""
    from pyarrow import ArrowException, parquet

    try:
        opened = parquet.ParquetFile(location)
    except (ArrowException, OSError) as error:
        refuse(location, "a Parquet file", str(error), kind=DataError, cause=error)
    metadata = opened.metadata
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    return opened, np.cumsum([0, *sizes])


def _open_array_record(location: str) -> Any:
    from array_record.python import array_record_module

    options = "readahead_buffer_size:0,max_parallelism:0"  # for random access, without threads
    reader = array_record_module.ArrayRecordReader(location, options)
    if not reader.ok():
        refuse(location, "an ArrayRecord file", "another", kind=DataError)
    return reader


def _require(package: str, extra: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(f"files: {package} is not installed; run pip install {extra}")


def _size_of(reader: FileReader, location: str) -> int:
    stamp = reader.stamp(location)
    return (stamp and stamp.size) or 0


def _check_unchanged(reader: FileReader, file: IndexedFile) -> None:
    if reader.stamp(file.location) != file.stamp:
        refuse_changed(file.location)
