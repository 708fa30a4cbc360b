"""In what condition a state is: how far, whether it is whole, and whether it is worth keeping."""

from typing import Any

import jax
import jax.numpy as jnp

from stepfold import tree
from stepfold.core.state import TrainState
from stepfold.errors import ConfigError


def steps_of(state: Any) -> int:
    """Give how many steps a state has behind it; 0, where it does not say.

    Raises:
      ConfigError: if the state is several, stacked.

    >>> steps_of({"w": 1.0})
    0
    """
    step = getattr(state, "step", 0)
    if jnp.shape(step) != ():
        raise ConfigError(
            f"step: expected the state of one run, with a scalar for it, got {tree.spell(step)}; "
            "fold states that are stacked in a loop of your own, as examples/ensemble.py does"
        )
    return int(step)


def params_of(state: Any, default: Any) -> Any:
    """Give what is trained in a state; in a tree of several states, what is in each.

    Args:
      state: anything that a step folds over.
      default: what to give where nobody can tell.

    >>> import jax.numpy as jnp
    >>> state = TrainState(0, {"w": 1.0}, (), (), jax.random.key(0))
    >>> params_of({"actor": state, "critic": state, "played": jnp.ones(2)}, ())
    {'actor': {'w': 1.0}, 'critic': {'w': 1.0}, 'played': None}
    """
    if hasattr(state, "params"):
        return state.params
    is_state = lambda node: isinstance(node, TrainState)
    if not any(map(is_state, jax.tree.leaves(state, is_leaf=is_state))):
        return default
    params = lambda node: node.params if isinstance(node, TrainState) else None
    return jax.tree.map(params, state, is_leaf=is_state)


def is_whole(state: Any) -> bool:
    """Tell whether a state is there: neither donated, nor of a step that failed."""
    try:
        jax.block_until_ready(state)
    except RuntimeError:
        return False
    return True


def has_nan(state: Any) -> bool:
    """Tell whether a parameter of a state is NaN; an infinite one may be meant, as in a mask."""
    leaves = [leaf for leaf in jax.tree.leaves(params_of(state, ())) if tree.is_float(leaf)]
    return bool(_any_nan(leaves))


@jax.jit
def _any_nan(leaves: list[Any]) -> jax.Array:
    return jnp.array([jnp.isnan(leaf).any() for leaf in leaves] or [False]).any()
