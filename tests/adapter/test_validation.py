"""Checks of `TrainingArguments`: field by field, and of fields together."""

import dataclasses
import math
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import stepfold as sf
from stepfold.adapter import TrainingArguments
from stepfold.adapter.fields import is_changed, seconds

FIELDS = {field.name: field for field in fields(TrainingArguments)}
HINTS = get_type_hints(TrainingArguments)
DIR = {"output_dir": "runs/a"}
SCHEDULE = optax.constant_schedule(0.1)

# Values of single fields.


def stored(name, value):
    """Return a value as its field stores it."""
    others = DIR if name == "save_steps" and value is not None else {}
    return getattr(TrainingArguments(**others, **{name: value}), name)


GOOD_AND_BAD = {
    "do_train": ([(True, True), (np.bool_(False), False)], [0, 1, "yes", None]),
    "num_train_epochs": (
        [(3, 3), (np.int64(3), 3)],
        [0, -1, 1.0, True, "3", None, np.arange(3)],
    ),
    "steps_per_call": ([(8, 8)], [0, -1, 1.0, True, "3", None]),
    "warmup_steps": ([(0, 0), (3, 3)], [-1, 1.0, True, "3", None]),
    "seed": ([(0, 0), (2**63 - 1, 2**63 - 1)], [-1, 2**63, 1.0, True, "3", None]),
    "log_steps": ([(3, 3), (0.5, 0.5)], [0, 1.0, 0.0, -1, 1.5, True, math.nan, "1"]),
    "learning_rate": (
        [(1, 1.0), (np.float32(0.5), 0.5)],
        [0, -1.0, math.inf, math.nan, True, "1", 10**400],
    ),
    "weight_decay": ([(0, 0.0), (None, None)], [-0.1, True]),
    "model_name": ([("a", "a")], ["", " ", 3, None]),
    "output_dir": ([(Path("runs") / "a", "runs/a"), (None, None)], ["", 3, ["a"]]),
    "save_strategy": ([("no", "no"), (None, None)], ["No", "step", 3, []]),
    "ids_to_pop_from_dataset": ([(["a"], ("a",)), ((), ())], ["a", [""], [3], None, {"a"}]),
    "report_to": ([(["csv", "tensorboard"], ("csv", "tensorboard"))], ["csv", ["tsv"], None]),
    "sharding_array": (
        [((1, -1, 1, 1), (1, -1, 1, 1)), ([2] * 4, (2,) * 4), ("1,-1, 2,1", (1, -1, 2, 1))],
        [(), (0,), (-1, -1), (-2,), (1.0,), (True,), "a", "1,x", 3],
    ),
    "step_partition_spec": (
        [
            (PartitionSpec(("dp", "fsdp"), None), (("dp", "fsdp"), None)),
            ([["dp"], "tp"], (("dp",), "tp")),
        ],
        ["a", 3, {"dp"}],
    ),
    "frozen_parameters": ([("^a", "^a"), (None, None)], ["(", "", 3]),
    "param_dtype": (
        [
            *[("bf16", "bfloat16"), (jnp.float16, "float16"), (jnp.dtype("float64"), "float64")],
            *[("fp16", "float16"), ("f32", "float32"), ("fp64", "float64"), (None, None)],
        ],
        ["int32", jnp.int8, "float", "x", 3, float],
    ),
    "loss_config": ([({"a": 1}, {"a": 1})], [[], None, {1: 2}, "a", ["label_smoothing"]]),
    "custom_scheduler": ([(SCHEDULE, SCHEDULE), (None, None)], [3, int, "cosine"]),
    "pruning_module": ([(SCHEDULE, SCHEDULE), (None, None)], [3, "prune", object()]),
    "training_time_limit": (
        [(3, 3.0), ("1h30m", "1h30m"), (None, None)],
        [0, -1, "", "1x", "1 x", "h", "0s", True, math.inf],
    ),
    "resume_from_checkpoint": (
        [(False, False), ("runs/b", "runs/b"), (Path("a"), "a"), (None, None)],
        [3, "", 1.0],
    ),
    "max_steps": ([(None, None), (-1, None), (0, None), (3, 3)], [-2, 1.0, 1.5, "10", True, -1.0]),
    "save_steps": ([(None, None), (0, None), (0.5, 0.5)], [-1, False, 0.0]),
    "weight_distribution_log_steps": ([(None, None), (0, None), (2, 2)], [-1, False, 0.5]),
    "gradient_checkpointing": (
        [("", "none"), (None, "none"), ("none", "none")],
        ["nothing", len, 3, True],
    ),
}


def test_a_field_accepts_its_values_and_nothing_else():
    for name, (good, bad) in GOOD_AND_BAD.items():
        for value, expected in good:
            assert stored(name, value) == expected
            assert type(stored(name, value)) is type(expected)
        for value in bad:
            with pytest.raises(
                sf.errors.ConfigError, match=rf"^{name}(\[0\])?: expected .+, got "
            ) as error:
                stored(name, value)
            item = value[0] if "[0]:" in str(error.value) else value
            assert f"got {item!r:.80}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("evaluation_strategy", "epochs", "one of no, steps, epoch, got 'epochs'; did you mean"),
        ("progress_bar_type", "tdqm", "one of tqdm, rich, json, none, got 'tdqm'; did you mean"),
        ("truncation_mode", "keep", "one of keep_end, keep_start, got 'keep'"),
        ("report_to", ["tensorbord"], r"^report_to\[0\]: .* got 'tensorbord'; did you mean 'tens"),
        ("gradient_checkpointing", "nothing", "expected one of none, nothing_saveable, "),
        ("optimizer", "adamv", "^optimizer: expected one of .* got 'adamv'; did you mean 'adam"),
        ("optimizer", 3, "^optimizer: expected a text, got 3"),
        ("scheduler", "cosin", "^scheduler: expected one of .* got 'cosin'; did you mean 'cosine'"),
        ("pruning_module", 3, r"expected .* wrap_optax\(tx\), got 3"),
        ("frozen_parameters", "(", r"a regular expression, got '\('; missing \)"),
        ("training_time_limit", "1 x", "'1h30m' or '2d', got '1 x'"),
        ("max_steps", 1.0, "an integer of at least 1, or a fraction between 0 and 1, got 1.0"),
        ("learning_rate", "0.1", "learning_rate: expected a number above 0, got '0.1'"),
        ("loss_config", ["a"], "loss_config: expected a dict with names as keys"),
        ("resume_from_checkpoint", 3, "expected True, False, or the path of a checkpoint"),
        ("save_optimizer_state", 1, "^save_optimizer_state=1: a checkpoint holds"),
        ("save_optimizer_state", False, "^save_optimizer_state=False: .* save_pretrained or"),
        ("remove_ckpt_after_load", True, "^remove_ckpt_after_load=True: .* save_total_limit=1"),
    ],
)
def test_a_message_says_what_to_do(name, value, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        TrainingArguments(**{name: value})


def test_seconds():
    texts = ["90s", "45min", "1h30m", "2d", "1.5h", 7]
    assert [seconds(text) for text in texts] == [90, 2700, 5400, 172800, 5400, 7]
    assert seconds("soon") == 0.0


def test_a_policy_of_jax_is_stored_by_its_name():
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    arguments = TrainingArguments(gradient_checkpointing=policy)
    assert getattr(jax.checkpoint_policies, arguments.gradient_checkpointing) is policy
    assert arguments == TrainingArguments.from_json(arguments.to_json())


def test_every_default_is_stored_unchanged():
    arguments = TrainingArguments()
    for name, field in FIELDS.items():
        has_factory = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if has_factory else field.default
        assert getattr(arguments, name) == default
        assert type(getattr(arguments, name)) is type(default)


# Fields that do not go together.

CLASHES = [
    ({"custom_scheduler": SCHEDULE, "scheduler": "linear"}, "sets the whole learning rate"),
    ({"custom_scheduler": SCHEDULE, "learning_rate": 0.1}, "sets the whole learning rate"),
    ({"custom_scheduler": SCHEDULE, "warmup_steps": 3}, "sets the whole learning rate"),
    ({"scheduler": "warmup_cosine"}, "warmup_steps=0 .* write warmup_steps of at least 1"),
    ({"learning_rate_end": 0.0}, "a constant rate ends where it begins"),
    ({"scheduler": "linear", "learning_rate_end": 1.0}, "a rate that rises"),
    ({"scheduler": "exponential"}, "never gets to 0"),
    ({"scheduler": "linear", "scheduler_kwargs": {"power": 2}}, "linear takes none"),
    ({"optimizer": "sgd", "extra_optimizer_kwargs": {"b1": 0.1}}, "sgd takes momentum"),
    (
        {"weight_decay": 0.1, "extra_optimizer_kwargs": {"weight_decay": 0.1}},
        "set the weight decay",
    ),
    ({"optimizer": "adagrad", "tx_mu_dtype": "bf16"}, "takes no dtype for a first moment"),
    ({"tx_mu_dtype": "bf16", "extra_optimizer_kwargs": {"mu_dtype": "float16"}}, "set the dtype"),
    ({"optimizer": "sgd", "tx_mu_dtype": "bf16"}, "without momentum there is no first moment"),
    ({"step_partition_spec": [3]}, "name axes of the mesh, each once"),
    ({"step_partition_spec": [["dp", ""]]}, "name axes of the mesh, each once"),
    ({"step_partition_spec": ("zz",)}, "name axes of the mesh, each once"),
    ({"step_partition_spec": ("dp", "dp")}, "name axes of the mesh, each once"),
    ({"mixed_precision": "bf16", "dtype": "float16"}, "both set the same dtype"),
    ({"grain_shard_index": 0}, "write both or neither"),
    ({"grain_shard_index": 2, "grain_shard_count": 2}, "the first shard is 0"),
    ({"shuffle_train_dataset": False, "shuffle_seed_train": 3}, "has no effect with shuffle_train"),
    ({"truncation_mode": "keep_start"}, "has no effect with max_length=None; change max_length"),
    ({"do_train": False, "do_eval": False}, "the run would do nothing"),
    ({"max_steps": 5, "step_start_point": 5}, "there would be no step"),
    ({"evaluation_strategy": "steps"}, "write eval_steps"),
    ({"evaluation_strategy": "epoch", "eval_steps": 3}, "no effect .* change evaluation_strategy"),
    ({"evaluation_strategy": "no", "eval_steps": 3}, "no effect .* change evaluation_strategy"),
    ({"do_eval": False, "evaluation_strategy": "epoch"}, "there are no evaluations"),
    ({"do_eval": False, "eval_batch_size": 3}, "has no effect with do_eval=False"),
    ({"do_eval": False, "metric_for_best_model": "f1"}, "name a metric train"),
    ({"do_eval": False, "early_stopping_patience": 3}, "metric_for_best_model='train.loss'"),
    ({"greater_is_better": True}, "write metric_for_best_model"),
    ({"save_strategy": "no", "save_steps": 3, **DIR}, "has no effect with save_strategy"),
    ({"save_strategy": "steps", **DIR}, "write save_steps"),
    ({"save_steps": 3}, "has no effect with output_dir=None; change output_dir"),
    ({"save_strategy": "epoch"}, "write where to save, such as output_dir"),
    ({"save_steps": 3, "do_last_save": False, **DIR}, "a run that saves also saves its end"),
    ({"resume_from_checkpoint": True, "resume_if_possible": False, **DIR}, "leave one out"),
    ({"resume_from_checkpoint": True, "output_dir": None}, "write where the run is"),
    (
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        "write total_batch_size, the examples of an update",
    ),
    ({"resume_from_checkpoint": "a", "init_weights_from": "b"}, "start from one of them"),
    ({"wandb_name": "a"}, "has no effect with use_wandb=False; change use_wandb"),
    ({"report_metrics": False, "use_wandb": True}, "has no effect with report_metrics"),
    ({"performance_mode": True, "track_memory": True}, "has no effect with performance_mode"),
    (
        {"performance_mode": True, "progress_bar_type": "json"},
        "has no effect with performance_mode",
    ),
    ({"checkpoints_dir": "kept"}, "has no effect with output_dir=None; change output_dir"),
    ({"logs_dir": "kept"}, "has no effect with output_dir=None; change output_dir"),
    ({"save_total_limit": 3, "do_last_save": False, **DIR}, "has no effect with do_last_save"),
    ({"weight_distribution_pattern": "a"}, "has no effect with weight_distribution_log_steps=None"),
    (
        {"progress_bar_type": "none", "metrics_to_show_in_rich_pbar": ("a",)},
        "no effect with progress_bar",
    ),
]


IDS = [",".join(values) for values, _ in CLASHES]


@pytest.mark.parametrize(("values", "message"), CLASHES, ids=IDS)
def test_conflicts_are_refused_with_the_fields_and_what_to_do(values, message):
    with pytest.raises(sf.errors.ConfigError, match=message) as error:
        TrainingArguments(**values)
    assert any(name in str(error.value) for name in values)


@pytest.mark.parametrize(
    "values",
    [
        {"mixed_precision": "bf16", "dtype": "bfloat16"},
        {"do_eval": False, "metric_for_best_model": "train.loss"},
        {"do_eval": False, "evaluation_strategy": "no"},
        {"save_strategy": "epoch", "save_steps": 10, **DIR},
        {"save_strategy": "steps", "save_interval_minutes": 10, **DIR},
        {"do_last_save": False, **DIR},
        {"early_stopping_patience": 3, "greater_is_better": True},
        {"scheduler": "warmup_cosine", "warmup_steps": 3, "learning_rate_end": 1e-6},
        {"num_train_epochs": 3, "max_steps": 100},
    ],
)
def test_fields_that_go_together_are_accepted(values):
    TrainingArguments(**values)


def test_changes_from_the_defaults():
    assert [name for name in FIELDS if is_changed(TrainingArguments(batch_size=2), name)] == [
        "total_batch_size"
    ]
    assert is_changed(TrainingArguments(loss_config={"a": 1}), "loss_config")
