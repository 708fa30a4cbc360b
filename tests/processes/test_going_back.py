"""Several processes go back together, also if the hook of one of them asks for it."""

import json

import pytest


def fits(start, folder, asks):
    """Fit twice: a run that goes back, and one that skipped the batches from the start."""
    import json
    import zlib

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import stepfold as sf

    start()
    me, tx, mesh = jax.process_index(), optax.adam(0.02), sf.make_mesh()
    x = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)
    bad = np.zeros(256, np.float32)
    bad[sf.batches(np.arange(256), 8, seed=0, process_count=1, process_index=0).at(13)] = 1e4
    batches = lambda: sf.batches({"x": x, "bad": bad}, 8, seed=0)

    def loss_fn(params, batch, key):
        return sf.mean((batch["x"] @ params["w"] - batch["x"].sum(-1) - batch["bad"]) ** 2)

    init = lambda key: sf.init_state({"w": jnp.zeros(8)}, tx, key)
    plan = sf.make_sharding(jax.eval_shape(init, jax.random.key(0)), mesh, sf.fsdp(min_size=1))
    step, asked = sf.make_train_step(loss_fn, tx), []

    def ask(event):
        if me == 1 and event.step == 16 and not asked:
            asked.append(True)
            return sf.GoBack(skip=(14, 15), why="process 1 wants it")
        return None

    ends = []
    for name, data, hooks in [
        ("a", batches(), ask if asks else sf.roll_back_on_spike(window=8, deviations=100.0)),
        ("b", batches().without([(13, 14)]), ()),
    ]:
        state = sf.init_state({"w": jnp.zeros(8)}, tx, jax.random.key(0), sharding=plan)
        result = sf.fit(
            step, state, data, steps=30, log_every=4, run_dir=f"{folder}/{name}",
            checkpoints=sf.Checkpoints(every=5, keep=9), hooks=hooks,
        )  # fmt: skip
        shards = [np.asarray(s.data).tobytes() for s in result.state.params["w"].addressable_shards]
        history = dict(result.history)
        ends.append([result.steps, [zlib.crc32(shard) for shard in shards], history])
    print(json.dumps(ends))


@pytest.mark.parametrize("asks", [False, pytest.param(True, marks=pytest.mark.full)])
def test_two_processes_go_back_together(processes, tmp_path, asks):
    for text in processes.run(fits, str(tmp_path), asks):
        went_back, skipped = json.loads(text)
        assert went_back == skipped
    (entry,) = json.loads((tmp_path / "a" / "run.json").read_text())["rollbacks"]
    assert (entry["to"], entry["skipped"]) == (10, [13, 14])


def is_corrupt(start, folder):
    """Fit until process 1 finds corruption in the event in which process 0 wants to go back."""
    import json

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import stepfold as sf

    start()
    me, tx = jax.process_index(), optax.sgd(0.01)
    whole = jax.sharding.NamedSharding(sf.make_mesh(), jax.sharding.PartitionSpec())
    state = sf.init_state({"w": jnp.zeros(8)}, tx, jax.random.key(0), sharding=whole)
    step = sf.make_train_step(lambda p, b, key: sf.mean((b["x"] @ p["w"] - 1) ** 2), tx)
    reason = sf.Stop("corrupt", "bits differ") if me else sf.GoBack(skip=1, why="a spike")
    result = sf.fit(
        step, state, sf.batches({"x": np.ones((256, 8), np.float32)}, 8, seed=0), steps=30,
        log_every=4, run_dir=folder, checkpoints=sf.Checkpoints(every=5, keep=9),
        hooks=lambda event: reason if event.step == 16 else None,
    )  # fmt: skip
    stop = result.stop_reason
    print(json.dumps([stop.kind, stop.message.split(";")[0], result.steps < 30]))


def test_corruption_in_one_process_outranks_going_back_in_another(processes, tmp_path):
    for text in processes.run(is_corrupt, str(tmp_path)):
        kind, message, is_early = json.loads(text)
        assert (kind, is_early) == ("corrupt", True)
        assert message in ("bits differ", "process 1 stopped: bits differ")
    assert "rollbacks" not in json.loads((tmp_path / "run.json").read_text())
