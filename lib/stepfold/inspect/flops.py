"""Count the matrix products of a step from its jaxpr, or estimate them from its size.

The jaxpr has the step as it was written: in the dtypes of the user, where a CPU's compiler turns
bfloat16 into float32, and with the lengths of scans, which a TPU's program does not have.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stepfold.internals.jax import user_frame, without_dead_code
from stepfold.sharding.mesh import axes_of


class Flops(NamedTuple):
    """The arithmetic of one step.

    Attributes:
      dots: two operations for each multiply-add of matrix products and convolutions.
      unknown: descriptions of what may contain products that are not in `dots`.
    """

    dots: int
    unknown: tuple[str, ...] = ()


class Product(NamedTuple):
    """Products of one dtype on one line of code: widest operand, FLOPs on all devices, line."""

    dtype: str
    flops: int
    where: str


def count(jaxpr: Any) -> Flops:
    """Count the FLOPs of products on all devices together.

    The body of a loop counts as often as it runs, and of a conditional all branches count. The body
    of a loop of unknown length counts once; if it has products, it is listed as unknown.

    >>> import jax, jax.numpy as jnp
    >>> count(jax.make_jaxpr(jnp.matmul)(jnp.ones((8, 4)), jnp.ones((4, 16))))
    Flops(dots=1024, unknown=())
    """
    return Flops(sum(product.flops for product in products(jaxpr)), uncounted(jaxpr))


def uncounted(jaxpr: Any) -> tuple[str, ...]:
    """Describe what may contain products that `products` does not count."""
    unknown = []
    for equation, _, turns in _equations(jaxpr):
        name, line = equation.primitive.name, _line(equation)
        if _OPAQUE.fullmatch(name):
            unknown.append(f"{equation.params.get('target_name', name)}: {line}")
        elif turns is None and any(
            inner.primitive.name in _PRODUCTS
            for jaxpr in _inner_jaxprs(equation)
            for inner, _, _ in _nested_equations(jaxpr, 1)
        ):
            unknown.append(f"a loop of unknown length, counted once: {line}")
    return tuple(dict.fromkeys(unknown))


def products(jaxpr: Any) -> list[Product]:
    """List the matrix products and convolutions by dtype and line, the largest first."""
    totals: dict[tuple[str, str], int] = {}
    for equation, times, _ in _equations(jaxpr):
        if flops_of := _PRODUCTS.get(equation.primitive.name):
            dtypes = [variable.aval.dtype for variable in equation.invars]
            widest = max(dtypes, key=lambda dtype: dtype.itemsize).name
            key = widest, _line(equation)
            totals[key] = totals.get(key, 0) + times * flops_of(equation)
    listed = [Product(dtype, flops, where) for (dtype, where), flops in totals.items()]
    return sorted(listed, key=lambda product: -product.flops)


def constrained_axes(jaxpr: Any) -> set[str]:
    """Return the mesh axes that sharding constraints and `shard_map` name inside a step."""
    axes: set[str] = set()
    for equation, _, _ in _equations(jaxpr):
        spec = getattr(equation.params.get("sharding"), "spec", ())
        axes.update(name for entry in spec for name in axes_of(entry))
        axes.update(equation.params.get("newly_manual_axes", ()))
    return axes


def estimate(parameters: int, tokens: int, *, training: bool = True) -> int:
    """Estimate the FLOPs of a dense model: 6 for each parameter and token, 2 without training.

    It leaves out the products of attention, which grow with the context, and recomputed layers.
    Leave embeddings out of the parameters if they are only looked up.

    >>> estimate(7_000_000_000, 4_096), estimate(124, 10, training=False)
    (172032000000000, 2480)
    """
    return (6 if training else 2) * parameters * tokens


# Primitives that contain arithmetic without saying how much: factorizations, transforms, kernels,
# callbacks, and products of other libraries.
_OPAQUE = re.compile(
    r"cholesky.*|lu|qr|geqrf|geqp3|householder_product|ormqr|eigh?|svd|schur|hessenberg|fft|"
    r"tridiagonal.*|triangular_solve|symmetric_product|spsolve|"
    r"pallas_call|ffi_call|pure_callback|io_callback|call_exported|cudnn_fusion|"
    r"(ragged|scaled)_dot.*|.+_(sp)?dot_general.*|.*(gemm|matmul|matmat|matvec|spmm|spmv).*|"
    r".*(attention|attn).*"
)


def _equations(jaxpr: Any) -> Iterator[tuple[Any, int, int | None]]:
    """Yield the equations that the compiler keeps, how often each runs, and how often its body."""
    return _nested_equations(without_dead_code(getattr(jaxpr, "jaxpr", jaxpr)), 1)


def _nested_equations(jaxpr: Any, times: int) -> Iterator[tuple[Any, int, int | None]]:
    definitions = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    for equation in jaxpr.eqns:
        turns = _turns(equation, definitions)
        yield equation, times, turns
        for inner in _inner_jaxprs(equation):
            yield from _nested_equations(inner, times * (1 if turns is None else turns))


def _inner_jaxprs(equation: Any) -> list[Any]:
    if _OPAQUE.fullmatch(equation.primitive.name):
        return []
    values = equation.params.values()
    if equation.primitive.name == "custom_linear_solve":  # the others are for its derivatives
        values = [equation.params["jaxprs"].solve]
    flat = [x for value in values for x in (value if isinstance(value, tuple | list) else [value])]
    jaxprs = [getattr(value, "jaxpr", value) for value in flat]
    return [jaxpr for jaxpr in jaxprs if hasattr(jaxpr, "eqns")]


def _turns(equation: Any, definitions: Mapping[Any, Any]) -> int | None:
    """Return how often the body of an equation runs, or None if only the program knows."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return int(params["length"])
    if name == "shard_map":  # once on each device
        mesh, axes = params["mesh"], params["newly_manual_axes"]
        return int(math.prod(mesh.shape[axis] for axis in axes))
    return _turns_of_while(equation, definitions) if name == "while" else 1


def _turns_of_while(equation: Any, definitions: Mapping[Any, Any]) -> int | None:
    """Return the length of `fori_loop(start, start + length, …)` with a literal length."""
    params = equation.params
    test, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
    carried = equation.invars[params["cond_nconsts"] + params["body_nconsts"] :]
    inputs, outputs = body.invars[params["body_nconsts"] :], body.outvars
    if params["cond_nconsts"] or len(carried) < 2 or outputs[1] is not inputs[1]:
        return None
    compares = [(each.primitive.name, each.invars) for each in test.eqns]
    if compares != [("lt", test.invars[:2])]:
        return None

    def added(variable: Any, start: Any, definitions: Mapping[Any, Any]) -> int | None:
        """Return the number that is added to `start`, if it is a literal, which has a `val`."""
        definition = None if hasattr(variable, "val") else definitions.get(variable)
        if definition is None or definition.primitive.name != "add":
            return None
        first, second = definition.invars
        return int(second.val) if first is start and hasattr(second, "val") else None

    of_body = {variable: each for each in body.eqns for variable in each.outvars}
    is_counting = added(outputs[0], inputs[0], of_body) == 1
    length = added(carried[1], carried[0], definitions)
    return max(0, length) if is_counting and length is not None else None


def _dot_flops(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    depth: int = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
    size: int = math.prod(equation.outvars[0].aval.shape)
    return 2 * depth * size


def _convolution_flops(equation: Any) -> int:
    params = equation.params
    image_dims, kernel_dims, out_dims = params["dimension_numbers"]
    image, kernel = (variable.aval.shape for variable in equation.invars)
    out = equation.outvars[0].aval.shape
    windows = zip(
        image_dims[2:],
        kernel_dims[2:],
        out_dims[2:],
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    )
    multiplied = math.prod(
        _multiplied_pairs(image[i], kernel[k], out[o], *window) for i, k, o, *window in windows
    )
    batch = image[image_dims[0]] // params["batch_group_count"]
    # The kernel's input features are those of one group.
    return int(2 * batch * kernel[kernel_dims[1]] * out[out_dims[1]] * multiplied)


def _multiplied_pairs(
    image: int,
    kernel: int,
    out: int,
    stride: int,
    padding: tuple[int, int],
    image_dilation: int,
    kernel_dilation: int,
) -> int:
    """Count the products of one dimension, without those with padding or between dilated values."""
    starts, pairs = np.arange(out) * stride - padding[0], 0
    for offset in range(0, kernel * kernel_dilation, kernel_dilation):
        at = starts + offset
        is_inside = (at >= 0) & (at <= (image - 1) * image_dilation)
        pairs += int(np.sum(is_inside & (at % image_dilation == 0)))
    return pairs


_PRODUCTS = {"dot_general": _dot_flops, "conv_general_dilated": _convolution_flops}


def _line(equation: Any) -> str:
    """Return the innermost line of the user's code, such as `model.py:42`."""
    frame = user_frame(equation)
    return "?" if frame is None else f"{Path(frame.file_name).name}:{frame.line_num}"
