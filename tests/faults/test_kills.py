"""Whatever a killed run left, the next goes on from it, and ends as if there had been no kill.

Most kills are stops of a process whose files are copied before it continues: a killed process
leaves the same files, but takes a second to start. Some are real.
"""

import functools
import itertools
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from tests.processes import launch

import stepfold as sf

from . import training
from .training import Run


@pytest.fixture(scope="module")
def alone(forks):
    """Run in one process."""

    def go(folder, notes, options):
        end = forks.run(training.train, folder, notes, options)
        assert end.code in (0, -signal.SIGKILL), end.errors
        assert "Error" not in end.errors, end.errors
        return end.code == 0

    return go


@pytest.fixture(scope="module")
def two():
    """Run in two processes of two devices each, with options for each of them."""

    def go(folder, notes, *options):
        args = (folder, notes, options * (2 // len(options)))
        ends = launch.ends_of_processes(training.train_on_two, 2, args=args)
        codes = [end.code for end in ends]
        # The peer of one that was killed is ended by jax, once it misses the other's heartbeat.
        assert codes == [0, 0] or -signal.SIGKILL in codes, launch.report(ends)
        return codes == [0, 0]

    return go


@pytest.fixture(scope="module")
def whole(alone, tmp_path_factory):
    """Train in one process without a kill; give the run."""
    run = Run(tmp_path_factory.mktemp("whole"), alone)
    assert run.go()
    return run


@pytest.fixture(scope="module")
def whole_of_both(alone, tmp_path_factory):
    """Train with temporary checkpoints in a second directory."""
    run = Run(tmp_path_factory.mktemp("whole_of_both"), alone, is_temporary=True)
    assert run.go()
    assert run.names() == [["12", "6"], ["16 of process 0.slices"]]
    return run


@pytest.fixture(scope="module")
def whole_of_two(two, tmp_path_factory):
    """Return a function that trains in two processes without a kill."""

    @functools.cache
    def make(is_temporary):
        run = Run(tmp_path_factory.mktemp("whole_of_two"), two, is_temporary=is_temporary)
        assert run.go()
        return run

    return make


def stopped(forks, runs, options, place):
    """Train each run to its end, all in one process; return a copy for each time that one stops."""
    copies = []

    def copy(output):
        folder = Path(output.splitlines()[-1]).parent
        shutil.copytree(folder, place / f"{len(copies)}")
        copies.append(Run(place / f"{len(copies)}"))

    arguments = [run.arguments(each) for run, each in zip(runs, options, strict=True)]
    end = forks.run_and_copy(training.train_all, arguments, copy=copy)
    assert (end.code, "Error" in end.errors) == (0, False), end.errors
    return copies


@pytest.mark.full
@pytest.mark.parametrize("is_temporary", [False, True])
def test_kills_at_random_times(alone, whole, request, is_temporary, tmp_path, count):
    """Kill runs with checkpoints in one directory, or with temporary ones in a second."""
    chance, lost = random.Random(is_temporary), []
    whole = request.getfixturevalue("whole_of_both") if is_temporary else whole
    for number in itertools.count():  # a run may end before it is killed
        if len(lost) >= count(1, 30 if is_temporary else 9):
            break
        run = Run(tmp_path / f"{number}", alone, is_temporary=is_temporary)
        for _ in range(count(1, 3)):
            if run.go({"kill_after": (chance.randint(1, 4), chance.uniform(0, 0.2))}):
                break
            lost.append(run.check(whole))
        else:
            assert run.go()
        run.check_end(whole)
    print(f"{len(lost)} kills at random times, steps lost {sorted(lost)}")


def test_stops_before_each_change_of_a_file(forks, whole, tmp_path, count):
    """Over two saves and two deletions, and once more while the next run cleans up and saves."""
    before = dict(whole.noted("saving"))
    points = list(range(before[8] + 1, before[12] + 1))
    points = points[:: len(points) // count(2, len(points))]
    run = Run(tmp_path / "run")
    first = stopped(forks, [run], [{"stop_at": points}], tmp_path / "first")
    assert len(first) == len(points)
    lost = [copy.check(whole) for copy in first]
    again = [{"stop_at": [1 + point % 32]} for point in points]
    second = stopped(forks, first, again, tmp_path / "second")
    lost += [copy.check(whole) for copy in second]
    assert stopped(forks, second, [{}] * len(second), tmp_path) == []
    for copy in (run, *first, *second):
        copy.check_end(whole)
    print(f"{len(lost)} stops at changes of files, steps lost {sorted(lost)}")


@pytest.mark.full
@pytest.mark.parametrize("is_temporary", [False, True])
def test_kills_with_two_processes(two, whole_of_two, is_temporary, tmp_path, count):
    """Kill one process, the other or both, and resume."""
    chance, lost, whole = random.Random(0), [], whole_of_two(is_temporary)
    numbers = itertools.count()  # a run may end before it is killed
    while len(lost) < count(1, 6):
        run = Run(tmp_path / f"{next(numbers)}", two, is_temporary=is_temporary)
        kill = {"kill_after": (chance.randint(1, 4), chance.uniform(0, 0.2))}
        if not run.go(*(kill if len(lost) % 3 in (me, 2) else {} for me in (0, 1))):
            lost.append(run.check(whole))
        assert run.go()
        run.check_end(whole)
    print(f"{len(lost)} kills with two processes, steps lost {sorted(lost)}")


@pytest.mark.full
def test_kills_before_changes_of_files_in_two_directories(alone, whole_of_both, tmp_path):
    """Over two temporary saves, a permanent one, and what it deletes."""
    before, lost = dict(whole_of_both.noted("saving")), []
    for point in range(before[8] + 1, before[14] + 1):
        run = Run(tmp_path / f"{point}", alone, is_temporary=True)
        for kill_at in (point, 1 + point % 32):
            ended = run.go({"kill_at": kill_at})
            lost += [run.check(whole_of_both)] * (not ended)
        assert run.go()
        run.check_end(whole_of_both)
    print(f"{len(lost)} kills at changes of files, steps lost {sorted(lost)}")


def exports(folder, ready):
    for value in range(1, 10_000):
        tree = {f"{i}": jnp.full(20_000, value, jnp.float32) for i in range(4)}
        sf.checkpoint.export_params(folder, tree, shard_size=100_000)
        if value == 3:
            os.mkdir(ready)


def test_a_killed_export_leaves_the_earlier_one(forks, tmp_path, count):
    like = {f"{i}": jax.ShapeDtypeStruct((20_000,), jnp.float32) for i in range(4)}
    for i in range(count(1, 6)):
        folder, ready = tmp_path / f"{i}", tmp_path / f"{i} ready"
        process = forks.start(exports, str(folder), str(ready))
        while not ready.exists():
            time.sleep(0.01)
        time.sleep(0.015 * i)
        process.kill()
        assert process.wait().code == -signal.SIGKILL
        loaded = sf.checkpoint.load_params(folder, like)
        (value,) = {float(leaf[at]) for leaf in loaded.values() for at in (0, -1)}
        assert value >= 3
        sf.checkpoint.export_params(folder, {"a": jnp.ones(2)})
        assert [file.name for file in folder.iterdir()] == ["model.safetensors"]


def trains_on_eight(folder, at):
    """Train with the trainer on eight devices, and be killed at a log point."""
    jax.config.update("jax_num_cpu_devices", 8)
    from tests.adapter import digits  # the devices come first

    class Killed(digits.Trainer):
        def on_log(self, metrics, step):
            if step == at and "train/loss" in metrics:
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = digits.trainer(
        Killed, output_dir=folder, max_steps=24, total_batch_size=32, log_steps=2,
        sharding_array=(1, -1, 2, 1), gradient_accumulation_steps=4, mixed_precision="bf16",
        evaluation_strategy="steps", eval_steps=6, save_steps=4, save_total_limit=2,
        scheduler="cosine",
    )  # fmt: skip
    output = trainer.train()
    curves = {name: (curve.steps, list(curve)) for name, curve in trainer.history.items()}
    bits = [leaf.hex() for leaf in digits.bits(output.state)]
    devices = len(output.state.params["kernel"].sharding.device_set)
    print(json.dumps([output.stopped, devices, bits, curves]))


@pytest.mark.full
@pytest.mark.parametrize("at", [14, 2])
def test_a_killed_trainer_on_eight_devices_ends_with_the_same_bits_and_curves(forks, tmp_path, at):
    """It is killed after some saves, or before the first."""
    whole = forks.run(trains_on_eight, str(tmp_path / "whole"), 0)
    assert json.loads(whole.output)[:2] == ["all 24 steps were done", 8], whole
    killed = forks.run(trains_on_eight, str(tmp_path / "run"), at)
    assert killed.code == -signal.SIGKILL, killed
    saved = [path for path in (tmp_path / "run/checkpoints").iterdir() if path.name.isdigit()]
    assert bool(saved) == (at > 4)
    resumed = forks.run(trains_on_eight, str(tmp_path / "run"), 0)
    assert (resumed.code, resumed.output) == (0, whole.output), resumed
