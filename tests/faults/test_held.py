"""A trainer's run on eight devices, killed and run again, ends as if there had been no kill."""

import signal
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parent.parent.parent)


def trains(root, folder, at):
    import sys

    sys.path.insert(0, root)
    from tests.faults import held

    held.main(folder, at)


def run(forks, folder, at):
    return forks.run(trains, ROOT, str(folder), at, timeout=300)


def saved(folder):
    return [path for path in (folder / "checkpoints").iterdir() if path.name.isdigit()]


@pytest.fixture(scope="module")
def whole(forks, tmp_path_factory):
    end = run(forks, tmp_path_factory.mktemp("whole"), 0)
    assert end.code == 0, end
    return end.output


def test_a_run_of_eight_devices_goes_to_its_end(whole):
    assert whole.endswith("all 24 steps were done 8\n")


def test_killed_and_run_again_it_comes_to_the_same_bits_and_curves(forks, whole, tmp_path, count):
    for at in (14, 2)[: count(1, 2)]:  # after some saves, and before the first
        folder = tmp_path / str(at)
        killed = run(forks, folder, at)
        assert killed.code == -signal.SIGKILL, killed
        assert bool(saved(folder)) == (at > 4)
        resumed = run(forks, folder, 0)
        assert (resumed.code, resumed.output) == (0, whole), resumed
