"""Cross-entropy of a linear layer, without the logits of all rows.

The logits of a language model are its largest array: rows times vocabulary. Here they exist for one
block of rows at a time. The loss is linear in the cotangent of its total, so the loop over blocks
that adds up the loss makes the gradients too, and the backward pass only scales them. Products are
computed once, unlike with `jax.checkpoint`.
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from stepfold import tree
from stepfold.core.axes import default_data_axes
from stepfold.core.loss import mean
from stepfold.core.validation import as_integer, check_flags, read_integer, read_positive
from stepfold.errors import LossError, ShardingError, refuse

if TYPE_CHECKING:
    from clu.metrics import Average

Axes = tuple[str, ...]
"""Names of mesh axes that shard one dimension."""

BLOCK_SIZE = 1024
"""Enough rows that the products, and not updates of the gradient in memory, take the time."""


class _Options(NamedTuple):
    """What is known before arrays have values."""

    vocabulary: int
    block_size: int
    dtype: Any  # of the products
    kernel_dims: str  # "dv", or "vd" if transposed
    kernel_dtype: Any
    label_smoothing: float
    z_loss: float
    soft_cap: float | None
    accuracy: bool
    mesh: Any  # None to run on one device
    rows: tuple[Axes, ...]  # one entry for each dimension of the labels
    kernel: tuple[Axes, ...]

    @property
    def row_axes(self) -> Axes:
        return tuple(name for entry in self.rows for name in entry)

    @property
    def vocabulary_axes(self) -> Axes:
        return self.kernel[self.kernel_dims.index("v")]

    @property
    def split_axes(self) -> Axes:
        """The axes over which the vocabulary stays split."""
        return tuple(name for name in self.vocabulary_axes if name not in self.row_axes)

    def entries(self, name: str) -> tuple[Axes, ...]:
        """Return the axes that shard each dimension of the kernel or the bias."""
        return self.kernel if name == "kernel" else (self.vocabulary_axes,)


def linear_cross_entropy(
    features: Any,
    kernel: Any,
    labels: Any,
    weights: Any = None,
    *,
    bias: Any = None,
    transposed: bool = False,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    accuracy: bool = False,
    dtype: DTypeLike | None = None,
    block_size: int = BLOCK_SIZE,
    sharding: NamedSharding | None = None,
    rows: PartitionSpec | None = None,
) -> "Average | tuple[Average, Average]":
    """Compute the mean cross-entropy of `features @ kernel`, without storing its logits.

    The result, a total and a weight, is that of `sf.mean` of the losses. The logits exist for
    `block_size` rows at a time, so memory does not grow with rows times vocabulary. The products
    are those of the plain computation: nothing is computed twice. Logits, losses and the gradient
    of the kernel are computed in at least float32. Rows of weight zero contribute nothing, even if
    they are NaN. A label outside the vocabulary makes the loss NaN, unless its weight is zero.

    Under `jax.jit` on several devices, pass the sharding of the kernel. Each device then computes
    blocks of its own rows. The kernel is gathered once, over the axes that shard the rows, and its
    gradient is reduced once. Its vocabulary stays split over all other axes, such as "tp". Inside
    `jax.shard_map`, and so with `sf.sharding.ordered` and `sf.sharding.reduce_once`, axes that are
    mapped already are left out. Without the sharding, the result is the same, but XLA reduces the
    gradient of the kernel in every block. This is refused where it can be seen: under
    `jax.set_mesh`, and for sharded arrays outside of jit. Only first derivatives exist.

    Args:
      features: floats `[..., size]`, the input of the layer.
      kernel: floats `[size, vocabulary]`.
      labels: integers `[...]`.
      weights: a mask or weights, in the shape of the labels or of their leading axes.
      bias: floats `[vocabulary]`.
      transposed: whether the kernel is `[vocabulary, size]`, as an embedding table is.
      ignore_index: the label of rows without weight, such as -100.
      label_smoothing: the share of a target that is spread evenly over the vocabulary.
      z_loss: adds `z_loss * log(Z) ** 2`, where Z is the sum of the exponentials of the logits.
      soft_cap: replaces logits by `soft_cap * tanh(logits / soft_cap)`.
      accuracy: also return the share of rows whose label has the largest logit, as a second mean.
      dtype: the dtype of the products; by default the wider one of features and kernel.
      block_size: the largest number of rows, on one device, whose logits exist at a time. Smaller
        blocks need less memory, but each updates the whole gradient of the kernel.
      sharding: the sharding of the kernel, `plan.params[…]` of a plan.
      rows: how the labels are sharded; by default the leading axis over those of "dp" (or "data")
        and "fsdp" that the mesh has.

    Returns:
      A `clu.metrics.Average`, or a pair of the loss and the accuracy.

    Raises:
      ConfigError: if an option is invalid.
      LossError: if shapes or dtypes of arrays do not fit, or for a second derivative.
      ShardingError: if the shardings do not fit the shapes, or one is missing.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> x, labels = jax.random.normal(jax.random.key(0), (6, 8)), jnp.arange(6)
    >>> kernel, mask = jax.random.normal(jax.random.key(1), (8, 100)), labels < 4
    >>> loss = sf.linear_cross_entropy(x, kernel, labels, mask, block_size=2)
    >>> plain = optax.softmax_cross_entropy_with_integer_labels(x @ kernel, labels)
    >>> bool(jnp.allclose(loss.compute(), sf.mean(plain, mask).compute())), float(loss.count)
    (True, 4.0)
    """
    from clu.metrics import Average

    check_flags(transposed=transposed, accuracy=accuracy)
    features, kernel, labels, weights, bias = _read_arrays(
        features, kernel, labels, weights, bias, ignore_index, transposed
    )
    dims = "vd" if transposed else "dv"
    vocabulary = kernel.shape[dims.index("v")]
    # Not by promotion, which jax refuses if its promotion is strict.
    wider = partial(max, key=lambda dtype: jnp.finfo(dtype).bits)
    dtype = wider(features.dtype, kernel.dtype) if dtype is None else dtype
    if tree.floating(dtype) is None:
        refuse("dtype", "a floating dtype or None", repr(dtype))
    if read_positive("label_smoothing", label_smoothing, allow_zero=True) > 1:
        refuse("label_smoothing", "a number from 0 to 1", repr(label_smoothing))
    placement = _read_shardings(sharding, rows, features, kernel, labels, dims)
    options = _Options(
        vocabulary=vocabulary,
        block_size=read_integer("block_size", block_size),
        dtype=jnp.dtype(dtype),
        kernel_dims=dims,
        kernel_dtype=kernel.dtype,
        label_smoothing=float(label_smoothing),
        z_loss=float(read_positive("z_loss", z_loss, allow_zero=True)),
        soft_cap=None if soft_cap is None else float(read_positive("soft_cap", soft_cap)),
        accuracy=bool(accuracy),
        **placement,
    )
    wide = tree.widen(wider(options.dtype, features.dtype))
    last = min(vocabulary - 1, jnp.iinfo(labels.dtype).max)  # a narrow dtype holds no larger one
    known, factors = (labels >= 0) & (labels <= last), weights.astype(wide)
    factors = jnp.where(known | (factors == 0), factors, jnp.nan)
    layer = {"kernel": kernel} | ({} if bias is None else {"bias": bias.astype(wide)})
    total, hits = _total(options, features, layer, factors, labels.astype(jnp.int32))
    loss = Average(total=total, count=weights.astype(wide).sum())
    return (loss, mean(hits, weights)) if accuracy else loss


def _read_arrays(
    features: Any,
    kernel: Any,
    labels: Any,
    weights: Any,
    bias: Any,
    ignore_index: Any,
    transposed: bool,
) -> tuple[Any, ...]:
    """Check shapes and dtypes; return the arrays, with weights in the shape of the labels."""

    def check(fits: bool, name: str, expected: str, value: Any, advice: str = "") -> None:
        if not fits:
            refuse(name, expected, tree.describe_value(value), advice, kind=LossError)

    for name, value in {"features": features, "kernel": kernel, "bias": bias}.items():
        is_absent = name == "bias" and value is None
        check(is_absent or tree.is_float(value), name, "an array of floats", value)
    features, kernel = jnp.asarray(features), jnp.asarray(kernel)
    check(features.ndim > 0, "features", "an array [..., size]", features)
    form = "[vocabulary, size]" if transposed else "[size, vocabulary]"
    size, sizes = features.shape[-1], kernel.shape[::-1] if transposed else kernel.shape
    flipped = kernel.ndim == 2 and sizes[1] == size
    advice = f"transposed={not transposed} reads it the other way" if flipped else ""
    is_kernel = kernel.ndim == 2 and sizes[0] == size and sizes[1] > 0
    form = f"{form} for features {tree.describe_value(features)}"
    check(is_kernel, "kernel", form, kernel, advice)
    is_bias = bias is None or bias.shape == sizes[1:]
    check(is_bias, "bias", f"the shape {sizes[1:]} of the vocabulary", bias)
    shape = features.shape[:-1]
    is_labels = tree.is_array(labels) and jnp.issubdtype(labels.dtype, jnp.integer)
    is_labels = is_labels and labels.shape == shape
    expected = f"integers of the shape {shape}, one for each row of the features"
    check(is_labels, "labels", expected, labels)
    labels = jnp.asarray(labels)
    weights = jnp.ones(shape, bool) if weights is None else weights
    is_weights = tree.is_real(weights) and jnp.shape(weights) == shape[: jnp.ndim(weights)]
    expected = f"real numbers in the shape {shape} of the labels or of its leading axes"
    check(is_weights, "weights", expected, weights)
    weights = jnp.asarray(weights)
    weights = weights.reshape(weights.shape + (1,) * (labels.ndim - weights.ndim))
    weights = jnp.broadcast_to(weights, shape)
    if ignore_index is not None:
        index, info = as_integer(ignore_index), jnp.iinfo(labels.dtype)
        if index is None or not info.min <= index <= info.max:
            expected = f"an integer that the labels' {labels.dtype} holds, or None"
            refuse("ignore_index", expected, repr(ignore_index))
        weights = jnp.where(labels == index, jnp.zeros_like(weights), weights)
    return features, kernel, labels, weights, bias


def _read_shardings(
    sharding: Any, rows: Any, features: Any, kernel: Any, labels: Any, dims: str
) -> dict[str, Any]:
    """Return the mesh and the axes that shard each dimension of the labels and the kernel.

    They are those with several devices that the caller has not mapped.
    """
    context = jax.sharding.get_abstract_mesh()
    manual = set(context.manual_axes)
    free = {name for name, count in context.shape.items() if count > 1} - manual
    if sharding is None:
        concrete = [x for x in (features, kernel, labels) if not isinstance(x, jax.core.Tracer)]
        is_split = not all(x.sharding.is_fully_replicated for x in concrete)
        if free or is_split or rows is not None:
            got = "None on a mesh with the axes " + ", ".join(sorted(free)) if free else "None"
            advice = "pass that of the kernel, plan.params[…]"
            refuse("sharding", "a NamedSharding", got, advice, kind=ShardingError)
        return {"mesh": None, "rows": (), "kernel": ((), ())}
    if not isinstance(sharding, NamedSharding):
        got, advice = tree.describe_value(sharding), "pass that of the kernel, plan.params[…]"
        refuse("sharding", "a NamedSharding or None", got, advice, kind=ShardingError)
    mesh: Any = sharding.mesh
    if manual and dict(context.shape) != dict(mesh.shape):
        expected = f"the mesh {dict(context.shape)} of shard_map"
        refuse("sharding", expected, f"{dict(mesh.shape)}", kind=ShardingError)
    active = {name for name, count in mesh.shape.items() if count > 1} - manual
    if rows is None:
        rows = PartitionSpec(default_data_axes(mesh.axis_names))
        rows = rows if labels.ndim else PartitionSpec()
    row_entries = _read_spec("rows", rows, labels, mesh, active)
    kernel_entries = _read_spec("sharding", sharding.spec, kernel, mesh, active)
    # Axes that shard only the features' size have no part in the loop.
    row_axes, size_dim = {name for entry in row_entries for name in entry}, dims.index("d")
    kernel_entries = tuple(
        tuple(name for name in entry if dim != size_dim or name in row_axes)
        for dim, entry in enumerate(kernel_entries)
    )
    mesh = (context if manual else mesh) if active else None
    return {"mesh": mesh, "rows": row_entries, "kernel": kernel_entries}


def _read_spec(name: str, spec: Any, x: Any, mesh: Any, active: set[str]) -> tuple[Axes, ...]:
    """Check that a spec fits an array, and return the active axes of each dimension."""
    if not isinstance(spec, PartitionSpec) or len(spec) > x.ndim:
        expected = f"a PartitionSpec of at most {x.ndim} entries for {tree.describe_value(x)}"
        refuse(name, expected, f"{spec}", kind=ShardingError)
    entries = [
        entry if isinstance(entry, tuple) else (entry,) * (entry is not None) for entry in spec
    ]
    names = [axis for entry in entries for axis in entry]
    if not set(names) <= set(mesh.shape) or len(names) > len(set(names)):
        expected = f"axes of the mesh {tuple(mesh.shape)}, each at most once"
        refuse(name, expected, f"{spec}", kind=ShardingError)
    entries += [()] * (x.ndim - len(entries))
    entries = [tuple(axis for axis in entry if axis in active) for entry in entries]
    for dim, entry in enumerate(entries):
        parts = math.prod(mesh.shape[axis] for axis in entry)
        if x.shape[dim] % parts:
            expected = f"a size of dimension {dim} that the {parts} devices along {entry} divide"
            advice = "drop or pad the last batch" if name == "rows" else ""
            refuse(name, expected, tree.describe_value(x), advice, kind=ShardingError)
    return tuple(entries)


def _total_and_hits(options: _Options, *arrays: Any) -> tuple[Any, Any]:
    """Return the weighted sum of the losses, and whether each row is a hit."""
    total, hits, _ = _run(options, False, *arrays)
    return total, hits


def _total_and_gradients(options: _Options, *arrays: Any) -> tuple[Any, Any]:
    total, hits, gradients = _run(options, True, *arrays)
    return (total, hits), gradients


def _scale_gradients(options: _Options, gradients: Any, cotangents: Any) -> tuple[Any, ...]:
    """Multiply the gradients of the total by its cotangent."""
    scaled = jax.tree.map(lambda grad: grad.astype(cotangents[0].dtype) * cotangents[0], gradients)
    features, layer, weights = scaled
    layer["kernel"] = layer["kernel"].astype(options.kernel_dtype)
    return features.astype(gradients[0].dtype), layer, weights, None


_total = jax.custom_vjp(_total_and_hits, nondiff_argnums=(0,))
_total.defvjp(_total_and_gradients, _scale_gradients)


def _run_on_devices(
    options: _Options, differentiate: bool, features: Any, layer: Any, weights: Any, labels: Any
) -> tuple[Any, Any, Any]:
    """Run the loop over blocks on each device; return the total, the hits and the gradients."""
    run = partial(_run_on_device, options, differentiate)
    if options.mesh is None:
        return run(features, layer, weights, labels)
    rows, by_row = _spec(options.rows), _spec((*options.rows, ()))
    layer_specs = {name: _spec(options.entries(name)) for name in layer}
    return jax.shard_map(
        run,
        mesh=options.mesh,
        in_specs=(by_row, layer_specs, rows, rows),
        out_specs=(
            PartitionSpec(),
            rows if options.accuracy else None,
            (by_row, layer_specs, rows) if differentiate else None,
        ),
        axis_names=set(options.mesh.axis_names) - set(options.mesh.manual_axes),
        check_vma=False,
    )(features, layer, weights, labels)


def _spec(entries: Iterable[Axes]) -> PartitionSpec:
    return PartitionSpec(*(entry or None for entry in entries))


def _refuse_second_derivative(*_: Any) -> Any:
    raise LossError(
        "linear_cross_entropy has only a first derivative, in reverse mode; compute the logits and "
        "optax.softmax_cross_entropy_with_integer_labels instead"
    )


_run = jax.custom_jvp(jax.jit(_run_on_devices, static_argnums=(0, 1)), nondiff_argnums=(0, 1))
_run.defjvp(_refuse_second_derivative)


def _run_on_device(
    options: _Options, differentiate: bool, features: Any, layer: Any, weights: Any, labels: Any
) -> tuple[Any, Any, Any]:
    """Add up losses, and with `differentiate` gradients, over blocks of this device's rows."""
    wide, v = weights.dtype, options.kernel_dims
    product = partial(jnp.einsum, preferred_element_type=wide)
    layer = layer | {"kernel": layer["kernel"].astype(options.dtype)}
    layer = {name: _gather(options, x, options.entries(name)) for name, x in layer.items()}
    ids = _vocabulary_ids(options)

    def add_block(carry: Any, block: Any) -> Any:
        total, layer_grad = carry
        x, weight, label = block
        # Zeros in place of rows without weight, which may hold anything.
        x = jnp.where(weight[:, None] != 0, x, jnp.zeros_like(x)).astype(options.dtype)
        logits = product(f"nd,{v}->nv", x, layer["kernel"])
        logits = logits + layer["bias"] if "bias" in layer else logits
        losses, hits, grad = _losses(options, logits, label, ids)
        losses = jnp.where(weight != 0, losses, 0)
        total += (losses * weight).sum()
        if not differentiate:
            return (total, None), (hits, None)
        grad *= weight[:, None]
        block_grad = {"bias": grad.sum(0)} if "bias" in layer else {}
        grad = grad.astype(options.dtype)
        block_grad["kernel"] = product(f"nd,nv->{v}", x, grad)
        x_grad = lax.psum(product(f"nv,{v}->nd", grad, layer["kernel"]), options.split_axes)
        layer_grad = jax.tree.map(jnp.add, layer_grad, block_grad)
        return (total, layer_grad), (hits, (x_grad.astype(features.dtype), losses))

    count = max(1, math.ceil(labels.size / options.block_size))
    rows = math.ceil(labels.size / count)

    def cut(x: jax.Array) -> jax.Array:
        x = x.reshape(labels.size, *x.shape[labels.ndim :])
        x = jnp.pad(x, [(0, count * rows - labels.size)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(count, rows, *x.shape[1:])

    def join(x: jax.Array) -> jax.Array:
        shape = *labels.shape, *x.shape[2:]
        return x.reshape(count * rows, *x.shape[2:])[: labels.size].reshape(shape)

    zeros = lambda x: jnp.zeros(x.shape, wide)
    start: Any = jnp.zeros((), wide), jax.tree.map(zeros, layer) if differentiate else None
    blocks = jax.tree.map(cut, (features, weights, labels))
    (total, layer_grad), by_row = lax.scan(add_block, start, blocks)
    total, (hits, row_grads) = lax.psum(total, options.row_axes), jax.tree.map(join, by_row)
    if not differentiate:
        return total, hits, None
    reduced = {name: _reduce(options, x, options.entries(name)) for name, x in layer_grad.items()}
    return total, hits, (row_grads[0], reduced, row_grads[1])


def _losses(
    options: _Options, logits: jax.Array, labels: jax.Array, ids: jax.Array
) -> tuple[Any, Any, Any]:
    """Return the losses, the hits, and the gradient of each loss with respect to its logits."""
    axes, smoothing = options.split_axes, options.label_smoothing
    if options.soft_cap is not None:
        bounded = jnp.tanh(logits / options.soft_cap)
        logits, slope = options.soft_cap * bounded, 1 - bounded**2
    largest = lax.pmax(logits.max(1), axes)
    is_label = labels[:, None] == ids
    sums = [jnp.exp(logits - largest[:, None]).sum(1), jnp.where(is_label, logits, 0).sum(1)]
    sums += [logits.sum(1)] if smoothing else []
    exponentials, of_label, *of_all = lax.psum(jnp.stack(sums), axes)
    log_z = largest + jnp.log(exponentials)
    losses = log_z - (1 - smoothing) * of_label + options.z_loss * log_z**2
    grad = jnp.exp(logits - log_z[:, None]) * (1 + 2 * options.z_loss * log_z)[:, None]
    grad -= jnp.where(is_label, 1 - smoothing, 0.0).astype(grad.dtype)
    if smoothing:
        losses -= smoothing / options.vocabulary * of_all[0]
        grad -= smoothing / options.vocabulary
    if options.soft_cap is not None:
        grad *= slope
    hits = None
    if options.accuracy:  # the first of equal logits, as argmax
        candidates = jnp.where(logits == largest[:, None], ids, options.vocabulary)
        hits = lax.pmin(candidates.min(1), axes) == labels
    return losses, hits, grad


def _vocabulary_ids(options: _Options) -> jax.Array:
    """Return the ids of the columns that this device holds after the gather."""
    axes = options.vocabulary_axes
    ids = jnp.arange(options.vocabulary, dtype=jnp.int32)
    ids = ids.reshape(*(options.mesh.shape[name] for name in axes), -1)
    for dim, name in enumerate(axes):
        if name in options.split_axes:
            ids = lax.dynamic_slice_in_dim(ids, lax.axis_index(name), 1, dim)
    return ids.reshape(-1)


def _gather(options: _Options, x: jax.Array, entries: Iterable[Axes]) -> jax.Array:
    """Gather an array over the axes that shard rows."""
    for dim, entry in enumerate(entries):
        if names := tuple(name for name in entry if name in options.row_axes):
            x = lax.all_gather(x, names, axis=dim, tiled=True)
    return x


def _reduce(options: _Options, grad: jax.Array, entries: Iterable[Axes]) -> jax.Array:
    """Sum a gradient over the axes that shard rows, and keep the shard of this device."""
    rest = set(options.row_axes)
    for dim, entry in enumerate(entries):
        if names := tuple(name for name in entry if name in options.row_axes):
            grad = lax.psum_scatter(grad, names, scatter_dimension=dim, tiled=True)
            rest -= set(names)
    summed: jax.Array = lax.psum(grad, tuple(sorted(rest)))
    return summed
