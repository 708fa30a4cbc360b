"""What a step computes does not depend on what it keeps for its backward pass."""

import functools
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from tests.small import full_but

import stepfold as sf
from stepfold.inspect.choose import remat_policies

pytestmark = pytest.mark.not_optimized
TX = optax.sgd(1.0)  # so that the new parameters show the gradients
ROWS = np.linspace(-1.0, 1.0, 48, dtype=np.float32).reshape(6, 8)
WITH_HOST = SimpleNamespace(
    platform="tpu", addressable_memories=lambda: [SimpleNamespace(kind="pinned_host")]
)
POLICIES = remat_policies(["hidden", "noise"], WITH_HOST)


def init(key):
    return jax.random.normal(key, (3, 2, 8, 8)) / 8**0.5


def layer(x, layer):
    """A layer with dropout, whose noise has to be the same when it is computed again."""
    weights, key = layer
    hidden = checkpoint_name(jnp.tanh(x @ weights[0]), "hidden")
    noise = checkpoint_name(jax.random.bernoulli(key, 0.5, hidden.shape), "noise")
    return jnp.sin(jnp.where(noise, hidden, 0) @ weights[1]), None


def make_step(remat, checkpoint=jax.checkpoint):
    def loss_fn(params, batch, key):
        each = layer if remat is None else checkpoint(layer, policy=remat)
        return sf.mean(jax.lax.scan(each, batch, (params, jax.random.split(key, 3)))[0] ** 2)

    return sf.make_train_step(loss_fn, TX)


@functools.cache
def start():
    return jax.device_get(sf.init_state(init, TX, jax.random.key(0)).params)


def after_one_step(step):
    state = sf.init_state(start(), TX, jax.random.key(0))
    state, metrics = jax.jit(step)(state, ROWS)
    return state.params, metrics["loss"].compute()


@functools.cache
def wanted():
    return after_one_step(make_step(None))


def check(step):
    chex.assert_trees_all_close(after_one_step(step), wanted(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", full_but(["names saved: hidden, noise"], POLICIES))
def test_gradients_do_not_depend_on_the_policy(name):
    check(make_step(POLICIES[name]))


def with_another_key(function, policy):
    """A wrong `jax.checkpoint`: its backward pass draws other noise than its forward pass."""

    @jax.custom_vjp
    def wrong(x, weights, key):
        return function(x, (weights, key))[0]

    def forward(x, weights, key):
        return wrong(x, weights, key), (x, weights, key)

    def backward(residuals, cotangent):
        x, weights, key = residuals
        again = lambda x, weights: function(x, (weights, jax.random.fold_in(key, 1)))[0]
        return *jax.vjp(again, x, weights)[1](cotangent), None

    wrong.defvjp(forward, backward)
    return jax.checkpoint(lambda x, layer: (wrong(x, *layer), None), policy=policy)


def test_what_is_nearly_right_fails_the_same_law():
    step = make_step(jax.checkpoint_policies.nothing_saveable, with_another_key)
    assert after_one_step(step)[1] == pytest.approx(wanted()[1])  # the forward pass is right
    with pytest.raises(AssertionError):
        check(step)
