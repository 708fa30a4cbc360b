"""A run that loses a process continues on the others, and ends with the bits of one that did not.

Process 0 is never killed, since jax's coordinator lives there.
"""

import json

import pytest

from . import launch

HEARTBEAT = 8  # seconds; processes that share two cores may compile for some of them


def trains(start, folder, kills=(), mutant=None, heartbeat=8, options=None):
    """Train 60 steps, and print what they led to; each kill is a pair (moment, process).

    `options` are those of `Elastic`, the `axis` of the mesh, how many processes are to `train` with
    how many devices of `each`, and whether the gradients are `ordered`.
    """
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
    from stepfold.checkpoint import manifest
    from stepfold.core.processes import Group
    from stepfold.loop.elastic import Attempts
    from stepfold.loop.train_loop import TrainLoop

    start(elastic=True, heartbeat=heartbeat)
    options = {"axis": "dp", "train": 100, "each": 2, "ordered": True, **(options or {})}
    axis, train, each = (options.pop(name) for name in ("axis", "train", "each"))
    ordered = options.pop("ordered")
    moments = {moment for moment, process in kills if process == jax.process_index()}
    die = lambda: os.kill(os.getpid(), signal.SIGKILL)

    def at(moment):
        if moment in moments:
            die()

    def init(key):
        first, second = jax.random.split(key)
        return {"in": jax.random.normal(first, (8, 64)), "out": jax.random.normal(second, (64,))}

    def loss_fn(params, batch, key):
        hidden = jnp.tanh(batch["x"] @ params["in"])
        hidden = hidden * jax.random.bernoulli(key, 0.8, hidden.shape)
        return sf.mean((hidden @ params["out"] - batch["y"]) ** 2)

    tx = optax.adamw(1e-2)
    shape = jax.eval_shape(lambda: sf.init_state(init, tx, jax.random.key(0)))

    def build(devices):
        """Use a power of two of the devices, as many of each process as possible."""
        by_process = {}
        trained = sorted({device.process_index for device in devices})[:train]
        for device in [d for d in devices if d.process_index in trained]:
            by_process.setdefault(device.process_index, []).append(device)
        ranked = [(rank, d) for own in by_process.values() for rank, d in enumerate(own[:each])]
        count = 1 << len(ranked).bit_length() - 1
        chosen = {d for _, d in sorted(ranked, key=lambda pair: (pair[0], pair[1].id))[:count]}
        dims = (count, 1, 1, 1) if axis == "dp" else (1, count, 1, 1)
        mesh = sf.make_mesh(dims, devices=[d for d in devices if d in chosen])
        plan = sf.make_sharding(shape, mesh, sf.fsdp(min_size=1))
        options = {"grad": sf.ordered(plan, blocks=8)} if ordered else {}
        return sf.make_train_step(loss_fn, tx, **options), plan

    def examples(seed, count):
        rng = np.random.default_rng(seed)
        x, y = rng.normal(size=(count, 8)), rng.normal(size=count)
        return {"x": x.astype(np.float32), "y": y.astype(np.float32)}

    seen, evaluations = [], []

    def watch(event):
        seen.append([event.kind, event.step])
        if event.kind == "train":
            at(f"log {event.step}")
            if f"error {event.step}" in moments:
                raise ValueError("of a hook")
            if f"step {event.step}" in moments:
                threading.Timer(0.02, die).start()

    def held_out():
        evaluations.append(True)
        at(f"evaluation {len(evaluations)}")
        return sf.batches(examples(1, 48), 16, epochs=1)

    write_leaves, meet = manifest.write_leaves, Group.meet

    def write(folder, metadata, *args):
        at(f"save {metadata.step}")
        write_leaves(folder, metadata, *args)

    def kill_before_meeting(self, value=None, about=""):
        if about == "the end of an attempt":
            at(f"meeting {value[0]}")
        if about == "their copies":
            at(f"copies {value}")
        return meet(self, value, about)

    manifest.write_leaves, Group.meet = write, kill_before_meeting
    if mutant == "rows twice":
        agree = TrainLoop._agree

        def log_first(self):
            self._buffer.close_interval(self.step)
            self._log()
            agree(self)

        TrainLoop._agree = log_first
    if mutant == "a batch skipped":
        TrainLoop.position = lambda self: self._feed.iterator.state_at(self._feed.used + 1)
    if mutant == "not repeated":
        repeat = Attempts.repeat

        def skip_steps(self, loop, lost):
            repeat(self, loop, lost)
            loop.state = loop.state._replace(step=loop.state.step + 5)
            loop.step += 5

        Attempts.repeat = skip_steps

    if "start" in moments:  # in the first step, which the others may still compile

        def die_in(params, batch, key):
            die()

        build_whole = build
        build = lambda devices: (sf.make_train_step(die_in, tx), build_whole(devices)[1])
    elastic = sf.Elastic(build, **options)
    state = sf.init_state(init, tx, jax.random.key(0), sharding=elastic.plan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = sf.fit(
            elastic, state, sf.batches(examples(0, 640), 32, seed=0), steps=60, log_every=10,
            run_dir=folder, hooks=watch, checkpoints=sf.Checkpoints(every=20),
            evaluation=sf.Evaluation(sf.make_eval_step(loss_fn), held_out, every=20),
        )  # fmt: skip
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
    rows, attempts = [], []
    if jax.process_index() == 0:  # which writes them, and is done with it
        rows = Path(folder, "metrics.jsonl").read_text().splitlines()
        attempts = json.loads(Path(folder, "run.json").read_text())["attempts"]
    print(
        json.dumps(
            {
                "bits": hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest(),
                "seen": seen,
                "history": history,
                "rows": [json.loads(row) for row in rows],
                "checkpoints": sf.Checkpoints(f"{folder}/checkpoints").steps(),
                "died": [str(w.message) for w in caught if "died" in str(w.message)],
                "attempts": [attempt["stop"]["kind"] for attempt in attempts],
            }
        )
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run that lost no process leads to; it is of one process."""
    folder = str(tmp_path_factory.mktemp("whole"))
    (output,) = launch.run_processes(trains, 1, args=(folder,))
    return json.loads(output)


def survivors(folder, kills, mutant=None, *, n=3, **options):
    """Run three processes; return what those that were not killed printed."""
    args = (str(folder), kills, mutant, HEARTBEAT, options)
    ends = launch.ends_of_processes(trains, n, timeout=150, args=args)
    killed = {process for _, process in kills}
    for process, end in enumerate(ends):
        assert end.code == (-9 if process in killed else 0), launch.report(ends)
    return [json.loads(end.output) for process, end in enumerate(ends) if process not in killed]


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


@pytest.mark.parametrize(
    "moment",
    [
        "step 20",
        pytest.param("log 30", marks=pytest.mark.full),
        pytest.param("evaluation 1", marks=pytest.mark.full),
        pytest.param("evaluation 2", marks=pytest.mark.full),
        pytest.param("save 40", marks=pytest.mark.full),
        pytest.param("save 60", marks=pytest.mark.full),  # while the others wait for the last save
        pytest.param("meeting 30", marks=pytest.mark.full),
    ],
)
def test_a_run_that_loses_a_process_ends_with_the_bits_of_one_that_does_not(
    moment, whole, tmp_path
):
    runs = survivors(tmp_path, [(moment, 2)])
    assert runs[0]["attempts"] == ["process_died", "completed"]
    for run in runs:
        compare(run, whole)
        assert run["died"][0].startswith("process 2 died; the run continues from step ")
        assert run["died"][0].endswith(" on processes 0, 1")


def test_a_run_that_loses_all_processes_but_the_first_continues(whole, tmp_path):
    (run,) = survivors(tmp_path, [("log 30", 1), ("save 40", 2)])
    compare(run, whole)
    assert run["attempts"] == ["process_died", "process_died", "completed"]


@pytest.mark.full
@pytest.mark.parametrize(
    "kills", [[("log 30", 1), ("log 30", 2)], [("save 40", 1)], [("start", 1)]]
)
def test_a_run_survives_the_death_of_any_process_but_the_first(kills, whole, tmp_path):
    for run in survivors(tmp_path, kills):
        compare(run, whole)


@pytest.mark.full
def test_an_error_in_one_process_ends_all_and_is_shown_by_all(tmp_path):
    args = (str(tmp_path), [("error 20", 1)], None, HEARTBEAT)
    ends = launch.ends_of_processes(trains, 2, timeout=100, args=args)
    assert [end.code for end in ends] == [1, 1], launch.report(ends)
    assert all("ValueError: of a hook" in end.errors for end in ends), launch.report(ends)


@pytest.mark.full
def test_a_sharded_run_that_loses_a_process_continues_from_its_checkpoint(whole, tmp_path):
    runs = survivors(tmp_path, [("log 30", 2)], axis="fsdp")
    assert runs[0]["attempts"] == ["process_died", "completed"]
    for run in runs:
        compare(run, whole, sees_once=False)
        assert "continues from step 20, its newest checkpoint, on processes 0, 1" in run["died"][0]


@pytest.mark.parametrize(
    "kills",
    [
        [("step 20", 2)],
        pytest.param([("meeting 30", 1)], marks=pytest.mark.full),
        pytest.param([("copies 30", 2)], marks=pytest.mark.full),
        pytest.param([("log 20", 1), ("save 40", 2)], marks=pytest.mark.full),
    ],
)
def test_a_sharded_run_with_replicas_needs_no_checkpoint(kills, whole, tmp_path):
    for run in survivors(tmp_path, kills, axis="fsdp", replicas=1):
        compare(run, whole)
        assert "checkpoint" not in run["died"][0]


def test_a_spare_process_steps_in(whole, tmp_path):
    runs = survivors(tmp_path, [("step 20", 1)], train=2, replicas=1, axis="fsdp")
    assert runs[0]["died"][0].endswith("on processes 0, 2 with process 2, which stepped in")
    compare(runs[0], whole)
    assert len(runs[1]["seen"]) > 5
    assert runs[1]["seen"] == whole["seen"][-len(runs[1]["seen"]) :]
    compare({**runs[1], "seen": whole["seen"]}, whole)


@pytest.mark.full
def test_a_process_without_a_place_in_the_new_plan_waits_as_a_spare(whole, tmp_path):
    runs = survivors(tmp_path, [("step 20", 3)], n=4, each=1)  # the mesh shrinks from 4 to 2
    for run in runs[:2]:
        compare(run, whole)
    assert runs[2] == {"steps": 60, "stop": "completed", "seen": whole["seen"][:2]}


@pytest.mark.full
@pytest.mark.parametrize(
    ("mutant", "moment"),
    [("rows twice", "meeting 30"), ("a batch skipped", "step 20"), ("not repeated", "step 20")],
)
def test_a_mutant_is_found(mutant, moment, whole, tmp_path):
    run, _ = survivors(tmp_path, [(moment, 2)], mutant)
    with pytest.raises((AssertionError, ValueError)):
        compare(run, whole)
