"""What was donated to a call: gone, and to be told as such where it is given once more."""

from typing import Any

import jax

from stepfold import tree
from stepfold.errors import ConfigError


def check_there(state: Any) -> None:
    """See that no array of a state was donated.

    Raises:
      ConfigError: if one was.
    """
    for name, leaf in tree.named_leaves(state):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            if not leaf.is_deleted():
                continue
            raise ConfigError(
                f"{name}, …: the arrays were donated to an earlier call and are gone; go on with "
                "the state that it returned"
            )
