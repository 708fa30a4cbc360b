"""An ordered step computes the same bits in two processes as on one device of one."""

import json

import pytest

from . import launch


def trains(start, alone, dims):
    """Train three steps; print the bits of losses, gradient norms and parameters."""
    import json
    import math

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import stepfold as sf

    # As users compile it, since optimizations are what may change bits.
    jax.config.update("jax_disable_most_optimizations", False)
    if not alone:
        start()
    mesh = sf.make_mesh(dims, devices=jax.devices()[: math.prod(dims)])
    tx = optax.chain(sf.clip_by_ordered_norm(0.1, mesh), optax.adamw(1e-2))
    rng = np.random.default_rng(0)
    params = {"in": rng.normal(size=(8, 64)), "out": rng.normal(size=(64, 4)), "odd": np.ones(3)}
    params = jax.tree.map(lambda x: x.astype(np.float32), params)

    def loss_fn(params, batch, key):
        hidden = jnp.tanh(batch["x"] @ params["in"])
        hidden = hidden * jax.random.bernoulli(key, 0.8, hidden.shape)
        error = (hidden @ params["out"] - params["odd"].sum()) ** 2
        return sf.mean(error, batch["mask"]), {"size": sf.mean(error)}

    def rows(i):
        rng = np.random.default_rng(i)
        batch = {"x": rng.normal(size=(32, 8)).astype(np.float32), "mask": rng.random(32) < 0.7}
        size = 32 // jax.process_count()
        own = slice(jax.process_index() * size, (jax.process_index() + 1) * size)
        return sf.shard_batch(jax.tree.map(lambda x: x[own], batch), mesh)

    shape = jax.eval_shape(lambda: sf.init_state(params, tx, jax.random.key(0)))
    plan = sf.make_sharding(shape, mesh, sf.fsdp(min_size=1))
    state = sf.init_state(params, tx, jax.random.key(0), sharding=plan)
    step = sf.make_train_step(loss_fn, tx, grad=sf.ordered(plan, blocks=8))
    step = sf.compile_step(step, state, rows(0))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    replicate = jax.jit(lambda tree: tree, out_shardings=everywhere)
    bits = []
    for i in range(3):
        state, metrics = step(state, rows(i))
        leaves = jax.tree.leaves((metrics, replicate(state.params)))
        bits += [np.asarray(leaf).tobytes().hex() for leaf in leaves]
    print(json.dumps(bits))


@pytest.mark.parametrize("dims", [(2, 2, 1, 1), pytest.param((4, 1, 1, 1), marks=pytest.mark.full)])
def test_two_processes_compute_the_bits_of_one_device(dims):
    (alone,) = launch.run_processes(trains, 1, args=(True, (1, 1, 1, 1)))
    both = launch.run_processes(trains, 2, args=(False, dims))
    assert [json.loads(output) for output in both] == [json.loads(alone)] * 2
