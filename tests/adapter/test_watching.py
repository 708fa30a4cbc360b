import pytest

import stepfold as sf
from stepfold.adapter import StopTraining, Trainer
from stepfold.adapter.watching import by_epoch
from stepfold.loop.metrics import History

from . import digits


def test_words_of_any_of_its_methods_end_the_run():
    class Enough(Trainer):
        def on_log(self, metrics, step):
            if step >= 10:
                raise StopTraining("enough")

    made = digits.trainer(Enough, max_steps=50)
    assert made.train().stopped.startswith("enough at step")
    assert int(made.state.step) < 50


def test_metrics_that_a_method_changed_are_those_that_are_shown(tmp_path):
    class Changed(Trainer):
        def apply_training_hooks(self, metrics):
            return {**metrics, "train/added": 1.0}

    digits.trainer(Changed, output_dir=tmp_path, report_to=("jsonl",)).train()
    assert '"train/added": 1.0' in (tmp_path / "logs" / "metrics.jsonl").read_text()


def test_the_trainers_state_is_that_of_the_run_while_it_runs():
    steps = []

    class Looks(Trainer):
        def on_log(self, metrics, step):
            steps.append((step, int(self.state.step)))
            assert float(self.state.params["bias"].sum()) is not None

    digits.trainer(Looks, max_steps=10).train()
    assert [step for step, _ in steps] == [5, 10, 10]
    assert all(step <= of_state <= step + 4 for step, of_state in steps)


def test_epochs_are_counted_where_they_are_known():
    made = digits.trainer(num_train_epochs=2)
    made.train()
    assert made.epochs_done == 2


def test_an_epoch_is_averaged_by_its_steps():
    history = History()
    for step, loss in ((3, 1.0), (4, 5.0), (8, 2.0)):
        history.add(step, {"train/loss": loss})
    assert by_epoch(history, 4) == {"train_loss": [2.0, 2.0]}


def test_a_bar_of_ones_own_is_the_one_that_is_shown():
    class Bar:
        step, closed = 0, False

        def set_postfix(self, values):
            self.values = values

        def update(self, n):
            self.step += n

        def close(self):
            self.closed = True

    bar = Bar()

    class Own(Trainer):
        def create_progress_bar(self, total, desc="", disabled=False):
            assert (total, desc, disabled) == (20, "model", False)
            return bar

    digits.trainer(Own).train()
    assert (bar.step, bar.closed) == (20, True)
    assert "eval/loss" in bar.values


def test_an_exception_of_a_method_reaches_the_caller():
    class Fails(Trainer):
        def log_metrics(self, metrics, pbar, step, mode="train"):
            raise sf.DataError("cut here")

    made = digits.trainer(Fails)
    with pytest.raises(sf.DataError, match="cut here"):
        made.train()
    assert made.stopped == "DataError: cut here"
