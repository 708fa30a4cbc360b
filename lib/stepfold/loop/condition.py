"""In what condition a state is: how far, whether it is whole, and whether it is worth keeping."""

from typing import Any

import jax
import jax.numpy as jnp

from stepfold import tree


def steps_of(state: Any) -> int:
    """Give how many steps a state has behind it; 0, where it does not say.

    >>> steps_of({"w": 1.0})
    0
    """
    return int(getattr(state, "step", 0))


def is_whole(state: Any) -> bool:
    """Tell whether a state is there: neither donated, nor of a step that failed."""
    try:
        jax.block_until_ready(state)
    except RuntimeError:
        return False
    return True


def has_nan(state: Any) -> bool:
    """Tell whether a parameter of a state is NaN; an infinite one may be meant, as in a mask."""
    leaves = [leaf for leaf in jax.tree.leaves(getattr(state, "params", ())) if tree.is_float(leaf)]
    return bool(_any_nan(leaves))


@jax.jit
def _any_nan(leaves: list[Any]) -> jax.Array:
    return jnp.array([jnp.isnan(leaf).any() for leaf in leaves] or [False]).any()
