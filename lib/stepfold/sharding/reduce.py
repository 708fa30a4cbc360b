"""Gradients that are reduced over the devices once per step, not once per microbatch."""

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec

from stepfold.core.gradients import GradFn, gradients_in_parts
from stepfold.core.loss import LossFn
from stepfold.core.state import TrainState
from stepfold.errors import DataError, ShardingError, refuse
from stepfold.sharding.mesh import axes_of, common_mesh, data_axes
from stepfold.tree import describe_value, named_leaves


def reduce_once(
    plan: TrainState, *, axes: str | Sequence[str] | None = None
) -> Callable[..., GradFn]:
    """Make a `grad=` that accumulates gradients on each device and reduces them once per step.

    By default the compiler reduces gradients over the devices in every microbatch, and gathers
    sharded parameters again in each. Here parameters are gathered once, gradients are accumulated
    locally, and reduced once: with one all-reduce for replicated parameters, one all-gather and one
    reduce-scatter for those sharded over `axes`. The cost is memory: each device holds the gathered
    parameters, and one buffer of gradients of that size. To gather layer by layer instead, pass in
    `axes` only those over which no parameter is sharded.

    The results are the same, since every term has the denominator of the whole batch. A loss
    function sees the rows of one device, so it must be a sum over examples, without sharding
    constraints over `axes`. Stateful loss functions are refused. Each device gets its own key.

    Args:
      plan: the plan of the state.
      axes: the mesh axes over which the batch is sharded; by default those of "dp" (or "data") and
        "fsdp" that the mesh has. All others are left to the compiler.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> params, tx, mesh = {"w": jnp.ones((64, 64))}, optax.sgd(0.1), sf.make_mesh()
    >>> plan = sf.make_sharding(sf.init_state(params, tx, jax.random.key(0)), mesh)
    >>> state = sf.init_state(params, tx, jax.random.key(0), sharding=plan)
    >>> def loss_fn(params, batch, key):
    ...     return sf.mean((batch @ params["w"]) ** 2)
    >>> step = sf.make_train_step(loss_fn, tx, accumulate=2, grad=sf.sharding.reduce_once(plan))
    >>> state, metrics = jax.jit(step)(state, sf.shard_batch(jnp.ones((16, 64)), mesh))
    >>> float(metrics["loss"].compute())
    4096.0
    """
    mesh = mesh_of_plan(plan, "reduce_once")
    if AxisType.Explicit in mesh.axis_types:
        # A parameter would have to be gathered by hand: constraints are for Auto axes.
        for name, sharding in named_leaves(plan.params, "params"):
            if not sharding.is_fully_replicated:
                raise ShardingError(
                    f"reduce_once: expected replicated parameters on a mesh with Explicit axes, "
                    f"got {name} with {sharding.spec}; make the mesh with sf.make_mesh, whose axes "
                    "are Auto, or leave out grad=…"
                )
    batch_axes = data_axes(mesh, axes)
    num_shards = math.prod(mesh.shape[name] for name in batch_axes)
    sum_axes = tuple(name for name in batch_axes if mesh.shape[name] > 1)
    other_axes = {name for name in mesh.axis_names if mesh.shape[name] > 1} - set(batch_axes)
    batch_specs = jax.tree.map(lambda sharding: keep_axes(sharding.spec, batch_axes), plan.params)
    other_specs = jax.tree.map(lambda sharding: keep_axes(sharding.spec, other_axes), plan.params)
    # A reduce-scatter would gather a leaf that other axes shard; all-reduce such a leaf.
    grad_specs = jax.tree.map(
        lambda spec, other: PartitionSpec() if any(other) else spec, batch_specs, other_specs
    )
    replicated = PartitionSpec()

    def grad(loss_fn: LossFn, *, accumulate: int = 1) -> GradFn:
        local_grad_fn = gradients_in_parts(loss_fn, accumulate, axes=batch_axes)

        def sum_over_devices(params: Any, batch: Any, key: Any) -> Any:
            params = jax.lax.with_sharding_constraint(params, other_specs)
            grads, terms, metrics, _ = local_grad_fn(params, batch, key, ())
            grads = jax.lax.with_sharding_constraint(grads, other_specs)
            grads = jax.tree.map(partial(_sum_gradient, sum_axes), grads, grad_specs)
            return jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params), terms, metrics

        def grad_fn(params: Any, batch: Any, key: Any, model_state: Any) -> Any:
            check_rows(batch, num_shards, f"the {num_shards} devices along {batch_axes}")
            over_devices = jax.shard_map(
                sum_over_devices,
                mesh=mesh,
                in_specs=(replicated, PartitionSpec(batch_axes), replicated),
                out_specs=(grad_specs, replicated, replicated),
                axis_names=set(batch_axes),
                check_vma=False,
            )
            # Some jax versions support `shard_map` over a subset of the axes only in jit.
            return *jax.jit(over_devices)(params, batch, key), model_state

        return grad_fn

    return grad


def mesh_of_plan(plan: Any, argument: str) -> Mesh:
    """Return the mesh of the plan of a state, and refuse anything else."""
    mesh = common_mesh(plan)
    if not isinstance(plan, TrainState) or mesh is None:
        expected = "the plan of a TrainState, as sf.make_sharding makes it"
        refuse(argument, expected, type(plan).__name__, kind=ShardingError)
    return mesh


def check_rows(batch: Any, count: int, divisor: str, *, allow_scalars: bool = False) -> None:
    """Refuse a batch whose rows `count`, described by `divisor`, does not divide."""
    for name, leaf in named_leaves(batch, "batch"):
        is_scalar = jnp.ndim(leaf) == 0
        if is_scalar and allow_scalars:
            continue
        if is_scalar or jnp.shape(leaf)[0] % count:
            expected = f"a leading size that {divisor} divide"
            got, advice = describe_value(leaf), "drop or pad the last batch"
            refuse(name, expected, got, advice, kind=DataError)


def keep_axes(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """Keep only these axes of a spec."""
    return PartitionSpec(
        *(tuple(name for name in axes_of(entry) if name in axes) or None for entry in spec)
    )


def _sum_gradient(axes: tuple[str, ...], grad: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Sum a gradient over the axes, and keep the shard of this device."""
    used: set[str] = set()
    for dim, entry in enumerate(spec):
        if entry:
            grad = jax.lax.psum_scatter(grad, entry, scatter_dimension=dim, tiled=True)
            used.update(axes_of(entry))
    rest = tuple(name for name in axes if name not in used)
    return jax.lax.psum(grad, rest) if rest else grad
