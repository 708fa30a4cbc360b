from xml.etree import ElementTree

from stepfold.loop.report import tables
from stepfold.loop.report.reading import Saved, read_run

from . import made


def rows(html):
    return [
        ["".join(cell.itertext()).replace("\N{NO-BREAK SPACE}", " ") for cell in row]
        for row in ElementTree.fromstring(html).iter("tr")
    ]


def test_everything_in_a_table_is_escaped():
    text = tables.table(("<i>",), [("</table><script>",)])
    assert "<script>" not in text
    assert rows(text) == [["<i>"], ["</table><script>"]]


def test_parameters_are_listed_the_largest_first(tmp_path):
    leaves = [["b", [], "float32", 1], ["w", [3, 33], "bfloat16", 99]]
    run = read_run(made.run(tmp_path, parameters={"count": 100, "bytes": 0, "leaves": leaves}))
    assert rows(tables.parameters(run))[1:] == [
        ["w", "3 \N{MULTIPLICATION SIGN} 33", "bfloat16", "99", "99.0%"],
        ["b", "scalar", "float32", "1", "1.0%"],
    ]


def test_of_very_many_parameters_the_small_ones_are_added_up(tmp_path):
    leaves = [[f"w{k}", [1], "float32", 1] for k in range(5000)]
    run = read_run(made.run(tmp_path, parameters={"count": 5000, "bytes": 0, "leaves": leaves}))
    found = rows(tables.parameters(run))
    assert (len(found), found[-1]) == (2002, ["3,000 smaller ones", "", "", "3,000", "60.0%"])


def test_checkpoints_are_listed(tmp_path):
    measured = {"eval/loss": 0.25, "throughput/mfu": 0.5}
    saved = [Saved(1000, 0.0, measured, True), Saved(2000, 60.0, {}, False)]
    run = read_run(made.run(tmp_path))._replace(checkpoints=saved)
    assert rows(tables.checkpoints(run))[1:] == [
        ["1,000", "1970-01-01 00:00:00", "eval/loss 0.25"],
        ["2,000", "1970-01-01 00:01:00", "not whole"],
    ]


def test_the_best_checkpoint_has_a_star(tmp_path):
    saved = [
        Saved(step, 0.0, {"eval/loss": loss}, True) for step, loss in {1: 0.5, 2: 0.25}.items()
    ]
    said = {"checkpoints": {"best": "eval/loss", "mode": None}}
    run = read_run(made.run(tmp_path, arguments=said))._replace(checkpoints=saved)
    assert [row[0] for row in rows(tables.checkpoints(run))[1:]] == ["1", "★ 2"]


def test_attempts_are_listed(tmp_path):
    tries = [made.attempt(ended=None, to=60), made.attempt(**{"from": 50})]
    run = read_run(made.run(tmp_path, attempts=tries))
    assert rows(tables.attempts(run, made.NOW))[1:] == [
        ["2026-03-01 10:00:00", "0", "60", "1 min 40 s", "killed after step 60"],
        ["2026-03-01 10:00:00", "50", "100", "1 min 40 s", "All 100 steps were done."],
    ]


def test_facts_are_flat_and_leave_out_what_was_not_given(tmp_path):
    arguments = {
        "steps": 10,
        "epochs": None,
        "hooks": ["a", "b"],
        "evaluations": [{"name": "test", "every": 5}],
    }
    found = read_run(made.run(tmp_path, arguments=arguments, mesh={"dp": 2}, program="t.py"))
    assert dict(rows(tables.facts(found))[1:]) == {
        "steps": "10",
        "hooks": "a, b",
        "evaluations test every": "5",
        "mesh dp": "2",
        "program": "t.py",
    }


def test_only_what_differs_is_listed(tmp_path):
    one = read_run(made.run(tmp_path / "a", arguments={"steps": 10, "log_every": 5}))
    two = read_run(made.run(tmp_path / "b", arguments={"steps": 20, "log_every": 5}))
    two = two._replace(settings={"lr": 0.1})
    assert rows(tables.differences([one, two], "ab")) == [
        ["", "a", "b"],
        ["steps", "10", "20"],
        ["hyper-parameters lr", tables.NONE, "0.1"],
    ]
    assert "Nothing differs" in tables.differences([one, one], "ab")


def test_runs_stand_side_by_side_and_the_best_has_a_star(tmp_path):
    one = read_run(made.run(tmp_path / "a"))
    two = read_run(made.run(tmp_path / "b", {10: {"train/loss": 0.25, "train/norm": 1.0}}))
    found = {row[0]: row[1:] for row in rows(tables.side_by_side([one, two], "ab", made.NOW))}
    assert found["state"] == ["Finished", "Finished"]
    assert found["train/loss, last"] == ["0.5", "0.25"]
    assert found["train/loss, lowest"] == ["0.5 at 100", "★ 0.25 at 10"]
    assert found["eval/loss, lowest"] == ["1.5 at 50", tables.NONE]
    assert "train/norm, highest" not in found
