"""Elastic steps in one process, and what they check before a run starts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.loop.elastic import HostCopy

TX = optax.adam(0.1)
PARAMS = {"w": jnp.arange(64.0).reshape(8, 8)}
SHAPE = jax.eval_shape(lambda: sf.init_state(PARAMS, TX, jax.random.key(0)))


def loss_fn(params, batch, key):
    return sf.mean((batch @ params["w"]) ** 2)


def build(devices):
    plan = sf.make_sharding(SHAPE, sf.make_mesh(devices=devices), sf.fsdp(min_size=1))
    return sf.make_train_step(loss_fn, TX), plan


def fsdp_plan(count):
    mesh = sf.make_mesh((1, count, 1, 1), devices=jax.devices()[:count])
    return sf.make_sharding(SHAPE, mesh, sf.fsdp(min_size=1))


def test_in_one_process_a_run_is_that_of_its_step():
    elastic, batches = sf.Elastic(build), jnp.ones((64, 8))
    first = sf.init_state(PARAMS, TX, jax.random.key(0), sharding=elastic.plan)
    other = sf.init_state(PARAMS, TX, jax.random.key(0), sharding=elastic.plan)
    result = sf.fit(elastic, first, sf.batches(batches, 16, seed=0), steps=7)
    expected = sf.fit(elastic.step, other, sf.batches(batches, 16, seed=0), steps=7)
    np.testing.assert_array_equal(result.state.params["w"], expected.state.params["w"])
    assert result.history == expected.history


def test_build_is_called_once_for_the_same_devices():
    calls = []
    elastic = sf.Elastic(lambda devices: calls.append(devices) or build(devices))
    assert (elastic.step, elastic.plan) == (elastic.step, elastic.plan)
    assert calls == [jax.devices()]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda devices: None, "build: expected (step, plan) from it, got None"),
        (lambda devices: (loss_fn, None), "build: expected a plan from it, a tree of shardings"),
    ],
)
def test_what_build_returns_is_checked(function, message):
    with pytest.raises(sf.ConfigError) as error:
        _ = sf.Elastic(function).plan
    assert str(error.value).startswith(message)


def test_arguments_are_checked():
    with pytest.raises(sf.ConfigError, match="build: expected a function build"):
        sf.Elastic(3)
    with pytest.raises(sf.ConfigError, match="every: expected"):
        sf.Elastic(build, every=0)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (8, 8), (1, 4)])
def test_a_copy_is_restored_on_another_mesh(before, after):
    state = sf.init_state(PARAMS, TX, jax.random.key(0), sharding=fsdp_plan(before))
    expected = jax.tree.map(lambda leaf: leaf, state)
    copy, plan = HostCopy(state, 0), fsdp_plan(after)
    assert copy.missing(plan) == []
    restored = copy.restored(plan, {}, None).state
    for leaf, sharding, like in zip(*map(jax.tree.leaves, (restored, plan, expected)), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        assert leaf.dtype == like.dtype
    np.testing.assert_array_equal(restored.params["w"], PARAMS["w"])
    assert jax.random.key_data(restored.key).tolist() == jax.random.key_data(state.key).tolist()


def test_a_copy_outlives_a_step_that_donates_the_state():
    elastic = sf.Elastic(build)
    state = sf.init_state(PARAMS, TX, jax.random.key(0), sharding=elastic.plan)
    copy = HostCopy(state, 0)
    step = jax.jit(elastic.step, donate_argnums=0)
    for _ in range(3):
        state, _ = step(state, jnp.ones((16, 8)))
    jax.block_until_ready(state)
    restored = copy.restored(elastic.plan, {}, None).state
    np.testing.assert_array_equal(restored.params["w"], PARAMS["w"])


def test_a_dropped_copy_lacks_all_leaves():
    plan = fsdp_plan(2)
    copy = HostCopy(sf.init_state(PARAMS, TX, jax.random.key(0), sharding=plan), 0)
    copy.drop()
    assert "params/w" in copy.missing(plan)
    assert jax.tree.leaves(copy.like(plan).params)[0].sharding == plan.params["w"]


@pytest.mark.parametrize("seed", [None, 0])
def test_batches_are_divided_again_at_their_position(seed):
    batches = sf.batches(np.arange(40), 8, seed=seed, process_index=None)
    whole = [batches.at(step).tolist() for step in range(3)]
    next(batches)
    parts = [batches.shared(share) for share in ((0, 1, 4), (1, 4, 4))]
    for step in (1, 2):
        assert [row for part in parts for row in next(part).tolist()] == whole[step]


def test_batches_of_given_processes_are_not_divided_again():
    batches = sf.batches(np.arange(40), 8, process_index=0, process_count=2)
    with pytest.raises(sf.ConfigError, match="process_index, process_count: expected none"):
        batches.shared((0, 1, 1))


def test_prefetched_batches_are_divided_again():
    stream = sf.prefetch(sf.batches(np.arange(40), 8))
    next(stream)
    assert next(stream.shared((1, 2, 2))).tolist() == [12, 13, 14, 15]
