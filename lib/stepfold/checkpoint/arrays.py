"""Read stored arrays and verify the checksum of every part.

Arrays are read with tensorstore, the storage layer of orbax, because orbax returns stored values
unverified. Each process reads only the stored parts that its devices need.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore

from stepfold.checkpoint.leaves import Leaf, Region, checksum, region, stored_name
from stepfold.checkpoint.manifest import STATE
from stepfold.checkpoint.sealed import DamageError
from stepfold.errors import CheckpointError

_AT_ONCE = 4  # leaves read concurrently; bounds the memory used beyond the restored leaves


class Reader:
    """Read the arrays of one step."""

    def __init__(self, step: Path, leaves: Mapping[str, Leaf], shards: Mapping[str, Any]) -> None:
        self._leaves, self._shards = leaves, shards
        # Not a URL, in which some characters have a special meaning.
        self._place = {"driver": "file", "path": f"{step.absolute()}/{STATE}/"}
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 1 << 24}})

    def map(self, function: Callable[[str], Any], names: Sequence[str]) -> Iterator[Any]:
        """Call a function for each name, a few concurrently, and yield the results in order."""
        with ThreadPoolExecutor(_AT_ONCE, "stepfold-restore") as threads:
            running: deque[Any] = deque()
            try:
                for name in names:
                    running.append(threads.submit(function, name))
                    if len(running) == _AT_ONCE:
                        yield running.popleft().result()
                while running:
                    yield running.popleft().result()
            finally:
                threads.shutdown(cancel_futures=True)

    def problems(self, name: str) -> list[str]:
        """List the damaged parts of a leaf, one line each."""
        try:
            store = self._open(name)
        except DamageError as error:
            return [str(error)]
        found = []
        for part, crc in self._shards[name].items():
            try:
                self._read(store, name, part, crc)
            except DamageError as error:
                found.append(str(error))
        return found

    def whole(self, name: str) -> np.ndarray:
        """Read an entire leaf."""
        (array,) = self.parts(name, [region((), self._leaves[name].shape)])
        return array

    def parts(self, name: str, wanted: Sequence[Region]) -> list[np.ndarray]:
        """Read distinct regions of a leaf, each into its own array; raise on damage."""
        leaf = self._leaves[name]
        dtype = jax.numpy.dtype(leaf.dtype)
        if 0 in leaf.shape:  # orbax stores nothing for empty arrays
            return [np.zeros([stop - start for start, stop in part], dtype) for part in wanted]
        store = self._open(name)
        made: list[Any] = [None] * len(wanted)
        for part, crc in self._shards[name].items():
            needed = [i for i, whole in enumerate(wanted) if _overlap(part, whole) is not None]
            if not needed:
                continue
            read = self._read(store, name, part, crc)
            for i in needed:
                if wanted[i] == part:  # same region as stored: no copy
                    made[i] = read
                    continue
                if made[i] is None:
                    made[i] = np.empty([stop - start for start, stop in wanted[i]], dtype)
                both = _overlap(part, wanted[i])
                made[i][_within(both, wanted[i])] = read[_within(both, part)]
        return made

    def _open(self, name: str) -> Any:
        leaf = self._leaves[name]
        saved = sum(_count(part) for part in self._shards[name])
        if saved != _count(region((), leaf.shape)):
            raise DamageError(
                f"{name}: expected checksums of all of {leaf}, got of {saved} elements"
            )
        kvstore = {"driver": "ocdbt", "base": self._place, "path": stored_name(name)}
        try:
            store = tensorstore.open(
                {"driver": "zarr", "kvstore": kvstore}, context=self._context, read=True
            ).result()
        except Exception as error:
            raise _blamed(name, error) from error
        stored = Leaf(tuple(store.shape), store.dtype.numpy_dtype.name)
        if stored != leaf._replace(key=None):
            raise DamageError(f"{name}: expected {leaf._replace(key=None)}, got {stored}")
        return store

    def _read(self, store: Any, name: str, part: Region, crc: int) -> np.ndarray:
        where = tuple(slice(*ends) for ends in part)
        spelled = f"{name}[{', '.join(f'{start}:{stop}' for start, stop in part)}]"
        try:
            read: np.ndarray = np.asarray(store[where].read().result())
        except Exception as error:
            raise _blamed(spelled, error) from error
        if checksum(read) != crc:
            raise DamageError(f"{spelled}: the values are not those that were saved")
        return read


def _blamed(what: str, error: Exception) -> CheckpointError:
    """Distinguish damage from a lack of resources or permissions."""
    words = f"{error}".partition("[")[0].strip() or type(error).__name__
    lacks = "RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "UNAVAILABLE", "DEADLINE_EXCEEDED"
    kind = CheckpointError if words.startswith(lacks) else DamageError
    return kind(f"{what}: cannot be read: {words}")


def _count(part: Region) -> int:
    return math.prod(stop - start for start, stop in part)


def _overlap(one: Region, other: Region) -> Region | None:
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def _within(part: Region | None, whole: Region) -> tuple[slice, ...]:
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(part or (), whole, strict=True))
