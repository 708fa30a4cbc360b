"""Parameters that stay as they are."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

from stepfold import tree
from stepfold.errors import ConfigError


def frozen(tx: optax.GradientTransformation, pattern: str) -> optax.GradientTransformation:
    """Wrap an optimizer such that parameters whose path a pattern finds never change.

    The optimizer does not see them: they have no state in it, and no part in a global norm.

    Args:
      tx: an optimizer.
      pattern: a regular expression.

    Raises:
      ConfigError: from `init`, if it finds none of the parameters, or all.

    >>> import jax.numpy as jnp, optax
    >>> tx = frozen(optax.trace(0.9), "^embed")
    >>> state = tx.init({"embed": jnp.ones(2), "w": jnp.ones(2)})
    >>> [leaf.shape for leaf in jax.tree.leaves(state)]
    [(2,)]
    """

    def labels(params: Any) -> Any:
        def label(path: tuple[Any, ...], _: Any) -> str:
            return "frozen" if re.search(pattern, tree.path_name(path)) else "trained"

        found = jax.tree_util.tree_map_with_path(label, params)
        kinds = set(jax.tree.leaves(found))
        if kinds != {"frozen", "trained"}:
            paths = [path for path, _ in tree.named_leaves(params)]
            many = "all" if "frozen" in kinds else "none"
            raise ConfigError(
                f"frozen_parameters: expected {pattern!r} to be found in the paths of some "
                f"parameters and not of others, and it is in {many}"
                f" of {', '.join(paths[:5])}{', …' * (len(paths) > 5)}"
            )
        return found

    # -0.0 and not 0.0: it is the number that leaves every bit of what it is added to.
    still = optax.stateless(lambda updates, _: jax.tree.map(lambda u: -jnp.zeros_like(u), updates))
    return optax.multi_transform({"trained": tx, "frozen": still}, labels)
