"""Deaths in many situations: a run that loses processes ends as one that lost none."""

import json
import random
import shutil

import pytest
from tests import s3

from . import launch
from .test_elastic import compare

pytestmark = pytest.mark.full

HEARTBEAT = 8  # seconds
EARLY = "before the run had begun; start it again"


def runs(start, folder, kills, options):
    """Train 60 steps, and print what they led to; each kill is a pair (moment, process).

    A moment is `log 30`, `step 30`, `save 40` and so on, or a number of seconds after step 10. With
    the moment `SIGTERM`, the process gets that signal at its other moments. `options` say what the
    run uses.
    """
    import faulthandler
    import hashlib
    import json
    import os
    import signal
    import threading
    import warnings
    from pathlib import Path

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import stepfold as sf
    from stepfold.checkpoint import bucket, manifest
    from stepfold.core.processes import Group
    from stepfold.loop.elastic import Attempts
    from stepfold.loop.rollback import Rollbacks
    from stepfold.loop.run_directory import RunDirectory
    from stepfold.loop.train_loop import TrainLoop

    faulthandler.dump_traceback_later(options.get("patience", 60))
    os.environ.update(options.get("environ", {}))
    start(elastic=True, heartbeat=options.get("heartbeat", 8))
    me, uses, fit = jax.process_index(), options.get("uses", ()), options.get("fit", {})
    moments = [moment for moment, process in kills if process == me]

    def at(moment, seconds=0.0):
        if moment in moments:
            sign = signal.SIGTERM if "SIGTERM" in moments else signal.SIGKILL
            kill = lambda: os.kill(os.getpid(), sign)
            threading.Timer(seconds, kill).start() if seconds else kill()

    def before(owner, name, moment):
        """Kill this process before a method of a class is called, at a moment."""
        method = getattr(owner, name)

        def call(*args, **options):
            at(moment(*args, **options))
            return method(*args, **options)

        setattr(owner, name, call)

    is_stateful = "model state" in uses

    def init(key):
        first, second = jax.random.split(key)
        params = {"in": jax.random.normal(first, (8, 64)), "out": jax.random.normal(second, (64,))}
        return (params, {"mean": jnp.zeros(8)}) if is_stateful else params

    def forward(params, batch, key, mean):
        hidden = jnp.tanh((batch["x"] - mean) @ params["in"])
        hidden = hidden * jax.random.bernoulli(key, 0.8, hidden.shape)
        return sf.mean((hidden @ params["out"] - batch["y"]) ** 2)

    def plain_loss(params, batch, key):
        return forward(params, batch, key, 0.0)

    def stateful_loss(params, batch, key, model_state):
        mean = 0.9 * model_state["mean"] + 0.1 * batch["x"].mean(0)
        return forward(params, batch, key, mean), {}, {"mean": mean}

    loss_fn, tx = stateful_loss if is_stateful else plain_loss, optax.adamw(1e-2)
    tx = sf.ema_params(tx, 0.9) if "ema" in uses else tx

    def make_state(key, **options):
        return sf.init_state(init, tx, key, stateful=is_stateful, **options)

    shape = jax.eval_shape(make_state, jax.random.key(0))

    def build(devices):
        """Use a power of two of the devices, as many of each process as possible."""
        by_process = {}
        trained = sorted({device.process_index for device in devices})[: options.get("train", 100)]
        for device in [d for d in devices if d.process_index in trained]:
            by_process.setdefault(device.process_index, []).append(device)
        ranked = [(rank, d) for own in by_process.values() for rank, d in enumerate(own)]
        count = 1 << len(ranked).bit_length() - 1
        chosen = {d for _, d in sorted(ranked, key=lambda pair: (pair[0], pair[1].id))[:count]}
        dims = (1, count, 1, 1) if "fsdp" in uses else (count, 1, 1, 1)
        mesh = sf.make_mesh(dims, devices=[d for d in devices if d in chosen])
        plan = sf.make_sharding(shape, mesh, sf.fsdp(min_size=1))
        more = {"grad": sf.ordered(plan, blocks=8)}
        if "rounding" in uses:
            more = {"accumulate": 2}
        return sf.make_train_step(loss_fn, tx, stateful=is_stateful, **more), plan

    def examples(seed, count):
        rng = np.random.default_rng(seed)
        x, y = rng.normal(size=(count, 8)), rng.normal(size=count)
        return {"x": x.astype(np.float32), "y": y.astype(np.float32)}

    def make_batches():
        data = examples(0, 640)
        if "mix" in uses:
            data = sf.mix([(data, 3), (examples(2, 100), 1)], seed=1)
        size = [(0, 16), (20, 32)] if "sizes" in uses else 32
        batches = sf.batches(data, size, seed=None if "mix" in uses else 0)
        return sf.prefetch(batches) if "prefetch" in uses else batches

    seen, evaluations, asked = [], [], []

    class Watch:
        replaces_state = "replace" in uses
        needs_exact_state = True

        def __call__(self, event):
            seen.append([event.kind, event.step])
            if event.kind == "train":
                at(f"log {event.step}")
                at(f"step {event.step}", 0.02)
            if "go back" in uses and event.step == 30 and not asked:
                asked.append(True)
                return sf.GoBack(skip=(24, 26), why="step 25 was odd")
            if self.replaces_state and event.kind == "train" and event.step in (20, 40):
                params = jax.tree.map(lambda leaf: 0.5 * leaf, event.state.params)
                return sf.Replace(event.state._replace(params=params), "halved")
            return None

    def held_out():
        evaluations.append(True)
        at(f"evaluation {len(evaluations)}")
        return sf.batches(examples(1, 48), 16, epochs=1)

    def about(self, value=None, about=""):
        if about == "the end of an attempt":
            at(f"meeting {value[0]}")
        return f"copies {value}" if about == "their copies" else ""

    begin = Attempts.begin

    def start_clocks(self, loop):
        for seconds in [m for m in moments if isinstance(m, float) and loop.step > 0]:
            moments.remove(seconds)
            moments.append("now")
            at("now", seconds)
        begin(self, loop)

    Attempts.begin = start_clocks
    before(Group, "meet", about)
    before(manifest, "write_leaves", lambda _, metadata, *args: f"save {metadata.step}")
    before(bucket.BucketStore, "_write_stream", lambda _, name, __: f"write {name.split('-')[0]}")
    before(bucket.BucketStore, "_wait_for_others", lambda *_: "wait for others")
    before(Rollbacks, "note", lambda *_: "go back")
    before(Rollbacks, "delete_later", lambda *_: "delete")
    before(Rollbacks, "_write", lambda *_: "note")
    before(TrainLoop, "restore", lambda *_: "restore")
    before(TrainLoop, "run", lambda *_: "run")
    before(RunDirectory, "lock", lambda *_: "lock")
    before(Attempts, "start", lambda *_: "start")
    restore = TrainLoop.restore

    def restore_and_die(*args, **options):
        result = restore(*args, **options)
        at("restored")
        return result

    TrainLoop.restore = restore_and_die

    elastic = sf.Elastic(build, **options.get("elastic", {}))
    evaluate = sf.make_eval_step(loss_fn, stateful=is_stateful)
    evaluation = [sf.Evaluation(evaluate, held_out, every=20)]
    if "evaluations" in uses:
        size = jax.jit(lambda params: optax.tree.norm(params))
        period = {"every": 30} if "mix" in uses else {"every_epochs": 1}
        evaluation += [
            sf.Evaluation(lambda state: {"norm": float(size(state.params))}, every=15, name="size"),
            sf.Evaluation(evaluate, held_out, at_start=True, name="other", **period),
        ]
    checkpoints = {"every": 20, **options.get("checkpoints", {})}
    directory = f"file://{folder}/bucket" if "file" in uses else options.get("url")

    def run(**more):
        state = make_state(jax.random.key(0), sharding=elastic.plan)
        at("before fit")
        return sf.fit(
            elastic, state, make_batches(), run_dir=folder, hooks=Watch(), evaluation=evaluation,
            checkpoints=sf.Checkpoints(directory, **checkpoints),
            **{"steps": 60, "log_every": 10, **fit, **more},
        )  # fmt: skip

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run()
        if "again" in uses:
            fit.pop("steps", None)
            result = run(steps=None, more_steps=20)
    if isinstance(result.state.step, jax.ShapeDtypeStruct):  # a spare process
        print(json.dumps({"steps": result.steps, "stop": result.stop_reason.kind, "seen": seen}))
        return
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    everywhere = jax.sharding.NamedSharding(
        result.state.step.sharding.mesh, jax.sharding.PartitionSpec()
    )
    replicate = jax.jit(lambda tree: tree, out_shardings=everywhere)
    leaves = [
        np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
        for leaf in jax.tree.leaves(replicate(result.state))
    ]
    history = {name: list(zip(c.steps, c, strict=True)) for name, c in result.history.items()}
    rows, info = [], {}
    if me == 0:  # which writes them, and is done with it
        rows = Path(folder, "metrics.jsonl").read_text().splitlines()
        info = json.loads(Path(folder, "run.json").read_text())
    found = {
        "bits": hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest(),
        "numbers": [leaf.ravel().astype(float).tolist() for leaf in leaves if "rounding" in uses],
        "seen": seen,
        "history": history,
        "rows": [json.loads(row) for row in rows],
        "checkpoints": sf.Checkpoints(directory or f"{folder}/checkpoints").steps(),
        "died": [str(w.message) for w in caught if "died" in str(w.message)],
        "stops": [(attempt["stop"] or {}).get("kind") for attempt in info.get("attempts", ())],
        "info": {name: info.get(name) for name in ("losses", "rollbacks", "replacements")},
    }
    print(json.dumps(found))


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch, s3.Server() as server:
        s3.use_credentials(patch)
        yield server


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return what a run of one process leads to, by its options."""
    known = {}

    def run(**options):
        options.pop("elastic", None)  # it does not change the result
        options["uses"] = sorted({*options.get("uses", ())} - {"fsdp"})
        key = json.dumps(options)
        if key not in known:
            folder = str(tmp_path_factory.mktemp("undisturbed"))
            (output,) = launch.run_processes(runs, 1, args=(folder, [], options))
            known[key] = json.loads(output)
        return known[key]

    return run


def ends(folder, kills, n, **options):
    options = {"heartbeat": HEARTBEAT, **options}
    return launch.ends_of_processes(runs, n, timeout=150, args=(str(folder), kills, options))


def survivors(folder, kills, *, n=3, **options):
    """Return what the processes print that are not killed, the first of them with its files."""
    found = ends(folder, kills, n, **options)
    killed = {process for _, process in kills}
    for process, end in enumerate(found):
        assert end.code == (-9 if process in killed else 0), launch.report(found)
    return [json.loads(end.output) for process, end in enumerate(found) if process not in killed]


@pytest.mark.parametrize(
    ("kills", "uses"),
    [
        ([("write saves/40", 2), ("write saves/60", 1)], []),
        ([("write saves/40", 2), ("log 50", 1)], ["fsdp"]),
    ],
)
def test_deaths_with_checkpoints_in_object_storage(kills, uses, server, undisturbed, tmp_path):
    storage = {"url": server.url(tmp_path.name), "environ": s3.CREDENTIALS}
    upload = f"{tmp_path.name}-files"
    fit = {"upload": server.url(upload)}
    (run,) = survivors(tmp_path, kills, uses=uses, fit=fit, **storage)
    assert f"{upload}/metrics.jsonl" in server.objects(upload)
    compare(run, undisturbed(), sees_once="fsdp" not in uses)
    assert run["stops"] == ["process_died", "process_died", "completed"]


@pytest.mark.parametrize(
    ("kills", "uses"),
    [
        ([("note", 1), ("restored", 2)], []),
        ([("delete", 2), ("log 40", 1)], ["prefetch"]),
        ([("log 30", 1), ("restore", 2)], []),
    ],
)
def test_deaths_while_the_run_goes_back(kills, uses, undisturbed, tmp_path):
    options = {"uses": ["go back", *uses], "checkpoints": {"every": 10}}
    whole = undisturbed(**options)
    (run,) = survivors(tmp_path, kills, **options)
    compare(run, whole)
    (once,), (expected,) = run["info"]["rollbacks"], whole["info"]["rollbacks"]
    assert (once["to"], once["skipped"]) == (expected["to"], expected["skipped"]) == (20, [23, 25])


@pytest.mark.parametrize(
    ("kills", "options"),
    [
        (
            [("log 30", 2), ("step 40", 1)],
            {
                "uses": ["mix", "prefetch", "ema", "model state", "evaluations"],
                "fit": {"steps_per_call": 5},
                "elastic": {"every": 3},
            },
        ),
        (
            [("meeting 20", 2), ("evaluation 3", 1)],
            {
                "uses": ["sizes", "replace", "ema", "evaluations"],
                "fit": {"steps": None, "epochs": 3},
                "checkpoints": {"every": None, "every_epochs": 1, "best": "eval/loss"},
                "elastic": {"every_seconds": 0.2},
            },
        ),
        (
            [("meeting 20", 2), ("save 40", 1)],
            {
                "uses": ["sizes", "prefetch", "replace", "fsdp", "model state"],
                "fit": {"steps_per_call": 5},
                "elastic": {"replicas": 1},
            },
        ),
    ],
)
def test_deaths_with_other_parts_of_a_run(kills, options, undisturbed, tmp_path):
    (run,) = survivors(tmp_path, kills, **options)
    compare(run, undisturbed(**options))
    assert run["stops"] == ["process_died", "process_died", "completed"]


def test_without_ordered_gradients_the_run_is_equal_up_to_rounding(undisturbed, tmp_path):
    options = {"uses": ["rounding", "evaluations"]}
    whole = undisturbed(**options)
    (run,) = survivors(tmp_path, [("step 10", 1), ("evaluation 3", 2)], **options)
    assert run["seen"] == whole["seen"]
    for numbers, expected in zip(run["numbers"], whole["numbers"], strict=True):
        assert numbers == pytest.approx(expected, rel=1e-5, abs=1e-5)
    for row, expected in zip(run["rows"], whole["rows"], strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("draw", range(6))
def test_deaths_at_random_moments(draw, undisturbed, tmp_path):
    seed = random.randrange(10**6)
    print(f"{seed=}")  # shown if it fails
    drawn = random.Random(seed)
    n, deaths, uses, elastic = [
        (3, 1, [], {}),
        (3, 1, ["fsdp"], {"replicas": 1}),
        (3, 1, ["fsdp"], {}),
        (4, 2, [], {}),
        (4, 2, ["fsdp"], {"replicas": 1}),
        (3, 2, [], {}),
    ][draw]
    kills = [(drawn.uniform(0, 1.5), p) for p in drawn.sample(range(1, n), deaths)]
    if draw == 5:  # at once
        kills = [(kills[0][0], process) for _, process in kills]
    options = {"fit": {"steps": 100}, "checkpoints": {"at_start": True}}
    found = ends(tmp_path, kills, n, uses=uses, elastic=elastic, **options)
    killed = {process for _, process in kills}
    for process, end in enumerate(found):  # which may have ended before
        assert end.code in ((-9, 0) if process in killed else (0,)), launch.report(found)
        if process not in killed:
            run = json.loads(end.output)
            compare(run, undisturbed(**options), sees_once="fsdp" not in uses)


def test_a_run_that_lost_a_process_and_got_a_signal_is_resumed_by_fewer(undisturbed, tmp_path):
    stopped = tmp_path / "stopped"
    signals = [(m, process) for process in (0, 1) for m in ("SIGTERM", "step 40")]
    options = {"uses": ["ema", "fsdp"], "elastic": {"replicas": 1}}
    found = ends(stopped, [("log 20", 2), *signals], 3, **options)
    assert [end.code for end in found] == [143, 143, -9], launch.report(found)
    for count in (2, 1):
        folder = tmp_path / f"{count}"
        shutil.copytree(stopped, folder)
        for run in survivors(folder, [], n=count, **options):
            assert run["bits"] == undisturbed(uses=["ema"])["bits"]
        (first, *_) = json.loads((folder / "run.json").read_text())["attempts"]
        assert first["stop"]["message"] == "process 2 died"


def test_a_death_is_noted_and_a_second_run_continues_without_the_process(undisturbed, tmp_path):
    whole = undisturbed(uses=["again"])
    first, second = survivors(tmp_path, [("log 30", 1)], uses=["again"])
    for run in (first, second):
        compare(run, whole)
    assert first["stops"] == ["process_died", "completed", "completed"]
    (loss,) = first["info"]["losses"]
    assert (loss["lost"], loss["at"], loss["processes"]) == ("process 1 died", 30, [0, 2])
    assert loss["from"] == 30
    assert 0 <= loss["seconds"] < 20
    assert "Process 1 died." in (tmp_path / "report.html").read_text()


def test_the_death_of_process_0_ends_all_and_a_resume_loses_nothing(undisturbed, tmp_path):
    _, one, two = ends(tmp_path, [("step 50", 0)], 3)
    for end in (one, two):
        assert end.code not in (0, -9)
        assert "leader task was preempted/died/restarted unexpectedly" in end.errors
    zero, one = ends(tmp_path, [("restored", 1)], 2)  # a death before the resumed run begins
    assert (zero.code, one.code) == (1, -9)
    assert EARLY in zero.errors
    for run in survivors(tmp_path, [], n=2):
        assert run["bits"] == undisturbed()["bits"]


@pytest.mark.parametrize(
    ("moment", "options"),
    [("before fit", {}), ("lock", {}), ("run", {}), ("start", {"train": 2})],
)
def test_a_death_before_the_first_step_ends_all(moment, options, tmp_path):
    zero, one, two = ends(tmp_path, [(moment, 1)], 3, **options)
    assert (zero.code, one.code, two.code) == (1, -9, 1)
    assert f"process 1 died {EARLY}" in zero.errors
    assert f"process 1 died {EARLY}" in two.errors or options
    assert "process 1 died" in two.errors
