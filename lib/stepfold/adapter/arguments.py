"""`TrainingArguments`: a training run described by names and numbers, checked when it is built."""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Self, TypeVar, get_type_hints

from stepfold.adapter.fields import (
    DIMS,
    DTYPE,
    DURATION,
    FROM_ZERO,
    NOT_NEGATIVE,
    PATH,
    PATTERN,
    PRUNING,
    RESUME,
    SEED,
    SPEC,
    STEPS,
    Bar,
    MetricFile,
    Mixed,
    Remat,
    Strategy,
    Truncation,
    aliases_of,
    check_field,
    default_of,
    setting,
    store_fields,
)
from stepfold.adapter.validation import check_combinations
from stepfold.core.validation import absolute_path, suggest
from stepfold.errors import ConfigError, refuse, warn

# Values of other fields with which a field has no effect.
_NO_EVALUATION = ("do_eval", False), ("evaluation_strategy", "no")
_NO_INTERVAL = (*_NO_EVALUATION, ("evaluation_strategy", "epoch"))
_NO_DIRECTORY = (("output_dir", None),)
_NO_SAVES = ("save_strategy", "no"), ("output_dir", None)
_NO_CHECKPOINTS = ("output_dir", None), ("do_last_save", False)
_NO_ORDER = (("shuffle_train_dataset", False),)
_NO_LENGTH = (("max_length", None),)
_NO_BAR = (("progress_bar_type", "none"),)
_QUIET = (("performance_mode", True),)
_NO_METRICS = ("report_metrics", False), ("performance_mode", True)
_NO_WEIGHTS = (("weight_distribution_log_steps", None),)
_NO_WANDB = (("use_wandb", False),)
Class = TypeVar("Class", bound=type)


def by_any_name(cls: Class) -> Class:
    """Let a dataclass be built by the aliases of its fields, and refuse misspelt names.

    Decorates `TrainingArguments`, and belongs above `@dataclass` on each subclass. The class stays
    a standard dataclass: `dataclasses.fields`, its signature and command-line parsers see each
    field once.

    >>> from dataclasses import dataclass
    >>> from stepfold.adapter import TrainingArguments, by_any_name
    >>> @by_any_name
    ... @dataclass(frozen=True, kw_only=True)
    ... class MyArguments(TrainingArguments):
    ...     temperature: float = 1.0
    >>> MyArguments(temperature=0.5, max_training_steps=10).max_steps
    10
    """
    init: Any = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def init_by_any_name(self: Any, *args: Any, **kwargs: Any) -> None:
        if args:
            expected = "fields by name, such as learning_rate=1e-3"
            refuse(type(self).__name__, expected, f"{args[0]!r:.80}")
        init(self, **_resolve_aliases(type(self), kwargs))

    cls.__init__ = init_by_any_name  # type: ignore[misc]
    for alias, name in aliases_of(cls).items():
        setattr(cls, alias, property(attrgetter(name), doc=f"Alias of `{name}`."))
    return cls


@by_any_name
@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    """Describe a training run by names and numbers.

    A frozen standard dataclass, which command-line parsers such as tyro and simple-parsing accept.
    Its fields are checked when it is built, alone and together, and a misspelt name is refused.
    Functions such as `compute_sizes`, `make_optimizer`, `make_mesh` and `checkpoints` make the
    parts of a run from it, and each can be used alone.

    Some fields have an alias, such as `max_training_steps` for `max_steps`. Either name sets and
    reads the field; JSON has the name of the field itself.

    >>> from stepfold.adapter import TrainingArguments
    >>> arguments = TrainingArguments(learning_rate=3e-4, max_training_steps=1_000)
    >>> arguments.max_steps, TrainingArguments.from_json(arguments.to_json()) == arguments
    (1000, True)
    >>> TrainingArguments(learning_rat=3e-4)
    Traceback (most recent call last):
    ...
    stepfold.errors.ConfigError: learning_rat: TrainingArguments has no such field; did you mean ...
    >>> TrainingArguments(total_batch_size=-1)
    Traceback (most recent call last):
    ...
    stepfold.errors.ConfigError: total_batch_size: expected an integer of at least 1, got -1
    """

    # Length and batch sizes; `compute_sizes` has the numbers.
    num_train_epochs: int = setting(1, alias="num_epochs")
    """Epochs to train, unless max_steps is set."""
    max_steps: int | float | None = setting(None, STEPS, alias="max_training_steps", none=(-1, 0))
    """Steps to train, instead of num_train_epochs; a fraction is of the steps of these epochs; None
    or -1 is all of them."""
    per_epoch_training_steps: int | None = None
    """Steps of an epoch; by default those of the whole dataset."""
    step_start_point: int = setting(0, FROM_ZERO)
    """First step, of the state's counter, the schedule and the data."""
    training_time_limit: float | str | None = setting(None, DURATION)
    """Time after which training stops, in seconds or as a text such as '1h30m'."""
    total_batch_size: int | None = setting(None, alias="batch_size")
    """Examples in a step, over all devices and microbatches; 32 unless a size is set."""
    per_device_train_batch_size: int | None = None
    """Examples on a device; times the devices, they are the batch. Together with total_batch_size,
    the most on a device at once; the rest is accumulated."""
    gradient_accumulation_steps: int = 1
    """Microbatches that the batch of a step is split into; the result is equal."""
    steps_per_call: int = 1
    """How many steps are dispatched in one call at most, with the same bits."""
    eval_batch_size: int | None = setting(None, unused=_NO_EVALUATION)
    """Examples in an evaluation batch, over all devices; by default a step's."""
    per_device_eval_batch_size: int | None = setting(None, unused=_NO_EVALUATION)
    """Examples on a device in the evaluation, instead of eval_batch_size."""

    # Optimizer and schedule; `make_optimizer` and `make_schedule` make them.
    optimizer: str = "adamw"
    """Name of an optimizer in optax or optax.contrib."""
    extra_optimizer_kwargs: dict[str, Any] = setting(dict)
    """Further arguments of the optimizer, by their names in optax."""
    learning_rate: float = 5e-5
    """Peak learning rate."""
    learning_rate_end: float | None = setting(None, NOT_NEGATIVE)
    """Learning rate at the last step; 0 by default."""
    scheduler: str | None = setting(None, alias="lr_scheduler lr_scheduler_type")
    """Decay of the learning rate, one of none, constant, linear, cosine, polynomial, exponential,
    inverse_sqrt, wsd, cosine_restarts and reduce_on_plateau, which watches the evaluation loss. The
    prefix `warmup_` requires warmup_steps."""
    scheduler_kwargs: dict[str, Any] = setting(dict, alias="lr_scheduler_kwargs")
    """Further arguments of the schedule, such as power, decay or cycles."""
    custom_scheduler: Callable[..., Any] | None = None
    """An optax schedule, or a function from the number of steps to one, instead of learning_rate,
    scheduler and warmup_steps."""
    warmup_steps: int = setting(0, FROM_ZERO)
    """Steps of a linear warmup from 0, before the decay."""
    weight_decay: float | None = setting(None, NOT_NEGATIVE)
    """Weight decay, an argument of the optimizer if it has one, else added to the gradient; None
    leaves it to the optimizer."""
    clip_grad: float | None = setting(None, alias="max_grad_norm")
    """Largest global norm of the gradients."""
    tx_mu_dtype: str | None = setting(None, DTYPE)
    """Dtype of the optimizer's first moment, if it has such an argument."""
    frozen_parameters: str | None = setting(None, PATTERN)
    """Regular expression; parameters whose path it matches get no update and no optimizer state."""
    pruning_module: Any = setting(None, PRUNING)
    """Wrapper of the optimizer, a function of it or an object with wrap_optax(tx)."""
    init_tx: bool = True
    """Initialize the optimizer state if model_state has none that fits; False raises instead."""

    # Devices, dtypes and rematerialization.
    sharding_array: tuple[int, ...] = setting((1, -1, 1, 1), DIMS)
    """Devices along each axis of the mesh; -1 is all that are left."""
    sharding_axis_names: tuple[str, ...] = ("dp", "fsdp", "tp", "sp")
    """Names of these axes."""
    sharding_dcn_axis_dims: tuple[int, ...] | None = setting(None, DIMS)
    """Slices, connected by a slower network, along each axis."""
    step_partition_spec: tuple[Any, ...] | None = setting(None, SPEC)
    """How a batch is sharded, by dimension; by default its examples over dp and fsdp."""
    auto_shard_states: bool = True
    """Shard the state over fsdp; False replicates it on every device."""
    jax_distributed_config: dict[str, Any] | None = None
    """Arguments of jax.distributed.initialize; {} detects them, None does not call it."""
    dtype: str | None = setting(None, DTYPE)
    """Dtype that the loss function computes in; float32 by default."""
    param_dtype: str | None = setting(None, DTYPE)
    """Dtype of the parameters; by default that of the model."""
    mixed_precision: Mixed | None = None
    """Another way to set dtype, one of bf16, fp16 (with a dynamic loss scale) and full."""
    gradient_checkpointing: Remat = "none"
    """What is saved for the backward pass, a policy of jax.checkpoint_policies."""
    use_fast_kernels: bool | None = None
    """Precision of matrix products in jax. True is 'default', the fastest of the device, False is
    'highest', None leaves jax's setting. XLA chooses the kernels."""

    # Data.
    max_length: int | None = setting(None, alias="max_sequence_length")
    """Length that sequences are padded and truncated to; None does neither."""
    truncation_mode: Truncation = setting("keep_end", unused=_NO_LENGTH)
    """Which end of a truncated sequence is kept."""
    shuffle_train_dataset: bool = setting(True, alias="dataloader_shuffle")
    """Shuffle the examples of each epoch in a new order."""
    shuffle_seed_train: int | None = setting(None, FROM_ZERO, unused=_NO_ORDER)
    """Seed of the shuffled orders; by default seed."""
    seed: int = setting(42, SEED)
    """Seed of everything random in the run."""
    use_grain: bool = False
    """Read the data with grain."""
    grain_shard_index: int | None = setting(None, FROM_ZERO)
    """Data shard of this process; by default jax's process index."""
    grain_shard_count: int | None = None
    """Number of data shards; by default jax's process count."""
    dataloader_num_workers: int = setting(0, FROM_ZERO, alias="num_dataloader_workers")
    """Batches prefetched, or workers of grain; 0 prefetches none."""
    ids_to_pop_from_dataset: tuple[str, ...] = ()
    """Columns that are removed from each example."""
    remove_unused_columns: bool = False
    """Remove columns that no step can take, such as text, None and objects."""

    # Loss and evaluation.
    do_train: bool = True
    """Train in train()."""
    do_eval: bool = setting(True, alias="do_evaluate")
    """Evaluate, if there are data for it."""
    evaluation_strategy: Strategy | None = setting(None, alias="eval_strategy")
    """When to evaluate, apart from the end. "steps" is every eval_steps, "epoch" every epoch; "no"
    turns evaluation off. By default every eval_steps, if set."""
    eval_steps: int | None = setting(None, alias="evaluation_steps", unused=_NO_INTERVAL)
    """Steps between two evaluations."""
    max_evaluation_steps: int | None = setting(None, unused=_NO_EVALUATION)
    """Maximum number of batches in an evaluation."""
    per_epoch_evaluation_steps: int | None = setting(None, unused=_NO_EVALUATION)
    """Number of batches in an evaluation, for data without a length."""
    metric_for_best_model: str | None = None
    """Metric of the best checkpoint, train.x or evaluation.x; x is evaluation.x, and name/x is of
    another evaluation."""
    greater_is_better: bool | None = None
    """Whether higher values of that metric are better; by default as its name says."""
    early_stopping_patience: int | None = setting(None, alias="patience")
    """Evaluations without an improvement after which training stops."""
    aux_loss_enabled: bool = True
    """Include terms of the loss whose names begin with aux."""
    loss_config: dict[str, Any] = setting(dict)
    """Keyword arguments of the loss function."""

    # Output directory, checkpoints and resuming.
    model_name: str = "model"
    """Name of the model, in the card and in W&B."""
    output_dir: str | None = setting(None, PATH, alias="save_directory save_dir")
    """Directory of everything a run writes; None writes nothing."""
    checkpoints_dir: str = setting("checkpoints", unused=_NO_DIRECTORY)
    """Folder of the checkpoints in output_dir."""
    save_strategy: Strategy | None = None
    """When to save, apart from the end. "steps" is every save_steps, "epoch" every epoch, and every
    save_steps if set; "no" saves only the end. By default every save_steps, if set."""
    save_steps: int | float | None = setting(None, STEPS, none=(0,), unused=_NO_SAVES)
    """Steps between two checkpoints; a fraction is of all steps."""
    save_interval_minutes: float | None = setting(None, unused=_NO_SAVES)
    """Minutes between two checkpoints, in addition to save_steps."""
    save_total_limit: int | None = setting(None, unused=_NO_CHECKPOINTS)
    """Number of latest checkpoints to keep; None keeps all."""
    do_last_save: bool = True
    """Save at the end; False is for runs that save nothing else."""
    resume_if_possible: bool = True
    """Resume from the latest checkpoint in output_dir, if there is one."""
    resume_from_checkpoint: bool | str | None = setting(None, RESUME)
    """True resumes as resume_if_possible; False refuses an output_dir with checkpoints; a path
    resumes from there."""
    init_weights_from: str | None = setting(None, PATH, alias="model_name_or_path")
    """Checkpoint or safetensors to initialize the parameters from, and nothing else; a path."""

    # Metrics, progress and logging.
    log_steps: int | float = setting(10, STEPS, alias="logging_steps")
    """Steps between two displays of metrics; a fraction is of all steps."""
    report_steps: int | None = setting(None, unused=_NO_METRICS)
    """Steps between two writes of metrics; by default log_steps. Metrics are read at each
    multiple of the greatest common divisor of both, which should not be 1."""
    report_metrics: bool = True
    """Write metrics at all."""
    report_to: tuple[MetricFile, ...] = setting(("jsonl", "csv"), unused=_NO_METRICS)
    """Files that metrics are written to; with jsonl there is also report.html, which plots them."""
    logs_dir: str = setting("logs", unused=_NO_DIRECTORY)
    """Folder of these files in output_dir."""
    log_all_workers: bool = setting(False, unused=_NO_METRICS)
    """Write metrics on every process, each to its own folder."""
    process_zero_is_admin: bool = True
    """Write on the first process only; False is the same as log_all_workers."""
    log_grad_norms: bool = True
    """Write the norm of the gradients."""
    progress_bar_type: Bar = setting("tqdm", unused=_QUIET)
    """How progress is shown, as a bar, as lines of JSON, or not at all."""
    metrics_to_show_in_rich_pbar: tuple[str, ...] | None = setting(None, unused=_NO_BAR)
    """Metrics in the progress bar, tqdm's too; patterns such as eval/* are allowed."""
    verbose: bool = setting(False, unused=_NO_METRICS)
    """Also print the metrics that are written."""
    performance_mode: bool = False
    """Show and write nothing, for the most steps per second; a NaN or inf still ends the run."""
    track_memory: bool = setting(False, unused=_QUIET)
    """Measure the memory in use."""
    weight_distribution_pattern: str | None = setting(None, PATTERN, unused=_NO_WEIGHTS)
    """Parameters whose distribution is measured, by path; None is all."""
    weight_distribution_log_steps: int | None = setting(None, none=(0,), unused=_QUIET)
    """Steps between two of these measurements."""
    use_wandb: bool = setting(False, unused=_NO_METRICS)
    """Write metrics to Weights & Biases."""
    wandb_entity: str | None = setting(None, unused=_NO_WANDB)
    """W&B user or team of the run."""
    wandb_name: str | None = setting(None, unused=_NO_WANDB)
    """W&B name of the run."""
    trainer_prefix: str | None = setting(None, unused=_NO_WANDB)
    """Prefix of the W&B project's name, before model_name."""

    def __post_init__(self) -> None:
        store_fields(self, _HINTS)
        check_combinations(self)

    def to_dict(self) -> dict[str, Any]:
        """Return every field's value by its name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: {**v} if isinstance(v, dict) else v for name, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build arguments from values by name; the other fields have their defaults."""
        values = check_field("values", dict, values)
        gone = _OLD_FIELDS.keys() - {field.name for field in fields(cls)}
        unneeded = {name for name in gone if values.get(name) is _OLD_FIELDS[name][0]}
        return cls(**{name: value for name, value in values.items() if name not in unneeded})

    def to_json(self, path: str | Path | None = None) -> str:
        """Return every field as JSON, and write it to a file if there is a path.

        Raises:
          ConfigError: if a value, such as a function, would not be the same after `from_json`.
        """
        values = self.to_dict()
        for each in fields(self):
            name, value = each.name, values[each.name]
            try:
                is_same = _is_same(json.loads(json.dumps(value, allow_nan=False)), value)
            except (TypeError, ValueError):
                is_same = False
            if not is_same:
                change = f"arguments.replace({name}={default_of(each)!r})"
                advice = f"write {change}, and set it again after reading"
                expected = "a value that JSON gives back unchanged"
                refuse(name, expected, f"{value!r:.80}", advice)
        text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        if path is not None:
            absolute_path("path", path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> Self:
        """Build arguments from JSON, or from a file of JSON."""
        is_text = isinstance(source, str) and source.lstrip().startswith("{")
        try:
            path = None if is_text else absolute_path("source", source)
            text = str(source) if path is None else path.read_text(encoding="utf-8")
            values = json.loads(text)
        except (OSError, TypeError, ValueError, RecursionError) as error:
            got = f"{source!r:.300}"
            refuse("source", "JSON, or the path of a file of it", got, str(error))
        return cls.from_dict(values)

    def replace(self, **changes: Any) -> Self:
        """Return the same arguments with some fields changed, by any of their names."""
        return type(self)(**{**self.to_dict(), **_resolve_aliases(type(self), changes)})


_HINTS = get_type_hints(TrainingArguments)  # fields of a subclass are not checked


def _is_same(parsed: Any, value: Any) -> bool:
    """Whether JSON gave back a value; only a field's own tuple may be a list."""
    if isinstance(value, tuple):
        return isinstance(parsed, list) and all(map(_is_same, parsed, value))
    return bool(parsed == value)


# Names that other libraries have, and what to write here.
OTHER_LIBRARIES = {
    "task": "the loss function defines the task",
    "device": "jax chooses devices (JAX_PLATFORMS=cpu), and sharding_array arranges them",
    "use_cpu": "jax chooses devices: set JAX_PLATFORMS=cpu in the environment",
    "distributed": "write jax_distributed_config={}, and start the script once in each process",
    "metrics": "the loss function returns them: (loss, {'accuracy': sf.mean(hit)})",
    "evaluate_with_generate": "pass sf.Evaluation any function of the state, such as one that "
    "generates text",
    "lr": "write learning_rate=…",
    "warmup_ratio": "write warmup_steps, this part of all steps",
    "adam_beta1": "write extra_optimizer_kwargs={'b1': …}",
    "adam_beta2": "write extra_optimizer_kwargs={'b2': …}",
    "adam_epsilon": "write extra_optimizer_kwargs={'eps': …}",
    "gradient_clipping": "write max_grad_norm=…",
    "label_smoothing_factor": "the loss function smooths labels: optax.smooth_labels",
    "load_best_model_at_end": "read Trainer.best_state after the run",
    "train_batch_size": "write total_batch_size, of all devices, or per_device_train_batch_size",
    "dataloader_drop_last": "incomplete batches are dropped in training, and kept in evaluations",
    "model": "it is an argument of the Trainer",
    "fp16": "write mixed_precision='fp16'",
    "bf16": "write mixed_precision='bf16'",
    "auto_find_batch_size": "sf.inspect.choose finds what fits; then write total_batch_size",
    "deepspeed": "sharding_array shards the state: (1, -1, 1, 1)",
    "fsdp": "sharding_array shards the state: (1, -1, 1, 1)",
    "disable_tqdm": "write progress_bar_type='none'",
    "eval_on_start": "write evaluations=[sf.Evaluation(…, at_start=True)] of the Trainer",
    "torch_compile": "a step is always compiled",
}
# Fields of version 0.2 that had one legal value, and what to write instead of another. JSON of that
# version has them.
_OLD_FIELDS = {
    "save_optimizer_state": (
        True,
        "a checkpoint holds the whole state, which a resume needs; write parameters alone with "
        "save_pretrained or sf.checkpoint.export_params",
    ),
    "remove_ckpt_after_load": (
        False,
        "the checkpoint that was loaded is the only one until the next is on disk; write "
        "save_total_limit=1, which deletes it then",
    ),
}


def _resolve_aliases(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Key values by the names of fields."""
    names, aliases = [field.name for field in fields(cls)], aliases_of(cls)
    resolved: dict[str, Any] = {}
    spelling: dict[str, str] = {}
    unknown: list[str] = []
    for name, value in values.items():
        if name in _OLD_FIELDS and name not in names:
            legal, advice = _OLD_FIELDS[name]
            if value is not legal:
                raise ConfigError(f"{name}={value!r:.80}: {advice}")
            warn(f"{name}: leave it out, since it is always {legal}", DeprecationWarning)
            continue
        known = name if name in names else aliases.get(name, name)
        if known not in names:
            advice = OTHER_LIBRARIES.get(name) or suggest(name, [*names, *aliases])
            text = f"{name}: {cls.__name__} has no such field"
            unknown.append(f"{text}; {advice}" if advice else text)
        if known in resolved and (type(resolved[known]), resolved[known]) != (type(value), value):
            got = f"{resolved[known]!r} and {value!r}"
            expected = "one value, since both are names of one field"
            refuse(f"{spelling[known]}, {name}", expected, got, "write one of them")
        resolved[known], spelling[known] = value, name
    if unknown:
        raise ConfigError("\n".join(unknown))
    is_total = aliases.get("batch_size") == "total_batch_size"
    if is_total and "batch_size" in values and resolved.get("gradient_accumulation_steps", 1) != 1:
        expected = "total_batch_size, of all microbatches, to be accumulated"
        refuse("batch_size", expected, f"{values['batch_size']!r}", "write that name")
    return resolved
