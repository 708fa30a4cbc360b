"""The loss function as the arguments want it."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stepfold import tree
from stepfold.adapter.arguments.training import TrainingArguments
from stepfold.core.optimizer import takes_any_keyword
from stepfold.errors import ConfigError

_PRECISION = {True: "default", False: "highest"}


def make_loss(
    arguments: TrainingArguments, loss_fn: Callable[..., Any], mesh: Mesh | None = None
) -> Callable[..., Any]:
    """Make the loss function that heeds what the arguments say of it.

    It is given `loss_config` as keywords; the terms of it that are called aux… count unless
    `aux_loss_enabled` is False; matrix products are as precise as `use_fast_kernels` says; and on
    a mesh the dimensions of a batch beyond the first are spread as `step_partition_spec` says.

    Args:
      arguments: the arguments.
      loss_fn: a loss function.
      mesh: the mesh that batches are on.

    Raises:
      ConfigError: if the loss function does not take what it is to be given.

    >>> from stepfold.adapter import TrainingArguments, make_loss
    >>> arguments = TrainingArguments(loss_config={"scale": 2.0}, aux_loss_enabled=False)
    >>> loss = make_loss(arguments, lambda p, b, key, scale=1.0: {"ce": p * scale, "aux_z": p})
    >>> loss(3.0, None, None)
    {'ce': 6.0}
    """
    config = arguments.loss_config
    _check_takes(loss_fn, config)
    fast = arguments.use_fast_kernels

    @wraps(loss_fn)
    def loss(params: Any, batch: Any, *rest: Any) -> Any:
        batch = batch if mesh is None else _spread(arguments.step_partition_spec, batch, mesh)
        with nullcontext() if fast is None else jax.default_matmul_precision(_PRECISION[fast]):
            said = loss_fn(params, batch, *rest, **config)
        return said if arguments.aux_loss_enabled else _without_aux(said)

    return loss


def _check_takes(loss_fn: Callable[..., Any], config: dict[str, Any]) -> None:
    if not callable(loss_fn):
        raise ConfigError(f"loss_fn: expected a loss function, got {tree.spell(loss_fn)}")
    if not config or takes_any_keyword(loss_fn):
        return
    lacking = [name for name in config if name not in inspect.signature(loss_fn).parameters]
    if lacking:
        raise ConfigError(
            f"loss_config: expected keywords of {getattr(loss_fn, '__name__', loss_fn)}, got "
            f"{', '.join(lacking)}, which it does not take"
        )


def _without_aux(said: Any) -> Any:
    """Leave terms called aux… out of what a loss function returned."""
    terms, *rest = said if isinstance(said, tuple) else (said,)
    if not isinstance(terms, dict):
        raise ConfigError(
            "aux_loss_enabled=False: expected a loss function that returns its terms by name, as "
            "{'loss': …, 'aux_router': …}, so that there is something to leave out, got "
            f"{tree.spell(terms)}"
        )
    kept = {name: term for name, term in terms.items() if not name.startswith("aux")}
    if not kept:
        raise ConfigError(
            f"aux_loss_enabled=False: expected a term besides {', '.join(terms)}; nothing is left"
        )
    return (kept, *rest) if isinstance(said, tuple) else kept


def _spread(spec: tuple[Any, ...] | None, batch: Any, mesh: Mesh) -> Any:
    """Tell the compiler how a batch lies, each leaf by as many dimensions as it has."""
    if spec is None:
        return batch

    def place(leaf: Any) -> Any:
        if not tree.is_array(leaf):
            return leaf
        return jax.lax.with_sharding_constraint(
            leaf, NamedSharding(mesh, PartitionSpec(*spec[: leaf.ndim]))
        )

    return jax.tree.map(place, batch)
