"""Where a run's arrays live."""

import jax
import jax.numpy as jnp
import pytest

import stepfold as sf
from stepfold.adapter import (
    TrainingArguments,
    make_mesh,
    sharding_rules,
    start_processes,
)


def test_the_mesh_is_as_said():
    mesh = make_mesh(TrainingArguments(sharding_array=(1, -1, 2, 1)))
    assert dict(mesh.shape) == {"dp": 1, "fsdp": 4, "tp": 2, "sp": 1}
    arguments = TrainingArguments(sharding_array=(-1,), sharding_axis_names=("data",))
    assert dict(make_mesh(arguments, jax.devices()[:2]).shape) == {"data": 2}


def test_a_mesh_that_does_not_fit_the_devices():
    with pytest.raises(sf.ShardingError, match=r"does not fit the 8 devices there are; nearest"):
        make_mesh(TrainingArguments(sharding_array=(3, 1, 1, 1)))


@pytest.mark.parametrize(("auto", "whole"), [(True, False), (False, True)])
def test_states_are_spread_or_whole(auto, whole):
    arguments = TrainingArguments(auto_shard_states=auto)
    shapes = jax.eval_shape(lambda: {"w": jnp.ones((1024, 64))})
    plan = sf.make_sharding(shapes, make_mesh(arguments), sharding_rules(arguments))
    assert plan["w"].is_fully_replicated is whole


def test_processes_are_started_only_if_asked_for_and_by_known_names():
    assert start_processes(TrainingArguments()) is None
    wrong = TrainingArguments(jax_distributed_config={"coordinator": "a:1", "num_process": 2})
    with pytest.raises(sf.ConfigError, match=r"expected coordinator_address, .* got num_process$"):
        start_processes(wrong)


def test_what_jax_calls_it_reaches_what_starts_processes():
    arguments = TrainingArguments(
        jax_distributed_config={
            "coordinator_address": "localhost",
            "num_processes": 2,
            "process_id": 0,
        }
    )
    with pytest.raises(sf.ConfigError, match="coordinator: expected an address with a port"):
        start_processes(arguments)


def test_without_a_launcher_there_is_one_process():
    assert start_processes(TrainingArguments(jax_distributed_config={})).processes == 1
