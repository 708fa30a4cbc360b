"""Rematerialization: recompute activations in the backward pass to save memory."""

from collections.abc import Callable

import jax

from stepfold.core.loss import LossFn
from stepfold.core.optimizer import takes_any_keyword
from stepfold.errors import ConfigError

_POLICIES = (
    "nothing_saveable",
    "everything_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
)


def rematerialized(loss_fn: LossFn, remat: str | bool | Callable[..., bool] | None) -> LossFn:
    """Wrap a loss function in `jax.checkpoint`; the backward pass recomputes what is not saved."""
    if remat is None or remat is False:
        return loss_fn
    if isinstance(remat, str) and remat in _POLICIES:
        remat = getattr(jax.checkpoint_policies, remat)
    # A policy takes any keyword, since jax passes a primitive's parameters; its factory does not.
    if remat is not True and not (callable(remat) and takes_any_keyword(remat)):
        raise ConfigError(
            f"remat: expected None, True, a policy of jax.checkpoint_policies, or the name of one "
            f"({', '.join(_POLICIES)}), got {remat!r}"
            + ("; did you mean to call it?" * callable(remat))
        )
    return jax.checkpoint(loss_fn, policy=None if remat is True else remat)
