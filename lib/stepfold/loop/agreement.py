"""Stopping together: several processes stop at the same step, whichever of them has a reason."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils


def first_said(reasons: Sequence[str]) -> str | None:
    """Give a reason to stop if any process has one; each has to ask."""
    mine = reasons[0] if reasons else None
    if jax.process_count() == 1:
        return mine
    asked = np.asarray(multihost_utils.process_allgather(np.array(bool(reasons))))
    if not asked.any():
        return None
    return mine or f"process {int(np.flatnonzero(asked)[0])} asked to stop"
