"""`fit` and the trainer on several processes equal those on one, and decide together."""

import json
import os
import signal
import time
import warnings
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.adapter import Trainer, TrainingArguments, hezar

from . import launch


def init_sharded(init, tx, mesh):
    """Initialize a state over the devices of a mesh."""
    shape = jax.eval_shape(lambda: sf.init_state(init, tx, jax.random.key(0)))
    plan = sf.make_sharding(shape, mesh, sf.sharding.fsdp(min_size=1))
    return sf.init_state(init, tx, jax.random.key(0), sharding=plan)


def fits(start, folder=None, cut=None, placed=False):
    """Fit on four devices; `cut` says what stops the last process at step 10 or 12."""
    start()
    last = jax.process_index() == jax.process_count() - 1
    mesh, tx = sf.make_mesh(devices=jax.devices()[:4]), optax.adam(1e-2)
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(96, 8)).astype(np.float32), "mask": rng.uniform(size=96) < 0.7}

    def init(key):
        return {"w": jax.random.normal(key, (8, 64))}

    def loss_fn(params, batch, key):
        return sf.mean((jnp.tanh(batch["x"] @ params["w"]) ** 2).mean(-1), batch["mask"])

    state = init_sharded(init, tx, mesh)
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


@pytest.mark.parametrize("placed", [True, pytest.param(False, marks=pytest.mark.full)])
def test_two_processes_fit_as_one(processes, placed, alone):
    for text in processes.run(fits, None, None, placed):
        same(json.loads(text), alone)


@pytest.mark.full
@pytest.mark.parametrize(("cut", "store"), [("SIGTERM", "{}"), ("hook", "file://{}/bucket")])
def test_stop_of_one_process_stops_both_at_the_same_step(processes, cut, store, alone, tmp_path):
    series = store.format(tmp_path)
    if cut == "SIGTERM":
        stopped = launch.run_processes(fits, 2, args=(series, cut, True))
    else:
        stopped = processes.run(fits, series, cut, True)
    first, second = map(json.loads, stopped)
    assert first["steps"] == second["steps"] < 20
    assert {first["code"], second["code"]} == {143 if cut == "SIGTERM" else 0}
    for text in processes.run(fits, series, None, True):
        assert json.loads(text)["resumed"] == first["steps"]
        same(json.loads(text), alone)


def is_killed(start, folder, killed):
    """Fit with ordered gradients on all devices; a process is killed at step 11."""
    start(heartbeat=3)
    mesh, tx = sf.make_mesh((1, jax.device_count(), 1, 1)), optax.adam(1e-2)
    rows = np.random.default_rng(0).normal(size=(96, 8)).astype(np.float32)
    shape = jax.eval_shape(lambda: sf.init_state(jnp.ones((8, 64)), tx, jax.random.key(0)))
    plan = sf.make_sharding(shape, mesh, sf.sharding.fsdp(min_size=1))

    def loss_fn(params, x, key):
        return sf.mean((jnp.tanh(x @ params) ** 2).mean(-1))

    def dies(event):
        if event.step == 11 and jax.process_index() == killed:
            os.kill(os.getpid(), signal.SIGKILL)

    result = sf.fit(
        sf.make_train_step(loss_fn, tx, grad=sf.sharding.ordered(plan, blocks=8)),
        sf.init_state(jnp.ones((8, 64)), tx, jax.random.key(0), sharding=plan),
        sf.batches(rows, 16, seed=0), steps=20, log_every=1, hooks=dies, run_dir=folder,
        checkpoints=sf.Checkpoints(every=5, async_=False),
    )  # fmt: skip
    print(json.dumps([result.resumed, *result.history["train/loss"]]))


@pytest.mark.full
@pytest.mark.parametrize(("killed", "restarted"), [(0, 2), (1, 1)])
def test_a_run_of_which_a_process_was_killed_ends_with_the_same_bits(killed, restarted, tmp_path):
    whole, lost = str(tmp_path / "whole"), str(tmp_path / "lost")
    (expected,) = launch.run_processes(is_killed, 1, args=(whole, None))
    ends = launch.ends_of_processes(is_killed, 2, args=(lost, killed))
    assert ends[killed].code == -signal.SIGKILL
    assert all(end.code for end in ends), launch.report(ends)
    for output in launch.run_processes(is_killed, restarted, args=(lost, None)):
        resumed, *losses = json.loads(output)
        assert (resumed, losses) == (10, json.loads(expected)[1:])
    rows = [Path(folder, "metrics.jsonl").read_bytes() for folder in (whole, lost)]
    assert rows[0] == rows[1]


def fails_in_one(start, run_dir, where):
    """Raise in the second process: in its batches, in a hook, or in a hook as it is opened."""
    me = start(heartbeat=10, shutdown=5).process
    mesh, tx = sf.make_mesh(), optax.sgd(0.1)
    step = sf.make_train_step(lambda p, b, key: sf.mean(p["w"].mean() * b["x"]), tx)
    state = init_sharded({"w": jnp.ones(8)}, tx, mesh)

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


@pytest.mark.full
@pytest.mark.parametrize(
    "where",
    ["hook"]
    + [
        pytest.param(where, marks=pytest.mark.full)
        for where in ("log point", "generator", "evaluation", "last evaluation", "open")
    ],
)
def test_an_error_that_leaves_a_process_able_to_step_ends_all_after_a_save(tmp_path, where):
    args = (str(tmp_path), where)
    began = time.monotonic()
    first, second = launch.ends_of_processes(fails_in_one, 2, args=args)
    assert time.monotonic() - began < 90
    assert second.code == 1, (first, second)
    assert "OSError: cut here" in second.errors
    saved = sf.checkpoint.latest_step(tmp_path / "checkpoints")
    if where == "open":
        assert saved is None
        assert "hooks: not opened: process 1 raised OSError: cut here" in first.errors
    else:
        assert first.code == 1, first
        words = f"process 1 raised an error, so all processes stopped at step {saved}; see its log"
        assert f"{words}: OSError: cut here" in first.errors, first
        if where == "last evaluation":
            assert saved == 100
        elif where == "generator":
            assert saved == 4
        else:
            assert 4 <= saved <= 40


def trainer_trains(start, folder):
    """Train, evaluate over an uneven rest, and save."""
    start()
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(96, 8)).astype(np.float32)}

    def loss_fn(params, batch, key):
        return sf.mean((jnp.tanh(batch["x"] @ params["w"]) ** 2).mean(-1), batch["mask"])

    arguments = TrainingArguments(
        output_dir=folder, max_steps=12, save_steps=6, total_batch_size=16, eval_batch_size=24,
        learning_rate=1e-2, log_steps=4, progress_bar_type="none", report_to=("jsonl",),
    )  # fmt: skip
    trainer = Trainer(
        arguments,
        model=lambda key: {"w": jax.random.normal(key, (8, 1024))},
        dataset_train=data,
        dataset_eval={"x": data["x"][:50]},
        loss_fn=loss_fn,
    )
    output = trainer.train()
    found = {
        "stopped": output.stopped,
        "saved": output.last_save_file_name,
        "spread": len(output.state.params["w"].sharding.device_set),
        "history": {name: [curve.steps, list(curve)] for name, curve in trainer.history.items()},
        "evaluated": trainer.evaluate()["eval_loss"],
    }
    print(json.dumps(found))


@pytest.mark.full
def test_a_trainer_of_two_processes_trains_as_one(processes, tmp_path):
    alone = json.loads(launch.run_alone(trainer_trains, str(tmp_path / "one")))
    for text in processes.run(trainer_trains, str(tmp_path / "two")):
        seen = json.loads(text)
        assert seen["stopped"] == "all 12 steps were done"
        assert (seen["saved"], seen["spread"]) == ("12", 4)
        assert seen["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-4)
        for name, (steps, values) in alone["history"].items():
            assert seen["history"][name][0] == steps
            assert seen["history"][name][1] == pytest.approx(values, rel=1e-4)
    written = (tmp_path / "two" / "logs" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in written] == [4, 6, 8, 12]  # 6 ends an epoch


def trainer_of_hezar_trains(start, folder):
    """Train, compute metrics over an uneven rest, and save."""
    start()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(96, 8)).astype(np.float32)
    data = {"x": x, "labels": (x[:, 0] > 0).astype(np.int32)}
    rest = {name: column[:51] for name, column in data.items()}
    model = hezar.Model(
        lambda params, x: x @ params["w"],
        {"w": jnp.zeros((8, 2))},
        optax.softmax_cross_entropy_with_integer_labels,
    )
    config = hezar.TrainerConfig(
        output_dir=folder, num_epochs=2, batch_size=16 // jax.device_count(), learning_rate=1e-2,
        metrics=["f1", "cer"], metric_for_best_model="f1", distributed=True,
    )  # fmt: skip
    trainer = hezar.Trainer(config, model, data, rest)
    average = trainer.train()
    spread = len(trainer.state.params["w"].sharding.device_set)
    print(json.dumps([average, spread, trainer.result.best, trainer.evaluate()]))


@pytest.mark.full
def test_the_trainer_of_hezar_measures_in_two_processes_as_in_one(processes, tmp_path):
    average, _, best, measured = json.loads(
        launch.run_alone(trainer_of_hezar_trains, str(tmp_path / "one"))
    )
    assert measured["f1"] > 0.8
    for text in processes.run(trainer_of_hezar_trains, str(tmp_path / "two")):
        seen = json.loads(text)
        assert seen[:3] == [pytest.approx(average, rel=1e-4), 4, best]
        assert seen[3] == pytest.approx(measured, rel=1e-4)


def fails_in_step_6(start, folder):
    """Fit on two processes, until a zero comes in step 6."""
    start()
    mesh, tx = sf.make_mesh(), optax.sgd(0.1)
    data = {"x": np.linspace(1, 2, 80, dtype=np.float32)}
    data["x"][43] = 0
    state = init_sharded({"w": jnp.ones(())}, tx, mesh)
    step = sf.make_train_step(lambda p, b, key: sf.mean(p["w"] * jnp.log(b["x"])), tx)
    result = sf.fit(
        step, state, sf.batches(data, 8), steps=10, log_every=4, run_dir=folder,
        checkpoints=sf.Checkpoints(every=3),
    )  # fmt: skip
    print(json.dumps([result.capsule.step, result.capsule.lost, str(result.capsule.path)]))


@pytest.mark.full
def test_one_process_replays_the_capsule_of_process_0(processes, tmp_path):
    first, second = map(json.loads, processes.run(fails_in_step_6, str(tmp_path)))
    lost = ["the batch: with several processes each has its own rows, and none has all of them"]
    assert first == [6, lost, str(tmp_path / "capsules" / "6")]
    assert second == [6, lost, "None"]
    tx = optax.sgd(0.1)
    state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    data = {"x": np.linspace(1, 2, 80, dtype=np.float32)}
    data["x"][43] = 0
    step = sf.make_train_step(lambda p, b, key: sf.mean(p["w"] * jnp.log(b["x"])), tx)
    batches = sf.batches(data, 8, process_count=1, process_index=0)
    found = sf.debug.replay(first[2], step, state=state, batches=batches)
    assert (found.step, found.examples) == (6, ((3,),))
    assert found.where.startswith("log made inf at ")


def goes_back(start, folder, asks):
    """Fit twice: a run that goes back, and one that skipped the batches from the start."""
    start()
    me, tx, mesh = jax.process_index(), optax.adam(0.02), sf.make_mesh()
    x = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)
    bad = np.zeros(256, np.float32)
    bad[sf.batches(np.arange(256), 8, seed=0, process_count=1, process_index=0).at(13)] = 1e4
    batches = lambda: sf.batches({"x": x, "bad": bad}, 8, seed=0)

    def loss_fn(params, batch, key):
        return sf.mean((batch["x"] @ params["w"] - batch["x"].sum(-1) - batch["bad"]) ** 2)

    step, asked = sf.make_train_step(loss_fn, tx), []

    def ask(event):
        if me == 1 and event.step == 16 and not asked:
            asked.append(True)
            return sf.hooks.GoBack(skip=(14, 15), why="process 1 wants it")
        return None

    ends = []
    for name, data, hooks in [
        (
            "a",
            batches(),
            ask if asks else sf.hooks.on_spike(window=8, deviations=100.0, action="go_back"),
        ),
        ("b", batches().without([(13, 14)]), ()),
    ]:
        state = init_sharded({"w": jnp.zeros(8)}, tx, mesh)
        result = sf.fit(
            step, state, data, steps=30, log_every=4, run_dir=f"{folder}/{name}",
            checkpoints=sf.Checkpoints(every=5, keep=9), hooks=hooks,
        )  # fmt: skip
        shards = [np.asarray(s.data).tobytes() for s in result.state.params["w"].addressable_shards]
        history = dict(result.history)
        ends.append([result.steps, [zlib.crc32(shard) for shard in shards], history])
    print(json.dumps(ends))


@pytest.mark.full
@pytest.mark.parametrize("asks", [False, True])
def test_two_processes_go_back_together(processes, tmp_path, asks):
    for text in processes.run(goes_back, str(tmp_path), asks):
        went_back, skipped = json.loads(text)
        assert went_back == skipped
    (entry,) = json.loads((tmp_path / "a" / "run.json").read_text())["rollbacks"]
    assert (entry["to"], entry["skipped"]) == (10, [13, 14])


def is_corrupt(start, folder):
    """Fit until process 1 finds corruption in the event in which process 0 wants to go back."""
    start()
    me, tx = jax.process_index(), optax.sgd(0.01)
    whole = jax.sharding.NamedSharding(sf.make_mesh(), jax.sharding.PartitionSpec())
    state = sf.init_state({"w": jnp.zeros(8)}, tx, jax.random.key(0), sharding=whole)
    step = sf.make_train_step(lambda p, b, key: sf.mean((b["x"] @ p["w"] - 1) ** 2), tx)
    reason = sf.Stop("corrupt", "bits differ") if me else sf.hooks.GoBack(skip=1, why="a spike")
    result = sf.fit(
        step, state, sf.batches({"x": np.ones((256, 8), np.float32)}, 8, seed=0), steps=30,
        log_every=4, run_dir=folder, checkpoints=sf.Checkpoints(every=5, keep=9),
        hooks=lambda event: reason if event.step == 16 else None,
    )  # fmt: skip
    stop = result.stop_reason
    print(json.dumps([stop.kind, stop.message.split(";")[0], result.steps < 30]))


@pytest.mark.full
def test_corruption_in_one_process_outranks_going_back_in_another(processes, tmp_path):
    for text in processes.run(is_corrupt, str(tmp_path)):
        kind, message, is_early = json.loads(text)
        assert (kind, is_early) == ("corrupt", True)
        assert message in ("bits differ", "process 1 stopped: bits differ")
    assert "rollbacks" not in json.loads((tmp_path / "run.json").read_text())


def replaces(start, folder):
    """Fit with a hook that scales the weights: in one go, resumed, and where only one asks."""
    start()
    me, tx, mesh = jax.process_index(), optax.adam(0.02), sf.make_mesh()
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    step = sf.make_train_step(lambda p, b, key: sf.mean((b @ p["w"] - 1) ** 2), tx)

    class Scale:
        def __init__(self, replaces_state=True, only=None):
            self.replaces_state, self.only = replaces_state, only

        def __call__(self, event):
            if event.kind != "eval" or self.only not in (None, me):
                return None
            params = jax.tree.map(lambda leaf: 0.5 * leaf, event.state.params)
            return sf.hooks.Replace(event.state._replace(params=params), "halved")

    def fit(name, steps, hook):
        state = init_sharded({"w": jnp.ones(8)}, tx, mesh)
        return sf.fit(
            step, state, sf.batches(x, 8, seed=0), steps=steps, run_dir=f"{folder}/{name}",
            checkpoints=sf.Checkpoints(every=4), hooks=hook,
            evaluation=sf.Evaluation(lambda state: {}, every=3),
        )  # fmt: skip

    shards = lambda result: [
        np.asarray(shard.data).tolist() for shard in result.state.params["w"].addressable_shards
    ]
    found = [shards(fit("whole", 12, Scale()))]
    fit("cut", 9, Scale())
    found.append(shards(fit("cut", 12, Scale())))
    for hook in (Scale(only=1), Scale(replaces_state=False)):
        try:
            fit(f"wrong-{hook.replaces_state}", 12, hook)
        except sf.StepfoldError as error:
            found.append(str(error))
    print(json.dumps(found))


@pytest.mark.full
def test_two_processes_replace_the_state_together(processes, tmp_path):
    for text in processes.run(replaces, str(tmp_path)):
        whole, resumed, one, undeclared = json.loads(text)
        assert whole == resumed
        assert np.abs(whole).max() < 0.6
        assert "expected the same replacements in every process, got" in one
        assert "expected Hook(returns=[Replace, Reweight]), for a hook that returns" in undeclared
    notes = json.loads((tmp_path / "whole" / "run.json").read_text())["replacements"]
    assert notes == [[step, "halved"] for step in (3, 6, 9, 12)]


def mixes(start, folder):
    """Fit with a hook that changes the weights of a mixture: in one go, resumed, and by one."""
    start()
    me, tx, mesh = jax.process_index(), optax.sgd(0.1), sf.make_mesh()
    step = sf.make_train_step(lambda p, b, key: sf.mean(p["w"].sum() * b), tx)
    parts = {"a": (np.arange(64, dtype=np.float32), 1), "b": (-np.arange(64, dtype=np.float32), 1)}
    changes = {4: {"a": 1, "b": 3}, 8: {"a": 1, "b": 0}}

    class Change:
        replaces_state = True

        def __init__(self, only=None):
            self.only = only

        def __call__(self, event):
            if event.is_train and event.step in changes and self.only in (None, me):
                return sf.hooks.Reweight(changes[event.step], "time for it")

    def fit(name, steps, hook, prefetch):
        batches = sf.batches(sf.mix(parts), 8)
        batches = sf.prefetch(batches) if prefetch else batches
        state = init_sharded({"w": jnp.ones(8)}, tx, mesh)
        result = sf.fit(
            step, state, batches, steps=steps, run_dir=f"{folder}/{name}", log_every=4,
            checkpoints=sf.Checkpoints(every=5), hooks=hook,
        )  # fmt: skip
        return weights(result), batches.get_state()

    def plain(first, second):
        """Run with the changes as stages, from these batches on."""
        stages = [(8 * first, changes[4]), (8 * second, changes[8])]
        state = init_sharded({"w": jnp.ones(8)}, tx, mesh)
        return weights(sf.fit(step, state, sf.batches(sf.mix(parts, stages=stages), 8), steps=12))

    weights = lambda result: np.asarray(result.state.params["w"].addressable_data(0)).tolist()
    found = [fit("whole", 12, Change(), False)]
    fit("cut", 7, Change(), True)
    found.append(fit("cut", 12, Change(), True))
    # Metrics are read at the save of step 5, and 2 steps after step 8.
    found.append([plain(5, 10), plain(4, 8)])
    try:
        fit("wrong", 12, Change(only=1), False)
    except sf.StepfoldError as error:
        found.append(str(error))
    print(json.dumps(found))


@pytest.mark.full
def test_two_processes_change_the_weights_of_a_mixture_together(processes, tmp_path):
    for text in processes.run(mixes, str(tmp_path)):
        (whole, position), (resumed, later), (expected, earlier), one = json.loads(text)
        assert whole == resumed == expected != earlier
        assert position == later
        assert position["weights"] == [[40, ["1", "3"]], [80, ["1", "0"]]]
        assert "expected the same replacements in every process, got" in one


def fits_with_evaluation(start, folder, is_remote):
    """Fit on two processes, and evaluate from a hook in both of them."""
    start()
    mesh, tx = sf.make_mesh(), optax.adam(1e-2)
    data = {"x": np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)}
    init = {"w": np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)}

    def loss_fn(params, batch, key):
        return sf.mean((jnp.tanh(batch["x"] @ params["w"]) ** 2).mean(-1))

    state = init_sharded(init, tx, mesh)
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )
    test = lambda: sf.batches(data, 16, epochs=1)
    options = {"measure": sf.make_eval_step(loss_fn), "batches": test}
    found = []

    def evaluates(event):
        if event.is_train and event.step in (6, 10):
            item = sf.Evaluation(**options)
            found.append(sf.evaluate_run(folder, like, item, steps="all", follow=False))

    def run(hooks=()):
        return sf.fit(
            sf.make_train_step(loss_fn, tx), init_sharded(init, tx, mesh),
            sf.batches(data, 16, seed=0), steps=12, log_every=2, hooks=hooks,
            evaluation=sf.Evaluation(**options, every=4, remote=is_remote),
            checkpoints=sf.Checkpoints(folder, every=6, best="eval/loss", keep=2, async_=False),
        )  # fmt: skip

    result = run(evaluates if is_remote else ())
    if is_remote:
        item = sf.Evaluation(**options)
        found.append(sf.evaluate_run(folder, like, item, steps="all", follow=False))
        result = run()
    steps = [list(each.metrics) for each in found]
    history = {name: [curve.steps, list(curve)] for name, curve in result.history.items()}
    print(json.dumps([history, result.best, steps]))


@pytest.mark.full
def test_two_processes_read_what_two_processes_evaluate(processes, tmp_path):
    whole = processes.run(fits_with_evaluation, str(tmp_path / "whole"), False)
    both = processes.run(fits_with_evaluation, str(tmp_path / "run"), True)
    for one, text in zip(whole, both, strict=True):
        (*expected, _), (*seen, steps) = json.loads(one), json.loads(text)
        assert seen == expected
        assert steps == [[4], [8], [12]]


def restarts(start, folder, steps):
    """Train with the cache of the run, and print what was loaded and what was compiled."""
    from jax.experimental.compilation_cache.compilation_cache import reset_cache

    from stepfold.runs import programs

    start()
    name = "jax_compilation_cache_dir"
    before, caught = getattr(jax.config, name), []
    is_virtual, programs.has_virtual_devices = programs.has_virtual_devices, lambda: False
    jax.config.update(name, None)
    reset_cache()
    try:
        mesh, tx = sf.make_mesh(), optax.sgd(0.1)
        step = sf.make_train_step(lambda p, b, key: sf.mean(b @ p["w"]), tx)
        with warnings.catch_warnings(record=True) as caught:
            sf.fit(
                step, lambda: init_sharded(lambda key: {"w": jnp.ones(8)}, tx, mesh),
                sf.batches(np.ones((32, 8), np.float32), 16, seed=0), steps=steps, run_dir=folder,
                checkpoints=sf.Checkpoints(every=2),
            )  # fmt: skip
        used = getattr(jax.config, name)
    finally:
        jax.config.update(name, before)
        reset_cache()
        programs.has_virtual_devices = is_virtual
    compiled = json.loads(Path(folder, "run.json").read_text())["attempts"][-1]["compiled"]
    print(json.dumps([compiled["loaded"]["count"], used, [str(each.message) for each in caught]]))


@pytest.mark.full
def test_processes_share_the_compilation_cache_of_a_run(processes, tmp_path):
    for steps in (2, 4):
        seen = [json.loads(text) for text in processes.run(restarts, str(tmp_path), steps)]
        assert [used for _, used, _ in seen] == [None, None]
        assert not any("compilation cache" in text for *_, caught in seen for text in caught)
    assert seen[0][0] > 0
    assert list((tmp_path / "compiled").glob("*step_once*-cache"))
