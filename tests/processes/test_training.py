"""Two processes with two devices each train like one process with four."""

import functools
import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.small import full_but

import stepfold as sf

from . import launch


def trains(start, dims, once):
    """Train three steps on four devices; print what was computed, and where it lies."""
    job = start()
    mesh = sf.make_mesh(dims, devices=jax.devices()[:4])
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
        return jax.tree.map(lambda x: np.split(x, job.processes)[job.process], whole)

    shape = jax.eval_shape(lambda key: sf.init_state(init, tx, key), jax.random.key(0))
    plan = sf.make_sharding(shape, mesh, sf.sharding.fsdp(min_size=1))
    state = sf.init_state(init, tx, jax.random.key(0), sharding=plan)
    grad = sf.sharding.reduce_once(plan) if once else sf.make_grad
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
        (name, jax.devices().index(device), str(index))
        for name, leaf in state.params.items()
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items()
    )
    seen["whole"] = [leaf.addressable_data(0).shape == leaf.shape for leaf in state.params.values()]
    print(json.dumps(seen))


@pytest.fixture(scope="module")
def train_alone():
    """Train in this process, once for each mesh."""
    return functools.cache(lambda dims: json.loads(launch.run_alone(trains, dims, False)))


@pytest.mark.parametrize(
    ("launcher", "dims", "once"),
    [
        pytest.param("session", (1, -1, 1, 1), False, marks=pytest.mark.full),
        ("session", (2, 2, 1, 1), True),
        pytest.param("mpirun", (2, 2, 1, 1), False, marks=pytest.mark.full),
    ],
)
def test_two_processes_train_as_one(processes, train_alone, launcher, dims, once):
    alone = train_alone(dims)
    if launcher == "session":
        both = processes.run(trains, dims, once)
    elif launch.find_mpirun() is None:
        pytest.skip(launch.NO_MPIRUN)
    else:
        both = launch.run_processes(trains, 2, launcher, args=(dims, once))
    for seen in map(json.loads, both):
        assert seen["data"] == alone["data"]
        assert seen["place"] == alone["place"]
        assert seen["close"] == alone["close"]
        assert seen["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert not any(seen["whole"])
        for name, values in alone["params"].items():
            for got, wanted in zip(seen["params"][name], values, strict=True):
                assert got == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def gives_rows(start, rows, late=0, timeout=None):
    """Shard a batch of each number of rows, those of this process; those of process 1 are late."""
    start(timeout=timeout) if timeout else start()
    mesh = sf.make_mesh()
    try:
        for count in rows[jax.process_index()]:
            time.sleep(late if jax.process_index() else 0)
            batch = sf.shard_batch(np.ones((count, 2)), mesh)
            assert float(jax.numpy.sum(batch)) == 4 * count
        print("equal")
    except (sf.errors.DataError, sf.errors.PeerTimeoutError) as error:
        print(type(error).__name__, error)


@pytest.mark.full
def test_other_rows_are_refused_in_every_process():
    outputs = launch.run_processes(gives_rows, args=(([4], [6]),))
    words = "expected the same number of rows in every process, got [4, 6]; drop or pad the last"
    assert outputs == [f"DataError shard_batch: {words} batch\n"] * 2


# A process that is ahead with other rows is given 3 s; gloo would give up after 30.
@pytest.mark.parametrize(("late", "rows"), full_but([], [(4, 2), (65, 4)]))
def test_a_late_process_is_waited_for(processes, late, rows):
    outputs = processes.run(gives_rows, ([rows], [rows]), late, timeout=120 + late)
    assert outputs == ["equal\n"] * 2


@pytest.mark.full
def test_no_answer_is_another_error_than_other_rows():
    one, other = launch.ends_of_processes(gives_rows, args=(([4], [4, 6]), 0, 5))
    assert one.output == "equal\n"
    assert other.output == (
        "PeerTimeoutError shard_batch: process 0 gave no batch of 6 rows, as this process did, in "
        "5 s, only of 4 rows before; if a process was slow, wait longer with "
        "start_distributed(timeout=…), else drop or pad the last batch\n"
    )


def trains_ordered(start, alone, dims):
    """Train three steps; print the bits of losses, gradient norms and parameters."""
    # As users compile it, since optimizations are what may change bits.
    jax.config.update("jax_disable_most_optimizations", False)
    if not alone:
        start()
    mesh = sf.make_mesh(dims, devices=jax.devices()[: math.prod(dims)])
    tx = optax.chain(sf.optim.clip_by_ordered_norm(0.1, mesh), optax.adamw(1e-2))
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
    plan = sf.make_sharding(shape, mesh, sf.sharding.fsdp(min_size=1))
    state = sf.init_state(params, tx, jax.random.key(0), sharding=plan)
    step = sf.make_train_step(loss_fn, tx, grad=sf.sharding.ordered(plan, blocks=8))
    step = sf.compile_step(step, state, rows(0))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    replicate = jax.jit(lambda tree: tree, out_shardings=everywhere)
    bits = []
    for i in range(3):
        state, metrics = step(state, rows(i))
        leaves = jax.tree.leaves((metrics, replicate(state.params)))
        bits += [np.asarray(leaf).tobytes().hex() for leaf in leaves]
    print(json.dumps(bits))


@pytest.mark.full
@pytest.mark.parametrize("dims", [(2, 2, 1, 1), (4, 1, 1, 1)])
def test_two_processes_compute_the_bits_of_one_device(dims):
    (alone,) = launch.run_processes(trains_ordered, 1, args=(True, (1, 1, 1, 1)))
    both = launch.run_processes(trains_ordered, 2, args=(False, dims))
    assert [json.loads(output) for output in both] == [json.loads(alone)] * 2


def prefetches(start, wrong):
    start()
    mesh = sf.make_mesh()
    if wrong:
        spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
        try:
            sf.prefetch([], sharding=spread)
        except sf.errors.ConfigError as error:
            print(error)
        return
    batches = sf.batches({"x": np.arange(40.0)}, 8, seed=0, epochs=2)
    total = jax.jit(lambda batch: (batch["x"] * np.arange(8)).sum())
    with sf.prefetch(batches, sharding=lambda batch: sf.shard_batch(batch, mesh)) as stream:
        print([float(total(batch)) for batch in stream])


def test_prefetched_rows_of_processes_form_one_batch(processes):
    one, other = processes.run(prefetches, False)
    alone = launch.run_alone(prefetches, False)
    assert one == other == alone
    assert alone.count(",") == 9


def prefetches_new_rows(start):
    """Use each batch in a collective while the thread shards the next, of a new number of rows."""
    start()
    mesh = sf.make_mesh()

    def batches():
        for count in range(1, 13):
            time.sleep(0.01 * (count % 3) * jax.process_index())
            yield np.full((2 * count, 200), count, np.float32)

    total = jax.jit(lambda batch: batch.sum() / 200)
    with sf.prefetch(batches(), sharding=lambda rows: sf.shard_batch(rows, mesh), size=4) as stream:
        sums = [total(batch) for batch in stream]
    print([int(value) for value in sums] == [4 * count**2 for count in range(1, 13)])


@pytest.mark.full
def test_new_numbers_of_rows_in_the_thread_need_no_collective(processes):
    assert processes.run(prefetches_new_rows) == ["True\n"] * 2


def test_sharding_over_processes_is_refused_without_communication(processes):
    for output in processes.run(prefetches, True):
        assert output.startswith("sharding: expected one over the devices of this process, got one")
