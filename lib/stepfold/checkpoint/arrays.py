"""Read stored arrays and verify the checksum of every part.

Arrays are read with tensorstore, the storage layer of orbax, because orbax returns stored values
unverified. Each process reads only the stored parts that its devices need.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore

from stepfold.checkpoint.leaves import (
    Leaf,
    Region,
    StoredArray,
    as_slices,
    checksum,
    empty,
    map_arrays,
    overlap,
    region,
    stored_name,
    within,
)
from stepfold.checkpoint.manifest import FILES, STATE, DamageError, Manifest, stream_path
from stepfold.checkpoint.tier_file import Location, StepLocations
from stepfold.errors import CheckpointError, refuse
from stepfold.internals import texts

_AT_ONCE = 4  # leaves read concurrently; bounds the memory used beyond the restored leaves


class ArrayReader:
    """Read the arrays of one step."""

    def __init__(self, step: Path, manifest: Manifest) -> None:
        self._leaves, self._shards = manifest.leaves, manifest.shards
        # Not a URL, in which some characters have a special meaning.
        self._base = {"driver": "file", "path": f"{step}/{STATE}/"}
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 1 << 24}})

    def map(self, function: Callable[[str], Any], names: Sequence[str]) -> Iterator[Any]:
        """Call a function for each name, a few concurrently, and yield the results in order."""
        with ThreadPoolExecutor(_AT_ONCE, "stepfold-restore") as threads:
            running: deque[Future[Any]] = deque()
            for name in names:
                running.append(threads.submit(function, name))
                if len(running) == _AT_ONCE:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()

    def problems(self, name: str) -> list[CheckpointError]:
        """List the errors of a leaf, one for each part that is damaged or cannot be read."""
        try:
            store = self._open_array(name)
        except CheckpointError as error:
            return [error]
        problems = []
        for part in self._shards[name]:
            try:
                self._read(store, name, part)
            except CheckpointError as error:
                problems.append(error)
        return problems

    def read_leaf(self, name: str) -> np.ndarray:
        """Read an entire leaf."""
        (array,) = self.read_regions(name, [region((), self._leaves[name].shape)]).values()
        return array

    def read_regions(self, name: str, wanted: Sequence[Region]) -> dict[Region, np.ndarray]:
        """Read distinct regions of a leaf, each into its own array; raise on damage."""
        leaf = self._leaves[name]
        if 0 in leaf.shape:  # orbax stores nothing for empty arrays
            return {part: empty(part, leaf.dtype) for part in wanted}
        store = self._open_array(name)
        arrays: dict[Region, np.ndarray] = {}
        for part in self._shards[name]:
            overlaps = {
                target: both for target in wanted if (both := overlap(part, target)) is not None
            }
            if not overlaps:
                continue
            values = self._read(store, name, part)
            for target, both in overlaps.items():
                if target == part:  # no copy
                    arrays[target] = values
                    continue
                if target not in arrays:
                    arrays[target] = empty(target, leaf.dtype)
                arrays[target][as_slices(within(both, target))] = values[
                    as_slices(within(both, part))
                ]
        return arrays

    def fill(self, name: str, value: Any) -> Any:
        """Read the arrays in a position or in `extra`; raise on damage."""
        return map_arrays(value, name, self._read_stored)

    def stored_problems(self, arrays: Mapping[str, StoredArray]) -> Iterator[CheckpointError]:
        """Yield an error for each array of the metadata that is damaged or cannot be read."""
        for name, array in arrays.items():
            try:
                self._read_stored(name, array)
            except CheckpointError as error:
                yield error

    def _read_stored(self, name: str, stored: StoredArray) -> np.ndarray:
        return self._verified(name, stored, lambda: self._read_stream(stored))

    def _read(self, store: Any, name: str, part: Region) -> np.ndarray:
        stored = self._shards[name][part]
        label = f"{name}[{', '.join(f'{start}:{stop}' for start, stop in part)}]"
        return self._verified(label, stored, lambda: self._read_part(store, part))

    def _verified(
        self, label: str, stored: StoredArray, read: Callable[[], np.ndarray]
    ) -> np.ndarray:
        """Read an array, or its bytes, and compare them with the checksum."""
        try:
            array = read()
        except CheckpointError:
            raise
        except Exception as error:
            raise self._error(label, error) from error
        if checksum(array) != stored.checksum:
            raise DamageError(f"{label}: the values are not those that were saved")
        return array.view(jax.numpy.dtype(stored.leaf.dtype)).reshape(stored.leaf.shape)

    def _read_stream(self, stored: StoredArray) -> np.ndarray:
        path = stream_path(self._base["path"], stored.stream)
        return np.fromfile(path, np.uint8, stored.leaf.bytes, offset=stored.offset)

    def _open_array(self, name: str) -> Any:
        leaf = self._leaves[name]
        kvstore = {"driver": "ocdbt", "base": self._base, "path": stored_name(name)}
        try:  # nothing is read yet, so an error is not damage
            spec = tensorstore.Spec({"driver": "zarr", "kvstore": kvstore})
        except Exception as error:
            raise CheckpointError(f"{name}: cannot be read: {_message(error)}") from error
        try:
            store = tensorstore.open(spec, context=self._context, read=True).result()
        except Exception as error:
            raise self._error(name, error) from error
        stored = Leaf(tuple(store.shape), store.dtype.numpy_dtype.name)
        chunk = store.chunk_layout.read_chunk.shape or ()
        if any((size or 0) > limit for size, limit in zip(chunk, store.shape, strict=False)):
            # tensorstore would allocate a whole chunk, and abort the process if it cannot.
            refuse(name, f"chunks within {stored}", "larger ones", kind=DamageError)
        if stored != leaf._replace(key=None):
            refuse(name, str(leaf._replace(key=None)), str(stored), kind=DamageError)
        return store

    def _read_part(self, store: Any, part: Region) -> np.ndarray:
        array: np.ndarray = np.asarray(store[as_slices(part)].read().result())
        return array

    def _error(self, label: str, error: Exception) -> CheckpointError:
        kind = DamageError if self._is_damage(error) else CheckpointError
        return kind(f"{label}: cannot be read: {_message(error)}")

    def _is_damage(self, error: Exception) -> bool:
        """Return whether the bytes of the step cause an error.

        tensorstore has the same status for a damaged file and for a path or a specification that it
        refuses. So check whether it can read a file that exists.
        """
        if isinstance(error, FileNotFoundError):
            return True
        status = texts.STATUS.match(_message(error))
        # tensorstore raises INVALID_ARGUMENT as a ValueError without its name.
        if not (status[0] in texts.DAMAGE if status else type(error) is ValueError):
            return False
        try:
            files = tensorstore.KvStore.open(self._base, context=self._context).result()
            is_found = files.read(FILES).result().state == "value"
        except Exception:  # noqa: BLE001  the first error is raised
            return False
        return is_found or not os.path.exists(self._base["path"] + FILES)


def _message(error: Exception) -> str:
    return f"{error}".partition("[")[0].strip() or type(error).__name__


class TierReader(ArrayReader):
    """Read the arrays of one step from the files of any host; fall back to another if one fails."""

    def __init__(
        self, fetch: Callable[[Location, int], np.ndarray], where: str, contents: Manifest
    ) -> None:
        self._leaves, self._shards = contents.leaves, contents.shards
        self._fetch, self._where = fetch, where
        self._location: StepLocations = contents.location

    def _open_array(self, name: str) -> dict[Region, list[Location]]:
        return self._location.slices[name]

    def _read(self, store: dict[Region, list[Location]], name: str, part: Region) -> np.ndarray:
        label = f"{name}[{', '.join(f'{start}:{stop}' for start, stop in part)}]"
        return self._first_good(label, self._shards[name][part], store[part])

    def _read_stored(self, name: str, stored: StoredArray) -> np.ndarray:
        locations = self._location.streams[stored.stream]
        moved = [where._replace(offset=where.offset + stored.offset) for where in locations]
        return self._first_good(name, stored, moved)

    def _first_good(
        self, label: str, stored: StoredArray, locations: Sequence[Location]
    ) -> np.ndarray:
        problem: CheckpointError | None = None
        for location in locations:
            read = partial(self._fetch, location, stored.leaf.bytes)
            try:
                return self._verified(label, stored, read)
            except CheckpointError as error:
                problem = problem or error
        # Not to be read anywhere counts as damage, so that a restore falls back to another step.
        raise DamageError(f"{self._where}: {problem or f'{label}: missing'}")

    def _is_damage(self, error: Exception) -> bool:  # noqa: ARG002
        return True
