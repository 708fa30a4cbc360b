"""List the collectives of a compiled step with their traffic and mesh axes.

They are read from the optimized HLO text, which is the program of one device. It is the only place
where every backend shows them: `cost_analysis` does not, and counts the body of a loop once.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from stepfold.errors import refuse


@dataclass(frozen=True)
class Collective:
    """The collectives of one kind, group of devices and dtype, summed over one step.

    Attributes:
      kind: all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute...
      count: how many run.
      bytes: the full buffers of one device: the output of an all-gather, the input of others.
      moved: the bytes that one device sends, assuming ring algorithms.
      axes: the mesh axes along which the devices differ; None without a mesh, and if the groups
        are not those of axes.
      devices: the number of devices in a group.
      dtype: of the buffers, as in HLO.
      where: the scope in the user's program that causes most of the bytes.
    """

    kind: str
    count: int
    bytes: int
    moved: int
    axes: tuple[str, ...] | None
    devices: int
    dtype: str
    where: str


_KINDS = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|(ragged-)?all-to-all|collective-(permute|broadcast))"
    r"(-start)?"
)


def collectives(program: "Program", mesh: Mesh | None = None) -> list[Collective]:
    r"""List the collectives of a program, those with the most traffic first.

    There is one entry for each kind, axes and dtype, without those within a single device. The mesh
    is that for which the program was compiled, to name the axes.

    >>> text = "all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add"
    >>> line = "%x = f32[256]{0} parameter(0)\n  ROOT %y = f32[256]{0} " + text
    >>> program = parse("ENTRY %main (x: f32[256]) -> f32[256] {\n  " + line + "\n}")
    >>> [(entry.kind, entry.count, entry.bytes, entry.moved) for entry in collectives(program)]
    [('all-reduce', 1, 1024, 1024)]
    """
    sizes = {str(name): size for name, size in mesh.shape.items()} if mesh is not None else {}
    alike = defaultdict(list)
    for execution in walk(program):
        if _KINDS.fullmatch(execution.instruction.op) and not _is_continued(execution, program):
            entry = _collective(execution, program, sizes)
            alike[entry.kind, entry.axes, entry.devices, entry.dtype].append(entry)
    merged = [_merge(entries) for entries in alike.values()]
    return sorted((entry for entry in merged if entry.devices > 1), key=lambda entry: -entry.moved)


def unknown_loops(program: "Program") -> list[str]:
    """List the scopes of loops whose collectives count once, since their length is not known."""

    def contains_collective(line: Instruction) -> bool:
        return any(
            _KINDS.fullmatch(inner.op) or contains_collective(inner)
            for name, _ in _calls(line)
            for inner in program.computations.get(name, ())
        )

    loops = [each.instruction for each in walk(program) if each.instruction.op == "while"]
    unknown = [loop for loop in loops if loop.trips is None and contains_collective(loop)]
    return [scope(loop) or loop.name for loop in unknown]


def _is_continued(execution: "Execution", program: "Program") -> bool:
    """Whether a fusion continues an async collective on a TPU: skip it, to count that once."""
    return "chain_id=" in execution.instruction.attributes and not any(
        "AsyncCollectiveStart" in line.attributes and execution.instruction.name in line.operands
        for line in program.computations[execution.computation]
    )


def _collective(execution: "Execution", program: "Program", sizes: dict[str, int]) -> Collective:
    kind, text = execution.instruction.op.removesuffix("-start"), execution.instruction.attributes
    if kind == "all-reduce" and execution.computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # a TPU fuses it with the slice that keeps one share
    # The other operands of these are buffers for the result, sizes and offsets.
    has_one_input = kind == "ragged-all-to-all" or "slice_sizes=" in text
    inputs = execution.inputs[:1] if has_one_input else execution.inputs
    size = sum(array.bytes for array in inputs)
    if kind == "collective-permute":
        pairs = permute_pairs(text)
        devices, axes = largest_group(pairs), differing_axes(pairs, sizes)
        moved = size if devices > 1 else 0
    else:
        groups = replica_groups(text, program.replicas, program.partitions)
        devices, axes = max(map(len, groups)), group_axes(groups, sizes)
        size *= devices if kind == "all-gather" else 1
        moved = (2 if kind == "all-reduce" else 1) * (devices - 1) * size // devices
    return Collective(
        kind,
        count=execution.times,
        bytes=execution.times * size,
        moved=execution.times * moved,
        axes=axes,
        devices=devices,
        dtype="+".join(sorted({array.dtype for array in inputs})),
        where=scope(execution.instruction) or scope(execution.caller),
    )


def _merge(entries: list[Collective]) -> Collective:
    largest = max(entries, key=lambda entry: entry.bytes)
    others = len({entry.where for entry in entries} - {largest.where})
    where = f"{largest.where or '?'} and {others} more" if others else largest.where
    sums = {key: sum(getattr(x, key) for x in entries) for key in ("count", "bytes", "moved")}
    return replace(largest, where=where, **sums)


# Groups of devices, as positions in the mesh's flat order

Group = frozenset[int]


def replica_groups(attributes: str, replicas: int = 1, partitions: int = 1) -> tuple[Group, ...]:
    """Read the groups of a collective in any of the forms that XLA prints.

    `{{0,1},{2,3}}`, `[2,2]<=[2,2]T(1,0)` and `mesh['a'=2,'b'=2] {'a'}` are three of them.
    """
    if match := _MESH_GROUPS.search(attributes):
        return _mesh_groups(*match.groups())
    if match := _IOTA_GROUPS.search(attributes):
        return tuple(map(frozenset, _iota(match[2]).reshape(_numbers(match[1])).tolist()))
    match = _LISTED_GROUPS.search(attributes)
    if match is None:
        expected, got = "lists, an iota or a mesh in HLO text", repr(attributes[:200])
        advice = "this version of XLA prints a form that is not supported"
        refuse("replica_groups", expected, got, advice)
    groups = [frozenset(_numbers(group)) for group in re.findall(r"\{([\d,]+)\}", match[1])]
    if not groups:  # no list means all
        return (frozenset(range(replicas * partitions)),)
    is_cross_replica = "channel_id=" in attributes and "to_apply=" in attributes
    has_device_ids = "use_global_device_ids=true" in attributes or not is_cross_replica
    if has_device_ids or max(frozenset.union(*groups)) >= replicas:
        return tuple(groups)
    return tuple(  # an id is that of a replica
        frozenset(replica * partitions + i for replica in group for i in range(partitions))
        for group in groups
    )


_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(((?:[^()]|\([^)]*\))*)\))? \{([^}]*)\}"
)
_IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_LISTED_GROUPS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _iota(text: str) -> np.ndarray:
    """Build the array of `[2,4]T(1,0)`: counted in one shape, read in another order."""
    shape, _, order = text.partition("T")
    array = np.arange(np.prod(_numbers(shape))).reshape(_numbers(shape))
    return array.transpose(_numbers(order) or None).reshape(-1)


def _mesh_groups(mesh: str, devices: str | None, axes: str) -> tuple[Group, ...]:
    sizes = {name: int(size) for name, size in re.findall(r"([^,=]+)=(\d+)", mesh)}
    shape = tuple(sizes.values())
    coordinates = dict(zip(sizes, np.indices(shape).reshape(len(shape), -1), strict=True))
    for name, before, part in re.findall(r"([^,:]+)(?::\((\d+)\)(\d+))?(?:,|$)", axes):
        # 'a':(2)4 is the part of size 4 of axis 'a', after a part of size 2.
        span = int(part or sizes[name])
        stride = sizes[name] // (span * int(before or 1))
        coordinates[name] -= coordinates[name] // stride % span * stride
    order = _iota(devices) if devices and "[" in devices else _numbers(devices or "")
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for position, others in enumerate(zip(*coordinates.values(), strict=True)):
        groups[others].append(int(order[position]) if devices else position)
    return tuple(map(frozenset, groups.values()))


def group_axes(groups: Sequence[Group], sizes: dict[str, int]) -> tuple[str, ...] | None:
    """Name the mesh axes whose groups these are, or None."""
    names = differing_axes(groups, sizes) if len(set(map(len, groups))) == 1 else None
    if names is None or len(frozenset.union(*groups)) < math.prod(sizes.values()):
        return None
    return names if len(groups[0]) == math.prod(sizes[name] for name in names) else None


def differing_axes(
    groups: Sequence[Collection[int]], sizes: dict[str, int]
) -> tuple[str, ...] | None:
    """Name the mesh axes along which devices of a group differ; None for those of other meshes."""
    shape, devices = tuple(sizes.values()), np.array([*map(list, groups)], int)
    if not sizes or np.any(devices >= math.prod(shape)):
        return None
    coordinates = np.array(np.unravel_index(devices, shape))
    differ = coordinates != coordinates[..., :1]
    return tuple(name for name, axis in zip(sizes, differ, strict=True) if axis.any())


def permute_pairs(attributes: str) -> list[tuple[int, int]]:
    """Read the sources and targets of a permute, without those that send to themselves."""
    listed = re.search(r"source_target_pairs=([\d,{}]*)", attributes)
    pairs = re.findall(r"\{(\d+),(\d+)\}", listed[1] if listed else "")
    return [(int(source), int(target)) for source, target in pairs if source != target]


def largest_group(pairs: Sequence[tuple[int, int]]) -> int:
    """Count the devices in the largest group that pairs connect."""
    groups: list[Group] = []
    for pair in pairs:
        joined = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in joined]
        groups.append(frozenset(pair).union(*joined))
    return max(map(len, groups), default=1)


# HLO text


class Array(NamedTuple):
    """An array type, such as `bf16[8,128]`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The bytes of its elements; tokens and other opaque types have none."""
        bits = 8 if self.dtype == "pred" else int((re.findall(r"\d+", self.dtype) or [0])[0])
        return -(-math.prod(self.shape) * bits // 8)


class Instruction(NamedTuple):
    """A line of HLO. Tuples of results are flattened; attributes and literals are left as text."""

    name: str
    op: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    literal: str = ""
    trips: int | None = None


@dataclass(frozen=True)
class Program:
    """The program of one device."""

    computations: Mapping[str, Sequence[Instruction]]
    entry: str  # the name of the computation that runs
    replicas: int = 1  # copies of the whole program; jit makes one
    partitions: int = 1  # devices that share the work of a copy


class Execution(NamedTuple):
    """An instruction with how often it runs, its inputs, its computation, and what calls that."""

    instruction: Instruction
    times: int
    inputs: tuple[Array, ...]
    computation: str
    caller: Instruction


def parse(text: str) -> Program:
    """Read optimized HLO text."""
    computations: dict[str, list[Instruction]] = defaultdict(list)
    roots: dict[str, str] = {}
    entry, within = None, ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            within = head[2]
            entry = within if head[1] else entry
        elif match := _LINE.match(line):
            is_root, name, result, op, operands, attributes = match.groups()
            names = tuple(re.findall(r"%([\w.-]+)", operands))
            instruction = Instruction(name, op, arrays(result), names, attributes, operands)
            computations[within].append(instruction)
            if is_root:
                roots[within] = name
        elif re.match(r"\s+(ROOT )?%[\w.-]+ = ", line):
            refuse("hlo", "`%name = type op(operands)`", repr(line[:80]))
    if entry is None:
        advice = "pass what jax.jit(f).lower(...).compile().as_text() returns"
        refuse("hlo", "text with an ENTRY computation", repr(text[:80]), advice)
    loops = _Loops(computations, roots)
    for name, lines in computations.items():
        lines[:] = [each._replace(trips=loops.trips(name, each)) for each in lines]
    counts = dict(re.findall(r"\b(replica_count|num_partitions)=(\d+)", text.partition("\n")[0]))
    replicas, partitions = (int(counts.get(x, 1)) for x in ("replica_count", "num_partitions"))
    return Program(computations, entry, replicas, partitions)


_HEAD = re.compile(r"(ENTRY )?%?([\w.-]+) (?:\(.*\) -> .*)?\{$")
_LINE = re.compile(r"\s+(ROOT )?%([\w.-]+) = (.+?) ([a-z][\w-]*)\((.*?)\)((?:, .*)?)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\]")


def arrays(text: str) -> tuple[Array, ...]:
    """Read every array type in a text, such as `(f32[8,64]{1,0}, /*index=1*/(pred[], token[]))`."""
    return tuple(Array(dtype, tuple(_numbers(dims))) for dtype, dims in _ARRAY.findall(text))


def walk(program: Program) -> Iterator[Execution]:
    """Yield each instruction that runs, through loops, fusions and calls.

    All branches of a conditional count, and a loop of unknown length counts once. The computations
    that reductions apply to pairs of elements are not followed.
    """
    times: Counter[str] = Counter()
    callers: dict[str, Instruction] = {}

    def visit(name: str, count: int) -> None:
        times[name] += count
        for line in program.computations.get(name, ()):
            for called, trips in _calls(line):
                callers[called] = line
                visit(called, count * trips)

    visit(program.entry, 1)
    for name, lines in program.computations.items():
        results = {line.name: line.arrays for line in lines}
        for line in lines if times[name] else ():
            inputs = sum((results.get(operand, ()) for operand in line.operands), ())
            yield Execution(line, times[name], inputs, name, callers.get(name, line))


def _calls(line: Instruction) -> list[tuple[str, int]]:
    """List the computations that an instruction calls, and how often."""
    op = line.op.removesuffix("-start")
    if op not in ("fusion", "call", "while", "conditional", "async"):
        return []
    trips = line.trips if op == "while" else 1
    return [
        (name.strip(" %"), 1 if trips is None else trips + (key == "condition"))
        for key, several, single in _CALLED.findall(line.attributes)
        for name in (several or single).split(",")
    ]


_CALLED = re.compile(
    r"\b(body|condition|calls|to_apply|true_computation|false_computation|branch_computations)="
    r"(?:\{([^}]*)\}|(%?[\w.-]+))"
)
_LOOP = re.compile(r"\bcondition=%?([\w.-]+), body=%?([\w.-]+)")


class _Loops:
    """Reads the lengths of loops from their counters, since a TPU's program does not state them."""

    def __init__(self, computations: dict[str, list[Instruction]], roots: dict[str, str]) -> None:
        self._roots = roots
        self._lines = {name: {x.name: x for x in lines} for name, lines in computations.items()}
        self._callers: dict[str, list[tuple[str, Instruction]]] = defaultdict(list)
        for name, lines in computations.items():
            for line in lines:
                for called, _ in _calls(line):
                    self._callers[called].append((name, line))

    def trips(self, within: str, loop: Instruction) -> int | None:
        """Return how often the body of a while loop runs, if that can be read."""
        known = re.search(r"known_trip_count\W+n\W+(\d+)", loop.attributes)
        if loop.op != "while" or known:
            return int(known[1]) if known else None
        condition, body = _LOOP.findall(loop.attributes)[0]
        compared_in, compare, _ = self._origin(condition, self._roots[condition])
        if "direction=LT" not in compare.attributes:
            return None
        counted, counter, index = self._origin(compared_in, compare.operands[0])
        added, add, _ = self._origin(body, self._roots[body], index, stop=body)
        if (counted, counter.op, add.op) != (condition, "parameter", "add"):
            return None
        terms = [self._origin(added, name) for name in add.operands]
        steps = [term for term in terms if (term[1].op, term[2]) != ("parameter", index)]
        ends = (
            self._origin(within, loop.operands[0], index),
            self._origin(compared_in, compare.operands[1]),
        )
        constants = [line.literal for _, line, _ in (*ends, *steps) if line.op == "constant"]
        numbers = [int(text) for text in constants if re.fullmatch(r"-?\d+", text)]
        is_known = len(numbers) == len(ends) + len(steps) == 3 and numbers[2] > 0
        return len(range(*numbers)) if is_known else None

    def _origin(
        self, within: str, name: str, index: int | None = None, stop: str = ""
    ) -> tuple[str, Instruction, int | None]:
        """Follow a value, or an element of a tuple, to what makes it; not out of `stop`."""
        while True:
            line = self._lines[within][name]
            callers = self._callers[within] if within != stop else []
            if line.op in ("copy", "bitcast", "convert", "copy-start", "copy-done"):
                name = line.operands[0]
            elif line.op == "get-tuple-element" and index is None:
                name = line.operands[0]
                index = int(line.attributes.split("index=")[1].split(",")[0])
            elif line.op == "tuple" and index is not None:
                name, index = line.operands[index], None
            elif line.op in ("fusion", "call"):
                ((within, _),) = _calls(line)
                name = self._roots[within]
            elif line.op == "while" and self._keeps(line, index):
                name = line.operands[0]
            elif line.op == "parameter" and len(callers) == 1 and self._keeps(callers[0][1], index):
                within, name = callers[0][0], callers[0][1].operands[int(line.literal)]
            else:
                return within, line, index

    def _keeps(self, caller: Instruction, index: int | None) -> bool:
        """Whether what a computation is called with stays as it is: in loops, an element may."""
        for _, body in _LOOP.findall(caller.attributes):
            within, line, element = self._origin(body, self._roots[body], index, stop=body)
            return (within, line.op, element) == (body, "parameter", index)
        return caller.op in ("fusion", "call")


def scope(line: Instruction) -> str:
    """Return the scope in the user's program of an instruction, such as `mlp/dot_general`."""
    match = re.search(r'op_name="((?:\\.|[^"\\])*)"', line.attributes)
    name = re.sub(r"\\(.)", r"\1", match[1]) if match else ""
    first = re.split(r"[;:]", name)[0].replace("/(", "/")  # of several fused operations
    parts = [re.sub(r"[a-z_]+\(|\)", "", part) for part in first.split("/")]
    parts = parts[1:] if name.startswith("jit(") else parts
    kept = [part for part in parts if part and not _CONTROL_FLOW.fullmatch(part)]
    return "/".join(kept) + (" (backward)" if "transpose(" in name else "")


_CONTROL_FLOW = re.compile(
    r"while|body|cond|branch_\d+_fun|closed_call|eval_jaxpr|shard_map|checkpoint|"
    r"rematted_computation|custom_[jv]vp_call"
)
