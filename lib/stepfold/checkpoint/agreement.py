"""What several processes have to be of one mind about; with one process, it is."""

import jax
import numpy as np
from jax.experimental import multihost_utils


def all_of(mine: bool) -> bool:
    """Tell whether it holds for all processes; each has to call it."""
    if jax.process_count() == 1:
        return mine
    return bool(np.all(multihost_utils.process_allgather(np.array(mine))))


def same_as_first(numbers: list[int]) -> list[int]:
    """Give the list that the first process has; each has to call it."""
    if jax.process_count() == 1:
        return numbers
    count = int(multihost_utils.broadcast_one_to_all(np.array(len(numbers), np.int32)))
    mine = np.zeros(count, np.int32)
    mine[: len(numbers)] = numbers[:count]
    return np.asarray(multihost_utils.broadcast_one_to_all(mine)).tolist()  # type: ignore[no-any-return]
