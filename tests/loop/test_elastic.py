"""Elastic steps in one process, and what they check before a run starts."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.loop import host_copy
from stepfold.loop.host_copy import HostCopy, Part

TX = optax.adam(0.1)
PARAMS = {"w": jnp.arange(64.0).reshape(8, 8)}
SHAPE = jax.eval_shape(lambda: sf.init_state(PARAMS, TX, jax.random.key(0)))


def loss_fn(params, batch, key):
    return sf.mean((batch @ params["w"]) ** 2)


def build(devices):
    plan = sf.make_sharding(SHAPE, sf.make_mesh(devices=devices), sf.fsdp(min_size=1))
    return sf.make_train_step(loss_fn, TX), plan


def born(plan):
    return sf.init_state(PARAMS, TX, jax.random.key(0), sharding=plan)


def fsdp_plan(count):
    mesh = sf.make_mesh((1, count, 1, 1), devices=jax.devices()[:count])
    return sf.make_sharding(SHAPE, mesh, sf.fsdp(min_size=1))


def test_in_one_process_a_run_is_that_of_its_step():
    elastic, batches = sf.Elastic(build), jnp.ones((64, 8))
    first = born(elastic.plan)
    other = born(elastic.plan)
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("build", 3), ("every", 0), ("every_seconds", 0), ("replicas", 2)),
        *(("patience", 0), ("patience", "1"), ("leave_behind", 1)),
    ],
)
def test_arguments_are_checked(name, value):
    with pytest.raises(sf.ConfigError, match=f"{name}: expected"):
        sf.Elastic(**{"build": build, name: value})


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (8, 8), (1, 4)])
def test_a_copy_is_restored_on_another_mesh(before, after):
    state = born(fsdp_plan(before))
    plan = fsdp_plan(after)
    restored = HostCopy.of(state, 0).restore(plan)
    for leaf, sharding, like in zip(*map(jax.tree.leaves, (restored, plan, state)), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        assert leaf.dtype == like.dtype
    np.testing.assert_array_equal(restored.params["w"], PARAMS["w"])
    assert jax.random.key_data(restored.key).tolist() == jax.random.key_data(state.key).tolist()


def test_a_copy_outlives_a_step_that_donates_the_state():
    elastic = sf.Elastic(build)
    state = born(elastic.plan)
    copy = HostCopy.of(state, 0)
    state, _ = jax.jit(elastic.step, donate_argnums=0)(state, jnp.ones((16, 8)))
    jax.block_until_ready(state)
    restored = copy.restore(elastic.plan)
    np.testing.assert_array_equal(restored.params["w"], PARAMS["w"])


def test_a_copy_knows_what_its_state_looks_like_on_another_mesh():
    copy, plan = HostCopy.of(born(fsdp_plan(2)), 0), fsdp_plan(4)
    with pytest.raises(sf.ConfigError, match="build: expected a plan like the state"):
        copy.restore(plan.params)
    copy.drop()
    assert jax.tree.leaves(copy.like(plan).params)[0].sharding == plan.params["w"]


def regions_by_process(shape, spec, dims, processes):
    """Which regions of an array each process has, with one device of a mesh for each."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: math.prod(dims)]).reshape(dims), ("a", "b"))
    index = jax.sharding.NamedSharding(mesh, spec).devices_indices_map(shape)
    regions = [host_copy.region(each, shape) for each in index.values()]
    return {p: frozenset([r]) for p, r in zip(processes, regions, strict=False)}


SPECS = [(), ("a",), (None, "b"), ("a", "b"), (("a", "b"),), ("b", "a")]


@pytest.mark.parametrize("seed", range(20))
def test_processes_that_are_left_get_what_their_new_shards_need(seed):
    """Simulated: parts move as `_schedule` says, and all processes have what they need."""
    rng = np.random.default_rng(seed)
    dims = [(2, 4), (4, 2), (1, 8), (8, 1)][rng.integers(4)]
    whole = rng.normal(size=(8, 16))
    old, new = (jax.sharding.PartitionSpec(*SPECS[i]) for i in rng.integers(len(SPECS), size=2))
    before = regions_by_process(whole.shape, old, dims, range(8))
    places = dict.fromkeys(range(8))
    places.update((p, p) for p in places)
    held = {p: set(before[p]) for p in before}
    shift = int(rng.integers(1, 8))
    for p in before:  # replicas
        for _, region in host_copy._only_at([before], p, places):
            held[(p + shift) % 8].add(region)
    dead = int(rng.integers(1, 8))
    left = [p for p in range(8) if p != dead]
    wanted = regions_by_process(
        whole.shape, new, (2, 2), sorted(rng.permutation(left)[:4].tolist())
    )
    has = [[held[p]] for p in left]
    sent, lacking = host_copy._schedule([wanted], has, left)
    assert lacking is None
    cut = lambda region: whole[tuple(slice(*ends) for ends in region)]
    copies = [HostCopy({"w": whole}, 0) for _ in left]
    for p, copy in zip(left, copies, strict=True):
        copy._parts = [{region: cut(region) for region in held[p]}]
    for (source, target), parts in sent.items():
        assert source != target
        packed = host_copy._pack([copies[source]._cut(*part) for part in parts])
        copies[target]._add(packed, parts)
    for copy, p in zip(copies, left, strict=True):
        for region in wanted.get(p, ()):
            np.testing.assert_array_equal(copy._cut(0, region), cut(region))


def test_a_part_that_no_process_has_is_named():
    whole, half = ((0, 4),), ((0, 2),)
    _, lacking = host_copy._schedule([{1: {whole}}], [[{half}], [set()]], [0, 1])
    assert lacking == 0


def test_parts_that_a_process_on_another_host_has_are_not_copied():
    spec = jax.sharding.PartitionSpec("b")  # over 4 of 8, so that two processes have each part
    layout = regions_by_process((8,), spec, (2, 4), range(8))
    alone = [host_copy._only_at([layout], p, {q: q for q in range(8)}) for p in range(8)]
    assert alone == [[]] * 8
    pairs = {q: q % 4 for q in range(8)}  # both copies on one host
    assert host_copy._only_at([layout], 1, pairs) == [Part(0, ((2, 4),))]


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
    with pytest.raises(sf.ConfigError, match="process_index, process_count: expected neither"):
        batches.shared((0, 1, 1))


def test_prefetched_batches_are_divided_again():
    stream = sf.prefetch(sf.batches(np.arange(40), 8))
    next(stream)
    assert next(stream.shared((1, 2, 2))).tolist() == [12, 13, 14, 15]
