"""A table of a model's parameters, as clu writes it, for any tree."""

from typing import Any

import jax
from jax.sharding import NamedSharding

from stepfold import tree
from stepfold.errors import ConfigError
from stepfold.sharding.plan import places_of


def parameter_table(params: Any, plan: Any = None, *, stats: bool = False) -> str:
    """Write parameters as a table: name, shape, dtype, size, and their total.

    Where they are on a mesh, or are to be, it says how each is cut.

    Args:
      params: a tree of arrays, abstract ones too.
      plan: their shardings, where they do not have them yet.
      stats: whether to add mean and standard deviation, for which the arrays must be there.

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
            raise ConfigError(
                "parameter_table: stats are of arrays where they are, so leave out plan, and give "
                f"no abstract array; got {name} {tree.spell(leaf)}"
            )
    if plan is not None:
        places = places_of(params, plan)
        flat = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
            for (name, leaf), place in zip(flat.items(), places, strict=True)
        }
    is_cut = any(isinstance(getattr(x, "sharding", None), NamedSharding) for x in flat.values())
    columns = ("global" if is_cut else True) if stats else ("sharding" if is_cut else False)
    overview: str = get_parameter_overview(flat, include_stats=columns)
    return overview
