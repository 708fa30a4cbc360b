"""Functions of whole matrices, such as Muon's, where parameters are sharded.

A product of two sharded matrices communicates, and a function of a matrix has many: Newton-Schulz
has fifteen. If matrices are replicated, each device repeats all of them. Here each matrix comes to
one device, its home, which computes the function once. What is sent is independent of the function:
one all-to-all there, and one back, for all matrices of one shape.
"""

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from stepfold import tree
from stepfold.core.validation import check_flags, read_function, read_integer
from stepfold.errors import ShardingError, TreeMismatchError, refuse
from stepfold.sharding.mesh import axes_of
from stepfold.sharding.ordered import barrier, map_in_order


def at_home(
    function: Callable[[jax.Array], jax.Array], plan: Any, *, balance: bool = False
) -> optax.GradientTransformation:
    """Apply a function to each matrix of the updates, on one device.

    The result has the shardings of the plan. The transformation has no state, so that momentum
    stays in `optax.trace` before it, sharded as the parameters are. The bits do not depend on the
    mesh, if those of the function do not depend on the program around it.

    All axes of the mesh share the work, also those over which the matrices are replicated. Leaves
    with more than two axes are stacks of matrices. A stack whose leading axes are sharded, such as
    that of experts, stays where it is along them.

    Args:
      function: of a matrix; it returns one of the same shape and dtype.
      plan: a NamedSharding for each leaf, as `sf.make_sharding` of the parameters returns. Leaves
        that `optax.partition` or `optax.masked` leaves out may be there.
      balance: give the next matrix to the device with least work, the largest first. Otherwise each
        shape is shared out by itself. That sends less, but with many devices some work longer.

    >>> import jax, jax.numpy as jnp, optax, stepfold as sf
    >>> params = {"w": jnp.ones((4, 4)), "b": jnp.zeros(4)}
    >>> plan = sf.make_sharding(params, sf.make_mesh())
    >>> muon = optax.chain(
    ...     optax.trace(0.95, nesterov=True), sf.optim.at_home(sf.optim.orthogonalize, plan)
    ... )
    >>> tx = optax.partition({"muon": muon, "adam": optax.adam(1e-3)}, {"w": "muon", "b": "adam"})
    >>> updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    >>> round(float(jnp.linalg.norm(updates["w"], 2)), 1)
    0.7
    """
    read_function("function", function, "a function of a matrix")
    check_flags(balance=balance)
    shardings = _read_plan(plan)

    def init(params: Any) -> optax.EmptyState:
        _group(params, shardings, function)
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:  # noqa: ARG001
        leaves, structure = jax.tree.flatten(updates)
        if not leaves:
            return updates, state
        groups = _group(updates, shardings, function)
        mesh = groups[0].mesh
        homes = _assign(groups, mesh, balance=balance)
        by_leaf = {index: spec for group in groups for index, spec in group.specs.items()}
        specs = [by_leaf[index] for index in range(len(leaves))]

        def on_device(leaves: list[jax.Array]) -> list[jax.Array]:
            results = dict[int, jax.Array]()
            for group, home in zip(groups, homes, strict=True):
                parts = [leaves[index] for index in group.specs]
                applied = _apply(function, group, home, parts)
                results |= zip(group.specs, applied, strict=True)
            return [results[index] for index in range(len(leaves))]

        apply = jax.shard_map(
            on_device, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False
        )
        return jax.tree.unflatten(structure, apply(leaves)), state

    return optax.GradientTransformation(init, update)


def orthogonalize(matrix: jax.Array, steps: int = 5) -> jax.Array:
    """Move the singular values of a matrix near one, by the Newton-Schulz iteration of Muon.

    They end between about 0.7 and 1.2. As in `optax.contrib.scale_by_muon`, which has it inside.

    >>> import jax, jax.numpy as jnp, stepfold as sf
    >>> matrix = jax.random.normal(jax.random.key(0), (8, 32))
    >>> values = jnp.linalg.svd(jax.jit(sf.optim.orthogonalize)(matrix), compute_uv=False)
    >>> bool(0.6 < values.min() < values.max() < 1.3)
    True
    """
    if matrix.ndim != 2:
        refuse("matrix", "two axes", f"shape {matrix.shape}", "use jax.vmap for a stack")
    steps = read_integer("steps", steps)
    a, b, c = 3.4445, -4.7750, 2.0315  # the coefficients of Keller Jordan's Muon
    # Nothing is transposed, since the order of a sum then depends on the layout that XLA chooses.
    x: jax.Array = matrix / (jnp.linalg.norm(matrix) + 1e-8)
    for _ in range(steps):
        if matrix.shape[0] > matrix.shape[1]:
            gram = jnp.einsum("mi,mj->ij", x, x)
            x = a * x + x @ (b * gram + c * gram @ gram)
        else:
            gram = jnp.einsum("im,jm->ij", x, x)
            x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class _Group(NamedTuple):
    """The matrices of one shape, dtype and layout."""

    mesh: Mesh | AbstractMesh
    shape: tuple[int, int]  # of a whole matrix
    over: tuple[tuple[str, ...], tuple[str, ...]]  # the axes that shard rows and columns
    others: tuple[str, ...]  # the axes over which the matrices are replicated
    num_matrices: int  # of a device, whole or in part
    specs: dict[int, PartitionSpec]  # of the leaves, by their positions

    @property
    def home_axes(self) -> tuple[str, ...]:
        """The axes that share the work; stacks are sharded over the rest."""
        return (*self.others, *chain(*self.over))


def _read_plan(plan: Any) -> dict[str, NamedSharding]:
    """Return the shardings by path; all are of one mesh."""
    shardings = dict(tree.named_leaves(plan))
    for path, sharding in shardings.items():
        if not isinstance(sharding, NamedSharding):
            got = tree.describe_value(sharding)
            refuse(f"plan: {path}", "a NamedSharding", got, "use sf.make_sharding(params, mesh)")
    meshes = {sharding.mesh for sharding in shardings.values()}
    if len(meshes) != 1:
        refuse("plan", "shardings of one mesh", f"{len(meshes)} meshes", kind=ShardingError)
    return shardings


def _group(updates: Any, shardings: dict[str, NamedSharding], function: Any) -> list[_Group]:
    """Group the leaves by what moves their matrices home, the largest matrices first."""
    groups: dict[tuple[Any, ...], _Group] = {}
    for index, (path, x) in enumerate(tree.named_leaves(updates)):
        if path not in shardings:
            refuse(
                path, "a sharding of it in the plan", "none", "make the plan of the parameters",
                kind=TreeMismatchError,
            )  # fmt: skip
        if jnp.ndim(x) < 2:
            advice = "use another optimizer for it, by optax.partition"
            refuse(path, "a matrix or a stack of them", x, advice)
        mesh, entries = shardings[path].mesh, [*shardings[path].spec]
        split = [
            tuple(name for name in axes_of(entry) if mesh.shape[name] > 1)
            for entry in (*entries, *[None] * (x.ndim - len(entries)))
        ]
        shards = [math.prod(mesh.shape[name] for name in names) for names in split]
        if any(size % count for size, count in zip(x.shape, shards, strict=True)):
            sizes = f"{x.shape} over {tuple(shards)} devices"
            refuse(path, "axes that the devices divide", sizes, kind=ShardingError)
        used = {*chain(*split)}
        others = tuple(n for n in mesh.axis_names if n not in used and mesh.shape[n] > 1)
        over, stack = (split[-2], split[-1]), tuple(chain(*split[:-2]))
        key = (x.shape[-2:], over, stack, x.dtype)
        if key not in groups:
            _check_result(function, path, jax.ShapeDtypeStruct(x.shape[-2:], x.dtype))
            groups[key] = _Group(mesh, x.shape[-2:], over, others, 0, {})
        count = math.prod(x.shape[:-2]) // math.prod(shards[:-2])
        group = groups[key]
        group.specs[index] = PartitionSpec(*split)
        groups[key] = group._replace(num_matrices=group.num_matrices + count)
    return sorted(groups.values(), key=lambda group: -_cost(group.shape))


def _check_result(function: Any, path: str, matrix: jax.ShapeDtypeStruct) -> None:
    result = jax.eval_shape(function, matrix)
    if tree.diff(matrix, result):
        expected, got = (tree.describe_value(each) for each in (matrix, result))
        refuse("function", f"{expected}, as that of {path}", got, "return an array like the matrix")


def _cost(shape: Sequence[int]) -> int:
    """Return a measure of the work: the multiplications of a step of Newton-Schulz."""
    small, large = sorted(shape)
    return small**2 * (2 * large + small)


def _assign(
    groups: Sequence[_Group], mesh: Mesh | AbstractMesh, *, balance: bool
) -> list[np.ndarray]:
    """Return, for each group, the matrices of each home, with -1 in places that are left over."""
    load = np.zeros([*mesh.shape.values()])
    homes = []
    for group in groups:
        axes = group.home_axes
        count = math.prod(mesh.shape[name] for name in axes)
        if not balance:
            each = -(-group.num_matrices // count)
            indices = np.arange(count * each)
            homes.append(np.where(indices < group.num_matrices, indices, -1).reshape(count, each))
            continue
        # A view: homes, then the devices over which stacks are sharded, which do the same.
        order = [mesh.axis_names.index(name) for name in axes]
        rest = [axis for axis in range(load.ndim) if axis not in order]
        loads = load.transpose(*order, *rest)
        mine: list[list[int]] = [[] for _ in range(count)]
        for index in range(group.num_matrices):
            busiest = loads.reshape(count, -1).max(1)
            # Of equal ones the device with fewest, so that few places are left over.
            home = min(range(count), key=lambda n: (busiest[n], len(mine[n])))
            mine[home].append(index)
            loads[np.unravel_index(home, loads.shape[: len(order)])] += _cost(group.shape)
        most = max(map(len, mine))
        homes.append(np.array([own + [-1] * (most - len(own)) for own in mine]))
    return homes


def _apply(
    function: Callable[[jax.Array], jax.Array],
    group: _Group,
    homes: np.ndarray,
    leaves: Sequence[jax.Array],
) -> list[jax.Array]:
    """Bring the matrices of a group home, apply the function, and send the results back."""
    parts = jnp.concatenate([x.reshape(-1, *x.shape[-2:]) for x in leaves])
    order = homes.reshape(-1)
    if not np.array_equal(order, np.arange(len(parts))):
        parts = jnp.concatenate([parts, jnp.zeros_like(parts[:1])])[order]  # -1 is the zero matrix
    whole = _send_home(group, parts)
    home = lax.axis_index(group.home_axes) if group.home_axes else 0
    has_matrix = jnp.asarray(homes >= 0)[home]

    is_full = bool((homes >= 0).all())

    def alone(matrix: jax.Array) -> Any:
        # Barriers, since what a compiler fuses with products depends on the program around them.
        return barrier(function(barrier(matrix)))

    def apply(index: jax.Array) -> Any:
        if is_full:
            return alone(whole[index])
        return lax.cond(has_matrix[index], alone, jnp.zeros_like, whole[index])

    parts = _send_back(group, map_in_order(apply, len(whole)))
    places = np.argsort(np.where(order < 0, len(order), order), kind="stable")[: group.num_matrices]
    if not np.array_equal(places, np.arange(len(parts))):
        parts = parts[places]
    ends = np.cumsum([math.prod(x.shape[:-2]) for x in leaves])[:-1]
    results = jnp.split(parts, [*ends])
    return [part.reshape(x.shape) for part, x in zip(results, leaves, strict=True)]


def _send_home(group: _Group, parts: jax.Array) -> jax.Array:
    """Return the whole matrices of this device from parts of those of all homes, in their order."""
    (row_axes, column_axes), (rows, columns) = group.over, parts.shape[1:]
    if group.others:  # these devices have the same parts
        count = len(parts) // math.prod(group.mesh.shape[name] for name in group.others)
        parts = lax.dynamic_slice_in_dim(parts, lax.axis_index(group.others) * count, count)
    if row_axes or column_axes:
        a, b = (math.prod(group.mesh.shape[n] for n in names) for names in group.over)
        parts = parts.reshape(a * b, -1, rows, columns)
        parts = lax.all_to_all(parts, (*row_axes, *column_axes), 0, 0)
        parts = parts.reshape(a, b, -1, rows, columns).transpose(2, 0, 3, 1, 4)
        parts = parts.reshape(-1, a * rows, b * columns)
    return parts


def _send_back(group: _Group, whole: jax.Array) -> jax.Array:
    """Return parts of the matrices of all homes from the whole ones of this device."""
    (row_axes, column_axes), (rows, columns) = group.over, whole.shape[1:]
    if row_axes or column_axes:
        a, b = (math.prod(group.mesh.shape[n] for n in names) for names in group.over)
        whole = whole.reshape(-1, a, rows // a, b, columns // b).transpose(1, 3, 0, 2, 4)
        whole = whole.reshape(a * b, -1, rows // a, columns // b)
        whole = lax.all_to_all(whole, (*row_axes, *column_axes), 0, 0)
        whole = whole.reshape(-1, rows // a, columns // b)
    if group.others:
        whole = lax.all_gather(whole, group.others, tiled=True)
    return whole
