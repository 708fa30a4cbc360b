import io
from types import SimpleNamespace

import numpy as np
import pytest

from stepfold.adapter import StopTraining, Trainer
from stepfold.adapter.bars import NullProgressBar, ProgressBar
from stepfold.adapter.calling import is_due, named, show, without_norms

from . import digits


@pytest.fixture(scope="module")
def made():
    return digits.trainer(progress_bar_type="json", training_time_limit="1h")


def test_by_default_nothing_happens(made):
    assert made.on_step_start("state", 1) == "state"
    assert made.on_step_end("state", {}, 1) == ("state", {})
    assert made.on_log({}, 1) is made.start_training_hook() is made.start_evaluation_hook() is None


def test_a_bar_is_of_the_kind_that_was_asked_for(made):
    assert isinstance(made.create_progress_bar(10), ProgressBar)
    for silent in ({"performance_mode": True}, {"progress_bar_type": "none"}):
        assert isinstance(digits.trainer(**silent).create_progress_bar(10), NullProgressBar)
    assert isinstance(made.create_progress_bar(10, disabled=True), NullProgressBar)


def test_a_run_that_is_late_is_ended(made):
    with made.timer("train"):
        assert made.apply_training_hooks({"train/loss": 1.0}) == {"train/loss": 1.0}
    late = digits.trainer(training_time_limit=1e-6)
    with pytest.raises(StopTraining, match="the time limit"), late.timer("train"):
        late.apply_training_hooks({"train/loss": 1.0})


def test_norms_are_written_only_if_they_are_to_be(tmp_path):
    for wanted in (True, False):
        place = tmp_path / str(wanted)
        digits.trainer(output_dir=place, log_grad_norms=wanted, report_to=("jsonl",)).train()
        assert ("grad_norm" in (place / "logs" / "metrics.jsonl").read_text()) == wanted


def test_weights_are_measured_by_path(made):
    found = made.log_weight_distribution(made.state, 1)
    bias = np.asarray(made.state.params["bias"])
    assert found["weights/bias/std"] == pytest.approx(float(bias.std()))


def test_what_a_subclass_writes_anew_is_called(tmp_path):
    told = []

    class Own(Trainer):
        def log_weight_distribution(self, state, step):
            told.append(step)

    digits.trainer(Own, weight_distribution_log_steps=10).train()
    assert told == [10, 20]


def test_names_get_the_mode_once():
    found = named({"loss": 1, "train/loss": 2, "eval/loss": 3, "a/mlperf": 4}, "eval")
    assert found == {"eval/loss": 3.0, "train/loss": 2.0}
    assert without_norms({"train/grad_norm": 1.0, "train/loss": 2.0}) == {"train/loss": 2.0}


def test_train_steps_are_due_each_so_many_and_at_the_end():
    plan = SimpleNamespace(log_every=5, steps=23)
    due = lambda step, every, mode="train": is_due(step, every, plan, mode)
    assert [due(step, 10) for step in (5, 10, 23)] == [False, True, True]
    assert due(7, 5)
    assert due(7, 10, "eval")


def test_a_bar_of_tqdms_will_do():
    from tqdm import tqdm

    with tqdm(total=10, file=io.StringIO()) as bar:
        show({"train/loss": 1.0}, bar, 4)
        show({"train/loss": 1.0}, bar, 6)
        assert bar.n == 6
