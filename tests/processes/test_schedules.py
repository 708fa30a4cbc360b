"""Batches of several sizes and stages, some left out, are those of one process."""

import json

import pytest

from . import launch


def schedules(start, folder):
    """Fit on batches of two sizes of a mixture in two stages, some left out; cut at step 9."""
    import json

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import stepfold as sf

    alone = start().processes == 1
    mesh, tx, traced, seen = sf.make_mesh(), optax.sgd(0.1), [], []
    parts = [({"x": np.arange(9, dtype=np.float32)}, 1), ({"x": -np.ones(5, np.float32)}, 2)]
    mixture = sf.mix(parts, seed=0, stages=[(100, (3, 1))])

    def loss(params, batch, key):
        traced.append(batch["x"].shape[0])
        return sf.mean((params["w"].mean() - batch["x"]) ** 2)

    def fit(placed, steps):
        ramp = sf.batches(mixture, [(0, 8), (6, 16)]).without([(2, 4), (9, 12)])
        if placed:
            ramp = sf.prefetch(ramp, sharding=lambda batch: sf.shard_batch(batch, mesh))
        init = lambda key: {"w": jnp.ones(8)}
        make = lambda key: sf.init_state(init, tx, key)
        plan = sf.make_sharding(jax.eval_shape(make, jax.random.key(0)), mesh, sf.fsdp(min_size=1))
        state = sf.init_state(init, tx, jax.random.key(0), sharding=plan)
        checkpoints = folder and sf.Checkpoints(folder, every=9)
        hooks = [lambda event: seen.append(len(traced))]
        step = sf.make_train_step(loss, tx)
        options = {"steps": steps, "log_every": 1, "checkpoints": checkpoints, "hooks": hooks}
        return sf.fit(step, state, ramp, **options)

    if not alone:
        fit(True, 9)
    result = fit(not alone, 15)
    sizes = sorted(set(traced[: seen[0]]))
    curve = dict(zip(result.history["train/loss"].steps, result.history["train/loss"], strict=True))
    print(json.dumps([sizes, [curve[step] for step in range(10, 16)], result.resumed]))


def test_sizes_stages_and_batches_left_out_are_those_of_one_process(processes, tmp_path):
    alone = json.loads(launch.run_alone(schedules, None))
    assert (alone[0], alone[2]) == ([8, 16], None)
    for text in processes.run(schedules, str(tmp_path)):
        sizes, losses, resumed = json.loads(text)
        assert (sizes, resumed) == ([8, 16], 9)
        assert losses == pytest.approx(alone[1], rel=1e-5)
