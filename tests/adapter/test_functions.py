import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.adapter import TrainingArguments
from stepfold.adapter.functions import jitted, make_functions

from . import digits

pytestmark = pytest.mark.usefixtures("compiled_once")


def batch(rows=20):
    return {name: values[:rows] for name, values in digits.TRAIN.items()}


@pytest.fixture
def state(key):
    return sf.init_state(digits.init, optax.sgd(0.1), key)


def test_a_step_that_is_not_finite_leaves_the_parameters(state):
    step, _ = make_functions(TrainingArguments(), digits.plain_loss, optax.sgd(0.1))
    bad = {**batch(), "image": np.full((20, 64), np.nan, np.float32)}
    new, metrics = jax.jit(step)(state, bad)
    assert digits.bits(new.params) == digits.bits(state.params)
    assert float(metrics["skipped"].compute()) == 1.0


def test_the_rate_is_told_where_there_is_a_schedule(state):
    schedule = optax.constant_schedule(0.1)
    options = {"scheduler": schedule}
    step, _ = make_functions(TrainingArguments(), digits.plain_loss, optax.sgd(0.1), **options)
    _, metrics = jax.jit(step)(state, batch())
    assert float(metrics["learning_rate"].compute()) == pytest.approx(0.1)


def test_an_evaluation_has_its_own_loss_and_weighs_a_number_by_rows(state):
    _, evaluate = make_functions(
        TrainingArguments(), max, optax.sgd(0.1), eval_loss_fn=digits.plain_loss
    )
    assert float(evaluate(state, batch(7))["loss"].count) == 7.0


def test_both_are_jitted_and_the_state_comes_back_where_it_was():
    mesh = sf.make_mesh()
    tx = optax.sgd(0.1)
    shape = jax.eval_shape(lambda key: sf.init_state(digits.init, tx, key), jax.random.key(0))
    plan = sf.make_sharding(shape, mesh, sf.fsdp(min_size=1))
    state = sf.init_state(digits.init, tx, jax.random.key(0), sharding=plan)
    step, evaluate = jitted(
        *make_functions(TrainingArguments(), digits.plain_loss, tx, mesh=mesh), plan
    )
    whole = sf.shard_batch(batch(16), mesh)
    new, _ = step(state, whole)
    assert new.params["kernel"].sharding == plan.params["kernel"]
    assert state.params["kernel"].is_deleted()
    assert jnp.isfinite(evaluate(new, whole)["loss"].compute())
