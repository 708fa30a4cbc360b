"""A stuck process of a run: all name it, print its stacks, and end."""

import ctypes
import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.cluster import patience
from stepfold.core.processes import DEFAULT_PATIENCE, KeyValues

from . import launch

PATIENCE = 2  # seconds


def train(happens, folder=None, **options):
    """Train on rows of each process; `happens(moment)` is called in hooks, batches and so on."""
    mesh, tx = sf.make_mesh(), optax.sgd(0.1)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    state = sf.init_state({"w": jnp.ones(8)}, tx, jax.random.key(0), sharding=whole)

    def loss_fn(params, batch, key):
        return sf.mean(((batch["x"] - params["w"]) ** 2).mean(-1))

    def rows(name, count):
        for number in range(count):
            happens(f"{name} {number}")
            yield {"x": np.ones((4, 8), np.float32)}

    def hook(event):
        happens(f"{event.kind} {event.step}")

    return sf.fit(
        sf.make_train_step(loss_fn, tx), state, rows("batch", 100), steps=40, log_every=10,
        hooks=hook,
        evaluation=sf.Evaluation(sf.make_eval_step(loss_fn), lambda: rows("held-out", 8), every=20),
        checkpoints=folder and sf.Checkpoints(folder, every=20), **options,
    )  # fmt: skip


def finds(start, options):
    """Let process 1 wait in a hook until it would be ended; print what the watch says."""
    job, lines, found = start(), [], threading.Event()
    settings = KeyValues("start_distributed")
    if not options:
        settings.set(f"patience/{job.process}", 1)  # by start(patience=1) in new processes
    watch = patience._Watch
    judge, say, end, end_after = watch._judge, watch._say, watch._end, watch._end_after

    def judge_soon(self, seen):
        self._limit = 1
        judge(self, seen)

    watch._judge, watch._end = judge_soon, lambda self: found.set()
    watch._end_after = lambda self, seconds: None  # this process goes on, however slow it is
    watch._say = lambda self, text: lines.append(text)
    try:
        result = train(
            lambda moment: found.wait(60) if (moment, job.process) == ("train 20", 1) else None,
            **options,
        )
    finally:
        watch._judge, watch._say, watch._end, watch._end_after = judge, say, end, end_after
        settings.set(f"patience/{job.process}", DEFAULT_PATIENCE)
    print(json.dumps([result.steps, lines]))


@pytest.mark.parametrize("options", [{}, {"patience": 1}], ids=["start_distributed", "fit"])
def test_a_process_that_is_stuck_in_a_hook_is_named_with_its_stacks(processes, options):
    (steps, lines), (_, own) = map(json.loads, processes.run(finds, options))
    assert steps == 40  # it was not ended here
    for first in (lines[0], own[0]):
        assert first.startswith("process 1 is stuck on ")
        assert "last seen at step 20 in hooks, without progress for " in first
        assert first.endswith("all end, as start_distributed(patience=…) says")
    assert lines[1].startswith("the stacks of process 1:\n")
    assert "in finds" in lines[1]
    assert len(own) == 1  # its stacks are written where it ends


def sticks(start, moment, process, how, folder, patience):
    """Let a process hang at a moment."""
    start(heartbeat=4, timeout=10, patience=patience)
    me = jax.process_index()

    def happens(now):
        if now != moment or process not in (me, None):
            return
        if how == "GIL":
            ctypes.PyDLL(None).sleep(1000)
        time.sleep(1000)

    print(train(happens, folder).steps)


@pytest.mark.full
@pytest.mark.parametrize(
    ("moment", "process", "doing"),
    [
        ("train 20", 1, "hooks"),
        ("train 20", 0, "hooks"),
        ("batch 25", 1, "its next batch"),
        ("held-out 3", 1, "a batch of an evaluation"),
        ("eval 20", 1, "hooks"),
    ],
)
def test_all_end_and_name_the_process_that_is_stuck(moment, process, doing, tmp_path):
    args = (moment, process, "sleep", None, PATIENCE)
    start = time.monotonic()
    ends = launch.ends_of_processes(sticks, 2, args=args, timeout=100)
    assert time.monotonic() - start < 90
    for rank, end in enumerate(ends):
        assert end.code == 1, launch.report(ends)
        assert f"stepfold: process {process} is stuck on " in end.errors, launch.report(ends)
        assert f"in {doing}, without progress for" in end.errors
        assert " in happens\n" in end.errors, (rank, launch.report(ends))


@pytest.mark.full
def test_all_end_if_all_are_stuck_alike():
    args = ("batch 25", None, "sleep", None, PATIENCE)
    for end in launch.ends_of_processes(sticks, 2, args=args, timeout=100):
        assert end.code == 1
        for process in range(2):
            assert f"stepfold: process {process} is stuck on " in end.errors, end.errors
        assert " in happens\n" in end.errors


def is_slow(start):
    """Compile, and evaluate, for longer than a step may take."""
    start(heartbeat=2, patience=PATIENCE)

    def happens(moment):
        if moment in ("batch 0", "held-out 1", "held-out 9"):
            time.sleep(2 + PATIENCE + 2)

    print(train(happens).steps)


@pytest.mark.full
def test_a_slow_first_step_and_a_slow_evaluation_are_not_stuck():
    assert launch.run_processes(is_slow) == ["40\n", "40\n"]


@pytest.mark.full
def test_a_process_that_holds_the_interpreter_ends_by_its_timer(tmp_path):
    args = ("train 20", 1, "GIL", None, PATIENCE)
    first, second = launch.ends_of_processes(sticks, 2, args=args, timeout=100)
    assert first.code
    assert second.code
    assert "stepfold: process 1 is stuck on " in first.errors
    assert "process 1 gives no stacks" in first.errors
    assert " in happens\n" in second.errors


@pytest.mark.full
def test_a_process_that_others_meet_in_vain_is_named_too(tmp_path):
    """The save waits for it no longer than `timeout`, which is shorter than the patience here."""
    args = ("train 20", 1, "sleep", str(tmp_path / "saves"), 60)
    first, second = launch.ends_of_processes(sticks, 2, args=args, timeout=100)
    assert first.code
    assert second.code
    assert "process 1 is stuck on " in first.errors
    assert " in happens\n" in first.errors
    assert "PeerTimeoutError" in first.errors
    assert " in happens\n" in second.errors


@pytest.mark.full
def test_a_watchdog_keeps_its_timer(tmp_path):
    args = ("train 20", 1, "sleep", None, PATIENCE)
    ends = launch.ends_of_processes(watched, 2, args=args, timeout=100)
    for end in ends:
        assert end.code != 0
        assert "stepfold: process 1 is stuck on " in end.errors, launch.report(ends)


def watched(start, moment, process, how, folder, patience):
    start(heartbeat=4, timeout=10, patience=patience)
    me, tx, mesh = jax.process_index(), optax.sgd(0.1), sf.make_mesh()
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    state = sf.init_state({"w": jnp.ones(8)}, tx, jax.random.key(0), sharding=whole)
    step = sf.make_train_step(lambda p, b, key: sf.mean((b["x"] - p["w"]).mean(-1)), tx)

    def hook(event):
        if me == process and event.step == 20:
            time.sleep(1000)

    rows = [{"x": np.ones((4, 8), np.float32)}] * 40
    sf.fit(step, state, rows, log_every=10, hooks=[sf.hooks.watchdog(60), hook])
