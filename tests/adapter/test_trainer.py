import pytest

import stepfold as sf
from stepfold.adapter import Trainer

from . import digits


def test_it_trains_a_second_time_from_where_it_was():
    made = digits.trainer(max_steps=10)
    made.train()
    assert made.train().stopped == "step 10 of 10 was done before"
    state = made.state
    again = digits.trainer(max_steps=20)
    again.train(state=state)
    assert digits.bits(again.state) == digits.bits(digits.trainer(max_steps=20).train().state)


def test_not_to_train_is_said():
    made = digits.trainer(do_train=False)
    assert made.train().stopped == "do_train is False"
    assert int(made.state.step) == 0


def test_what_is_missing_is_said():
    with pytest.raises(sf.ConfigError, match="dataset_train: expected data to train on, got None"):
        digits.trainer(given={"dataset_train": None}).train()
    with pytest.raises(sf.ConfigError, match="dataset_eval: expected data to evaluate on, got Non"):
        digits.trainer(given={"dataset_eval": None}).evaluate()
    with pytest.raises(sf.ConfigError, match="best_state: expected metric_for_best_model and an"):
        _ = digits.trainer().best_state

    class OneStep(Trainer):
        def configure_functions(self):
            return super().configure_functions().replace(sharded_evaluation_step_function=None)

    with pytest.raises(sf.ConfigError, match=r"eval_step_fn: expected a step \(state, batch\)"):
        digits.trainer(OneStep).evaluate()


def test_to_begin_anew_where_there_are_checkpoints_is_refused(tmp_path):
    digits.trainer(output_dir=tmp_path).train()
    with pytest.raises(sf.ConfigError, match="resume=False: expected a directory without checkpo"):
        digits.trainer(output_dir=tmp_path, resume_if_possible=False).train()


def test_checkpoints_hold_the_best_though_others_go(tmp_path):
    made = digits.trainer(
        output_dir=tmp_path,
        save_steps=5,
        save_total_limit=1,
        evaluation_strategy="steps",
        eval_steps=5,
        metric_for_best_model="loss",
    )
    made.train()
    curve = made.history["eval/loss"]
    assert made.best == curve.steps[min(range(len(curve)), key=curve.__getitem__)]


def test_the_weights_are_measured_now_and_then(tmp_path):
    made = digits.trainer(
        output_dir=tmp_path, report_to=("jsonl",), weight_distribution_log_steps=10
    )
    made.train()
    written = (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()
    assert [line.startswith('{"step": 10') for line in written if "weights/kernel/mean" in line]


def test_performance_mode_shows_and_writes_nothing(tmp_path, capfd):
    made = digits.trainer(output_dir=tmp_path, performance_mode=True)
    made.train()
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "logs").exists()


def test_a_state_is_left_after_an_exception_where_nothing_is_saved():
    class Broken(Trainer):
        def on_step_end(self, state, metrics, step):
            if step == 13:
                raise ValueError("broken")

    made = digits.trainer(Broken, max_steps=20, log_steps=5)
    with pytest.raises(ValueError, match="broken"):
        made.train()
    assert int(made.state.step) == 13  # which was donated to no step
    assert made.evaluate()["eval_loss"] > 0


def test_what_was_measured_is_still_known_after_a_second_call():
    made = digits.trainer(max_steps=10)
    made.train()
    before = {name: list(curve) for name, curve in made.history.items()}
    made.train()
    assert {name: list(curve) for name, curve in made.history.items()} == before != {}


def test_an_early_stop_that_cannot_come_is_said():
    """There are no data to evaluate on, and so no eval/loss to wait for."""
    with pytest.raises(sf.ConfigError, match="early_stopping_patience"):
        digits.trainer(
            max_steps=10, early_stopping_patience=1, given={"dataset_eval": None}
        ).train()


def test_a_best_metric_that_nobody_measures_is_said(tmp_path):
    with pytest.raises(sf.ConfigError, match="eval/los.*eval/loss"):
        digits.trainer(
            output_dir=tmp_path, max_steps=10, eval_steps=5, metric_for_best_model="los"
        ).train()


def test_a_seed_that_jax_does_not_take_is_refused_when_it_is_given():
    with pytest.raises(sf.ConfigError, match="seed: expected an integer"):
        digits.trainer(seed=2**70)


def test_left_at_once_it_still_has_a_state(tmp_path):
    """As after a second Ctrl-C, before anything was restored in the place of what was let go."""
    digits.trainer(output_dir=tmp_path, max_steps=5).train()

    class Impatient:
        def open(self, step, total):
            raise KeyboardInterrupt

        def __call__(self, event):
            """Hear nothing."""

    made = digits.trainer(output_dir=tmp_path, max_steps=10, given={"hooks": [Impatient()]})
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert int(made.state.step) == 5
    made.hooks.clear()
    assert made.train().stopped == "all 10 steps were done"
