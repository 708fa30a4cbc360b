"""The optimizer, as one chain."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import stepfold as sf
from stepfold.adapter import TrainingArguments, make_optimizer, make_schedule
from stepfold.adapter.arguments.optimizers import optimizer_names
from stepfold.adapter.parts.optimizer import optimizer_of
from stepfold.core.optimizer import as_optimizer

PARAMS = {"embed": jnp.arange(12.0).reshape(3, 4) / 7, "w": jnp.ones((4, 4)) / 3}
NEEDED = {
    "galore": {"rank": 2},
    "lbfgs": {"linesearch": None},
    "noisy_sgd": {"key": 0},
    "sophia": {"hessian_diagonal_fn": optax.trace(0.9)},
}


def after(tx, params=PARAMS, steps=3):
    """Give parameters after some steps down a bowl."""

    def loss_fn(params, batch, key):
        return sum(((leaf - 1.5) ** 2).sum() for leaf in jax.tree.leaves(params))

    state = sf.init_state(params, tx, jax.random.key(0))
    step = jax.jit(sf.make_train_step(loss_fn, tx))
    for _ in range(steps):
        state, metrics = step(state, None)
    return state, float(metrics["loss"].compute())


def pairs(one, other):
    return zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)


def made(steps=100, **fields):
    arguments = TrainingArguments(**fields)
    return make_optimizer(arguments, make_schedule(arguments, steps))


@pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated")  # by optax
@pytest.mark.parametrize("name", optimizer_names())
def test_every_optimizer_of_optax_trains_with_a_schedule(name):
    kwargs = NEEDED.get(name, {})
    tx = as_optimizer(
        made(
            optimizer=name,
            extra_optimizer_kwargs=kwargs,
            learning_rate=0.1,
            scheduler="linear",
        )
    )
    before = PARAMS["embed"]
    state, params = tx.init(before), before
    update = jax.jit(tx.update)
    for _ in range(2):
        updates, state = update(2 * (params - 1.5), state, params, value=jnp.array(3.0))
        params = optax.apply_updates(params, updates)
    assert np.isfinite(params).all()
    assert (params != before).any()


def test_every_optimizer_that_optax_exports_can_be_had():
    made_of_a_rate = {"adamw", "sgd", "adafactor", "lion", "polyak_sgd", "sm3", "fromage"}
    assert made_of_a_rate | {"muon", "prodigy", "sophia", "schedule_free_adamw"} <= {
        *optimizer_names()
    }
    assert not {"scale_by_adam", "chain", "schedule_free"} & {*optimizer_names()}


def test_it_is_what_one_writes_by_hand():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 100, 0.01)
    by_hand = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(schedule, b1=0.8, weight_decay=0.1)
    )
    tx = made(
        learning_rate=0.1,
        learning_rate_end=0.01,
        scheduler="cosine",
        warmup_steps=10,
        clip_grad=0.5,
        weight_decay=0.1,
        extra_optimizer_kwargs={"b1": 0.8},
    )
    for one, other in pairs(after(tx)[0].params, after(by_hand)[0].params):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_weight_decay_is_added_to_the_gradient_where_the_optimizer_has_none():
    tx = made(optimizer="sgd", learning_rate=0.1, weight_decay=0.5)
    by_hand = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1))
    for one, other in pairs(after(tx)[0].params, after(by_hand)[0].params):
        np.testing.assert_array_equal(one, other)


def test_without_weight_decay_the_optimizer_keeps_its_own():
    tx, by_hand = made(optimizer="lion", learning_rate=0.1), optax.lion(0.1)
    for one, other in pairs(after(tx)[0].params, after(by_hand)[0].params):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("name", "fields"), [("adam", {}), ("sgd", {"momentum": 0.9}), ("adafactor", {"momentum": 0.9})]
)
def test_the_first_moment_has_the_dtype_asked_for(name, fields):
    tx = made(optimizer=name, tx_mu_dtype="bf16", extra_optimizer_kwargs=fields)
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(tx.init(PARAMS))}
    assert "bfloat16" in dtypes


def test_frozen_parameters_stay_whatever_the_optimizer_would_do_to_them():
    tx = made(frozen_parameters="^embed", weight_decay=0.1, learning_rate=0.1)
    state, _ = after(tx)
    np.testing.assert_array_equal(state.params["embed"], PARAMS["embed"])
    assert (state.params["w"] != PARAMS["w"]).all()


def test_pruning_goes_around_the_optimizer():
    class Pruner:
        def wrap_optax(self, tx):
            return optax.chain(tx, optax.scale(0.0))

    state, _ = after(made(pruning_module=Pruner()))
    np.testing.assert_array_equal(state.params["w"], PARAMS["w"])
    state, _ = after(made(pruning_module=lambda tx: optax.chain(tx, optax.scale(0.0))))
    np.testing.assert_array_equal(state.params["w"], PARAMS["w"])


def test_float16_has_a_loss_scale_around_all_of_it():
    tx = made(mixed_precision="fp16", frozen_parameters="embed")
    state = sf.init_state(PARAMS, tx, jax.random.key(0))
    assert float(state.opt_state.scale) == 2.0**15
    assert not hasattr(made(mixed_precision="bf16").init(PARAMS), "scale")


def test_contrib_is_looked_up_too():
    by_hand = contrib.muon(1e-3)
    state, _ = after(made(optimizer="muon", learning_rate=1e-3))
    np.testing.assert_array_equal(state.params["w"], after(by_hand)[0].params["w"])


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
