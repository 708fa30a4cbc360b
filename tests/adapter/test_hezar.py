"""The trainer that Hezar documents: its methods, what subclasses override, and refusals."""

import dataclasses
import io
import itertools
import math
import re
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.adapter.digits import TEST, TRAIN, bits, init
from tests.clients.rows import shows
from tests.small import full_but

import stepfold as sf
from stepfold.adapter.hezar import MetricConfig, Model, Trainer, TrainerConfig
from stepfold.adapter.hezar_config import make_arguments
from stepfold.adapter.hezar_metrics import MetricsHandler, edit_distance, error_rate
from stepfold.core.metric_modes import known_mode
from stepfold.core.precision import LossScaleState

pytestmark = pytest.mark.usefixtures("standard_promotion")


nll = optax.softmax_cross_entropy_with_integer_labels


def apply(params, image):
    return image @ params["kernel"] + params["bias"]


MODEL = Model(apply, init(jax.random.key(0)), nll)


def rows(data):
    return {"image": data["image"], "labels": data["label"]}


def config(**changes):
    usual = {"num_epochs": 2, "batch_size": 20, "learning_rate": 1e-2, "log_steps": 5}
    return TrainerConfig(**usual | changes)


def made(kind=Trainer, given=None, **changes):
    """Make a trainer; `changes` are fields of the config, `given` other arguments."""
    usual = {"model": MODEL, "train_dataset": rows(TRAIN), "eval_dataset": rows(TEST)}
    return kind(config(**changes), **usual | (given or {}))


def train_only(kind=Trainer, given=None, **changes):
    return made(kind, {"eval_dataset": None, **(given or {})}, **changes)


def exact_loss(params, data=TEST):
    return float(nll(apply(params, data["image"]), data["label"]).mean())


def predictions_of(params):
    return np.asarray(apply(params, TEST["image"]).argmax(-1))


def interrupted_at(batch):
    """Make a trainer that is interrupted when it prepares a batch."""

    class Interrupted(Trainer):
        count = 0

        def prepare_input_batch(self, input_batch):
            self.count += 1
            if self.count == batch:
                raise KeyboardInterrupt
            return input_batch

    return Interrupted


# The run


@shows("Hezar", "TrainerConfig", {"`seed`": "42: of the order of examples and the keys of steps"})
def test_a_run_has_the_bits_of_fit():
    tx = optax.adam(1e-2)
    step = sf.make_train_step(
        lambda params, batch, key: sf.mean(nll(apply(params, batch["image"]), batch["labels"])), tx
    )
    batches = sf.batches(rows(TRAIN), 20, seed=42)
    state = sf.init_state(MODEL.params, tx, jax.random.key(42))
    result = sf.fit(jax.jit(step), state, batches, steps=20)
    trainer = train_only()
    trainer.train()
    assert int(trainer.state.step) == 20
    assert bits(trainer.state.params) == bits(result.state.params)


@shows("Hezar", "TrainerConfig", {"`log_steps`": "the same; 10 by default"})
@shows("Hezar", "Initialization", {"loss tracker": "`trainer.loss_tracker`"})
def test_train_returns_the_average_loss_since_the_start():
    trainer = train_only(log_steps=1)
    average = trainer.train()
    assert average == pytest.approx(np.mean(trainer.result.history["train/loss"]), rel=1e-6)
    assert trainer.loss_tracker.average == average
    assert trainer.result.history["train/loss"].steps == [*range(1, 21)]
    assert train_only(log_steps=7).train() == pytest.approx(average, rel=1e-6)
    assert TrainerConfig(num_epochs=1).log_steps == 10


@shows("Hezar", "Training loop", {"trackers": "updated at log points"})
def test_trackers_are_updated_at_log_points():
    averages = []

    class Own(Trainer):
        def prepare_input_batch(self, input_batch):
            averages.append(self.loss_tracker.average)
            return input_batch

    trainer = train_only(Own, num_dataloader_workers=0, num_epochs=2)
    averages.append(trainer.train())
    distinct = {average for average in averages if not math.isnan(average)}
    assert len(distinct) == 3  # of 5, 10 and 20 steps; a log point is read at the next one


@shows(
    "Hezar",
    "TrainerConfig",
    {
        "`num_epochs`": "the same; or `max_steps` alone",
        "`max_steps`": "the maximum, together with `num_epochs`",
    },
)
def test_max_steps_limits_the_epochs():
    for changes, steps in (
        ({"max_steps": 5}, 5),
        ({"max_steps": 50}, 20),
        ({"num_epochs": None, "max_steps": 23}, 23),
    ):
        trainer = train_only(**changes)
        trainer.train()
        assert int(trainer.state.step) == steps


def test_a_warmup_may_be_longer_than_an_epoch():
    changes = {"num_epochs": None, "max_steps": 23, "lr_scheduler": "linear"}
    trainer = train_only(**changes, lr_scheduler_kwargs={"warmup_steps": 12})  # 10 are an epoch
    assert trainer.lr_scheduler(12) == pytest.approx(0.01)
    with pytest.raises(
        sf.errors.ConfigError, match="warmup_steps: expected fewer than the 23 steps"
    ):
        train_only(**changes, lr_scheduler_kwargs={"warmup_steps": 23})


@shows("Hezar", "Initialization", {"TensorBoard and CSV": "the same, in `logs_dir`"})
@shows("Hezar", "Training loop", {"saves and logs by steps": "the same"})
@shows("Hezar", "Evaluation loop", {"after each epoch": "the same"})
@shows("Hezar", "After an epoch, resuming", {"also each `save_steps`": "the same"})
def test_evaluations_and_saves_are_those_of_each_epoch(tmp_path):
    trainer = made(output_dir=str(tmp_path), save_steps=4, num_epochs=2)
    trainer.train()
    assert trainer.result.history["eval/loss"].steps == [10, 20]
    assert trainer.result.history["train/loss"].steps == [5, 10, 15, 20]
    steps = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir() if path.is_dir())
    assert steps == [4, 8, 10, 12, 16, 20]
    logs = tmp_path / "logs"
    assert "eval/loss" in (logs / "metrics.csv").read_text().splitlines()[0]
    assert [*(logs / "tensorboard").glob("*tfevents*")]


@shows(
    "Hezar",
    "TrainerConfig",
    {"`save_steps`": "the same; 0 and None save at the ends of epochs alone"},
)
@shows("Hezar", "After an epoch, resuming", {"a checkpoint after each epoch": "the same"})
@pytest.mark.parametrize("save_steps", full_but([0], [0, None]))
def test_without_save_steps_each_epoch_is_saved(tmp_path, save_steps):
    made(output_dir=str(tmp_path), save_steps=save_steps, num_epochs=3).train()
    assert sorted(sf.checkpoint.verify(tmp_path / "checkpoints")) == [10, 20, 30]


@shows("Hezar", "TrainerConfig", {"`checkpoints_dir`": "the same", "`logs_dir`": "the same"})
def test_folders_have_the_names_of_the_config(tmp_path):
    made(output_dir=tmp_path, checkpoints_dir="c", logs_dir="l", num_epochs=1).train()
    assert {path.name for path in tmp_path.iterdir()} == {"c", "l"}
    assert (tmp_path / "c" / "10").is_dir()


@pytest.mark.full
@shows(
    "Hezar",
    "TrainerConfig",
    {"`output_dir`": "the same; without it nothing is written", "`do_evaluate`": "the same"},
)
def test_without_evaluation_or_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = made(do_evaluate=False)
    trainer.train()
    assert not [*tmp_path.iterdir()]
    assert "eval/loss" not in trainer.result.history
    assert trainer.evaluate() == {"loss": pytest.approx(exact_loss(trainer.model.params), rel=1e-6)}


def test_a_second_call_does_nothing_more():
    trainer = train_only()
    first = trainer.train()
    before = bits(trainer.state)
    with pytest.warns(UserWarning, match="nothing was trained: step 20 of 20"):
        assert trainer.train() == first
    assert bits(trainer.state) == before


@pytest.mark.full
@shows(
    "Hezar",
    "TrainerConfig",
    {
        "`num_dataloader_workers`": "4: the number of batches that a thread makes ahead, with the "
        "same bits for each number"
    },
)
def test_the_bits_do_not_depend_on_workers():
    states = []
    for workers in (0, 1, 4):
        trainer = train_only(num_dataloader_workers=workers)
        trainer.train()
        states.append(bits(trainer.state))
    assert states[0] == states[1] == states[2]
    assert TrainerConfig(num_epochs=1).num_dataloader_workers == 4


@shows(
    "Hezar",
    "Initialization",
    {
        "global seeding": "no global generator is seeded, numpy's included; all that is random "
        "here follows from `seed`"
    },
)
@shows("Hezar", "Training loop", {"same order among runs": "by `seed`"})
def test_the_seed_decides_the_order_and_leaves_numpy_alone():
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    runs = [train_only(seed=seed) for seed in (42, 42, 7)]
    for trainer in runs:
        trainer.train()
    same, again, other = (bits(trainer.state.params) for trainer in runs)
    assert same == again != other
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002


@shows("Hezar", "TrainerConfig", {"`dataloader_shuffle`": "the same"})
def test_without_shuffling_examples_keep_their_order():
    trainer = train_only(dataloader_shuffle=False)
    np.testing.assert_array_equal(next(trainer.train_dataloader)["labels"], TRAIN["label"][:20])


@pytest.mark.full
@shows(
    "Hezar",
    "After an epoch, resuming",
    {"steps of an epoch": "`len(train_dataset) // batch_size`, of the effective batch"},
)
def test_accumulation_has_the_effective_batch():
    """`gradient_accumulation_steps=4` and batches of 5 are one batch of 20."""
    accumulated = train_only(batch_size=5, gradient_accumulation_steps=4)
    plain = train_only(batch_size=20)
    assert len(next(accumulated.train_dataloader)["labels"]) == 20
    accumulated = train_only(batch_size=5, gradient_accumulation_steps=4)
    for trainer in (accumulated, plain):
        trainer.train()
    assert int(accumulated.state.step) == int(plain.state.step) == 20
    for one, other in zip(
        *map(jax.tree.leaves, (accumulated.model.params, plain.model.params)), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-4)


@shows("Hezar", "Training loop", {"moving average of the loss in the bar": "the same"})
def test_the_bar_shows_the_average_loss(monkeypatch):
    terminal = type("Terminal", (io.StringIO,), {"isatty": lambda self: True})()
    monkeypatch.setattr(sys, "stderr", terminal)
    trainer = train_only(log_steps=1)
    average = trainer.train()
    shown = re.findall(r"loss[=:] ?([\d.]+)", terminal.getvalue())
    assert float(shown[-1]) == pytest.approx(average, rel=0.1)
    assert float(shown[-1]) > trainer.result.history["train/loss"][-1]


@shows(
    "Hezar",
    "TrainerConfig",
    {"`mixed_precision`": "`bf16`, `fp16` with a dynamic loss scale, `full`"},
)
@pytest.mark.parametrize("precision", full_but(["bf16"], ["bf16", "fp16", "full"]))
def test_mixed_precision(precision):
    trainer = made(mixed_precision=precision, metrics=["accuracy"])
    first = trainer.evaluate()["loss"]
    trainer.train()
    assert trainer.evaluate()["loss"] < first
    assert trainer.state.params["kernel"].dtype == jnp.float32
    is_scale = lambda node: isinstance(node, LossScaleState)
    has_scale = any(map(is_scale, jax.tree.leaves(trainer.state.opt_state, is_leaf=is_scale)))
    assert has_scale == (precision == "fp16")


@pytest.mark.full
def test_a_nan_ends_the_run_with_a_warning():
    class Breaks(Trainer):
        def training_step(self, input_batch):
            return jnp.sqrt(-1.0) * super().training_step(input_batch)

    trainer = train_only(Breaks)
    with pytest.warns(UserWarning, match="was not finite in step 1"):
        trainer.train()
    assert trainer.result.stop_reason.kind == "nonfinite"


@pytest.mark.full
@shows(
    "Hezar",
    "TrainerConfig",
    {"`distributed`": "[all devices of all processes](#what-is-different)"},
)
def test_all_devices_are_used_if_it_is_distributed():
    trainer = made(distributed=True, batch_size=40 // jax.device_count(), metrics=["accuracy"])
    single = made(batch_size=40, metrics=["accuracy"])
    assert len(trainer.state.params["kernel"].sharding.device_set) == jax.device_count()
    for each in (trainer, single):
        each.train()
    assert trainer.evaluate() == pytest.approx(single.evaluate(), rel=1e-3)


@shows(
    "Hezar",
    "TrainerConfig",
    {
        "`device`": "`cpu`, `cuda:0` and so on, or one of `jax.devices()`; by default jax's first. "
        "One that is missing is refused",
        "`use_cpu`": "the same",
    },
)
@shows("Hezar", "Datasets and models", {"placement of model and data": "by jax"})
def test_a_device_by_name():
    for changes in ({"device": "cpu"}, {"use_cpu": True}, {"device": jax.devices()[0]}):
        trainer = train_only(**changes)
        assert trainer.state.params["kernel"].devices() == {jax.devices("cpu")[0]}
    assert train_only().state.params["kernel"].devices() == {jax.devices()[0]}
    for missing in ("cuda:0", "cpu:99"):
        with pytest.raises(
            sf.errors.ConfigError, match=f"device: expected one of jax's, .*'{missing}'"
        ):
            train_only(device=missing)


# Optimizers


@shows(
    "Hezar",
    "TrainerConfig",
    {
        "`optimizer`": "by its name in optax, `adam` by default",
        "`learning_rate`": "the same; 2e-5 by default",
    },
)
def test_optimizers_by_name_and_as_objects():
    by_name = train_only(optimizer="sgd", learning_rate=0.1)
    schedule = optax.linear_schedule(0.1, 0.0, 20)
    linear = train_only(
        optimizer="sgd", learning_rate=0.1, lr_scheduler="linear", lr_scheduler_kwargs={}
    )
    free = {"num_epochs": 2, "batch_size": 20}
    given = {"model": MODEL, "train_dataset": rows(TRAIN)}
    by_object = Trainer(TrainerConfig(**free), **given, optimizer=optax.sgd(0.1))
    scheduled = Trainer(TrainerConfig(optimizer="sgd", **free), **given, lr_scheduler=schedule)
    for trainer in (by_name, linear, by_object, scheduled):
        trainer.train()
    assert bits(by_name.state.params) == bits(by_object.state.params)
    assert bits(linear.state.params) == bits(scheduled.state.params)
    assert bits(linear.state.params) != bits(by_name.state.params)
    assert linear.lr_scheduler(10) == pytest.approx(0.05)
    defaults = TrainerConfig(num_epochs=1)
    assert (defaults.optimizer, defaults.learning_rate) == ("adam", 2e-5)


@pytest.mark.full
@shows("Hezar", "TrainerConfig", {"`weight_decay`": "the same; 0 by default"})
def test_weight_decay_is_an_argument_of_the_optimizer_or_added_to_the_gradient():
    added = optax.chain(optax.add_decayed_weights(0.5), optax.adam(1e-2))
    for name, tx in (("adamw", optax.adamw(1e-2, weight_decay=0.5)), ("adam", added)):
        by_name = train_only(optimizer=name, weight_decay=0.5)
        config = TrainerConfig(num_epochs=2, batch_size=20)
        by_object = Trainer(config, MODEL, rows(TRAIN), optimizer=tx)
        for trainer in (by_name, by_object):
            trainer.train()
        assert bits(by_name.state.params) == bits(by_object.state.params)
    assert TrainerConfig(num_epochs=1).weight_decay == 0


SCHEDULES = {
    "constant": {},
    "linear": {},
    "cosine": {},
    "polynomial": {"power": 2.0},
    "exponential": {"learning_rate_end": 0.001},
    "inverse_sqrt": {"warmup_steps": 2},
    "wsd": {},
    "cosine_restarts": {},
}  # and reduce_on_plateau, which is tested with evaluations


@shows(
    "Hezar",
    "TrainerConfig",
    {
        "`lr_scheduler`": "constant, linear, cosine, polynomial, exponential, inverse_sqrt, wsd, "
        "cosine_restarts; reduce_on_plateau watches the loss of the evaluations"
    },
)
def test_schedules_by_name():
    for name, options in SCHEDULES.items():
        trainer = train_only(lr_scheduler=name, lr_scheduler_kwargs=options)
        rates = [0.01] * 21
        if trainer.lr_scheduler is not None:
            rates = [float(trainer.lr_scheduler(step)) for step in range(21)]
        assert max(rates) == pytest.approx(0.01)
        assert (min(rates) < 0.01) == (name != "constant")


def test_the_rate_is_reduced_on_a_plateau_of_the_evaluation_loss(tmp_path):
    options = {"factor": 0.5, "patience": 1, "rtol": 0.2}
    changes = {"lr_scheduler": "reduce_on_plateau", "lr_scheduler_kwargs": options}
    changes |= {"num_epochs": 5, "log_steps": 10}
    whole = made(**changes)
    whole.train()
    history, scale, best, scales = whole.result.history, 1.0, math.inf, [1.0]
    for loss in history["eval/loss"]:
        scale = scale if loss < 0.8 * best else 0.5 * scale
        best = loss if loss < 0.8 * best else best
        scales.append(scale)
    assert len(set(scales)) > 2  # some improve enough, and some do not
    assert history["train/learning_rate"] == pytest.approx(np.multiply(0.01, scales[:-1]))
    changes |= {"output_dir": str(tmp_path)}
    with pytest.raises(KeyboardInterrupt):
        made(interrupted_at(33), **changes).train()
    resumed = made(**changes, resume_from_checkpoint=True)
    resumed.train()
    assert resumed.result.resumed
    assert bits(resumed.state) == bits(whole.state)
    with pytest.raises(
        sf.errors.ConfigError, match="lr_scheduler: expected an evaluation, to measure th"
    ):
        train_only(lr_scheduler="reduce_on_plateau")


@shows(
    "Hezar",
    "TrainerConfig",
    {"`lr_scheduler_kwargs`": "options of the schedule, `warmup_steps` and `learning_rate_end`"},
)
def test_warmup_and_options_of_a_schedule():
    options = {"warmup_steps": 10, "power": 1.0}
    trainer = train_only(lr_scheduler="polynomial", lr_scheduler_kwargs=options)
    rates = [float(trainer.lr_scheduler(step)) for step in (0, 5, 10, 15, 20)]
    assert rates == pytest.approx([0.0, 0.005, 0.01, 0.005, 0.0])


@shows(
    "Hezar",
    "Optional parameters",
    {
        "`optimizer`": "an optax transformation; fields of the config that it replaces are refused",
        "`lr_scheduler`": "a function of the step to a rate; not with an `optimizer`, which has "
        "its own",
    },
)
@pytest.mark.parametrize(
    ("given", "changes", "message"),
    [
        ({"optimizer": optax.sgd(1.0)}, {}, "optimizer: expected a config .*, got learning_rate"),
        ({"optimizer": optax.sgd(1.0)}, {"optimizer": "sgd"}, "got optimizer='sgd'"),
        ({"lr_scheduler": lambda step: 1.0}, {}, "lr_scheduler: .*, got learning_rate=0.01"),
        ({"optimizer": "sgd"}, {"learning_rate": 2e-5}, "optimi"),
        ({"lr_scheduler": 3}, {"learning_rate": 2e-5}, "lr_scheduler: expected a function"),
        (
            {"optimizer": optax.sgd(1.0), "lr_scheduler": lambda step: 1.0},
            {"learning_rate": 2e-5},
            "lr_scheduler: expected None with an optimizer",
        ),
    ],
)
def test_optimizers_that_are_refused(given, changes, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        train_only(given=given, **changes)


# What subclasses override


@shows(
    "Hezar",
    "Training loop",
    {"`create_train_dataloader(dataset)`": "[the same](#subclasses), called once"},
)
def test_each_override_is_called_by_a_run():
    calls = []

    def noting(name):
        def method(self, *args):
            calls.append(name)
            return getattr(super(Own, self), name)(*args)

        return method

    names = [
        *("inner_training_loop", "create_train_dataloader", "prepare_input_batch", "forward"),
        *("compute_loss", "training_step", "optimization_step", "evaluate"),
    ]
    Own = type("Own", (Trainer,), {name: noting(name) for name in names})
    trainer, plain = made(Own, metrics=["accuracy"]), made(metrics=["accuracy"])
    average = trainer.train()
    assert {*calls} == {*names}
    assert calls.count("create_train_dataloader") == 1
    assert calls.count("inner_training_loop") == calls.count("evaluate") == 2
    assert calls.count("prepare_input_batch") == 20 + 2 * 5
    assert calls.count("training_step") == calls.count("optimization_step") < 4  # traced
    assert average == pytest.approx(plain.train(), rel=1e-6)
    assert bits(trainer.state) == bits(plain.state)
    assert trainer.result.history["eval/accuracy"] == plain.result.history["eval/accuracy"][-1:]


@shows(
    "Hezar",
    "Training loop",
    {
        "`inner_training_loop(epoch_num)`": "[the same](#subclasses); alone, it trains to the end "
        "of the present epoch"
    },
)
def test_an_epoch_by_hand():
    trainer, plain = made(), made()
    first = trainer.inner_training_loop(1)
    assert int(trainer.state.step) == 10
    with pytest.raises(
        sf.errors.ConfigError, match="epoch_num: expected 2, the epoch of step 10, got 1"
    ):
        trainer.inner_training_loop(1)
    second = trainer.inner_training_loop(2)
    assert first > second == pytest.approx(plain.train())
    assert bits(trainer.state) == bits(plain.state)


@pytest.mark.full
@shows(
    "Hezar",
    "Training loop",
    {
        "returned average loss": "by `train()` and `inner_training_loop`: over all examples since "
        "the start, those before a resume too"
    },
)
def test_epochs_of_a_subclass_resume_within_one(tmp_path):
    epochs = []

    class Own(Trainer):
        def inner_training_loop(self, epoch_num):
            epochs.append(epoch_num)
            return super().inner_training_loop(epoch_num)

    changes = {"output_dir": str(tmp_path), "save_steps": 4, "num_epochs": 3}
    made(max_steps=14, **changes).train()
    trainer = made(Own, resume_from_checkpoint=True, **changes)
    average = trainer.train()
    assert epochs == [2, 3]
    whole = made(num_epochs=3)
    assert average == pytest.approx(whole.train(), rel=1e-12)
    assert bits(trainer.state) == bits(whole.state)


def test_a_loader_of_a_subclass_gives_the_batches():
    class Own(Trainer):
        def create_train_dataloader(self, dataset):
            return [
                {name: column[i : i + 50] for name, column in dataset.items()}
                for i in range(0, 200, 50)
            ]

    trainer = train_only(Own)
    trainer.train()
    assert int(trainer.state.step) == 8


@shows(
    "Hezar",
    "Training loop",
    {
        "`prepare_input_batch`": "[the same](#subclasses), for the batch of a step, and in "
        "evaluations"
    },
)
def test_batches_are_prepared_on_the_host_for_both():
    class Halves(Trainer):
        def prepare_input_batch(self, input_batch):
            assert isinstance(input_batch["image"], np.ndarray)
            return {**input_batch, "image": input_batch["image"] / 2}

    half = {"image": TEST["image"] / 2, "label": TEST["label"]}
    trainer = made(Halves)
    assert trainer.evaluate()["loss"] == pytest.approx(exact_loss(MODEL.params, half), rel=1e-6)
    data = {**rows(TRAIN), "image": TRAIN["image"] / 2}
    plain = train_only(given={"train_dataset": data})
    trainer.train()
    plain.train()
    assert bits(trainer.state.params) == bits(plain.state.params)


@shows(
    "Hezar",
    "Training loop",
    {"`training_step`": "[returns the loss](#subclasses), or the loss and metrics"},
)
def test_a_training_step_has_a_key_and_metrics():
    class Dropout(Trainer):
        def training_step(self, input_batch):
            keep = jax.random.bernoulli(self.key, 0.5, input_batch["image"].shape)
            outputs = self.model(input_batch["image"] * keep)
            loss = self.compute_loss(outputs, input_batch["labels"])
            return loss, {"accuracy": outputs.argmax(-1) == input_batch["labels"]}

    trainer = made(Dropout)
    trainer.train()
    assert 0 < trainer.result.history["train/accuracy"][-1] <= 1
    assert trainer.key is None


@shows("Hezar", "Training loop", {"`optimization_step`": "[a pure function](#subclasses)"})
def test_an_optimization_step_decides_the_update():
    class Frozen(Trainer):
        def optimization_step(self, grads, opt_state, params):
            grads = {**grads, "bias": jnp.zeros_like(grads["bias"])}
            return super().optimization_step(grads, opt_state, params)

    trainer = train_only(Frozen, mixed_precision="fp16")
    trainer.train()
    assert bits(trainer.state.params["bias"]) == bits(MODEL.params["bias"])
    assert bits(trainer.state.params["kernel"]) != bits(MODEL.params["kernel"])


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (lambda self: None, r"optimization_step: expected a method \(grads, opt_state, params\)"),
        (lambda self, *args: args[0], r"expected it to return \(updates, opt_state\), got"),
        (lambda self, *args: ({}, args[1]), "optimization_step: expected updates like the param"),
    ],
)
def test_an_optimization_step_is_checked(method, message):
    with pytest.raises(sf.StepfoldError, match=message):
        train_only(type("Own", (Trainer,), {"optimization_step": method})).train()


def test_a_run_logs_what_evaluate_returns():
    class Own(Trainer):
        def evaluate(self, eval_dataset=None):
            return {"eval_score": int(self.state.step)}

    trainer = made(Own)
    trainer.train()
    assert trainer.result.history["eval/score"] == [10, 20]
    empty = type("Own", (Trainer,), {"evaluate": lambda self: None})
    with pytest.raises(
        sf.errors.ConfigError, match="evaluate: expected it to return metrics by name"
    ):
        made(empty).train()


# Models, datasets, collators


def test_the_loss_of_the_outputs():
    def with_loss(params, image, labels):
        logits = apply(params, image)
        return {"logits": logits, "loss": nll(logits, labels).mean()}

    trainer = made(given={"model": Model(with_loss, MODEL.params)}, metrics=["accuracy"])
    assert trainer.evaluate() == pytest.approx(made(metrics=["accuracy"]).evaluate(), rel=1e-6)


@pytest.mark.full
def test_a_module_of_equinox_with_its_loss():
    import equinox as eqx

    class Classifier(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, image):
            return jax.vmap(self.linear)(image)

        def compute_loss(self, outputs, labels):
            return nll(outputs, labels)

    model = Classifier(eqx.nn.Linear(64, 10, key=jax.random.key(0)))
    trainer = made(given={"model": model}, metrics=["accuracy"])
    before = trainer.evaluate()
    trainer.train()
    assert trainer.evaluate()["accuracy"] > before["accuracy"]


def test_a_model_without_a_loss_is_refused():
    trainer = train_only(given={"model": Model(apply, MODEL.params)})
    with pytest.raises(TypeError, match="labels"):  # which it gets, to compute its loss
        trainer.train()
    outputs = Model(lambda params, image, labels: apply(params, image), MODEL.params)
    with pytest.raises(
        sf.errors.ConfigError, match="model: expected a loss_fn, or outputs with a loss"
    ):
        train_only(given={"model": outputs}).train()


class Examples:
    """A dataset with `len` and `[i]`, and its own collator."""

    def __init__(self, data):
        self.data, self.collated = data, 0

    def __len__(self):
        return len(self.data["label"])

    def __getitem__(self, i):
        return {name: column[i] for name, column in self.data.items()}

    def data_collator(self, examples):
        self.collated += 1
        return {
            "image": np.stack([example["image"] for example in examples]),
            "labels": np.array([example["label"] for example in examples]),
        }


@shows(
    "Hezar",
    "Datasets and models",
    {"`train_dataset`, `eval_dataset`": "the same, also as dicts of arrays"},
)
@shows(
    "Hezar",
    "Optional parameters",
    {
        "`data_collator`": "a function from a list of examples to a batch of arrays",
        "the default of `data_collator`": "the attribute `data_collator` of the dataset; without "
        "one, examples are stacked",
    },
)
def test_the_collator_is_that_of_the_dataset_by_default():
    train, test = Examples(TRAIN), Examples(TEST)
    trainer = made(given={"train_dataset": train, "eval_dataset": test})
    plain = made()
    trainer.train()
    plain.train()
    assert train.collated >= 20
    assert test.collated == 10
    assert bits(trainer.state.params) == bits(plain.state.params)
    other = Examples(TEST)
    own = lambda examples: Examples.data_collator(other, examples)
    given = {"train_dataset": Examples(TRAIN), "eval_dataset": test, "data_collator": own}
    made(given=given).evaluate()
    assert (test.collated, other.collated) == (10, 5)
    examples = [
        {"image": x, "labels": y} for x, y in zip(TRAIN["image"], TRAIN["label"], strict=True)
    ]
    stacked = train_only(given={"train_dataset": examples})
    stacked.train()
    assert bits(stacked.state.params) == bits(plain.state.params)


def test_empty_and_too_small_datasets():
    empty = {name: column[:0] for name, column in rows(TRAIN).items()}
    with pytest.raises((sf.errors.DataError, sf.errors.ConfigError), match="expected"):
        train_only(given={"train_dataset": empty})
    with pytest.raises(sf.errors.DataError, match="batch_size: expected at most the 200 examples"):
        train_only(batch_size=500)
    with pytest.raises((sf.errors.DataError, sf.errors.ConfigError), match="expected"):
        made().evaluate(empty)


@shows(
    "Hezar",
    "Evaluation loop",
    {"`evaluate(dataset)`": "the same; nothing is logged", "`evaluate(eval_dataset=)`": "the same"},
)
def test_evaluation_of_another_dataset_logs_nothing(tmp_path):
    trainer = made(output_dir=str(tmp_path), metrics=["accuracy"])
    again = {"image": TEST["image"][:30], "labels": TEST["label"][:30]}
    expected = float(np.mean(predictions_of(MODEL.params)[:30] == TEST["label"][:30]))
    assert trainer.evaluate(again)["accuracy"] == pytest.approx(expected)
    assert trainer.evaluate(eval_dataset=again) == trainer.evaluate(again)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(sf.errors.ConfigError, match="eval_dataset: expected data to evaluate on"):
        train_only().evaluate()


# Metrics


def naive_distance(a, b):
    """The recursive definition."""
    if not a or not b:
        return len(a) + len(b)
    substituted = naive_distance(a[1:], b[1:]) + (a[0] != b[0])
    return min(naive_distance(a[1:], b) + 1, naive_distance(a, b[1:]) + 1, substituted)


def test_edit_distances_are_those_of_their_definition():
    rng = np.random.default_rng(0)
    for _ in range(40):
        a, b = (rng.integers(0, 3, rng.integers(0, 6)).tolist() for _ in range(2))
        assert edit_distance(a, b) == naive_distance(a, b)
        assert edit_distance(a, b) == edit_distance(b, a)


@shows("Hezar", "TrainerConfig", {"`metrics`": "by name or as `MetricConfig`; [exact](#metrics)"})
@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
def test_scores_are_those_of_scikit_learn(average):
    from sklearn import metrics

    rng = np.random.default_rng(1)
    labels, predictions = rng.integers(0, 5, 200), rng.integers(0, 6, 200)
    names = "f1", "precision", "recall"
    handler = MetricsHandler(["accuracy", *(MetricConfig(name, average) for name in names)])
    options = {"average": average, "zero_division": 0}
    assert handler.compute_metrics(list(predictions), list(labels)) == pytest.approx(
        {
            "accuracy": metrics.accuracy_score(labels, predictions),
            "f1": metrics.f1_score(labels, predictions, **options),
            "precision": metrics.precision_score(labels, predictions, **options),
            "recall": metrics.recall_score(labels, predictions, **options),
        }
    )


@shows("Hezar", "Optional parameters", {"`eval_dataset`": "the same; each example counts once"})
@shows("Hezar", "Evaluation loop", {"`evaluate()` alone": "the same"})
@pytest.mark.parametrize("size", [7, 30, 100])
def test_metrics_are_exact_over_the_whole_set(size):
    from sklearn.metrics import f1_score

    names = ["accuracy", "f1", "cer"]
    predicted = predictions_of(MODEL.params)
    measured = made(eval_batch_size=size, metrics=names).evaluate()
    assert measured["f1"] == pytest.approx(f1_score(TEST["label"], predicted, average="macro"))
    assert measured["accuracy"] == pytest.approx(np.mean(predicted == TEST["label"]))
    assert measured["cer"] == pytest.approx(np.mean(predicted != TEST["label"]))
    assert measured["loss"] == pytest.approx(exact_loss(MODEL.params), rel=1e-6)


def test_error_rates_of_texts_and_padded_ids():
    texts, labels = ["a cat sat", "dog"], ["the cat sat", "a dog"]
    handler = MetricsHandler(["cer", "wer"])
    characters = sum(map(naive_distance, ["a", ""], ["the", "a "])) / 16
    assert handler.compute_metrics(texts, labels) == {"cer": characters, "wer": 2 / 5}
    ids = np.array([[0, 1, -1], [2, -1, -1]]), np.array([[0, 1, 2], [2, -100, -100]])
    assert MetricsHandler(["cer"]).compute_metrics(*map(list, ids)) == {"cer": 1 / 4}
    decode = lambda rows: [" ".join("abc"[i] for i in row) for row in rows]
    by_words = MetricsHandler(["wer"], decode).compute_metrics(*map(list, ids))
    assert by_words == {"wer": 1 / 4}
    with pytest.raises(sf.errors.DataError, match="wer: expected texts, or a preprocessor"):
        MetricsHandler(["wer"]).compute_metrics(*map(list, ids))
    with pytest.raises(sf.errors.DataError, match="labels: expected at least one character"):
        error_rate([""], [""])


def test_padded_tokens_have_no_weight():
    predictions, labels = [np.array([1, 2, 0])], [np.array([1, 3, -100])]
    handler = MetricsHandler(["accuracy"])
    assert handler.compute_metrics(predictions, labels) == {"accuracy": 0.5}
    with pytest.raises(
        sf.errors.DataError, match="labels: expected at least one that is not negative"
    ):
        handler.compute_metrics([np.array([1])], [np.array([-100])])
    with pytest.raises(
        sf.errors.DataError, match="accuracy: expected one prediction for each of 2"
    ):
        handler.compute_metrics([1], [1, 2])


@shows(
    "Hezar",
    "Optional parameters",
    {"`metrics_handler`": "[an object with `compute_metrics`](#metrics)"},
)
def test_a_custom_handler_gets_all_examples():
    seen = []

    class Handler:
        def compute_metrics(self, predictions, labels):
            seen.append((np.stack(predictions).shape, len(labels)))
            return {"top3": 0.5}

    trainer = made(given={"metrics_handler": Handler()})
    assert trainer.evaluate()["top3"] == 0.5
    assert seen == [((100, 10), 100)]
    trainer.train()
    assert trainer.result.history["eval/top3"] == [0.5, 0.5]
    returns_none = types.SimpleNamespace(compute_metrics=lambda predictions, labels: None)
    with pytest.raises(
        sf.errors.ConfigError, match="metrics_handler: expected compute_metrics to return"
    ):
        made(given={"metrics_handler": returns_none}).evaluate()


@shows(
    "Hezar",
    "TrainerConfig",
    {"`evaluate_with_generate`": "calls `generate=`, or a `generate(batch)` of the model"},
)
def test_predictions_of_a_generating_function():
    def generate(model, input_batch):
        return ["x" * int(label) for label in np.asarray(input_batch["labels"])]

    class Texts(Trainer):
        pass

    as_text = lambda ids: ["x" * int(row[0]) if row else "" for row in ids]
    preprocessor = types.SimpleNamespace(save=lambda path: None, decode=as_text)
    given = {"generate": generate, "preprocessor": preprocessor}
    trainer = made(Texts, given, metrics=["cer"], evaluate_with_generate=True)
    assert trainer.evaluate()["cer"] == 0

    class Generates(Model):
        def generate(self, input_batch):
            return generate(self, input_batch)

    model = Generates(apply, MODEL.params, nll)
    by_model = {"model": model, "preprocessor": preprocessor}
    assert made(Texts, by_model, metrics=["cer"]).evaluate()["cer"] == 0
    unused = made(Texts, given, metrics=["cer"], evaluate_with_generate=False)
    assert unused.evaluate()["cer"] > 0
    with pytest.raises(sf.errors.ConfigError, match="evaluate_with_generate: expected generate="):
        made(metrics=["cer"], evaluate_with_generate=True)
    short = {**given, "generate": lambda model, batch: ["x"]}
    with pytest.raises(
        sf.errors.DataError, match="expected a prediction for each of 20 examples, got 1"
    ):
        made(Texts, short, metrics=["cer"]).evaluate()


def test_options_of_a_metric_are_checked():
    with pytest.raises(
        sf.errors.ConfigError, match="average: expected one of 'macro', 'micro', 'wei"
    ):
        MetricConfig("f1", average="binary")
    with pytest.raises(sf.errors.ConfigError, match="metrics: expected one of 'accuracy', 'f1'"):
        MetricConfig("f3")


def test_a_config_may_be_changed():
    changed = dataclasses.replace(config(metrics=["f1", MetricConfig("recall", "micro")]), seed=1)
    assert changed.seed == 1
    assert changed.metrics == (MetricConfig("f1"), MetricConfig("recall", "micro"))


def test_metrics_need_labels():
    given = {"eval_dataset": {"image": TEST["image"]}}
    own = type("Own", (Trainer,), {"compute_loss": lambda self, outputs, labels: outputs.mean(-1)})
    with pytest.raises(sf.errors.DataError, match="batch: expected labels, to compute metrics of"):
        made(own, given, metrics=["accuracy"]).evaluate()


@shows(
    "Hezar",
    "TrainerConfig",
    {
        "`metric_for_best_model`": "with the prefix `train.` or `evaluation.`, which is the "
        "default; lower is better for loss, cer and wer. Others than the metrics are refused"
    },
)
@pytest.mark.parametrize(
    ("metric", "best"),
    full_but([("f1", "max")], [("f1", "max"), ("evaluation.cer", "min"), ("train.loss", "min")]),
)
def test_the_best_checkpoint(tmp_path, metric, best):
    trainer = made(
        output_dir=str(tmp_path), metrics=["f1", "cer"], metric_for_best_model=metric, num_epochs=3
    )
    trainer.train()
    name = {"f1": "eval/f1", "evaluation.cer": "eval/cer"}.get(metric, "train/loss")
    curve = trainer.result.history[name]
    values = {step: x for step, x in zip(curve.steps, curve, strict=True) if step % 10 == 0}
    wanted = {"min": min, "max": max}[best](values.values())
    assert values[trainer.result.best] == wanted
    assert known_mode("eval/wer") == "min"
    with pytest.raises(
        sf.errors.ConfigError, match="expected one of loss, f1, cer, .*, got 'accuracy'"
    ):
        made(output_dir="x", metrics=["f1", "cer"], metric_for_best_model="accuracy")


# Checkpoints


@pytest.mark.full
@shows(
    "Hezar",
    "Initialization",
    {
        "weights, optimizer, steps, checkpoints, logs": "made when the trainer is built; "
        "checkpoints are loaded by `train`",
        "trainer state": "`trainer.state`, `trainer.result`",
    },
)
@shows(
    "Hezar",
    "After an epoch, resuming",
    {"in the middle of an epoch, shuffled": "the same, bit for bit"},
)
@pytest.mark.parametrize("stop", [7, 14])
def test_a_resumed_run_has_the_same_bits(tmp_path, stop):
    changes = {"output_dir": str(tmp_path), "save_steps": 4, "metrics": ["accuracy"]}
    made(max_steps=stop, **changes).train()
    trainer, whole = made(resume_from_checkpoint=True, **changes), made(metrics=["accuracy"])
    assert bits(trainer.state.params) == bits(MODEL.params)  # until it trains
    assert isinstance(trainer.optimizer, optax.GradientTransformation)
    average = trainer.train()
    assert trainer.result.resumed == stop
    assert average == pytest.approx(whole.train(), rel=1e-12)
    assert bits(trainer.state) == bits(whole.state)


@shows(
    "Hezar",
    "After an epoch, resuming",
    {"`resume_from_checkpoint=True`": "the same; an interrupted run saves first"},
)
def test_an_interrupted_run_saves_and_resumes(tmp_path):
    class Interrupted(Trainer):
        count = 0

        def prepare_input_batch(self, input_batch):
            self.count += 1
            if self.count == 13:
                raise KeyboardInterrupt
            return input_batch

    trainer = train_only(Interrupted, output_dir=str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert int(trainer.state.step) == 12
    resumed, whole = train_only(output_dir=str(tmp_path), resume_from_checkpoint=True), train_only()
    resumed.train()
    whole.train()
    assert bits(resumed.state) == bits(whole.state)


@shows("Hezar", "After an epoch, resuming", {"from a path": "the folder of a step or of a run"})
def test_a_run_resumes_from_a_path(tmp_path):
    first = str(tmp_path / "first")
    made(output_dir=first, num_epochs=2).train()
    path = f"{first}/checkpoints/10"
    trainer = made(output_dir=str(tmp_path / "second"), resume_from_checkpoint=path, num_epochs=2)
    trainer.train()
    whole = made()
    whole.train()
    assert bits(trainer.state) == bits(whole.state)
    longer = made(output_dir=str(tmp_path / "third"), resume_from_checkpoint=first, num_epochs=3)
    longer.train()
    whole = made(num_epochs=3)
    whole.train()
    assert bits(longer.state) == bits(whole.state)


@pytest.mark.full
@shows(
    "Hezar",
    "TrainerConfig",
    {
        "`resume_from_checkpoint`": "True or a path; otherwise an `output_dir` with checkpoints is "
        "refused"
    },
)
def test_checkpoints_are_not_overwritten(tmp_path):
    made(output_dir=str(tmp_path)).train()
    with pytest.raises(
        sf.errors.ConfigError, match="output_dir: .*step 20; set resume_from_checkpoint"
    ):
        made(output_dir=str(tmp_path)).train()
    assert not [*(tmp_path / "logs").glob("previous*")]
    trainer = made(output_dir=str(tmp_path), resume_from_checkpoint=True, num_epochs=3)
    trainer.train()
    assert trainer.result.resumed == 20
    other, path = str(tmp_path / "other"), str(tmp_path / "checkpoints" / "10")
    trainer = made(output_dir=other, resume_from_checkpoint=path)
    trainer.train()
    assert trainer.result.history["train/loss"].steps == [15, 20]


def test_resuming_without_a_checkpoint_warns(tmp_path):
    with pytest.warns(UserWarning, match="has no checkpoint, so the run starts from the beginning"):
        made(output_dir=str(tmp_path), resume_from_checkpoint=True).train()


@shows(
    "Hezar", "TrainerConfig", {"`init_weights_from` on disk": "a checkpoint, a run or safetensors"}
)
def test_weights_of_a_checkpoint_and_onto_another_head(tmp_path):
    source = made(output_dir=str(tmp_path))
    source.train()
    same = made(init_weights_from=str(tmp_path))
    assert bits(same.state.params) == bits(source.state.params)
    assert int(same.state.step) == 0
    sf.checkpoint.export_params(tmp_path / "weights", source.state.params)
    exported = made(init_weights_from=str(tmp_path / "weights"))
    assert bits(exported.state.params) == bits(source.state.params)
    head = {"kernel": jnp.zeros((64, 10)), "bias": jnp.zeros(10), "head": jnp.ones(10)}
    model = Model(lambda params, image: apply(params, image) * params["head"], head, nll)
    other = made(given={"model": model}, init_weights_from=f"{tmp_path}/checkpoints/20")
    assert bits(other.state.params["kernel"]) == bits(source.state.params["kernel"])
    assert [*other.not_loaded] == ["params/head"]


@shows(
    "Hezar",
    "Optional parameters",
    {
        "`preprocessor`": "saved to `output_dir/preprocessor` by its `save` or `save_pretrained`; "
        "its `decode` makes [texts](#metrics)"
    },
)
@pytest.mark.parametrize("method", ["save", "save_pretrained"])
def test_the_preprocessor_is_saved_next_to_the_checkpoints(tmp_path, method):
    save = lambda self, path: (path / "config.json").write_text("{}")
    preprocessor = type("Preprocessor", (), {method: save})()
    made(given={"preprocessor": preprocessor}, output_dir=str(tmp_path), num_epochs=1).train()
    assert (tmp_path / "preprocessor" / "config.json").read_text() == "{}"


# Refusals


def test_every_documented_parameter_is_a_field():
    documented = {
        *("task", "output_dir", "device", "num_epochs", "init_weights_from", "max_steps"),
        *("resume_from_checkpoint", "num_dataloader_workers", "dataloader_shuffle", "seed"),
        *("optimizer", "learning_rate", "weight_decay", "lr_scheduler", "lr_scheduler_kwargs"),
        *("batch_size", "eval_batch_size", "gradient_accumulation_steps", "distributed"),
        *("mixed_precision", "use_cpu", "do_evaluate", "evaluate_with_generate", "metrics"),
        *("metric_for_best_model", "save_steps", "log_steps", "checkpoints_dir", "logs_dir"),
    }
    assert {*TrainerConfig.__dataclass_fields__} == documented
    defaults = TrainerConfig(num_epochs=1)
    assert (defaults.seed, defaults.num_dataloader_workers) == (42, 4)
    assert defaults.gradient_accumulation_steps == 1
    assert TrainerConfig(num_epochs=1, save_steps=0).save_steps is None


@shows(
    "Hezar",
    "TrainerConfig",
    {
        "`task`": "limits the metrics to those of the task",
        "`init_weights_from` on the Hub": "refused: `huggingface_hub.snapshot_download` returns a "
        "folder",
    },
)
@shows(
    "Hezar",
    "Evaluation loop",
    {"metrics handler by task": "one handler; `task` limits its metrics"},
)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_epochs": None}, "num_epochs: expected a number of epochs, or max_steps"),
        ({"num_epoch": 3}, "num_epoch: TrainerConfig has no such field; did you mean 'num_epochs'"),
        ({"num_epochs": 0}, "num_epochs: expected an integer of at least 1"),
        ({"batch_size": 0}, "batch_size: expected an integer of at least 1"),
        ({"task": "text_classificatio"}, "task: expected one of .*; did you mean"),
        ({"optimizer": "adamm"}, "optimizer: expected one of .*; did you mean 'adam'"),
        ({"lr_scheduler": "step"}, "lr_scheduler: expected one of .*; give the trainer lr_schedu"),
        ({"optimizer": "step"}, "optimizer: expected one of .*; give the trainer optimizer=…"),
        ({"mixed_precision": "fp8"}, "mixed_precision: expected one of bf16, fp16, full"),
        ({"metrics": "cer"}, "metrics: expected a list of names"),
        ({"metrics": ["bleu"]}, "metrics: expected some of accuracy, f1, .*, got 'bleu'"),
        ({"metrics": ["cer", "cer"]}, "metrics: expected each metric once"),
        ({"metrics": ["cer"], "task": "text_classification"}, "which text_classification has"),
        (
            {"init_weights_from": "hezarai/bert-base-fa"},
            "expected a path that .*huggingface_hub.snap",
        ),
        ({"device": 3}, "device: expected a platform"),
        ({"metric_for_best_model": "train.speed"}, "expected a name that says which value is"),
        ({"seed": -1}, "seed: expected an integer from 0"),
    ],
)
def test_configs_that_are_refused(changes, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        config(**changes)


@shows(
    "Hezar",
    "Optional parameters",
    {
        "`accelerator`": "refused: jax places the arrays; `distributed` and `mixed_precision` in "
        "the config"
    },
)
@pytest.mark.parametrize(
    ("given", "changes", "message"),
    [
        ({"config": {"num_epochs": 3}}, {}, "config: expected a TrainerConfig"),
        ({"accelerator": object()}, {}, "accelerator: expected None.*set distributed"),
        ({"data_collator": 3}, {}, "data_collator"),
        ({"preprocessor": object()}, {}, r"preprocessor: expected an object with save\(path\)"),
        ({"metrics_handler": object()}, {}, "metrics_handler: expected an object with compute"),
        (
            {"metrics_handler": MetricsHandler(["f1"])},
            {"metrics": ["f1"]},
            "metrics: expected none with a metrics_handler, got f1",
        ),
        ({}, {"device": "cuda"}, "device: expected one of jax's, cpu:0.*, got 'cuda'"),
        ({}, {"device": "cpu:99"}, "device: expected one of jax's, cpu:0.*, got 'cpu:99'"),
        (
            {},
            {"device": jax.devices()[0], "distributed": True},
            "device: expected the name of a platform",
        ),
        ({}, {"metric_for_best_model": "f1"}, "metric_for_best_model: expected an output_dir"),
        (
            {},
            {"metric_for_best_model": "f1", "output_dir": "x", "metrics": ["accuracy"]},
            "expected one of loss, accuracy, with or without 'evaluation.*, got 'f1'; add it",
        ),
        (
            {"eval_dataset": None},
            {"metric_for_best_model": "loss", "output_dir": "x"},
            "expected an evaluation, to measure loss, got none",
        ),
    ],
)
def test_arguments_that_are_refused(given, changes, message):
    given = {"config": config(**changes), "model": MODEL, "eval_dataset": rows(TEST)} | given
    with pytest.raises(sf.errors.ConfigError, match=message):
        Trainer(train_dataset=rows(TRAIN), **given)


def test_a_loader_without_a_length_of_its_epochs_is_refused():
    own = {"create_train_dataloader": lambda self, dataset: itertools.count()}
    with pytest.raises(
        sf.errors.ConfigError, match="train_dataloader: expected batches that start again"
    ):
        train_only(type("Own", (Trainer,), own))
    mixed = sf.mix({"a": (rows(TRAIN), 1), "b": (rows(TEST), 1)})
    for loader, message in (
        (sf.batches(mixed, 10), "train_dataloader: expected batches that start again"),
        (UnevenEpochs(), "create_train_dataloader: expected batches of which each epoch has the"),
    ):
        own = {"create_train_dataloader": lambda self, dataset, loader=loader: loader}
        with pytest.raises(sf.errors.ConfigError, match=message):
            train_only(type("Own", (Trainer,), own))


class UnevenEpochs:
    """Batches whose epochs have different lengths."""

    endless, epoch_ends = True, (3, 7)

    def __iter__(self):
        return self

    def __next__(self):
        return rows(TRAIN)


@shows(
    "Hezar",
    "TrainerConfig",
    {
        "`batch_size`": "of a microbatch on a device; 8 by default",
        "`eval_batch_size`": "the same; by default `batch_size`",
        "`gradient_accumulation_steps`": "the same; 1 by default",
    },
)
@shows(
    "Hezar",
    "Distributed, precision, accumulation",
    {"effective batch": "`batch_size * gradient_accumulation_steps`, on each device"},
)
def test_the_arguments_of_a_run():
    both = config(batch_size=4, gradient_accumulation_steps=3, eval_batch_size=5)
    arguments = make_arguments(both, devices=2)
    assert arguments.total_batch_size == 24
    assert arguments.eval_batch_size == 10
    assert not arguments.auto_shard_states
    defaults = make_arguments(TrainerConfig(num_epochs=1), devices=1)
    assert (defaults.total_batch_size, defaults.eval_batch_size) == (8, 8)
    assert defaults.gradient_accumulation_steps == 1


def test_a_run_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        average = made(metrics=["accuracy", "f1"]).train()
    assert math.isfinite(average)
