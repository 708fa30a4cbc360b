"""Where a run's arrays live."""

from typing import Any

from jax.sharding import Mesh, PartitionSpec

from stepfold.adapter.arguments.training import TrainingArguments
from stepfold.errors import ConfigError
from stepfold.sharding import mesh as meshes
from stepfold.sharding.distributed import Distributed, start_distributed
from stepfold.sharding.rules import fsdp

_JAX_NAMES = {
    "coordinator_address": "coordinator",
    "num_processes": "processes",
    "process_id": "process",
    "local_device_ids": "devices",
    "initialization_timeout": "timeout",
    "heartbeat_timeout_seconds": "heartbeat",
    "shutdown_timeout_seconds": "shutdown",
}


def start_processes(arguments: TrainingArguments) -> Distributed | None:
    """Start jax.distributed, if `jax_distributed_config` is given; before anything else of jax's.

    Its keys are those of `jax.distributed.initialize`, or of `sf.start_distributed`.

    Raises:
      ConfigError: if a key is neither.

    >>> from stepfold.adapter import TrainingArguments, start_processes
    >>> start_processes(TrainingArguments()) is None
    True
    """
    if arguments.jax_distributed_config is None:
        return None
    given = {_JAX_NAMES.get(k, k): v for k, v in arguments.jax_distributed_config.items()}
    unknown = sorted(given.keys() - set(_JAX_NAMES.values()))
    if unknown:
        raise ConfigError(
            f"jax_distributed_config: expected {', '.join(_JAX_NAMES)}, got {', '.join(unknown)}"
        )
    return start_distributed(**given)


def make_mesh(arguments: TrainingArguments, devices: Any = None) -> Mesh:
    """Make the mesh of `sharding_array`, `sharding_axis_names` and `sharding_dcn_axis_dims`.

    >>> import jax
    >>> from stepfold.adapter import TrainingArguments, make_mesh
    >>> make_mesh(TrainingArguments()).shape["fsdp"] == jax.device_count()
    True
    """
    return meshes.make_mesh(
        arguments.sharding_array,
        arguments.sharding_axis_names,
        dcn_dims=arguments.sharding_dcn_axis_dims,
        devices=devices,
    )


def sharding_rules(arguments: TrainingArguments) -> Any:
    """Give the rules for `sf.make_sharding`: spread by `auto_shard_states`, or whole everywhere.

    >>> from stepfold.adapter import TrainingArguments, sharding_rules
    >>> sharding_rules(TrainingArguments(auto_shard_states=False))
    [('', P())]
    """
    return fsdp() if arguments.auto_shard_states else [("", PartitionSpec())]
