"""What fields are called."""

import inspect
from dataclasses import dataclass, fields

import pytest

import stepfold as sf
from stepfold.adapter import TrainingArguments
from stepfold.adapter.arguments.names import by_any_name, other_names, refuse_unknown

OTHERS = other_names(TrainingArguments)


@pytest.mark.parametrize(("other", "name"), OTHERS.items())
def test_either_name_gives_and_reads_the_value(other, name):
    values = {"output_dir": "a", "scheduler_kwargs": {"power": 1.0}, "scheduler": "cosine"}
    flags = {"shuffle_train_dataset": False, "do_eval": False}
    value = {**values, **flags}.get(name, 3)
    also = {"scheduler": "polynomial"} if name == "scheduler_kwargs" else {}
    arguments = TrainingArguments(**{other: value}, **also)
    assert getattr(arguments, name) == getattr(arguments, other) == value
    assert arguments == TrainingArguments(**{name: value}, **also)


def test_the_names_that_were_promised():
    assert {
        "max_training_steps": "max_steps",
        "evaluation_steps": "eval_steps",
        "save_directory": "output_dir",
        "logging_steps": "log_steps",
        "num_epochs": "num_train_epochs",
        "batch_size": "total_batch_size",
    }.items() <= OTHERS.items()


def test_two_names_that_disagree():
    with pytest.raises(
        sf.ConfigError, match=r"max_steps, max_training_steps: two names .* got 3 and 4"
    ):
        TrainingArguments(max_steps=3, max_training_steps=4)
    assert TrainingArguments(max_steps=3, max_training_steps=3).max_steps == 3


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("learning_rat", "did you mean 'learning_rate'?"),
        ("max_trainin_steps", "did you mean 'max_training_steps'?"),
        ("device", "jax chooses devices"),
        ("metrics", "the loss function returns them"),
        ("evaluate_with_generate", "any function of the state"),
    ],
)
def test_what_is_no_field_says_where_to_look(name, advice):
    with pytest.raises(sf.ConfigError) as error:
        TrainingArguments(**{name: 1})
    assert str(error.value).startswith(f"{name}: TrainingArguments has no such field; ")
    assert advice in str(error.value)


def test_a_name_near_to_nothing():
    with pytest.raises(sf.ConfigError, match="^zzzzz: TrainingArguments has no such field$"):
        TrainingArguments(zzzzz=1)


def test_torchs_name_of_the_rate_is_answered_with_ours():
    with pytest.raises(sf.ConfigError, match="^lr: .* no such field; write learning_rate=…$"):
        TrainingArguments(lr=1e-3)


def test_fields_are_given_by_name():
    with pytest.raises(sf.ConfigError, match="expected fields by name"):
        TrainingArguments("runs/a")


def test_it_is_a_plain_dataclass_to_those_who_look():
    names = [field.name for field in fields(TrainingArguments)]
    assert list(inspect.signature(TrainingArguments).parameters) == names
    assert not OTHERS.keys() & {*names}


def test_a_subclass_has_other_names_too():
    @by_any_name
    @dataclass(frozen=True, kw_only=True)
    class More(TrainingArguments):
        beta: float = 0.1

    more = More(beta=0.2, max_training_steps=7)
    assert (more.beta, more.max_steps) == (0.2, 7)
    assert More.from_json(more.to_json()) == more
    with pytest.raises(sf.ConfigError, match="bet: More has no such field; did you mean 'beta'"):
        More(bet=1.0)


def test_what_easydel_and_hezar_call_their_fields_is_known():
    easydel = """
    model_name num_train_epochs learning_rate learning_rate_end total_batch_size
    per_device_train_batch_size per_device_eval_batch_size eval_batch_size
    gradient_accumulation_steps optimizer extra_optimizer_kwargs scheduler custom_scheduler
    warmup_steps weight_decay clip_grad tx_mu_dtype max_steps max_training_steps
    max_evaluation_steps per_epoch_training_steps per_epoch_evaluation_steps training_time_limit
    step_start_point gradient_checkpointing sharding_array sharding_axis_names
    sharding_dcn_axis_dims step_partition_spec jax_distributed_config dtype param_dtype
    use_fast_kernels max_length truncation_mode shuffle_train_dataset shuffle_seed_train use_grain
    grain_shard_index grain_shard_count dataloader_num_workers ids_to_pop_from_dataset
    remove_unused_columns do_train do_eval evaluation_strategy eval_steps evaluation_steps
    output_dir save_directory save_strategy save_steps save_interval_minutes save_total_limit
    save_optimizer_state do_last_save resume_if_possible remove_ckpt_after_load logging_steps
    log_steps report_steps report_metrics log_all_workers log_grad_norms progress_bar_type
    metrics_to_show_in_rich_pbar use_wandb wandb_entity wandb_name trainer_prefix
    weight_distribution_pattern weight_distribution_log_steps track_memory performance_mode
    process_zero_is_admin verbose pruning_module frozen_parameters init_tx auto_shard_states
    aux_loss_enabled loss_config
    """
    hezar = """
    output_dir num_epochs init_weights_from resume_from_checkpoint max_steps num_dataloader_workers
    dataloader_shuffle seed optimizer learning_rate weight_decay lr_scheduler lr_scheduler_kwargs
    batch_size eval_batch_size gradient_accumulation_steps mixed_precision do_evaluate
    metric_for_best_model save_steps log_steps checkpoints_dir logs_dir
    """
    known = {field.name for field in fields(TrainingArguments)} | OTHERS.keys()
    assert {*easydel.split(), *hezar.split()} <= known


def test_a_name_that_is_near_none_is_told_all_there_are():
    with pytest.raises(sf.ConfigError, match="Trainer: there is no 'xyz'; there are alpha, beta"):
        refuse_unknown("Trainer", ["xyz"], ["alpha", "beta"])


def test_known_names_pass():
    refuse_unknown("Trainer", ["beta"], ["alpha", "beta"])
