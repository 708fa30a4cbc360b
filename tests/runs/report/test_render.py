"""The page of a run is one safe file that shows how it ended, its figures, charts and tables."""

import base64
import hashlib
import json
import math
import re
from datetime import timedelta

import numpy as np
import pytest

from stepfold.runs.report.read import SavedStep, read_run_data
from stepfold.runs.report.render import render

from .run_files import NOW, Page, attempt, page, write_metrics, write_run

HOSTILE = "</script><script>alert('x')</script>\"'&<!-- {{data}}"
NONE = "\N{EN DASH}"


# The page as a file.


def test_a_page_is_well_formed_and_has_its_parts(tmp_path):
    result = page(write_run(tmp_path / "run", arguments={"steps": 100}))
    assert result.texts["title"] == ["run"]
    assert (result.data["title"], result.data["kind"]) == ("run", "finished")
    assert result.data["reason"] == "All 100 steps were done."
    assert result.figures()["eval/loss"] == ("1.75", "lowest 1.5 at step 50")
    assert next(iter(result.lines())) == ("Metrics", "loss")
    assert "needs JavaScript" in result.texts["p"][0]


def test_it_requests_nothing_from_outside_and_runs_only_its_own_script(tmp_path):
    text = render([read_run_data(write_run(tmp_path))], now=NOW)
    result = Page(text)
    for _, attrs in result.tags:
        assert not {"src", "srcset", "action", "data"} & attrs.keys()
        assert attrs.get("href", "data:,") == "data:,"
    assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(|innerHTML", text)
    policies = [attrs.get("content", "") for attrs in result.attributes("meta")]
    (policy,) = [content for content in policies if "default-src" in content]
    assert "default-src 'none'" in policy
    digest = base64.b64encode(hashlib.sha256(result.texts["script"][1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy


def test_names_stay_text_everywhere(tmp_path):
    rows = {1: {f"train/{HOSTILE}": 1.0, HOSTILE: 2.0}, 2: {f"{HOSTILE}/x": 1.0}}
    leaves = [[HOSTILE, [2], HOSTILE, 2]]
    folder = write_run(
        tmp_path / HOSTILE.replace("/", "|"),
        rows,
        [attempt(stop={"kind": "error", "message": HOSTILE})],
        arguments={"hooks": [HOSTILE]},
        devices={"kind": HOSTILE, "count": 1},
        parameters={"count": 2, "bytes": 8, "leaves": leaves},
        program=HOSTILE,
    )
    for result in (page(folder), page(folder, write_run(tmp_path / "b"))):
        assert len(result.attributes("script")) == 2
        assert "alert" not in result.texts["script"][1]
        assert not set("<>&") & set(result.texts["script"][0])
        assert ("Metrics", HOSTILE) in result.lines()
        assert HOSTILE.replace("/", "|") in result.texts["title"][0]
        assert HOSTILE in json.dumps(result.data["tables"], ensure_ascii=False).replace('\\"', '"')


def test_only_the_page_of_a_running_run_reloads_itself(tmp_path):
    def refreshes(*folders, **options):
        metas = page(*folders, **options).attributes("meta")
        return [attrs["content"] for attrs in metas if attrs.get("http-equiv") == "refresh"]

    running = attempt(ended=None, stop=None, updated=NOW.isoformat())
    folder = write_run(tmp_path / "a", attempts=[running])
    assert refreshes(folder, refresh_seconds=30) == ["30"]
    assert refreshes(folder) == []
    assert refreshes(folder, write_run(tmp_path / "b"), refresh_seconds=30) == []
    assert refreshes(write_run(tmp_path / "a"), refresh_seconds=30) == []


def test_an_empty_run_and_one_without_run_info_have_a_page(tmp_path):
    empty = page(tmp_path)
    assert (empty.data["kind"], empty.data["sections"]) == ("unknown", [])
    assert "No metrics yet." in empty.texts["script"][1]
    write_metrics(tmp_path, {5: {"train/loss": 1.0}})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("{]\n")
    result = page(tmp_path)
    assert "1 line of metrics.jsonl cannot be read" in result.data["notes"]
    assert result.data["reason"].startswith("There is no run.json")
    assert result.figures()["steps"] == ("5", "")


def test_runs_are_named_by_as_much_of_their_paths_as_is_needed(tmp_path):
    names = ("x/run", "y/run", "y/other")
    for name in names:
        (tmp_path / name).mkdir(parents=True)
    folders = [tmp_path / name for name in names]
    assert [name for name, _ in page(*folders).data["runs"]] == list(names)
    assert [name for name, _ in page(*folders[1:]).data["runs"]] == ["run", "other"]


# The state of a run.


def status(tmp_path, **options):
    data = page(write_run(tmp_path, attempts=[attempt(**options)])).data
    return data["kind"], data["runs"][0][1], data["reason"]


@pytest.mark.parametrize(
    ("kind", "message", "to", "total", "expected"),
    [
        ("completed", "all 100 steps were done", 100, 100, ("finished", "Finished")),
        ("exhausted", "the batches ended at step 12", 12, None, ("finished", "Finished")),
        ("already_completed", "step 9 of 9 was done", 9, 9, ("finished", "Finished")),
        ("early_stop", "eval/loss has not improved", 50, 100, ("stopped", "Stopped early")),
        # The words of a message and the number of steps decide nothing.
        ("hook", "all experts collapsed", 14, 100, ("stopped", "Stopped early")),
        ("hook", "the batches ended up empty", 100, 100, ("stopped", "Stopped")),
        ("unknown", "all 100 steps were done", 100, 100, ("unknown", "Stopped")),
    ],
)
def test_a_run_that_ended_gives_the_reason(tmp_path, kind, message, to, total, expected):
    stop = {"kind": kind, "message": message}
    *state, reason = status(tmp_path, stop=stop, to=to, total=total)
    assert (*state,) == expected
    assert reason.lower() == message.lower() + "."


def test_an_error_is_shown_with_its_step_and_the_name_of_a_metric_as_it_is(tmp_path):
    stop = {"kind": "error", "message": "OSError: gone"}
    expected = ("failed", "Failed", "OSError: gone (at step 1,234)")
    assert status(tmp_path, stop=stop, to=1234) == expected
    stop = {"kind": "nonfinite", "message": "train/loss is nan"}
    assert status(tmp_path, stop=stop, to=3) == ("stopped", "Stopped early", "train/loss is nan.")


def test_a_run_is_running_until_it_has_been_silent_for_long(tmp_path):
    def heard(seconds, **options):
        updated = (NOW - timedelta(seconds=seconds)).isoformat()
        return status(tmp_path, updated=updated, ended=None, stop=None, to=50, **options)

    assert heard(60) == ("running", "Running", "Step 50 of 100 is done.")
    kind, word, reason = heard(7200)
    assert (kind, word) == ("silent", "No word")
    assert reason.startswith("No update for 2 h 0 min, after step 50")
    # After three of its pauses.
    assert [heard(seconds, pause=3000.0)[0] for seconds in (8900, 9100)] == ["running", "silent"]


def test_attempts_are_listed_with_their_ends(tmp_path):
    tries = [attempt(ended=None, stop=None, to=1500), attempt(**{"from": 50})]
    result = page(write_run(tmp_path, attempts=tries))
    assert result.table("Attempts") == [
        ["2026-03-01 10:00:00", "0", "1,500", "1 min 40 s", "killed after step 1,500"],
        ["2026-03-01 10:00:00", "50", "100", "1 min 40 s", "All 100 steps were done."],
    ]


# Figures.


def test_the_key_figures(tmp_path):
    parameters = {"count": 74_000_000, "bytes": 4 << 20, "leaves": []}
    figures = page(write_run(tmp_path, parameters=parameters)).data["figures"][0]
    assert {name: (value, note) for name, value, note in figures} == {
        "steps": ("100", "of 100"),
        "time": ("1 min 40 s", ""),
        "steps/s": ("1.417", "median; first metrics after 10 s"),
        "waiting for batches": ("10.0%", "of the time"),
        "parameters": ("74.0 M", "4.00 MiB"),
    }


def test_figures_sum_over_attempts_with_their_pauses_and_repeated_steps(tmp_path):
    first = attempt(ended=None, to=50, clock=[[0, 0, 0], [50, 50, 0]])
    second = attempt(**{
        "began": "2026-03-01T10:02:00.000+00:00",
        "ended": "2026-03-01T10:03:20.000+00:00",
        "from": 20,
        "clock": [[20, 0, 0], [100, 80, 0]],
    })  # fmt: skip
    figures = page(write_run(tmp_path, attempts=[first, second])).figures()
    assert figures["goodput"][0] == f"{(20 + 80) / 200:.0%}"
    assert figures["time"] == ("3 min 0 s", "in 2 attempts")
    assert "goodput" not in page(write_run(tmp_path)).figures()
    running = attempt(ended=None, stop=None, total=1000)
    figures = page(write_run(tmp_path, attempts=[running])).figures()
    assert figures["time"] == ("1 min 40 s", "about 13 min 20 s to go")


def test_durations_have_two_units(tmp_path):
    wanted = {0.42: "0.42 s", 59.5: "59.5 s", 61: "1 min 1 s", 3599.9: "59 min 59 s"}
    for seconds, text in {**wanted, 3600 * 5 + 61: "5 h 1 min", 90_000: "1 d 1 h"}.items():
        began = NOW - timedelta(seconds=seconds)
        ended = attempt(began=began.isoformat(), ended=NOW.isoformat())
        assert page(write_run(tmp_path, attempts=[ended])).figures()["time"][0] == text


def test_metrics_have_their_last_and_their_best_value(tmp_path):
    speed = "throughput/examples_per_second"
    rows = {
        10: {"train/loss": 3.0, "train/accuracy": 0.5, "train/norm": 2.0, speed: 100.0},
        20: {"train/loss": 1.0, "train/accuracy": 0.9, "train/norm": 1.0, "eval/accuracy": 0.75},
        30: {"train/loss": 2.0, "train/accuracy": 0.8, "train/norm": 4.0, "train/same": 1.0},
        40: {"train/lost": math.nan, speed: 300.0},
    }
    result = page(write_run(tmp_path, rows))
    assert result.figures()["examples/s"] == ("200", "median")
    assert {name: (value, note) for name, value, note in result.data["figures"][1]} == {
        "train/loss": ("2", "lowest 1 at step 20"),
        "train/accuracy": ("0.8", "highest 0.9 at step 20"),
        "eval/accuracy": ("0.75", "highest 0.75 at step 20"),
        "train/norm": ("4", "between 1 and 4"),  # neither end is known to be better
        "train/same": ("1", "always 1"),
        "train/lost": ("NaN", "never finite"),
    }


def test_the_mode_of_the_checkpoints_counts(tmp_path):
    rows = {10: {"eval/error": 3.0, "eval/x": 1.0}, 20: {"eval/error": 5.0, "eval/x": 2.0}}
    for mode, best in (("min", "lowest 1 at step 10"), ("max", "highest 2 at step 20")):
        plan = {"checkpoints": {"best": "eval/x", "mode": mode}}
        assert page(write_run(tmp_path, rows, arguments=plan)).figures()["eval/x"] == ("2", best)
    assert page(write_run(tmp_path, rows)).figures()["eval/x"][1] == "between 1 and 2"
    assert page(write_run(tmp_path, rows)).figures()["eval/error"][1] == "lowest 3 at step 10"


@pytest.mark.parametrize("clock", [[], [[0, 0, 0]], [[0, 0, 0], [10, 1, 0], [10, 1, 0]]])
def test_a_run_that_has_just_started_has_no_speed(tmp_path, clock):
    result = page(write_run(tmp_path, attempts=[attempt(clock=clock)]))
    assert "steps/s" not in result.figures()
    assert not [chart for section, chart in result.lines() if section == "Speed"]


def test_values_have_four_digits(tmp_path):
    for value, text in [
        *((math.nan, "NaN"), (math.inf, "∞"), (-math.inf, "-∞"), (0.25, "0.25"), (-2.0, "-2")),
        *((0.1 + 0.2, "0.3"), (-0.0, "0"), (2000.4, "2,000"), (59850.4, "59,850"), (1e5, "100k")),
        *((1234567.0, "1.235M"), (-123456.0, "-123.5k"), (2e-7, "2e-7"), (1.5e15, "1.5e15")),
    ]:
        figures = page(write_run(tmp_path, {1: {"score": value}})).figures()
        assert figures["score"][0] == text


# Charts.

ROWS = {
    10: {"train/accuracy": 0.5, "train/loss": 2.0, "throughput/mfu": 0.4, "weights/w/std": 1.0},
    20: {"train/loss": 1.0, "held_out/loss": 1.5, "score": 3.0, "throughput/mfu": 0.4},
}
NAMED = {"arguments": {"evaluations": [{"name": "held_out", "every": 20}]}}


def styles(result):
    return {
        chart: [(line["label"], line["style"], line["dotted"]) for line in lines]
        for chart, lines in result.lines().items()
    }


def test_metrics_of_the_same_name_share_a_chart(tmp_path):
    result = page(write_run(tmp_path, ROWS, **NAMED))
    charts = styles(result)
    assert charts["Metrics", "loss"] == [("train", 0, False), ("held_out", 1, True)]
    assert charts["Metrics", "score"] == [("score", 0, False)]
    assert charts["Speed", "throughput/mfu"] == [("throughput/mfu", 0, False)]
    assert charts["weights", "w/std"] == [("w/std", 0, False)]
    assert next(iter(charts)) == ("Metrics", "loss")  # the main metrics begin with the loss
    assert ("Speed", "throughput/steps_per_second") in charts
    names = [name for name, _, _ in result.data["figures"][1]]
    assert names == ["train/loss", "held_out/loss", "train/accuracy", "score"]


def test_runs_have_different_lines(tmp_path):
    result = page(*(write_run(tmp_path / name, ROWS, **NAMED) for name in "ab"))
    charts = styles(result)
    assert charts["Metrics", "loss"] == [
        ("a · train", 0, False),
        ("a · held_out", 0, True),
        ("b · train", 1, False),
        ("b · held_out", 1, True),
    ]
    assert charts["weights", "w/std"] == [("a", 0, False), ("b", 1, False)]
    # And not by their color alone.
    assert re.search(r"\.several \.line\.s1 \{ stroke-dasharray", result.texts["style"][0])


def test_the_points_of_charts(tmp_path):
    train, evaluation = page(write_run(tmp_path)).lines()["Metrics", "loss"]
    assert train == {
        "metric": [0, "train/loss"], "label": "train", "style": 0, "dotted": False,
        "steps": [10, 50, 100], "values": [2, 1, 0.5],
    }  # fmt: skip
    assert evaluation == {
        "metric": [0, "eval/loss"], "label": "eval", "style": 1, "dotted": True,
        "steps": [50, 100], "values": [1.5, 1.75],
    }  # fmt: skip


def test_nan_and_inf_are_named(tmp_path):
    nan, inf = math.nan, math.inf
    rows = {10: {"train/loss": 1.0}, 20: {"train/loss": nan}, 30: {"train/loss": -inf}}
    result = page(write_run(tmp_path, rows))
    (line,) = result.lines()["Metrics", "loss"]
    assert (line["steps"], line["values"]) == ([10, 20, 30], [1, "NaN", "-∞"])
    assert "not finite from step" in result.texts["script"][1]
    assert "No finite value." in result.texts["script"][1]


def test_restarts_are_marked_for_a_single_run(tmp_path):
    tries = [attempt(ended=None), attempt(**{"from": 50})]
    folder = write_run(tmp_path / "a", attempts=tries)
    assert page(folder).data["restarts"] == [50]
    assert page(folder, write_run(tmp_path / "b")).data["restarts"] == []


def test_very_many_steps_make_a_small_page_with_every_spike(tmp_path):
    rows = {k: {"train/loss": 9.5 if k == 6_666 else 1.0} for k in range(20_000)}
    write_metrics(tmp_path, rows)
    text = render([read_run_data(tmp_path)], now=NOW)
    assert len(text) < 50_000
    (line,) = Page(text).lines()["Metrics", "loss"]
    assert line["values"][line["steps"].index(6_666)] == 9.5
    rows = {step: {f"weights/{k}": float(step % 7) for k in range(200)} for step in range(1, 400)}
    sections = page(write_run(tmp_path, rows)).data["sections"]
    (section,) = [section for section in sections if section["folded"]]
    assert (section["title"], len(section["charts"])) == ("weights", 200)
    assert sum(len(chart["lines"][0]["steps"]) for chart in section["charts"]) <= 60_000


def test_the_span_begins_at_zero_unless_everything_is_far_from_it(tmp_path):
    assert page(tmp_path).data["span"] == [0, 1]
    assert page(write_run(tmp_path)).data["span"] == [0, 100]
    far = {900: {"a": 1.0}, 1000: {"a": 1.0}}
    assert page(write_run(tmp_path, far, [attempt(clock=[])])).data["span"] == [900, 1000]


def test_speed_curves_leave_out_compilation(tmp_path):
    lines = page(write_run(tmp_path)).lines()
    (speed,) = lines["Speed", "throughput/steps_per_second"]
    assert speed["steps"] == [50, 100]
    np.testing.assert_allclose(speed["values"], [40 / 20, 50 / 60], rtol=1e-5)
    (waiting,) = lines["Speed", "throughput/waiting"]
    np.testing.assert_allclose(waiting["values"], [5 / 20, 3 / 60], rtol=1e-5)
    lines = page(write_run(tmp_path, {7: {"throughput/waiting": 0.5}})).lines()
    (line,) = lines["Speed", "throughput/waiting"]  # measured, and not by the clock
    assert (line["steps"], line["values"]) == ([7], [0.5])


# Tables.


def test_parameters_are_listed_by_size(tmp_path):
    leaves = [["b", [], "float32", 1], ["w", [3, 33], "bfloat16", 99]]
    parameters = {"count": 100, "bytes": 0, "leaves": leaves}
    assert page(write_run(tmp_path, parameters=parameters)).table("Parameters") == [
        ["w", "3 \N{MULTIPLICATION SIGN} 33", "bfloat16", "99", "99.0%"],
        ["b", "scalar", "float32", "1", "1.0%"],
    ]
    leaves = [[f"w{k}", [1], "float32", 1] for k in range(5000)]
    parameters = {"count": 5000, "bytes": 0, "leaves": leaves}
    rows = page(write_run(tmp_path, parameters=parameters)).table("Parameters")
    assert (len(rows), rows[-1]) == (2001, ["3,000 smaller ones", "", "", "3,000", "60.0%"])


def test_checkpoints_are_listed_and_the_best_has_a_star(tmp_path):
    losses = {1000: {"eval/loss": 0.25, "throughput/mfu": 0.5}, 2000: None, 3000: {"eval/loss": 1}}
    saved = [SavedStep(step, step / 10, measured) for step, measured in losses.items()]
    plan = {"checkpoints": {"best": "eval/loss", "mode": None}}
    run = read_run_data(write_run(tmp_path, arguments=plan))._replace(checkpoints=saved)
    assert Page(render([run], now=NOW)).table("Checkpoints") == [
        ["★ 1,000", "1970-01-01 00:01:40", "eval/loss 0.25"],
        ["2,000", "1970-01-01 00:03:20", "damaged"],
        ["3,000", "1970-01-01 00:05:00", "eval/loss 1"],
    ]


def test_the_configuration_is_flat_and_leaves_out_what_is_unknown(tmp_path):
    evaluations = [{"name": "test", "every": 5}]
    arguments = {"steps": 10, "epochs": None, "hooks": ["a", "b"], "evaluations": evaluations}
    result = page(write_run(tmp_path, arguments=arguments, mesh={"dp": 2}, program="t.py"))
    assert dict(result.table("Configuration")) == {
        "steps": "10",
        "hooks": "a, b",
        "evaluations/0/name": "test",
        "evaluations/0/every": "5",
        "mesh/dp": "2",
        "program": "t.py",
    }


def test_only_differences_are_listed(tmp_path):
    first = read_run_data(write_run(tmp_path / "a", arguments={"steps": 10, "log_every": 5}))
    second = read_run_data(write_run(tmp_path / "b", arguments={"steps": 20, "log_every": 5}))
    result = Page(render([first, second._replace(hparams={"lr": 0.1})], now=NOW))
    assert result.data["tables"]["What differs"] == [
        ["", "a", "b"],
        ["steps", "10", "20"],
        ["hparams/lr", NONE, "0.1"],
    ]
    twins = [first, first._replace(path=tmp_path / "b")]
    assert Page(render(twins, now=NOW)).table("What differs") == []


def test_runs_stand_side_by_side_and_the_best_has_a_star(tmp_path):
    rows = {10: {"train/loss": 0.25, "train/norm": 1.0}}
    result = page(write_run(tmp_path / "a"), write_run(tmp_path / "b", rows))
    table = {name: values for name, *values in result.table("Side by side")}
    assert table["state"] == ["Finished", "Finished"]
    assert table["steps/s"] == ["1.417", "1.417"]
    assert table["train/loss, last"] == ["0.5", "0.25"]
    assert table["train/loss, lowest"] == ["0.5 at 100", "★ 0.25 at 10"]
    assert table["eval/loss, lowest"] == ["1.5 at 50", NONE]
    assert "train/norm, highest" not in table


# Other runs, and the time.


def files(*folders, **options):
    return page(*folders, **options).data["files"]


def test_the_page_of_a_run_has_the_command_that_compares_it_with_its_neighbors(tmp_path):
    first, second = write_run(tmp_path / "a b"), write_run(tmp_path / "c")
    (tmp_path / "no run").mkdir()
    (tmp_path / "file").write_text("")
    command = f"python -m stepfold report '{first}' {second}"
    assert files(first)["command"] == command
    assert files(first, second)["command"] == command
    (tmp_path / "other").mkdir()
    alone = write_run(tmp_path / "other" / "d")
    assert files(alone)["command"] == f"python -m stepfold report {alone} OTHER_RUN_DIR"


def test_links_are_relative_to_the_page_and_lead_to_files_that_exist(tmp_path):
    first, second = write_run(tmp_path / "a#1"), write_run(tmp_path / "b")
    (first / "report.html").write_text("")
    (tmp_path / "report.html").write_text("")
    compared = files(first, second, path=tmp_path / "report.html")
    assert compared["runs"] == [["a#1", "./a%231/report.html"], ["b", None]]
    assert compared["metrics"] == ["./a%231/metrics.jsonl", "./b/metrics.jsonl"]
    single = files(second, path=second / "report.html")
    assert single["runs"] == [["a#1", "./../a%231/report.html"]]
    assert single["output"] == [str(tmp_path / "report.html"), "./../report.html"]
    assert files(second)["output"][1] is None  # it is unknown where the page will be


PARTS = [["start", 30.0], ["steps", 60.0], ["batches", 0.0], ["hook a", 9.97], ["saving", 0.03]]


def test_the_time_is_listed_by_what_it_went_into(tmp_path):
    tries = [attempt(parts=PARTS), attempt(parts=[["steps", 100.0]])]
    assert page(write_run(tmp_path, attempts=tries)).table("Where the time went") == [
        ["steps, with the time of devices", "2 min 40 s", "80.0%", "800 ms"],
        ["start, until the first metrics", "30 s", "15.0%", "150 ms"],
        ["hook a", "9.97 s", "5.0%", "49.9 ms"],
        ["saving checkpoints", "0.03 s", "0.0%", "150 µs"],
    ]
    assert "Where the time went" not in page(write_run(tmp_path)).data["tables"]


def test_small_parts_of_the_time_are_summed_up(tmp_path):
    for seconds, count, last in (
        (1e-4, 4, ["51 others", "0.035 s", "0.0%", "350 µs"]),
        (1.0, 13, ["38 others", "38 s"]),
    ):
        parts = [*(PARTS if count == 4 else []), *([f"hook {k}", seconds] for k in range(50))]
        result = page(write_run(tmp_path, attempts=[attempt(parts=parts)]))
        rows = result.table("Where the time went")
        assert (len(rows), rows[-1][: len(last)]) == (count, last)


def test_the_times_of_runs_stand_side_by_side(tmp_path):
    first = write_run(tmp_path / "a", attempts=[attempt(parts=PARTS)])
    second = write_run(tmp_path / "b", attempts=[attempt(parts=[["batches", 3], ["steps", 1]])])
    assert page(first, second).table("Where the time went") == [
        ["waiting for batches", NONE, "3 s (75.0%)"],
        ["steps, with the time of devices", "1 min 0 s (60.0%)", "1 s (25.0%)"],
        ["start, until the first metrics", "30 s (30.0%)", NONE],
        ["hook a", "9.97 s (10.0%)", NONE],
        ["saving checkpoints", "0.03 s (0.0%)", NONE],
    ]


# The metrics as a table.


def logged(result, run=0):
    """Return the rows that a page has of a run, by step, as its script collects them."""
    rows = {}
    for lines in result.lines().values():
        for line in lines:
            if line["metric"] and line["metric"][0] == run:
                for step, value in zip(line["steps"], line["values"], strict=True):
                    rows.setdefault(step, {})[line["metric"][1]] = value
    return rows


def test_a_page_has_all_metrics_exactly_as_they_were_logged(tmp_path):
    third = 1 / 3
    first = {step: {"train/loss": third / step, f"w/{step}": 1e-300} for step in range(1, 1000)}
    second = {5: {"train/loss": 0.1 + 0.2, "throughput/mfu": third}, 7: {"eval/loss": 1e20}}
    folders = write_run(tmp_path / "a", first), write_run(tmp_path / "b", second)
    result = page(*folders)
    assert (logged(result), logged(result, 1)) == (first, second)
    assert not result.data["thinned"]
    assert [attrs["value"] for attrs in result.attributes("button")] == ["csv", "json"]


def test_a_page_tells_that_it_has_only_some_points_of_a_long_run(tmp_path):
    rows = {step: {"a": math.sin(step) / 3} for step in range(1, 20_000)}
    result = page(write_run(tmp_path, rows))
    assert result.data["thinned"]
    shown = logged(result)
    assert 500 < len(shown) < 2_000
    assert shown == {step: rows[step] for step in shown}


def test_two_runs_have_the_growth_of_their_difference(tmp_path):
    rows = {
        5: {"train/loss": 2.0, "throughput/mfu": 0.5},
        10: {"train/loss": 4.0, "eval/loss": 1.0},
    }
    first, second = write_run(tmp_path / "a", rows), dict(rows)
    second[10] = {"train/loss": 5.0, "eval/loss": math.nan}
    lines = page(first, write_run(tmp_path / "b", second)).lines()
    drawn = {chart: lines for (section, chart), lines in lines.items() if "difference" in section}
    assert [*drawn] == ["train/loss", "eval/loss"]
    (line,) = drawn["train/loss"]
    assert (line["steps"], line["values"], line["metric"]) == ([5, 10], [0, 0.2], None)
    assert drawn["eval/loss"][0]["values"] == ["NaN"]
    three = page(*(tmp_path / name for name in "ab"), write_run(tmp_path / "c", rows)).lines()
    assert not any("difference" in section for section, _ in three)
