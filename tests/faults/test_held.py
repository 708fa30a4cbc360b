"""A trainer's run on eight devices, killed and run again, ends as if there had been no kill."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def run(folder, at):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.faults import held; "
    code += "held.main(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(folder), str(at)]
    environ = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ)


def saved(folder):
    return [path for path in (folder / "checkpoints").iterdir() if path.name.isdigit()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    done = run(tmp_path_factory.mktemp("whole"), 0)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_of_eight_devices_goes_to_its_end(whole):
    assert whole.endswith("all 24 steps were done 8\n")


def test_killed_and_run_again_it_comes_to_the_same_bits_and_curves(whole, tmp_path, count):
    for at in (14, 2)[: count(1, 2)]:  # after some saves, and before the first
        folder = tmp_path / str(at)
        killed = run(folder, at)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert bool(saved(folder)) == (at > 4)
        resumed = run(folder, 0)
        assert resumed.returncode == 0, resumed.stderr
        assert resumed.stdout == whole
