"""A failed run on several processes is replayed on one."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepfold as sf


def fits(start, folder):
    """Fit on two processes, until a zero comes in step 6."""
    import json

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import stepfold as sf

    start()
    mesh, tx = sf.make_mesh(), optax.sgd(0.1)
    data = {"x": np.linspace(1, 2, 80, dtype=np.float32)}
    data["x"][43] = 0
    init = lambda key: sf.init_state({"w": jnp.ones(())}, tx, key)
    plan = sf.make_sharding(jax.eval_shape(init, jax.random.key(0)), mesh)
    state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0), sharding=plan)
    step = sf.make_train_step(lambda p, b, key: sf.mean(p["w"] * jnp.log(b["x"])), tx)
    result = sf.fit(
        step, state, sf.batches(data, 8), steps=10, log_every=4, run_dir=folder,
        checkpoints=sf.Checkpoints(every=3),
    )  # fmt: skip
    print(json.dumps([result.capsule.step, result.capsule.lost, str(result.capsule.path)]))


def test_one_process_replays_the_capsule_of_process_0(processes, tmp_path):
    first, second = map(json.loads, processes.run(fits, str(tmp_path)))
    lost = ["the batch: with several processes each has its own rows, and none has all of them"]
    assert first == [6, lost, str(tmp_path / "capsules" / "6")]
    assert second == [6, lost, "None"]
    tx = optax.sgd(0.1)
    state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    data = {"x": np.linspace(1, 2, 80, dtype=np.float32)}
    data["x"][43] = 0
    step = sf.make_train_step(lambda p, b, key: sf.mean(p["w"] * jnp.log(b["x"])), tx)
    batches = sf.batches(data, 8, process_count=1, process_index=0)
    found = sf.replay(first[2], step, state=state, batches=batches)
    assert (found.step, found.examples) == (6, ((3,),))
    assert found.where.startswith("log made inf at ")
