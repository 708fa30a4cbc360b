"""What `ordered` costs and refuses. Its bits are a law."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import stepfold as sf

TX = optax.adam(0.1)


def loss_fn(params, batch, key):
    return sf.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2)


def start(dims, names=("dp", "fsdp", "tp", "sp"), rules=None):
    devices = jax.devices()[: math.prod(dims)]
    mesh = sf.make_mesh(dims, names, devices=devices)
    params = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64)), "odd": jnp.ones(7)}
    state = sf.init_state(params, TX, jax.random.key(0))
    rules = sf.sharding.fsdp(min_size=16) if rules is None else rules
    plan = sf.make_sharding(state, mesh, rules)
    axes = None if "dp" in names else names
    return (
        sf.sharding.place(state, plan),
        plan,
        sf.shard_batch(np.ones((64, 64), np.float32), mesh, axes=axes),
    )


def describe(dims, **options):
    state, plan, batch = start(dims)
    options = {name: make(plan) for name, make in options.items()}
    return sf.describe(sf.make_train_step(loss_fn, TX, **options), state, batch)


@pytest.mark.full
@pytest.mark.parametrize(
    "dims",
    [
        (2, 4, 1, 1),
        *(
            pytest.param(dims, marks=pytest.mark.full)
            for dims in ((1, 1, 1, 1), (8, 1, 1, 1), (1, 8, 1, 1))
        ),
    ],
)
def test_it_costs_what_accumulation_costs(dims):
    """The products are the same. What is sent is at most what an all-reduce per axis sends."""
    got = describe(dims, grad=lambda plan: sf.sharding.ordered(plan, blocks=8))
    want = describe(
        dims, accumulate=lambda plan: 8 // math.prod(dims), grad=sf.sharding.reduce_once
    )
    assert got.flops == want.flops
    assert got.moved <= 1.25 * want.moved + 4096
    gathered = 4 * (2 * 64 * 256 + 7)
    sums = 3.5 if jax.__version_info__ >= (0, 11) else 6  # with copies in place of barriers
    assert got.memory.temporaries <= want.memory.temporaries + sums * gathered


@pytest.mark.full
def test_more_blocks_need_less_memory():
    def layers(params, batch, key):
        for _ in range(4):
            batch = jnp.tanh(batch @ params["up"]) @ params["down"]
        return sf.mean(batch**2)

    state, plan, _ = start((1, 1, 1, 1))
    batch = jax.ShapeDtypeStruct((8192, 64), jnp.float32)
    temporaries = [
        sf.describe(
            sf.make_train_step(layers, TX, grad=sf.sharding.ordered(plan, blocks=blocks)),
            state,
            batch,
        ).memory.temporaries
        for blocks in (1, 8)
    ]
    assert temporaries[1] < temporaries[0] / 4


@pytest.mark.parametrize("blocks", [0, 3, 4, 2.0, "8"])
def test_blocks_are_a_power_of_two_that_the_devices_divide(blocks):
    _, plan, _ = start((8, 1, 1, 1))
    with pytest.raises(sf.errors.ConfigError, match="^blocks: expected "):
        sf.sharding.ordered(plan, blocks=blocks)
    with pytest.raises(sf.errors.ConfigError, match="^blocks: expected "):
        sf.optim.clip_by_ordered_norm(1.0, plan.step.mesh, blocks=blocks)
    with pytest.raises(sf.errors.ConfigError, match="^blocks: expected "):
        sf.optim.ordered_norm(jnp.ones(8), plan.step.mesh, blocks=blocks)


def test_the_number_of_devices_is_a_power_of_two():
    _, plan, _ = start((2, 1, 1, 1))
    mesh = sf.make_mesh((6, 1, 1, 1), devices=jax.devices()[:6])
    plan = jax.tree.map(lambda _: jax.sharding.NamedSharding(mesh, P()), plan)
    with pytest.raises(
        sf.errors.ShardingError, match=r"^ordered: expected 1, 2, 4, 8, … devices .* got 6"
    ):
        sf.sharding.ordered(plan)


def test_meshes_that_shard_computations_are_refused():
    _, plan, _ = start((2, 2, 2, 1), rules=[("up$", P("fsdp", "tp"))])
    with pytest.raises(sf.errors.ShardingError, match=r"^ordered: expected a mesh .*'tp': 2"):
        sf.sharding.ordered(plan)
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Explicit,))
    with pytest.raises(sf.errors.ShardingError, match="^ordered: expected a mesh of Auto axes"):
        sf.optim.clip_by_ordered_norm(1.0, mesh)


@pytest.mark.full
def test_axes_of_other_names_shard_the_batch():
    state, plan, batch = start((4,), ("rows",), rules=[("up$", P("rows"))])
    step = sf.make_train_step(loss_fn, TX, grad=sf.sharding.ordered(plan, axes="rows"))
    state, metrics = jax.jit(step)(state, batch)
    assert int(state.step) == 1
    assert float(metrics["loss"].compute()) > 0
    with pytest.raises(sf.errors.ShardingError, match="^axes: expected axes of the mesh"):
        sf.sharding.ordered(plan)


def test_a_batch_may_have_scalars_and_empty_leaves():
    state, plan, batch = start((4,), ("dp",))

    def loss(params, batch, key):
        assert batch["none"].shape == (1, 0)
        return sf.mean((batch["x"] @ params["up"]) ** 2 * batch["scale"])

    grad_fn = sf.sharding.ordered(plan)(loss)
    batch = {"x": batch[:8], "scale": jnp.float32(2), "none": jnp.zeros((8, 0))}
    _, terms, *_ = jax.eval_shape(grad_fn, state.params, batch, jax.random.key(0), ())
    assert terms["loss"].total.shape == ()


def test_other_arguments_are_refused():
    state, plan, batch = start((8, 1, 1, 1))
    with pytest.raises(
        sf.errors.ShardingError, match="^ordered: expected the plan of a TrainState"
    ):
        sf.sharding.ordered(plan.params)
    with pytest.raises(sf.errors.ShardingError, match="^mesh: expected a jax.sharding.Mesh"):
        sf.optim.ordered_norm(jnp.ones(8), plan)
    with pytest.raises(sf.errors.ConfigError, match="^max_norm: expected"):
        sf.optim.clip_by_ordered_norm(-1.0, plan.step.mesh)
    with pytest.raises(
        sf.errors.ConfigError, match="^accumulate: expected 1 with sf.sharding.ordered, got 2"
    ):
        sf.make_train_step(loss_fn, TX, accumulate=2, grad=sf.sharding.ordered(plan))
    step = sf.make_train_step(loss_fn, TX, grad=sf.sharding.ordered(plan, blocks=16))
    with pytest.raises(
        sf.errors.DataError, match=r"^batch: expected .* the 16 blocks .*float32\[24,64\]"
    ):
        jax.jit(step)(state, batch[:24])


@pytest.mark.full
def test_float16_with_a_loss_scale_skips_an_overflow():
    tx = sf.dynamic_loss_scale(optax.sgd(0.1))
    mesh = sf.make_mesh((2, 4, 1, 1))
    params = {"up": jnp.ones((64, 16)), "down": jnp.ones((16, 8))}
    state = sf.init_state(params, tx, jax.random.key(0))
    plan = sf.make_sharding(state, mesh)
    step = jax.jit(sf.make_train_step(loss_fn, tx, precision="f16", grad=sf.sharding.ordered(plan)))
    state = sf.sharding.place(state, plan)
    for value, skipped in ((1e-3, 0), (np.inf, 1)):
        batch = sf.shard_batch(np.full((16, 64), value, np.float32), mesh)
        state, metrics = step(state, batch)
        assert float(metrics["skipped"].compute()) == skipped
    assert int(state.step) == 2
