"""Steps in object storage, through the key-value stores of tensorstore.

Object storage has no atomic rename. A save writes everything below a folder with a unique name, and
last one object that makes it a step. That write succeeds only if there is no such object yet:

    12.commit        the folder, the size of its objects, and the checksums of its manifests
    12.damaged       the former commit of a damaged step
    saves/12-67f0c1aa-5d…/0.json        the manifest of process 0 (`manifest.py`)
    saves/12-67f0c1aa-5d…/0.000017      its shards, one after the other, cut into objects
    saves/12-67f0c1aa-5d…/arrays-0.000002   the arrays in its metadata, likewise

Each process writes its own shards and its manifest. Process 0 waits for all manifests before it
commits. Every byte that is read has a checksum. A step is deleted by deleting its commit first; a
folder without a commit is the rest of a save or a deletion that was interrupted.
"""

import re
import secrets
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from stepfold.checkpoint import manifest
from stepfold.checkpoint.arrays import ArrayReader
from stepfold.checkpoint.host_buffers import HostBuffers
from stepfold.checkpoint.leaves import (
    Region,
    StoredArray,
    arrays_of,
    bytes_of,
    leaves_of,
    shards_of,
)
from stepfold.checkpoint.manifest import DamageError, Manifest, NewerError, StepMetadata
from stepfold.checkpoint.steps import already_exists, join_location
from stepfold.core.processes import agreement, broadcast_from_first, spell_error
from stepfold.errors import CheckpointError, refuse
from stepfold.object_storage import Bucket, range_below

_PATIENCE = 600.0  # seconds that process 0 waits for the manifests of the other processes
_OBJECT = 1 << 24  # bytes of an object with shards; copying one holds the GIL
_AT_ONCE = 16  # objects that are written, or kept while reading: bounds the memory
_DAY = 24 * 60 * 60.0

_FORMAT_NAME = "stepfold.json"
_COMMIT = re.compile(r"(0|[1-9]\d*)\.commit")
_COPIED = re.compile(r"(0|[1-9]\d*)/state/")  # an object of a series that was copied to a bucket
_MARKER = re.compile(r"(\d+)\.damaged(-\d+)?")
_FOLDER = re.compile(r"saves/(\d+)-([0-9a-f]+)-[0-9a-f]+/")


class BucketStore(Bucket):
    """Steps at a URL; the methods are those of `store.DirectoryStore`."""

    def __init__(self, url: str, *, save: bool = False) -> None:
        super().__init__(url)
        if save and jax.process_index() == 0:  # find out whether it is writable, before step 1
            self._write_format()

    def _write_format(self) -> None:
        self.write(_FORMAT_NAME, manifest.encode_checked({"format": manifest.FORMAT}))

    def _probe(self, name: str, verb: str) -> None:
        if name != _FORMAT_NAME:
            self._write_format() if verb == "written" else self.read(_FORMAT_NAME)
            self._outage.end(verb)

    # Reading

    def steps(self) -> list[int]:
        names = self._names()
        numbers = sorted(int(match[1]) for match in map(_COMMIT.fullmatch, names) if match)
        if not numbers and (copied := next(filter(_COPIED.match, names), None)):
            got = f"a folder of a file system: {copied.partition('/')[0]}/"
            advice = "copy the series to a file system, and give its path"
            refuse(self.location, "steps saved to a URL", got, advice, kind=CheckpointError)
        return numbers

    def has_step(self, step: int) -> bool:
        return self.read(f"{step}.commit") is not None

    def path_of(self, step: int) -> str:
        return join_location(self.location, f"{step}")

    def other_names(self) -> list[str]:
        folders, names = self._folders(), self._names()
        markers = [name for name in names if _MARKER.fullmatch(name)]
        kept = self._folders_of([*filter(_COMMIT.fullmatch, names), *markers])
        return markers + [folder for folder in folders if folder not in kept]

    def saved_at(self, step: int) -> float:
        return _time_of(self._read_commit(step)["folder"])

    def read_metadata(self, step: int) -> StepMetadata:
        with manifest.checked_form(self.path_of(step)):
            commit = self._read_commit(step)
            (first,) = self._read_processes(step, commit, 1)
            return self._metadata(step, commit, first)

    def read_manifest(self, step: int) -> Manifest:
        with manifest.checked_form(self.path_of(step)):
            commit = self._read_commit(step)
            processes = self._read_processes(step, commit, len(commit["manifests"]))
            metadata = self._metadata(step, commit, processes[0])
            merged = manifest.merge_processes(processes, metadata)
            return merged._replace(location=(commit["folder"], commit["object_bytes"]))

    def open_arrays(self, step: int, contents: Manifest) -> ArrayReader:  # noqa: ARG002
        return BucketReader(self.start_read, contents)

    def _read_commit(self, step: int) -> Any:
        content = self.read(f"{step}.commit")
        if content is None:
            raise DamageError(f"{step}.commit: missing")
        return _decode_commit(f"{step}.commit", content, self.path_of(step))

    def _read_processes(self, step: int, commit: Any, count: int) -> list[Any]:
        names = [f"{commit['folder']}{process}.json" for process in range(count)]
        reads = list(map(self.start_read, names))
        processes = []
        for name, crc, read in zip(names, commit["manifests"], reads, strict=False):
            result = read()
            if result.state == "missing":
                raise DamageError(f"{name}: missing")
            if zlib.crc32(result.value) != crc:
                raise DamageError(f"{name}: its checksum does not fit its content")
            process = manifest.decode_checked(result.value, name)
            processes.append(manifest.check_process(process, self.path_of(step)))
        return processes

    def _metadata(self, step: int, commit: Any, first: Any) -> StepMetadata:
        later = self.read_note(f"{commit['folder']}{manifest.LATER}") or {}
        return manifest.metadata_of(first, later, self.path_of(step), step)

    def read_note(self, name: str) -> Any:
        content = self.read(name)
        return None if content is None else manifest.decode_checked(content, name)

    def list_notes(self, folder: str) -> list[str]:
        return [name.removeprefix(f"{folder}/") for name in self.list_names(f"{folder}/")]

    # Saving

    def begin(
        self,
        state: Any,
        metadata: StepMetadata,
        before_commit: Callable[[], None] | None = None,
        buffers: HostBuffers | None = None,
    ) -> "BucketSave":
        return BucketSave(self, state, metadata, before_commit, buffers)

    def write_stream(self, prefix: str, arrays: Iterable[np.ndarray]) -> None:
        """Write arrays as one stream of bytes, a few objects at once."""
        writes: deque[Callable[[], bytes]] = deque()
        try:
            for number, content in enumerate(_cut(arrays)):
                if len(writes) == _AT_ONCE:
                    writes.popleft()()
                writes.append(self._start_write(f"{prefix}.{number:06d}", content))
            while writes:
                writes.popleft()()
        finally:  # after an error, so that nothing arrives after the folder is deleted
            for write in writes:
                with suppress(CheckpointError):
                    write()

    def publish(self, step: int, content: Mapping[str, Any]) -> None:
        """Commit a folder as the step, unless another run has committed the step."""
        name, commit, problem = f"{step}.commit", manifest.encode_checked(content), None
        try:
            if self.add_note(name, content):
                return
        except CheckpointError as error:
            problem = error
        # A request that is retried, since its answer was lost, finds its own commit.
        if self.read(name) == commit:
            return
        if problem is not None:  # the commit may still arrive: its folder has to stay
            raise problem
        with suppress(CheckpointError):
            self.delete_below(content["folder"])
        raise CheckpointError(already_exists(self.location, step))

    def add_metadata(self, step: int, metrics: Mapping[str, Any], extra: Any) -> None:
        manifest.add_metadata(self, step, self._read_commit(step)["folder"], metrics, extra)

    def delete_stream(self, name: str) -> None:
        self.delete_below(f"{name}.")

    def write_note(self, name: str, content: Any) -> None:
        self.write(name, manifest.encode_checked(content))

    def add_note(self, name: str, content: Any) -> bool:
        result = self.start_read(name)()
        encoded = manifest.encode_checked(content)
        return result.state == "missing" and self._replace(name, result, encoded)

    # Removing

    def delete_note(self, name: str) -> None:
        self._start(name, "deleted", lambda: self._kv.write(name, None))()

    def delete(self, step: int) -> None:
        name = f"{step}.commit"
        result = self.start_read(name)()
        folder = _folder_in(name, result.value)
        is_deleted = result.state == "missing" or self._replace(name, result, None)
        if folder is not None and (is_deleted or self.read(name) is None):
            self.delete_below(folder)

    def set_aside(self, step: int) -> str | None:
        """Copy the commit of a damaged step to a marker, and delete it; keep the folder."""
        name, marker, count = f"{step}.commit", f"{step}.damaged", 1
        try:
            result = self.start_read(name)()
            if result.state == "missing":
                return None
            while self.read(marker) not in (None, result.value):
                count += 1
                marker = f"{step}.damaged-{count}"
            self.write(marker, result.value)
            self._replace(name, result, None)
        except CheckpointError:
            return None
        return marker

    def clean(self, finish: Callable[[int], None] | None = None) -> None:  # noqa: ARG002
        # A commit does not tell whether `finish` was called; the next save deletes the same steps.
        # A recent folder may belong to a save of another run that is not finished.
        old = [folder for folder in self._folders() if time.time() - _time_of(folder) > _DAY]
        markers = [name for name in self._names() if _MARKER.fullmatch(name)] if old else []
        for folder in old:
            step = folder.removeprefix("saves/").partition("-")[0]
            # A commit is read by its name, since a list may be out of date. One that cannot be
            # read may belong to any folder of its step.
            kept = self._folders_of(
                [f"{step}.commit", *(name for name in markers if name.startswith(f"{step}."))]
            )
            if kept.isdisjoint((folder, None)):
                self.delete_below(folder)

    def _folders_of(self, names: Iterable[str]) -> set[str | None]:
        """Return the folders that commits and markers name, with None if one cannot be read."""
        contents = {name: self.read(name) for name in names}
        return {_folder_in(name, text) for name, text in contents.items() if text is not None}

    def delete_below(self, prefix: str) -> None:
        """Delete all objects whose names begin with a prefix."""
        below = range_below(prefix)
        self._start(prefix, "deleted", lambda: self._kv.delete_range(below))()

    def _names(self) -> list[str]:
        """List the commits and the markers."""
        # By their first digit, since a list has a common prefix: folders may have many objects.
        lists = [self.start_list(f"{digit}") for digit in range(10)]
        return sorted(name for wait in lists for name in wait())

    def _folders(self) -> list[str]:
        folders = {name.rpartition("/")[0] + "/" for name in self.list_names("saves/")}
        return sorted(folder for folder in folders if _FOLDER.fullmatch(folder))


class BucketSave:
    """A step that is being saved. Readers see it once its commit is written."""

    def __init__(
        self,
        store: BucketStore,
        state: Any,
        metadata: StepMetadata,
        before_commit: Callable[[], None] | None,
        buffers: HostBuffers | None,
    ) -> None:
        """Copy the state off the devices."""
        self._store, self._metadata, self._before_commit = store, metadata, before_commit
        with agreement(f"{store.path_of(metadata.step)}: not saved"):
            arrays, self._leaves = arrays_of(state), leaves_of(state)
            copies = {} if buffers is None else buffers.copy(arrays)
            for array in arrays.values():  # all copies at once, then wait for each
                for shard in getattr(array, "addressable_shards", ()):
                    if shard.replica_id == 0:
                        shard.data.copy_to_host_async()
            # On CPU without buffers, zero-copy views.
            self._shards = {
                name: copies[name].recorded() if name in copies else shards_of(array)
                for name, array in arrays.items()
                if array.size
            }
        own = [int(time.time()), secrets.randbits(62)]
        seconds, number = broadcast_from_first(own)
        self._folder = f"saves/{metadata.step}-{seconds:x}-{number:016x}/"
        self._deadline: float | None = None

    def commit(self, finish: Callable[[], None] | None = None) -> None:
        """Write the step, as `OrbaxSave.commit` does."""
        store, folder, step = self._store, self._folder, self._metadata.step
        rank, count = jax.process_index(), jax.process_count()
        own_name = f"{folder}{rank}"
        try:
            parts = (part for parts in self._shards.values() for part in parts.values())
            store.write_stream(own_name, parts)
            if self._before_commit is not None:
                self._before_commit()
            content, arrays = manifest.process_manifest(self._metadata, self._leaves, self._shards)
            store.write_stream(f"{folder}{manifest.ARRAYS.format(rank)}", arrays)
            own = manifest.encode_checked(content)
            store.write(f"{own_name}.json", own)
            if rank > 0:
                return
            checksums = [zlib.crc32(own), *self._wait_for_others(count)]
        except Exception as error:
            with suppress(CheckpointError):
                if rank == 0:
                    for process in range(1, count):  # they may still write into the folder
                        with suppress(CheckpointError):
                            self._wait_for(process)
                    store.delete_below(folder)
                else:  # process 0 waits for the manifest
                    store.write_note(f"{own_name}.json", {"failed": spell_error(error)})
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{store.path_of(step)}: not saved: {type(error).__name__}: {error}"
            ) from error
        commit = {"format": manifest.FORMAT, "folder": folder, "object_bytes": _OBJECT}
        store.publish(step, {**commit, "manifests": checksums})
        if finish is not None:
            finish()

    def _wait_for_others(self, count: int) -> Iterator[int]:
        """Wait for the manifests of the other processes, and yield their checksums."""
        for process in range(1, count):
            content = self._wait_for(process)
            if reason := manifest.decode_checked(content, f"{process}.json").get("failed"):
                raise CheckpointError(f"process {process} cannot save its part: {reason}")
            yield zlib.crc32(content)

    def _wait_for(self, process: int) -> bytes:
        """Wait for the manifest of another process, or for its note that it failed."""
        pause = 0.02
        self._deadline = self._deadline or time.monotonic() + _PATIENCE  # for all of them
        while (content := self._store.read(f"{self._folder}{process}.json")) is None:
            if time.monotonic() > self._deadline:
                where = join_location(self._store.location, self._folder)
                raise CheckpointError(
                    f"{where}: process {process} did not save its part within {_PATIENCE:.0f} s of "
                    "process 0; it may have been killed"
                )
            time.sleep(pause)
            pause = min(2 * pause, 2.0)
        return content


class BucketReader(ArrayReader):
    """Read the arrays of one step from its objects."""

    def __init__(self, start_read: Callable[[str], Any], contents: Manifest) -> None:
        self._leaves, self._shards = contents.leaves, contents.shards
        self._folder, self._object = contents.location
        self._start_read = lru_cache(_AT_ONCE)(start_read)  # small leaves share objects

    def _open_array(self, name: str) -> Mapping[Region, StoredArray]:
        return self._shards[name]

    def _is_damage(self, error: Exception) -> bool:  # noqa: ARG002
        return False  # `_read_object` raises a DamageError itself

    def _read_part(self, store: Mapping[Region, StoredArray], part: Region) -> np.ndarray:
        return self._read_stream(store[part])

    def _read_stream(self, stored: StoredArray) -> np.ndarray:
        size, prefix = stored.leaf.bytes, f"{self._folder}{stored.stream}."
        if not size:
            return np.empty(0, np.uint8)
        first, start = divmod(stored.offset, self._object)
        last = (stored.offset + size - 1) // self._object
        self._read_object(f"{prefix}{last:06d}")  # before memory is allocated
        content, filled = np.empty(size, np.uint8), 0
        for number in range(first, last + 1):
            if number < last:  # read one ahead
                self._start_read(f"{prefix}{number + 1:06d}")
            result = self._read_object(f"{prefix}{number:06d}")
            piece = np.frombuffer(result, np.uint8)[start : start + size - filled]
            content[filled : filled + piece.size] = piece
            filled, start = filled + piece.size, 0
        if filled < size:
            raise DamageError(f"{prefix}{last:06d}: it is shorter than when it was saved")
        return content

    def _read_object(self, name: str) -> bytes:
        result = self._start_read(name)()
        if result.state == "missing":
            raise DamageError(f"{name}: missing")
        content: bytes = result.value
        return content


def _cut(arrays: Iterable[np.ndarray]) -> Iterator[bytes]:
    """Join the bytes of all arrays, and cut them into objects."""
    content = bytearray()
    for array in arrays:
        rest = bytes_of(array)
        while rest:
            size = _OBJECT - len(content)
            content += rest[:size]
            rest = rest[size:]
            if len(content) == _OBJECT:
                yield bytes(content)
                content.clear()
    if content:
        yield bytes(content)


def _decode_commit(name: str, content: bytes, where: str) -> Any:
    with manifest.checked_form(where):
        commit = manifest.check_format(manifest.decode_checked(content, name), where)
        size, checksums = commit["object_bytes"], commit["manifests"]
        is_valid = type(size) is int and size > 0 and isinstance(checksums, list) and checksums
        if not (is_valid and _FOLDER.fullmatch(commit["folder"])):
            refuse(name, "the commit of a save", f"{commit!r:.200}", kind=DamageError)
        return commit


def _folder_in(name: str, content: bytes) -> str | None:
    """Return the folder that a commit or a marker names; None if it cannot be read."""
    try:
        return str(_decode_commit(name, content, name)["folder"])
    except (DamageError, NewerError):
        return None


def _time_of(folder: str) -> float:
    return int(folder.split("-")[1], 16)
