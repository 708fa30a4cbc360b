"""Checks of `TrainingArguments`, field by field and together, and of the trainer's arguments."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType, NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

import jax
import numpy as np
from jax.sharding import PartitionSpec

from stepfold import tree
from stepfold.adapter.optimizers import (
    MOMENT_DTYPES,
    check_optimizer_options,
    check_scheduler_options,
    optimizer_options,
    parse_scheduler,
)
from stepfold.core.gradients import RematPolicy
from stepfold.core.validation import suggest
from stepfold.errors import ConfigError, refuse
from stepfold.sharding.mesh import axes_of

Truncation = Literal["keep_end", "keep_start"]
Strategy = Literal["no", "steps", "epoch"]
Bar = Literal["tqdm", "rich", "json", "none"]
MetricFile = Literal["jsonl", "csv", "tensorboard"]
Mixed = Literal["bf16", "fp16", "full"]
Remat = Literal["none", RematPolicy]
MIXED: Mapping[Mixed, str] = MappingProxyType(
    {"bf16": "bfloat16", "fp16": "float16", "full": "float32"}
)


# Checks of single fields. Values are stored so that equal arguments compare equal and survive JSON:
# a list as a tuple, an integer rate as a float, a numpy scalar as Python's, dtypes and policies by
# their names.


def _is_int(value: Any, minimum: int) -> bool:
    return type(value) is int and value >= minimum


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and bool(str(value).strip())


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _dtype(value: Any) -> str | None:
    short = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16"}
    short |= {"fp32": "float32", "f32": "float32", "fp64": "float64", "f64": "float64"}
    dtype = tree.floating(short.get(value, value) if isinstance(value, str) else value)
    # numpy reads float as float64.
    return None if dtype is None or value is float or str(value) == "float" else str(dtype.name)


def _dims(value: Any) -> tuple[int, ...] | None:
    """Return the sizes of a mesh, which may be written as a text with commas."""
    if isinstance(value, str) and re.fullmatch(r"\s*-?\d+(\s*,\s*-?\d+)*\s*", value):
        value = [int(size) for size in value.split(",")]
    if not _is_list(value) or not value or not all(_is_int(size, -1) and size for size in value):
        return None
    return tuple(value) if value.count(-1) <= 1 else None


def _policy(value: Any) -> Any:
    """Return the name of a policy of jax."""
    policies = {name: getattr(jax.checkpoint_policies, name) for name in get_args(Remat)[1:]}
    same = [name for name, policy in policies.items() if policy is value]
    return "none" if value in ("", None) else same[0] if same else value


def seconds(value: float | str) -> float:
    """Convert a duration, such as 20 or "1h30m", to seconds; 0 if it is not one."""
    if not isinstance(value, str):
        return float(value) if _is_finite(value) else 0.0
    units = {"d": 86400, "h": 3600, "min": 60, "m": 60, "sec": 1, "s": 1}
    part = rf"(\d+(?:\.\d+)?)\s*({'|'.join(units)})\s*"
    text = value.strip().lower()
    parts = re.findall(part, text) if re.fullmatch(f"({part})+", text) else []
    return sum(float(count) * units[unit] for count, unit in parts) or 0.0


class _Rule(NamedTuple):
    expected: str
    accepts: Callable[[Any], Any]
    convert: Callable[[Any], Any] = lambda value: value


_RULES_BY_TYPE = {
    bool: _Rule("True or False", lambda v: isinstance(v, bool)),
    int: _Rule("an integer of at least 1", lambda v: _is_int(v, 1)),
    float: _Rule("a number above 0", lambda v: _is_finite(v) and v > 0, float),
    str: _Rule("a text", _is_text),
    tuple: _Rule("a tuple or a list", _is_list, tuple),
    dict: _Rule(
        "a dict with names as keys",
        lambda v: isinstance(v, Mapping) and all(isinstance(key, str) for key in v),
        dict,
    ),
    get_origin(Callable[..., Any]): _Rule("a function", _is_function),
}
_RULES_BY_NAME = {
    "step_start_point warmup_steps dataloader_num_workers shuffle_seed_train grain_shard_index": (
        _Rule("an integer of at least 0", lambda v: _is_int(v, 0))
    ),
    "learning_rate_end weight_decay": _Rule(
        "a number of at least 0", lambda v: _is_finite(v) and v >= 0, float
    ),
    "max_steps save_steps log_steps": _Rule(
        "an integer of at least 1, or a fraction between 0 and 1",
        lambda v: _is_int(v, 1) or (type(v) is float and 0 < v < 1),
    ),
    "dtype param_dtype tx_mu_dtype": _Rule(
        "a floating dtype, as 'float32' or 'bfloat16'", _dtype, _dtype
    ),
    "frozen_parameters weight_distribution_pattern": _Rule(
        "a regular expression", _is_text, lambda v: re.compile(v).pattern
    ),
    "sharding_array sharding_dcn_axis_dims": _Rule(
        "sizes of at least 1, at most one of them -1, as (1, -1, 1, 1)", _dims, _dims
    ),
    "step_partition_spec": _Rule(
        'a PartitionSpec, or a tuple as (("dp", "fsdp"), None, "sp")',
        lambda v: _is_list(v) or isinstance(v, PartitionSpec),
        lambda v: tuple(tuple(entry) if _is_list(entry) else entry for entry in v),
    ),
    "output_dir init_weights_from": _Rule("a path", _is_path, str),
    "resume_from_checkpoint": _Rule(
        "True, False, or the path of a checkpoint",
        lambda v: isinstance(v, bool) or _is_path(v),
        lambda v: v if isinstance(v, bool) else str(v),
    ),
    "training_time_limit": _Rule(
        "a time above 0, as 20, '90s', '45min', '1h30m' or '2d'",
        lambda v: seconds(v) > 0,
        lambda v: v if isinstance(v, str) else float(v),
    ),
    "seed": _Rule(f"an integer from 0 to {2**63 - 1}", lambda v: _is_int(v, 0) and v < 2**63),
    "pruning_module": _Rule(
        "a function of an optimizer, or an object with wrap_optax(tx)",
        lambda v: callable(v) or callable(getattr(v, "wrap_optax", None)),
    ),
}
_RULES = {name: rule for names, rule in _RULES_BY_NAME.items() for name in names.split()}
# Integers that stand for None, as in other libraries.
_MEANS_NONE = {"max_steps": (-1, 0), "save_steps": (0,), "weight_distribution_log_steps": (0,)}


def check_field(name: str, hint: Any, value: Any) -> Any:
    """Return a value as the field stores it, or raise a ConfigError."""
    value = value.item() if isinstance(value, np.generic) else value
    types = get_args(hint)
    if NoneType in types or hint is Any:
        if value is None or (type(value) is int and value in _MEANS_NONE.get(name, ())):
            return None
        hint = types[0] if types else hint
    origin, choices = get_origin(hint) or hint, ()
    if origin is Literal:
        choices = get_args(hint)
        value = _policy(value) if choices == get_args(Remat) else value
        rule = _Rule(f"one of {', '.join(choices)}", lambda v: isinstance(v, str) and v in choices)
    else:
        rule = _RULES.get(name) or _RULES_BY_TYPE[origin]
    try:
        if not rule.accepts(value):
            raise field_error(name, rule.expected, value, suggest(value, choices))
        value = rule.convert(value)
    except re.error as error:
        raise field_error(name, rule.expected, value, str(error)) from None
    if rule is not _RULES_BY_TYPE[tuple]:
        return value
    kind = get_args(hint)[0]
    return tuple(check_field(f"{name}[{i}]", kind, item) for i, item in enumerate(value))


def field_error(name: str, expected: str, value: Any, advice: str = "") -> ConfigError:
    """Make the error of a field with another value."""
    return ConfigError(f"{name}: expected {expected}, got {value!r:.80}{advice and '; '}{advice}")


# Checks of fields together


def default_of(arguments: Any, name: str) -> Any:
    """Return the default of a field."""
    field = next(field for field in fields(arguments) if field.name == name)
    return field.default if field.default_factory is MISSING else field.default_factory()


def is_changed(arguments: Any, name: str) -> bool:
    """Whether a field differs from its default."""
    return bool(getattr(arguments, name) != default_of(arguments, name))


_WRITTEN = "use_wandb verbose log_all_workers report_steps report_to"
_SHOWN = "track_memory weight_distribution_log_steps progress_bar_type"
_EVALUATION = (
    "eval_batch_size per_device_eval_batch_size max_evaluation_steps per_epoch_evaluation_steps "
    "eval_steps"
)
_NO_EFFECT = (  # a field, a value of it, and the fields that have no effect with this value
    ("shuffle_train_dataset", False, "shuffle_seed_train"),
    ("max_length", None, "truncation_mode"),
    ("do_eval", False, _EVALUATION),
    ("evaluation_strategy", "no", _EVALUATION),
    ("evaluation_strategy", "epoch", "eval_steps"),
    ("save_strategy", "no", "save_steps save_interval_minutes"),
    ("output_dir", None, "save_steps save_interval_minutes save_total_limit"),
    ("output_dir", None, "checkpoints_dir logs_dir"),
    ("do_last_save", False, "save_total_limit"),
    ("use_wandb", False, "wandb_entity wandb_name trainer_prefix"),
    ("report_metrics", False, _WRITTEN),
    ("performance_mode", True, f"{_WRITTEN} {_SHOWN}"),
    ("weight_distribution_log_steps", None, "weight_distribution_pattern"),
    ("progress_bar_type", "none", "metrics_to_show_in_rich_pbar"),
)


def check_combinations(a: Any) -> None:
    """Raise a ConfigError if fields do not go together."""
    for other, value, names in _NO_EFFECT:
        for name in names.split():
            if getattr(a, other) == value and is_changed(a, name):
                raise ConfigError(
                    f"{name}={getattr(a, name)!r:.60} has no effect with {other}={value!r}; "
                    f"change {other}, or leave {name} out"
                )
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
    check_scheduler_options(a.scheduler or "none", a.scheduler_kwargs)
    check_optimizer_options(a.optimizer, a.extra_optimizer_kwargs)
    for first, second, advice in _conflicts(a):
        pair = " and ".join(f"{name}={getattr(a, name)!r:.60}" for name in (first, second))
        raise ConfigError(f"{pair} do not go together: {advice}")


def _conflicts(a: Any) -> Iterator[tuple[str, str, str]]:
    """Yield two fields that do not go together, and what to do."""
    # The schedule and the optimizer.
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

    # Devices and data.
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

    # Checkpoints.
    has_interval = (a.save_steps, a.save_interval_minutes) != (None, None)
    if a.save_strategy == "steps" and not has_interval:
        yield "save_strategy", "save_steps", "write save_steps"
    if a.save_strategy in ("steps", "epoch") and a.output_dir is None:
        yield "save_strategy", "output_dir", "write where to save, as output_dir='runs/a'"
    if not a.do_last_save and (a.save_strategy == "epoch" or has_interval):
        interval = "save_strategy" if a.save_strategy else "save_steps"
        advice = "a run that saves also saves its end, so that it can be resumed"
        yield "do_last_save", interval, advice
    if a.resume_from_checkpoint is True and not a.resume_if_possible:
        yield "resume_from_checkpoint", "resume_if_possible", "leave one out"
    if a.init_weights_from is not None and isinstance(a.resume_from_checkpoint, str):
        yield "init_weights_from", "resume_from_checkpoint", "start from one of them"


# Checks of other arguments


def check_functions(**values: Any) -> None:
    """Refuse values by name that are neither functions nor None."""
    for name, value in values.items():
        if value is not None and not _is_function(value):
            refuse(name, "a function", tree.describe_value(value))


def check_list(name: str, values: Any, expected: str, kind: type | None = None) -> list[Any]:
    """Return a list of values of a type, or without a type of functions."""
    if not isinstance(values, list | tuple):
        refuse(name, f"a list of {expected}", tree.describe_value(values))
    for index, value in enumerate(values):
        if not (_is_function(value) if kind is None else isinstance(value, kind)):
            item = "a function" if kind is None else expected
            refuse(f"{name}[{index}]", item, tree.describe_value(value))
    return list(values)
