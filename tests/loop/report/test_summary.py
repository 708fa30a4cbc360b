import math

import pytest

from stepfold.loop.report.reading import read_run
from stepfold.loop.report.summary import extent_of, figures_of, metric_figures, steps_of, wall_of

from . import made


def run(tmp_path, rows=None, **options):
    return read_run(made.run(tmp_path, rows, **options))


def figures(tmp_path, **options):
    return {one.name: (one.value, one.more) for one in figures_of(run(tmp_path, **options))}


def test_the_key_figures(tmp_path):
    found = figures(tmp_path, parameters={"count": 74_000_000, "bytes": 4 << 20, "leaves": []})
    assert found == {
        "steps": ("100", "of 100"),
        "time": ("1 min 40 s", ""),
        "steps a second": ("1.125", "first metrics after 10 s"),
        "waiting for batches": ("10.0%", "of the time"),
        "parameters": ("74.0 M", "4.00 MiB"),
    }


def test_a_run_under_way_says_how_long_it_will_take(tmp_path):
    going = made.attempt(ended=None, stopped=None, total=1000)
    assert figures(tmp_path, attempts=[going])["time"] == ("1 min 40 s", "about 13 min 20 s to go")


def test_attempts_are_taken_together(tmp_path):
    tries = [made.attempt(ended=None), made.attempt(began="2026-03-01T10:01:40+00:00")]
    tries[1]["ended"] = "2026-03-01T10:03:20+00:00"
    found = figures(tmp_path, attempts=tries)
    assert found["time"] == ("3 min 20 s", "in 2 attempts")
    assert found["goodput"][0] == "45%"


def test_examples_a_second_are_told_if_they_were_measured(tmp_path):
    rows = {
        step: {"throughput/examples_per_second": rate}
        for step, rate in {10: 100.0, 20: 300.0}.items()
    }
    found = {one.name: one.value for one in figures_of(run(tmp_path, rows))}
    assert found["examples a second"] == "200"
    rows = {10: {"throughput/examples_per_second": float("nan")}}
    assert "examples a second" not in {one.name for one in figures_of(run(tmp_path, rows))}


def test_metrics_have_their_last_and_their_best_value(tmp_path):
    rows = {
        10: {"train/loss": 3.0, "train/accuracy": 0.5, "train/norm": 2.0},
        20: {"train/loss": 1.0, "train/accuracy": 0.9, "train/norm": 1.0, "eval/accuracy": 0.75},
        30: {"train/loss": 2.0, "train/accuracy": 0.8, "train/norm": 4.0, "train/same": 1.0},
        40: {"train/lost": math.nan},
    }
    found = {one.name: (one.value, one.more) for one in metric_figures(run(tmp_path, rows))}
    assert found == {
        "train/loss": ("2", "lowest 1 at step 20"),
        "train/accuracy": ("0.8", "highest 0.9 at step 20"),
        "eval/accuracy": ("0.75", "highest 0.75 at step 20"),
        "train/norm": ("4", "between 1 and 4"),  # nobody knows which is better
        "train/same": ("1", "always 1"),
        "train/lost": ("NaN", "never finite"),
    }


def test_the_mode_of_the_checkpoints_counts(tmp_path):
    rows = {10: {"eval/error": 3.0}, 20: {"eval/error": 5.0}}
    said = {"checkpoints": {"best": "eval/error", "mode": "min"}}
    assert (
        extent_of(run(tmp_path, rows, arguments=said), "eval/error").told == "lowest 3 at step 10"
    )
    assert extent_of(run(tmp_path, rows), "eval/error").told == "highest 5 at step 20"
    assert extent_of(run(tmp_path, rows), "none") is None


def test_without_a_record_the_metrics_say_how_far_it_came(tmp_path):
    made.metrics(tmp_path, {7: {"train/loss": 1.0}})
    found = read_run(tmp_path)
    assert (steps_of(found), wall_of(found)) == (7, 0)
    assert [one.name for one in figures_of(found)] == ["steps"]


@pytest.mark.parametrize("clock", [[], [[0, 0, 0]], [[0, 0, 0], [10, 1, 0], [10, 1, 0]]])
def test_a_run_that_has_just_begun_has_no_speed(tmp_path, clock):
    assert "steps a second" not in figures(tmp_path, attempts=[made.attempt(clock=clock)])
