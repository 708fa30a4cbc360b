"""Runs of a trainer: what it gives to `fit`, and where a run starts."""

import itertools
import json
import shutil
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.clients.rows import shows

import stepfold as sf
from stepfold.adapter import (
    StopTraining,
    Trainer,
    TrainerConfigureDataloaderOutput,
    TrainerConfigureModelOutput,
    TrainerOutput,
    Watcher,
)

from . import digits


def logged_steps(output_dir):
    lines = (output_dir / "logs" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


class Hooked(Trainer):
    def on_step_end(self, state, metrics, step):
        """Run between steps."""


def test_a_run_has_its_report_and_its_arguments_next_to_its_metrics(tmp_path):
    options = {"output_dir": tmp_path, "report_to": ("jsonl", "csv")}
    digits.train_only(max_steps=10, **options).train()
    logs = tmp_path / "logs"
    names = sorted(path.name for path in logs.iterdir())
    assert names == ["metrics.csv", "metrics.jsonl", "report.html", "run.json"]
    written = json.loads((logs / "run.json").read_text())
    (attempt,) = written["attempts"]
    assert (attempt["to"], attempt["stop"]["message"]) == (10, "all 10 steps were done")
    assert (written["config"]["learning_rate"], "max_steps" in written["config"]) == (0.01, False)
    assert "train/loss" in (logs / "report.html").read_text()
    assert logged_steps(tmp_path) == [5, 10]  # each once, by one writer
    with pytest.warns(UserWarning, match="config: changed .* weight_decay from .* to 0.1"):
        digits.train_only(max_steps=15, weight_decay=0.1, **options).train()


def test_metrics_of_an_earlier_run_that_is_not_resumed_are_moved_aside(tmp_path):
    options = {"output_dir": tmp_path, "report_to": ("jsonl",), "do_last_save": False}
    digits.train_only(**options, max_steps=10).train()
    before = (tmp_path / "logs" / "metrics.jsonl").read_text()
    with pytest.warns(UserWarning, match="its files are now in .*previous-1"):
        digits.train_only(**options, max_steps=5).train()
    assert (tmp_path / "logs" / "previous-1" / "metrics.jsonl").read_text() == before
    assert len((tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "fields", [{"early_stopping_patience": 1}, {"metric_for_best_model": "f1"}]
)
def test_fields_that_need_an_evaluation_are_refused_without_one(fields, tmp_path):
    with pytest.raises(
        sf.errors.ConfigError, match=f"{next(iter(fields))}: expected data to evaluate on"
    ):
        digits.trainer(**fields, output_dir=tmp_path, given={"dataset_eval": None}).train()


def test_a_metric_that_no_evaluation_measures_is_refused():
    trainer = digits.trainer(metric_for_best_model="f1", eval_steps=5, early_stopping_patience=1)
    with pytest.raises(
        sf.errors.ConfigError, match=r"one of eval/accuracy, eval/loss, .* got eval/f1"
    ):
        trainer.train()


def test_the_best_state_so_far_is_known_during_a_run_and_after_an_exception():
    steps = []

    class Own(Trainer):
        def on_log(self, metrics, step):
            if "eval/loss" in metrics and step > 5:
                steps.append(int(self.best_state.step))
            if step == 20:
                raise RuntimeError("cut")

    trainer = digits.trainer(Own, eval_steps=5, early_stopping_patience=9)
    with pytest.raises(RuntimeError, match="cut"):
        trainer.train()
    losses = trainer.history["eval/loss"]
    assert losses.steps == [5, 10, 15]
    best = [losses.steps[int(np.argmin(losses[:count]))] for count in (1, 2, 3)]
    assert [*steps, int(trainer.best_state.step)] == best


@pytest.mark.full
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


@pytest.mark.filterwarnings("ignore:.*since no live process makes it")
def test_a_remote_evaluation_is_logged_when_its_result_arrives(tmp_path):
    item = sf.Evaluation(lambda state: {"one": 1.0}, every=5, name="other", remote=True)

    class Logged(Trainer):
        seen = ()

        def on_log(self, metrics, step):
            self.seen += ((step, [*metrics]),) if "other/one" in metrics else ()
            if step == 10 and not self.seen:
                like = jax.eval_shape(lambda: self.model_state)
                while not sf.evaluate_run(tmp_path, like, item, follow=False).metrics:
                    pass  # step 5 is being saved

    given = {"evaluations": [item]}
    trainer = digits.train_only(Logged, given, output_dir=tmp_path, max_steps=20, save_steps=20)
    trainer.train()
    assert trainer.seen == ((10, ["other/one"]),)
    assert trainer.history["other/one"].steps == [5]


def test_methods_around_a_step_need_single_steps():
    with pytest.raises(
        sf.errors.ConfigError, match="steps_per_call: expected 1 with on_step_start or"
    ):
        digits.train_only(Hooked, steps_per_call=4).train()


# A NaN or inf

QUIET = {"performance_mode": True}


@shows(
    "Trainer Protocol",
    "Best practices for implementation",
    {"NaN or inf": "ends the run with the last finite state"},
)
@pytest.mark.parametrize("options", [{}, pytest.param(QUIET, marks=pytest.mark.full)])
def test_a_nan_ends_the_run_at_the_first_log_point_that_sees_it(options):
    images = np.where(np.arange(200)[:, None] == 7, np.nan, digits.TRAIN["image"])
    data = {**digits.TRAIN, "image": np.float32(images)}
    trainer = digits.train_only(given={"dataset_train": data}, max_steps=100, **options)
    output = trainer.train()
    assert trainer.result.stop_reason.kind == "nonfinite"
    assert "the loss or a gradient was not finite in step" in output.stopped
    assert int(output.state.step) <= 20  # an epoch has 10 steps, and log points are 5 apart
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(output.state.params))


@pytest.mark.parametrize("options", [QUIET, pytest.param({}, marks=pytest.mark.full)])
def test_a_nan_ends_a_run_with_steps_of_a_subclass(options):
    class Own(Trainer):
        def configure_functions(self):
            output = super().configure_functions()

            def step(state, batch):
                loss = jnp.where(state.step == 6, jnp.nan, 1.0)
                return state._replace(step=state.step + 1), {"loss": loss}

            return output.replace(sharded_training_step_function=step)

    trainer = digits.train_only(Own, max_steps=100, **options)
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
    trainer = digits.train_only(
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


def test_log_watchers_can_be_called_by_hand():
    trainer = digits.train_only(given={"watchers": [Watcher("two", lambda state: 2.0, every=10)]})
    assert trainer.log_watchers(trainer.state, 5) == {}
    assert trainer.log_watchers(trainer.state, 12) == {"watch/two": 2.0}
    assert trainer.log_watchers(trainer.state, 19) == {}


def test_a_watcher_may_stop_the_run_and_its_exception_reaches_the_caller():
    def stop(state):
        raise StopTraining("enough")

    watchers = [Watcher("stop", stop)]
    assert (
        digits.train_only(given={"watchers": watchers}).train().stopped
        == "enough; stopped at step 5"
    )
    trainer = digits.train_only(given={"watchers": [Watcher("bad", lambda state: "text")]})
    with pytest.raises(sf.errors.ConfigError, match="watch/bad: expected a number, got 'text'"):
        trainer.train()


# Where a run starts


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the folder of a run of ten steps."""
    folder = tmp_path_factory.mktemp("finished")
    digits.train_only(output_dir=folder, save_steps=5, max_steps=10).train()
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """Return a trainer in a copy of that folder."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return digits.train_only(output_dir=tmp_path, save_steps=5, max_steps=10)


def test_the_path_of_the_newest_own_checkpoint_is_a_plain_resume(run, tmp_path):
    with pytest.raises(
        sf.errors.ConfigError, match="is an older checkpoint than step 10 of the same run"
    ):
        run.train(ckpt_path=tmp_path / "checkpoints" / "5")
    again = digits.train_only(output_dir=tmp_path, save_steps=5, max_steps=15)
    assert int(again.train(ckpt_path=tmp_path / "checkpoints" / "10").state.step) == 15


@pytest.mark.full
@pytest.mark.parametrize("name", ["resume_from_checkpoint", "ckpt_path"])
def test_a_path_resumes_also_without_resume_if_possible(used, tmp_path, name):
    is_field = name == "resume_from_checkpoint"
    fields = {"resume_if_possible": False, **({name: str(tmp_path)} if is_field else {})}
    output = used(**fields).train(**{} if is_field else {name: tmp_path})
    assert int(output.state.step) == 20


def test_another_start_needs_another_directory(run, tmp_path):
    with pytest.raises(
        sf.errors.ConfigError, match="model_parameters: expected an output_dir without che"
    ):
        run.train(model_parameters=run.state.params)


@pytest.mark.full
def test_an_older_step_of_another_run_is_continued(run, tmp_path):
    whole = digits.train_only(max_steps=10).train().state
    other = digits.train_only(output_dir=tmp_path / "other", max_steps=10)
    output = other.train(ckpt_path=tmp_path / "checkpoints" / "5")
    assert digits.bits(output.state) == digits.bits(whole)


@pytest.fixture
def used(finished, tmp_path):
    """Make trainers that resume in a copy of the folder of a finished run."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return lambda **changes: digits.train_only(
        **{"output_dir": tmp_path, "max_steps": 20, "save_steps": 5, **changes}
    )


def test_a_loaded_checkpoint_is_not_silently_ignored(used, tmp_path):
    other = digits.train_only(output_dir=tmp_path / "other", max_steps=5, seed=7)
    other.train()
    trainer = used()
    trainer.load_checkpoint(tmp_path / "other")
    with pytest.raises(sf.errors.ConfigError, match="resumes from step 10"):
        trainer.train()


def test_a_state_of_the_same_step_is_not_silently_ignored(used, tmp_path):
    trainer = used()
    zeros = jax.tree.map(jnp.zeros_like, trainer.state.params)
    state = trainer.state._replace(params=zeros, step=trainer.state.step + 10)
    with pytest.raises(sf.errors.ConfigError, match="state: expected"):
        trainer.train(state=state)


@pytest.mark.full
def test_the_own_newest_checkpoint_may_be_loaded_before_a_resume(used, tmp_path):
    trainer = used()
    trainer.load_checkpoint(tmp_path)
    assert int(trainer.train().state.step) == 20


@pytest.mark.full
def test_a_resume_frees_the_initial_state(used):
    kernel = None
    freed = []

    class Own(Trainer):
        def on_log(self, metrics, step):
            freed.append(kernel() is None or kernel().is_deleted())

    trainer = used(kind=Own)
    kernel = weakref.ref(trainer.state.params["kernel"])
    trainer.train()
    assert freed == [True, True]


def test_an_older_checkpoint_that_the_arguments_name_is_not_silently_ignored(used, tmp_path):
    """As `train(ckpt_path=…)` refuses it."""
    trainer = used(resume_from_checkpoint=str(tmp_path / "checkpoints" / "5"))
    with pytest.raises(sf.errors.ConfigError, match="is an older checkpoint than step 10"):
        trainer.train()


def test_a_path_without_a_checkpoint_is_refused_though_there_are_own_ones(used, tmp_path):
    trainer = used(resume_from_checkpoint=str(tmp_path / "nowhere"))
    with pytest.raises(sf.errors.CheckpointError, match="nowhere: expected a checkpoint"):
        trainer.train()


def test_parameters_are_refused_as_a_state(run):
    with pytest.raises(
        sf.errors.ConfigError, match="state: expected a state, .* as model_parameters"
    ):
        run.train(state=run.state.params)


# Calls one after the other


def test_a_path_to_resume_from_is_used_once(run, tmp_path):
    trainer = digits.train_only(resume_from_checkpoint=str(tmp_path), max_steps=15)
    assert int(trainer.train().state.step) == 15
    assert int(trainer.train(more_steps=5).state.step) == 20


def test_a_run_without_resume_may_be_continued(tmp_path):
    trainer = digits.train_only(output_dir=tmp_path, max_steps=5, resume_from_checkpoint=False)
    trainer.train()
    assert int(trainer.train(more_steps=2).state.step) == 7
    with pytest.raises(sf.errors.ConfigError, match="resume=False"):
        digits.train_only(output_dir=tmp_path, max_steps=9, resume_from_checkpoint=False).train()


def test_an_assigned_state_is_not_silently_ignored(run):
    run.state = jax.tree.map(jnp.zeros_like, run.state)
    with pytest.raises(
        sf.errors.ConfigError, match="state: expected an output_dir without checkpoints"
    ):
        run.train(more_steps=2)


def test_an_assigned_state_of_another_structure_is_refused(run):
    params = {**run.state.params, "more": jnp.zeros(2)}
    for state in (run.state._replace(params=params), run.state._replace(key=None), {"w": 1.0}):
        run.state = state
        with pytest.raises(
            sf.errors.ConfigError, match="state: expected an output_dir without checkp"
        ):
            run.train(more_steps=2)


def test_the_program_of_the_step_is_reused():
    trainer = digits.train_only(max_steps=5)
    trainer.train()
    trainer.train(more_steps=5)
    assert trainer.train_tracker.compilations == 1


# Why a run stops


def test_the_reason_of_stop_training():
    class Stops(Trainer):
        def on_log(self, metrics, step):
            raise StopTraining("flat", "plateau")

    trainer = digits.train_only(Stops)
    trainer.train()
    assert trainer.result.stop_reason.kind == "plateau"
    assert str(trainer.result.stop_reason).startswith("flat; stopped at step ")


def test_the_kind_of_a_time_limit():
    trainer = digits.train_only(training_time_limit=1e-3, max_steps=100)
    trainer.train()
    assert trainer.result.stop_reason.kind == "time_limit"


def test_a_loss_scale_may_skip_all_steps_of_an_interval():
    def loss_fn(params, batch, key):
        return (params * 1e4).sum()

    given = {"model": jnp.ones(2), "loss_fn": loss_fn}
    trainer = digits.train_only(mixed_precision="fp16", log_steps=1, optimizer="sgd", given=given)
    assert trainer.train().stopped == "all 20 steps were done"
    assert trainer.history["train/skipped"][0] == 1.0


def test_a_subclass_that_calls_super_keeps_the_stop_at_a_nan():
    class Own(Trainer):
        def configure_functions(self):
            return super().configure_functions()

    images = np.where(np.arange(200)[:, None] == 7, np.nan, digits.TRAIN["image"])
    data = {**digits.TRAIN, "image": np.float32(images)}
    trainer = digits.trainer(Own, given={"dataset_train": data}, max_steps=100)
    trainer.compile_aot()
    trainer.train()
    assert trainer.result.stop_reason.kind == "nonfinite"


# Data of a subclass


def batch():
    rows = {name: values[:20] for name, values in digits.TRAIN.items()}
    return {**rows, "mask": np.ones(20, bool)}


def of_loaders(*loaders, **changes):
    class Own(Trainer):
        def configure_dataloaders(self):
            return TrainerConfigureDataloaderOutput(*loaders)

    return digits.trainer(Own, given={"dataset_train": None, "dataset_eval": None}, **changes)


def test_a_list_of_batches_is_iterated_once_for_each_epoch():
    trainer = of_loaders([batch()] * 3, num_train_epochs=3)
    assert int(trainer.train().state.step) == 9


def test_an_evaluation_of_a_subclass_has_at_most_so_many_batches():
    seen = []

    def batches():
        for index in itertools.count():
            seen.append(index)
            yield batch()

    trainer = of_loaders([batch()] * 3, 3, batches, 2)
    assert trainer.evaluate()["eval_loss"] > 0
    assert len(seen) == 2


def test_compile_aot_with_loaders_of_a_subclass():
    trainer = of_loaders(iter([batch()] * 4), 4, lambda: [batch()])
    assert trainer.compile_aot()
    assert int(trainer.train().state.step) == 4
    with pytest.raises(
        sf.errors.ConfigError, match="dataloader_eval: expected a batch to compile for"
    ):
        of_loaders(iter([batch()]), 4, list).compile_aot()
    with pytest.raises(sf.errors.ConfigError, match="steps_per_call: expected 1 for compile_aot"):
        of_loaders([batch()], steps_per_call=2).compile_aot()


def test_data_without_an_end_need_a_number_of_steps():
    mixture = sf.mix([(digits.TRAIN, 1.0)])
    trainer = digits.train_only(
        given={"dataset_train": mixture}, num_train_epochs=1, shuffle_train_dataset=False
    )
    with pytest.raises(
        sf.errors.ConfigError, match="max_steps: expected a number of steps for data"
    ):
        trainer.train()


def test_a_checkpoint_manager_needs_a_directory():
    class Own(Trainer):
        def configure_functions(self):
            return super().configure_functions().replace(checkpoint_manager=sf.Checkpoints(every=5))

    with pytest.raises(
        sf.errors.ConfigError, match="checkpoint_manager: expected one with a directory"
    ):
        digits.trainer(Own)


def test_a_config_and_a_scheduler_of_a_subclass_are_used():
    schedule = lambda step: 0.5

    class Own(Trainer):
        def configure_model(self):
            return TrainerConfigureModelOutput(self.model, None, schedule)

    trainer = digits.train_only(
        Own, given={"config": {"layers": 1}}, learning_rate=5e-5, max_steps=1
    )
    assert (trainer.config, trainer.scheduler) == ({"layers": 1}, schedule)
    trainer.train()
    assert trainer.history["train/learning_rate"] == [0.5]


def test_log_watchers_of_a_subclass_is_called_without_watchers():
    steps = []

    class Own(Trainer):
        def log_watchers(self, state, step):
            steps.append((step, int(state.step)))
            return {"watch/mine": 1.0}

    trainer = digits.train_only(Own, max_steps=10)
    trainer.train()
    assert steps == [(5, 5), (10, 10)]
    assert trainer.history["watch/mine"].steps == [5, 10]
    with pytest.raises(sf.errors.ConfigError, match="watchers: expected different names, got a, a"):
        digits.train_only(given={"watchers": [Watcher("a", len), Watcher("a", len)]})


@pytest.mark.full
def test_checkpoints_of_a_trainer_in_object_storage(tmp_path):
    url = f"file://{tmp_path}/bucket"

    class InBucket(Trainer):
        def configure_functions(self):
            manager = sf.Checkpoints(url, every=5)
            return super().configure_functions().replace(checkpoint_manager=manager)

    output = digits.trainer(InBucket, max_steps=5).train()
    assert output.checkpoint_path == f"{url}/5"
    again = TrainerOutput.from_json(output.to_json(), like=output.state)
    assert digits.bits(again.state) == digits.bits(output.state)
    resumed = digits.trainer(InBucket, max_steps=10)
    resumed.train()
    assert resumed.result.resumed == 5
    assert sf.checkpoint.verify(url) == {5: [], 10: []}
    other = digits.trainer(max_steps=12)
    other.train(ckpt_path=output.checkpoint_path)
    assert int(other.state.step) == 12
    with pytest.raises(sf.errors.ConfigError, match="5 is an older checkpoint than step 10"):
        digits.trainer(InBucket, max_steps=12).train(ckpt_path=f"{url}/5")


# A schedule that reacts to evaluations


def test_a_plateau_of_the_evaluation_loss_reduces_the_rate_of_a_trainer(tmp_path):
    options = {"factor": 0.1, "patience": 1, "rtol": 0.99}
    changes = {"scheduler": "warmup_reduce_on_plateau", "scheduler_kwargs": options}
    changes |= {
        "warmup_steps": 2,
        "eval_steps": 5,
        "output_dir": str(tmp_path),
        "report_to": ("jsonl",),
    }
    trainer = digits.trainer(**changes, mixed_precision="bf16")
    trainer.train()
    assert trainer.history["train/learning_rate"] == pytest.approx([7e-3, 1e-2, 1e-3, 1e-4])
    reasons = json.loads((tmp_path / "logs/run.json").read_text())["replacements"]
    assert [step for step, _ in reasons][:3] == [5, 10, 15]
    assert reasons[1][1].startswith("the learning rate is scaled by 0.1 after eval/loss ")
    nothing = {"given": {"dataset_eval": None}}
    with pytest.raises(
        sf.errors.ConfigError, match="scheduler: expected data to evaluate on, to measure"
    ):
        digits.trainer(scheduler="reduce_on_plateau", **nothing).train()
    with pytest.raises(
        sf.errors.ConfigError, match="scheduler: expected eval/loss to be measured during"
    ):
        digits.trainer(scheduler="reduce_on_plateau").train()


@pytest.mark.parametrize(
    "options", [{"factor": 2.0}, {"patience": 0.5}, {"cooldown": 1.5}, {"rtol": 2.0}, {"gamma": 1}]
)
def test_options_of_a_plateau_are_checked(options):
    with pytest.raises(sf.errors.ConfigError, match="scheduler_kwargs"):
        digits.arguments(scheduler="reduce_on_plateau", scheduler_kwargs=options)
    with pytest.raises(sf.errors.ConfigError, match="scheduler.*learning_rate_end"):
        digits.arguments(scheduler="reduce_on_plateau", learning_rate_end=1e-4)
