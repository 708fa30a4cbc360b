"""`TrainerConfig`: the config of Hezar's trainer, and the parts of a run that it describes."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import jax
import optax

from stepfold.adapter.arguments import TrainingArguments, by_any_name
from stepfold.adapter.fields import (
    FROM_ZERO,
    NOT_NEGATIVE,
    PATH,
    RESUME,
    SEED,
    FieldRule,
    Mixed,
    is_changed,
    setting,
    store_fields,
)
from stepfold.adapter.from_arguments import (
    best_metric,
    make_optimizer,
    make_schedule,
    writers,
)
from stepfold.adapter.hezar_metrics import TASKS, MetricConfig, read_metric_configs
from stepfold.adapter.model_trainer import refuse_torch
from stepfold.adapter.optimizers import (
    find_optimizer,
    is_plateau,
    parse_scheduler,
    plateau_hook,
)
from stepfold.adapter.parts import RunParts
from stepfold.adapter.run import stop_on_skipped
from stepfold.core.metric_modes import known_mode
from stepfold.core.optimizer import as_optimizer
from stepfold.core.validation import absolute_path, is_url, read_choice, read_function, suggest
from stepfold.errors import refuse
from stepfold.hooks.progress import progress
from stepfold.loop.hook import AnyHook
from stepfold.runs.info import move_previous_run
from stepfold.tree import describe_value
from stepfold.writers.combinators import log_to

_METRICS = FieldRule("a list of names", lambda v: isinstance(v, list | tuple), tuple)
_DEVICE = FieldRule(
    "a platform with or without a number, such as 'cuda:0', or one of jax.devices()",
    lambda v: isinstance(v, jax.Device) or (isinstance(v, str) and v.strip()),
)


@by_any_name
@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The parameters that Hezar documents of its `TrainerConfig`, checked when it is built.

    >>> config = TrainerConfig(task="text_classification", num_epochs=3, metrics=["f1"])
    >>> config.seed, config.metric_for_best_model
    (42, None)
    >>> TrainerConfig(num_epochs=3, metrics=["f2"])
    Traceback (most recent call last):
    ...
    stepfold.errors.ConfigError: metrics: expected some of accuracy, f1, precision, recall, cer, ...
    """

    task: str | None = None
    """Task, which limits the metrics to its own."""
    output_dir: str | None = setting(None, PATH)
    """Directory of everything a run writes; None writes nothing."""
    device: Any = setting(None, _DEVICE)
    """Device to train on, such as cpu or cuda:0; by default the first of jax."""
    num_epochs: int | None = None
    """Epochs to train; without it, max_steps."""
    init_weights_from: str | None = setting(None, PATH)
    """Checkpoint or safetensors on disk to initialize the parameters from, and nothing else."""
    resume_from_checkpoint: bool | str | None = setting(None, RESUME)
    """True resumes from the newest checkpoint in output_dir, a path from that one."""
    max_steps: int | None = setting(None, none=(-1, 0))
    """Maximum number of steps in total."""
    num_dataloader_workers: int = setting(4, FROM_ZERO)
    """Batches that a thread makes ahead; 0 makes each when it is needed."""
    dataloader_shuffle: bool = True
    """Shuffle the examples of each epoch in a new order, which depends on the seed."""
    seed: int = setting(42, SEED)
    """Seed of the order of the examples and of the keys of the steps."""
    optimizer: str = "adam"
    """Name of an optimizer in optax or optax.contrib."""
    learning_rate: float = 2e-5
    """Initial learning rate."""
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """Weight decay, an argument of the optimizer if it has one, else added to the gradient."""
    lr_scheduler: str | None = None
    """Name of a schedule, as in TrainingArguments; by default the rate is constant."""
    lr_scheduler_kwargs: dict[str, Any] = setting(dict)
    """Further arguments of the schedule, warmup_steps and learning_rate_end."""
    batch_size: int = 8
    """Examples of a microbatch on each device."""
    eval_batch_size: int | None = None
    """Examples of an evaluation batch on each device; by default batch_size."""
    gradient_accumulation_steps: int = 1
    """Microbatches of a step, which has this many times batch_size examples."""
    distributed: bool = False
    """Train on all devices of all processes."""
    mixed_precision: Mixed | None = None
    """Dtype to compute in, one of bf16, fp16 (with a dynamic loss scale) and full."""
    use_cpu: bool = False
    """Train on the CPU even if there is another device."""
    do_evaluate: bool = True
    """Evaluate after each epoch of train()."""
    evaluate_with_generate: bool | None = None
    """Compute metrics of what generate returns; by default if the trainer or the model has it."""
    metrics: tuple[Any, ...] = setting((), _METRICS)
    """Metrics of the evaluation, by name or as MetricConfig."""
    metric_for_best_model: str | None = None
    """Metric of the best checkpoint, train.x or evaluation.x; x is evaluation.x."""
    save_steps: int | None = setting(None, none=(0,))
    """Steps between two checkpoints besides those of each epoch; None or 0 saves only these."""
    log_steps: int = 10
    """Steps between two writes of the training metrics."""
    checkpoints_dir: str = "checkpoints"
    """Folder of the checkpoints in output_dir."""
    logs_dir: str = "logs"
    """Folder of the logs in output_dir."""

    def __post_init__(self) -> None:
        store_fields(self, _HINTS)
        if self.task is not None:
            read_choice("task", self.task, tuple(TASKS))
        if self.num_epochs is None and self.max_steps is None:
            refuse("num_epochs", "a number of epochs, or max_steps", "neither")
        find_optimizer(self.optimizer, "the trainer optimizer=…")
        other = "the trainer lr_scheduler=…, a schedule of optax,"
        parse_scheduler(self.lr_scheduler or "none", "lr_scheduler", other)
        object.__setattr__(self, "metrics", tuple(read_metric_configs(self.metrics, self.task)))
        if (best := self.metric_for_best_model) is not None and known_mode(best) is None:
            expected = "a name that says which value is better, as that of a loss does"
            refuse("metric_for_best_model", expected, repr(best), "rename the metric")
        if self.init_weights_from is not None:
            _check_weights(self.init_weights_from)
        if isinstance(self.device, str):
            object.__setattr__(self, "device", self.device.strip())


_HINTS = get_type_hints(TrainerConfig)  # fields of a subclass are not checked


def _check_weights(path: str) -> None:
    """Refuse a path that does not exist, such as the name of a model on the Hub."""
    if is_url(path) or os.path.exists(path):
        return
    advice = (
        "download a model of the Hub first, as huggingface_hub.snapshot_download(name), and give "
        "the folder that it returns"
    )
    refuse("init_weights_from", "a path that exists", repr(path), advice)


# Devices and sizes


def find_devices(config: TrainerConfig) -> Sequence[jax.Device]:
    """Return the devices of a run: one, or all of its platform if it is distributed."""
    device = "cpu" if config.use_cpu else config.device
    if device is not None and not isinstance(device, str):
        if config.distributed:
            expected = "the name of a platform, or None, with distributed=True"
            refuse("device", expected, describe_value(device))
        return [device]
    platform, _, index = (device or "").partition(":")
    try:
        devices = jax.devices(platform or None)
        own = [each for each in devices if each.process_index == jax.process_index()]
        chosen = own[int(index or 0)]
    except (RuntimeError, ValueError, IndexError) as error:
        known = ", ".join(f"{each.platform}:{each.id}" for each in jax.devices())
        advice = "give one of these, or leave it out"
        refuse("device", f"one of jax's, {known}", repr(device), advice, cause=error)
    return devices if config.distributed else [chosen]


_SAME = ("seed", "optimizer", "learning_rate", "weight_decay", "gradient_accumulation_steps",
         "mixed_precision", "init_weights_from", "log_steps", "metric_for_best_model",
         "resume_from_checkpoint")  # fmt: skip
_OF_OUTPUT = ("output_dir", "save_steps", "checkpoints_dir", "logs_dir")


def make_arguments(config: TrainerConfig, devices: int) -> TrainingArguments:
    """Describe the run by `TrainingArguments`, which has the sizes of a step over all devices."""
    options = dict(config.lr_scheduler_kwargs)
    warmup, end = options.pop("warmup_steps", 0), options.pop("learning_rate_end", None)
    size = config.batch_size * devices
    has_output = config.output_dir is not None
    same = {name: getattr(config, name) for name in _SAME}
    same |= {name: getattr(config, name) for name in _OF_OUTPUT if has_output}
    return TrainingArguments(
        **same,
        scheduler=config.lr_scheduler,
        scheduler_kwargs=options,
        warmup_steps=warmup,
        learning_rate_end=end,
        num_train_epochs=config.num_epochs or 1,
        total_batch_size=size * config.gradient_accumulation_steps,
        eval_batch_size=(config.eval_batch_size or config.batch_size) * devices,
        auto_shard_states=False,
        save_strategy="epoch" if has_output else None,
        report_to=("csv", "tensorboard") if has_output else (),
        resume_if_possible=bool(config.resume_from_checkpoint),
    )


# The optimizer


def make_optimizers(
    config: TrainerConfig,
    arguments: TrainingArguments,
    steps: int,
    optimizer: optax.GradientTransformation | None,
    lr_scheduler: optax.Schedule | None,
) -> tuple[optax.GradientTransformation, optax.Schedule | None]:
    """Return the optimizer without a loss scale, and its schedule if it is known.

    An optimizer or a schedule that is an object replaces that of the config.
    """
    rates = ("learning_rate", "lr_scheduler", "lr_scheduler_kwargs")
    replaced = {
        "optimizer": ("optimizer", "weight_decay", *rates) if optimizer is not None else (),
        "lr_scheduler": rates if lr_scheduler is not None else (),
    }
    for name, fields in replaced.items():
        for field in fields:
            if is_changed(config, field):
                expected = "a config that does not set what it replaces"
                refuse(name, expected, f"{field}={getattr(config, field)!r:.60}", "leave one out")
    if optimizer is not None:
        refuse_torch("optimizer", optimizer, "give one of optax, such as optax.adam(1e-3)")
        if lr_scheduler is not None:
            advice = "give the schedule to optax, as optax.adam(schedule)"
            refuse("lr_scheduler", "None with an optimizer", describe_value(lr_scheduler), advice)
        return as_optimizer(optimizer), None
    if lr_scheduler is not None:
        advice = "such as optax.linear_schedule(1e-3, 0.0, 1000)"
        refuse_torch("lr_scheduler", lr_scheduler, f"give a schedule of optax, {advice}")
        read_function("lr_scheduler", lr_scheduler, "a function of the step to a rate", advice)
    schedule = lr_scheduler or make_schedule(arguments, steps)
    return make_optimizer(arguments.replace(mixed_precision=None), schedule), schedule


# The metric of the best checkpoint


def check_best_metric(
    config: TrainerConfig, arguments: TrainingArguments, handler: Any, *, evaluates: bool
) -> None:
    """Refuse a schedule or a `metric_for_best_model` whose metric no evaluation measures.

    A custom metrics handler may measure any metric.
    """
    if is_plateau(config.lr_scheduler) and not evaluates:
        expected = "an evaluation, to measure the loss"
        refuse("lr_scheduler", f"{expected} that {config.lr_scheduler} watches", "none")
    metric, wanted = best_metric(arguments)[0], config.metric_for_best_model
    if metric is None:
        return
    if config.output_dir is None:
        refuse("metric_for_best_model", "an output_dir for checkpoints", "None")
    kind, _, name = metric.partition("/")
    if kind == "eval":
        if not evaluates:
            advice = "give eval_dataset, or 'train.loss'"
            refuse("metric_for_best_model", f"an evaluation, to measure {wanted}", "none", advice)
        own: list[MetricConfig] = list(config.metrics)
        names = ["loss", *(each.name for each in own)]
        if handler is None and name not in names:
            expected = f"one of {', '.join(names)}, with or without 'evaluation.', or 'train.loss'"
            advice = suggest(name, names) or "add it to metrics"
            refuse("metric_for_best_model", expected, repr(wanted), advice)


# Hooks, and the preprocessor


def make_hooks(parts: RunParts, step: int, *, may_resume: bool) -> list[AnyHook]:
    """Make the hooks that stop a run at a NaN, show its progress and write its metrics.

    `step` is that of the state. Checkpoints that the run may not resume from are refused.
    """
    arguments = parts.arguments
    hooks: list[AnyHook] = [stop_on_skipped(arguments), progress()]
    if is_plateau(arguments.scheduler):
        hooks.append(plateau_hook(arguments.scheduler_kwargs))
    if parts.checkpoint_manager is None:
        return hooks
    newest = parts.checkpoint_manager.latest_step()
    if newest is not None and not may_resume:
        got = f"{arguments.output_dir} with one of step {newest}"
        advice = "set resume_from_checkpoint=True, or give another output_dir"
        refuse("output_dir", "a directory without checkpoints", got, advice)
    if jax.process_index() == 0:
        if newest is None or newest <= step:
            move_previous_run(parts.logs_path, step)
        hooks.append(log_to(writers(arguments)))
    return hooks


def find_save_method(preprocessor: Any) -> Callable[[Any], Any] | None:
    """Return the method that saves a preprocessor to a folder."""
    if preprocessor is None:
        return None
    names = ("save_pretrained", "save")
    methods = [getattr(preprocessor, name, None) for name in names]
    save = next(filter(callable, methods), None)
    if save is None:
        expected, advice = "an object with save(path)", "which is called next to the checkpoints"
        refuse("preprocessor", expected, describe_value(preprocessor), advice)
    return save


def save_preprocessor(config: TrainerConfig, preprocessor: Any) -> None:
    """Save a preprocessor next to the checkpoints, if there are any."""
    save = find_save_method(preprocessor)
    if save is not None and config.output_dir is not None and jax.process_index() == 0:
        path = absolute_path("output_dir", config.output_dir) / "preprocessor"
        path.mkdir(parents=True, exist_ok=True)
        save(path)
