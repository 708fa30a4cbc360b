"""Whatever a killed run left, the next goes on from it, and ends as if there had been no kill.

Most kills are stops of a process whose files are copied before it continues: a killed process
leaves the same files, but takes a second to start. Some are real.
"""

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


def trains(folder, notes, options):
    import training

    training.run(folder, notes, **options)


def trains_one_by_one(runs):
    import training

    for folder, notes, options in runs:
        training.run(folder, notes, **options)


def trains_on_two(start, place, folder, notes, options):
    import sys

    sys.path.insert(0, place)
    import jax
    import training

    import stepfold as sf

    start(heartbeat=5, shutdown=5)
    mine = options[jax.process_index()]
    training.run(folder, f"{notes}.{jax.process_index()}", mesh=sf.make_mesh(), **mine)


class Run:
    """One run, of as many processes one after another as it takes, and what they noted."""

    def __init__(self, folder, go=None):
        self.folder, self._notes, self._go = folder / "checkpoints", folder / "notes", go
        folder.mkdir(exist_ok=True)

    def go(self, *options):
        """Go on, until the end or until killed; tell whether it was the end."""
        return self._go(str(self.folder), str(self._notes), *options)

    def arguments(self, options):
        return str(self.folder), str(self._notes), options

    def noted(self, what):
        """List what was noted under a name, by all processes."""
        files = sorted(self._notes.parent.glob(f"{self._notes.name}*"))
        notes = [note for path in files for note in training.read_notes(path)]
        return [note[what] for note in notes if what in note]

    def check(self, whole):
        """Hold what a killed process left against what it noted, and against a run without kills.

        Give the steps of work that were lost.
        """
        problems = sf.verify(self.folder) if self.folder.exists() else {}
        assert not any(problems.values()), problems
        there = (sf.latest_step(self.folder) if self.folder.exists() else None) or 0
        assert there >= max(self.noted("committed"), default=0), "a committed save was lost"
        lost = max((step for step, _ in self.noted("reached")), default=0) - there
        assert lost <= 2 * training.EVERY
        assert {*map(tuple, self.noted("reached"))} <= {*map(tuple, whole.noted("reached"))}
        assert {*map(tuple, self.noted("restored"))} <= {*map(tuple, whole.noted("reached"))}
        return lost

    def check_end(self, whole):
        """Hold the end, and what is on the disk, against a run without kills."""
        assert sorted(set(self.noted("end"))) == sorted(whole.noted("end"))
        assert sf.verify(self.folder) == sf.verify(whole.folder)
        names = [{path.name for path in run.folder.iterdir()} for run in (self, whole)]
        assert names[0] == names[1], "something was left behind"


@pytest.fixture(scope="module")
def alone(forks):
    """Run in one process."""

    def go(folder, notes, options=None):
        end = forks.run(trains, folder, notes, options or {})
        assert end.code in (0, -signal.SIGKILL), end.errors
        assert "Error" not in end.errors, end.errors
        return end.code == 0

    return go


@pytest.fixture(scope="module")
def two():
    """Run in two processes of two devices each, with options for each of them."""
    place = str(Path(training.__file__).parent)

    def go(folder, notes, *options):
        args = (place, folder, notes, options or ({}, {}))
        ends = launch.ends_of_processes(trains_on_two, 2, args=args)
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
def whole_of_two(two, tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("whole_of_two"), two)
    assert run.go()
    return run


def stopped(forks, runs, options, place):
    """Train each run to its end, all in one process; return a copy for each time that one stops."""
    copies = []

    def copy(output):
        folder = Path(output.splitlines()[-1]).parent
        shutil.copytree(folder, place / f"{len(copies)}")
        copies.append(Run(place / f"{len(copies)}"))

    arguments = [run.arguments(each) for run, each in zip(runs, options, strict=True)]
    end = forks.run_and_copy(trains_one_by_one, arguments, copy=copy)
    assert (end.code, "Error" in end.errors) == (0, False), end.errors
    return copies


@pytest.mark.full
def test_stops_at_random_times(forks, whole, tmp_path, count):
    """The copies are continued, and copied again; all end as the whole run does."""
    chance, lost = random.Random(0), []
    times = lambda saves: [(number, chance.uniform(0, 0.2)) for number in saves]
    runs = [Run(tmp_path / f"run-{i}") for i in range(count(1, 6))]
    options = [{"stop_after": times(range(1, 9, count(3, 1)))} for _ in runs]
    last = count(1, 3)
    for attempt in range(last + 1):
        copies = stopped(forks, runs, options, tmp_path / f"{attempt}")
        for run in runs:
            run.check_end(whole)
        lost += [copy.check(whole) for copy in copies]
        runs, options = copies, [{} for _ in copies]
        if attempt < last - 1:
            options = [{"stop_after": times([chance.randint(1, 3)])} for _ in copies]
    assert not runs
    assert len(lost) >= count(2, 48)
    print(f"{len(lost)} stops at random times, steps lost {sorted(lost)}")


def test_kills_at_random_times(alone, whole, tmp_path, count):
    chance = random.Random(0)
    lost = []
    while len(lost) < count(1, 9):
        run = Run(tmp_path / f"{len(lost)}", alone)
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
    points = points[:: len(points) // count(5, len(points))]
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


def test_kills_with_two_processes(two, whole_of_two, tmp_path, count):
    chance = random.Random(0)
    lost = []
    while len(lost) < count(1, 6):  # of one process, of the other, of both; each with a resume
        run = Run(tmp_path / f"{len(lost)}", two)
        for who in (len(lost) % 3, 1):
            kill = {"kill_after": (chance.randint(1, 4), chance.uniform(0, 0.2))}
            if run.go(*(kill if who in (me, 2) else {} for me in (0, 1))):
                break
            lost.append(run.check(whole_of_two))
            if len(lost) == count(1, 6):
                break
        assert run.go()
        run.check_end(whole_of_two)
    print(f"{len(lost)} kills with two processes, steps lost {sorted(lost)}")


def exports(folder, ready):
    import os

    import jax.numpy as jnp

    import stepfold as sf

    for value in range(1, 10_000):
        tree = {f"{i}": jnp.full(20_000, value, jnp.float32) for i in range(4)}
        sf.export_params(folder, tree, shard_size=100_000)
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
        os.kill(process, signal.SIGKILL)
        assert forks.wait().code == -signal.SIGKILL
        loaded = sf.load_params(folder, like)
        (value,) = {float(leaf[at]) for leaf in loaded.values() for at in (0, -1)}
        assert value >= 3
        sf.export_params(folder, {"a": jnp.ones(2)})
        assert [file.name for file in folder.iterdir()] == ["model.safetensors"]
