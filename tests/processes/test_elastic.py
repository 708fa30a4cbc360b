"""A run that loses processes continues on the others, and ends with the bits of one that did not.

Process 0 is never killed, since jax's coordinator lives there.
"""

import pytest

from . import launch
from .elastic import compare, ends, survivors


def full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.full
def test_a_run_that_loses_a_process_ends_with_the_bits_of_one_that_does_not(undisturbed, tmp_path):
    (run,) = survivors(tmp_path, [("step 20", 1)], n=2)
    compare(run, undisturbed())
    assert run["stops"] == ["process_died", "completed"]
    assert run["died"][0].startswith("process 1 died; the run continues from step ")
    assert run["died"][0].endswith(" on process 0")
    assert "checkpoint" not in run["died"][0]


@pytest.mark.full
@pytest.mark.parametrize(
    "kills",
    [
        *[[(moment, 2)] for moment in ("step 20", "log 30", "evaluation 1", "evaluation 2")],
        [("save 40", 2)],
        [("save 60", 2)],  # while the others wait for the last save
        [("meeting 30", 2)],
        [("log 30", 1), ("save 40", 2)],
        [("log 30", 1), ("log 30", 2)],
        [("save 40", 1)],
        [("trace", 1)],  # in the first step, which the others may still compile
    ],
)
def test_a_run_survives_the_death_of_any_process_but_the_first(kills, undisturbed, tmp_path):
    runs = survivors(tmp_path, kills)
    assert runs[0]["stops"][-1] == "completed"
    for run in runs:
        compare(run, undisturbed())


@pytest.mark.full
def test_a_run_that_loses_a_process_keeps_what_waits_for_an_evaluation(undisturbed, tmp_path):
    options = {"uses": ["elsewhere"], "checkpoints": {"keep": 1}}
    for run in survivors(tmp_path, [("log 30", 2)], **options):
        compare(run, undisturbed(**options))
        assert run["checkpoints"] == [15, 30, 45, 60]


@pytest.mark.full
def test_an_error_in_one_process_ends_all_and_is_shown_by_all(tmp_path):
    found = ends(tmp_path, [("log 20", 1, "raise")], 2)
    assert [end.code for end in found] == [1, 1], launch.report(found)
    assert all("ValueError: of a hook" in end.errors for end in found), launch.report(found)


@pytest.mark.full
def test_a_sharded_run_that_loses_a_process_continues_from_its_checkpoint(undisturbed, tmp_path):
    runs = survivors(tmp_path, [("log 30", 2)], uses=["fsdp"])
    assert runs[0]["stops"] == ["process_died", "completed"]
    for run in runs:
        compare(run, undisturbed(), sees_once=False)
        assert "continues from step 20, its newest checkpoint, on processes 0, 1" in run["died"][0]


@pytest.mark.parametrize(
    "kills",
    [
        [("step 20", 2)],
        full([("meeting 30", 1)]),
        full([("copies 30", 2)]),
        full([("log 20", 1), ("save 40", 2)]),
    ],
)
def test_a_sharded_run_with_replicas_needs_no_checkpoint(kills, undisturbed, tmp_path):
    for run in survivors(tmp_path, kills, uses=["fsdp"], elastic={"replicas": 1}):
        compare(run, undisturbed())
        assert "checkpoint" not in run["died"][0]


@pytest.mark.full
def test_a_spare_process_steps_in(undisturbed, tmp_path):
    options = {"uses": ["fsdp"], "elastic": {"replicas": 1}, "train": 2}
    runs = survivors(tmp_path, [("step 20", 1)], **options)
    assert runs[0]["died"][0].endswith("on processes 0, 2 with process 2, which stepped in")
    whole = undisturbed()
    compare(runs[0], whole)
    assert len(runs[1]["seen"]) > 5
    assert runs[1]["seen"] == whole["seen"][-len(runs[1]["seen"]) :]
    compare({**runs[1], "seen": whole["seen"]}, whole)


@pytest.mark.full
def test_a_process_without_a_place_in_the_new_plan_waits_as_a_spare(undisturbed, tmp_path):
    runs = survivors(tmp_path, [("step 20", 3)], n=4, each=1)  # the mesh shrinks from 4 to 2
    for run in runs[:2]:
        compare(run, undisturbed())
    assert runs[2] == {"steps": 60, "stop": "completed", "seen": undisturbed()["seen"][:2]}


@pytest.mark.full
@pytest.mark.parametrize(
    ("mutant", "moment"),
    [("rows twice", "meeting 30"), ("a batch skipped", "step 20"), ("not repeated", "step 20")],
)
def test_a_mutant_is_found(mutant, moment, undisturbed, tmp_path):
    run, _ = survivors(tmp_path, [(moment, 2)], mutant=mutant)
    with pytest.raises((AssertionError, ValueError)):
        compare(run, undisturbed())
