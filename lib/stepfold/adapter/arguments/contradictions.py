"""Fields held against each other: what each alone allows and both together do not."""

from typing import Any

from stepfold.adapter.arguments.devices import MIXED
from stepfold.adapter.arguments.optimizers import check_options, options_of
from stepfold.adapter.arguments.setting import is_changed
from stepfold.adapter.arguments.shapes import check_shape_options, shape_of
from stepfold.errors import ConfigError

MOMENTS = ("mu_dtype", "accumulator_dtype", "dtype_momentum")
"""What optimizers of optax call the dtype of their first moment."""


def check_together(arguments: Any) -> None:
    """Refuse fields that do not fit together.

    Raises:
      ConfigError: with both fields, both values, and what to do.
    """
    for check in (_schedule, _optimizer, _mesh, _data, _length, _evaluating, _saving, _reporting):
        check(arguments)


def _clash(arguments: Any, first: str, second: str, advice: str) -> ConfigError:
    said = " and ".join(f"{name}={getattr(arguments, name)!r:.60}" for name in (first, second))
    return ConfigError(f"{said} do not go together: {advice}")


def _needs(arguments: Any, names: tuple[str, ...], needed: str, advice: str) -> None:
    for name in names:
        if is_changed(arguments, name):
            raise _clash(arguments, name, needed, advice)


def _schedule(a: Any) -> None:
    shown = ("scheduler", "learning_rate", "learning_rate_end", "warmup_steps", "scheduler_kwargs")
    if a.custom_scheduler is not None:
        _needs(a, shown, "custom_scheduler", "a custom schedule says all of the rate; leave one")
        return
    shape, warm = shape_of(a.scheduler or "none")
    check_shape_options(a.scheduler or "none", a.scheduler_kwargs)
    if warm and not a.warmup_steps:
        raise _clash(a, "scheduler", "warmup_steps", "give warmup_steps of at least 1")
    end = a.learning_rate_end
    if end is not None and shape == "constant":
        raise _clash(a, "scheduler", "learning_rate_end", "a constant rate ends where it begins")
    if end is not None and end > a.learning_rate:
        raise _clash(
            a, "learning_rate", "learning_rate_end", "a rate that rises needs custom_scheduler"
        )
    if shape == "exponential" and not end:
        raise _clash(
            a, "scheduler", "learning_rate_end", "it never gets to 0; give an end above it"
        )


def _optimizer(a: Any) -> None:
    given, known = a.extra_optimizer_kwargs, options_of(a.optimizer)
    check_options(a.optimizer, given)
    if a.weight_decay is not None and "weight_decay" in given:
        raise _clash(a, "weight_decay", "extra_optimizer_kwargs", "say it once")
    if a.tx_mu_dtype is None:
        return
    if not any(name in known for name in MOMENTS):
        raise _clash(
            a, "optimizer", "tx_mu_dtype", "it takes no dtype for a first moment; leave it out"
        )
    if any(name in given for name in MOMENTS):
        raise _clash(a, "tx_mu_dtype", "extra_optimizer_kwargs", "say it once")
    if known.get("momentum", 0) is None and given.get("momentum") is None:
        raise _clash(
            a, "tx_mu_dtype", "extra_optimizer_kwargs", "there is no moment without momentum"
        )


def _mesh(a: Any) -> None:
    names = a.sharding_axis_names
    if len(set(names)) < len(names):
        raise ConfigError(f"sharding_axis_names: expected names that differ, got {names}")
    for sizes in ("sharding_array", "sharding_dcn_axis_dims"):
        if getattr(a, sizes) is not None and len(getattr(a, sizes)) != len(names):
            raise _clash(a, sizes, "sharding_axis_names", "give one size for each name")
    axes = [axis for entry in a.step_partition_spec or () for axis in _axes(entry)]
    if len(set(axes)) < len(axes) or not set(axes) <= set(names):
        raise _clash(
            a, "step_partition_spec", "sharding_axis_names", "name axes of the mesh, each once"
        )
    if a.mixed_precision is not None and a.dtype not in (None, MIXED[a.mixed_precision]):
        raise _clash(a, "mixed_precision", "dtype", "they are two ways to say one thing; give one")


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _data(a: Any) -> None:
    index, count = a.grain_shard_index, a.grain_shard_count
    if (index is None) != (count is None):
        raise _clash(a, "grain_shard_index", "grain_shard_count", "give both or neither")
    if index is not None and index >= count:
        raise _clash(a, "grain_shard_index", "grain_shard_count", "the first share is 0")
    if not a.shuffle_train_dataset:
        _needs(a, ("shuffle_seed_train",), "shuffle_train_dataset", "nothing is shuffled")
    if a.max_length is None:
        _needs(a, ("truncation_mode",), "max_length", "nothing is cut; give max_length")


def _length(a: Any) -> None:
    if not (a.do_train or a.do_eval):
        raise _clash(a, "do_train", "do_eval", "nothing would be done")
    if type(a.max_steps) is int and a.step_start_point >= a.max_steps:
        raise _clash(a, "step_start_point", "max_steps", "there would be no step")


_OF_EVALUATIONS = (
    *("eval_steps", "eval_batch_size", "per_device_eval_batch_size"),
    *("max_evaluation_steps", "per_epoch_evaluation_steps"),
)


def _evaluating(a: Any) -> None:
    strategy, metric = a.evaluation_strategy, a.metric_for_best_model
    if strategy == "steps" and a.eval_steps is None:
        raise _clash(a, "evaluation_strategy", "eval_steps", "give eval_steps")
    if strategy in ("no", "epoch"):
        _needs(a, ("eval_steps",), "evaluation_strategy", "write evaluation_strategy='steps'")
    if not a.do_eval and strategy not in (None, "no"):
        raise _clash(a, "evaluation_strategy", "do_eval", "there are no evaluations")
    never = "do_eval" if not a.do_eval else "evaluation_strategy" if strategy == "no" else None
    if never is not None:
        _needs(a, _OF_EVALUATIONS, never, "there are no evaluations")
        if metric is not None and not metric.startswith(("train.", "train/")):
            raise _clash(a, "metric_for_best_model", never, "name a metric train.…")
        if a.early_stopping_patience is not None and metric is None:
            raise _clash(
                a, "early_stopping_patience", never, "give metric_for_best_model='train.loss'"
            )
    if metric is None and a.early_stopping_patience is None:
        _needs(a, ("greater_is_better",), "metric_for_best_model", "say of which metric")


def _saving(a: Any) -> None:
    asked = ("save_steps", "save_interval_minutes")
    if a.save_strategy == "no":
        _needs(a, asked, "save_strategy", "nothing would be saved between; leave one out")
    if a.save_strategy == "steps" and a.save_steps is None and a.save_interval_minutes is None:
        raise _clash(a, "save_strategy", "save_steps", "give save_steps")
    if a.output_dir is None:
        names = (*asked, "save_total_limit", "checkpoints_dir")
        _needs(a, names, "output_dir", "say where, with output_dir='runs/a'")
        if a.save_strategy not in (None, "no"):
            raise _clash(a, "save_strategy", "output_dir", "say where, with output_dir='runs/a'")
    between = a.save_strategy == "epoch" or any(getattr(a, name) is not None for name in asked)
    if between and not a.do_last_save:
        raise ConfigError(
            "do_last_save=False: a run that saves also saves what it ends with, so that it can be "
            "gone on with; leave it out, or save nothing at all"
        )
    if a.resume_from_checkpoint is True and not a.resume_if_possible:
        raise _clash(a, "resume_from_checkpoint", "resume_if_possible", "leave one out")
    if a.init_weights_from is not None and isinstance(a.resume_from_checkpoint, str):
        raise _clash(a, "init_weights_from", "resume_from_checkpoint", "begin with one of them")


def _reporting(a: Any) -> None:
    if not a.use_wandb:
        names = ("wandb_entity", "wandb_name", "trainer_prefix")
        _needs(a, names, "use_wandb", "it is of W&B alone; write use_wandb=True")
    written = ("use_wandb", "verbose", "log_all_workers", "report_steps", "report_to")
    if not a.report_metrics:
        _needs(a, written, "report_metrics", "nothing is written; leave one out")
    if a.performance_mode:
        shown = (*written, "track_memory", "weight_distribution_log_steps", "progress_bar_type")
        _needs(a, shown, "performance_mode", "nothing is shown or written then; leave one out")
    if a.weight_distribution_log_steps is None:
        _needs(
            a,
            ("weight_distribution_pattern",),
            "weight_distribution_log_steps",
            "say how often; it has to wait",
        )
    if a.progress_bar_type == "none":
        _needs(
            a,
            ("metrics_to_show_in_rich_pbar",),
            "progress_bar_type",
            "there is no bar to show them",
        )
