"""In which dtypes a run computes."""

import jax
import jax.numpy as jnp
import optax
import pytest

import stepfold as sf
from stepfold.adapter import (
    TrainingArguments,
    cast_params,
    make_optimizer,
    make_schedule,
    precision,
    remat,
)
from stepfold.adapter.arguments.devices import MIXED


@pytest.mark.parametrize(
    ("fields", "compute"),
    [
        ({}, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        *(({"mixed_precision": name}, dtype) for name, dtype in MIXED.items()),
    ],
)
def test_a_step_computes_in_it(fields, compute):
    arguments, seen = TrainingArguments(**fields), []
    tx = make_optimizer(arguments, make_schedule(arguments, 10))

    def loss_fn(params, batch, key):
        seen.append(params.dtype.name)
        return (params * batch).sum()

    state = sf.init_state(jnp.ones(2), tx, jax.random.key(0))
    step = sf.make_train_step(loss_fn, tx, precision=precision(arguments))
    state, _ = step(state, jnp.ones(2))
    assert {*seen} == {compute}
    assert state.params.dtype == jnp.float32


def test_parameters_are_cast_and_nothing_else_is():
    params = {"w": jnp.ones(2), "ids": jnp.arange(2)}
    assert cast_params(TrainingArguments(), params) is params
    cast = cast_params(TrainingArguments(param_dtype="float16"), params)
    assert (cast["w"].dtype.name, cast["ids"].dtype.name) == ("float16", "int32")


def test_float64_has_to_be_switched_on():
    for name, make in (("dtype", precision), ("param_dtype", lambda a: cast_params(a, {}))):
        with pytest.raises(sf.ConfigError, match=f"{name}: .* float64, which jax has switched off"):
            make(TrainingArguments(**{name: "float64"}))
    with jax.enable_x64(True):
        assert precision(TrainingArguments(dtype="float64")).compute == jnp.float64


def test_a_policy_is_one_that_a_step_takes():
    for policy in ("none", "nothing_saveable", "checkpoint_dots_with_no_batch_dims"):
        found = remat(TrainingArguments(gradient_checkpointing=policy))
        sf.make_train_step(lambda p, b, key: p.sum(), optax.sgd(0.1), remat=found)
    assert remat(TrainingArguments()) is None


def test_every_policy_by_name_is_one_that_a_step_takes():
    from typing import get_args

    from stepfold.adapter.arguments.devices import Remat

    for policy in get_args(Remat)[1:]:
        sf.make_train_step(lambda p, b, key: p.sum(), optax.sgd(0.1), remat=policy)
