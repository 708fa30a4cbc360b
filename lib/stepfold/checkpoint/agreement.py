"""Agreement between processes; without communication if there is only one."""

import jax
import numpy as np
from jax.experimental import multihost_utils


def worst_of(mine: int) -> int:
    """Return the maximum over all processes; collective."""
    if jax.process_count() == 1:
        return mine
    return int(np.max(multihost_utils.process_allgather(np.array(mine, np.int32))))


def same_as_first(numbers: list[int]) -> list[int]:
    """Return the list of process 0 on every process; collective."""
    if jax.process_count() == 1:
        return numbers
    count = int(multihost_utils.broadcast_one_to_all(np.array(len(numbers), np.int32)))
    mine = np.zeros(count, np.int64)
    mine[: len(numbers)] = numbers[:count]
    halves = multihost_utils.broadcast_one_to_all(mine.view(np.int32))  # jax may lack int64
    return np.asarray(halves).view(np.int64).tolist()  # type: ignore[no-any-return]
