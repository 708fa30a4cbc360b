"""The arithmetic of a program: counted from what was compiled, and estimated from its size."""

import math
import re
from typing import NamedTuple

import numpy as np

from stepfold.inspect import hlo
from stepfold.inspect.hlo import Instruction, Program, Run, Type


class Flops(NamedTuple):
    """The arithmetic that one device runs in one step.

    Attributes:
      dots: two operations for each multiply-add of matrix products and convolutions.
      everything: with elementwise operations and reductions besides, each one operation an element,
        transcendental ones too.
      unknown: in words, what may hide arithmetic that is not in these numbers.
    """

    dots: int
    everything: int
    unknown: tuple[str, ...] = ()


def count(program: Program) -> Flops:
    r"""Count the operations of a program, a loop's as often as it runs, of all branches.

    >>> dot = "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    >>> line = "%x = f32[8,8]{1,0} parameter(0)\n  ROOT %y = f32[8,8]{1,0} " + dot
    >>> count(hlo.parse("ENTRY %main (x: f32[8,8]) -> f32[8,8] {\n  " + line + "\n}"))
    Flops(dots=1024, everything=1024, unknown=())
    """
    dots = everything = 0
    unknown = [
        f"a loop of unknown length, counted once: {hlo.place(line) or line.name}"
        for line in hlo.endless(program)
    ]
    for run in hlo.walk(program):
        products, rest = _products(run), _elementwise(run)
        if products is None:
            unknown.append(f"{_target(run.instruction)}: {hlo.place(run.instruction)}".rstrip(": "))
        dots += run.times * (products or 0)
        everything += run.times * ((products or 0) + rest)
    return Flops(dots, everything, tuple(dict.fromkeys(unknown)))


_NAMES = (
    "add subtract multiply divide remainder maximum minimum negate abs power sqrt rsqrt cbrt "
    "exponential exponential-minus-one log log-plus-one logistic tanh erf sine cosine tan atan2"
)
_ELEMENTWISE = frozenset(_NAMES.split())
_REDUCING = frozenset(("reduce", "reduce-window", "scatter"))
# HLO's own operations whose arithmetic their shapes do not tell.
_OPAQUE = frozenset(("cholesky", "triangular-solve", "fft", "ragged-dot", "scaled-dot"))
# They move, sort, mark or draw bits.
_HARMLESS = re.compile(
    r"TopK|.*[tT]hreefry2x32.*|__cub\$.*|Sharding|SPMD\w+|xla\.sdy\.\w+|AllocateBuffer|Pin|Unpin|"
    r"PadToStatic|SliceToDynamic|MoveTo(Host|Device)|annotate_device_placement|X64\w+|Barrier\w+"
)


def _elementwise(run: Run) -> int:
    line = run.instruction
    if line.op in _ELEMENTWISE:
        return line.types[0].size
    if line.op not in _REDUCING or not run.inputs:
        return 0
    if line.op == "reduce-window":
        out = line.types[0].shape
        pairs = zip(run.inputs[0].shape, out, _window(line, len(out)), strict=True)
        return math.prod(_overlap(*pair) for pair in pairs)
    return run.inputs[-1 if line.op == "scatter" else 0].size


def _products(run: Run) -> int | None:
    """Count the multiply-adds twice; None where there may be some that cannot be counted."""
    line, op = run.instruction, run.instruction.op.removesuffix("-start")
    target = _target(line) if op == "custom-call" else op
    if target == "dot" or target.startswith(("__cublas$gemm", "__cublas$lt$matmul")):
        return _dot(line, run.inputs)
    if target == "__onednn$matmul":  # never transposes its result
        return 2 * run.inputs[0].size * line.types[0].shape[-1]
    if target == "convolution" or target.startswith("__cudnn$conv"):
        return _convolution(line, target, run.inputs)
    unknown = op == "custom-call" and not _HARMLESS.fullmatch(target)
    return None if unknown or op in _OPAQUE else 0


def _target(line: Instruction) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', line.attributes)
    return found[1] if found else line.op


def _dot(line: Instruction, inputs: tuple[Type, ...]) -> int | None:
    # A library call names its axes in JSON: "rhs_contracting_dimensions":["0"].
    axes = re.findall(r"\brhs_(?:contracting|batch)_dim\w+\W*?[\[{]([^\]}]*)", line.attributes)
    if not axes:
        return None
    shared = {int(axis) for axis in re.findall(r"\d+", ",".join(axes))}
    left, right = inputs[:2]
    free = [size for axis, size in enumerate(right.shape) if axis not in shared]
    return 2 * left.size * math.prod(free)


# Which of operands and result, as `[*operands, result]`, are image, kernel and output of the
# convolution that a cuDNN call differentiates: its window and labels are the forward one's.
_ROLES = {"__cudnn$convBackwardInput": (-1, 1, 0), "__cudnn$convBackwardFilter": (0, -1, 1)}


def _convolution(line: Instruction, target: str, inputs: tuple[Type, ...]) -> int | None:
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line.attributes)
    if labels is None:
        return None
    arrays = [*inputs[:2], line.types[0]]
    image, kernel, out = (
        dict(zip(names, arrays[role].shape, strict=True))
        for names, role in zip(labels.groups(), _ROLES.get(target, (0, 1, -1)), strict=True)
    )
    spatial = sorted(image.keys() - {"b", "f"})
    window = zip(spatial, _window(line, len(spatial)), strict=True)
    overlap = math.prod(_overlap(image[dim], out[dim], given) for dim, given in window)
    groups = re.search(r"batch_group_count=(\d+)", line.attributes)
    batch = image["b"] // (int(groups[1]) if groups else 1)
    # The kernel's "i" is already one group's share of the features.
    return int(2 * batch * kernel["i"] * out["f"] * overlap)


class _Window(NamedTuple):
    size: int = 1
    stride: int = 1
    low: int = 0
    lhs_dilate: int = 1
    rhs_dilate: int = 1


def _window(line: Instruction, rank: int) -> list[_Window]:
    """Read `window={size=3x3 stride=2x2 pad=1_1x1_1}`, one for each dimension."""
    found = re.search(r"\bwindow=\{([^}]*)\}", line.attributes)
    fields = dict(re.findall(r"(\w+)=(\S+)", found[1] if found else ""))
    each = {key: [int(dim.split("_")[0]) for dim in fields[key].split("x")] for key in fields}
    each["low"] = each.pop("pad", [0] * rank)
    kept = {key: values for key, values in each.items() if key in _Window._fields}
    return [
        _Window(**{key: values[dim] for key, values in kept.items()}) if kept else _Window()
        for dim in range(rank)
    ]


def _overlap(image: int, out: int, window: _Window) -> int:
    """Count the pairs of output and window positions that meet a number, not padding or a hole."""
    if window == _Window(stride=window.stride):
        return out
    reach, met = (image - 1) * window.lhs_dilate, 0
    for start in range(-window.low, out * window.stride - window.low, window.stride):
        at = start + np.arange(window.size) * window.rhs_dilate
        met += int(np.sum((at >= 0) & (at <= reach) & (at % window.lhs_dilate == 0)))
    return met


def estimate(parameters: int, tokens: int, *, training: bool = True) -> int:
    """Estimate the operations of a dense model: 6 a parameter and token, forward alone 2.

    What attention adds with the length of its context is not in it, nor are recomputed layers.
    Give the parameters that take part in products: without an embedding that is only looked up.

    >>> estimate(7_000_000_000, 4_096), estimate(124, 10, training=False)
    (172032000000000, 2480)
    """
    return (6 if training else 2) * parameters * tokens
