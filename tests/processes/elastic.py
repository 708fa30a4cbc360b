"""A run of several processes, of which some die, freeze or get stuck at chosen moments."""

import ctypes
import hashlib
import json
import os
import signal
import threading
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.checkpoint import bucket, manifest
from stepfold.core.processes import Group
from stepfold.loop.data import BatchFeed
from stepfold.loop.elastic import Segments, Survivors
from stepfold.loop.rollback import Rollbacks
from stepfold.loop.run_directory import RunDirectory
from stepfold.loop.session import Session

from . import launch

HEARTBEAT = 8  # seconds, as in `runs`; processes that share two cores may compile for some of them


def runs(start, folder, events, options):
    """Train 60 steps, and print what they led to.

    An event is a moment, a process, and what happens to it: "kill", "SIGTERM", "raise", "GIL" to
    keep the interpreter, "tell" the test who it is, or a number of seconds to sleep. A moment is
    `log 30`, `step 30`, `save 40` and so on, or a number of seconds after step 10. `options` say
    what the run uses.
    """
    os.environ.update(options.get("environ", {}))
    start(elastic=True, heartbeat=8, **options.get("start", {}))
    me, uses, fit = jax.process_index(), options.get("uses", ()), options.get("fit", {})
    moments = {moment: what for moment, process, what in events if process in (me, "all")}

    def happens(what):
        if what in ("kill", "SIGTERM"):
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGTERM)
        elif what == "raise":
            raise ValueError("of a hook")
        elif what == "GIL":
            ctypes.PyDLL(None).sleep(1000)
        elif what == "tell":
            Path(folder, f"frozen-{os.getpid()}").touch()
        else:
            time.sleep(what)

    def at(moment, seconds=0.0):
        if (what := moments.pop(moment, None)) is None:
            return
        if seconds:
            threading.Timer(seconds, happens, (what,)).start()
        else:
            happens(what)

    def before(owner, name, moment):
        """Let an event happen before a method of a class is called, at a moment."""
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
        at("trace")
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
        each = options.get("each", 2)
        ranked = [(rank, d) for own in by_process.values() for rank, d in enumerate(own[:each])]
        count = 1 << len(ranked).bit_length() - 1
        chosen = {d for _, d in sorted(ranked, key=lambda pair: (pair[0], pair[1].id))[:count]}
        dims = (1, count, 1, 1) if "fsdp" in uses else (count, 1, 1, 1)
        mesh = sf.make_mesh(dims, devices=[d for d in devices if d in chosen])
        plan = sf.make_sharding(shape, mesh, sf.fsdp(min_size=1))
        more = {"accumulate": 2} if "rounding" in uses else {"grad": sf.ordered(plan, blocks=8)}
        return sf.make_train_step(loss_fn, tx, stateful=is_stateful, **more), plan

    class Examples:
        """Examples that count how often one of them is read."""

        def __init__(self, moment, seed, count):
            rng = np.random.default_rng(seed)
            self.x = rng.normal(size=(count, 8)).astype(np.float32)
            self.y = rng.normal(size=count).astype(np.float32)
            self.moment, self.reads = moment, 0

        def __len__(self):
            return len(self.x)

        def __getitem__(self, index):
            self.reads += 1
            at(f"{self.moment} {self.reads}")
            return {"x": self.x[index], "y": self.y[index]}

    def make_batches():
        data = Examples("example", 0, 640)
        if "mix" in uses:
            data = sf.mix([(data, 3), (Examples("other example", 2, 100), 1)], seed=1)
        size = [(0, 16), (20, 32)] if "sizes" in uses else 32
        batches = sf.batches(data, size, seed=None if "mix" in uses else 0)
        return sf.prefetch(batches) if "prefetch" in uses else batches

    seen, evaluations, asked = [], [], []

    waits_for_save = {*uses} & {"go back", "fsdp"}  # from which a run may continue after that

    class Watch:
        replaces_state = "replace" in uses
        needs_exact_state = replaces_state or "go back" in uses

        def __call__(self, event):
            seen.append([event.kind, event.step])
            deadline = time.monotonic() + 10  # on a busy machine, a save takes more than ten steps
            while waits_for_save and event.step == 30 and 20 not in checkpoints.steps():
                if time.monotonic() > deadline:  # it is not saved at this step
                    break
                time.sleep(0.05)
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
        return sf.batches(Examples("held-out", 1, 48), 16, epochs=1)

    def about(self, value=None, about=""):
        if about == "the end of a segment":
            return f"meeting {value[0]}"
        return f"copies {value}" if about == "their copies" else ""

    begin, positions = Segments.begin, []

    def begin_a_segment(self, run):
        position = self.group.position
        positions.append([run.step, position.meetings, position.moves])
        for seconds in [m for m in moments if isinstance(m, float) and run.step > 0]:
            moments["now"] = moments.pop(seconds)
            at("now", seconds)
        begin(self, run)

    Segments.begin = begin_a_segment
    before(Group, "meet", about)
    before(manifest, "write_leaves", lambda _, metadata, *args: f"save {metadata.step}")
    before(bucket.BucketStore, "write_stream", lambda _, name, __: f"write {name.split('-')[0]}")
    before(Rollbacks, "delete_later", lambda *_: "delete")
    before(Rollbacks, "_write", lambda *_: "note")
    before(Session, "continue_from_checkpoint", lambda *_: "restore")
    before(Session, "fold", lambda *_: "run")
    before(RunDirectory, "lock", lambda *_: "lock")
    before(Segments, "attach", lambda *_: "start")
    restore = Session.continue_from_checkpoint

    def restore_and_die(*args, **options):
        result = restore(*args, **options)
        at("restored")
        return result

    Session.continue_from_checkpoint = restore_and_die
    mutant = options.get("mutant")
    if mutant == "rows twice":
        keep = Segments.__call__

        def agree_late(self, run):
            self.agree(run.state, run.step)
            return keep(self, run)

        Survivors.meet = lambda self, run: run  # hooks see it before all processes agree
        Segments.is_due, Segments.__call__ = lambda self, run: run.end is None, agree_late
    if mutant == "a batch skipped":
        position = BatchFeed.position
        BatchFeed.position = lambda self, used: position(self, used + 1)
    if mutant == "not repeated":
        repeat = Segments.repeat

        def skip_steps(self, session, lost):
            repeat(self, session, lost)
            run = session.run
            state = run.state._replace(step=run.state.step + 5)
            session.run = run._replace(state=state, step=run.step + 5)

        Segments.repeat = skip_steps

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
    if "elsewhere" in uses:  # where nothing is evaluated
        other = sf.Evaluation(lambda state: {}, every=15, name="elsewhere", elsewhere=True)
        evaluation.append(other)
    directory = f"file://{folder}/bucket" if "file" in uses else options.get("url")
    checkpoints = sf.Checkpoints(directory, **{"every": 20, **options.get("checkpoints", {})})

    def run(**more):
        state = make_state(jax.random.key(0), sharding=elastic.plan)
        at("before fit")
        return sf.fit(
            elastic, state, make_batches(), run_dir=folder, hooks=Watch(), evaluation=evaluation,
            checkpoints=checkpoints, **{"steps": 60, "log_every": 10, **fit, **more},
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
    mesh = result.state.step.sharding.mesh
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
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
        "positions": positions,
        "history": history,
        "rows": [json.loads(row) for row in rows],
        "checkpoints": sf.Checkpoints(directory or f"{folder}/checkpoints").steps(),
        "died": [str(w.message) for w in caught if "died" in str(w.message)],
        "stops": [(attempt["stop"] or {}).get("kind") for attempt in info.get("attempts", ())],
        "info": {name: info.get(name) for name in ("losses", "rollbacks", "replacements")},
    }
    print(json.dumps(found))


def ends(folder, events, n=3, **options):
    """Run several processes, and return how each ended."""
    return launch.ends_of_processes(runs, n, timeout=150, args=(str(folder), events, options))


def survivors(folder, kills, *, n=3, **options):
    """Kill processes, given as pairs (moment, process); return what the others print."""
    found = ends(folder, [(*kill, "kill") for kill in kills], n, **options)
    killed = {process for _, process in kills}
    for process, end in enumerate(found):
        assert end.code == (-9 if process in killed else 0), launch.report(found)
    return [json.loads(end.output) for process, end in enumerate(found) if process not in killed]


def split(values):
    """Separate the values of evaluations, which add up in another order on other devices."""
    prefixes = ("eval/", "other/", "size/")
    rows = {name: values[name] for name in values if not name.startswith(prefixes)}
    return rows, {name: values[name] for name in values if name.startswith(prefixes)}


def compare(run, whole, *, sees_once=True):
    """Compare a run with one that lost no process; the steps have the same bits."""
    assert run["bits"] == whole["bits"]
    assert run["seen"] == whole["seen"] or not sees_once
    # A save that a dead process had to finish is given up, if the run is past its step.
    assert set(run["checkpoints"]) <= set(whole["checkpoints"])
    assert run["checkpoints"][-1] == whole["checkpoints"][-1]
    (steps, evals), (whole_steps, whole_evals) = split(run["history"]), split(whole["history"])
    assert steps == whole_steps
    for name, points in evals.items():
        for point, expected in zip(points, whole_evals[name], strict=True):
            assert point == pytest.approx(expected, rel=1e-5)
    for row, expected in zip(run["rows"], whole["rows"], strict=bool(run["rows"])):
        assert split(row)[0] == split(expected)[0]
        assert split(row)[1] == pytest.approx(split(expected)[1], rel=1e-5)
