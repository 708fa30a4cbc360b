"""Make the parts of a run from `TrainingArguments`."""

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stepfold import tree
from stepfold.adapter.arguments import TrainingArguments
from stepfold.adapter.fields import MIXED, is_changed
from stepfold.adapter.optimizers import (
    ENDLESS,
    MOMENT_DTYPES,
    SCHEDULES,
    build_optimizer,
    freeze,
    is_plateau,
    optimizer_options,
    parse_scheduler,
    scale_on_plateau,
)
from stepfold.adapter.sizes import Sizes, check_within
from stepfold.adapter.validation import check_functions
from stepfold.checkpoint.checkpoints import Checkpoints
from stepfold.cluster.distributed import Distributed, start_distributed
from stepfold.core.optimizer import as_optimizer
from stepfold.core.precision import Precision, dynamic_loss_scale
from stepfold.core.validation import (
    absolute_path,
    refuse_unknown,
    renamed,
    takes_any_keyword,
)
from stepfold.errors import ConfigError, DataError, refuse
from stepfold.sharding import mesh as meshes
from stepfold.sharding.plan import Rules, fsdp
from stepfold.writers.base import Writer, console
from stepfold.writers.combinators import async_writer, multi_writer
from stepfold.writers.jsonl import jsonl
from stepfold.writers.tensorboard import tensorboard
from stepfold.writers.wandb import wandb

# How long a run is, where it writes, and what it shows.
_CHANGED_BY_A_RESUME = frozenset({
    "num_train_epochs", "max_steps", "training_time_limit", "step_start_point", "output_dir",
    "checkpoints_dir", "logs_dir", "resume_if_possible", "resume_from_checkpoint", "verbose",
    "progress_bar_type", "performance_mode", "save_total_limit", "do_train", "do_eval",
})  # fmt: skip

# Schedule and optimizer


def make_schedule(arguments: TrainingArguments, steps: int | None) -> optax.Schedule:
    """Make the learning rate schedule.

    The rate rises linearly from 0 to `learning_rate` for `warmup_steps`, and then follows
    `scheduler` to `learning_rate_end` at the last of the `steps` of the run. `steps` may be None,
    unknown, if the schedule does not depend on it.

    >>> arguments = TrainingArguments(learning_rate=0.1, scheduler="linear", warmup_steps=10)
    >>> schedule = make_schedule(arguments, 110)
    >>> [round(float(schedule(step)), 3) for step in (0, 5, 10, 60, 110)]
    [0.0, 0.05, 0.1, 0.05, 0.0]
    """
    custom = arguments.custom_scheduler
    if custom is not None:  # a schedule, or a function of the number of steps to one
        result = custom(1 if steps is None else steps)
        if callable(result) and steps is None:
            expected = "a schedule, because the number of steps is unknown"
            got = "a function from it to a schedule"
            refuse("custom_scheduler", expected, got, "give max_steps")
        return result if callable(result) else custom
    name, _ = parse_scheduler(arguments.scheduler or "none")
    if steps is None and name not in ENDLESS:
        expected = f"one of {', '.join(ENDLESS)}, because the number of steps is unknown"
        advice = "give one of these, or max_steps"
        refuse("scheduler", expected, repr(arguments.scheduler), advice)
    check_within(arguments, "warmup_steps", steps)
    warmup, peak = arguments.warmup_steps, arguments.learning_rate
    end = arguments.learning_rate_end or 0.0
    decay_steps = 1 if steps is None else steps - warmup
    options = {} if is_plateau(arguments.scheduler) else arguments.scheduler_kwargs
    schedule = SCHEDULES[name](peak, end, decay_steps, **options)
    if not warmup:
        return schedule
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), schedule], [warmup])


def make_optimizer(
    arguments: TrainingArguments, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Make the optimizer by its name in optax, with the transformations around it.

    A gradient passes them in this order: the loss scale, for float16; freezing, so that the rest
    sees only trained parameters; pruning; clipping by the global norm; weight decay, unless the
    optimizer has its own; the optimizer; the scale of `reduce_on_plateau`.

    >>> import stepfold as sf
    >>> arguments = TrainingArguments(optimizer="lion", clip_grad=1.0, frozen_parameters="^embed")
    >>> tx = make_optimizer(arguments, make_schedule(arguments, 100))
    >>> state = sf.init_state({"embed": jnp.ones(2), "w": jnp.ones(2)}, tx, jax.random.key(0))
    """
    options, known = dict(arguments.extra_optimizer_kwargs), optimizer_options(arguments.optimizer)
    before = []
    if arguments.clip_grad is not None:
        before.append(optax.clip_by_global_norm(arguments.clip_grad))
    if arguments.weight_decay is not None:
        if "weight_decay" in known:
            options["weight_decay"] = arguments.weight_decay
        else:
            before.append(optax.add_decayed_weights(arguments.weight_decay))
    if arguments.tx_mu_dtype is not None:
        option = next(name for name in MOMENT_DTYPES if name in known)
        options[option] = jnp.dtype(arguments.tx_mu_dtype)
    after = []
    if is_plateau(arguments.scheduler):
        after.append(scale_on_plateau(arguments.scheduler_kwargs))
    tx = optax.chain(*before, build_optimizer(arguments.optimizer, schedule, options), *after)
    tx = _prune(tx, arguments)
    if arguments.frozen_parameters is not None:
        tx = freeze(tx, arguments.frozen_parameters)
    return dynamic_loss_scale(tx) if precision(arguments).needs_loss_scale else tx


def _prune(
    tx: optax.GradientTransformation, arguments: TrainingArguments
) -> optax.GradientTransformation:
    if arguments.pruning_module is None:
        return tx
    wrap = getattr(arguments.pruning_module, "wrap_optax", arguments.pruning_module)
    return as_optimizer(wrap(tx))


_RATE = "learning_rate learning_rate_end scheduler scheduler_kwargs custom_scheduler warmup_steps"
_OPTIMIZER = "optimizer extra_optimizer_kwargs weight_decay clip_grad tx_mu_dtype frozen_parameters"


def optimizer_of(
    arguments: TrainingArguments,
    steps: int | None,
    tx: optax.GradientTransformation | None = None,
    scheduler: optax.Schedule | None = None,
) -> tuple[optax.GradientTransformation, optax.Schedule | None]:
    """Return the optimizer, and its schedule if known.

    `tx` and `scheduler` replace those of the arguments. `pruning_module` still wraps `tx`.
    """
    replaced = "" if scheduler is None else _RATE
    for field in (replaced if tx is None else f"{_RATE} {_OPTIMIZER}").split():
        if is_changed(arguments, field):
            expected = "arguments that do not set what it replaces"
            got = f"{field}={getattr(arguments, field)!r:.60}"
            refuse("scheduler" if tx is None else "tx", expected, got, "leave out one of them")
    if tx is not None:
        return _prune(tx, arguments), scheduler
    schedule = scheduler or make_schedule(arguments, steps)
    return make_optimizer(arguments, schedule), schedule


# Processes, mesh and sharding

_JAX_NAMES = {
    "coordinator_address": "coordinator",
    "num_processes": "processes",
    "process_id": "process",
    "local_device_ids": "devices",
    "initialization_timeout": "timeout",
    "heartbeat_timeout_seconds": "heartbeat",
    "shutdown_timeout_seconds": "shutdown",
}


def start_processes(arguments: TrainingArguments) -> Distributed | None:
    """Start jax.distributed if `jax_distributed_config` is set. Call it before any use of jax.

    Its keys are those of `jax.distributed.initialize` or of `sf.start_distributed`.

    >>> start_processes(TrainingArguments()) is None
    True
    """
    config = arguments.jax_distributed_config
    if config is None:
        return None
    refuse_unknown("jax_distributed_config", config, [*_JAX_NAMES, *_JAX_NAMES.values()])
    return start_distributed(**{_JAX_NAMES.get(key, key): value for key, value in config.items()})


def make_mesh(arguments: TrainingArguments, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Make the mesh of `sharding_array`, `sharding_axis_names` and `sharding_dcn_axis_dims`.

    >>> make_mesh(TrainingArguments()).shape["fsdp"] == jax.device_count()
    True
    """
    return meshes.make_mesh(
        arguments.sharding_array,
        arguments.sharding_axis_names,
        dcn_dims=arguments.sharding_dcn_axis_dims,
        devices=devices,
    )


def sharding_rules(arguments: TrainingArguments) -> Rules:
    """Return rules for `sf.make_sharding`: FSDP, or with `auto_shard_states=False` replication.

    >>> sharding_rules(TrainingArguments(auto_shard_states=False))
    [('', P())]
    """
    return fsdp() if arguments.auto_shard_states else [("", PartitionSpec())]


# Precision and the loss


def precision(arguments: TrainingArguments) -> Precision:
    """Return the precision of the step, from `dtype` or `mixed_precision`.

    For float16, `make_optimizer` adds a dynamic loss scale.

    >>> precision(TrainingArguments(mixed_precision="bf16")).compute.name
    'bfloat16'
    """
    dtype = arguments.dtype or MIXED[arguments.mixed_precision or "full"]
    return Precision(_to_dtype("dtype", dtype))


def _to_dtype(field: str, dtype: str) -> np.dtype[Any]:
    if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
        expected = "float32 or narrower, because jax has float64 disabled"
        refuse(field, expected, repr(dtype), "set JAX_ENABLE_X64=1 in the environment")
    return jnp.dtype(dtype)


def cast_params(arguments: TrainingArguments, params: Any) -> Any:
    """Cast floating-point parameters to `param_dtype`, if it is set.

    >>> cast_params(TrainingArguments(param_dtype="bf16"), {"w": jnp.ones(2)})["w"].dtype.name
    'bfloat16'
    """
    if arguments.param_dtype is None:
        return params
    return tree.cast_floats(params, _to_dtype("param_dtype", arguments.param_dtype))


def make_loss(
    arguments: TrainingArguments, loss_fn: Callable[..., Any], mesh: Mesh | None = None
) -> Callable[..., Any]:
    """Wrap a loss function to follow the arguments.

    `loss_config` is passed as keyword arguments. With `aux_loss_enabled=False`, terms whose name
    starts with `aux` are dropped. `use_fast_kernels` sets the precision of matrix products. On a
    mesh, batches are sharded by `step_partition_spec`.

    >>> arguments = TrainingArguments(loss_config={"scale": 2.0}, aux_loss_enabled=False)
    >>> loss = make_loss(arguments, lambda p, b, key, scale=1.0: {"ce": p * scale, "aux_z": p})
    >>> loss(3.0, None, None)
    {'ce': 6.0}
    """
    check_functions(loss_fn=loss_fn)
    config, fast = arguments.loss_config, arguments.use_fast_kernels
    if config and not takes_any_keyword(loss_fn):
        unknown = [name for name in config if name not in inspect.signature(loss_fn).parameters]
        if unknown:
            expected = f"keywords of {getattr(loss_fn, '__name__', loss_fn)}"
            advice = "add them to its parameters, or leave them out"
            refuse("loss_config", expected, ", ".join(unknown), advice)

    def constrain(leaf: Any) -> Any:
        """Shard an array by the first entries of the spec, one for each dimension."""
        if mesh is None or arguments.step_partition_spec is None or not tree.is_array(leaf):
            return leaf
        spec = PartitionSpec(*arguments.step_partition_spec[: leaf.ndim])
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    @wraps(loss_fn)
    def loss(params: Any, batch: Any, *rest: Any) -> Any:
        matmul_precision = "default" if fast else "highest"
        with nullcontext() if fast is None else jax.default_matmul_precision(matmul_precision):
            result = loss_fn(params, jax.tree.map(constrain, batch), *rest, **config)
        return result if arguments.aux_loss_enabled else _without_aux(result)

    return loss


def _without_aux(result: Any) -> Any:
    terms, *rest = result if isinstance(result, tuple) else (result,)
    is_dict = isinstance(terms, dict)
    kept = {n: term for n, term in terms.items() if not n.startswith("aux")} if is_dict else {}
    if not kept or len(kept) == len(terms):
        expected = (
            "a loss function that returns a dict of terms, as in {'loss': …, 'aux_router': …}, to "
            "drop those named aux…"
        )
        got = ", ".join(terms) if is_dict else tree.describe_value(terms)
        refuse("aux_loss_enabled", expected, got, "name them so, or leave out the field")
    return (kept, *rest) if isinstance(result, tuple) else kept


# Examples


def transform(arguments: TrainingArguments) -> Callable[[Any], Any] | None:
    """Make the `transform` of `sf.batches` that drops columns; None if none are dropped.

    >>> arguments = TrainingArguments(ids_to_pop_from_dataset=("id",), remove_unused_columns=True)
    >>> transform(arguments)({"id": 7, "text": "a word", "tokens": [1, 2]})
    {'tokens': [1, 2]}
    """
    dropped, drop_unused = arguments.ids_to_pop_from_dataset, arguments.remove_unused_columns
    if not (dropped or drop_unused):
        return None

    def drop_columns(example: Any) -> Any:
        if not isinstance(example, Mapping):
            names = "ids_to_pop_from_dataset, remove_unused_columns"
            expected = "examples that are dicts of columns"
            refuse(names, expected, example, "leave out both fields", kind=DataError)
        return {
            name: value
            for name, value in example.items()
            if name not in dropped and not (drop_unused and _is_unused(value))
        }

    return drop_columns


def _is_unused(value: Any) -> bool:
    """Whether no step can take the value: None, text, dates and objects."""
    try:
        return not tree.is_numeric(np.asarray(value).dtype)
    except ValueError:  # lists of unequal lengths
        return any(map(_is_unused, value))


# Checkpoints and writers


@renamed(plan="sizes")
def checkpoints(arguments: TrainingArguments, sizes: Sizes) -> Checkpoints | None:
    """Make the checkpoints in `output_dir/checkpoints_dir`, which include the last state.

    Without `output_dir`, or with `do_last_save=False`, return None: nothing is saved.

    >>> from stepfold.adapter import compute_sizes
    >>> arguments = TrainingArguments(output_dir="runs/a", max_steps=200, save_steps=0.25)
    >>> checkpoints(arguments, compute_sizes(arguments)).every
    50
    """
    if arguments.output_dir is None or not arguments.do_last_save:
        return None
    metric, mode = best_metric(arguments)
    return Checkpoints(
        Path(arguments.output_dir) / arguments.checkpoints_dir,
        every=sizes.save_steps,
        every_epochs=sizes.save_epochs,
        every_minutes=arguments.save_interval_minutes,
        keep=arguments.save_total_limit,
        best=metric,
        mode=mode if metric is not None else None,
    )


def best_metric(arguments: TrainingArguments) -> tuple[str | None, str | None]:
    """Return the name of `metric_for_best_model` in a run, such as `eval/cer`, and its mode."""
    metric, mode = arguments.metric_for_best_model, {None: None, True: "max", False: "min"}
    if metric is not None:
        metric = re.sub("^(evaluation[./]|eval[./_])", "eval/", metric)
        metric = re.sub("^train[._]", "train/", metric)
        metric = metric if "/" in metric else f"eval/{metric}"
    return metric, mode[arguments.greater_is_better]


def writers(arguments: TrainingArguments) -> Writer | None:
    """Make a background writer of metrics, or None if they are not written.

    Files are in `output_dir/logs_dir`. Without `output_dir` there are none, and setting `report_to`
    raises a ConfigError.

    >>> writers(TrainingArguments(report_metrics=False)) is None
    True
    """
    if arguments.performance_mode or not arguments.report_metrics:
        return None
    kinds = arguments.report_to
    if arguments.output_dir is None:
        if kinds and is_changed(arguments, "report_to"):
            raise ConfigError(f"report_to={kinds!r} has no directory to write to; give output_dir")
        kinds = ()
    logs, all_writers = logs_of(arguments), list[Writer]()
    table = logs / "metrics.csv" if "csv" in kinds else None
    if "jsonl" in kinds:  # from which the table is derived
        all_writers.append(jsonl(logs / "metrics.jsonl", csv=table))
    elif table is not None:
        all_writers.append(jsonl(table, csv=True))
    if "tensorboard" in kinds:
        all_writers.append(tensorboard(logs / "tensorboard"))
    if arguments.use_wandb:
        all_writers.append(wandb(**wandb_options(arguments)))
    if arguments.verbose:
        all_writers.append(console())
    return async_writer(multi_writer(*all_writers)) if all_writers else None


def config_of(arguments: TrainingArguments) -> dict[str, Any]:
    """Return the arguments for `run.json`, without those that usually change in a resume.

    A value that JSON cannot hold, such as a function, becomes a text.
    """
    names = arguments.to_dict().keys() - _CHANGED_BY_A_RESUME
    return {name: _as_json(getattr(arguments, name)) for name in sorted(names)}


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    is_plain = value is None or isinstance(value, str | bool | int | float)
    return value if is_plain else getattr(value, "__qualname__", None) or str(value)


def logs_of(arguments: TrainingArguments) -> Path:
    """Return the directory of metric files, one per process if every process writes."""
    directory = absolute_path("output_dir", Path(arguments.output_dir or ".") / arguments.logs_dir)
    if writes_everywhere(arguments):
        return directory / f"process_{jax.process_index()}"
    return directory


def writes_everywhere(arguments: TrainingArguments) -> bool:
    """Whether every process writes metrics, and not only the first."""
    return arguments.log_all_workers or not arguments.process_zero_is_admin


def wandb_options(arguments: TrainingArguments) -> dict[str, Any]:
    """Return the keyword arguments of `wandb.init`."""
    output_dir = arguments.output_dir
    options = {
        "project": "-".join(filter(None, (arguments.trainer_prefix, arguments.model_name))),
        "entity": arguments.wandb_entity,
        "name": arguments.wandb_name,
        "dir": output_dir and os.fspath(absolute_path("output_dir", output_dir)),
        "config": config_of(arguments),
    }
    return {name: value for name, value in options.items() if value is not None}
