"""`TrainingArguments`: a training run described by names and numbers, checked when it is built."""

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

import jax
from jax.sharding import PartitionSpec

from stepfold import tree
from stepfold.adapter.optimizers import (
    MOMENT_DTYPES,
    check_optimizer_options,
    check_scheduler_options,
    optimizer_options,
    parse_scheduler,
)
from stepfold.core.validation import suggest
from stepfold.errors import ConfigError

Truncation = Literal["keep_end", "keep_start"]
Strategy = Literal["no", "steps", "epoch"]
Bar = Literal["tqdm", "rich", "json", "none"]
MetricFile = Literal["jsonl", "csv", "tensorboard"]
Mixed = Literal["bf16", "fp16", "full"]
Remat = Literal[
    "none",
    "nothing_saveable",
    "everything_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
]
MIXED: Mapping[Mixed, str] = MappingProxyType(
    {"bf16": "bfloat16", "fp16": "float16", "full": "float32"}
)
Class = TypeVar("Class", bound=type)


class Alias:
    """Another name of a field: the field is set and read by either."""

    def __init__(self, field: str) -> None:
        self.field = field

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else getattr(instance, self.field)


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
            expected = "fields by name, as num_train_epochs=3"
            raise _error(type(self).__name__, expected, args[0])
        init(self, **_resolve_aliases(type(self), kwargs))

    cls.__init__ = init_by_any_name  # type: ignore[misc]
    return cls


@by_any_name
@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    """Describe a training run by names and numbers.

    A frozen standard dataclass, which command-line parsers such as tyro and simple-parsing accept.
    Its fields are checked when it is built, alone and together, and a misspelt name is refused.
    Functions such as `plan`, `make_optimizer`, `make_mesh` and `checkpoints` make the parts of a
    run from it, and each can be used alone.

    Some fields have an alias, as `max_training_steps` for `max_steps`. Either name sets and reads
    the field; JSON has the field's own name.

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

    # Length and batch sizes; `plan` computes the numbers.
    num_train_epochs: int = 1
    """Epochs to train, unless max_steps is set."""
    num_epochs = Alias("num_train_epochs")
    max_steps: int | float | None = None
    """Steps to train, instead of num_train_epochs; a fraction is of the steps of these epochs; None
    or -1 is all of them."""
    max_training_steps = Alias("max_steps")
    per_epoch_training_steps: int | None = None
    """Steps of an epoch; by default those of the whole dataset."""
    step_start_point: int = 0
    """First step, of the state's counter, the schedule and the data."""
    training_time_limit: float | str | None = None
    """Time after which training stops: seconds, or a text as '1h30m'."""
    total_batch_size: int | None = None
    """Examples in a step, over all devices and microbatches; 32 unless a size is set."""
    batch_size = Alias("total_batch_size")
    per_device_train_batch_size: int | None = None
    """Examples on a device: times the devices they are the batch; together with total_batch_size
    the most on a device at once, and the rest is accumulated."""
    gradient_accumulation_steps: int = 1
    """Microbatches that the batch of a step is split into; the result is equal."""
    steps_per_call: int = 1
    """How many steps are dispatched in one call at most, with the same bits."""
    eval_batch_size: int | None = None
    """Examples in an evaluation batch, over all devices; by default a step's."""
    per_device_eval_batch_size: int | None = None
    """Examples on a device in the evaluation, instead of eval_batch_size."""

    # Optimizer and schedule; `make_optimizer` and `make_schedule` make them.
    optimizer: str = "adamw"
    """Name of an optimizer in optax or optax.contrib."""
    extra_optimizer_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer, by their names in optax."""
    learning_rate: float = 5e-5
    """Peak learning rate."""
    learning_rate_end: float | None = None
    """Learning rate at the last step; 0 by default."""
    scheduler: str | None = None
    """Decay of the learning rate: none, constant, linear, cosine, polynomial, exponential,
    inverse_sqrt, wsd or cosine_restarts; a prefix warmup_ requires warmup_steps."""
    lr_scheduler = Alias("scheduler")
    scheduler_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the schedule, as power, decay or cycles."""
    lr_scheduler_kwargs = Alias("scheduler_kwargs")
    custom_scheduler: Callable[..., Any] | None = None
    """An optax schedule, or a function from the number of steps to one, instead of learning_rate,
    scheduler and warmup_steps."""
    warmup_steps: int = 0
    """Steps of a linear warmup from 0, before the decay."""
    weight_decay: float | None = None
    """Weight decay: an argument of the optimizer if it has one, else added to the gradient; None
    leaves it to the optimizer."""
    clip_grad: float | None = None
    """Largest global norm of the gradients."""
    max_grad_norm = Alias("clip_grad")
    tx_mu_dtype: str | None = None
    """Dtype of the optimizer's first moment, if it has such an argument."""
    frozen_parameters: str | None = None
    """Regular expression; parameters whose path it matches get no update and no optimizer state."""
    pruning_module: Any = None
    """Wrapper of the optimizer: a function of it, or an object with wrap_optax(tx)."""
    init_tx: bool = True
    """Initialize the optimizer state if model_state has none that fits; False raises instead."""

    # Devices, dtypes and rematerialization.
    sharding_array: tuple[int, ...] = (1, -1, 1, 1)
    """Devices along each axis of the mesh; -1 is all that are left."""
    sharding_axis_names: tuple[str, ...] = ("dp", "fsdp", "tp", "sp")
    """Names of these axes."""
    sharding_dcn_axis_dims: tuple[int, ...] | None = None
    """Slices, connected by a slower network, along each axis."""
    step_partition_spec: tuple[Any, ...] | None = None
    """How a batch is sharded, by dimension; by default its examples over dp and fsdp."""
    auto_shard_states: bool = True
    """Shard the state over fsdp; False replicates it on every device."""
    jax_distributed_config: dict[str, Any] | None = None
    """Arguments of jax.distributed.initialize; {} detects them, None does not call it."""
    dtype: str | None = None
    """Dtype that the loss function computes in; float32 by default."""
    param_dtype: str | None = None
    """Dtype of the parameters; by default that of the model."""
    mixed_precision: Mixed | None = None
    """Another way to set dtype: bf16, fp16 (with a dynamic loss scale) or full."""
    gradient_checkpointing: Remat = "none"
    """What is saved for the backward pass: a policy of jax.checkpoint_policies."""
    use_fast_kernels: bool | None = None
    """Precision of matrix products in jax: True is 'default', the fastest of the device, False is
    'highest', None leaves jax's setting. XLA chooses the kernels."""

    # Data.
    max_length: int | None = None
    """Length that sequences are padded and truncated to; None does neither."""
    max_sequence_length = Alias("max_length")
    truncation_mode: Truncation = "keep_end"
    """Which end of a truncated sequence is kept."""
    shuffle_train_dataset: bool = True
    """Shuffle the examples of each epoch in a new order."""
    dataloader_shuffle = Alias("shuffle_train_dataset")
    shuffle_seed_train: int | None = None
    """Seed of the shuffled orders; by default seed."""
    seed: int = 42
    """Seed of everything random in the run."""
    use_grain: bool = False
    """Read the data with grain."""
    grain_shard_index: int | None = None
    """Data shard of this process; by default jax's process index."""
    grain_shard_count: int | None = None
    """Number of data shards; by default jax's process count."""
    dataloader_num_workers: int = 0
    """Batches prefetched, or workers of grain; 0 prefetches none."""
    num_dataloader_workers = Alias("dataloader_num_workers")
    ids_to_pop_from_dataset: tuple[str, ...] = ()
    """Columns that are removed from each example."""
    remove_unused_columns: bool = False
    """Remove columns that no step can take: text, None and objects."""

    # Loss and evaluation.
    do_train: bool = True
    """Train in train()."""
    do_eval: bool = True
    """Evaluate, if there are data for it."""
    do_evaluate = Alias("do_eval")
    evaluation_strategy: Strategy | None = None
    """When to evaluate, apart from the end: "steps" is every eval_steps, "epoch" every epoch; "no"
    turns evaluation off. By default every eval_steps, if set."""
    eval_steps: int | None = None
    """Steps between two evaluations."""
    evaluation_steps = Alias("eval_steps")
    max_evaluation_steps: int | None = None
    """Maximum number of batches in an evaluation."""
    per_epoch_evaluation_steps: int | None = None
    """Number of batches in an evaluation, for data without a length."""
    metric_for_best_model: str | None = None
    """Metric of the best checkpoint: train.x or evaluation.x; x is evaluation.x, and name/x is of
    another evaluation."""
    greater_is_better: bool | None = None
    """Whether higher values of that metric are better; by default not for a loss."""
    early_stopping_patience: int | None = None
    """Evaluations without an improvement after which training stops."""
    patience = Alias("early_stopping_patience")
    aux_loss_enabled: bool = True
    """Include terms of the loss whose names begin with aux."""
    loss_config: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the loss function."""

    # Output directory, checkpoints and resuming.
    model_name: str = "model"
    """Name of the model, in the card and in W&B."""
    output_dir: str | None = None
    """Directory of everything a run writes; None writes nothing."""
    save_directory = Alias("output_dir")
    save_dir = Alias("output_dir")
    checkpoints_dir: str = "checkpoints"
    """Folder of the checkpoints in output_dir."""
    save_strategy: Strategy | None = None
    """When to save, apart from the end: "steps" is every save_steps, "epoch" every epoch, and every
    save_steps if set; "no" saves only the end. By default every save_steps, if set."""
    save_steps: int | float | None = None
    """Steps between two checkpoints; a fraction is of all steps."""
    save_interval_minutes: float | None = None
    """Minutes between two checkpoints, in addition to save_steps."""
    save_total_limit: int | None = None
    """Number of latest checkpoints to keep; None keeps all."""
    save_optimizer_state: bool = True
    """Always True: a checkpoint holds the whole state."""
    do_last_save: bool = True
    """Save at the end; False is for runs that save nothing else."""
    remove_ckpt_after_load: bool = False
    """Always False: save_total_limit deletes old checkpoints."""
    resume_if_possible: bool = True
    """Resume from the latest checkpoint in output_dir, if there is one."""
    resume_from_checkpoint: bool | str | None = None
    """True resumes as resume_if_possible; False refuses an output_dir with checkpoints; a path
    resumes from there."""
    init_weights_from: str | None = None
    """Checkpoint to initialize the parameters from, and nothing else."""

    # Metrics, progress and logging.
    log_steps: int | float = 10
    """Steps between two displays of metrics; a fraction is of all steps."""
    logging_steps = Alias("log_steps")
    report_steps: int | None = None
    """Steps between two writes of metrics; by default log_steps."""
    report_metrics: bool = True
    """Write metrics at all."""
    report_to: tuple[MetricFile, ...] = ("jsonl", "csv")
    """Files that metrics are written to; with jsonl there is also report.html, which plots them."""
    logs_dir: str = "logs"
    """Folder of these files in output_dir."""
    log_all_workers: bool = False
    """Write metrics on every process, each to its own folder."""
    process_zero_is_admin: bool = True
    """Write on the first process only; False is the same as log_all_workers."""
    log_grad_norms: bool = True
    """Write the norm of the gradients."""
    progress_bar_type: Bar = "tqdm"
    """How progress is shown: a bar, lines of JSON, or none."""
    metrics_to_show_in_rich_pbar: tuple[str, ...] | None = None
    """Metrics in the progress bar, tqdm's too; patterns such as eval/* are allowed."""
    verbose: bool = False
    """Also print the metrics that are written."""
    performance_mode: bool = False
    """Show and write nothing, for the most steps per second; a NaN or inf still ends the run."""
    track_memory: bool = False
    """Measure the memory in use."""
    weight_distribution_pattern: str | None = None
    """Parameters whose distribution is measured, by path; None is all."""
    weight_distribution_log_steps: int | None = None
    """Steps between two of these measurements."""
    use_wandb: bool = False
    """Write metrics to Weights & Biases."""
    wandb_entity: str | None = None
    """W&B user or team of the run."""
    wandb_name: str | None = None
    """W&B name of the run."""
    trainer_prefix: str | None = None
    """Prefix of the W&B project's name, before model_name."""

    def __post_init__(self) -> None:
        for name, hint in _HINTS.items():
            object.__setattr__(self, name, _parse(name, hint, getattr(self, name)))
        _check_combinations(self)

    def to_dict(self) -> dict[str, Any]:
        """Return every field's value by its name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: {**v} if isinstance(v, dict) else v for name, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build arguments from values by name; the other fields have their defaults."""
        return cls(**_dict("values", values))

    def to_json(self, path: str | Path | None = None) -> str:
        """Return every field as JSON, and write it to a file if there is a path.

        Raises:
          ConfigError: if a value, such as a function, would not be the same after `from_json`.
        """
        values = self.to_dict()
        for name, value in values.items():
            try:
                is_same = _is_same(json.loads(json.dumps(value, allow_nan=False)), value)
            except (TypeError, ValueError):
                is_same = False
            if not is_same:
                advice = f"write arguments.replace({name}=None), and set it again after reading"
                raise _error(name, "a value that JSON gives back unchanged", value, advice)
        text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> Self:
        """Build arguments from JSON, or from a file of JSON."""
        is_text = isinstance(source, str) and source.lstrip().startswith("{")
        try:
            text = str(source) if is_text else Path(source).read_text(encoding="utf-8")
            values = json.loads(text)
        except (OSError, TypeError, ValueError) as error:
            expected = "JSON, or the path of a file of it"
            raise ConfigError(
                f"source: expected {expected}, got {source!r:.300}; {error}"
            ) from None
        return cls.from_dict(values)

    def replace(self, **changes: Any) -> Self:
        """Return the same arguments with some fields changed, by any of their names."""
        return type(self)(**{**self.to_dict(), **_resolve_aliases(type(self), changes)})


def _is_same(parsed: Any, value: Any) -> bool:
    """Whether JSON gave back a value; only a field's own tuple may be a list."""
    if isinstance(value, tuple):
        return isinstance(parsed, list) and all(map(_is_same, parsed, value))
    return bool(parsed == value)


def is_changed(arguments: TrainingArguments, name: str) -> bool:
    """Whether a field differs from its default.

    >>> is_changed(TrainingArguments(seed=3), "seed"), is_changed(TrainingArguments(), "seed")
    (True, False)
    """
    default, factory = next(
        (f.default, f.default_factory) for f in fields(arguments) if f.name == name
    )
    return bool(getattr(arguments, name) != (default if factory is MISSING else factory()))


_ELSEWHERE = {
    "task": "the loss function defines the task",
    "device": "jax chooses devices (JAX_PLATFORMS=cpu), and sharding_array arranges them",
    "use_cpu": "jax chooses devices: set JAX_PLATFORMS=cpu in the environment",
    "distributed": "write jax_distributed_config={}, and start the script once in each process",
    "metrics": "the loss function returns them: (loss, {'accuracy': sf.mean(hit)})",
    "evaluate_with_generate": "pass sf.Evaluation any function of the state, such as one that "
    "generates text",
    "lr": "write learning_rate=…",
    "model": "it is an argument of the Trainer",
    "fp16": "write mixed_precision='fp16'",
    "bf16": "write mixed_precision='bf16'",
}


def _resolve_aliases(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Key values by the names of fields."""
    names = [field.name for field in fields(cls)]
    attributes = [item for parent in cls.__mro__ for item in vars(parent).items()]
    aliases = {name: value.field for name, value in attributes if isinstance(value, Alias)}
    resolved: dict[str, Any] = {}
    spelling: dict[str, str] = {}
    for name, value in values.items():
        known = aliases.get(name, name)
        if known not in names:
            advice = _ELSEWHERE.get(name) or suggest(name, [*names, *aliases])
            text = f"{name}: {cls.__name__} has no such field"
            raise ConfigError(f"{text}; {advice}" if advice else text)
        if known in resolved:
            other = resolved[known]
            if other != value or type(other) is not type(value):
                raise ConfigError(
                    f"{spelling[known]}, {name}: two names of one field, expected one value, got "
                    f"{other!r} and {value!r}; write one of them"
                )
        resolved[known], spelling[known] = value, name
    return resolved


# Values are stored so that equal arguments compare equal and survive JSON: a list as a tuple, an
# integer rate as a float, dtypes and policies by their names.
Parser = Callable[[str, Any], Any]


def _rule(
    expected: str,
    accepts: Callable[[Any], Any],
    convert: Callable[[Any], Any] = lambda value: value,
    choices: Sequence[str] = (),
) -> Parser:
    def parse(name: str, value: Any) -> Any:
        if not accepts(value):
            raise _error(name, expected, value, suggest(value, choices))
        return convert(value)

    return parse


def _error(name: str, expected: str, value: Any, advice: str = "") -> ConfigError:
    text = f"{name}: expected {expected}, got {value!r:.80}"
    return ConfigError(f"{text}; {advice}" if advice else text)


def _is_int(value: Any, minimum: int) -> bool:
    return type(value) is int and value >= minimum


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


_flag = _rule("True or False", lambda v: isinstance(v, bool))
_positive_int = _rule("an integer of at least 1", lambda v: _is_int(v, 1))
_non_negative_int = _rule("an integer of at least 0", lambda v: _is_int(v, 0))
_seed = _rule(f"an integer from 0 to {2**63 - 1}", lambda v: _is_int(v, 0) and v < 2**63)
_positive = _rule("a number above 0", lambda v: _is_finite(v) and v > 0, float)
_non_negative = _rule("a number of at least 0", lambda v: _is_finite(v) and v >= 0, float)
_steps = _rule(
    "an integer of at least 1, or a fraction between 0 and 1",
    lambda v: _is_int(v, 1) or (type(v) is float and 0 < v < 1),
)
_text = _rule("a text", lambda v: isinstance(v, str) and v.strip())
_path = _rule("a path", lambda v: isinstance(v, str | os.PathLike) and str(v).strip(), str)
_path_or_flag = _rule(
    "True, False, or the path of a checkpoint",
    lambda v: isinstance(v, bool | str | os.PathLike) and str(v).strip(),
    lambda v: v if isinstance(v, bool) else str(v),
)
_function = _rule("a function", lambda v: callable(v) and not isinstance(v, type))
_pruning = _rule(
    "a function of an optimizer, or an object with wrap_optax(tx)",
    lambda v: callable(v) or callable(getattr(v, "wrap_optax", None)),
)
_dict = _rule(
    "a dict with names as keys",
    lambda v: isinstance(v, Mapping) and all(isinstance(key, str) for key in v),
    dict,
)


def _choice(literal: Any) -> Parser:
    names = get_args(literal)
    accepts = lambda v: isinstance(v, str) and v in names
    return _rule(f"one of {', '.join(names)}", accepts, choices=names)


def _tuple_of(parse: Parser, expected: str = "a tuple or a list") -> Parser:
    def parse_tuple(name: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise _error(name, expected, value)
        return tuple(parse(f"{name}[{i}]", item) for i, item in enumerate(value))

    return parse_tuple


def _dims(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str) and re.fullmatch(r"\s*-?\d+(\s*,\s*-?\d+)*\s*", value):
        value = [int(size) for size in value.split(",")]
    is_sizes = isinstance(value, list | tuple) and all(_is_int(size, -1) for size in value)
    if not is_sizes or not value or 0 in value or value.count(-1) > 1:
        raise _error(name, "sizes of at least 1, at most one of them -1, as (1, -1, 1, 1)", value)
    return tuple(value)


def _partition_spec(name: str, value: Any) -> tuple[Any, ...]:
    def parse_entry(name: str, entry: Any) -> Any:
        if isinstance(entry, list | tuple) and entry:
            return _tuple_of(_text)(name, entry)
        return None if entry is None else _text(name, entry)

    value = tuple(value) if isinstance(value, PartitionSpec) else value
    expected = 'a PartitionSpec, or a tuple as (("dp", "fsdp"), None, "sp")'
    return tuple(_tuple_of(parse_entry, expected)(name, value))


def _pattern(name: str, value: Any) -> str:
    try:
        re.compile(_text(name, value))
    except re.error as error:
        raise _error(name, "a regular expression", value, str(error)) from None
    return str(value)


def _dtype(name: str, value: Any) -> str:
    short = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16"}
    short |= {"fp32": "float32", "f32": "float32", "fp64": "float64", "f64": "float64"}
    dtype = tree.floating(short.get(value, value) if isinstance(value, str) else value)
    if dtype is None or value is float or str(value) == "float":  # numpy: float is float64
        raise _error(name, "a floating dtype, as 'float32' or 'bfloat16'", value)
    return str(dtype.name)


def _policy(name: str, value: Any) -> str:
    known = get_args(Remat)
    same = [policy for policy in known[1:] if getattr(jax.checkpoint_policies, policy) is value]
    value = "none" if value in ("", None) else same[0] if same else value
    return str(_choice(Remat)(name, value))


def _duration(name: str, value: Any) -> float | str:
    total = seconds(name, value)
    return value if isinstance(value, str) else total


def seconds(name: str, value: float | str) -> float:
    """Convert a duration to seconds.

    >>> seconds("training_time_limit", "1h30m"), seconds("training_time_limit", 20)
    (5400.0, 20.0)
    """
    if not isinstance(value, str):
        return float(_positive(name, value))
    units = {"d": 86400, "h": 3600, "min": 60, "m": 60, "sec": 1, "s": 1}
    part = rf"(\d+(?:\.\d+)?)\s*({'|'.join(units)})\s*"
    text = value.strip().lower()
    parts = re.findall(part, text) if re.fullmatch(f"({part})+", text) else []
    total = sum(float(count) * units[unit] for count, unit in parts)
    if not total > 0:
        raise _error(name, "a time above 0, as '90s', '45min', '1h30m' or '2d'", value)
    return total


_PARSERS = {
    name: parse
    for parse, names in [
        (_non_negative_int, "step_start_point warmup_steps dataloader_num_workers"),
        (_non_negative_int, "shuffle_seed_train grain_shard_index"),
        (_non_negative, "learning_rate_end weight_decay"),
        (_steps, "max_steps save_steps log_steps"),
        (_dtype, "dtype param_dtype tx_mu_dtype"),
        (_pattern, "frozen_parameters weight_distribution_pattern"),
        (_dims, "sharding_array sharding_dcn_axis_dims"),
        (_path, "output_dir init_weights_from"),
        (_path_or_flag, "resume_from_checkpoint"),
        (_duration, "training_time_limit"),
        (_seed, "seed"),
        (_pruning, "pruning_module"),
        (_partition_spec, "step_partition_spec"),
        (_policy, "gradient_checkpointing"),
    ]
    for name in names.split()
}
# Integers that stand for None, as in other libraries.
_NONE = {"max_steps": (-1, 0), "save_steps": (0,), "weight_distribution_log_steps": (0,)}


_HINTS = get_type_hints(TrainingArguments)


def _parse(name: str, hint: Any, value: Any) -> Any:
    """Return a value as the field stores it, or raise a ConfigError."""
    is_none = value is None or (type(value) is int and value in _NONE.get(name, ()))
    if is_none and (NoneType in get_args(hint) or hint is Any):
        return None
    parse: Parser = _PARSERS.get(name) or _parser(hint)
    return parse(name, value)


def _parser(hint: Any) -> Parser:
    """Derive a parser from an annotation: an int is at least 1, and a float above 0."""
    args, origin = get_args(hint), get_origin(hint) or hint
    if NoneType in args:
        return _parser(args[0])
    if origin is Literal:
        return _choice(hint)
    if origin is tuple:
        return _tuple_of(_parser(args[0]))
    rules = {bool: _flag, int: _positive_int, float: _positive, str: _text, dict: _dict}
    return rules.get(origin, _function)


_WRITTEN = "use_wandb verbose log_all_workers report_steps report_to"
_SHOWN = "track_memory weight_distribution_log_steps progress_bar_type"
_EVALUATION = "eval_batch_size per_device_eval_batch_size max_evaluation_steps"
_EVALUATION += " per_epoch_evaluation_steps eval_steps"
_NO_EFFECT = (  # a field, a value of it, and the fields that have no effect with this value
    ("shuffle_train_dataset", False, "shuffle_seed_train"),
    ("max_length", None, "truncation_mode"),
    ("do_eval", False, _EVALUATION),
    ("evaluation_strategy", "no", _EVALUATION),
    ("evaluation_strategy", "epoch", "eval_steps"),
    ("save_strategy", "no", "save_steps save_interval_minutes"),
    ("output_dir", None, "save_steps save_interval_minutes save_total_limit checkpoints_dir"),
    ("use_wandb", False, "wandb_entity wandb_name trainer_prefix"),
    ("report_metrics", False, _WRITTEN),
    ("performance_mode", True, f"{_WRITTEN} {_SHOWN}"),
    ("weight_distribution_log_steps", None, "weight_distribution_pattern"),
    ("progress_bar_type", "none", "metrics_to_show_in_rich_pbar"),
)


def _check_combinations(a: TrainingArguments) -> None:
    """Raise a ConfigError if fields do not go together."""
    for other, value, names in _NO_EFFECT:
        for name in names.split():
            if getattr(a, other) == value and is_changed(a, name):
                raise ConfigError(
                    f"{name}={getattr(a, name)!r:.60} has no effect with {other}={value!r}; "
                    f"change {other}, or leave {name} out"
                )
    for conflicts in (_schedule, _optimizer, _devices, _length_and_data, _evaluation, _saving):
        for first, second, advice in conflicts(a):
            pair = " and ".join(f"{n}={getattr(a, n)!r:.60}" for n in (first, second))
            raise ConfigError(f"{pair} do not go together: {advice}")


# Functions that yield two fields that do not go together, and what to do.
Conflicts = Iterator[tuple[str, str, str]]


def _schedule(a: TrainingArguments) -> Conflicts:
    decay, needs_warmup = parse_scheduler(a.scheduler or "none")
    end = a.learning_rate_end
    if a.custom_scheduler is not None:
        names = "scheduler learning_rate learning_rate_end warmup_steps scheduler_kwargs"
        for name in names.split():
            if is_changed(a, name):
                advice = "a custom schedule sets the whole learning rate; leave one out"
                yield name, "custom_scheduler", advice
    check_scheduler_options(a.scheduler or "none", a.scheduler_kwargs)
    if needs_warmup and not a.warmup_steps:
        yield "scheduler", "warmup_steps", "write warmup_steps of at least 1"
    if end is not None and decay == "constant":
        yield "scheduler", "learning_rate_end", "a constant rate ends where it begins"
    if end is not None and end > a.learning_rate:
        yield "learning_rate", "learning_rate_end", "a rate that rises needs custom_scheduler"
    if decay == "exponential" and not end:
        yield "scheduler", "learning_rate_end", "it never gets to 0; write an end above 0"


def _optimizer(a: TrainingArguments) -> Conflicts:
    options, known = a.extra_optimizer_kwargs, optimizer_options(a.optimizer)
    check_optimizer_options(a.optimizer, options)
    if a.weight_decay is not None and "weight_decay" in options:
        yield "weight_decay", "extra_optimizer_kwargs", "set the weight decay once"
    if a.tx_mu_dtype is None:
        return
    if known.keys().isdisjoint(MOMENT_DTYPES):
        yield "optimizer", "tx_mu_dtype", "it takes no dtype for a first moment; leave it out"
    if not options.keys().isdisjoint(MOMENT_DTYPES):
        yield "tx_mu_dtype", "extra_optimizer_kwargs", "set the dtype once"
    if known.get("momentum", 0) is None and options.get("momentum") is None:
        yield "tx_mu_dtype", "extra_optimizer_kwargs", "without momentum there is no first moment"


def _devices(a: TrainingArguments) -> Conflicts:
    names = a.sharding_axis_names
    if len(set(names)) < len(names):
        raise _error("sharding_axis_names", "names that differ", names)
    for sizes in ("sharding_array", "sharding_dcn_axis_dims"):
        if getattr(a, sizes) is not None and len(getattr(a, sizes)) != len(names):
            yield sizes, "sharding_axis_names", "write one size for each name"
    axes: list[str] = []
    for entry in a.step_partition_spec or ():
        axes += [entry] if isinstance(entry, str) else entry or ()
    if len(set(axes)) < len(axes) or not set(axes) <= set(names):
        yield "step_partition_spec", "sharding_axis_names", "name axes of the mesh, each once"
    if a.mixed_precision is not None and a.dtype not in (None, MIXED[a.mixed_precision]):
        yield "mixed_precision", "dtype", "both set the same dtype; leave one out"


def _length_and_data(a: TrainingArguments) -> Conflicts:
    index, count = a.grain_shard_index, a.grain_shard_count
    if (index is None) != (count is None):
        yield "grain_shard_index", "grain_shard_count", "write both or neither"
    if index is not None and count is not None and index >= count:
        yield "grain_shard_index", "grain_shard_count", "the first shard is 0"
    if not (a.do_train or a.do_eval):
        yield "do_train", "do_eval", "the run would do nothing; leave one out"
    if type(a.max_steps) is int and a.step_start_point >= a.max_steps:
        yield "step_start_point", "max_steps", "there would be no step; start earlier"


def _evaluation(a: TrainingArguments) -> Conflicts:
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


def _saving(a: TrainingArguments) -> Conflicts:
    if not a.save_optimizer_state:
        raise ConfigError(
            "save_optimizer_state=False: a checkpoint holds the whole state, which a resume needs; "
            "leave it out, and write parameters alone with save_pretrained or sf.export_params"
        )
    if a.remove_ckpt_after_load:
        raise ConfigError(
            "remove_ckpt_after_load=True: the checkpoint that was loaded is the only one until the "
            "next is on disk; write save_total_limit=1, which deletes it then"
        )
    has_interval = (a.save_steps, a.save_interval_minutes) != (None, None)
    if a.save_strategy == "steps" and not has_interval:
        yield "save_strategy", "save_steps", "write save_steps"
    if a.save_strategy in ("steps", "epoch") and a.output_dir is None:
        yield "save_strategy", "output_dir", "write where to save, as output_dir='runs/a'"
    if not a.do_last_save and (a.save_strategy == "epoch" or has_interval):
        raise ConfigError(
            "do_last_save=False: a run that saves also saves its end, so that it can be resumed; "
            "leave it out, or save nothing at all"
        )
    if a.resume_from_checkpoint is True and not a.resume_if_possible:
        yield "resume_from_checkpoint", "resume_if_possible", "leave one out"
    if a.init_weights_from is not None and isinstance(a.resume_from_checkpoint, str):
        yield "init_weights_from", "resume_from_checkpoint", "start from one of them"
