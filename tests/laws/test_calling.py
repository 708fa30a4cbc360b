"""A step gives the same however it is called: jitted or not, scanned, mapped, on 1 device or 8."""

from contextlib import nullcontext
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tests.small import full_but

import stepfold as sf

from . import network
from .network import compile_fast  # noqa: F401  a fixture

VARIANTS = {
    "plain": {},
    "accumulate": {"accumulate": 4},
    "guarded": {"skip_nonfinite": True, "remat": "dots_saveable"},
    "bf16": {"precision": "bf16", "accumulate": 2},
    "together": {"skip_nonfinite": True, "remat": "dots_saveable", "accumulate": 4},
}
each_variant = pytest.mark.parametrize("name", full_but(["together"], VARIANTS))


def optimizer():
    return sf.ema_params(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1)), 0.9)


def start(seed=0):
    return sf.init_state(network.init, optimizer(), jax.random.key(seed), stateful=True)


@cache
def step_of(name):
    if name == "bf16":
        return sf.make_train_step(network.loss, optimizer(), **VARIANTS[name])
    return sf.make_train_step(network.stateful_loss, optimizer(), stateful=True, **VARIANTS[name])


@pytest.mark.full
@each_variant
def test_a_scan_of_steps_equals_the_steps_bit_for_bit(name):
    step, batches = step_of(name), [network.batch(seed) for seed in range(5)]
    state, seen = start(), []
    for batch in batches:
        state, metrics = jax.jit(step)(state, batch)
        seen.append(metrics)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    scanned, metrics = jax.jit(lambda s, b: jax.lax.scan(step, s, b))(start(), stacked)
    assert network.bits(scanned) == network.bits(state)
    assert network.bits(metrics) == network.bits(jax.tree.map(lambda *x: jnp.stack(x), *seen))


@pytest.mark.full
@pytest.mark.usefixtures("compile_fast")
@each_variant
@settings(max_examples=2)
@given(seed=st.integers(0, 2**31 - 1))
def test_jit_equals_no_jit(name, seed):
    step, state, batch = step_of(name), start(seed), network.batch(seed)
    with_jit, without = jax.jit(step)(state, batch), step(state, batch)
    tolerance = 2e-2 if name == "bf16" else 1e-4
    chex.assert_trees_all_close(_raw(with_jit), _raw(without), rtol=tolerance, atol=tolerance)
    chex.assert_trees_all_equal_shapes_and_dtypes(_raw(with_jit), _raw(without))


def _raw(tree):
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        tree,
    )


@pytest.mark.full
@pytest.mark.usefixtures("compile_fast")
@pytest.mark.parametrize("n", [1, 2])
@settings(max_examples=5)
@given(seed=st.integers(0, 2**31 - 1))
def test_eight_devices_equal_one(n, seed):
    state, batch = (
        sf.init_state(network.init(jax.random.key(seed))[0], optimizer(), jax.random.key(1)),
        network.batch(seed),
    )
    mesh = _mesh()
    spread = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("x")))
    everywhere = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    one, eight = _placed(n)(state, batch), _placed(n)(everywhere, spread)
    chex.assert_trees_all_close(_raw(eight), _raw(one), rtol=1e-3, atol=1e-4)
    chex.assert_trees_all_equal(
        eight[1]["close"], jax.device_put(one[1]["close"], NamedSharding(mesh, PartitionSpec()))
    )


@cache
def _placed(n):
    return jax.jit(sf.make_train_step(network.loss, optimizer(), accumulate=n))


@cache
def _mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


@pytest.mark.usefixtures("compile_fast")
@pytest.mark.parametrize(
    ("n", "check_vma"), full_but([(2, True)], [(1, False), (1, True), (2, False), (2, True)])
)
def test_shard_map_over_eight_devices_equals_one(n, check_vma):
    def summed(params, batch, key):
        terms, metrics = network.loss(params, batch, key)
        terms["fit"] = jax.lax.psum(terms["fit"], "x")
        return terms, jax.lax.psum(metrics, "x")

    def reduced(loss_fn, **options):
        grad_fn = sf.make_grad(loss_fn, **options)

        def over_devices(*inputs):
            grads, *rest = grad_fn(*inputs)
            return jax.lax.pmean(grads, "x"), *rest

        return over_devices

    tx = optimizer()
    state = sf.init_state(network.init(jax.random.key(0))[0], tx, jax.random.key(1))
    batch = network.batch(0)
    step = sf.make_train_step(
        summed, tx, accumulate=n, skip_nonfinite=True, **({} if check_vma else {"grad": reduced})
    )
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("x")), "out_specs": PartitionSpec()}
    mapped = jax.jit(jax.shard_map(step, mesh=_mesh(), check_vma=check_vma, **specs))
    one = jax.jit(sf.make_train_step(network.loss, tx, accumulate=n, skip_nonfinite=True))
    chex.assert_trees_all_close(
        _raw(mapped(state, batch)), _raw(one(state, batch)), rtol=1e-4, atol=1e-5
    )


def _mean_of_devices(loss_fn, **options):
    grad_fn = sf.make_grad(loss_fn, **options)

    def over_devices(*inputs):
        grads, *rest = grad_fn(*inputs)
        return jax.lax.pmean(grads, "x"), *rest

    return over_devices


MEAN_OF_DEVICES = optax.stateless(lambda grads, _: jax.lax.pmean(grads, "x"))


@pytest.mark.parametrize(
    ("reduce", "grad", "tx", "check_vma", "is_local"),
    [
        (lambda loss: loss, sf.make_grad, optax.identity(), False, True),
        (lambda loss: jax.lax.pmean(loss, "x"), sf.make_grad, optax.identity(), False, True),
        (lambda loss: loss, _mean_of_devices, optax.identity(), False, False),
        (lambda loss: loss, sf.make_grad, MEAN_OF_DEVICES, False, False),
        (lambda loss: jax.lax.pmean(loss, "x"), sf.make_grad, optax.identity(), True, False),
    ],
    ids=["alone", "pmean of the loss", "own grad", "in the optimizer", "checked"],
)
@pytest.mark.parametrize("n", [1, 2])
def test_local_gradients_in_shard_map_are_warned_of(reduce, grad, tx, check_vma, is_local, n):
    loss = lambda params, batch, key: reduce((batch["x"] @ params["w"]).mean())
    tx = optax.chain(tx, optax.sgd(1.0))
    state = sf.init_state({"w": jnp.zeros(2)}, tx, jax.random.key(0))
    batch = {"x": jnp.arange(32.0).reshape(16, 2)}
    step = sf.make_train_step(loss, tx, grad=grad, accumulate=n)
    params = lambda *inputs: step(*inputs)[0].params["w"]
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("x")), "out_specs": PartitionSpec()}
    mapped = jax.jit(jax.shard_map(params, mesh=_mesh(), check_vma=check_vma, **specs))
    message = "step: expected gradients of the whole batch in shard_map over x, got those of the"
    with pytest.warns(UserWarning, match=message) if is_local else nullcontext():
        new = mapped(state, batch)
    whole = jnp.allclose(new, -batch["x"].mean(0))
    assert bool(whole) != is_local


@pytest.mark.full
@pytest.mark.usefixtures("compile_fast")
def test_an_ensemble_by_vmap_equals_its_members():
    keys = jax.random.split(jax.random.key(0), 3)
    many = jax.vmap(partial(sf.init_state, network.init, optimizer(), stateful=True))(keys)
    step, batch = step_of("together"), network.batch(0)
    states, metrics = jax.jit(jax.vmap(step, in_axes=(0, None)))(many, batch)
    for i in range(len(keys)):
        state, seen = jax.jit(step)(jax.tree.map(lambda x: x[i], many), batch)
        member = jax.tree.map(lambda x: x[i], (states, metrics))
        chex.assert_trees_all_close(_raw(member), _raw((state, seen)), rtol=1e-4, atol=1e-5)
