from datetime import timedelta

import numpy as np
import pytest

from stepfold.loop.report.reading import read_run
from stepfold.loop.report.standing import (
    duration,
    goodput_of,
    how_it_ended,
    overall,
    pace_of,
    standing_of,
)

from . import made


def standing(tmp_path, **options):
    return standing_of(read_run(made.run(tmp_path, attempts=[made.attempt(**options)])), made.NOW)


@pytest.mark.parametrize(
    ("stopped", "to", "total", "kind"),
    [
        ("all 100 steps were done", 100, 100, "finished"),
        ("the batches ended at step 12", 12, None, "finished"),
        ("the batches ended at step 12; not saved, for a parameter is NaN", 12, None, "finished"),
        ("eval/loss has not become better at step 50", 50, 100, "stopped"),
        ("SIGTERM at step 50", 50, 100, "stopped"),
    ],
)
def test_a_run_that_is_over_says_why(tmp_path, stopped, to, total, kind):
    found = standing(tmp_path, stopped=stopped, to=to, total=total)
    assert found.kind == kind
    assert found.why.lower() == stopped.lower() + "."


def test_the_name_of_a_metric_is_left_as_it_is(tmp_path):
    assert standing(tmp_path, stopped="train/loss is nan", to=3).why == "train/loss is nan."


def test_an_error_is_told_with_its_step(tmp_path):
    found = standing(tmp_path, error={"type": "OSError", "message": "gone"}, to=1234)
    assert (found.kind, found.why) == ("failed", "OSError: gone (at step 1,234)")
    found = standing(tmp_path, error={"type": "KeyboardInterrupt", "message": ""}, to=3)
    assert found.why == "KeyboardInterrupt (at step 3)"


def test_a_run_that_was_heard_of_is_running_and_one_that_was_not_is_silent(tmp_path):
    for silent, kind in ((60, "running"), (7200, "silent")):
        heard = (made.NOW - timedelta(seconds=silent)).isoformat()
        found = standing(tmp_path, ended=None, stopped=None, updated=heard, to=50)
        assert found.kind == kind
    assert found.why.startswith("Nothing was heard for 2 h 0 min, after step 50")
    seldom = standing(tmp_path, ended=None, stopped=None, updated=heard, pause=3000.0)
    assert seldom.kind == "running"


def test_without_a_record_nobody_knows(tmp_path):
    assert standing_of(read_run(tmp_path), made.NOW).why == "Nothing was measured yet."
    made.metrics(tmp_path, {1: {"train/loss": 1.0}})
    assert standing_of(read_run(tmp_path), made.NOW).kind == "unknown"


def test_an_attempt_that_others_followed_was_killed():
    killed = made.attempt(ended=None, to=1500)
    assert how_it_ended(killed, last=False, now=made.NOW) == "killed after step 1,500"
    assert how_it_ended(made.attempt(), last=True, now=made.NOW) == "All 100 steps were done."


def test_the_pace_leaves_out_what_was_compiled(tmp_path):
    run = read_run(made.run(tmp_path))
    found = pace_of(run)
    assert found["steps a second"].steps.tolist() == [50, 100]
    np.testing.assert_allclose(found["steps a second"].values, [40 / 20, 50 / 60])
    np.testing.assert_allclose(found["share of time waiting for batches"].values, [5 / 20, 3 / 60])
    np.testing.assert_allclose(overall(run), [90 / 80, 8 / 80])


def test_without_a_clock_there_is_no_pace(tmp_path):
    run = read_run(made.run(tmp_path, attempts=[made.attempt(clock=[[0, 0, 0], [10, 5, 0]])]))
    assert (pace_of(run), overall(run)) == ({}, None)


def test_goodput_counts_pauses_and_steps_done_twice(tmp_path):
    first = made.attempt(ended=None, to=50, clock=[[0, 0, 0], [50, 50, 0]])
    second = made.attempt(**{
        "began": "2026-03-01T10:02:00.000+00:00",
        "ended": "2026-03-01T10:03:20.000+00:00",
        "from": 20,
        "clock": [[20, 0, 0], [100, 80, 0]],
    })  # fmt: skip
    run = read_run(made.run(tmp_path, attempts=[first, second]))
    assert goodput_of(run) == pytest.approx((20 + 80) / 200)
    assert goodput_of(read_run(made.run(tmp_path))) is None


def test_durations_have_two_units():
    assert [duration(s) for s in (61, 3599.9, 90_000)] == ["1 min 1 s", "59 min 59 s", "1 d 1 h"]
