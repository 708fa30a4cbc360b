"""stepfold: a training run is a fold of a step over batches.

A name is imported on first use, so that `import stepfold` alone takes milliseconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers and editors
    from stepfold.checkpoint.average import average_checkpoints
    from stepfold.checkpoint.names import NameMap, NameRule
    from stepfold.checkpoint.policy import Checkpoints, save
    from stepfold.checkpoint.restore import Restored, restore
    from stepfold.checkpoint.safetensors import export_params, load_params
    from stepfold.checkpoint.series import Series
    from stepfold.checkpoint.temporary import Temporary
    from stepfold.checkpoint.verify import Contents, contents, latest_step, verify
    from stepfold.core.check import check_step
    from stepfold.core.cross_entropy import linear_cross_entropy
    from stepfold.core.ema import ema_params, get_ema
    from stepfold.core.gradients import GradFn, make_grad
    from stepfold.core.loss import LossFn, mean, mean_by, perplexity
    from stepfold.core.low_precision import low_precision
    from stepfold.core.precision import Precision, dynamic_loss_scale
    from stepfold.core.spikes import skip_spikes
    from stepfold.core.state import TrainState, init_state
    from stepfold.core.step import EvalFn, StepFn, make_eval_step, make_train_step, observe
    from stepfold.data.batches import Batches, batches
    from stepfold.data.collate import collate
    from stepfold.data.files import files
    from stepfold.data.mixture import mix
    from stepfold.data.packing import block_diagonal_mask, pack
    from stepfold.data.prefetch import prefetch
    from stepfold.data.tfds import tfds_source
    from stepfold.data.workers import workers
    from stepfold.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        LossError,
        OutOfMemoryError,
        PeerTimeoutError,
        RetraceError,
        ShardingError,
        StepfoldError,
        TreeMismatchError,
    )
    from stepfold.inspect.choose import choose, choose_remat
    from stepfold.inspect.compiled import CompiledStep, compile_step
    from stepfold.inspect.report import Report, describe, parameter_table
    from stepfold.loop.evaluate import Evaluation, evaluate
    from stepfold.loop.evaluator import RunEvaluation, evaluate_run
    from stepfold.loop.fit import FitResult, fit
    from stepfold.loop.fold import iterate
    from stepfold.loop.hooks.base import BaseHook, Hook, Sink
    from stepfold.loop.hooks.events import Event, GoBack, Replace, Reweight, Stop
    from stepfold.loop.hooks.performance import memory_use, profile, stragglers, throughput
    from stepfold.loop.hooks.progress import progress
    from stepfold.loop.hooks.stop import (
        roll_back_on_nonfinite,
        roll_back_on_spike,
        stop_early,
        stop_on_corruption,
        stop_on_nonfinite,
        stop_on_spike,
        watchdog,
    )
    from stepfold.loop.hooks.weights import weight_statistics
    from stepfold.loop.hooks.wrappers import callback, every, only_warn
    from stepfold.loop.predict import predict
    from stepfold.loop.replay.capsule import Capsule, read_capsule
    from stepfold.loop.replay.rerun import Replay, replay
    from stepfold.loop.run_directory import RunDirectory
    from stepfold.loop.writers.base import Writer, console_writer
    from stepfold.loop.writers.combinators import async_writer, log_to, multi_writer
    from stepfold.loop.writers.jsonl import csv_writer, jsonl_writer
    from stepfold.loop.writers.tensorboard import tensorboard_writer
    from stepfold.loop.writers.wandb import trackio_writer, wandb_writer
    from stepfold.sharding.distributed import start_distributed
    from stepfold.sharding.mesh import make_mesh
    from stepfold.sharding.ordered import clip_by_ordered_norm, ordered, ordered_norm
    from stepfold.sharding.place import place, shard_batch
    from stepfold.sharding.plan import fsdp, make_sharding, sharding_table
    from stepfold.sharding.reduce import reduce_once
    from stepfold.sharding.topology import devices_of

__version__ = "0.2.0"

__all__ = [
    "BaseHook",
    "Batches",
    "Capsule",
    "CheckpointError",
    "Checkpoints",
    "CompiledStep",
    "ConfigError",
    "Contents",
    "DataError",
    "EvalFn",
    "Evaluation",
    "Event",
    "FitResult",
    "GoBack",
    "GradFn",
    "Hook",
    "LossError",
    "LossFn",
    "NameMap",
    "NameRule",
    "OutOfMemoryError",
    "PeerTimeoutError",
    "Precision",
    "Replace",
    "Replay",
    "Report",
    "Restored",
    "RetraceError",
    "Reweight",
    "RunDirectory",
    "RunEvaluation",
    "Series",
    "ShardingError",
    "Sink",
    "StepFn",
    "StepfoldError",
    "Stop",
    "Temporary",
    "TrainState",
    "TreeMismatchError",
    "Writer",
    "async_writer",
    "average_checkpoints",
    "batches",
    "block_diagonal_mask",
    "callback",
    "check_step",
    "choose",
    "choose_remat",
    "clip_by_ordered_norm",
    "collate",
    "compile_step",
    "console_writer",
    "contents",
    "csv_writer",
    "describe",
    "devices_of",
    "dynamic_loss_scale",
    "ema_params",
    "evaluate",
    "evaluate_run",
    "every",
    "export_params",
    "files",
    "fit",
    "fsdp",
    "get_ema",
    "init_state",
    "iterate",
    "jsonl_writer",
    "latest_step",
    "linear_cross_entropy",
    "load_params",
    "log_to",
    "low_precision",
    "make_eval_step",
    "make_grad",
    "make_mesh",
    "make_sharding",
    "make_train_step",
    "mean",
    "mean_by",
    "memory_use",
    "mix",
    "multi_writer",
    "observe",
    "only_warn",
    "ordered",
    "ordered_norm",
    "pack",
    "parameter_table",
    "perplexity",
    "place",
    "predict",
    "prefetch",
    "profile",
    "progress",
    "read_capsule",
    "reduce_once",
    "replay",
    "restore",
    "roll_back_on_nonfinite",
    "roll_back_on_spike",
    "save",
    "shard_batch",
    "sharding_table",
    "skip_spikes",
    "start_distributed",
    "stop_early",
    "stop_on_corruption",
    "stop_on_nonfinite",
    "stop_on_spike",
    "stragglers",
    "tensorboard_writer",
    "tfds_source",
    "throughput",
    "trackio_writer",
    "verify",
    "wandb_writer",
    "watchdog",
    "weight_statistics",
    "workers",
]

# Where each name is, as the imports for type checkers say.
_NAMES = {
    "checkpoint.average": "average_checkpoints",
    "checkpoint.names": "NameMap NameRule",
    "checkpoint.policy": "Checkpoints save",
    "checkpoint.restore": "Restored restore",
    "checkpoint.safetensors": "export_params load_params",
    "checkpoint.series": "Series",
    "checkpoint.temporary": "Temporary",
    "checkpoint.verify": "Contents contents latest_step verify",
    "core.check": "check_step",
    "core.cross_entropy": "linear_cross_entropy",
    "core.ema": "ema_params get_ema",
    "core.gradients": "GradFn make_grad",
    "core.loss": "LossFn mean mean_by perplexity",
    "core.low_precision": "low_precision",
    "core.precision": "Precision dynamic_loss_scale",
    "core.spikes": "skip_spikes",
    "core.state": "TrainState init_state",
    "core.step": "EvalFn StepFn make_eval_step make_train_step observe",
    "data.batches": "Batches batches",
    "data.collate": "collate",
    "data.files": "files",
    "data.mixture": "mix",
    "data.packing": "block_diagonal_mask pack",
    "data.prefetch": "prefetch",
    "data.tfds": "tfds_source",
    "data.workers": "workers",
    "errors": (
        "CheckpointError ConfigError DataError LossError OutOfMemoryError PeerTimeoutError "
        "RetraceError ShardingError StepfoldError TreeMismatchError"
    ),
    "inspect.choose": "choose choose_remat",
    "inspect.compiled": "CompiledStep compile_step",
    "inspect.report": "Report describe parameter_table",
    "loop.evaluate": "Evaluation evaluate",
    "loop.evaluator": "RunEvaluation evaluate_run",
    "loop.fit": "FitResult fit",
    "loop.fold": "iterate",
    "loop.hooks.base": "BaseHook Hook Sink",
    "loop.hooks.events": "Event GoBack Replace Reweight Stop",
    "loop.hooks.performance": "memory_use profile stragglers throughput",
    "loop.hooks.progress": "progress",
    "loop.hooks.stop": (
        "roll_back_on_nonfinite roll_back_on_spike stop_early stop_on_corruption "
        "stop_on_nonfinite stop_on_spike watchdog"
    ),
    "loop.hooks.weights": "weight_statistics",
    "loop.hooks.wrappers": "callback every only_warn",
    "loop.predict": "predict",
    "loop.replay.capsule": "Capsule read_capsule",
    "loop.replay.rerun": "Replay replay",
    "loop.run_directory": "RunDirectory",
    "loop.writers.base": "Writer console_writer",
    "loop.writers.combinators": "async_writer log_to multi_writer",
    "loop.writers.jsonl": "csv_writer jsonl_writer",
    "loop.writers.tensorboard": "tensorboard_writer",
    "loop.writers.wandb": "trackio_writer wandb_writer",
    "sharding.distributed": "start_distributed",
    "sharding.mesh": "make_mesh",
    "sharding.ordered": "clip_by_ordered_norm ordered ordered_norm",
    "sharding.place": "place shard_batch",
    "sharding.plan": "fsdp make_sharding sharding_table",
    "sharding.reduce": "reduce_once",
    "sharding.topology": "devices_of",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
_SUBMODULES = (
    *("adapter", "checkpoint", "cluster", "core", "data", "debug", "errors", "inspect"),
    *("internals", "loop", "object_storage", "sharding", "table", "testing", "tree"),
)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    """Import a public name or a submodule, or say what to write in place of one that is gone."""
    if name == "hooks":
        return import_module("stepfold.loop.hooks")
    if name in _SUBMODULES:
        return import_module(f"stepfold.{name}")
    if name in _MODULES:
        value = getattr(import_module(f"stepfold.{_MODULES[name]}"), name)
        globals()[name] = value  # the next use does not come here
        return value
    import inspect

    gone = {
        "Elastic": "is gone; give fit the step itself, and start the script with `python -m "
        "stepfold launch`, which starts all processes again when one dies; they resume from "
        "Checkpoints(temporary=Temporary(directory, every=…, replicas=1))",
        "average": "is now average_checkpoints",
        "stop_after": "is now fit(time_limit=…)",
        "value_and_grad": "is now make_grad",
    }
    if name not in gone:
        raise AttributeError(f"module 'stepfold' has no attribute {name!r}")
    # `from stepfold import x` hides an AttributeError, and with it the new name.
    caller = inspect.currentframe().f_back  # type: ignore[union-attr]
    imports = caller is not None and "importlib" in caller.f_globals.get("__name__", "")
    raise (ImportError if imports else AttributeError)(f"stepfold: {name} {gone[name]}")
