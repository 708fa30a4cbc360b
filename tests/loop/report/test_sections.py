from stepfold.loop.report.reading import read_run
from stepfold.loop.report.sections import main_metrics, sections_of, span_of

from . import made

ROWS = {
    10: {"train/accuracy": 0.5, "train/loss": 2.0, "throughput/mfu": 0.4, "weights/w/std": 1.0},
    20: {"train/loss": 1.0, "held_out/loss": 1.5, "score": 3.0, "throughput/mfu": 0.4},
}
NAMED = {"arguments": {"evaluations": [{"name": "held_out", "every": 20}]}}


def told(runs, names=("a", "b")):
    return {
        (section.title, chart.title): [
            (line.label, line.style, line.dotted) for line in chart.lines
        ]
        for section in sections_of(runs, names)
        for chart in section.charts
    }


def test_what_is_called_alike_is_in_one_chart(tmp_path):
    found = told([read_run(made.run(tmp_path, ROWS, **NAMED))])
    assert found["Metrics", "loss"] == [("train", 0, False), ("held_out", 1, True)]
    assert found["Metrics", "score"] == [("score", 0, False)]
    assert found["Speed", "share of the devices' peak"] == [
        ("share of the devices' peak", 0, False)
    ]
    assert found["weights", "w/std"] == [("w/std", 0, False)]
    assert next(iter(found)) == ("Metrics", "loss")
    assert ("Speed", "steps a second") in found


def test_runs_have_lines_of_their_own(tmp_path):
    runs = [read_run(made.run(tmp_path / name, ROWS, **NAMED)) for name in "ab"]
    found = told(runs)
    assert found["Metrics", "loss"] == [
        ("a · train", 0, False),
        ("a · held_out", 0, True),
        ("b · train", 1, False),
        ("b · held_out", 1, True),
    ]
    assert found["weights", "w/std"] == [("a", 0, False), ("b", 1, False)]


def test_restarts_are_told_of_one_run(tmp_path):
    tries = [made.attempt(ended=None), made.attempt(**{"from": 50})]
    run = read_run(made.run(tmp_path, attempts=tries))
    assert {tuple(c.restarts) for s in sections_of([run], ["a"]) for c in s.charts} == {(50,)}
    assert {tuple(c.restarts) for s in sections_of([run] * 2, "ab") for c in s.charts} == {()}


def test_very_many_charts_are_folded_and_have_fewer_points_each(tmp_path):
    rows = {step: {f"weights/{k}": float(step % 7) for k in range(300)} for step in range(1, 500)}
    (section,) = [s for s in sections_of([read_run(made.run(tmp_path, rows))], "a") if s.folded]
    assert (section.title, len(section.charts)) == ("weights", 300)
    assert sum(len(c.lines[0].curve.steps) for c in section.charts) < 120_000


def test_the_main_metrics_begin_with_the_loss(tmp_path):
    run = read_run(made.run(tmp_path, ROWS, **NAMED))
    assert main_metrics([run]) == ["train/loss", "held_out/loss", "train/accuracy", "score"]


def test_the_span_begins_at_zero_unless_all_is_far_from_it(tmp_path):
    assert span_of([read_run(tmp_path)]) == (0, 1)
    assert span_of([read_run(made.run(tmp_path))]) == (0, 100)
    assert span_of([read_run(made.run(tmp_path, {900: {"a": 1.0}, 1000: {"a": 1.0}}))]) == (
        900,
        1000,
    )
