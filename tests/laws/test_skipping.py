"""A step on a batch that is not finite is a no-op, bit for bit; what is nearly right fails."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.small import full_but

import stepfold as sf

from . import network

pytestmark = pytest.mark.not_optimized


def optimizer():
    return sf.ema_params(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), 0.9)


@cache
def skipping(n):
    make = sf.make_train_step
    return jax.jit(
        make(network.stateful_loss, optimizer(), accumulate=n, skip_nonfinite=True, stateful=True)
    )


@cache
def times_zero(n):
    """Multiply the update of a bad step by zero, as some loops do."""
    tx, grad_fn = optimizer(), sf.make_grad(network.stateful_loss, accumulate=n, stateful=True)

    @jax.jit
    def step(state, batch):
        key = jax.random.fold_in(state.key, state.step)
        grads, terms, _, _ = grad_fn(state.params, batch, key, state.model_state)
        good = jnp.isfinite(terms["fit"].compute()).astype(jnp.float32)
        updates, _ = tx.update(grads, state.opt_state, state.params)
        updates = jax.tree.map(lambda u: u * good, updates)
        params = optax.apply_updates(state.params, updates)
        return state._replace(step=state.step + 1, params=params), {"skipped": sf.mean(good == 0)}

    return step


@cache
def trained():
    state = sf.init_state(network.init, optimizer(), jax.random.key(0), stateful=True)
    state, _ = skipping(4)(state, network.batch(0))
    signed = jax.tree.map(lambda p: p.at[0].set(-0.0), state.params)  # a zero that has a sign
    return state._replace(params=signed)


def check(make, n, leaf, where, value):
    state, batch = trained(), network.batch(1)
    batch["mask"] = jnp.ones_like(batch["mask"])
    batch[leaf] = batch[leaf].at[where[: batch[leaf].ndim]].set(value)
    after, metrics = make(n)(state, batch)
    assert network.bits(after) == network.bits(state._replace(step=state.step + 1))
    assert int(metrics["skipped"].total) == 1


@given(
    leaf=st.sampled_from(["x", "y"]),
    where=st.tuples(st.integers(0, network.EXAMPLES - 1), st.integers(0, network.WIDTH - 1)),
    value=st.sampled_from([np.nan, np.inf, -np.inf]),
)
def test_a_bad_batch_changes_nothing_wherever_it_is_bad(leaf, where, value):
    if leaf == "x" and not np.isnan(value):
        value = np.nan  # tanh makes a finite number of infinity
    check(skipping, 4, leaf, where, value)


def test_what_is_nearly_right_fails_the_same_law():
    with pytest.raises(AssertionError):
        check(times_zero, 1, "x", (0, 0), np.nan)


@pytest.mark.parametrize("n", full_but([4], [1, 4]))
def test_the_next_good_step_is_taken_as_if_the_bad_one_had_not_been(n):
    state, bad = trained(), network.batch(1)
    bad["x"] = bad["x"].at[0].set(jnp.nan)
    skipped, _ = skipping(n)(state, bad)
    after, metrics = skipping(n)(skipped, network.batch(2))
    want, _ = skipping(n)(state._replace(step=state.step + 1), network.batch(2))
    assert network.bits(after) == network.bits(want)
    assert int(metrics["skipped"].total) == 0
    assert np.isfinite(metrics["loss"].compute())
