"""What devices send each other in one run of a program, and along which axes of the mesh."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from stepfold.inspect import groups, hlo
from stepfold.inspect.hlo import Program, Run


@dataclass(frozen=True)
class Collective:
    """Exchanges of one kind, among the same devices, of one dtype, summed over one step.

    Attributes:
      kind: all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute...
      count: how often one runs.
      bytes: the full buffers of one device: what an all-reduce, a reduce-scatter, an all-to-all or
        a permute is given, and what an all-gather returns.
      moved: what of it one device sends, if rings are used.
      axes: the mesh axes that the devices differ along; None without a mesh, and where the groups
        do not run along whole axes.
      devices: how many take part together.
      dtype: of the buffers, as HLO spells it.
      where: the place in the user's program that most of the bytes come from.
    """

    kind: str
    count: int
    bytes: int
    moved: int
    axes: tuple[str, ...] | None
    devices: int
    dtype: str
    where: str


_NAMES = (
    "all-reduce all-gather reduce-scatter all-to-all ragged-all-to-all collective-permute "
    "collective-broadcast"
)
_KINDS = frozenset(_NAMES.split())


def collectives(program: Program, mesh: Mesh | None = None) -> list[Collective]:
    r"""List what a program exchanges, the largest traffic first.

    Args:
      program: the optimized program of one device.
      mesh: the mesh it was compiled for, to name the axes by.

    Returns:
      One entry for each kind, axes and dtype. What stays on one device is left out.

    >>> text = "all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add"
    >>> line = "%x = f32[256]{0} parameter(0)\n  ROOT %y = f32[256]{0} " + text
    >>> program = hlo.parse("ENTRY %main (x: f32[256]) -> f32[256] {\n  " + line + "\n}")
    >>> [(found.kind, found.count, found.bytes, found.moved) for found in collectives(program)]
    [('all-reduce', 1, 1024, 1024)]
    """
    sizes = {str(name): size for name, size in mesh.shape.items()} if mesh is not None else {}
    alike = defaultdict(list)
    for run in hlo.walk(program):
        if run.instruction.op.removesuffix("-start") in _KINDS:
            one = _read(run, program, sizes)
            alike[one.kind, one.axes, one.devices, one.dtype].append(one)
    merged = [_merge(ones) for ones in alike.values()]
    return sorted((one for one in merged if one.devices > 1), key=lambda one: -one.moved)


def moved_bytes(found: Iterable[Collective]) -> int:
    """Add up what one device sends in one step.

    >>> moved_bytes([Collective("all-reduce", 1, 64, 96, ("dp",), 4, "f32", "")])
    96
    """
    return sum(one.moved for one in found)


def _merge(ones: list[Collective]) -> Collective:
    most = max(ones, key=lambda one: one.bytes)
    others = len({one.where for one in ones} - {most.where})
    where = f"{most.where or '?'} and {others} more" if others else most.where
    sums = {key: sum(getattr(one, key) for one in ones) for key in ("count", "bytes", "moved")}
    return replace(most, where=where, **sums)


def _read(run: Run, program: Program, sizes: dict[str, int]) -> Collective:
    kind, text = run.instruction.op.removesuffix("-start"), run.instruction.attributes
    if kind == "all-reduce" and run.computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # a TPU fuses it with the slice that keeps one share
    if kind == "collective-permute":
        pairs = groups.pairs(text)
        together, axes = groups.connected(pairs), groups.differing(pairs, sizes)
    else:
        together = groups.replica_groups(text, program.replicas, program.partitions)
        axes = groups.axes(together, sizes)
    devices = max(map(len, together), default=1)
    # Behind the first operand of these come buffers for the result, sizes and offsets.
    single = kind == "ragged-all-to-all" or "slice_sizes=" in text
    inputs = run.inputs[:1] if single else run.inputs
    size = sum(array.bytes for array in inputs) * (devices if kind == "all-gather" else 1)
    return Collective(
        kind,
        run.times,
        run.times * size,
        run.times * _sent(kind, size, devices),
        axes,
        devices,
        "+".join(sorted({array.dtype for array in inputs})),
        hlo.place(run.instruction),
    )


def _sent(kind: str, size: int, devices: int) -> int:
    if devices == 1:
        return 0
    if kind == "collective-permute":
        return size
    return (2 if kind == "all-reduce" else 1) * (devices - 1) * size // devices
