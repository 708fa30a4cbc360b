"""What a trainer gives to `fit`."""

import json

import pytest

import stepfold as sf
from stepfold.adapter import Trainer, running
from stepfold.adapter.stepping import HookedStep

from . import digits


class Watched(Trainer):
    def on_step_end(self, state, metrics, step):
        """Look at nothing."""


def test_without_functions_around_it_the_step_is_one_that_fit_compiles():
    assert not hasattr(running.watched_step(digits.trainer()), "lower")
    assert isinstance(running.watched_step(digits.trainer(Watched)), HookedStep)


def test_a_run_has_its_page_beside_its_metrics(tmp_path):
    digits.trainer(output_dir=tmp_path, max_steps=10, report_to=("jsonl", "csv")).train()
    logs = tmp_path / "logs"
    names = sorted(path.name for path in logs.iterdir())
    assert names == ["metrics.csv", "metrics.jsonl", "report.html", "run.json"]
    (attempt,) = json.loads((logs / "run.json").read_text())["attempts"]
    assert (attempt["to"], attempt["stop"]["message"]) == (10, "all 10 steps were done")
    assert "train/loss" in (logs / "report.html").read_text()
    lines = (logs / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == [5, 10]  # each once, by one writer


def test_without_its_metrics_a_run_has_no_page(tmp_path):
    digits.trainer(output_dir=tmp_path, max_steps=1, report_to=("csv",)).train()
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["metrics.csv"]


@pytest.mark.parametrize(
    "fields", [{"early_stopping_patience": 1}, {"metric_for_best_model": "f1"}]
)
def test_what_hangs_on_an_evaluation_that_there_is_not_is_said(fields):
    with pytest.raises(sf.ConfigError, match=f"{next(iter(fields))}: expected data to evaluate on"):
        digits.trainer(**fields, given={"dataset_eval": None}).train()


def test_a_metric_that_no_evaluation_measures_is_said():
    made = digits.trainer(metric_for_best_model="f1", eval_steps=5, early_stopping_patience=1)
    with pytest.raises(sf.ConfigError, match=r"one of eval/accuracy, eval/loss, .* got eval/f1"):
        made.train()


def test_the_best_may_be_by_another_evaluation(tmp_path):
    less = sf.Evaluation(lambda state: {"cer": -int(state.step)}, every=5, name="generated")
    made = digits.trainer(
        output_dir=tmp_path,
        metric_for_best_model="generated/cer",
        greater_is_better=True,
        save_steps=5,
        max_steps=10,
        given={"evaluations": [less]},
    )
    made.train()
    assert made.best == 5
