"""In which dtypes a step multiplies matrices, as it was written.

Read from the jaxpr and not from the compiled program, where a CPU has made float32 of bfloat16.
"""

import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.interpreters import partial_eval


class Product(NamedTuple):
    """A matrix product or convolution: its widest dtype, its FLOPs on all devices, and its line."""

    dtype: str
    flops: int
    where: str


def products(step: Any, state: Any, batch: Any) -> list[Product]:
    """List the products of a step, those of a loop as often as it runs; the largest first.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.ones((8, 8), jnp.bfloat16)
    >>> [(one.dtype, one.flops) for one in products(lambda a, b: a @ b, x, x)]
    [('bfloat16', 1024)]
    """
    jaxpr = jax.make_jaxpr(step)(state, batch).jaxpr
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))  # as the compiler does
    totals: dict[tuple[str, str], int] = {}
    for equation, times in _equations(jaxpr, 1):
        kind = equation.primitive.name
        if kind in ("dot_general", "conv_general_dilated"):
            flops = times * (_dot if kind == "dot_general" else _convolution)(equation)
            dtypes = [variable.aval.dtype for variable in equation.invars]
            widest = max(dtypes, key=lambda dtype: dtype.itemsize).name
            key = widest, _line(equation)
            totals[key] = totals.get(key, 0) + flops
    found = [Product(dtype, flops, where) for (dtype, where), flops in totals.items()]
    return sorted(found, key=lambda one: -one.flops)


def _equations(jaxpr: Any, times: int) -> Iterator[tuple[Any, int]]:
    for equation in jaxpr.eqns:
        yield equation, times
        turns = _turns(equation)
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner, times * turns)


def _turns(equation: Any) -> int:
    """Count how often what is in an equation runs: each turn of a scan, or on each device."""
    if equation.primitive.name == "scan":
        return int(equation.params["length"])
    if equation.primitive.name == "shard_map":
        mesh, axes = equation.params["mesh"], equation.params["newly_manual_axes"]
        return math.prod(mesh.shape[axis] for axis in axes)
    return 1


def _dot(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left: tuple[int, ...] = equation.invars[0].aval.shape
    out: tuple[int, ...] = equation.outvars[0].aval.shape
    depth: int = math.prod(left[dim] for dim in contracted)
    return 2 * depth * math.prod(out)


def _convolution(equation: Any) -> int:
    """Count as if nothing were padding."""
    numbers = equation.params["dimension_numbers"]
    kernel: tuple[int, ...] = equation.invars[1].aval.shape
    out: tuple[int, ...] = equation.outvars[0].aval.shape
    outputs: int = kernel[numbers.rhs_spec[0]]
    return 2 * math.prod(kernel) // outputs * math.prod(out)


_LIBRARIES = tuple({f"{sysconfig.get_paths()[key]}/" for key in ("purelib", "platlib", "stdlib")})
_OWN = f"{Path(__file__).parents[1]}/"


def _line(equation: Any) -> str:
    """Give the line of the user's code, or of the model library's where there is none."""
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback is not None else []
    files = [(frame.file_name, frame.line_num) for frame in frames]
    theirs = [
        at for at in files if not at[0].startswith((*_LIBRARIES, _OWN)) and Path(at[0]).exists()
    ]
    return f"{Path(theirs[0][0]).name}:{theirs[0][1]}" if theirs else "?"
