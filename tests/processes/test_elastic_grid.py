"""Deaths in many situations: a run that loses processes ends as one that lost none."""

import json
import random
import shutil

import pytest
from tests import s3

from . import launch
from .elastic import compare, ends, survivors

pytestmark = pytest.mark.full

EARLY = "before the first step; start it again"


@pytest.mark.parametrize(
    ("kills", "uses"),
    [
        ([("write saves/40", 2), ("write saves/60", 1)], []),
        ([("write saves/40", 2), ("log 50", 1)], ["fsdp"]),
    ],
)
def test_deaths_with_checkpoints_in_object_storage(kills, uses, server, undisturbed, tmp_path):
    storage = {"url": server.url(tmp_path.name), "environ": s3.CREDENTIALS}
    upload = f"{tmp_path.name}-files"
    fit = {"upload": server.url(upload)}
    (run,) = survivors(tmp_path, kills, uses=uses, fit=fit, **storage)
    assert f"{upload}/metrics.jsonl" in server.objects(upload)
    compare(run, undisturbed(), sees_once="fsdp" not in uses)
    assert run["stops"] == ["process_died", "process_died", "completed"]


@pytest.mark.parametrize(
    ("kills", "uses"),
    [
        ([("note", 1), ("restored", 2)], []),
        ([("delete", 2), ("log 40", 1)], ["prefetch"]),
        ([("log 30", 1), ("restore", 2)], []),
    ],
)
def test_deaths_while_the_run_goes_back(kills, uses, undisturbed, tmp_path):
    options = {"uses": ["go back", *uses], "checkpoints": {"every": 10}}
    whole = undisturbed(**options)
    (run,) = survivors(tmp_path, kills, **options)
    compare(run, whole)
    (once,), (expected,) = run["info"]["rollbacks"], whole["info"]["rollbacks"]
    assert (once["to"], once["skipped"]) == (expected["to"], expected["skipped"]) == (20, [23, 25])


@pytest.mark.parametrize(
    ("kills", "options"),
    [
        (
            [("log 30", 2), ("step 40", 1)],
            {
                "uses": ["mix", "prefetch", "ema", "model state", "evaluations"],
                "fit": {"steps_per_call": 5},
                "elastic": {"every": 3},
            },
        ),
        (
            [("meeting 20", 2), ("evaluation 3", 1)],
            {
                "uses": ["sizes", "replace", "ema", "evaluations"],
                "fit": {"steps": None, "epochs": 3},
                "checkpoints": {"every": None, "every_epochs": 1, "best": "eval/loss"},
                "elastic": {"every_seconds": 0.2},
            },
        ),
        (
            [("meeting 20", 2), ("save 40", 1)],
            {
                "uses": ["sizes", "prefetch", "replace", "fsdp", "model state"],
                "fit": {"steps_per_call": 5},
                "elastic": {"replicas": 1},
            },
        ),
    ],
)
def test_deaths_with_other_parts_of_a_run(kills, options, undisturbed, tmp_path):
    (run,) = survivors(tmp_path, kills, **options)
    compare(run, undisturbed(**options))
    assert run["stops"] == ["process_died", "process_died", "completed"]


def test_without_ordered_gradients_the_run_is_equal_up_to_rounding(undisturbed, tmp_path):
    options = {"uses": ["rounding", "evaluations"]}
    whole = undisturbed(**options)
    (run,) = survivors(tmp_path, [("step 10", 1), ("evaluation 3", 2)], **options)
    assert run["seen"] == whole["seen"]
    for numbers, expected in zip(run["numbers"], whole["numbers"], strict=True):
        assert numbers == pytest.approx(expected, rel=1e-5, abs=1e-5)
    for row, expected in zip(run["rows"], whole["rows"], strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("draw", range(6))
def test_deaths_at_random_moments(draw, undisturbed, tmp_path):
    seed = random.randrange(10**6)
    print(f"{seed=}")  # shown if it fails
    drawn = random.Random(seed)
    n, deaths, uses, elastic = [
        (3, 1, [], {}),
        (3, 1, ["fsdp"], {"replicas": 1}),
        (3, 1, ["fsdp"], {}),
        (4, 2, [], {}),
        (4, 2, ["fsdp"], {"replicas": 1}),
        (3, 2, [], {}),
    ][draw]
    kills = [(drawn.uniform(0, 1.5), p) for p in drawn.sample(range(1, n), deaths)]
    if draw == 5:  # at once
        kills = [(kills[0][0], process) for _, process in kills]
    options = {"fit": {"steps": 100}, "checkpoints": {"at_start": True}}
    events = [(*kill, "kill") for kill in kills]
    found = ends(tmp_path, events, n, uses=uses, elastic=elastic, **options)
    killed = {process for _, process in kills}
    for process, end in enumerate(found):  # which may have ended before
        assert end.code in ((-9, 0) if process in killed else (0,)), launch.report(found)
        if process not in killed:
            run = json.loads(end.output)
            compare(run, undisturbed(**options), sees_once="fsdp" not in uses)


def test_a_run_that_lost_a_process_and_got_a_signal_is_resumed_by_fewer(undisturbed, tmp_path):
    stopped = tmp_path / "stopped"
    signals = [("step 40", process, "SIGTERM") for process in (0, 1)]
    options = {"uses": ["ema", "fsdp"], "elastic": {"replicas": 1}}
    found = ends(stopped, [("log 20", 2, "kill"), *signals], 3, **options)
    assert [end.code for end in found] == [143, 143, -9], launch.report(found)
    for count in (2, 1):
        folder = tmp_path / f"{count}"
        shutil.copytree(stopped, folder)
        for run in survivors(folder, [], n=count, **options):
            assert run["bits"] == undisturbed(uses=["ema"])["bits"]
        (first, *_) = json.loads((folder / "run.json").read_text())["attempts"]
        assert first["stop"]["message"] == "process 2 died"


def test_a_death_is_noted_and_a_second_run_continues_without_the_process(undisturbed, tmp_path):
    whole = undisturbed(uses=["again"])
    first, second = survivors(tmp_path, [("log 30", 1)], uses=["again"])
    for run in (first, second):
        compare(run, whole)
    assert first["stops"] == ["process_died", "completed", "completed"]
    (loss,) = first["info"]["losses"]
    assert (loss["lost"], loss["at"], loss["processes"]) == ("process 1 died", 30, [0, 2])
    assert loss["from"] == 30
    assert 0 <= loss["seconds"] < 20
    assert "Process 1 died." in (tmp_path / "report.html").read_text()


def test_the_death_of_process_0_ends_all_and_a_resume_loses_nothing(undisturbed, tmp_path):
    _, one, two = ends(tmp_path, [("step 50", 0, "kill")], 3)
    for end in (one, two):
        assert end.code not in (0, -9)
        assert "leader task was preempted/died/restarted unexpectedly" in end.errors
    # A death before the resumed run begins.
    zero, one = ends(tmp_path, [("restored", 1, "kill")], 2)
    assert (zero.code, one.code) == (1, -9)
    assert EARLY in zero.errors
    for run in survivors(tmp_path, [], n=2):
        assert run["bits"] == undisturbed()["bits"]


@pytest.mark.parametrize(
    ("moment", "options"),
    [("before fit", {}), ("lock", {}), ("run", {}), ("start", {"train": 2})],
)
def test_a_death_before_the_first_step_ends_all(moment, options, tmp_path):
    zero, one, two = ends(tmp_path, [(moment, 1, "kill")], 3, **options)
    assert (zero.code, one.code, two.code) == (1, -9, 1)
    assert f"process 1 died {EARLY}" in zero.errors
    assert f"process 1 died {EARLY}" in two.errors or options
    assert "process 1 died" in two.errors
