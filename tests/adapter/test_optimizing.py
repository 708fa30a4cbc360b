import jax.numpy as jnp
import optax
import pytest

import stepfold as sf
from stepfold.adapter import TrainingArguments
from stepfold.adapter.optimizing import optimizer_of


def test_one_that_is_given_is_taken_as_it_is():
    tx = optax.sgd(0.1)
    assert optimizer_of(TrainingArguments(), 10, tx) == (tx, None)
    rate = optax.constant_schedule(0.1)
    assert optimizer_of(TrainingArguments(), 10, tx, rate) == (tx, rate)


def test_a_schedule_alone_is_that_of_the_arguments_optimizer():
    halved = optax.linear_schedule(1.0, 0.5, 1)
    tx, rate = optimizer_of(TrainingArguments(optimizer="sgd"), 10, None, halved)
    params = jnp.ones(())
    updates, _ = tx.update(params, tx.init(params), params)
    assert (rate, float(updates)) == (halved, -1.0)


@pytest.mark.parametrize(
    "fields", [{"learning_rate": 1.0}, {"clip_grad": 1.0}, {"optimizer": "lion"}]
)
def test_what_would_have_no_effect_is_refused(fields):
    with pytest.raises(
        sf.ConfigError, match=f"tx: expected arguments that leave .* {next(iter(fields))}"
    ):
        optimizer_of(TrainingArguments(**fields), 10, optax.sgd(0.1))
    with pytest.raises(sf.ConfigError, match="scheduler: expected arguments that leave it to this"):
        optimizer_of(TrainingArguments(learning_rate=1.0), 10, None, optax.constant_schedule(0.1))


def test_pruning_wraps_one_that_was_given_too():
    arguments = TrainingArguments(pruning_module=lambda tx: optax.chain(tx, optax.scale(0.0)))
    tx, _ = optimizer_of(arguments, 10, optax.sgd(0.1))
    updates, _ = tx.update(jnp.ones(()), tx.init(jnp.ones(())))
    assert float(updates) == 0.0
