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

from . import elastic, launch
from .elastic import HEARTBEAT, compare

pytestmark = pytest.mark.full

PATIENCE = 5  # seconds


def run(folder, hangs, n=3, *, leave_behind=True):
    """Run processes of which some hang."""
    options = {"patience": PATIENCE, "leave_behind": leave_behind}
    return elastic.ends(folder, hangs, n, elastic=options, start={"timeout": 20})


@pytest.fixture
def whole(undisturbed):
    """What a run without a stuck process leads to; it is of one process."""
    return undisturbed()


def lines(end):
    """Return what the watching threads of a process wrote."""
    return [line for line in end.errors.splitlines() if line.startswith("stepfold: process")]


def check(ends, whole, stuck=2):
    """Check that all but one process ended as a run that lost none; return their results."""
    for process, end in enumerate(ends):
        assert (end.code != 0) == (process == stuck), launch.report(ends)
    results = [json.loads(end.output) for process, end in enumerate(ends) if process != stuck]
    for result in results:
        compare(result, whole)
        assert result["positions"] == results[0]["positions"]
        if stuck is not None:
            assert result["died"][0].startswith(f"process {stuck} died")
    assert results[0]["rows"]
    return results


def test_a_run_continues_without_a_process_that_is_stuck_in_a_hook(whole, tmp_path):
    ends = run(tmp_path, [("log 20", 1, 1000)], n=2)
    for result in check(ends, whole, stuck=1):
        assert "last seen at step 20 in hooks); the run continues from step" in result["died"][0]
    for end in ends:
        (line,) = lines(end)
        assert line.startswith("stepfold: process 1 is stuck on ")
        assert "last seen at step 20 in hooks, without progress for" in line
        assert line.endswith("the others continue")
    stacks = ends[1].errors
    assert "Timeout" in stacks
    assert ", line " in stacks
    assert "in __call__" in stacks  # the hook


@pytest.mark.parametrize(
    ("moment", "how", "doing"),
    [
        ("example 150", 1000, "its next batch"),
        ("held-out 6", 1000, "a batch of an evaluation"),
        ("save 20", 1000, "a save"),  # in a thread, which the others find out after the timeout
        ("log 20", "GIL", None),
    ],
)
def test_a_run_continues_without_a_process_that_is_stuck(moment, how, doing, whole, tmp_path):
    ends = run(tmp_path, [(moment, 2, how)])
    for result in check(ends, whole):
        assert "stuck on " in result["died"][0]
        assert doing is None or f" in {doing})" in result["died"][0]
    assert len(lines(ends[0])) == len(lines(ends[1])) == 1
    assert "Timeout" in ends[2].errors
    assert " in happens\n" in ends[2].errors


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
    slow = [(f"log {step}", process, 5) for step in (30, 40) for process in (0, 1)]
    hangs = {"hook": [("log 20", 2, 5)], "meeting": [("log 20", 0, 5)]}
    ends = run(tmp_path, [("log 10", 2, "tell"), *hangs[where], *slow])
    thread.join()
    check(ends, whole)


def test_a_run_that_leaves_none_behind_ends_and_a_resume_loses_nothing(whole, tmp_path):
    ends = run(tmp_path, [("log 30", 2, 1000)], leave_behind=False)
    assert [end.code for end in ends] == [1, 1, 1], launch.report(ends)
    for end in ends[:2]:
        assert "fit: expected no process to be stuck, got process 2 stuck on" in end.errors
    ends = run(tmp_path, [])
    assert [end.code for end in ends] == [0, 0, 0], launch.report(ends)
    for result in (json.loads(end.output) for end in ends):
        compare(result, whole, sees_once=False)


def test_all_end_if_all_are_stuck_alike(tmp_path):
    hangs = [("example 200", 0, 1000), ("example 100", 1, 1000), ("example 100", 2, 1000)]
    ends = run(tmp_path, hangs)
    assert [end.code for end in ends] == [1, 1, 1], launch.report(ends)
    for end in ends:
        assert len(lines(end)) == 3
        assert all("all are at the same point, so all end" in line for line in lines(end))
        assert " in happens\n" in end.errors


def test_all_end_if_process_0_is_stuck(tmp_path):
    ends = run(tmp_path, [("log 20", 0, 1000)])
    assert ends[0].code == 1, launch.report(ends)
    assert all(end.code for end in ends), launch.report(ends)
    for end in ends:
        (line,) = lines(end)
        assert line.startswith("stepfold: process 0 is stuck")
        assert line.endswith("process 0 answers the others, so all end")
    assert " in happens\n" in ends[0].errors


def test_slow_compiling_and_a_slow_evaluation_are_not_stuck(whole, tmp_path):
    slow = HEARTBEAT + PATIENCE + 4
    # Three batches, of which process 0 makes 8 rows, and the others 4.
    batches = [(f"held-out {1 + 4 * n}", process, 5) for n in range(3) for process in (1, 2)]
    batches += [(f"held-out {1 + 8 * n}", 0, 5) for n in range(3)]
    ends = run(tmp_path, [("trace", "all", slow), *batches])
    check(ends, whole, stuck=None)
    assert not any(map(lines, ends))
