"""A table of a model's parameters, as clu formats it, for any tree."""

from typing import Any

import jax
from jax.sharding import NamedSharding

from stepfold import tree
from stepfold.errors import ConfigError
from stepfold.sharding.plan import places_of


def parameter_table(params: Any, plan: Any = None, *, stats: bool = False) -> str:
    """Format parameters as a table: name, shape, dtype, size, and their total.

    Parameters with shardings on a mesh also show their partition specs.

    Args:
      params: a tree of arrays, or of abstract ones.
      plan: their shardings, if the arrays do not have them yet.
      stats: whether to add mean and standard deviation. The arrays must not be abstract.

    >>> import jax.numpy as jnp, stepfold as sf
    >>> print(sf.parameter_table({"layers": [{"w": jnp.ones((2, 3))}]}))
    +------------+--------+---------+------+
    | Name       | Shape  | Dtype   | Size |
    +------------+--------+---------+------+
    | layers/0/w | (2, 3) | float32 | 6    |
    +------------+--------+---------+------+
    Total: 6 -- 24 bytes
    """
    from clu.parameter_overview import get_parameter_overview  # it imports flax

    flat = dict(tree.named_leaves(params))
    for name, leaf in flat.items():
        if not tree.is_array(leaf):
            raise ConfigError(f"{name}: expected an array, got {tree.spell(leaf)}")
        if stats and (plan is not None or isinstance(leaf, jax.ShapeDtypeStruct)):
            got = "a plan" if plan is not None else f"the abstract {name} {tree.spell(leaf)}"
            raise ConfigError(
                f"stats=True: expected arrays in their shardings, got {got}; place the arrays first"
            )
    if plan is not None:
        flat = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for (name, leaf), sharding in zip(flat.items(), places_of(params, plan), strict=True)
        }
    is_sharded = any(isinstance(getattr(x, "sharding", None), NamedSharding) for x in flat.values())
    columns = ("global" if is_sharded else True) if stats else is_sharded and "sharding"
    overview: str = get_parameter_overview(flat, include_stats=columns)
    return overview
