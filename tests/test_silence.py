"""A plausible misuse of a public name works as meant, warns, or is refused; none is ignored."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf
from stepfold.adapter import Trainer, TrainingArguments

# The trainer

DATA = {"x": np.ones((16, 3), np.float32), "y": np.arange(16, dtype=np.float32)}


def squares(params, batch, key):
    return sf.mean((batch["x"] @ params["w"] - batch["y"]) ** 2, batch["mask"])


def trainer(kind=Trainer, given=None, **fields):
    fields = {"max_steps": 4, "total_batch_size": 4, "progress_bar_type": "none", **fields}
    usual = {"model": {"w": jnp.ones(3)}, "dataset_train": DATA, "loss_fn": squares}
    arguments = TrainingArguments(**fields)
    return kind(arguments, devices=jax.devices()[:1], **{**usual, **(given or {})})


TRAINING = types.SimpleNamespace(max_grad_norm=1.0)
BATCHES = [{"x": np.ones((8, 3)), "y": np.ones(8)} for _ in range(4)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"config": types.SimpleNamespace(training=TRAINING)}, "config: .* got training.max_grad"),
        ({"config": {"training.max_grad_norm": 1.0}}, "config: .* got training.max_grad_norm"),
        ({"config": TrainingArguments()}, "config: expected the configuration of the model"),
        ({"dataset_train": sf.batches(DATA, 8)}, "expected a dataset of single examples, got batc"),
        (
            {"dataset_eval": sf.prefetch(sf.batches(DATA, 8, epochs=1))},
            "expected a dataset of single examples, got batches: Prefetch",
        ),
    ],
)
def test_arguments_of_a_trainer_that_would_be_ignored(given, message):
    with pytest.raises(sf.ConfigError, match=message):
        trainer(given=given)


def test_a_list_of_batches_as_a_dataset():
    with pytest.warns(UserWarning, match="each item looks like a batch of 8 examples"):
        trainer(given={"dataset_train": BATCHES})


@pytest.mark.parametrize(
    "example",
    [
        {"tokens": np.ones(9), "labels": np.ones(9)},
        {"image": np.ones((8, 8, 3)), "mask": np.ones((8, 8))},
        {"x": np.ones(3), "y": 1.0},
        {"x": np.ones((1, 3)), "y": np.ones(1)},
        {"image": np.ones((8, 8))},
    ],
    ids=lambda example: "-".join(example),
)
def test_examples_that_are_no_batches(example, recwarn):
    trainer(given={"dataset_train": [example] * 4})
    assert not recwarn.list


def test_the_collator_of_a_dataset_is_used():
    class Rows(list):
        def data_collator(self, examples):
            return {"y": np.float32([example["y"] for example in examples]), "collated": 1}

    data = Rows({name: values[i] for name, values in DATA.items()} for i in range(16))
    given = {"dataset_train": data, "dataset_eval": [*data]}
    made = trainer(given=given)
    assert next(made.dataloader_train)["collated"] == 1
    assert next(iter(made.dataloader_eval))["collated"] == 1
    with pytest.raises(sf.ConfigError, match="max_length: expected None with a data_collator"):
        trainer(given=given, max_length=8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"resume_from_checkpoint": True}, "resume_from_checkpoint=True and output_dir=None"),
        (
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
            "write total_batch_size, the examples of an update over all microbatches",
        ),
        ({"batch_size": 8, "gradient_accumulation_steps": 4}, "batch_size: expected total_batch_s"),
        ({"dtype": "float8_e4m3fn"}, "dtype: expected a floating dtype"),
        ({"warmup_ratio": 0.1}, "warmup_ratio: .*write warmup_steps, this part of all steps"),
        ({"warmup_steps": 0.1}, "warmup_steps: expected an integer"),
        ({"adam_beta2": 0.9}, "adam_beta2: .*write extra_optimizer_kwargs"),
    ],
    ids=lambda case: "-".join(case) if isinstance(case, dict) else "",
)
def test_fields_of_arguments_that_would_mean_something_else(fields, message):
    with pytest.raises(sf.ConfigError, match=message):
        TrainingArguments(**fields)


def test_a_resume_without_a_checkpoint(tmp_path):
    made = trainer(output_dir=tmp_path, resume_from_checkpoint=True, max_steps=1)
    with pytest.warns(UserWarning, match="has no checkpoint, so the run starts from the beginning"):
        made.train()


@pytest.mark.parametrize(
    ("fields", "given", "message"),
    [
        ({"eval_steps": 2}, {}, "eval_steps: expected data and a step to evaluate with, got none"),
        ({"evaluation_strategy": "epoch"}, {}, "evaluation_strategy: expected data and a step"),
        (
            {"early_stopping_patience": 2},
            {"dataset_eval": DATA},
            "early_stopping_patience: expected eval/loss to be measured during the run",
        ),
        (
            {"metric_for_best_model": "loss", "save_steps": 1},
            {"dataset_eval": DATA},
            "metric_for_best_model: expected eval/loss to be measured during the run",
        ),
        (
            {"metric_for_best_model": "train.loss", "output_dir": None},
            {},
            "metric_for_best_model: expected checkpoints of which the best is kept",
        ),
    ],
    ids=["eval_steps", "epoch", "patience", "best", "unkept"],
)
def test_evaluations_that_would_not_happen_in_time(fields, given, message, tmp_path):
    with pytest.raises(sf.ConfigError, match=message):
        trainer(given=given, **{"output_dir": tmp_path, **fields}).train()


def test_rules_beside_a_replicated_state():
    with pytest.raises(sf.ConfigError, match="rules: expected None with auto_shard_states=False"):
        trainer(given={"rules": [("", jax.P())]}, auto_shard_states=False)


@pytest.mark.parametrize("field", ["shuffle_seed_train", "step_start_point"])
def test_a_stream_has_its_own_order_and_start(field):
    def stream():
        return ({name: values[i] for name, values in DATA.items()} for i in range(16))

    with pytest.raises(sf.ConfigError, match=f"{field}: expected no value with a stream"):
        trainer(given={"dataset_train": stream}, **{field: 2})


def test_no_term_of_the_loss_begins_with_aux():
    terms = lambda params, batch, key: dict.fromkeys(("ce", "router_aux"), params["w"].sum())
    with pytest.raises(sf.ConfigError, match="aux_loss_enabled: .* got ce, router_aux"):
        trainer(given={"loss_fn": terms}, aux_loss_enabled=False).train()


def test_a_method_that_another_trainer_calls():
    class Own(Trainer):
        def compute_loss(self, model, inputs):
            """Return a loss, as in Hugging Face's trainer."""

    with pytest.warns(UserWarning, match="Own.compute_loss: a run calls no method of this name"):
        trainer(Own)

    class CallsIt(Own):
        def configure_functions(self):
            return super().configure_functions()

    trainer(CallsIt)
