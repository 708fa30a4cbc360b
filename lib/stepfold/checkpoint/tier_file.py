"""The files of temporary steps: the bytes of arrays, a table of them, and a trailer.

The table is JSON, as that of a manifest. It comes last, so that a file can be written and sent
while its checksums are computed. The trailer has its size, its checksum and a magic number; a file
without it is not complete.
"""

import json
import math
import os
import re
import secrets
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stepfold.checkpoint import manifest
from stepfold.checkpoint.leaves import Leaf, Region, bytes_of
from stepfold.checkpoint.manifest import DamageError, Manifest
from stepfold.checkpoint.steps import check_regular, converted_errors

_MAGIC = b"stepfold"
_TRAILER = struct.Struct("<QI8s")
_FILE = re.compile(r"(\d+)-([0-9a-f]+)\.(\d+)-(\d+)\.(slices|copy|later)(\.damaged)?")


class MissingError(DamageError):
    """Files of a save are missing: those of a host, or of a save that has not ended."""


class Save(NamedTuple):
    """What tells the saves of a step apart; the newest is the largest.

    `life` is the token of a start of the run, and begins with the time. `number` counts the saves
    since then.
    """

    step: int
    life: str
    number: int


class TierFile(NamedTuple):
    """A file of a save, with what its name tells."""

    name: str
    save: Save
    process: int  # whose slices it has
    kind: str
    is_damaged: bool

    @classmethod
    def parse(cls, name: str) -> "TierFile | None":
        if (match := _FILE.fullmatch(name)) is None:
            return None
        step, life, number, process, kind, damaged = match.groups()
        save = Save(int(step), life, int(number))
        return cls(name, save, int(process), kind, damaged is not None)


def file_name(save: Save, process: int, kind: str) -> str:
    """Return the name of a file."""
    return f"{save.step}-{save.life}.{save.number}-{process}.{kind}"


def good_files(names: Iterable[str]) -> list[TierFile]:
    """Return the files that have such names and were not set aside."""
    files = filter(None, map(TierFile.parse, names))
    return sorted(file for file in files if not file.is_damaged)


class Location(NamedTuple):
    """Where bytes are stored: in a file that a process can read, at an offset."""

    process: int
    name: str
    offset: int


class Table(NamedTuple):
    """The table of a file, and a process that can read it."""

    file: TierFile
    process: int
    content: Any


def pieces(content: Any, arrays: Sequence[np.ndarray]) -> Iterator[memoryview]:
    """Yield the bytes of a file with these arrays and this table."""
    for array in arrays:
        yield bytes_of(array)
    text = json.dumps(content).encode()
    yield memoryview(text)
    yield memoryview(_TRAILER.pack(len(text), zlib.crc32(text), _MAGIC))


def read_table(path: Path) -> Any:
    """Read the table of a file; raise `DamageError` if the file is not complete."""
    with converted_errors(path, "cannot be read"):
        try:
            check_regular(path, DamageError)
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TRAILER.size))
                length, crc, magic = _TRAILER.unpack(file.read())
                start = size - _TRAILER.size - length
                file.seek(max(0, start))
                text = file.read(length) if start >= 0 else b""
            if magic == _MAGIC and zlib.crc32(text) == crc:
                return json.loads(text)
        except FileNotFoundError:
            raise DamageError(f"{path.name}: missing") from None
        except (ValueError, struct.error, RecursionError, OverflowError) as error:
            problem = f"{path.name}: it is damaged or not complete: {error}"
            raise DamageError(problem) from error
    raise DamageError(f"{path.name}: it is damaged or not complete")


def read(path: Path, offset: int, size: int) -> np.ndarray:
    """Read bytes of a file; raise `DamageError` if there are fewer."""
    content = np.empty(size, np.uint8)
    with converted_errors(path, "cannot be read"):
        try:
            with path.open("rb") as file:
                file.seek(offset)
                count = file.readinto(content.data)
        except FileNotFoundError:
            raise DamageError(f"{path.name}: missing") from None
    if count != size:
        raise DamageError(f"{path.name}: it is shorter than when it was saved")
    return content


def drop_damaged(path: Path, table: Any) -> None:
    """Drop the slices from a table whose values are not those that were saved.

    Raises `DamageError` if an array of the metadata is not.
    """
    with manifest.checked_form(path):
        offset, good = 0, []
        for name, index, crc in table["shards"]:
            shape = [stop - start for start, stop in index]
            size = Leaf(tuple(shape), table["leaves"][name][1]).bytes
            if zlib.crc32(read(path, offset, size).data) == crc:
                good.append([name, index, crc])
            offset += size
        for array in manifest.stored_arrays("", table["arrays"]).values():
            content = read(path, offset + array.offset, array.leaf.bytes)
            if zlib.crc32(content.data) != array.checksum:
                raise DamageError(f"{path.name}: an array is not the one that was saved")
        table["shards"] = good


def write_host(path: Path, content: Any) -> None:
    """Write the identity of a directory, unless it has one."""
    if read_host(path) is not None:
        return
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        new.write_text(json.dumps(content))
        with suppress(OSError):  # such as a file system without links
            os.link(new, path)  # unlike a rename, it fails if the path exists
        if read_host(path) is None:
            new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def read_host(path: Path) -> dict[str, Any] | None:
    """Read the identity of a directory; None if it has none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


# The tables of a save


class StepLocations(NamedTuple):
    """Where the slices of a step are.

    Attributes:
      save: the save.
      keep: the number of steps that its run keeps.
      slices: the locations of each slice, by leaf and region.
      streams: the locations of the arrays in the metadata, by stream.
    """

    save: Save
    keep: int
    slices: dict[str, dict[Region, list[Location]]]
    streams: dict[str, list[Location]]


def merge(tables: Sequence[Table], where: str, process: int) -> Manifest:
    """Merge the tables of one save; raise if they do not cover every leaf."""
    later = [table for table in tables if table.file.kind == "later"]
    tables = [table for table in tables if table.file.kind != "later"]
    # The order in which locations are tried: those of this process first.
    tables = sorted(tables, key=lambda table: table.process != process)
    if not tables:
        raise MissingError(f"{where}: missing")
    first = tables[0].content
    leaves = {name: manifest.read_leaf(name, *leaf) for name, leaf in first["leaves"].items()}
    slices: dict[str, dict[Region, list[Location]]] = {name: {} for name in leaves}
    streams: dict[str, list[Location]] = {}
    records: dict[int, Any] = {}
    for file, reader, content in tables:
        same = ("processes", "plan", "leaves", "keep")
        if any(content[name] != first[name] for name in same):
            raise DamageError(f"{where}: {file.name} is of another state than the other files")
        content = manifest.check_process(content, where)
        offset, shards = 0, []
        for name, index, crc in content["shards"]:
            part = tuple((start, stop) for start, stop in index)
            if part not in slices[name]:
                shards.append([name, part, crc])
            slices[name].setdefault(part, []).append(Location(reader, file.name, offset))
            size = leaves[name]._replace(shape=tuple(stop - start for start, stop in part))
            offset += size.bytes
        stream = manifest.ARRAYS.format(file.process)
        streams.setdefault(stream, []).append(Location(reader, file.name, offset))
        record = records.setdefault(file.process, {**content, "shards": []})
        record["shards"] = [*record["shards"], *shards]
    missing = [process for process in range(first["processes"]) if process not in records]
    if missing:
        raise MissingError(f"{where}: the slices of process {missing[0]} are missing")
    for name, leaf in leaves.items():
        have = sum(math.prod(stop - start for start, stop in part) for part in slices[name])
        if have < math.prod(leaf.shape):
            raise MissingError(f"{where}: slices of {name} are missing")
    added = later[0].content if later else {}
    for table in later[:1]:
        stream = manifest.LATER_ARRAYS.format(table.content.get("stream", 0))
        streams[stream] = [Location(table.process, table.file.name, 0)]
    save = tables[0].file.save
    metadata = manifest.metadata_of(records[0], added, where, save.step)
    ordered = [records[number] for number in range(first["processes"])]
    merged = manifest.merge_processes(ordered, metadata._replace(identity=str(save)))
    return merged._replace(location=StepLocations(save, first["keep"], slices, streams))
