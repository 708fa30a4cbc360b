"""Copies of a state in the memory of processes, which survive the death of some of them.

Each process copies its own shards to the host. With replicas, it also keeps those of a process on
another host that no third one has, so that a state sharded over all devices survives the death of
any one host. After a death, each process that is left asks the others for what its devices need
and it lacks. Both go around in a `Ring`, in pieces of limited size, as bytes: no value changes.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from stepfold import tree
from stepfold.checkpoint.leaves import (
    Leaf,
    Region,
    arrays_of,
    as_slices,
    bytes_of,
    leaves_of,
    make_leaf,
    overlap,
    region,
    regions_of,
    within,
)
from stepfold.core.processes import Group
from stepfold.errors import refuse
from stepfold.sharding.place import process_mesh

_PIECE = 64 * 1024**2  # bytes that a process sends at once


class Part(NamedTuple):
    """A region of a leaf, by its number."""

    leaf: int
    region: Region


class HostCopy:
    """Parts of a state that this process has in its memory, as of a step."""

    def __init__(self, state: Any, step: int) -> None:
        self.step, self.leaves = step, list(leaves_of(state).items())
        self._structure: Any = jax.tree.structure(state)
        self._parts: list[dict[Region, np.ndarray]] = [{} for _ in self.leaves]

    @classmethod
    def of(cls, state: Any, step: int) -> Self:
        """Copy the shards of this process."""
        copy = cls(state, step)
        arrays = arrays_of(state, Group((jax.process_index(),)))
        shards = [getattr(array, "addressable_shards", []) for array in arrays.values()]
        for shard in (shard for each in shards for shard in each):
            shard.data.copy_to_host_async()
        # On CPU, zero-copy views; holding them protects donated buffers.
        copy._parts = [
            {region(shard.index, leaf.shape): np.asarray(shard.data) for shard in each}
            for (_, leaf), each in zip(copy.leaves, shards, strict=True)
        ]
        return copy

    @property
    def is_empty(self) -> bool:
        return not any(self._parts)

    def drop(self) -> None:
        """Drop the arrays."""
        self._parts = [{} for _ in self.leaves]

    def replicate(self, replicas: "Replicas") -> None:
        """Exchange the parts that only this process has with those of another."""
        outgoing = [self._parts[part.leaf][part.region] for part in replicas.sent]
        received = replicas.ring.turn(_pack(outgoing), replicas.bytes, replicas.shift)
        self._add(received, replicas.received)

    def collect(self, plan: Any, group: Group, note: bytes) -> tuple[str | None, bytes]:
        """Get the parts that this process lacks for a plan, and the note of process 0 if it is new.

        A process is new if it has no part. All processes of the group call this.

        Returns:
          A leaf of which no process has a part that is needed, or None; and the note.
        """
        own = [[*parts] for parts in self._parts]
        gathered = group.meet([own, len(note)], "the parts that they have")
        note_size = gathered[0][1]  # of process 0
        as_region = lambda pairs: tuple(map(tuple, pairs))  # JSON has no tuples
        has = [[{*map(as_region, regions)} for regions in leaves] for leaves, _ in gathered]
        sent, lacking = _schedule(self._layouts(plan), has, group.processes)
        ring, count, me = Ring(group), len(group.processes), group.rank
        is_new = [not any(regions) for regions in has]
        for shift in range(1, count):
            if is_new[shift]:
                received = ring.turn(np.frombuffer(note, np.uint8), note_size, shift)
                note = received.tobytes() if me == shift else note
            out = [sent.get((rank, (rank + shift) % count), []) for rank in range(count)]
            size = max(map(self._bytes, out))
            if size and lacking is None:  # else a checkpoint replaces them
                packed = _pack([self._cut(*part) for part in out[me]])
                self._add(ring.turn(packed, size, shift), out[(me - shift) % count])
        return None if lacking is None else self.leaves[lacking][0], note

    def restore(self, plan: Any) -> Any:
        """Return the state with the shardings of a plan, of which all parts are here."""
        made = []
        for i, ((name, leaf), like) in enumerate(zip(self.leaves, self._like(plan), strict=True)):
            needed = {part: self._cut(i, part) for part in regions_of(name, leaf, like)}
            made.append(make_leaf(name, leaf, like, needed))
        return self._structure.unflatten(made)

    def like(self, plan: Any) -> Any:
        """Return the abstract state with the shardings of a plan."""
        return self._structure.unflatten(self._like(plan))

    def _like(self, plan: Any) -> list[Any]:
        if jax.tree.structure(plan) != self._structure:
            advice = "make it with sf.make_sharding(shape, mesh), of the same shape"
            refuse("build", "a plan like the state", tree.describe_value(plan), advice)
        shardings = jax.tree.leaves(plan)
        return [_abstract(leaf, s) for (_, leaf), s in zip(self.leaves, shardings, strict=True)]

    def _layouts(self, plan: Any) -> list[Mapping[int, frozenset[Region]]]:
        likes = zip(self.leaves, self._like(plan), strict=True)
        return [_layout(like.sharding, leaf.shape) for (_, leaf), like in likes]

    def _cut(self, leaf: int, wanted: Region) -> np.ndarray:
        """Assemble a region of a leaf from parts that cover it."""
        result = np.empty([stop - start for start, stop in wanted], self._dtype(leaf))
        for part, array in self._parts[leaf].items():
            common = overlap(part, wanted)
            if common is not None:
                result[as_slices(within(common, wanted))] = array[as_slices(within(common, part))]
        return result

    def _add(self, received: np.ndarray, parts: Sequence[Part]) -> None:
        """Add parts from their bytes, one after the other."""
        offset = 0
        for part in parts:
            flat = received[offset : offset + self._bytes([part])].view(self._dtype(part.leaf))
            shape = [stop - start for start, stop in part.region]
            self._parts[part.leaf][part.region] = flat.reshape(shape)
            offset += flat.nbytes

    def _bytes(self, parts: Sequence[Part]) -> int:
        return sum(_size(part.region) * self._dtype(part.leaf).itemsize for part in parts)

    def _dtype(self, leaf: int) -> np.dtype[Any]:
        return jnp.dtype(self.leaves[leaf][1].dtype)


class Replicas:
    """Which parts a process sends to another on each copy, and which it receives."""

    def __init__(self, copy: HostCopy, plan: Any, group: Group, hosts: Mapping[int, str]) -> None:
        count, layouts = len(group.processes), copy._layouts(plan)
        several = len({hosts[process] for process in group.processes}) > 1
        places = [hosts[process] if several else process for process in group.processes]
        crossing = [
            sum(places[i] != places[(i + s) % count] for i in range(count)) for s in range(count)
        ]
        self.shift = crossing.index(max(crossing))
        place_of = dict(zip(group.processes, places, strict=True))
        parts = [_only_at(layouts, process, place_of) for process in group.processes]
        self.sent = parts[group.rank]
        self.received = parts[(group.rank - self.shift) % count]
        self.bytes = max(map(copy._bytes, parts))
        self.ring = Ring(group)
        self.seconds = 0.0


class Ring:
    """Sends bytes around a group, from each process to the one a number of places after it."""

    def __init__(self, group: Group) -> None:
        self._mesh = process_mesh(group)
        self._rows = NamedSharding(self._mesh, PartitionSpec("process"))
        self._count, self._device = len(group.processes), self._mesh.local_devices[0]
        self._send: dict[int, Any] = {}

    def turn(self, outgoing: np.ndarray, size: int, shift: int) -> np.ndarray:
        """Send `outgoing`, at most `size` bytes, and return the bytes of another process."""
        received = np.empty(size, np.uint8)
        for start in range(0, size, _PIECE):
            stop = min(start + _PIECE, size)
            row = np.zeros((1, stop - start), np.uint8)
            piece = outgoing[start:stop]
            row[0, : len(piece)] = piece
            local = [jax.device_put(row, self._device)]
            shape = (self._count, stop - start)
            rows = jax.make_array_from_single_device_arrays(shape, self._rows, local)
            moved = self._shifted(shift)(rows)
            received[start:stop] = np.asarray(moved.addressable_data(0))[0]
        return received

    def _shifted(self, shift: int) -> Any:
        if shift not in self._send:
            pairs = [(i, (i + shift) % self._count) for i in range(self._count)]
            self._send[shift] = jax.jit(
                jax.shard_map(
                    lambda row: jax.lax.ppermute(row, "process", pairs),
                    mesh=self._mesh,
                    in_specs=PartitionSpec("process"),
                    out_specs=PartitionSpec("process"),
                )
            )
        return self._send[shift]


def _schedule(
    layouts: Sequence[Mapping[int, frozenset[Region]]],
    has: Sequence[Sequence[set[Region]]],
    processes: Sequence[int],
) -> tuple[dict[tuple[int, int], list[Part]], int | None]:
    """Plan who sends which part to whom, the same in all processes.

    The regions of a leaf that processes have are equal or disjoint, since they had one sharding.

    Returns:
      The parts by sender and receiver, and a leaf of which some region is nowhere, or None.
    """
    sent: dict[tuple[int, int], list[Part]] = {}
    lacking = None
    for i, layout in enumerate(layouts):
        owners: dict[Region, list[int]] = {}
        for rank, regions in enumerate(has):
            for each in sorted(regions[i]):
                owners.setdefault(each, []).append(rank)
        for rank, process in enumerate(processes):
            for wanted in sorted(layout.get(process, ())):
                found = 0
                for each, ranks in owners.items():
                    common = overlap(each, wanted)
                    if common is None:
                        continue
                    found += _size(common)
                    if rank not in ranks:  # spread over those that have it
                        pair = ranks[rank % len(ranks)], rank
                        sent.setdefault(pair, []).append(Part(i, common))
                if found < _size(wanted):
                    lacking = i
    return sent, lacking


@cache
def _layout(sharding: NamedSharding, shape: tuple[int, ...]) -> Mapping[int, frozenset[Region]]:
    """Return which regions of a leaf each process has."""
    regions: dict[int, set[Region]] = {}
    devices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in devices.items():
        regions.setdefault(device.process_index, set()).add(region(index or (), shape))
    return {process: frozenset(each) for process, each in regions.items()}


def _only_at(
    layouts: Sequence[Mapping[int, frozenset[Region]]], process: int, places: Mapping[int, Any]
) -> list[Part]:
    """List the parts of a process that are at no other place."""
    parts = []
    for i, layout in enumerate(layouts):
        for each in sorted(layout.get(process, ())):
            where = {places[other] for other, regions in layout.items() if each in regions}
            if len(where) == 1:
                parts.append(Part(i, each))
    return parts


def _abstract(saved: Leaf, sharding: NamedSharding) -> Any:
    """Describe a leaf on the devices of a sharding."""
    if saved.key is None:
        return jax.ShapeDtypeStruct(saved.shape, saved.dtype, sharding=sharding)
    key = jax.eval_shape(lambda: jax.random.key(0, impl=saved.key))
    return jax.ShapeDtypeStruct(saved.shape[:-1], key.dtype, sharding=sharding)


def _size(part: Region) -> int:
    return math.prod(stop - start for start, stop in part)


def _pack(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(
        [np.frombuffer(bytes_of(array), np.uint8) for array in arrays] or [np.empty(0, np.uint8)]
    )
