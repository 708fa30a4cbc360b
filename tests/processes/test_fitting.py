"""`fit` on several processes equals `fit` on one, and all processes end together."""

import json
import signal
import time

import pytest

import stepfold as sf

from . import launch


def fits(start, folder=None, cut=None, placed=False):
    """Fit on four devices; `cut` says what stops the last process at step 10 or 12."""
    import json
    import os
    import signal
    import time

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import stepfold as sf

    start()
    last = jax.process_index() == jax.process_count() - 1
    mesh, tx = sf.make_mesh(devices=jax.devices()[:4]), optax.adam(1e-2)
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(96, 8)).astype(np.float32), "mask": rng.uniform(size=96) < 0.7}

    def init(key):
        return {"w": jax.random.normal(key, (8, 64))}

    def loss_fn(params, batch, key):
        return sf.mean((jnp.tanh(batch["x"] @ params["w"]) ** 2).mean(-1), batch["mask"])

    make = lambda key: sf.init_state(init, tx, key)
    plan = sf.make_sharding(jax.eval_shape(make, jax.random.key(0)), mesh, sf.fsdp(min_size=1))
    state = sf.init_state(init, tx, jax.random.key(0), sharding=plan)
    test = lambda: sf.batches(data, 32, epochs=1, remainder="pad")

    def batches():
        inner = sf.batches(data, 16, seed=0)

        class Slow(type(inner)):
            def __next__(self):
                time.sleep(0.02)
                if last and self.get_state()["step"] == 12 and not done:
                    done.append(True)
                    if cut == "SIGTERM":
                        os.kill(os.getpid(), signal.SIGTERM)
                batch = super().__next__()
                return sf.shard_batch(batch, mesh) if placed else batch

        inner.__class__ = Slow
        return inner

    done, hooks = [], []
    if cut == "hook":
        hooks = [lambda event: "enough" if last and event.step == 10 else None]
    try:
        result = sf.fit(
            sf.make_train_step(loss_fn, tx), state, batches(), steps=20, log_every=5,
            evaluation=sf.Evaluation(sf.make_eval_step(loss_fn), test, every=6), hooks=hooks,
            checkpoints=folder and sf.Checkpoints(folder, every=7, keep=None),
        )  # fmt: skip
        code = 0
    except SystemExit as error:
        result, code = error.result, error.code
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = jax.jit(lambda tree: tree, out_shardings=whole)(result.state.params)
    seen = {
        "steps": result.steps,
        "stopped": result.stop_reason.message,
        "code": code,
        "resumed": result.resumed,
        "history": {name: [curve.steps, list(curve)] for name, curve in result.history.items()},
        "params": np.asarray(params["w"]).ravel().tolist(),
    }
    print(json.dumps(seen))


@pytest.fixture(scope="module")
def alone():
    return json.loads(launch.run_alone(fits))


def same(seen, alone):
    assert (seen["steps"], seen["stopped"]) == (alone["steps"], alone["stopped"])
    assert seen["params"] == pytest.approx(alone["params"], rel=1e-4, abs=1e-6)
    assert seen["history"].keys() == alone["history"].keys()
    for name, (steps, values) in seen["history"].items():
        assert steps == alone["history"][name][0]
        assert values == pytest.approx(alone["history"][name][1], rel=1e-4)


@pytest.mark.parametrize("placed", [True, False])
def test_two_processes_fit_as_one(processes, placed, alone):
    for text in processes.run(fits, None, None, placed):
        same(json.loads(text), alone)


@pytest.mark.parametrize(("cut", "store"), [("SIGTERM", "{}"), ("hook", "file://{}/bucket")])
def test_stop_of_one_process_stops_both_at_the_same_step(processes, cut, store, alone, tmp_path):
    series = store.format(tmp_path)
    if cut == "SIGTERM":
        stopped = launch.run_processes(fits, 2, args=(series, cut, True), timeout=40)
    else:
        stopped = processes.run(fits, series, cut, True)
    first, second = map(json.loads, stopped)
    assert first["steps"] == second["steps"] < 20
    assert {first["code"], second["code"]} == {143 if cut == "SIGTERM" else 0}
    for text in processes.run(fits, series, None, True):
        assert json.loads(text)["resumed"] == first["steps"]
        same(json.loads(text), alone)


def fails_in_one(start, run_dir, where):
    """Raise in the second process: in its batches, in a hook, or in a hook as it is opened."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import stepfold as sf

    me = start(heartbeat=10, shutdown=5).process
    mesh, tx = sf.make_mesh(), optax.sgd(0.1)
    step = sf.make_train_step(lambda p, b, key: sf.mean(p["w"].mean() * b["x"]), tx)
    init = lambda key: {"w": jnp.ones(8)}
    make = lambda key: sf.init_state(init, tx, key)
    plan = sf.make_sharding(jax.eval_shape(make, jax.random.key(0)), mesh, sf.fsdp(min_size=1))
    state = sf.init_state(init, tx, jax.random.key(0), sharding=plan)

    def fail(at):
        if me == 1 and at:
            raise OSError("cut here")

    class Hook:
        def open(self, step, total):
            fail(where == "open")

        def __call__(self, event):
            if "evaluation" not in where:
                fail(where in ("hook", "log point") and event.step == 4)
            elif event.kind == "eval":
                fail(event.step == (4 if where == "evaluation" else 100))

    source = sf.batches({"x": np.ones(16, np.float32)}, 8, seed=0)

    def rows():
        for number in range(100):
            fail(where in ("batches", "generator") and number == 4)
            yield next(source)

    class Known(list):
        def __iter__(self):
            return rows()

    batches = rows() if where == "generator" else Known([None] * 100)
    checkpoints = sf.Checkpoints() if where != "batches" else None
    evaluation = sf.Evaluation(lambda state: {"norm": optax.tree.norm(state.params)}, every=4)
    sf.fit(
        step, state, batches, steps=100, log_every=2, hooks=Hook(), run_dir=run_dir,
        checkpoints=checkpoints, evaluation=() if where == "log point" else evaluation,
    )  # fmt: skip


def test_an_error_in_one_process_is_named_by_the_others_and_ends_all(tmp_path):
    args = (str(tmp_path), "batches")
    first, second = launch.ends_of_processes(fails_in_one, 2, timeout=40, args=args)
    assert second.code != 0
    assert "OSError: cut here" in second.errors
    assert first.code not in (0, -signal.SIGKILL)
    assert "stepfold: process 1 raised OSError: cut here; this process waits" in first.errors, first


@pytest.mark.parametrize(
    "where",
    ["hook", "log point", "generator"]
    + [pytest.param(x, marks=pytest.mark.full) for x in ("evaluation", "last evaluation", "open")],
)
def test_an_error_that_leaves_a_process_able_to_step_ends_all_after_a_save(tmp_path, where):
    args = (str(tmp_path), where)
    began = time.monotonic()
    first, second = launch.ends_of_processes(fails_in_one, 2, timeout=40, args=args)
    assert time.monotonic() - began < 20
    assert second.code == 1, (first, second)
    assert "OSError: cut here" in second.errors
    saved = sf.latest_step(tmp_path / "checkpoints")
    if where == "open":
        assert saved is None
        assert "hooks: not opened: process 1 raised OSError: cut here" in first.errors
    elif where == "last evaluation":  # the other process is done already
        assert saved == 100
    else:
        assert first.code == 1, first
        assert f"got one in process 1, which shows it; all stopped at step {saved}" in first.errors
        assert 4 <= saved <= 40
        if where == "generator":
            assert saved == 4
