"""Sharding rules: from the path of a leaf to the mesh axes that shard its dimensions."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from stepfold import tree
from stepfold.errors import ShardingError
from stepfold.sharding.mesh import axes_of

RuleFn = Callable[[str, Any], PartitionSpec | None]
"""`(path, leaf) -> spec`, or None to defer to the next rule."""


@dataclass(frozen=True)
class Fsdp:
    """The automatic rule; see `fsdp`."""

    axis: str | tuple[str, ...]
    min_size: int

    def on(self, mesh: Mesh) -> RuleFn:
        """Return the rule function for a mesh."""
        names = tuple(name for name in axes_of(self.axis) if name in mesh.shape)
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
    are smaller than `min_size`, or have no such dimension, are replicated. So are all leaves if the
    mesh has no axis `fsdp`.

    Args:
      axis: the mesh axis, or several to be used as one.
      min_size: the number of elements below which a leaf is not sharded.

    >>> import jax, jax.numpy as jnp, stepfold as sf
    >>> mesh = sf.make_mesh((1, -1, 1, 1))
    >>> shapes = jax.eval_shape(lambda: {"w": jnp.ones((1024, 4096)), "b": jnp.ones(64)})
    >>> plan = sf.make_sharding(shapes, mesh, sf.fsdp(min_size=1024))
    >>> plan["b"].is_fully_replicated
    True
    """
    if not isinstance(min_size, int) or min_size < 0:
        raise ShardingError(f"fsdp: expected min_size of at least 0 elements, got {min_size!r}")
    return Fsdp(axis, min_size)


def read_rules(rules: Rules, mesh: Mesh, paths: Sequence[str]) -> RuleFn:
    """Combine rules into one function: the first match wins, and `fsdp()` takes the rest."""
    several = isinstance(rules, Sequence) and not _is_pair(rules)
    sequence: Any = rules if several else [rules]
    functions = [_as_function(rule, mesh, paths) for rule in (*sequence, fsdp())]

    def asked(path: str, leaf: Any) -> PartitionSpec:
        found = (function(path, leaf) for function in functions)
        return next(spec for spec in found if spec is not None)

    return asked


def _is_pair(rule: Any) -> bool:
    return isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[0], str)


def _as_function(rule: Any, mesh: Mesh, paths: Sequence[str]) -> RuleFn:
    if isinstance(rule, Fsdp):
        none = not set(axes_of(rule.axis)) & set(mesh.shape)
        if none and rule.axis != "fsdp":  # the default axis, which a mesh may lack
            raise ShardingError(
                f"fsdp: expected axes of the mesh {tuple(mesh.shape)}, got {rule.axis!r}"
            )
        return rule.on(mesh)
    if not _is_pair(rule):
        if callable(rule):
            return rule  # type: ignore[no-any-return]
        raise ShardingError(
            f"rules: expected (regex, PartitionSpec), a function (path, leaf) -> spec, or "
            f"sf.fsdp(), got {tree.spell(rule)}"
        )
    pattern, spec = rule
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise ShardingError(f"rules: {pattern!r} is no regular expression: {error}") from None
    if not any(found.search(path) for path in paths):
        raise ShardingError(
            f"rules: {pattern!r} matches no path; there are {', '.join(paths[:8])}"
            + (f" and {len(paths) - 8} more" if len(paths) > 8 else "")
        )
    return lambda path, _leaf: spec if found.search(path) else None
