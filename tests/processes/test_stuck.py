"""A process that is alive but stuck ends, and the others continue without it.

It ends when nothing has moved for a heartbeat and a few more seconds, and counts as dead a
heartbeat after that.
"""

import json
import os
import signal
import threading
import time

import pytest

from . import launch

HEARTBEAT, PATIENCE = 8, 5  # seconds


def trains(start, folder, hangs=(), patience=None, leave_behind=True, heartbeat=8):
    """Train 40 steps, and print what they led to; each hang is a triple (moment, process, how)."""
    import ctypes
    import hashlib
    import json
    import os
    import time
    import warnings
    from pathlib import Path

    import jax
    import numpy as np
    import optax

    import stepfold as sf
    from stepfold.checkpoint import manifest
    from stepfold.loop.elastic import Attempts

    start(elastic=True, heartbeat=heartbeat, timeout=20)
    me = jax.process_index()
    moments = {moment: how for moment, process, how in hangs if process in (me, "all")}

    def at(moment):
        how = moments.pop(moment, None)
        if how == "GIL":
            ctypes.PyDLL(None).sleep(1000)
        elif how == "tell":  # which process this is, for the test to freeze it
            Path(folder, f"frozen-{os.getpid()}").touch()
        elif how is not None:
            time.sleep(how)

    def loss_fn(params, batch, key):
        at("trace")
        hidden = jax.numpy.tanh(batch["x"] @ params["in"])
        hidden = hidden * jax.random.bernoulli(key, 0.8, hidden.shape)
        return sf.mean((hidden @ params["out"] - batch["y"]) ** 2)

    rng = np.random.default_rng(0)
    params = {"in": rng.normal(size=(8, 64)), "out": rng.normal(size=64)}
    params = {name: value.astype(np.float32) for name, value in params.items()}
    init = lambda key: jax.tree.map(jax.numpy.asarray, params)
    tx = optax.adamw(1e-2)
    shape = jax.eval_shape(lambda: sf.init_state(init, tx, jax.random.key(0)))

    def build(devices):
        """Use a power of two of the devices, as many of each process as possible."""
        by_process = {}
        for device in devices:
            by_process.setdefault(device.process_index, []).append(device)
        ranked = [(rank, d) for own in by_process.values() for rank, d in enumerate(own)]
        count = 1 << len(devices).bit_length() - 1
        chosen = {d for _, d in sorted(ranked, key=lambda pair: (pair[0], pair[1].id))[:count]}
        mesh = sf.make_mesh((count, 1, 1, 1), devices=[d for d in devices if d in chosen])
        plan = sf.make_sharding(shape, mesh, sf.fsdp(min_size=1))
        return sf.make_train_step(loss_fn, tx, grad=sf.ordered(plan, blocks=8)), plan

    class Examples:
        """Examples that hang when one of them is read for the n-th time."""

        def __init__(self, moment, count):
            rng = np.random.default_rng(count)
            self.moment, self.pulls = moment, 0
            self.x = rng.normal(size=(count, 8)).astype(np.float32)

        def __len__(self):
            return len(self.x)

        def __getitem__(self, index):
            self.pulls += 1
            at(f"{self.moment} {self.pulls}")
            return {"x": self.x[index], "y": self.x[index].sum()}

    seen = []

    def watch(event):
        seen.append([event.kind, event.step])
        at(f"{event.kind} {event.step}")

    write_leaves = manifest.write_leaves

    def write(folder, metadata, *args):
        at(f"save {metadata.step}")
        write_leaves(folder, metadata, *args)

    positions, begin = [], Attempts.begin

    def note_position(self, loop):
        position = self.group.position
        positions.append([loop.step, position.meetings, position.moves])
        begin(self, loop)

    manifest.write_leaves, Attempts.begin = write, note_position
    elastic = sf.Elastic(build, patience=patience, leave_behind=leave_behind)
    state = sf.init_state(init, tx, jax.random.key(0), sharding=elastic.plan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = sf.fit(
            elastic, state, sf.batches(Examples("batch", 320), 32, seed=0), steps=40, log_every=10,
            run_dir=folder, hooks=watch, checkpoints=sf.Checkpoints(every=20),
            evaluation=sf.Evaluation(
                sf.make_eval_step(loss_fn),
                lambda: sf.batches(Examples("eval batch", 48), 16, epochs=1), every=20,
            ),
        )  # fmt: skip
    mesh = result.state.step.sharding.mesh
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    whole = jax.jit(lambda tree: tree, out_shardings=everywhere)(result.state.params)
    bits = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(whole))
    rows = Path(folder, "metrics.jsonl").read_text().splitlines() if me == 0 else []
    print(
        json.dumps(
            {
                "bits": hashlib.sha256(bits).hexdigest(),
                "seen": seen,
                "positions": positions,
                "rows": [[row["step"], row.get("train/loss")] for row in map(json.loads, rows)],
                "checkpoints": sf.Checkpoints(f"{folder}/checkpoints").steps(),
                "died": [str(w.message) for w in caught if "died" in str(w.message)],
            }
        )
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run without a stuck process leads to; it is of one process."""
    folder = str(tmp_path_factory.mktemp("whole"))
    (output,) = launch.run_processes(trains, 1, args=(folder,))
    return json.loads(output)


def run(folder, hangs, *, n=3, leave_behind=True):
    args = (str(folder), hangs, PATIENCE, leave_behind, HEARTBEAT)
    return launch.ends_of_processes(trains, n, timeout=150, args=args)


def lines(end):
    """Return what the watching threads of a process wrote."""
    return [line for line in end.errors.splitlines() if line.startswith("stepfold: process")]


def check(ends, whole, stuck=2):
    """Check that all but one process ended as a run that lost none; return their results."""
    for process, end in enumerate(ends):
        assert (end.code != 0) == (process == stuck), launch.report(ends)
    results = [json.loads(end.output) for process, end in enumerate(ends) if process != stuck]
    for result in results:
        assert (result["bits"], result["seen"]) == (whole["bits"], whole["seen"])
        assert result["rows"] in ([], whole["rows"])
        assert result["checkpoints"][-1] == 40
        assert result["positions"] == results[0]["positions"]
        if stuck is not None:
            assert result["died"][0].startswith(f"process {stuck} died")
    assert results[0]["rows"]
    return results


def test_a_run_continues_without_a_process_that_is_stuck_in_a_hook(whole, tmp_path):
    ends = run(tmp_path, [("train 20", 2, 1000)])
    for result in check(ends, whole):
        assert "last seen at step 20 in hooks); the run continues from step" in result["died"][0]
    for end in ends:
        (line,) = lines(end)
        assert line.startswith("stepfold: process 2 is stuck on ")
        assert "last seen at step 20 in hooks, without progress for" in line
        assert line.endswith("the others continue")
    stacks = ends[2].errors
    assert "Timeout" in stacks
    assert ", line " in stacks
    assert "in watch" in stacks  # the hook


@pytest.mark.full
@pytest.mark.parametrize(
    ("moment", "how", "doing"),
    [
        ("batch 150", 1000, "its next batch"),
        ("eval batch 6", 1000, "a batch of an evaluation"),
        ("save 20", 1000, "a save"),  # in a thread, which the others find out after the timeout
        ("train 20", "GIL", None),
    ],
)
def test_a_run_continues_without_a_process_that_is_stuck(moment, how, doing, whole, tmp_path):
    ends = run(tmp_path, [(moment, 2, how)])
    for result in check(ends, whole):
        assert "stuck on " in result["died"][0]
        assert doing is None or f" in {doing})" in result["died"][0]
    assert len(lines(ends[0])) == len(lines(ends[1])) == 1
    assert "Timeout" in ends[2].errors
    assert " in at\n" in ends[2].errors


@pytest.mark.full
@pytest.mark.parametrize("waits", [0, HEARTBEAT + 2 * PATIENCE + 1])  # until its timer is over
@pytest.mark.parametrize("where", ["hook", "meeting"])
def test_a_process_that_wakes_up_after_the_others_left_it_behind_ends(
    where, waits, whole, tmp_path
):
    """jax's own heartbeats, a meeting or the timer end it, whichever comes first."""

    def freeze():
        while not (found := list(tmp_path.glob("frozen-*"))):
            time.sleep(0.1)
        pid = int(found[0].name.removeprefix("frozen-"))
        time.sleep(1)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(waits)
        while '"step": 30' not in (tmp_path / "metrics.jsonl").read_text():
            time.sleep(0.1)
        os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=freeze)
    thread.start()
    slow = [(f"train {step}", process, 5) for step in (30, 40) for process in (0, 1)]
    hangs = {"hook": [("train 20", 2, 5)], "meeting": [("train 20", 0, 5)]}
    ends = run(tmp_path, [("train 10", 2, "tell"), *hangs[where], *slow])
    thread.join()
    check(ends, whole)


@pytest.mark.full
def test_a_run_that_leaves_none_behind_ends_and_a_resume_loses_nothing(whole, tmp_path):
    ends = run(tmp_path, [("train 30", 2, 1000)], leave_behind=False)
    assert [end.code for end in ends] == [1, 1, 1], launch.report(ends)
    for end in ends[:2]:
        assert "fit: expected no process to be stuck, got process 2 stuck on" in end.errors
    ends = run(tmp_path, [])
    assert [end.code for end in ends] == [0, 0, 0], launch.report(ends)
    for result in (json.loads(end.output) for end in ends):
        assert result["bits"] == whole["bits"]
        assert result["rows"] in ([], whole["rows"])


@pytest.mark.full
def test_all_end_if_all_are_stuck_alike(tmp_path):
    ends = run(tmp_path, [("batch 200", 0, 1000), ("batch 100", 1, 1000), ("batch 100", 2, 1000)])
    assert [end.code for end in ends] == [1, 1, 1], launch.report(ends)
    for end in ends:
        assert len(lines(end)) == 3
        assert all("all are at the same point, so all end" in line for line in lines(end))
        assert " in at\n" in end.errors


@pytest.mark.full
def test_all_end_if_process_0_is_stuck(tmp_path):
    ends = run(tmp_path, [("train 20", 0, 1000)])
    assert ends[0].code == 1, launch.report(ends)
    assert all(end.code for end in ends), launch.report(ends)
    for end in ends:
        (line,) = lines(end)
        assert line.startswith("stepfold: process 0 is stuck")
        assert line.endswith("process 0 answers the others, so all end")
    assert " in at\n" in ends[0].errors


@pytest.mark.full
def test_slow_compiling_and_a_slow_evaluation_are_not_stuck(whole, tmp_path):
    slow = HEARTBEAT + PATIENCE + 4
    # Three batches, of which process 0 makes 8 rows, and the others 4.
    batches = [(f"eval batch {1 + 4 * n}", process, 5) for n in range(3) for process in (1, 2)]
    batches += [(f"eval batch {1 + 8 * n}", 0, 5) for n in range(3)]
    ends = run(tmp_path, [("trace", "all", slow), *batches])
    check(ends, whole, stuck=None)
    assert not any(map(lines, ends))
