"""Which devices take part in a collective together, and along which axes of the mesh they lie."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from stepfold.errors import ConfigError

Group = frozenset[int]
"""Devices that take part together, as positions in the mesh's flat order."""


def replica_groups(attributes: str, replicas: int = 1, partitions: int = 1) -> tuple[Group, ...]:
    """Read the groups of a collective in any of the forms that XLA prints.

    >>> replica_groups("replica_groups={{0,1},{2,3}}")
    (frozenset({0, 1}), frozenset({2, 3}))
    >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0)")
    (frozenset({0, 2}), frozenset({1, 3}))
    >>> replica_groups("replica_groups=mesh['a'=2,'b'=2] {'a'}")
    (frozenset({0, 2}), frozenset({1, 3}))
    """
    if found := _MESH.search(attributes):
        return _mesh_groups(*found.groups())
    if found := _IOTA.search(attributes):
        return tuple(map(frozenset, _iota(found[2]).reshape(_numbers(found[1])).tolist()))
    if found := _LISTED.search(attributes):
        groups = [frozenset(_numbers(group)) for group in re.findall(r"\{([\d,]+)\}", found[1])]
        return _spread(groups, attributes, replicas, partitions)
    raise ConfigError(
        f"collectives: expected replica_groups as lists, as an iota or of a mesh, got "
        f"{attributes[:200]!r}; this XLA writes them in a way that is not known here"
    )


_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(((?:[^()]|\([^)]*\))*)\))? \{([^}]*)\}"
)
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _iota(text: str) -> np.ndarray:
    """Build what `[2,4]T(1,0)` stands for: counted in one shape, read in another order."""
    shape, _, order = text.partition("T")
    array = np.arange(np.prod(_numbers(shape))).reshape(_numbers(shape))
    return array.transpose(_numbers(order) or None).reshape(-1)


def _mesh_groups(mesh: str, devices: str | None, axes: str) -> tuple[Group, ...]:
    named = re.findall(r"([^,=]+)=(\d+)", mesh)
    sizes = [int(size) for _, size in named]
    order = None if not devices else _iota(devices) if "[" in devices else _numbers(devices)
    parts = []
    for name, before, part in re.findall(r"([^,:]+)(?::\((\d+)\)(\d+))?(?:,|$)", axes):
        axis = [other for other, _ in named].index(name)
        # 'a':(2)4 is the part of size 4 of the axis that has a part of size 2 before it.
        span = int(part) if part else sizes[axis]
        parts.append((axis, span, sizes[axis] // (span * int(before or 1))))
    return _along(sizes, parts, order)


def _along(
    sizes: Sequence[int],
    parts: Sequence[tuple[int, int, int]],
    order: Sequence[int] | np.ndarray | None = None,
) -> tuple[Group, ...]:
    """Group the devices that differ only along parts of axes: axis, size, and stride within it."""
    where = np.indices(tuple(sizes))
    for axis, size, stride in parts:
        where[axis] -= where[axis] // stride % size * stride
    keys = np.ravel_multi_index(tuple(where), tuple(sizes)).reshape(-1)
    groups = defaultdict(list)
    for key, device in zip(keys, range(keys.size) if order is None else order, strict=True):
        groups[int(key)].append(int(device))
    return tuple(map(frozenset, groups.values()))


def _spread(
    groups: list[Group], attributes: str, replicas: int, partitions: int
) -> tuple[Group, ...]:
    """Say which devices are listed: none means all, and a replica may mean all its partitions."""
    if not groups:
        return (frozenset(range(replicas * partitions)),)
    ids = frozenset.union(*groups)
    across = "channel_id=" in attributes and "to_apply=" in attributes
    if not across or "use_global_device_ids=true" in attributes or max(ids) >= replicas:
        return tuple(groups)
    every = range(partitions)
    return tuple(
        frozenset(one * partitions + part for one in ids for part in every) for ids in groups
    )


def axes(groups: Sequence[Group], sizes: dict[str, int]) -> tuple[str, ...] | None:
    """Name the axes whose groups these are."""
    first = sorted(groups[0])
    names = differing([(first[0], other) for other in first], sizes)
    if names is None:
        return None
    parts = [(list(sizes).index(name), sizes[name], 1) for name in names]
    return names if set(groups) == set(_along(list(sizes.values()), parts)) else None


def differing(pairs: Iterable[tuple[int, int]], sizes: dict[str, int]) -> tuple[str, ...] | None:
    """Name the axes along which some pair of devices differs."""
    shape, ends = tuple(sizes.values()), np.array(list(pairs), int).reshape(-1, 2)
    if not sizes or np.any(ends >= np.prod(shape)):
        return None
    start, end = (np.array(np.unravel_index(side, shape)) for side in ends.T)
    return tuple(name for name, differ in zip(sizes, start != end, strict=True) if differ.any())


def pairs(attributes: str) -> list[tuple[int, int]]:
    """Read from where to where a permute sends, but for what stays."""
    found = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    numbers = _numbers(found[1]) if found else []
    return [pair for pair in zip(numbers[::2], numbers[1::2], strict=True) if len(set(pair)) == 2]


def connected(pairs: list[tuple[int, int]]) -> tuple[Group, ...]:
    """Join the devices that permutes lead through."""
    groups: list[Group] = []
    for pair in pairs:
        met = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in met]
        groups.append(frozenset(pair).union(*met))
    return tuple(groups)
