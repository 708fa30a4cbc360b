"""Two processes with two devices each train as one process with four does."""

import json

import pytest

from . import launch


def trains(start, alone, dims, once):
    import json

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import stepfold as sf

    if alone:
        jax.config.update("jax_num_cpu_devices", 4)
    else:
        start()
    process, processes = jax.process_index(), jax.process_count()
    mesh = sf.make_mesh(dims)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    def init(key):
        first, second = jax.random.split(key)
        return {"in": jax.random.normal(first, (8, 64)), "out": jax.random.normal(second, (64, 4))}

    def loss_fn(params, batch, key):
        error = (jnp.tanh(batch["x"] @ params["in"]) @ params["out"] - batch["y"]) ** 2
        kept = jax.random.bernoulli(key, 1.0, error.shape)
        terms = {
            "fit": sf.mean(error * kept, batch["mask"]),
            "size": 1e-3 * jnp.sum(params["in"] ** 2),
        }
        return terms, {"close": sf.mean(error.mean(-1) < 1, batch["mask"])}

    def rows(i):
        rng = np.random.default_rng(i)
        whole = {
            "x": rng.normal(size=(16, 8)).astype(np.float32),
            "y": rng.normal(size=(16, 4)).astype(np.float32),
            "mask": rng.uniform(size=16) < 0.7,
        }
        size = 16 // processes
        return jax.tree.map(lambda x: x[process * size : (process + 1) * size], whole)

    shape = jax.eval_shape(lambda key: sf.init_state(init, tx, key), jax.random.key(0))
    plan = sf.make_sharding(shape, mesh, sf.fsdp(min_size=1))
    state = sf.init_state(init, tx, jax.random.key(0), sharding=plan)
    grad = sf.reduce_once(plan) if once else sf.value_and_grad
    step = sf.make_train_step(loss_fn, tx, accumulate=2, grad=grad)
    step = sf.compile_step(step, state, sf.shard_batch(rows(0), mesh))
    evaluate = sf.compile_step(sf.make_eval_step(loss_fn), state, sf.shard_batch(rows(0), mesh))

    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    everywhere = jax.jit(lambda tree: tree, out_shardings=whole)
    seen = {"losses": [], "data": [], "close": []}
    for i in range(3):
        batch = sf.shard_batch(rows(i), mesh)
        state, metrics = step(state, batch)
        seen["losses"].append(float(metrics["loss"].compute()))
        seen["data"].append(np.asarray(everywhere(batch["x"])).tobytes().hex())
        seen["close"].append(int(evaluate(state, batch)["close"].total))
    seen["params"] = {k: np.asarray(v).tolist() for k, v in everywhere(state.params).items()}
    seen["place"] = sorted(
        (name, device.id % 4 if alone else 2 * device.process_index + device.id % 2, str(index))
        for name, leaf in state.params.items()
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items()
    )
    seen["whole"] = [leaf.addressable_data(0).shape == leaf.shape for leaf in state.params.values()]
    print(json.dumps(seen))


@pytest.mark.parametrize(
    ("launcher", "dims", "once"),
    [
        ("explicit", (1, -1, 1, 1), False),
        ("explicit", (2, 2, 1, 1), True),
        ("mpirun", (2, 2, 1, 1), False),
    ],
    indirect=["launcher"],
)
def test_two_processes_train_as_one(launcher, dims, once):
    (alone,) = map(json.loads, launch.run_processes(trains, 1, "explicit", args=(True, dims, once)))
    both = map(json.loads, launch.run_processes(trains, 2, launcher, args=(False, dims, once)))
    for seen in both:
        assert seen["data"] == alone["data"]
        assert seen["place"] == alone["place"]
        assert seen["close"] == alone["close"]
        assert seen["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert not any(seen["whole"])
        for name, values in alone["params"].items():
            for got, wanted in zip(seen["params"][name], values, strict=True):
                assert got == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def gives_uneven_rows(start, before, patience):
    import jax
    import numpy as np

    import stepfold as sf
    from stepfold.sharding import placement

    placement._PATIENCE = patience
    start(shutdown=5)
    mesh = sf.make_mesh()
    for _ in range(before):
        assert sf.shard_batch(np.ones((4, 2)), mesh).shape == (8, 2)
    try:
        sf.shard_batch(np.ones((4 + 2 * jax.process_index(), 3)), mesh)
        print("nothing new")
    except sf.DataError as error:
        print(error)


WORDS = "shard_batch: expected as many rows in every process, got {}; drop or pad the last batch\n"


def test_uneven_processes_are_refused_in_each():
    outputs = launch.run_processes(gives_uneven_rows, args=(0, 60.0))
    assert outputs == [WORDS.format("[4, 6]")] * 2


def test_a_process_that_alone_has_other_rows_does_not_wait_for_ever():
    one, other = launch.ends_of_processes(gives_uneven_rows, args=(2, 5.0))
    assert one.output == "nothing new\n"
    assert other.output == WORDS.format("6 here, and no answer from the others in 5.0 s")
