"""Fields: the mesh, precision, and what is computed twice to spare memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import jax

from stepfold.adapter.arguments.readers import (
    dims,
    flag,
    floating,
    mapping,
    one_of,
    optional,
    partition,
    several,
    text,
)
from stepfold.adapter.arguments.setting import setting

Remat = Literal[
    "none",
    "nothing_saveable",
    "everything_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
]
Mixed = Literal["bf16", "fp16", "full"]
MIXED: Mapping[Mixed, str] = MappingProxyType(
    {"bf16": "bfloat16", "fp16": "float16", "full": "float32"}
)


def policy(name: str, value: Any) -> str:
    """Read a policy, by its name or as it is in jax; "" and None mean none, as elsewhere."""
    if value in ("", None):
        return "none"
    names = get_args(Remat)
    same = [known for known in names if getattr(jax.checkpoint_policies, known, None) is value]
    return str(one_of(*names)(name, same[0] if same else value))


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Where arrays live, in which dtypes, and what is kept for the backward pass."""

    sharding_array: tuple[int, ...] = setting(
        (1, -1, 1, 1), dims, "How many devices along each axis of the mesh; -1 is what is left."
    )
    sharding_axis_names: tuple[str, ...] = setting(
        ("dp", "fsdp", "tp", "sp"),
        several(text, "names of axes", least=1),
        "The names of those axes.",
    )
    sharding_dcn_axis_dims: tuple[int, ...] | None = setting(
        None, optional(dims), "How many slices, with a slower network between, along each axis."
    )
    step_partition_spec: tuple[Any, ...] | None = setting(
        None,
        optional(partition),
        "How a batch is spread, dimension by dimension; by default its examples over dp and fsdp.",
    )
    auto_shard_states: bool = setting(
        True, flag, "Whether to spread the state over fsdp; else every device has all of it."
    )
    jax_distributed_config: dict[str, Any] | None = setting(
        None,
        optional(mapping),
        "What jax.distributed is started with; {} finds it out, None starts nothing.",
    )
    dtype: str | None = setting(
        None, optional(floating), "What the loss function computes in; float32 by default."
    )
    param_dtype: str | None = setting(
        None, optional(floating), "The dtype of the parameters; as they are, by default."
    )
    mixed_precision: Mixed | None = setting(
        None,
        optional(one_of(*get_args(Mixed))),
        "Another way to say dtype: bf16, fp16 (with a dynamic loss scale) or full.",
    )
    gradient_checkpointing: Remat = setting(
        "none", policy, "What is kept for the backward pass, by jax.checkpoint_policies."
    )
    use_fast_kernels: bool | None = setting(
        None,
        optional(flag),
        "The precision of matrix products: True is jax's 'default', the fastest of the device, "
        "False 'highest'; None leaves it as it is. XLA chooses the kernels.",
    )
