"""The launcher of these tests reports errors and leaves no process behind."""

import os
from pathlib import Path

import pytest

from . import launch


def prints(start, text):
    import sys

    print(text, "out")
    print(text, "err", file=sys.stderr)


def test_outputs_are_separate(launcher):
    assert launch.run_processes(prints, 3, launcher, args=("hello",)) == ["hello out\n"] * 3
    for end in launch.ends_of_processes(prints, 2, launcher, args=("hello",)):
        assert end.code == 0
        assert "hello err\n" in end.errors


def fails(start):
    raise ValueError("on purpose")


def test_error_shows_all_outputs(launcher):
    with pytest.raises(AssertionError, match="process 1 ended with 1, wrote:(?s:.*)on purpose"):
        launch.run_processes(fails, 2, launcher)


def stays(start, folder):
    import os
    import time
    from pathlib import Path

    (Path(folder) / f"{os.getpid()}").touch()
    print("stays")
    time.sleep(600)


def test_no_process_outlives_its_timeout(launcher, tmp_path):
    with pytest.raises(AssertionError, match="still running after 3 s, now killed(?s:.*)stays"):
        launch.run_processes(stays, 2, launcher, timeout=3, args=(str(tmp_path),))
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not [pid for pid in pids if runs(pid)]


def runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # One that was killed may not have been waited for yet.
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or ") Z " not in stat.read_text()
