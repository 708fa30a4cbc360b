"""Clip and EMA act on the whole batch's gradient, once per update; what is nearly right fails."""

from functools import cache

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stepfold as sf

from . import network

pytestmark = pytest.mark.not_optimized  # results are equal up to rounding

DECAY, CLIP, STEPS = 0.7, 0.05, 3


def plain():
    return optax.chain(optax.clip_by_global_norm(CLIP), optax.adam(0.1))


@cache
def by_hand():
    tx, grad_fn = plain(), sf.make_grad(network.loss)

    @jax.jit
    @jax.numpy_dtype_promotion("standard")  # optax alone is not written for the strict kind
    def update(params, opt_state, ema, batch):
        grads = grad_fn(params, batch, jax.random.key(0), ())[0]
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        ema = jax.tree.map(lambda e, p: DECAY * e + (1 - DECAY) * p, ema, params)
        return params, opt_state, ema

    return tx, update


@cache
def averaged_once(n):
    tx = sf.ema_params(plain(), DECAY)
    return tx, jax.jit(sf.make_train_step(network.loss, tx, accumulate=n))


@cache
def averaged_per_microbatch(n):
    tx = sf.ema_params(optax.MultiSteps(plain(), n).gradient_transformation(), DECAY)
    return tx, _in_a_loop(tx, n)


@cache
def clipped_per_microbatch(n):
    inner = optax.MultiSteps(sf.ema_params(optax.adam(0.1), DECAY), n).gradient_transformation()
    tx = optax.chain(optax.clip_by_global_norm(CLIP), inner)
    return tx, _in_a_loop(tx, n)


def _in_a_loop(tx, n):
    step = jax.jit(sf.make_train_step(network.loss, tx))

    def whole(state, batch):
        for i in range(n):
            state, metrics = step(state, jax.tree.map(lambda x: x[i::n], batch))
        return state, metrics

    return whole


def check(make, n, seed):
    tx, update = by_hand()
    params = network.init(jax.random.key(seed))[0]
    want = params, tx.init(params), params
    tx, step = make(n)
    state = sf.init_state(params, tx, jax.random.key(0))
    for i in range(STEPS):
        batch = network.batch(seed + i) | {"mask": jnp.ones(network.EXAMPLES, bool)}
        want = update(*want, batch)
        state, _ = step(state, batch)
    chex.assert_trees_all_close(state.params, want[0], rtol=1e-3, atol=1e-4)
    chex.assert_trees_all_close(sf.get_ema(state), want[2], rtol=1e-3, atol=1e-4)


@settings(max_examples=5)
@given(seed=st.integers(0, 2**31 - STEPS))
def test_clip_and_ema_act_once_per_update(seed):
    check(averaged_once, 4, seed)


@pytest.mark.parametrize("mutant", [averaged_per_microbatch, clipped_per_microbatch])
def test_what_is_nearly_right_fails_the_same_law(mutant):
    with pytest.raises(AssertionError):
        check(mutant, 4, 0)
