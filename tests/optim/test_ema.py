"""`ema_params` keeps the average that it says, and `get_ema` finds it at any depth."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.small import ones

import stepfold as sf
from stepfold.core.optimizer import as_optimizer

PARAMS = {"w": jax.device_put(np.array([1.0, 2.0], np.float32))}
ONES = {"w": ones(2)}


def walk(tx, steps, params=PARAMS):
    """Take steps of gradient one, and list the parameters on the way."""
    tx = as_optimizer(tx)
    state, path, update = tx.init(params), [], jax.jit(tx.update)
    for _ in range(steps):
        updates, state = update(ONES, state, params)
        params = optax.apply_updates(params, updates)
        path.append(params)
    return state, path


def test_it_averages_the_updated_parameters():
    state, path = walk(sf.ema_params(optax.sgd(0.1), 0.9), 3)
    want = PARAMS
    for params in path:
        want = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, want, params)
    chex.assert_trees_all_close(sf.get_ema(state), want, rtol=1e-6)
    chex.assert_trees_all_close(path, walk(optax.sgd(0.1), 3)[1])


def test_debiased_it_starts_from_nothing():
    state, path = walk(sf.ema_params(optax.sgd(0.1), 0.9, debias=True), 3)
    weights = np.array([0.9**2, 0.9, 1.0])
    want = sum(w * np.asarray(p["w"]) for w, p in zip(weights, path, strict=True)) / weights.sum()
    np.testing.assert_allclose(sf.get_ema(state)["w"], want, rtol=1e-6)


def test_before_the_first_update_a_debiased_average_is_the_parameters(key):
    tx = sf.ema_params(optax.sgd(0.1), 0.9, debias=True)
    state = sf.init_state(PARAMS, tx, key)
    chex.assert_trees_all_equal(jax.jit(sf.get_ema)(state), PARAMS)
    bare = jax.jit(sf.get_ema)(state.opt_state)
    chex.assert_trees_all_equal(bare, jax.tree.map(jnp.zeros_like, PARAMS))


@pytest.mark.parametrize("debias", [False, True])
def test_a_schedule_warms_it_up(debias):
    decay = lambda count: jnp.minimum(0.9, (1.0 + count) / (10.0 + count))
    state, path = walk(sf.ema_params(optax.sgd(0.1), decay, debias=debias), 4)
    average, mass = (0.0, 0.0) if debias else (np.asarray(PARAMS["w"]), 1.0)
    for count, params in enumerate(path):
        d = min(0.9, (1 + count) / (10 + count))
        average, mass = d * average + (1 - d) * np.asarray(params["w"]), d * mass + (1 - d)
    np.testing.assert_allclose(sf.get_ema(state)["w"], average / mass, rtol=1e-6)


def test_it_is_kept_in_float32_and_given_in_the_parameters_dtype(key):
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    tx = sf.ema_params(optax.sgd(2.0**-8), 0.999)
    state = sf.init_state(params, tx, key)
    step = jax.jit(sf.make_train_step(lambda p, b, k: p["w"].astype(jnp.float32).sum(), tx))
    for _ in range(3):
        state, _ = step(state, None)
    assert sf.get_ema(state.opt_state)["w"].dtype == jnp.float32
    assert sf.get_ema(state)["w"].dtype == jnp.bfloat16
    assert (sf.get_ema(state.opt_state)["w"] < PARAMS["w"]).all()  # bf16 would not have moved


def test_float64_stays_float64():
    with jax.enable_x64(True):
        tx = sf.ema_params(optax.sgd(0.1), 0.9)
        params = {"w": np.ones(2)}
        state = tx.init(params)
        _, state = tx.update(params, state, params)
        assert sf.get_ema(state)["w"].dtype == np.float64
        np.testing.assert_allclose(sf.get_ema(state)["w"], 0.9 + 0.1 * 0.9, rtol=1e-15)


def test_what_it_wraps_gets_the_extra_arguments():
    tx = sf.ema_params(optax.contrib.reduce_on_plateau(patience=1), 0.9)
    _, state = tx.update(ONES, tx.init(PARAMS), PARAMS, value=jnp.float32(0.5))
    assert state.inner.best_value == 0.5


def test_what_is_got_outlives_a_donated_state(key):
    tx = sf.ema_params(optax.sgd(0.1), 0.9)
    state = sf.init_state(PARAMS, tx, key)
    smooth = sf.get_ema(state)
    jax.jit(sf.make_train_step(lambda p, b, k: p["w"].sum(), tx), donate_argnums=0)(state, None)
    chex.assert_trees_all_equal(smooth, PARAMS)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: tx,
        lambda tx: optax.chain(optax.clip(1.0), optax.chain(tx, optax.identity())),
        lambda tx: optax.inject_hyperparams(lambda rate: optax.chain(optax.scale(rate), tx))(
            rate=1.0
        ),
        sf.dynamic_loss_scale,
    ],
)
def test_it_is_found_at_any_depth(key, wrap):
    state = sf.init_state(PARAMS, wrap(sf.ema_params(optax.adam(0.1), 0.9)), key)
    chex.assert_trees_all_equal(sf.get_ema(state), PARAMS)
    chex.assert_trees_all_equal(sf.get_ema(state.opt_state), PARAMS)


def test_parameters_that_it_does_not_cover_are_taken_as_they_are(key):
    params = {"free": {"a": jnp.ones(2)}, "frozen": {"b": jnp.full(2, 5.0), "c": jnp.ones(1)}}
    labels = {"free": "train", "frozen": "freeze"}
    average = sf.ema_params(optax.sgd(0.1), 0.5)
    tx = optax.multi_transform({"train": average, "freeze": optax.set_to_zero()}, labels)
    state = sf.init_state(params, tx, key)
    step = sf.make_train_step(lambda p, b, k: sum(x.sum() for x in jax.tree.leaves(p)), tx)
    state, _ = step(state, None)
    np.testing.assert_allclose(sf.get_ema(state)["free"]["a"], 0.95)
    chex.assert_trees_all_equal(sf.get_ema(state)["frozen"], params["frozen"])


def test_several_or_none_is_an_error_that_says_so(key):
    one = sf.ema_params(optax.sgd(0.1), 0.9)
    nested = sf.ema_params(optax.chain(optax.clip(1.0), sf.ema_params(one, 0.99)), 0.999)
    for tx, found in ((optax.sgd(0.1), 0), (optax.chain(one, one), 2), (nested, 3)):
        state = sf.init_state(PARAMS, tx, key)
        with pytest.raises(
            sf.errors.ConfigError, match=f"get_ema: expected one average .* got {found}; w"
        ):
            sf.get_ema(state)


@pytest.mark.parametrize("decay", [1.0, -0.1, 2, "0.9", None])
def test_a_decay_that_is_none_is_refused(decay):
    with pytest.raises(
        sf.errors.ConfigError, match="ema_params: expected 0 <= decay < 1 or a schedule, got"
    ):
        sf.ema_params(optax.sgd(0.1), decay)


def test_an_update_without_parameters_is_refused():
    tx = sf.ema_params(optax.sgd(0.1), 0.9)
    with pytest.raises(sf.errors.ConfigError, match="ema_params: pass the parameters"):
        tx.update(ONES, tx.init(PARAMS))
