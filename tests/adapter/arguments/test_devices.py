"""Fields: the mesh, precision and rematerialization."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import stepfold as sf
from stepfold.adapter import TrainingArguments


@pytest.mark.parametrize("value", ["", None, "none"])
def test_no_policy_by_any_word_for_it(value):
    assert TrainingArguments(gradient_checkpointing=value).gradient_checkpointing == "none"


def test_a_policy_of_jax_is_kept_by_its_name():
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    arguments = TrainingArguments(gradient_checkpointing=policy)
    assert getattr(jax.checkpoint_policies, arguments.gradient_checkpointing) is policy
    assert arguments == TrainingArguments.from_json(arguments.to_json())


@pytest.mark.parametrize("value", ["nothing", len, 3, True])
def test_a_policy_that_there_is_not(value):
    with pytest.raises(sf.ConfigError, match="gradient_checkpointing: expected one of none, noth"):
        TrainingArguments(gradient_checkpointing=value)


def test_dtypes_and_specs_are_kept_as_json_has_them():
    arguments = TrainingArguments(
        dtype=jnp.bfloat16, step_partition_spec=PartitionSpec(("dp", "fsdp"), None, "sp")
    )
    assert arguments.dtype == "bfloat16"
    assert arguments.step_partition_spec == (("dp", "fsdp"), None, "sp")
