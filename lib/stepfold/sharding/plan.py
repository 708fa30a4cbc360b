"""Sharding plans: trees of shardings, derived from rules and checked before any placement."""

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from stepfold.core.state import TrainState
from stepfold.errors import ShardingError, TreeMismatchError
from stepfold.sharding.mesh import axes_of, check_mesh
from stepfold.sharding.rules import Rules, fsdp, read_rules
from stepfold.table import size, table
from stepfold.tree import is_array, named_leaves, path_name, spell

_AUTOMATIC = fsdp()


def make_sharding(
    tree: Any,
    mesh: Mesh,
    rules: Rules = _AUTOMATIC,
    *,
    misfit: Literal["error", "replicate"] = "error",
) -> Any:
    """Plan the sharding of a state: derive a tree of `NamedSharding`s from rules.

    A rule is a pair `(regex, PartitionSpec)`, a function `(path, leaf) -> spec` that may return
    None, or `fsdp(…)`. The first rule that matches wins; `fsdp()` applies to leaves that none
    matches. A regular expression is searched in the path of the leaf, such as
    `params/layers/0/kernel`.

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
        raise ShardingError(f"misfit: expected 'error' or 'replicate', got {misfit!r}")
    check_mesh(mesh)
    named = named_leaves(tree)
    _check_leaves(named)
    rule = read_rules(rules, mesh, [path for path, _ in named])
    wrong: list[str] = []
    uneven: list[str] = []

    def asked(path: str, leaf: Any) -> PartitionSpec:
        if math.prod(leaf.shape) <= 1:
            return PartitionSpec()
        spec: Any = rule(path, leaf)
        problem = _problem(leaf.shape, spec, mesh)
        if problem:
            wrong.append(f"{path}: {problem}")
            return PartitionSpec()
        entries = list(spec)
        for dim, parts in _uneven(leaf.shape, spec, mesh):
            uneven.append(
                f"{path}: {spec} for the shape {leaf.shape}, and dimension {dim} of "
                f"{leaf.shape[dim]} does not divide by {parts}"
            )
            entries[dim] = None
        return PartitionSpec(*entries)

    if isinstance(tree, TrainState):
        specs = _state_specs(tree, asked)
    else:
        specs = [asked(path, leaf) for path, leaf in named]
    _report(wrong, uneven, mesh, misfit)
    return jax.tree.unflatten(jax.tree.structure(tree), [NamedSharding(mesh, s) for s in specs])


def _check_leaves(named: list[tuple[str, Any]]) -> None:
    for path, leaf in named:
        if not is_array(leaf):
            raise ShardingError(
                f"{path or 'tree'}: expected an array or an abstract one, got {spell(leaf)}"
            )


def _state_specs(
    state: TrainState, asked: Callable[[str, Any], PartitionSpec]
) -> list[PartitionSpec]:
    """Apply the rules to parameters and model state; the optimizer state follows."""

    def specs_of(part: Any, root: str) -> list[Any]:
        return [asked(path, leaf) for path, leaf in named_leaves(part, root)]

    params = jax.tree_util.tree_leaves_with_path(state.params)
    param_specs = specs_of(state.params, "params")
    owners = {
        path: (leaf.shape, spec) for (path, leaf), spec in zip(params, param_specs, strict=True)
    }

    def following(path: tuple[Any, ...], leaf: Any) -> Any:
        for start in range(len(path) + 1):
            if path[start:] in owners and math.prod(leaf.shape) > 1:
                spec = _mirrored(leaf.shape, *owners[path[start:]])
                if spec is not None:
                    return spec
        return asked(f"opt_state/{path_name(path)}", leaf)

    opt_leaves = jax.tree_util.tree_leaves_with_path(state.opt_state)
    opt_specs = [following(path, leaf) for path, leaf in opt_leaves]
    whole = PartitionSpec()
    return [whole, *param_specs, *opt_specs, *specs_of(state.model_state, "model_state"), whole]


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


def _report(wrong: list[str], uneven: list[str], mesh: Mesh, misfit: str) -> None:
    """Raise or warn about all problems at once."""
    advice = "misfit='replicate' leaves such a dimension whole"
    lines = wrong + (uneven if misfit == "error" else [])
    if lines:
        lines += [advice] if uneven and misfit == "error" else []
        fault = f"the rules do not fit the mesh {dict(mesh.shape)}:"
        raise ShardingError("\n  ".join([fault, *lines]))
    if uneven:
        warnings.warn("\n  ".join(["left whole, as asked for:", *uneven]), stacklevel=3)


def _problem(shape: tuple[int, ...], spec: Any, mesh: Mesh) -> str | None:
    if not isinstance(spec, PartitionSpec):
        return f"expected a PartitionSpec from the rule, got {spell(spec)}"
    if len(spec) > len(shape):
        return f"{spec} has {len(spec)} entries, and the shape {shape} {len(shape)} dimensions"
    used = [name for entry in spec for name in axes_of(entry)]
    unknown = [name for name in used if name not in mesh.shape]
    if unknown:
        return f"{spec} for the shape {shape} names {unknown}, and the axes are {mesh.axis_names}"
    twice = sorted({name for name in used if used.count(name) > 1})
    return f"{spec} for the shape {shape} uses {twice} more than once" if twice else None


def _uneven(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> list[tuple[int, int]]:
    """List the dimensions that do not divide, each with the number of its shards."""
    parts = [math.prod(mesh.shape[name] for name in axes_of(entry)) for entry in spec]
    return [(dim, count) for dim, count in enumerate(parts) if shape[dim] % count]


def places_of(tree: Any, plan: Any) -> list[Sharding]:
    """List the sharding of each leaf; `plan` is a tree like it, or one sharding for all."""
    if isinstance(plan, Sharding):
        return [plan for _ in jax.tree.leaves(tree)]
    for name, place in named_leaves(plan):
        if not isinstance(place, Sharding):
            raise ShardingError(
                f"plan{'/' * bool(name)}{name}: expected shardings, as sf.make_sharding makes "
                f"them, got {spell(place)}"
            )
    have, want = ([name for name, _ in named_leaves(x)] for x in (tree, plan))
    lines = [f"{name}: has no sharding" for name in have if name not in set(want)]
    lines += [f"{name}: has a sharding and no array" for name in want if name not in set(have)]
    structures: list[Any] = [jax.tree.structure(tree), jax.tree.structure(plan)]
    if not lines and structures[0] != structures[1]:
        lines = [f"expected the containers {structures[0]}, got {structures[1]}"]
    if lines:
        raise TreeMismatchError("\n  ".join(["the plan is for another tree:", *lines]))
    return jax.tree.leaves(plan)


def sharding_table(tree: Any, plan: Any = None) -> str:
    """Format the shardings of a tree as a table: path, shape, spec, and bytes per device.

    Args:
      tree: a tree of arrays, also abstract ones.
      plan: its shardings, as from `make_sharding`; by default those of the arrays themselves.

    >>> import jax, jax.numpy as jnp, stepfold as sf
    >>> params = {"w": jnp.ones((64, 10)), "b": jnp.ones(10)}
    >>> plan = sf.make_sharding(params, sf.make_mesh())
    >>> print(sf.sharding_table(params, plan))
    path   shape           spec        bytes per device
    -----  --------------  ----------  ----------------
    b      float32[10]     replicated              40 B
    w      float32[64,10]  replicated          2.50 KiB
    total  650 elements                        2.54 KiB
    """
    named = named_leaves(tree)
    _check_leaves(named)
    places: list[Any] = [getattr(leaf, "sharding", None) for _, leaf in named]
    if plan is not None:
        places = [*places_of(tree, plan)]
    rows: list[tuple[str, ...]] = []
    total = whole = 0
    for (path, leaf), place in zip(named, places, strict=True):
        if not isinstance(place, Sharding):
            raise ShardingError(f"{path}: expected a sharding, got {place!r}; give plan=…")
        own = math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        total, whole = total + own, whole + math.prod(leaf.shape)
        rows.append((path, spell(leaf), _spell_spec(place), size(own)))
    rows.append(("total", f"{whole} elements", "", size(total)))
    return table(("path", "shape", "spec", "bytes per device"), rows)


def _spell_spec(place: Any) -> str:
    spec = getattr(place, "spec", None)
    if spec is None:
        return "one device" if len(place.device_set) == 1 else type(place).__name__
    return ", ".join("·" if e is None else "+".join(axes_of(e)) for e in spec) or "replicated"
