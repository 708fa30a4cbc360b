"""Checks of `TrainingArguments` as a whole, and of arguments of the trainer."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from stepfold import tree
from stepfold.adapter.fields import MIXED, declarations, is_changed, is_function
from stepfold.adapter.optimizers import (
    MOMENT_DTYPES,
    check_optimizer_options,
    check_scheduler_options,
    optimizer_options,
    parse_scheduler,
)
from stepfold.core.metric_modes import known_mode
from stepfold.errors import ConfigError, refuse, warn
from stepfold.sharding.mesh import axes_of


def check_combinations(a: Any) -> None:
    """Raise a ConfigError if fields do not go together."""
    for name, declared in declarations(type(a)).items():
        for other, value in declared.get("unused", ()):
            if getattr(a, other) == value and is_changed(a, name):
                raise ConfigError(
                    f"{name}={getattr(a, name)!r:.60} has no effect with {other}={value!r}; "
                    f"change {other}, or leave {name} out"
                )
    check_scheduler_options(a.scheduler or "none", a.scheduler_kwargs)
    check_optimizer_options(a.optimizer, a.extra_optimizer_kwargs)
    conflicts = _conflicts_of_optimizer(a), _conflicts_of_data(a), _conflicts_of_output(a)
    for first, second, advice in itertools.chain(*conflicts):
        pair = " and ".join(f"{name}={getattr(a, name)!r:.60}" for name in (first, second))
        raise ConfigError(f"{pair} do not go together: {advice}")


_Conflicts = Iterator[tuple[str, str, str]]  # two fields, and what to do


def _conflicts_of_optimizer(a: Any) -> _Conflicts:
    decay, needs_warmup = parse_scheduler(a.scheduler or "none")
    end = a.learning_rate_end
    rate = "scheduler learning_rate learning_rate_end warmup_steps scheduler_kwargs"
    for name in rate.split() if a.custom_scheduler is not None else ():
        if is_changed(a, name):
            advice = "a custom schedule sets the whole learning rate; leave one out"
            yield name, "custom_scheduler", advice
    if needs_warmup and not a.warmup_steps:
        yield "scheduler", "warmup_steps", "write warmup_steps of at least 1"
    if end is not None and decay == "constant":
        yield "scheduler", "learning_rate_end", "a constant rate ends where it begins"
    if end is not None and end > a.learning_rate:
        yield "learning_rate", "learning_rate_end", "a rate that rises needs custom_scheduler"
    if decay == "exponential" and not end:
        yield "scheduler", "learning_rate_end", "it never gets to 0; write an end above 0"
    options, known = a.extra_optimizer_kwargs, optimizer_options(a.optimizer)
    if a.weight_decay is not None and "weight_decay" in options:
        yield "weight_decay", "extra_optimizer_kwargs", "set the weight decay once"
    if a.tx_mu_dtype is not None:
        if known.keys().isdisjoint(MOMENT_DTYPES):
            yield "optimizer", "tx_mu_dtype", "it takes no dtype for a first moment; leave it out"
        if not options.keys().isdisjoint(MOMENT_DTYPES):
            yield "tx_mu_dtype", "extra_optimizer_kwargs", "set the dtype once"
        if known.get("momentum", 0) is None and options.get("momentum") is None:
            advice = "without momentum there is no first moment"
            yield "tx_mu_dtype", "extra_optimizer_kwargs", advice


def _conflicts_of_data(a: Any) -> _Conflicts:
    has_total = a.total_batch_size is not None
    if a.per_device_train_batch_size and a.gradient_accumulation_steps > 1 and not has_total:
        advice = "write total_batch_size, the examples of an update over all microbatches"
        yield "per_device_train_batch_size", "gradient_accumulation_steps", advice
    axes = [axis for entry in a.step_partition_spec or () for axis in axes_of(entry)]
    if any(axis not in a.sharding_axis_names or axes.count(axis) > 1 for axis in axes):
        yield "step_partition_spec", "sharding_axis_names", "name axes of the mesh, each once"
    if a.mixed_precision is not None and a.dtype not in (None, MIXED[a.mixed_precision]):
        yield "mixed_precision", "dtype", "both set the same dtype; leave one out"
    index, count = a.grain_shard_index, a.grain_shard_count
    if (index is None) != (count is None):
        yield "grain_shard_index", "grain_shard_count", "write both or neither"
    if index is not None and count is not None and index >= count:
        yield "grain_shard_index", "grain_shard_count", "the first shard is 0"
    if not (a.do_train or a.do_eval):
        yield "do_train", "do_eval", "the run would do nothing; leave one out"
    if type(a.max_steps) is int and a.step_start_point >= a.max_steps:
        yield "step_start_point", "max_steps", "there would be no step; start earlier"


def _conflicts_of_output(a: Any) -> _Conflicts:
    # Evaluations.
    strategy, metric = a.evaluation_strategy, a.metric_for_best_model
    if strategy == "steps" and a.eval_steps is None:
        yield "evaluation_strategy", "eval_steps", "write eval_steps"
    if not a.do_eval and strategy not in (None, "no"):
        yield "evaluation_strategy", "do_eval", "there are no evaluations; leave one out"
    if not a.do_eval or strategy == "no":
        off = "evaluation_strategy" if a.do_eval else "do_eval"
        if metric is not None and not metric.startswith(("train.", "train/")):
            yield "metric_for_best_model", off, "there are no evaluations; name a metric train.…"
        if metric is None and a.early_stopping_patience is not None:
            yield "early_stopping_patience", off, "write metric_for_best_model='train.loss'"
    if a.greater_is_better is not None and metric is None and a.early_stopping_patience is None:
        yield "greater_is_better", "metric_for_best_model", "write metric_for_best_model"
    if a.greater_is_better is None and metric is not None and known_mode(metric) is None:
        advice = (
            "the name does not say which value is better; write greater_is_better=True or False"
        )
        yield "metric_for_best_model", "greater_is_better", advice

    # Checkpoints.
    has_interval = (a.save_steps, a.save_interval_minutes) != (None, None)
    if a.save_strategy == "steps" and not has_interval:
        yield "save_strategy", "save_steps", "write save_steps"
    if a.save_strategy in ("steps", "epoch") and a.output_dir is None:
        yield "save_strategy", "output_dir", "write where to save, such as output_dir='runs/a'"
    if not a.do_last_save and (a.save_strategy == "epoch" or has_interval):
        interval = "save_strategy" if a.save_strategy else "save_steps"
        advice = "a run that saves also saves its end, so that it can be resumed"
        yield "do_last_save", interval, advice
    if a.resume_from_checkpoint is True and a.output_dir is None:
        advice = "write where the run is that is to be resumed"
        yield "resume_from_checkpoint", "output_dir", advice
    if a.resume_from_checkpoint is True and not a.resume_if_possible:
        yield "resume_from_checkpoint", "resume_if_possible", "leave one out"
    if a.init_weights_from is not None and isinstance(a.resume_from_checkpoint, str):
        yield "init_weights_from", "resume_from_checkpoint", "start from one of them"


# Checks of other arguments


_SETTINGS = ("weight_decay", "max_grad_norm", "scheduler_step_per_batch")


def check_config(config: Any) -> None:
    """Refuse a `config` with settings of the training, as qurious has, or of TrainingArguments."""
    values, training = _attributes(config), _attributes(_attributes(config).get("training"))
    settings = [name for name in _SETTINGS if name in training or f"training.{name}" in values]
    if settings or hasattr(config, "num_train_epochs"):
        expected = "the configuration of the model"
        got = f"training.{settings[0]}" if settings else tree.describe_value(config)
        advice = "settings of the training are fields of TrainingArguments, such as max_grad_norm"
        if settings == ["scheduler_step_per_batch"]:
            advice = "a schedule counts steps; for one of epochs give custom_scheduler"
        refuse("config", expected, got, advice)


def _attributes(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else getattr(value, "__dict__", {})


# Methods of other trainers, and the method or argument that has their place here.
_METHODS = {
    "configure_functions": "train_step eval_step training_step validation_step prediction_step "
    "optimization_step _forward_pass _compute_loss compute_loss",
    "create_collect_function": "_prepare_batch prepare_input_batch",
    "configure_dataloaders": "create_train_dataloader create_eval_dataloader train_dataloader "
    "val_dataloader get_train_dataloader get_eval_dataloader",
    "configure_model": "create_optimizer create_scheduler create_optimizer_and_scheduler "
    "configure_optimizers",
    "save_pretrained": "_save_checkpoint",
    "train": "inner_training_loop train_epoch",
}


def check_methods(trainer: Any) -> None:
    """Warn of a method of another library's trainer that a run does not call.

    There is no warning if a subclass overrides the method in its place, which may call it.
    """
    kind = type(trainer)
    for ours, names in _METHODS.items():
        for name in names.split():
            owner = next((base for base in kind.__mro__ if name in vars(base)), None)
            is_used = owner is None or owner.__module__.startswith("stepfold.")
            if not is_used and callable(getattr(kind, name)) and not trainer.overrides(ours):
                text = f"{kind.__name__}.{name}: a run calls no method of this name"
                warn(f"{text}; override {ours} in its place, or to call it")


def check_functions(**values: Any) -> None:
    """Refuse values by name that are neither functions nor None."""
    for name, value in values.items():
        if value is not None and not is_function(value):
            refuse(name, "a function", tree.describe_value(value))


def check_list(
    name: str,
    values: Any,
    expected: str,
    kind: type | None = None,
    others: tuple[type, ...] = (),
) -> list[Any]:
    """Check that values are of type `kind` (functions if it is None) or of `others`."""
    if not isinstance(values, list | tuple):
        refuse(name, f"a list of {expected}", tree.describe_value(values))
    for index, value in enumerate(values):
        is_one = is_function(value) if kind is None else isinstance(value, kind)
        if not is_one and not isinstance(value, others):
            item = "a function" if kind is None else expected
            refuse(f"{name}[{index}]", item, tree.describe_value(value))
    return list(values)
