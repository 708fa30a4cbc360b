"""Fields held against each other."""

import optax
import pytest

import stepfold as sf
from stepfold.adapter import TrainingArguments

SCHEDULE = optax.constant_schedule(0.1)
DIR = {"output_dir": "runs/a"}

CLASHES = [
    ({"custom_scheduler": SCHEDULE, "scheduler": "linear"}, "says all of the rate"),
    ({"custom_scheduler": SCHEDULE, "learning_rate": 0.1}, "says all of the rate"),
    ({"custom_scheduler": SCHEDULE, "warmup_steps": 3}, "says all of the rate"),
    ({"scheduler": "warmup_cosine"}, "warmup_steps=0 .* give warmup_steps of at least 1"),
    ({"learning_rate_end": 0.0}, "a constant rate ends where it begins"),
    ({"scheduler": "linear", "learning_rate_end": 1.0}, "a rate that rises"),
    ({"scheduler": "exponential"}, "never gets to 0"),
    ({"scheduler": "linear", "scheduler_kwargs": {"power": 2}}, "linear takes none"),
    ({"optimizer": "sgd", "extra_optimizer_kwargs": {"b1": 0.1}}, "sgd takes momentum"),
    ({"weight_decay": 0.1, "extra_optimizer_kwargs": {"weight_decay": 0.1}}, "say it once"),
    ({"optimizer": "adagrad", "tx_mu_dtype": "bf16"}, "takes no dtype for a first moment"),
    ({"tx_mu_dtype": "bf16", "extra_optimizer_kwargs": {"mu_dtype": "float16"}}, "say it once"),
    ({"optimizer": "sgd", "tx_mu_dtype": "bf16"}, "no moment without momentum"),
    ({"sharding_axis_names": ("a", "a", "b", "c")}, "expected names that differ"),
    ({"sharding_array": (1, -1)}, "one size for each name"),
    ({"sharding_dcn_axis_dims": (1, -1)}, "one size for each name"),
    ({"step_partition_spec": ("zz",)}, "name axes of the mesh, each once"),
    ({"step_partition_spec": ("dp", "dp")}, "name axes of the mesh, each once"),
    ({"mixed_precision": "bf16", "dtype": "float16"}, "two ways to say one thing"),
    ({"grain_shard_index": 0}, "give both or neither"),
    ({"grain_shard_index": 2, "grain_shard_count": 2}, "the first share is 0"),
    ({"shuffle_train_dataset": False, "shuffle_seed_train": 3}, "nothing is shuffled"),
    ({"truncation_mode": "keep_start"}, "nothing is cut"),
    ({"do_train": False, "do_eval": False}, "nothing would be done"),
    ({"max_steps": 5, "step_start_point": 5}, "there would be no step"),
    ({"evaluation_strategy": "steps"}, "give eval_steps"),
    ({"evaluation_strategy": "epoch", "eval_steps": 3}, "write evaluation_strategy='steps'"),
    ({"evaluation_strategy": "no", "eval_steps": 3}, "write evaluation_strategy='steps'"),
    ({"do_eval": False, "evaluation_strategy": "epoch"}, "there are no evaluations"),
    ({"do_eval": False, "eval_batch_size": 3}, "there are no evaluations"),
    ({"do_eval": False, "metric_for_best_model": "f1"}, "name a metric train"),
    ({"do_eval": False, "early_stopping_patience": 3}, "metric_for_best_model='train.loss'"),
    ({"greater_is_better": True}, "say of which metric"),
    ({"save_strategy": "no", "save_steps": 3, **DIR}, "nothing would be saved between"),
    ({"save_strategy": "steps", **DIR}, "give save_steps"),
    ({"save_steps": 3}, "say where, with output_dir"),
    ({"save_strategy": "epoch"}, "say where, with output_dir"),
    ({"save_steps": 3, "do_last_save": False, **DIR}, "a run that saves also saves what it ends"),
    ({"resume_from_checkpoint": True, "resume_if_possible": False}, "leave one out"),
    ({"resume_from_checkpoint": "a", "init_weights_from": "b"}, "begin with one of them"),
    ({"wandb_name": "a"}, "write use_wandb=True"),
    ({"report_metrics": False, "use_wandb": True}, "nothing is written"),
    ({"performance_mode": True, "track_memory": True}, "nothing is shown or written"),
    ({"performance_mode": True, "progress_bar_type": "json"}, "nothing is shown or written"),
    ({"checkpoints_dir": "kept"}, "say where, with output_dir"),
    ({"weight_distribution_pattern": "a"}, "say how often"),
    ({"progress_bar_type": "none", "metrics_to_show_in_rich_pbar": ("a",)}, "there is no bar"),
]


IDS = [",".join(fields) for fields, _ in CLASHES]


@pytest.mark.parametrize(("fields", "why"), CLASHES, ids=IDS)
def test_what_does_not_go_together_is_refused_with_both_names(fields, why):
    with pytest.raises(sf.ConfigError, match=why) as error:
        TrainingArguments(**fields)
    assert any(name in str(error.value) for name in fields)


@pytest.mark.parametrize(
    "fields",
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
def test_what_goes_together_is_taken(fields):
    TrainingArguments(**fields)
