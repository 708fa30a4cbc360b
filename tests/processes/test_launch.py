"""The launcher of these tests reports errors and leaves no process behind."""

import os
import sys
import time
from pathlib import Path

import jax
import pytest

from . import launch


def prints(start, text):
    print(text, "out")
    print(text, "err", file=sys.stderr)


def test_outputs_are_separate(launcher):
    for end in launch.ends_of_processes(prints, 3, launcher, args=("hello",)):
        assert (end.code, end.output) == (0, "hello out\n")
        assert "hello err\n" in end.errors


def fails(start):
    raise ValueError("on purpose")


def test_error_shows_all_outputs(launcher):
    with pytest.raises(AssertionError, match="process 1 ended with 1, wrote:(?s:.*)on purpose"):
        launch.run_processes(fails, 2, launcher)


def stays(start, folder):
    (Path(folder) / f"{os.getpid()}").touch()
    print("stays")
    time.sleep(600)


@pytest.mark.full
def test_no_process_outlives_its_timeout(launcher, tmp_path):
    with pytest.raises(
        AssertionError, match="still running after 10 s, now killed(?s:.*) in stays"
    ):
        launch.run_processes(stays, 2, launcher, timeout=10, args=(str(tmp_path),))
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not [pid for pid in pids if runs(pid)]


@pytest.mark.full
def test_a_session_runs_workers_in_the_same_processes_until_one_fails():
    def says_where(start, worker, folder):
        """Print the ID of this process, and hang, raise or leave a setting if this is asked."""
        print(os.getpid(), start().process)
        if jax.process_index() == 1:
            if worker == "hangs":
                time.sleep(600)
            if worker == "raises":
                raise ValueError("on purpose")
            if worker == "leaves":
                jax.config.update("jax_enable_x64", True)

    words = {
        "hangs": "after 10 s, now killed(?s:.*)process 1 ended with -6(?s:.*) in says_where",
        "raises": "process 1 ended with 1, wrote:(?s:.*)on purpose",
        "leaves": "did not restore {'jax_enable_x64': True}",
    }
    seen = []
    with launch.Session() as session:
        for worker, problem in words.items():
            one, other = session.run(says_where, "", "")
            assert session.run(says_where, "", "") == [one, other]
            assert [text.split()[1] for text in (one, other)] == ["0", "1"]
            with pytest.raises(AssertionError, match=problem) as error:
                session.run(says_where, worker, "", timeout=10 if worker == "hangs" else 60)
            assert one in str(error.value), "what the other has written"
            pids = [int(text.split()[0]) for text in (one, other)]
            assert not [pid for pid in pids if runs(pid)]
            seen += pids
    assert len(set(seen)) == 6


def runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # One that was killed may not have been waited for yet.
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or ") Z " not in stat.read_text()
