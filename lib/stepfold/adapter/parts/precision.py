"""In which dtypes a run computes, and what is kept for its backward pass."""

from typing import Any

import jax
import jax.numpy as jnp

from stepfold import tree
from stepfold.adapter.arguments.devices import MIXED
from stepfold.adapter.arguments.training import TrainingArguments
from stepfold.core.precision import Precision
from stepfold.errors import ConfigError


def precision(arguments: TrainingArguments) -> Precision:
    """Make the precision of the step, of `dtype` or `mixed_precision`.

    With float16 `make_optimizer` wraps the optimizer in a dynamic loss scale.

    >>> from stepfold.adapter import TrainingArguments, precision
    >>> precision(TrainingArguments(mixed_precision="bf16")).compute.name
    'bfloat16'
    """
    mixed = arguments.mixed_precision
    return Precision(_enabled("dtype", arguments.dtype or MIXED[mixed or "full"]))


def _enabled(name: str, dtype: str) -> Any:
    """Refuse float64 where jax would quietly make float32 of it."""
    if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
        raise ConfigError(
            f"{name}: expected float32 or narrower, got {dtype}, which jax has switched off; "
            "set JAX_ENABLE_X64=1 in the environment"
        )
    return jnp.dtype(dtype)


def cast_params(arguments: TrainingArguments, params: Any) -> Any:
    """Give parameters in `param_dtype`; integers stay, and without one all do.

    >>> import jax.numpy as jnp
    >>> from stepfold.adapter import TrainingArguments, cast_params
    >>> cast_params(TrainingArguments(param_dtype="bf16"), {"w": jnp.ones(2)})["w"].dtype.name
    'bfloat16'
    """
    if arguments.param_dtype is None:
        return params
    return tree.cast_floats(params, _enabled("param_dtype", arguments.param_dtype))


def remat(arguments: TrainingArguments) -> str | None:
    """Give what `make_train_step` takes as `remat`.

    >>> from stepfold.adapter import TrainingArguments, remat
    >>> remat(TrainingArguments(gradient_checkpointing="nothing_saveable"))
    'nothing_saveable'
    """
    policy = arguments.gradient_checkpointing
    return None if policy == "none" else policy
