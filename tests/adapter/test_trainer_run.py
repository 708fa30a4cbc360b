"""Runs of a trainer: what it gives to `fit`, and where a run starts."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf
from stepfold.adapter import StopTraining, Trainer, Watcher

from . import digits


class Hooked(Trainer):
    def on_step_end(self, state, metrics, step):
        """Run between steps."""


def test_a_run_has_its_report_next_to_its_metrics(tmp_path):
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


def test_without_json_lines_a_run_has_no_report(tmp_path):
    digits.trainer(output_dir=tmp_path, max_steps=1, report_to=("csv",)).train()
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["metrics.csv"]


def test_metrics_of_an_earlier_run_that_is_not_resumed_are_moved_aside(tmp_path):
    options = {"output_dir": tmp_path, "report_to": ("jsonl",), "do_last_save": False}
    digits.trainer(**options, max_steps=10).train()
    before = (tmp_path / "logs" / "metrics.jsonl").read_text()
    with pytest.warns(UserWarning, match="its files are now in .*previous-1"):
        digits.trainer(**options, max_steps=5).train()
    assert (tmp_path / "logs" / "previous-1" / "metrics.jsonl").read_text() == before
    assert len((tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "fields", [{"early_stopping_patience": 1}, {"metric_for_best_model": "f1"}]
)
def test_fields_that_need_an_evaluation_are_refused_without_one(fields):
    with pytest.raises(sf.ConfigError, match=f"{next(iter(fields))}: expected data to evaluate on"):
        digits.trainer(**fields, given={"dataset_eval": None}).train()


def test_a_metric_that_no_evaluation_measures_is_refused():
    trainer = digits.trainer(metric_for_best_model="f1", eval_steps=5, early_stopping_patience=1)
    with pytest.raises(sf.ConfigError, match=r"one of eval/accuracy, eval/loss, .* got eval/f1"):
        trainer.train()


def test_the_best_may_be_by_another_evaluation(tmp_path):
    less = sf.Evaluation(lambda state: {"cer": -int(state.step)}, every=5, name="generated")
    trainer = digits.trainer(
        output_dir=tmp_path,
        metric_for_best_model="generated/cer",
        greater_is_better=True,
        save_steps=5,
        max_steps=10,
        given={"evaluations": [less]},
    )
    trainer.train()
    assert trainer.best == 5


def test_steps_per_call_gives_the_same_bits():
    wanted = digits.bits(digits.trainer().train().state)
    assert digits.bits(digits.trainer(steps_per_call=4).train().state) == wanted
    with pytest.raises(sf.ConfigError, match="steps_per_call: expected 1 with on_step_start or"):
        digits.trainer(Hooked, steps_per_call=4).train()


def test_more_steps_after_the_end():
    trainer = digits.trainer(max_steps=10)
    trainer.train()
    output = trainer.train(more_steps=5)
    assert (int(output.state.step), output.stopped) == (15, "all 15 steps were done")


# A NaN or inf


@pytest.mark.parametrize("options", [{}, {"performance_mode": True}])
def test_a_nan_ends_the_run_at_the_first_log_point_that_sees_it(options):
    images = np.where(np.arange(200)[:, None] == 7, np.nan, digits.TRAIN["image"])
    data = {**digits.TRAIN, "image": np.float32(images)}
    trainer = digits.trainer(given={"dataset_train": data}, max_steps=100, **options)
    output = trainer.train()
    assert trainer.result.stop_reason.kind == "nonfinite"
    assert "the loss or a gradient was not finite in step" in output.stopped
    assert int(output.state.step) <= 20  # an epoch has 10 steps, and log points are 5 apart
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(output.state.params))


@pytest.mark.parametrize("options", [{}, {"performance_mode": True}])
def test_a_nan_ends_a_run_with_steps_of_a_subclass(options):
    class Own(Trainer):
        def configure_functions(self):
            output = super().configure_functions()

            def step(state, batch):
                loss = jnp.where(state.step == 6, jnp.nan, 1.0)
                return state._replace(step=state.step + 1), {"loss": loss}

            return output.replace(sharded_training_step_function=step)

    trainer = digits.trainer(Own, max_steps=100, **options)
    assert trainer.train().stopped.startswith("train/loss is nan in step 7")
    assert int(trainer.state.step) <= 14
    assert trainer.result.capsule.step == 7


# Watchers


def test_watchers_are_logged_at_their_intervals_with_the_exact_state(tmp_path):
    seen = []
    watchers = [
        Watcher("step", lambda state: state.step, every=10),
        Watcher("bias", lambda state: {"max": state.params["bias"].max()}, every=5),
    ]
    watchers.append(Watcher("seen", lambda state: seen.append(int(state.step)) or 0, every=7))
    trainer = digits.trainer(
        output_dir=tmp_path, report_to=("jsonl",), max_steps=23, given={"watchers": watchers}
    )
    trainer.train()
    assert trainer.history["watch/step"].steps == [10, 20]
    assert list(trainer.history["watch/step"]) == [10, 20]
    assert trainer.history["watch/bias/max"].steps == [5, 10, 15, 20]
    assert seen == [10, 15, 23]  # the first log points at or after 7, 14 and 21
    lines = map(json.loads, (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines())
    assert {line["step"]: line.get("watch/step") for line in lines} == {
        **dict.fromkeys((5, 15, 23)),
        10: 10,
        20: 20,
    }


def test_a_subclass_may_override_log_watchers():
    calls = []

    class Own(Trainer):
        def log_watchers(self, state, step):
            calls.append(step)
            return super().log_watchers(state, step)

    digits.trainer(Own, given={"watchers": [Watcher("one", lambda state: 1.0)]}).train()
    assert calls == [5, 10, 15, 20]


def test_log_watchers_can_be_called_by_hand():
    trainer = digits.trainer(given={"watchers": [Watcher("two", lambda state: 2.0, every=10)]})
    assert trainer.log_watchers(trainer.state, 5) == {}
    assert trainer.log_watchers(trainer.state, 12) == {"watch/two": 2.0}
    assert trainer.log_watchers(trainer.state, 19) == {}


def test_a_watcher_may_stop_the_run_and_its_exception_reaches_the_caller():
    def stop(state):
        raise StopTraining("enough")

    watchers = [Watcher("stop", stop)]
    assert digits.trainer(given={"watchers": watchers}).train().stopped == "enough at step 5"
    trainer = digits.trainer(given={"watchers": [Watcher("bad", lambda state: "text")]})
    with pytest.raises(sf.ConfigError, match="watch/bad: expected a number, got 'text'"):
        trainer.train()


# Where a run starts


@pytest.fixture
def run(tmp_path):
    trainer = digits.trainer(output_dir=tmp_path, save_steps=5, max_steps=10)
    trainer.train()
    return trainer


def test_the_path_of_the_newest_own_checkpoint_is_a_plain_resume(run, tmp_path):
    for path in (tmp_path, tmp_path / "checkpoints" / "10"):
        again = digits.trainer(output_dir=tmp_path, save_steps=5, max_steps=15)
        assert int(again.train(ckpt_path=path).state.step) == 15
        for step in (15,):
            (tmp_path / "checkpoints" / str(step)).rename(tmp_path / f"{path.name}-{step}")
    with pytest.raises(sf.ConfigError, match="is an older checkpoint than step 10 of the same run"):
        run.train(ckpt_path=tmp_path / "checkpoints" / "5")


def test_another_start_needs_another_directory(run, tmp_path):
    with pytest.raises(
        sf.ConfigError, match="model_parameters: expected an output_dir without che"
    ):
        run.train(model_parameters=run.state.params)


def test_an_older_step_of_another_run_is_continued(run, tmp_path):
    whole = digits.trainer(max_steps=10).train().state
    other = digits.trainer(output_dir=tmp_path / "other", max_steps=10)
    output = other.train(ckpt_path=tmp_path / "checkpoints" / "5")
    assert digits.bits(output.state) == digits.bits(whole)


def used(tmp_path, **changes):
    """Train in a folder, and make another trainer that resumes there."""
    digits.trainer(output_dir=tmp_path, max_steps=10, save_steps=5).train()
    return digits.trainer(output_dir=tmp_path, max_steps=20, save_steps=5, **changes)


def test_a_loaded_checkpoint_is_not_silently_ignored(tmp_path):
    other = digits.trainer(output_dir=tmp_path / "other", max_steps=5, seed=7)
    other.train()
    trainer = used(tmp_path / "own")
    trainer.load_checkpoint(tmp_path / "other")
    with pytest.raises(sf.ConfigError, match="goes on from step 10"):
        trainer.train()


def test_a_state_of_the_same_step_is_not_silently_ignored(tmp_path):
    trainer = used(tmp_path)
    zeros = jax.tree.map(jnp.zeros_like, trainer.state.params)
    state = trainer.state._replace(params=zeros, step=trainer.state.step + 10)
    with pytest.raises(sf.ConfigError, match="state: expected"):
        trainer.train(state=state)


def test_the_own_newest_checkpoint_may_be_loaded_before_a_resume(tmp_path):
    trainer = used(tmp_path)
    trainer.load_checkpoint(tmp_path)
    assert int(trainer.train().state.step) == 20


def test_an_older_checkpoint_that_the_arguments_name_is_not_silently_ignored(tmp_path):
    """As `train(ckpt_path=…)` refuses it."""
    trainer = used(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoints" / "5"))
    with pytest.raises(sf.ConfigError, match="is an older checkpoint than step 10"):
        trainer.train()


def test_a_path_without_a_checkpoint_is_refused_though_there_are_own_ones(tmp_path):
    trainer = used(tmp_path, resume_from_checkpoint=str(tmp_path / "nowhere"))
    with pytest.raises(sf.CheckpointError, match="nowhere: expected a checkpoint"):
        trainer.train()


def test_parameters_are_refused_as_a_state(run):
    with pytest.raises(sf.ConfigError, match="state: expected a state, .* as model_parameters"):
        run.train(state=run.state.params)
