"""Gradients whose bits do not depend on the mesh.

Floating-point addition is not associative. A compiler that sums over 8 devices rounds differently
than one that sums over 1, so a run that moves to another mesh computes other bits. Here a batch is
cut into a fixed number of blocks. All meshes run one program for a block, and add up the blocks in
one binary tree: a device sums its own blocks, then sibling devices exchange their sums.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from stepfold import tree
from stepfold.core.gradients import GradFn, differentiate, objective_of
from stepfold.core.loss import LossFn, share_of
from stepfold.core.state import TrainState, check_params
from stepfold.core.validation import read_integer, read_positive
from stepfold.errors import ShardingError, refuse
from stepfold.sharding.mesh import axes_of, check_mesh, data_axes
from stepfold.sharding.reduce import check_rows, keep_axes, mesh_of_plan

_REPLICATED = PartitionSpec()


def ordered(
    plan: TrainState, *, blocks: int = 8, axes: str | Sequence[str] | None = None
) -> Callable[..., GradFn]:
    """Make a `grad=` whose results have the same bits on 1, 2, 4, … devices.

    The batch is cut into `blocks` of consecutive rows, as if each were a device. Every block gets
    the key `fold_in(key, block)`, and optimization barriers keep its program apart from everything
    else. Gradients are summed in one binary tree over the blocks; loss, metrics and `grad_norm` are
    merged in one order. A run on 1 device and one on 8 then compute the same bits, with "dp",
    "fsdp" or both, on one process or several. So does a run whose checkpoints move it from mesh to
    mesh.

    The rest of the step must not depend on the mesh either. Elementwise optimizers (SGD, Adam,
    AdamW, Lion) do not. What sums over a sharded leaf does: use `clip_by_ordered_norm` in place of
    `optax.clip_by_global_norm`. In bfloat16, XLA may keep more digits than the program says, in one
    place and not in another: compile with
    `compile_step(…, compiler_options={"xla_allow_excess_precision": False})`.

    Not covered: meshes that shard computations over other axes (`tp`, `sp`), another kind of
    device, another version of jax. On GPUs and TPUs it has not been measured.

    A device computes its blocks one after the other, with the memory of one, so there is no
    `accumulate`: use more blocks. It holds the gathered parameters, and the gradients of
    `log2(blocks per device) + 1` blocks in at least float32. A loss function sees the rows of one
    block, so it must be a sum over examples, without sharding constraints. With `stateful`, every
    block starts from the same model state. The new one has the mean of the blocks' floating leaves
    (as if batch statistics were those of blocks), and all other leaves from the first block.

    Args:
      plan: the plan of the state.
      blocks: the number of blocks, a power of two: the same for all meshes to compare, and a
        multiple of the number of devices that share a batch.
      axes: the mesh axes over which the batch is sharded; by default those of "dp" (or "data") and
        "fsdp" that the mesh has.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> params, tx, mesh = {"w": jnp.ones((64, 64))}, optax.adam(0.1), sf.make_mesh()
    >>> plan = sf.make_sharding(sf.init_state(params, tx, jax.random.key(0)), mesh)
    >>> state = sf.init_state(params, tx, jax.random.key(0), sharding=plan)
    >>> def loss_fn(params, batch, key):
    ...     return sf.mean((batch @ params["w"]) ** 2)
    >>> step = sf.make_train_step(loss_fn, tx, grad=sf.sharding.ordered(plan, blocks=8))
    >>> state, metrics = jax.jit(step)(state, sf.shard_batch(jnp.ones((16, 64)), mesh))
    >>> float(metrics["loss"].compute())
    4096.0
    """
    mesh = mesh_of_plan(plan, "ordered")
    sizes = _axis_sizes(mesh, blocks, axes)
    specs = jax.tree.map(lambda sharding: keep_axes(sharding.spec, sizes), plan.params)

    def grad(loss_fn: LossFn, *, accumulate: int = 1, stateful: bool = False) -> GradFn:
        if accumulate != 1:
            advice = "a device computes one block at a time, so use more blocks"
            refuse("accumulate", "1 with sf.sharding.ordered", f"{accumulate}", advice)
        sum_over_devices = _device_gradients(loss_fn, stateful, blocks, sizes, specs)

        def grad_fn(params: Any, batch: Any, key: Any, model_state: Any) -> Any:
            check_params(params)
            batch = jax.tree.map(jnp.asarray, batch)
            check_rows(
                batch, blocks, f"the {blocks} blocks of sf.sharding.ordered", allow_scalars=True
            )
            sharded = PartitionSpec(tuple(sizes))
            batch_specs = jax.tree.map(lambda x: sharded if x.ndim else _REPLICATED, batch)
            over_devices = jax.shard_map(
                sum_over_devices,
                mesh=mesh,
                in_specs=(_REPLICATED, batch_specs, _REPLICATED, _REPLICATED),
                out_specs=(specs, _REPLICATED, _REPLICATED, _REPLICATED),
                check_vma=False,
            )
            params, model_state = jax.tree.map(jnp.asarray, (params, model_state))
            return jax.jit(over_devices)(params, batch, key, model_state)

        def norm(grads: Any) -> jax.Array:
            return ordered_norm(grads, mesh, blocks=blocks, axes=axes)

        grad_fn.norm = norm  # type: ignore[attr-defined]  # make_train_step reports it
        return grad_fn

    return grad


def _device_gradients(
    loss_fn: LossFn, stateful: bool, blocks: int, sizes: Mapping[str, int], specs: Any
) -> Callable[..., Any]:
    """Return the function that each device runs on its rows, and that sums over all devices."""
    objective, local_blocks = objective_of(loss_fn, stateful), blocks // math.prod(sizes.values())

    def sum_over_devices(params: Any, batch: Any, key: Any, model_state: Any) -> Any:
        from stepfold.core.metrics import merged  # lazy: clu imports flax

        first = lax.axis_index(tuple(sizes)) * local_blocks if sizes else 0
        rows = jax.tree.map(lambda x: _in_blocks(x, local_blocks), batch)

        def arguments(i: Any) -> Any:
            block = jax.tree.map(
                lambda x: lax.dynamic_index_in_dim(x, i, 0, False) if x.ndim else x, rows
            )
            block_key = jax.random.fold_in(key, first + i)
            # With i in the barrier, the compiler moves nothing out of the loop over the blocks.
            return lax.optimization_barrier((params, block, block_key, model_state))

        def forward(i: Any) -> Any:
            return jax.tree.map(_barrier, objective(*arguments(i))[0])

        def backward(i: Any) -> Any:
            params, *inputs = arguments(i)
            # A barrier for each: the compiler eliminates a total that no gradient needs.
            totals = jax.tree.map(lambda x: lax.optimization_barrier((x, i))[0], batch_terms)

            def share(params: Any) -> Any:
                aux = objective(params, *inputs)
                return share_of(aux[0], totals), aux

            grads, (*reports, new_state) = differentiate(share, params, stateful)
            return _barrier((_widen((grads, new_state)), reports))

        def merge(stacked: Any) -> Any:
            if sizes:
                gather = lambda x: lax.all_gather(x, tuple(sizes), tiled=True)
                stacked = jax.tree.map(gather, stacked)
            return jax.tree.map(_barrier, merged(jax.tree.map(_barrier, stacked)))

        batch_terms = merge(_map(forward, local_blocks))
        like = _widen((params, model_state))
        (grads, new_state), reports = _sum_blocks(backward, local_blocks, like)
        grads = jax.tree.map(lambda g, spec: _sum_leaf(g, spec, sizes), grads, specs)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        merge_state = lambda x, old: _merge_state(x, old.dtype, sizes, blocks)
        new_state = jax.tree.map(merge_state, new_state, model_state)
        return _barrier((grads, *merge(reports), new_state))

    return sum_over_devices


def ordered_norm(
    grads: Any, mesh: Mesh, *, blocks: int = 8, axes: str | Sequence[str] | None = None
) -> jax.Array:
    """Compute a global norm, in at least float32, whose bits do not depend on the mesh.

    A leaf is cut into `blocks` along its longest dimension that they divide. A leaf that has none
    is summed as a whole on every device.

    >>> import jax.numpy as jnp, stepfold as sf
    >>> float(sf.optim.ordered_norm({"w": jnp.ones((8, 2))}, sf.make_mesh()))
    4.0
    """
    sizes = _axis_sizes(mesh, blocks, axes)
    leaves = [_barrier(jnp.asarray(leaf)) for leaf in jax.tree.leaves(grads)]
    if not leaves:
        return jnp.zeros(())
    dims = [_longest_dim(leaf.shape, blocks) for leaf in leaves]
    uncut = [leaf[None] for leaf, dim in zip(leaves, dims, strict=True) if dim is None]
    cut = [
        jnp.moveaxis(leaf, dim, 0).reshape(blocks, -1)
        for leaf, dim in zip(leaves, dims, strict=True)
        if dim is not None
    ]

    def square_sum(piece: jax.Array) -> Any:
        piece = lax.optimization_barrier(piece)
        return _barrier(jnp.square(jnp.abs(_widen(piece))).sum())

    def square_sums(leaf: jax.Array) -> Any:
        return _map(lambda i: square_sum(leaf[i]), len(leaf))

    def over_devices(cut: list[jax.Array], uncut: list[jax.Array]) -> jax.Array:
        sums = [square_sums(leaf) for leaf in cut]
        if sizes and sums:
            sums = [*lax.all_gather(jnp.stack(sums), tuple(sizes), axis=1, tiled=True)]
        sums += [lax.map(square_sum, leaf) for leaf in uncut]
        total: jax.Array = _barrier(jnp.concatenate(sums)).sum()
        return jnp.sqrt(total)

    specs = PartitionSpec(tuple(sizes)), _REPLICATED
    over_devices = jax.shard_map(
        over_devices, mesh=mesh, in_specs=specs, out_specs=_REPLICATED, check_vma=False
    )
    with jax.numpy_dtype_promotion("standard"):  # of sums in float32 and float64
        norm: jax.Array = _barrier(jax.jit(over_devices)(cut, uncut))
    return norm


def clip_by_ordered_norm(
    max_norm: float, mesh: Mesh, *, blocks: int = 8, axes: str | Sequence[str] | None = None
) -> optax.GradientTransformation:
    """Make `optax.clip_by_global_norm` with `ordered_norm`.

    >>> import jax.numpy as jnp, optax, stepfold as sf
    >>> tx = optax.chain(sf.optim.clip_by_ordered_norm(1.0, sf.make_mesh()), optax.sgd(1.0))
    >>> updates, _ = tx.update(jnp.full(4, 2.0), tx.init(jnp.zeros(4)))
    >>> updates.tolist()
    [-0.5, -0.5, -0.5, -0.5]
    """
    read_positive("max_norm", max_norm)
    _axis_sizes(mesh, blocks, axes)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:  # noqa: ARG001
        norm = ordered_norm(updates, mesh, blocks=blocks, axes=axes)
        clip = lambda x: jnp.where(norm < max_norm, x, x / norm.astype(x.dtype) * max_norm)
        # Otherwise a compiler could fuse it with what follows, on some meshes.
        return _barrier(jax.tree.map(clip, updates)), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _axis_sizes(mesh: Mesh, blocks: int, axes: str | Sequence[str] | None) -> dict[str, int]:
    """Return the sizes of the axes over which the blocks are distributed."""
    check_mesh(mesh)
    sizes = {name: mesh.shape[name] for name in data_axes(mesh, axes) if mesh.shape[name] > 1}
    others = [name for name in mesh.axis_names if mesh.shape[name] > 1 and name not in sizes]
    if others or AxisType.Explicit in mesh.axis_types:
        raise ShardingError(
            f"ordered: expected a mesh of Auto axes that all shard the batch, got {mesh}; results "
            "would depend on the sizes of others, so use another mesh, or another grad="
        )
    num_shards = math.prod(sizes.values())
    blocks = read_integer("blocks", blocks)
    if num_shards & (num_shards - 1):
        raise ShardingError(
            f"ordered: expected 1, 2, 4, 8, … devices to share a batch, got {num_shards}; make a "
            "mesh of fewer devices, or use another grad="
        )
    if blocks & (blocks - 1) or blocks < num_shards:
        least = f"{num_shards}, the number of devices that share a batch"
        refuse("blocks", f"a power of two of at least {least}", f"{blocks}")
    return sizes


def _in_blocks(x: jax.Array, count: int) -> jax.Array:
    """Split the rows of an array into blocks; a scalar is the same in all."""
    return x.reshape(count, len(x) // count, *x.shape[1:]) if x.ndim else x


def _barrier(arrays: Any) -> Any:
    """Keep the compiler from fusing what computes arrays with what uses them.

    A fused multiply and add rounds once instead of twice.
    """
    if jax.__version_info__ >= (0, 11):
        return lax.optimization_barrier(arrays)

    # On CPUs the compiler of jax 0.10 removes barriers before it fuses. It does not fuse into or
    # out of a loop, and does not see that this one runs once.
    def copy(x: Any) -> Any:
        if not tree.is_real(x) or not x.size:
            return x
        number = x[(0,) * x.ndim]
        start = (number != number).astype(jnp.int32)
        select = lambda i, zeros: jnp.where(i >= start, x, zeros)
        return lax.fori_loop(start, start + 1, select, jnp.zeros_like(x))

    return jax.tree.map(copy, arrays)


def _widen(arrays: Any) -> Any:
    return tree.cast_floats(arrays, jnp.float32)


def _is_inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _map(function: Callable[[Any], Any], count: int) -> Any:
    """Stack the results of a function of i, which are computed in a loop.

    XLA inlines one-trip loops, which changes rounding. So hide the trip count.
    """
    if count > 1:
        return lax.map(function, jnp.arange(count, dtype=jnp.int32))
    start = lax.optimization_barrier(jnp.int32(0))
    shapes = jax.eval_shape(function, start)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    if jax.__version_info__ >= (0, 11):
        results = lax.fori_loop(start, start + 1, lambda i, _: function(i), zeros)
    else:  # jax 0.10 keeps unused results of such a loop; later ones round a branch differently
        results = lax.cond(start == 0, function, lambda _: zeros, start)
    return jax.tree.map(lambda x: x[None], results)


def _sum_blocks(function: Callable[[Any], Any], count: int, like: Any) -> Any:
    """Sum the first output of a function of i over all blocks, and stack the second."""
    if count > 1:
        return _sum_in_tree(function, 0, count, like)
    totals, others = _map(function, 1)
    return jax.tree.map(lambda x: x[0], totals), others


def _sum_in_tree(function: Callable[[Any], Any], first: Any, count: int, like: Any) -> Any:
    """Sum the first output of a function of i in a binary tree, and stack the second.

    One call runs at a time, so log2(count) + 1 sums exist at once. They have the structure and
    dtypes of `like`. For integers, booleans and keys, the first value is used.
    """
    if count == 1:
        total, other = function(first)
        return total, jax.tree.map(lambda x: x[None], other)

    def body(total: Any, i: Any) -> Any:
        half, other = _sum_in_tree(function, first + i * (count // 2), count // 2, like)
        # Adding to zero would turn -0.0 into 0.0.
        add = lambda t, h: t + h if _is_inexact(h) else t
        return tree.select(i == 0, half, jax.tree.map(add, total, half)), other

    total, other = lax.scan(body, like, jnp.arange(2, dtype=jnp.int32))
    return total, jax.tree.map(lambda x: x.reshape(count, *x.shape[2:]), other)


def _sum_leaf(x: jax.Array, spec: PartitionSpec, sizes: Mapping[str, int]) -> jax.Array:
    """Sum an array over the devices in a binary tree, siblings first; keep this device's shard.

    A sum is scattered by recursive halving. Over an axis that does not shard the array it is
    gathered again, which sends what an all-reduce sends. If no dimension can be halved, devices
    exchange the whole array (recursive doubling).
    """
    shape: list[int] = []
    shard_shape: list[int] = []
    dim_of: dict[str, int] = {}  # each axis that shards the array gets its own dimension
    for size, entry in zip(x.shape, (*spec, *[None] * (x.ndim - len(spec))), strict=True):
        names = axes_of(entry)
        dim_of |= {name: len(shape) + i for i, name in enumerate(names)}
        shard_shape.append(size // math.prod(sizes[name] for name in names))
        shape += [*(sizes[name] for name in names), shard_shape[-1]]

    def over(x: jax.Array, names: Sequence[str]) -> jax.Array:
        if not names:
            return x
        *names, name = names
        if name in dim_of:
            return over(_scatter_sum(x, name, sizes[name], dim_of[name]), names)
        free = [1 if dim in dim_of.values() else size for dim, size in enumerate(x.shape)]
        dim = _longest_dim(free, sizes[name])
        if dim is None:
            return over(_butterfly_sum(x, name, sizes[name]), names)
        parts = x.reshape(*x.shape[:dim], sizes[name], -1, *x.shape[dim + 1 :])
        part = _scatter_sum(parts, name, sizes[name], dim).squeeze(dim)
        gathered: jax.Array = lax.all_gather(over(part, names), name, axis=dim, tiled=True)
        return gathered

    return over(x.reshape(shape), [*sizes]).reshape(shard_shape)


def _scatter_sum(x: jax.Array, name: str, size: int, dim: int) -> jax.Array:
    """Sum over an axis by recursive halving; of dimension `dim`, device i keeps element i."""
    device, x = lax.axis_index(name), jnp.moveaxis(x, dim, 0)
    for level in range(size.bit_length() - 1):
        # The elements that remain have the lower bits of this device's index.
        pairs, bit = x.reshape(-1, 2, *x.shape[1:]), device >> level & 1
        own, other = (lax.dynamic_index_in_dim(pairs, b, 1, False) for b in (bit, 1 - bit))
        x = own + lax.ppermute(other, name, _siblings(size, level))
    return jnp.moveaxis(x, 0, dim)


def _butterfly_sum(x: jax.Array, name: str, size: int) -> jax.Array:
    for level in range(size.bit_length() - 1):
        x = x + lax.ppermute(x, name, _siblings(size, level))
    return x


def _siblings(size: int, level: int) -> list[tuple[int, int]]:
    return [(device, device ^ 1 << level) for device in range(size)]


def _longest_dim(shape: Sequence[int], divisor: int) -> int | None:
    dims = [dim for dim, size in enumerate(shape) if size and size % divisor == 0]
    return max(dims, key=lambda dim: shape[dim], default=None)


def _merge_state(x: jax.Array, dtype: Any, sizes: Mapping[str, int], blocks: int) -> Any:
    """Merge a leaf of the model state: the mean of the blocks, or the first if not floating."""
    if _is_inexact(x):
        return (_sum_leaf(x, _REPLICATED, sizes) / blocks).astype(dtype)
    if not sizes:
        return x
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return lax.all_gather(x, tuple(sizes))[0]
    data = lax.all_gather(jax.random.key_data(x), tuple(sizes))[0]
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
