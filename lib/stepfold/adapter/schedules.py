"""Where an optimizer's state counts the steps of its schedule."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from stepfold import tree


def _counts(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState) or hasattr(node, "hyperparams")


def schedule_paths(opt_state: Any, root: str = "opt_state") -> list[str]:
    """List the paths of the counts.

    >>> tx = optax.adam(optax.linear_schedule(1.0, 0.0, 10))
    >>> schedule_paths(tx.init(jnp.ones(2)))
    ['opt_state/1/count']
    """
    leaves = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_counts)
    names = [tree.path_name(path) for path, node in leaves if _counts(node)]
    return ["/".join(filter(None, (root, name, "count"))) for name in names]


def with_schedule_at(opt_state: Any, step: int) -> Any:
    """Give the optimizer's state whose schedules stand at a step."""

    def moved(node: Any) -> Any:
        return node._replace(count=jnp.full_like(node.count, step)) if _counts(node) else node

    return jax.tree.map(moved, opt_state, is_leaf=_counts)


def rate_of(schedule: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make the function that tells with which rate a state was made.

    It goes by the optimizer's own count, which steps that are left out do not raise.

    >>> import stepfold as sf
    >>> schedule = optax.linear_schedule(1.0, 0.0, 10)
    >>> state = sf.init_state(jnp.ones(2), optax.sgd(schedule), jax.random.key(0))
    >>> float(rate_of(schedule)(state._replace(opt_state=with_schedule_at(state.opt_state, 6))))
    0.5
    """

    def rate(state: Any) -> Any:
        nodes = jax.tree.leaves(state.opt_state, is_leaf=_counts)
        counts = [node.count for node in nodes if _counts(node)]
        return jnp.asarray(schedule((counts[0] if counts else state.step) - 1), jnp.float32)

    return rate
