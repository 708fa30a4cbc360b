"""Sharding plans: trees of shardings, derived from rules and checked before any placement.

A rule maps the path of a leaf to the mesh axes that shard its dimensions.
"""

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from stepfold.core.axes import ACTIVATION_AXIS, DATA_AXES, default_data_axes
from stepfold.core.state import TrainState
from stepfold.errors import ShardingError, TreeMismatchError, refuse, warn
from stepfold.sharding.mesh import axes_of, check_mesh, common_mesh
from stepfold.table import size, table
from stepfold.tree import describe_value, is_array, named_leaves, path_name

RuleFn = Callable[[str, Any], PartitionSpec | None]
"""`(path, leaf) -> spec`, or None to defer to the next rule."""


@dataclass(frozen=True)
class Fsdp:
    """The automatic rule; see `fsdp`."""

    axis: str | tuple[str, ...]
    min_size: int

    def on(self, mesh: Mesh) -> RuleFn:
        """Return the rule function for a mesh."""
        wanted = axes_of(self.axis)
        names = tuple(name for name in wanted if name in mesh.shape)
        if wanted == DATA_AXES:
            names = default_data_axes(mesh.axis_names)
        # A mesh may lack "fsdp", the default, and either of the default axes of a batch.
        may_lack = self.axis == "fsdp" or (wanted == DATA_AXES and names)
        if names != wanted and not may_lack:
            refuse(
                "fsdp", f"axes of the mesh {tuple(mesh.shape)}", repr(self.axis), kind=ShardingError
            )
        parts = math.prod(mesh.shape[name] for name in names)

        def spec(_path: str, leaf: Any) -> PartitionSpec:
            divisible = [dim for dim in range(leaf.ndim) if leaf.shape[dim] % parts == 0]
            if parts == 1 or math.prod(leaf.shape) < self.min_size or not divisible:
                return PartitionSpec()
            longest = max(divisible, key=lambda dim: leaf.shape[dim])
            return PartitionSpec(*[None] * longest, names if len(names) > 1 else names[0])

        return spec


Rule = tuple[str, PartitionSpec] | RuleFn | Fsdp
Rules = Rule | Sequence[Rule]


def fsdp(axis: str | tuple[str, ...] = "fsdp", *, min_size: int = 4096) -> Fsdp:
    """Make the rule for fully sharded data parallelism (FSDP).

    Every leaf is sharded along its longest dimension that the size of the axis divides. Leaves that
    are smaller than `min_size`, or have no such dimension, are replicated. So are all leaves with
    the default axis if the mesh has no "fsdp".

    Args:
      axis: the mesh axis, or several to be used as one. Of `("dp", "fsdp")` a mesh needs only one.
      min_size: the number of elements below which a leaf is not sharded.

    >>> import jax, jax.numpy as jnp, stepfold as sf
    >>> mesh = sf.make_mesh((1, -1, 1, 1))
    >>> shapes = jax.eval_shape(lambda: {"w": jnp.ones((1024, 4096)), "b": jnp.ones(64)})
    >>> plan = sf.make_sharding(shapes, mesh, sf.sharding.fsdp(min_size=1024))
    >>> plan["b"].is_fully_replicated
    True
    """
    if not isinstance(min_size, int) or min_size < 0:
        refuse("fsdp", "min_size of at least 0 elements", repr(min_size), kind=ShardingError)
    return Fsdp(axis, min_size)


_AUTOMATIC = fsdp()


def make_sharding(
    tree: Any,
    mesh: Mesh,
    rules: Rules = _AUTOMATIC,
    *,
    misfit: Literal["error", "replicate"] = "error",
) -> Any:
    """Plan the sharding of a state: derive a `NamedSharding` for each leaf from rules.

    A rule is a pair `(regex, PartitionSpec)`, a function `(path, leaf) -> spec` that may return
    None, or `fsdp(…)`. The first rule that matches wins; `fsdp()` applies to leaves that none
    matches. A regular expression is searched in the path of the leaf, such as
    `params/layers/0/kernel`. The axis names in boxes of flax (`nn.with_partitioning`) are a rule
    too, before the first `fsdp(…)`.

    In a `TrainState` the leaves of the optimizer state follow the parameters that they mirror:
    their path ends in that of the parameter, and their shape is the same, lacks one dimension
    (factored moments), or has more leading dimensions (histories). Scalars, counts and keys are
    replicated, regardless of the rules.

    Args:
      tree: a state, or any tree of arrays, also abstract ones as from `jax.eval_shape`.
      mesh: the mesh.
      rules: one rule, or a sequence of them.
      misfit: what to do if the mesh axes do not divide a dimension that a rule shards over them:
        "error", or "replicate" to leave it unsharded, with a warning that names the leaves.

    For a `TrainState`, an axis of several devices that neither a rule nor, by its name, a batch
    uses is warned of. The axis "sp" is for activations, and needs no rule.

    Raises:
      ShardingError: if a pattern matches no path, a spec has more entries than the leaf has
        dimensions, an axis is not in the mesh or used twice, or a dimension does not divide.

    >>> import jax, optax, stepfold as sf
    >>> from jax.sharding import PartitionSpec as P
    >>> def init(key):
    ...     return {"up": jax.numpy.ones((256, 1024)), "norm": jax.numpy.ones(256)}
    >>> tx, mesh = optax.adam(1e-3), sf.make_mesh((1, 1, -1, 1))
    >>> shape = jax.eval_shape(lambda key: sf.init_state(init, tx, key), jax.random.key(0))
    >>> plan = sf.make_sharding(shape, mesh, [("up$", P(None, "tp"))])
    >>> plan.params["up"].spec == plan.opt_state[0].mu["up"].spec == P(None, "tp")
    True
    >>> state = sf.init_state(init, tx, jax.random.key(0), sharding=plan)
    """
    if misfit not in ("error", "replicate"):
        refuse("misfit", "'error' or 'replicate'", repr(misfit), kind=ShardingError)
    check_mesh(mesh)
    named = named_leaves(tree)
    _check_leaves(named)
    boxed = _boxed_specs(tree)
    used: set[Any] = set()
    rule = _read_rules(rules, mesh, [path for path, _ in named], boxed)
    problems: list[str] = []
    uneven: list[str] = []

    def spec_of(path: str, leaf: Any) -> PartitionSpec:
        if math.prod(leaf.shape) <= 1:
            return PartitionSpec()
        spec, is_of_box = rule(path, leaf)
        if problem := _problem(leaf.shape, spec, mesh):
            problems.append(f"{path}: {problem}{is_of_box * _UNBOX}")
            return PartitionSpec()
        used.update(name for entry in spec for name in axes_of(entry))
        entries = list(spec)
        for dim, entry in enumerate(spec):
            parts = math.prod(mesh.shape[name] for name in axes_of(entry))
            if leaf.shape[dim] % parts:
                uneven.append(
                    f"{path}: {spec} for the shape {leaf.shape}, and dimension {dim} of "
                    f"{leaf.shape[dim]} does not divide by {parts}"
                )
                entries[dim] = None
        return PartitionSpec(*entries)

    if isinstance(tree, TrainState):
        specs = _state_specs(tree, spec_of)
    else:
        specs = [spec_of(path, leaf) for path, leaf in named]
    if uneven and misfit == "error":
        problems += [*uneven, "pass misfit='replicate' to leave such dimensions unsharded"]
    if problems:
        title = f"the rules do not fit the mesh {dict(mesh.shape)}:"
        raise ShardingError("\n  ".join([title, *problems]))
    if uneven:
        title = "misfit='replicate' left these dimensions unsharded:"
        warn("\n  ".join([title, *uneven]))
    batch_axes = default_data_axes(mesh.axis_names)
    if isinstance(tree, TrainState) and batch_axes:  # without these, batches have axes of their own
        warn_of_unused_axes(mesh, {*used, *batch_axes, ACTIVATION_AXIS})
    return jax.tree.unflatten(jax.tree.structure(tree), [NamedSharding(mesh, s) for s in specs])


def warn_of_unused_axes(mesh: Mesh, used: Collection[str]) -> None:
    """Warn of axes over which nothing is sharded, so that their devices repeat the same work."""
    unused = {name: size for name, size in mesh.shape.items() if size > 1 and name not in used}
    if unused:
        names = ", ".join(map(repr, unused))
        warn(
            f"mesh: expected every axis to shard parameters or batches, got {unused}, which no "
            f"rule and no batch uses, so that their devices compute the same; add a rule such as "
            f"(regex, PartitionSpec({next(iter(unused))!r})), shard batches with "
            f"sf.shard_batch(…, axes=…), or rename {names}: by default, batches use 'dp' (or "
            "'data') and 'fsdp', and parameters 'fsdp'",
        )


def _check_leaves(named: list[tuple[str, Any]]) -> None:
    for path, leaf in named:
        if not is_array(leaf):
            expected, got = "an array or an abstract one", describe_value(leaf)
            refuse(path or "tree", expected, got, kind=ShardingError)


_UNBOX = (
    "; these are the names of its nn.Partitioned, since no rule before sf.sharding.fsdp() "
    "matches this path: give the mesh such axes, add a rule for the path, or unbox the parameters "
    "with nn.unbox"
)


def _boxed_specs(tree: Any) -> dict[str, PartitionSpec]:
    """Map the paths of arrays in boxes of flax, such as `nn.Partitioned`, to the boxes' specs."""
    if isinstance(tree, TrainState):  # the optimizer state follows the parameters
        tree = {"params": tree.params, "model_state": tree.model_state}

    def is_box(node: Any) -> bool:
        return hasattr(node, "get_partition_spec") and hasattr(node, "unbox")

    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)
    return {
        path: node.get_partition_spec()
        for key_path, node in nodes
        if is_box(node)
        for path, _ in named_leaves(node, path_name(key_path))
    }


def _read_rules(
    rules: Rules, mesh: Mesh, paths: Sequence[str], boxed: dict[str, PartitionSpec]
) -> Callable[[str, Any], tuple[Any, bool]]:
    """Combine rules into one function: the first match wins, and `fsdp()` takes the rest.

    The function returns a spec, and whether it is that of a box.
    """
    is_list = isinstance(rules, Sequence) and not _is_pair(rules)
    sequence: Any = [*rules, _AUTOMATIC] if is_list else [rules, _AUTOMATIC]  # type: ignore[misc]
    automatic = next(i for i, rule in enumerate(sequence) if isinstance(rule, Fsdp))
    functions = [_rule_function(rule, mesh, paths) for rule in sequence]
    functions.insert(automatic, lambda path, _leaf: boxed.get(path))

    def first_match(path: str, leaf: Any) -> tuple[Any, bool]:
        specs = ((function(path, leaf), i == automatic) for i, function in enumerate(functions))
        return next(match for match in specs if match[0] is not None)

    return first_match


def _is_pair(rule: Any) -> bool:
    return isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[0], str)


def _rule_function(rule: Any, mesh: Mesh, paths: Sequence[str]) -> RuleFn:
    if isinstance(rule, Fsdp):
        return rule.on(mesh)
    if not _is_pair(rule):
        if callable(rule):
            return rule  # type: ignore[no-any-return]
        expected = "(regex, PartitionSpec), a function (path, leaf) -> spec, or sf.sharding.fsdp()"
        refuse("rules", expected, describe_value(rule), kind=ShardingError)
    try:
        pattern = re.compile(rule[0])
    except re.error as error:
        refuse("rules", "a regular expression", f"{rule[0]!r}: {error}", kind=ShardingError)
    if not any(map(pattern.search, paths)):
        raise ShardingError(
            f"rules: {rule[0]!r} matches no path; there are {', '.join(paths[:8])}"
            + (f" and {len(paths) - 8} more" if len(paths) > 8 else "")
        )
    return lambda path, _leaf: rule[1] if pattern.search(path) else None


def _problem(shape: tuple[int, ...], spec: Any, mesh: Mesh) -> str | None:
    if not isinstance(spec, PartitionSpec):
        return f"expected a PartitionSpec from the rule, got {describe_value(spec)}"
    if len(spec) > len(shape):
        return f"{spec} has {len(spec)} entries, and the shape {shape} {len(shape)} dimensions"
    used = [name for entry in spec for name in axes_of(entry)]
    unknown = [name for name in used if name not in mesh.shape]
    if unknown:
        return f"{spec} for the shape {shape} names {unknown}, and the axes are {mesh.axis_names}"
    twice = sorted({name for name in used if used.count(name) > 1})
    return f"{spec} for the shape {shape} uses {twice} more than once" if twice else None


def _state_specs(
    state: TrainState, spec_of: Callable[[str, Any], PartitionSpec]
) -> list[PartitionSpec]:
    """Apply the rules to parameters and model state; the optimizer state follows."""

    def specs(part: Any, root: str) -> list[Any]:
        return [spec_of(path, leaf) for path, leaf in named_leaves(part, root)]

    params = jax.tree_util.tree_leaves_with_path(state.params)
    param_specs = specs(state.params, "params")
    owners = {
        path: (leaf.shape, spec) for (path, leaf), spec in zip(params, param_specs, strict=True)
    }

    def spec_of_moment(path: tuple[Any, ...], leaf: Any) -> Any:
        for start in range(len(path) + 1):
            if path[start:] in owners and math.prod(leaf.shape) > 1:
                spec = _mirrored(leaf.shape, *owners[path[start:]])
                if spec is not None:
                    return spec
        return spec_of(f"opt_state/{path_name(path)}", leaf)

    opt_leaves = jax.tree_util.tree_leaves_with_path(state.opt_state)
    opt_specs = [spec_of_moment(path, leaf) for path, leaf in opt_leaves]
    replicated = PartitionSpec()
    model_specs = specs(state.model_state, "model_state")
    return [replicated, *param_specs, *opt_specs, *model_specs, replicated]


def _mirrored(
    shape: tuple[int, ...], owner: tuple[int, ...], spec: PartitionSpec
) -> PartitionSpec | None:
    """Derive the spec of an optimizer leaf that mirrors a parameter's shape; None otherwise."""
    entries = [*spec, *[None] * (len(owner) - len(spec))]
    extra = len(shape) - len(owner)
    if extra >= 0 and shape[extra:] == owner:
        return PartitionSpec(*[None] * extra, *spec) if any(entries) else PartitionSpec()
    without = [dim for dim in range(len(owner)) if (*owner[:dim], *owner[dim + 1 :]) == shape]
    if not without:
        return None
    # If two dimensions of one size are candidates, assume an unsharded one was removed.
    dim = max(without, key=lambda dim: entries[dim] is None)
    del entries[dim]
    return PartitionSpec(*entries) if any(entries) else PartitionSpec()


def shardings_of(tree: Any, plan: Any) -> list[Sharding]:
    """List the sharding of each leaf; `plan` is a tree like it, or one sharding for all."""
    if isinstance(plan, Sharding):
        return [plan for _ in jax.tree.leaves(tree)]
    for name, sharding in named_leaves(plan, "plan"):
        if not isinstance(sharding, Sharding):
            expected = "shardings, as sf.make_sharding makes them"
            refuse(name, expected, describe_value(sharding), kind=ShardingError)
    have, want = ([name for name, _ in named_leaves(x)] for x in (tree, plan))
    lines = [f"{name}: has no sharding" for name in have if name not in set(want)]
    lines += [f"{name}: has a sharding and no array" for name in want if name not in set(have)]
    structures: list[Any] = [jax.tree.structure(tree), jax.tree.structure(plan)]
    if not lines and structures[0] != structures[1]:
        lines = [f"expected the containers {structures[0]}, got {structures[1]}"]
    if lines:
        raise TreeMismatchError("\n  ".join(["the plan is for another tree:", *lines]))
    return jax.tree.leaves(plan)


def read_step_and_plan(
    name: str, value: Any, devices: Sequence[jax.Device]
) -> tuple[Callable[[Any, Any], Any], Any]:
    """Return the pair that a function of devices made; refuse a plan for others."""
    if not isinstance(value, tuple) or len(value) != 2:
        refuse(name, "(step, plan) from it", describe_value(value))
    if not set(mesh_of(value[1], name).devices.flat) <= set(devices):
        advice = "make its mesh with sf.make_mesh(…, devices=devices)"
        refuse(name, "a plan for the devices that it gets", "one for others", advice)
    return value


def mesh_of(plan: Any, name: str = "build") -> Mesh:
    """Return the mesh of a plan that a function of devices made."""
    mesh = common_mesh(plan)
    if mesh is None:
        advice = "make it with sf.make_sharding"
        refuse(name, "a plan from it, a tree of shardings", describe_value(plan), advice)
    return mesh


def sharding_table(tree: Any, plan: Any = None) -> str:
    """Format the shardings of a tree as a table: path, shape, spec, and bytes per device.

    Args:
      tree: a tree of arrays, also abstract ones.
      plan: its shardings, as from `make_sharding`; by default those of the arrays themselves.

    >>> import jax, jax.numpy as jnp, stepfold as sf
    >>> params = {"w": jnp.ones((64, 10)), "b": jnp.ones(10)}
    >>> plan = sf.make_sharding(params, sf.make_mesh())
    >>> print(sf.sharding.sharding_table(params, plan))
    path   shape           spec        bytes per device
    -----  --------------  ----------  ----------------
    b      float32[10]     replicated              40 B
    w      float32[64,10]  replicated          2.50 KiB
    total  650 elements                        2.54 KiB
    """
    named = named_leaves(tree)
    _check_leaves(named)
    shardings: list[Any] = [getattr(leaf, "sharding", None) for _, leaf in named]
    if plan is not None:
        shardings = [*shardings_of(tree, plan)]
    rows: list[tuple[str, ...]] = []
    total = elements = 0
    for (path, leaf), sharding in zip(named, shardings, strict=True):
        if not isinstance(sharding, Sharding):
            refuse(path, "a sharding", repr(sharding), "give plan=…", kind=ShardingError)
        own = math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        total, elements = total + own, elements + math.prod(leaf.shape)
        rows.append((path, describe_value(leaf), _spell_spec(sharding), size(own)))
    rows.append(("total", f"{elements} elements", "", size(total)))
    return table(("path", "shape", "spec", "bytes per device"), rows)


def _spell_spec(sharding: Any) -> str:
    spec = getattr(sharding, "spec", None)
    if spec is None:
        return "one device" if len(sharding.device_set) == 1 else type(sharding).__name__
    return ", ".join("·" if e is None else "+".join(axes_of(e)) for e in spec) or "replicated"
