"""A source over the rows of many files, found by number through an index beside each file."""

import copy
import itertools
import json
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from tempfile import SpooledTemporaryFile
from typing import Any, Literal

import numpy as np

from stepfold import tree
from stepfold.core.validation import absolute_path, is_url, read_choice, read_function
from stepfold.data.file_formats import (
    HEADER_BYTES,
    ArrayRecord,
    FileRows,
    Format,
    IndexedFile,
    Lines,
    Parquet,
    refuse_compressed,
)
from stepfold.data.file_reader import FileReader, Stamp, refuse_changed, split_query
from stepfold.data.order import Rows
from stepfold.data.sources import Source, row_list
from stepfold.errors import DataError, refuse, warn

_SUFFIXES = {
    "jsonl": ("jsonl", "ndjson"),
    "lines": ("txt", "text"),
    "parquet": ("parquet",),
    "array_record": ("array_record", "arrayrecord"),
}
_COMPRESSED = ("gz", "bz2", "xz", "zst")
_FOLDER = ".stepfold"  # of indexes, beside the files
_VERSION = 1
_AT_ONCE = 8  # files that are indexed
_IN_MEMORY = 1 << 24  # bytes of an index that is being made
_DIGESTS = 1000  # in a fingerprint
_MOST_ROWS = 1 << 48  # of a file
_COUNTS = ("size", "rows", "stride", "bytes")  # in the header of an index


def files(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    file_format: Literal["jsonl", "lines", "parquet", "array_record"] | None = None,
    parse: Callable[[Any], Any] | None = None,
    index: str | os.PathLike[str] | None = None,
) -> "Files":
    r"""Open the rows of many files as one source, with `len` and `[i]`.

    Row i is found by number, so the files are neither loaded nor read from the start. `sf.batches`
    shuffles the rows of all files, and `sf.mix`, `sf.pack` and `sf.workers` take the source as any
    other.

    The first call reads each file once, to find its rows, and writes an index of it to a folder
    ``.stepfold`` beside the file. Later calls read only the first bytes of each index. An index is
    made again, with a warning, if its first bytes are damaged, or the size or the time of the last
    change of its file differ. A file that changes while the source is in use is an error. A saved
    position holds a fingerprint of the files: `set_state` refuses it if rows have moved, and warns
    if only contents have changed.

    The index of lines has the offset of every n-th line: 8 bytes for about 4,096 bytes of a file,
    or for 64 lines if they are short. Rows that are read in order are read in larger pieces. Each
    process keeps up to 64 MB of what it read last.

    Args:
      paths: a path, a URL such as `s3://bucket/corpus/part-0.jsonl`, or a glob pattern of either,
        whose files are sorted by name; or a list of these, in its order. URLs are for "jsonl" and
        "lines".
      file_format: what a row is. "jsonl": the JSON in a line of text. "lines": a line of text, as
        `str` without its end. "parquet": a dict of the columns; needs pyarrow. "array_record": the
        bytes of a record. By default, it follows from the suffix of the files.
      parse: a function from such a row to an example.
      index: the directory of the indexes, if there is no permission to write beside the files.

    Returns:
      A source. A slice of it is a source of these rows.

    Raises:
      ConfigError: if an argument is invalid, or a package is needed and not installed.
      DataError: if a file is missing, compressed or cannot be read, there is no row, or an index
        cannot be written.

    >>> import tempfile, pathlib
    >>> import stepfold as sf
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "0.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    >>> _ = (folder / "1.jsonl").write_text('{"x": 3}\n')
    >>> source = sf.files(folder / "*.jsonl", parse=lambda row: row["x"] * 10)
    >>> len(source), source[2], next(sf.batches(source, 3, seed=0))
    (3, 30, array([30, 20, 10]))
    """
    if parse is not None:
        read_function("parse", parse)
    reader = FileReader()
    locations = _find(paths, reader)
    chosen = _format_of(locations, file_format)
    folder = None if index is None else str(absolute_path("index", index))
    if chosen not in ("jsonl", "lines") and any(map(is_url, locations)):
        url = next(filter(is_url, locations))
        advice = "copy the files to a file system"
        refuse("files", f"paths for {chosen}", url, advice, kind=DataError)
    form: Format
    if chosen == "parquet":
        form = Parquet()
    elif chosen == "array_record":
        form = ArrayRecord()
    else:
        form = Lines(is_json=chosen == "jsonl")
    return Files(_open_all(locations, form, reader, folder), form, parse)


def _find(paths: Any, reader: FileReader) -> list[str]:
    several = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not isinstance(several, list | tuple) or not several:
        advice = "give a pattern such as 'corpus/*.jsonl', or a list"
        refuse("files", "a path, a URL, or a list of these", tree.describe_value(paths), advice)
    locations = []
    for path in several:
        matches = reader.find(path)
        if not matches:
            refuse("files", "files", f"none that fit {os.fspath(path)!r}", kind=DataError)
        locations += matches
    seen = set[str]()
    for location in locations:
        if location in seen:
            refuse("files", "each file once", f"{location} twice", kind=DataError)
        seen.add(location)
    return locations


def _format_of(locations: Sequence[str], chosen: str | None) -> str:
    for location in locations:
        if _suffix(location) in _COMPRESSED:
            refuse_compressed(location, f".{_suffix(location)}")
    if chosen is not None:
        read_choice("file_format", chosen, tuple(_SUFFIXES))
        return chosen
    known = {suffix: name for name, suffixes in _SUFFIXES.items() for suffix in suffixes}
    formats = {known.get(_suffix(location)): location for location in locations}
    if len(formats) > 1 or None in formats:
        expected = f"files of one suffix of {', '.join(known)}"
        got = ", ".join(formats.values())
        refuse("files", expected, got, "give file_format=…", kind=DataError)
    return next(name for name in formats if name is not None)


def _suffix(location: str) -> str:
    return split_query(location)[0].rpartition("/")[2].rpartition(".")[2].lower()


# Indexes


def _open_all(
    locations: Sequence[str], form: Format, reader: FileReader, folder: str | None
) -> list[IndexedFile]:
    """Read the indexes of all files, and make those that are missing or out of date."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        opened = list(pool.map(lambda each: _open(each, form, reader, folder), locations))
    if stale := [file.location for file, state in opened if state == "stale"]:
        warn(
            f"files: changed since they were indexed, and indexed again: {_abridge(stale)}",
        )
    if damaged := [file.index_location for file, state in opened if state == "damaged"]:
        warn(
            f"files: damaged indexes were made again: {_abridge(damaged)}",
        )
    return [file for file, _ in opened]


def _open(
    location: str, form: Format, reader: FileReader, folder: str | None
) -> tuple[IndexedFile, str]:
    """Read the index of a file, or make it; return why one was made again, or ""."""
    stamp = reader.stamp(location)
    if stamp is None:
        refuse("files", "files that exist", f"{location}: no such file", kind=DataError)
    index = _index_of(location, folder)
    known, state = _read_header(index, reader)
    content = {"version": _VERSION, "kind": type(form).__name__, "stamp": [*stamp]}
    if known is not None and known.get("stamp") != content["stamp"]:
        state = "stale"
    if known is None or any(known.get(key) != value for key, value in content.items()):
        known = _make_index(location, index, form, reader, content)
    file = IndexedFile(location, index, stamp, known["size"], known["rows"], known["stride"])
    return file, state


def _index_of(location: str, folder: str | None) -> str:
    """Return the location of an index; in a given folder, the path is part of its name."""
    if folder is not None:
        name = split_query(location)[0].rpartition("/")[2]
        return os.path.join(folder, f"{name}-{zlib.crc32(location.encode()):08x}.index")
    base, query = split_query(location)
    parent, _, name = base.rpartition("/")
    return f"{parent}/{_FOLDER}/{name}.index{query}"


def _read_header(index: str, reader: FileReader) -> tuple[dict[str, Any] | None, str]:
    """Read the header of an index, if there is one; return why there is none: "" or "damaged"."""
    content = reader.read_start(index, HEADER_BYTES)
    stamp = reader.stamp(index) if content else None
    if stamp is None:
        return None, ""
    try:
        header = json.loads(content)
    except (ValueError, RecursionError):
        return None, "damaged"
    is_complete = isinstance(header, dict) and _is_complete(header, stamp)
    return (header, "") if is_complete else (None, "damaged")


def _is_complete(header: dict[str, Any], stamp: Stamp) -> bool:
    """Whether a header is undamaged, and its index and its file have the recorded sizes."""
    if header.get("checksum", "") not in ("", _checksum(header)):  # stepfold 0.2 wrote none
        return False
    if header.get("version") != _VERSION:
        return True  # another form, which is not read
    if header.keys() | {"checksum"} != {"version", "kind", "stamp", "checksum", *_COUNTS}:
        return False
    if not all(type(header[name]) is int and header[name] >= 0 for name in _COUNTS):
        return False
    size, rows, stride, length = (header[name] for name in _COUNTS)
    of_file = header["stamp"]
    has_size = isinstance(of_file, list) and len(of_file) == 2 and of_file[0] in (None, size)
    marks = -(-rows // stride) + 1 if stride and header["kind"] == Lines.__name__ else 0
    is_length = length == HEADER_BYTES + 8 * marks and stamp.size in (None, length)
    return has_size and is_length and bool(stride) and rows <= _MOST_ROWS


def _checksum(header: dict[str, Any]) -> str:
    content = {name: value for name, value in header.items() if name != "checksum"}
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def _make_index(
    location: str, index: str, form: Format, reader: FileReader, content: dict[str, Any]
) -> dict[str, Any]:
    """Find the rows of a file, and write them to its index; return the header."""
    if not is_url(index):
        _check_writable(os.path.dirname(index))
    with SpooledTemporaryFile(_IN_MEMORY) as file:
        file.seek(HEADER_BYTES)
        size, rows, stride = form.index(location, file)
        stamp = reader.stamp(location)
        if stamp is None or [*stamp] != content["stamp"] or stamp.size not in (None, size):
            refuse_changed(location)
        header = content | {"size": size, "rows": rows, "stride": stride, "bytes": file.tell()}
        header["checksum"] = _checksum(header)
        file.seek(0)
        file.write(json.dumps(header).encode().ljust(HEADER_BYTES))
        file.seek(0)
        try:
            reader.write(index, file)
        except DataError as error:
            error.add_note("to keep indexes elsewhere, give files(…, index=a directory)")
            raise
        except OSError as error:
            _refuse_index_folder(os.path.dirname(index), error.strerror)
    return header


def _check_writable(folder: str) -> None:
    problem = None
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        problem = error.strerror
    if problem or not os.access(folder, os.W_OK | os.X_OK):
        _refuse_index_folder(folder, problem or "no permission to write")


def _refuse_index_folder(folder: str, problem: str | None) -> None:
    advice = "give index=…, a directory that can be written"
    refuse("files", "a directory for indexes", f"{folder}: {problem}", advice, kind=DataError)


# The source


class Files(Source):
    """A source over the rows of files, returned by `files`."""

    name = "files"

    def __init__(
        self, indexed: Sequence[IndexedFile], form: Format, parse: Callable[[Any], Any] | None
    ) -> None:
        self._files, self._form, self._parse = indexed, form, parse
        self._starts = np.cumsum([0, *(file.rows for file in indexed)])
        self._rows = range(int(self._starts[-1]))  # of the files
        self.length = len(self._rows)
        if not self.length:
            refuse("files", "rows", f"none in {len(indexed)} files", kind=DataError)
        self._names = _names(indexed)
        self.fingerprint = {
            "files": len(indexed),
            "rows": self._digests(lambda file: f"{file.rows} rows"),
            "contents": self._digests(lambda file: f"{file.size} {file.stamp.version}"),
        }

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            part = copy.copy(self)
            part._rows = self._rows[index]
            part.length = len(part._rows)
            if part._rows != range(int(self._starts[-1])):
                part.fingerprint = self.fingerprint | {"part": str(part._rows)}
            return part
        return super().__getitem__(index)

    def __repr__(self) -> str:
        return f"files({_abridge(self._names)}: {self.length} rows)"

    def examples(self, rows: Rows) -> list[Any]:
        indices = self._rows.start + self._rows.step * np.asarray(row_list(rows), np.int64)
        which = np.searchsorted(self._starts, indices, "right") - 1
        by_file, requests = which.argsort(kind="stable"), []
        numbers, firsts = np.unique(which[by_file], return_index=True)
        groups = np.split(by_file, firsts[1:])
        for number, group in zip(numbers.tolist(), groups, strict=True):
            own = indices[group] - self._starts[number]
            requests.append(FileRows(self._files[number], own.tolist()))
        rows_in_order: list[Any] = [None] * len(indices)
        for group, rows_read in zip(groups, self._form.read(requests), strict=True):
            for position, row in zip(group.tolist(), rows_read, strict=True):
                rows_in_order[position] = row
        if self._parse is None:
            return rows_in_order
        return [
            self._parsed(row, index)
            for row, index in zip(rows_in_order, indices.tolist(), strict=True)
        ]

    def _parsed(self, row: Any, index: int) -> Any:
        function: Any = self._parse
        try:
            return function(row)
        except Exception as error:
            number = int(np.searchsorted(self._starts, index, "right")) - 1
            where = f"row {index - self._starts[number]} of {self._names[number]}"
            error.add_note(f"parsing {where}, row {self._rows.index(index)} of the source")
            raise

    def difference(self, saved: Any) -> str:
        now = self.fingerprint
        if not isinstance(saved, dict) or saved.keys() | {"part"} != now.keys() | {"part"}:
            return super().difference(saved)
        if saved["rows"] != now["rows"]:
            count = f"source was {saved['files']} files and is {now['files']}"
            names = self._new_names("rows", saved)
            if names:
                return f"{count}, of which these are new or have other rows: {_abridge(names)}"
            is_order = saved["files"] == now["files"]
            return f"{count} of them{', in another order' if is_order else ''}"
        was, part = (each.get("part", "all") for each in (saved, now))
        if was != part:
            return f"rows were {was} and are {part}"
        if saved["contents"] != now["contents"]:
            changed = _abridge(self._new_names("contents", saved))
            warn(
                f"files: the contents of {changed} changed since the position was saved, but not "
                "their numbers of rows; the batches continue with the new contents",
            )
        return ""

    def _digests(self, describe: Callable[[IndexedFile], str]) -> list[str]:
        """Return a digest of the names and descriptions of each file, or of a few at a time."""
        texts = [
            f"{name} {describe(file)}\n"
            for name, file in zip(self._names, self._files, strict=True)
        ]
        size = -(-len(texts) // _DIGESTS)
        groups = ["".join(texts[i : i + size]) for i in range(0, len(texts), size)]
        return [f"{zlib.crc32(group.encode()):08x}" for group in groups]

    def _new_names(self, part: str, saved: dict[str, Any]) -> list[str]:
        """Return the names of files whose digests are not in a saved fingerprint."""
        known, size = set(saved[part]), -(-len(self._names) // _DIGESTS)
        return [
            name
            for number, digest in enumerate(self.fingerprint[part])
            if digest not in known
            for name in self._names[number * size : (number + 1) * size]
        ]


def _names(indexed: Sequence[IndexedFile]) -> list[str]:
    """Return paths relative to the common folder, which are the same on another machine."""
    parts = [split_query(file.location)[0].split("/") for file in indexed]
    folders = zip(*(each[:-1] for each in parts), strict=False)
    common = len([*itertools.takewhile(lambda same: len({*same}) == 1, folders)])
    return ["/".join(each[common:]) for each in parts]


def _abridge(names: Sequence[str]) -> str:
    first = ", ".join(names[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"
