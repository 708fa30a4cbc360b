"""By rules alone a training lies on the devices in any layout, and its numbers stay the same."""

import math
from functools import cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.small import full_but

import stepfold as sf

from . import transformer

STEPS = 3
RULES = [
    ("embed$", P("tp", "fsdp")),
    ("head$", P("fsdp", "tp")),
    ("qkv$", P(None, "fsdp", None, "tp")),
    ("out$", P(None, "tp", None, "fsdp")),
    ("up$", P(None, "fsdp", "tp")),
    ("down$", P(None, "tp", "fsdp")),
]
LAYOUTS = {
    "one device": (1, 1, 1, 1),
    "dp 2": (2, 1, 1, 1),
    "dp 4": (4, 1, 1, 1),
    "dp 8": (8, 1, 1, 1),
    "fsdp 2": (1, 2, 1, 1),
    "fsdp 4": (1, 4, 1, 1),
    "fsdp 8": (1, 8, 1, 1),
    "tp 2": (1, 1, 2, 1),
    "tp 4": (1, 1, 4, 1),
    "tp 8": (1, 1, 8, 1),
    "fsdp 2 x tp 2": (1, 2, 2, 1),
    "fsdp 4 x tp 2": (1, 4, 2, 1),
    "dp 2 x fsdp 2 x tp 2": (2, 2, 2, 1),
    "sp 2": (1, 1, 1, 2),
    "sp 4": (1, 1, 1, 4),
    "dp 2 x sp 4": (2, 1, 1, 4),
}
# Not what compiles, but where arrays are and what comes out.
pytestmark = pytest.mark.not_optimized


def optimizer():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01))


def mesh_of(dims, names=("dp", "fsdp", "tp", "sp")):
    return sf.make_mesh(dims, names, devices=jax.devices()[: math.prod(dims)])


@cache
def parameters(init):
    """Give the same parameters to all, as numbers of the host."""
    return jax.tree.map(np.asarray, jax.jit(init)(jax.random.key(1)))


def planned(init, mesh, rules):
    make = lambda params: sf.init_state(params, optimizer(), jax.random.key(0))
    return sf.make_sharding(jax.eval_shape(make, parameters(init)), mesh, rules)


def astray(state, plan):
    """List what is not where the plan wants it, by path, with the shape that a device has."""
    named = jax.tree_util.tree_leaves_with_path(state)
    return [
        f"{jax.tree_util.keystr(path)}: {shard.data.shape} on {shard.device}"
        for (path, x), place in zip(named, jax.tree.leaves(plan), strict=True)
        for shard in x.addressable_shards
        if shard.data.shape != place.shard_shape(x.shape)
        or not x.sharding.is_equivalent_to(place, x.ndim)
    ]


def trained(init, loss, plan, mesh, compiles, *, held=False, **options):
    """Train a few steps in place; give the losses and the parameters.

    Args:
      held: whether jit is told where the state is to come out, and not left to decide.
    """
    with jax.enable_x64(True):
        step = sf.make_train_step(loss, optimizer(), **options)
        hold = {"out_shardings": (plan, None)} if held else {}
        step = jax.jit(step, donate_argnums=0, **hold)
        double = jax.tree.map(lambda x: x.astype(np.float64), parameters(init))
        state = sf.init_state(double, optimizer(), jax.random.key(0), sharding=plan)
        assert astray(state, plan) == []
        losses, counts = [], []
        for seed in range(STEPS):
            batch = sf.shard_batch(transformer.batch(seed), mesh)
            state, metrics = jax.block_until_ready(step(state, batch))
            counts.append(len(compiles))
            assert astray(state, plan) == []
            losses.append(metrics["loss"])
        assert counts[0] == counts[-1], "a later step compiled again"
        return [float(x.compute()) for x in losses], jax.tree.map(np.asarray, state.params)


@cache
def on_one_device(init, loss):
    """Train without a mesh, without rules and without donation."""
    with jax.enable_x64(True):
        step = jax.jit(sf.make_train_step(loss, optimizer()))
        double = jax.tree.map(lambda x: x.astype(np.float64), parameters(init))
        state, losses = sf.init_state(double, optimizer(), jax.random.key(0)), []
        for seed in range(STEPS):
            state, metrics = jax.block_until_ready(step(state, transformer.batch(seed)))
            losses.append(float(metrics["loss"].compute()))
        return losses, jax.tree.map(np.asarray, state.params)


def check(got, want):
    np.testing.assert_allclose(got[0], want[0], rtol=1e-10)
    chex.assert_trees_all_close(got[1], want[1], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", full_but(["dp 2 x fsdp 2 x tp 2"], LAYOUTS))
def test_a_transformer_trains_alike_in_every_layout(name, compiles):
    mesh = mesh_of(LAYOUTS[name])
    plan, place = planned(transformer.init, mesh, RULES), NamedSharding(mesh, P("dp", "sp"))
    spread = transformer.loss_with(lambda x: jax.lax.with_sharding_constraint(x, place))
    loss = spread if mesh.shape["sp"] > 1 else transformer.loss
    held = mesh.shape["fsdp"] > 1  # see test_a_state_stays_in_place
    got = trained(transformer.init, loss, plan, mesh, compiles, held=held)
    check(got, on_one_device(transformer.init, transformer.loss))


@pytest.mark.parametrize("way", full_but(["compile_step"], ["compile_step", "jit that is told"]))
def test_a_state_stays_in_place(way, compiles):
    # Left to itself, jit would cut the bias, which the plan leaves whole, and compile once more.
    tx, mesh = optax.adam(0.1), mesh_of((1, 1, 8, 1))
    params = {"up": jnp.ones((16, 64)), "bias": jnp.ones(64), "down": jnp.ones((64, 16))}
    shape = jax.eval_shape(lambda: sf.init_state(params, tx, jax.random.key(0)))
    plan = sf.make_sharding(shape, mesh, [("up", P(None, "tp")), ("down", P("tp"))])
    state = sf.init_state(params, tx, jax.random.key(0), sharding=plan)
    batch = sf.shard_batch(np.ones((16, 16), np.float32), mesh)

    def loss(params, batch, key):
        return sf.mean((jnp.tanh(batch @ params["up"] + params["bias"]) @ params["down"]) ** 2)

    step, counts = sf.make_train_step(loss, tx), []
    if way == "compile_step":
        step = sf.compile_step(step, state, batch)
    else:
        step = jax.jit(step, donate_argnums=0, out_shardings=(plan, None))
    for _ in range(STEPS):
        state, _ = jax.block_until_ready(step(state, batch))
        counts.append(len(compiles))
    assert astray(state, plan) == []
    assert counts[0] == counts[-1]


@pytest.mark.full
def test_a_state_is_born_in_shares_and_each_device_has_its_own():
    mesh = mesh_of((1, 4, 2, 1))
    plan = planned(transformer.init, mesh, RULES)
    state = sf.init_state(transformer.init, optimizer(), jax.random.key(0), sharding=plan)
    assert astray(state, plan) == []
    moments = state.opt_state[1][0]
    for tree in (state.params, moments.mu, moments.nu):
        tree = {**tree, **tree["layers"]}
        for leaf in ("embed", "head", "qkv", "out", "up", "down"):
            own = tree[leaf].addressable_shards[0].data.size
            assert own * 8 == tree[leaf].size


@pytest.mark.full
@pytest.mark.parametrize("name", ["fsdp 8", "dp 2 x fsdp 2 x tp 2"])
def test_gradients_that_are_reduced_once_train_alike(name, compiles):
    mesh = mesh_of(LAYOUTS[name])
    plan = planned(transformer.init, mesh, RULES)
    options = {"accumulate": 2, "grad": sf.sharding.reduce_once(plan)}
    got = trained(transformer.init, transformer.loss, plan, mesh, compiles, **options)
    check(got, on_one_device(transformer.init, transformer.loss))


@pytest.mark.full
def test_the_automatic_rule_alone_trains_alike(compiles):
    mesh = sf.make_mesh()
    plan = planned(transformer.init, mesh, sf.sharding.fsdp(min_size=1024))
    assert plan.params["embed"].spec == P("fsdp")
    options = {"held": True, "accumulate": 2}
    got = trained(transformer.init, transformer.loss, plan, mesh, compiles, **options)
    check(got, on_one_device(transformer.init, transformer.loss))


@pytest.mark.full
@pytest.mark.parametrize("dims", [(1, 8), (4, 2)])
def test_experts_lie_on_devices_of_their_own(dims, compiles):
    mesh = mesh_of(dims, ("dp", "ep"))
    plan = planned(transformer.init_experts, mesh, ("experts/", P("ep")))
    assert plan.params["experts"]["up"].shard_shape((8, 32, 64)) == (8 // dims[1], 32, 64)
    loss = transformer.expert_loss
    got = trained(transformer.init_experts, loss, plan, mesh, compiles, held=True)
    check(got, on_one_device(transformer.init_experts, loss))
