"""Processes stop, save, evaluate and refuse together, whichever of them has the reason."""

import errno
import json
import os
import re
import signal
import socket
import threading
import time
import types
import warnings

import jax
import numpy as np
import optax
import pytest
from tests.small import full_but

import stepfold as sf
from stepfold.checkpoint import claims as run_lock
from stepfold.checkpoint import manifest
from stepfold.hooks import performance
from stepfold.internals.orbax import StepWriter

from . import launch


def begin(mesh):
    """Return a state that all devices of a mesh have, and a step."""
    tx, whole = optax.sgd(0.01), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = {"w": jax.make_array_from_process_local_data(whole, np.ones(8, np.float32))}
    step = sf.make_train_step(lambda p, b, key: sf.mean(((b["x"] - p["w"]) ** 2).mean(-1)), tx)
    return sf.init_state(params, tx, jax.random.key(0), sharding=whole), step


class Known(list):
    """A list, whose length is known, of rows that are made when they are used."""

    def __init__(self, count, rows):
        super().__init__([None] * count)
        self.rows = rows

    def __iter__(self):
        return self.rows()


def stops(start, batches, options, folder=None, signal_at=None, hook_at=None):
    """Fit on the batches of this process; print where and why it stopped."""
    start(**({"shutdown": 5} if batches[0][0] == "endless" else {}))
    rank, (state, step) = jax.process_index(), begin(sf.make_mesh())
    kind, count, seconds = batches[rank]

    def rows():
        for number in range(count):
            time.sleep(seconds)
            if signal_at is not None and number == signal_at and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield {"x": np.full((4, 8), number, np.float32)}

    class Endless:
        endless = True

        def __iter__(self):
            return rows()

    make = {"list": lambda: Known(count, rows), "generator": rows, "endless": Endless}
    hook = lambda event: "enough" if rank == 1 and event.step == hook_at else None
    code, errors = 0, []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = sf.fit(
                step, state, make[kind](), hooks=hook, **options,
                checkpoints=sf.Checkpoints(folder, every=10_000) if folder else None,
            )  # fmt: skip
        except SystemExit as error:
            result, code = error.result, error.code
        except sf.errors.DataError as error:
            errors.append(str(error))
    seen = {"code": code, "errors": errors, "warned": [str(w.message) for w in caught]}
    if not errors:
        seen |= {"steps": result.steps, "kind": result.stop_reason.kind}
        seen |= {"message": str(result.stop_reason)}
        seen |= {"saved": sf.checkpoint.latest_step(folder) if folder else None}
    print(json.dumps(seen))


@pytest.mark.parametrize("per_call", [1, pytest.param(4, marks=pytest.mark.full)])
def test_batches_that_end_earlier_in_one_process_stop_all_at_the_same_step(
    processes, per_call, tmp_path
):
    batches = [("generator", 9, 0), ("generator", 6, 0)]
    options = {"steps_per_call": per_call, "log_every": 4}
    for process, text in enumerate(processes.run(stops, batches, options, str(tmp_path))):
        seen = json.loads(text)
        assert (seen["steps"], seen["kind"], seen["saved"]) == (6, "exhausted", 6)
        words = "got 6 in process 1, and more in the others"
        assert any(words in text for text in seen["warned"]), (process, seen)


def test_a_known_number_of_batches_that_differs_is_refused_before_the_first_step(processes):
    for text in processes.run(stops, [("list", 9, 0), ("list", 6, 0)], {}):
        (error,) = json.loads(text)["errors"]
        assert error.startswith(
            "batches: expected the same number of steps in every process, got [9, 6]; "
        )
        assert "steps=6" in error
    for text in processes.run(stops, [("list", 9, 0), ("list", 8, 0)], {"steps": 7}):
        seen = json.loads(text)
        assert (seen["steps"], seen["warned"]) == (7, [])


@pytest.mark.full
def test_batches_that_are_not_as_endless_as_they_say_end_all(tmp_path):
    batches = [("endless", 30, 0.01), ("endless", 8, 0.01)]
    first, second = launch.ends_of_processes(
        stops, 2, args=(batches, {"steps": 30, "log_every": 5})
    )
    assert "batches: expected no end after step 8, by their own count" in second.output
    assert first.code != 0 or "stepfold: process 1" in first.errors


@pytest.mark.parametrize("kind", [pytest.param("list", marks=pytest.mark.full), "generator"])
def test_a_signal_to_one_process_ends_all_within_a_few_steps(kind, tmp_path):
    options = {"steps": 300, "log_every": 1000}
    args = ([(kind, 300, 0.1)] * 2, options, str(tmp_path), 20)
    one, other = map(json.loads, launch.run_processes(stops, 2, args=args))
    assert one["steps"] == other["steps"] == one["saved"]
    assert 20 <= one["steps"] <= 30
    assert (one["code"], one["kind"], other["code"], other["kind"]) == (143, "signal") * 2


def test_a_reason_of_a_hook_in_one_process_ends_all_within_a_few_steps(processes):
    args = ([("list", 300, 0.05)] * 2, {"steps": 300, "log_every": 5}, None, None, 20)
    one, other = map(json.loads, processes.run(stops, *args))
    assert one["steps"] == other["steps"] <= 30
    assert one["message"].startswith("process 1 stopped")
    assert other["message"].startswith("enough")


def saves(start, folder, who, how, kind):
    """Fit, and request a save in some processes at some steps; print what was done."""
    start()
    rank, (state, step) = jax.process_index(), begin(sf.make_mesh())
    checkpoints = sf.Checkpoints(folder, every=10_000, keep=None)

    def ask():
        if how == "signal":
            os.kill(os.getpid(), signal.SIGUSR1)
        elif how == "thread":
            thread = threading.Thread(target=checkpoints.request)
            thread.start()
            thread.join()

    def rows():
        for number in range(40):
            time.sleep(0.03)
            if number == 10 and rank in who:
                ask()
            yield {"x": np.full((4, 8), number, np.float32)}

    def hook(event):
        if how == "hook" and rank in who and event.step == 10:
            checkpoints.request()

    batches = Known(40, rows) if kind == "list" else rows()
    result = sf.fit(step, state, batches, checkpoints=checkpoints, hooks=hook, log_every=5)
    saved = sf.Checkpoints(folder).steps()
    restored = {
        k: float(sf.restore(folder, result.state, step=k).state.params["w"][0]) for k in saved
    }
    print(json.dumps({"steps": result.steps, "saved": saved, "w": restored}))


@pytest.mark.parametrize(
    ("who", "how", "kind"),
    [
        ((1,), "signal", "list"),
        pytest.param((1,), "thread", "generator", marks=pytest.mark.full),
        pytest.param((0,), "hook", "list", marks=pytest.mark.full),
        pytest.param((0, 1), "hook", "list", marks=pytest.mark.full),
    ],
)
def test_requests_save_once_in_all_processes_at_one_step(processes, tmp_path, who, how, kind):
    one, other = map(json.loads, processes.run(saves, str(tmp_path), who, how, kind))
    assert one == other
    assert one["steps"] == 40
    requested, last = one["saved"]
    assert (10 <= requested <= 30, last) == (True, 40)


def resumes(start, folder, local, stop_at):
    """Fit with temporary saves, from the newest step of either directory."""
    start()
    mesh = sf.make_mesh()
    state, step = begin(mesh)
    temporary = sf.Temporary(local, every=2, every_minutes=60)
    described = sf.Checkpoints(folder, every=8, keep=None, temporary=temporary)
    data = {"x": np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)}
    with described as series:
        batches = sf.batches(data, 8, seed=0)
        resumed = None
        if series.latest_step() is not None:
            restored = series.restore(state)
            state, resumed = restored.state, restored.step
            batches.set_state(restored.data)
        fold = jax.jit(step)
        for number in range(int(state.step) + 1, stop_at + 1):
            state, _ = fold(state, sf.shard_batch(next(batches), mesh))
            if series.due(number):
                series.save(state, data=batches)
        series.wait()
        found = [series.steps(), sf.Checkpoints(folder).steps()]
    ended = np.asarray(state.params["w"].addressable_data(0)).tobytes().hex()
    print(json.dumps([resumed, found, ended]))


@pytest.mark.full
def test_several_processes_resume_from_a_temporary_step(processes, tmp_path):
    def go(folder, stop_at):
        args = (str(tmp_path / folder), str(tmp_path / "local"), stop_at)
        one, other = map(json.loads, processes.run(resumes, *args))
        assert one[0] == other[0]
        assert one[2] == other[2]
        return one

    resumed, (every, permanent), _ = go("a", 13)
    assert (resumed, every, permanent) == (None, [8, 12], [8])
    resumed, _, ended = go("a", 20)
    assert resumed == 12
    assert ended == go("b", 20)[2]


def fills(start, folder):
    """Save while the disk of process 1 is full; print the error."""
    start()
    state, _ = begin(sf.make_mesh())
    write_leaves = manifest.write_leaves

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    if jax.process_index() == 1:
        manifest.write_leaves = full
    problem = ""
    try:
        with sf.Checkpoints(folder) as series:
            series.save(state, step=1)
    except sf.errors.CheckpointError as error:
        problem = str(error)
    manifest.write_leaves = write_leaves
    steps = sf.checkpoint.verify(folder) if jax.process_index() == 0 else None
    print(json.dumps({"problem": problem, "steps": steps}))


def saves_late(start, folder, who, seconds):
    """Save; a process raises or is late as it begins, before orbax has made a directory."""
    start(**({"timeout": 5} if seconds else {}))  # a session has its own
    state, _ = begin(sf.make_mesh())
    save = StepWriter.save

    def late(self, *args):
        if jax.process_index() == who:
            if not seconds:
                raise OSError(errno.ENOSPC, "No space left on device")
            time.sleep(seconds)
        save(self, *args)

    StepWriter.save, began = late, time.monotonic()
    problem = ""
    try:
        with sf.Checkpoints(folder) as series:
            series.save(state, step=1)
    except sf.errors.CheckpointError as error:
        problem = str(error)
    StepWriter.save = save
    print(json.dumps([problem, time.monotonic() - began]))


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.full), 1])
def test_an_error_as_a_save_begins_in_one_process_is_raised_in_all_at_once(
    processes, tmp_path, who
):
    for output in processes.run(saves_late, str(tmp_path), who, 0):
        problem, seconds = json.loads(output)
        assert "no space left on the device; make room" in problem
        assert seconds < 60


@pytest.mark.full
@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_is_late_as_a_save_begins_is_waited_for_no_longer_than_others(tmp_path, who):
    outputs = launch.run_processes(saves_late, 2, args=(str(tmp_path), who, 20))
    (other, seconds), (late, _) = map(json.loads, outputs if who == 1 else reversed(outputs))
    assert "not all processes saved within 5 s" in other
    assert 5 < seconds < 20
    assert late


def test_a_disk_that_is_full_in_one_process_is_an_error_in_all(processes, tmp_path):
    first, second = map(json.loads, processes.run(fills, str(tmp_path)))
    assert "no space left on the device; make room" in second["problem"]
    assert "process 1" in first["problem"]
    assert "no space left on the device" in first["problem"]
    assert first["steps"] == {}


def evaluates(start, kind, counts):
    """Evaluate on the batches of this process; print the result, or the error."""
    start()
    state, _ = begin(sf.make_mesh())
    measure = sf.make_eval_step(lambda p, b, key: sf.mean(b["x"] @ p["w"]))
    count = counts[jax.process_index()]
    rows = ({"x": np.full((4, 8), number, np.float32)} for number in range(count))
    try:
        print(json.dumps(sf.evaluate(measure, state, list(rows) if kind == "list" else rows)))
    except sf.errors.DataError as error:
        print(json.dumps(str(error)))


@pytest.mark.parametrize(
    ("kind", "counts", "words"),
    [
        ("list", [5, 3], "the same number of batches in every process, got [5, 3]; "),
        ("generator", [5, 3], "the same number of batches in every process, got 3 in process 1, "),
        ("generator", [0, 0], "at least one batch"),
    ],
)
def test_unequal_numbers_of_batches_and_none_are_refused_in_all(processes, kind, counts, words):
    for text in processes.run(evaluates, kind, counts):
        assert json.loads(text).startswith(f"evaluate: expected {words}")


def test_a_generator_of_equally_many_is_evaluated_whole(processes):
    outputs = processes.run(evaluates, "generator", [5, 5])
    assert [json.loads(text) for text in outputs] == [{"loss": 16.0}] * 2


def some_are_slow(start, cases):
    """Fit where some processes wait for data or spend time in hooks; print what is reported.

    The times are given by a clock that counts steps, since a loaded machine delays any process.
    """
    start()
    clock = performance.time = types.SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now

    def scripted(kind, slow):
        hook = sf.hooks.stragglers()

        def update(state, event):
            clock.now = 0.2 * event.step
            times = {"data_wait_seconds": 0.0, "hook_seconds": 0.0}
            if jax.process_index() in slow:
                times[kind] = 0.15 * event.step
            return hook.update(state, event._replace(**times))

        return hook._replace(update=update)

    for kind, slow in cases:
        state, step = begin(sf.make_mesh())
        rows, hook = [{"x": np.ones((4, 8), np.float32)}] * 40, scripted(kind, slow)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = sf.fit(step, state, rows, hooks=hook, log_every=5).history
        named = {name.split("_")[-1]: list(history[name]) for name in history if "slowest" in name}
        print(json.dumps([named, [str(warning.message) for warning in caught]]))
    performance.time = time


def test_a_slow_process_is_named(processes):
    cases = [("data_wait_seconds", [1]), ("hook_seconds", [0, 1])]
    one, other = processes.run(some_are_slow, cases)
    reports = [json.loads(line) for line in one.splitlines()]
    for (_, slow), (named, warned) in zip(cases, reports, strict=True):
        assert named["process"], named
        if len(slow) == 2:
            assert set(named["ratio"]) == {1.0}
            assert warned == []
            continue
        assert set(named["process"]) == set(slow)
        assert named["ratio"] == pytest.approx([3.0] * len(named["ratio"]))
        (warning,) = warned
        assert f"process {slow[0]} on {socket.gethostname()} takes 3 times as long" in warning
    assert [json.loads(line) for line in other.splitlines()] == [[{}, []]] * len(cases)


def opens(start, run_dirs, folders, late, blind):
    """Fit for 4 steps; `late` is by how many seconds the last process is later."""
    me = start().process
    state, step = begin(sf.make_mesh())
    batches = sf.batches({"x": np.ones((16, 8), np.float32)}, 8, seed=0)
    time.sleep(late if me == 1 else 0)
    began = time.monotonic()
    checkpoints = folders and sf.Checkpoints(folders[me], every=2)
    has_checkpoint = sf.checkpoint.Series.has_checkpoint
    if me == 1 and blind:  # as a file system that shows new files late, or never
        sf.checkpoint.Series.has_checkpoint = lambda self: False
    try:
        result = sf.fit(
            step, state, batches, steps=4, log_every=2, checkpoints=checkpoints,
            run_dir=run_dirs and run_dirs[me],
        )  # fmt: skip
        print("done", result.steps, result.resumed)
    except sf.StepfoldError as error:
        print(f"{time.monotonic() - began < 60} {type(error).__name__}: {error}")
    finally:
        sf.checkpoint.Series.has_checkpoint = has_checkpoint


@pytest.fixture
def outputs(processes):
    """Run `opens` with a run directory, a folder of checkpoints, or both, for each process."""

    def run(run_dirs=None, folders=None, late=0, blind=False):
        run_dirs, folders = (paths and [*map(str, paths)] for paths in (run_dirs, folders))
        return processes.run(opens, run_dirs, folders, late, blind, timeout=120 + late)

    return run


@pytest.mark.parametrize("kind", full_but(["checkpoints"], ["run_dir", "checkpoints"]))
def test_directories_that_are_not_shared_raise_within_seconds(outputs, tmp_path, kind):
    here, there = tmp_path / "here", tmp_path / "there"
    same = (tmp_path / "same",) * 2
    args = ((here, there), None) if kind == "run_dir" else (same, (here, there))
    for directory, output in zip((here, there), outputs(*args), strict=True):
        assert output == (
            f"True CheckpointError: {directory}: expected a directory that all 2 processes share, "
            "got one in which process 1 cannot see the files of process 0; give one on a shared "
            "file system\n"
        )
    assert not list(tmp_path.glob("*/.*")), "something was left behind"


def test_a_directory_that_one_cannot_make_is_an_error_of_both(outputs, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    first, second = outputs(None, (tmp_path / "folder", file))
    assert (
        second
        == f"True CheckpointError: {file}: expected a directory, got a file; give another path\n"
    )
    assert first.startswith(
        f"True CheckpointError: {tmp_path / 'folder'}: not opened: process 1 raised "
    )
    assert f"{file}: expected a directory, got a file" in first


def test_process_0_decides_whether_to_resume(outputs, tmp_path):
    assert outputs((tmp_path,) * 2, (tmp_path / "c",) * 2) == ["done 4 None\n"] * 2
    assert outputs((tmp_path,) * 2, (tmp_path / "c",) * 2, blind=True) == ["done 4 4\n"] * 2


def test_a_directory_in_use_is_an_error_of_all(outputs, tmp_path):
    claim = {"host": "there", "pid": os.getpid(), "machine": run_lock._machine()}
    claim |= {"started": run_lock._start_time(os.getpid()), "since": "2026-01-02"}
    path = tmp_path / ".lock-0"
    path.write_text(json.dumps(claim))
    first, second = outputs((tmp_path,) * 2)
    problem = f"expected a directory that no other run uses, got {tmp_path}, in use by process"
    assert first.startswith(
        f"True ConfigError: run_dir: {problem} {os.getpid()} on there since 2026"
    )
    assert re.match(
        r"True CheckpointError: run_dir: .* process 0 raised ConfigError: run_dir: ", second
    )
    assert problem in second
    assert [path.name for path in tmp_path.iterdir()] == [".lock-0"]


@pytest.mark.full
def test_a_process_may_be_later_than_the_patience_of_gloo(outputs, tmp_path):
    began = time.monotonic()
    assert outputs((tmp_path,) * 2, late=40) == ["done 4 None\n"] * 2
    assert time.monotonic() - began > 40
