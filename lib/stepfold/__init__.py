"""stepfold: a training run is a fold of a step over batches."""

from stepfold.checkpoint.checkpoints import Checkpoints
from stepfold.checkpoint.export import export_params
from stepfold.checkpoint.load import load_params
from stepfold.checkpoint.restore import Restored, restore
from stepfold.checkpoint.save import save
from stepfold.checkpoint.verify import Contents, contents, latest_step, verify
from stepfold.core.ema import ema_params, get_ema
from stepfold.core.gradients import value_and_grad
from stepfold.core.loss import mean
from stepfold.core.loss_scale import dynamic_loss_scale
from stepfold.core.observe import observe
from stepfold.core.precision import Precision
from stepfold.core.state import TrainState, init_state
from stepfold.core.step import make_eval_step, make_train_step
from stepfold.data.attention import block_diagonal_mask
from stepfold.data.batches import batches
from stepfold.data.collate import collate
from stepfold.data.mixture import mix
from stepfold.data.packing import pack
from stepfold.data.prefetch import prefetch
from stepfold.data.sources.tfds import tfds_source
from stepfold.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LossError,
    OutOfMemoryError,
    RetraceError,
    ShardingError,
    StepfoldError,
    TreeMismatchError,
)
from stepfold.inspect.compiled import compile_step
from stepfold.inspect.parameters import parameter_table
from stepfold.inspect.report import describe
from stepfold.loop.evaluate import Evaluation, evaluate
from stepfold.loop.fit import fit
from stepfold.loop.hooks.base import Event, Stop
from stepfold.loop.hooks.profile import profile
from stepfold.loop.hooks.progress import progress
from stepfold.loop.hooks.stop import stop_after, stop_early, stop_on_nonfinite, stop_on_spike
from stepfold.loop.hooks.throughput import memory_use, throughput
from stepfold.loop.hooks.watchdog import watchdog
from stepfold.loop.hooks.weights import weight_statistics
from stepfold.loop.hooks.wrappers import callback, every, only_warn
from stepfold.loop.replay.capsule import Capsule, read_capsule
from stepfold.loop.replay.rerun import Replay, replay
from stepfold.loop.result import FitResult
from stepfold.loop.train_loop import iterate
from stepfold.loop.writers.base import Writer
from stepfold.loop.writers.combinators import async_writer, log_to, multi_writer
from stepfold.loop.writers.console import console_writer
from stepfold.loop.writers.jsonl import csv_writer, jsonl_writer
from stepfold.loop.writers.tensorboard import tensorboard_writer
from stepfold.loop.writers.wandb import wandb_writer
from stepfold.sharding.distributed import start_distributed
from stepfold.sharding.mesh import make_mesh
from stepfold.sharding.placement import place, shard_batch
from stepfold.sharding.plan import make_sharding, sharding_table
from stepfold.sharding.reduction import reduce_once
from stepfold.sharding.rules import fsdp

__version__ = "0.1.0"

__all__ = [
    "Capsule",
    "CheckpointError",
    "Checkpoints",
    "ConfigError",
    "Contents",
    "DataError",
    "Evaluation",
    "Event",
    "FitResult",
    "LossError",
    "OutOfMemoryError",
    "Precision",
    "Replay",
    "Restored",
    "RetraceError",
    "ShardingError",
    "StepfoldError",
    "Stop",
    "TrainState",
    "TreeMismatchError",
    "Writer",
    "async_writer",
    "batches",
    "block_diagonal_mask",
    "callback",
    "collate",
    "compile_step",
    "console_writer",
    "contents",
    "csv_writer",
    "describe",
    "dynamic_loss_scale",
    "ema_params",
    "evaluate",
    "every",
    "export_params",
    "fit",
    "fsdp",
    "get_ema",
    "init_state",
    "iterate",
    "jsonl_writer",
    "latest_step",
    "load_params",
    "log_to",
    "make_eval_step",
    "make_mesh",
    "make_sharding",
    "make_train_step",
    "mean",
    "memory_use",
    "mix",
    "multi_writer",
    "observe",
    "only_warn",
    "pack",
    "parameter_table",
    "place",
    "prefetch",
    "profile",
    "progress",
    "read_capsule",
    "reduce_once",
    "replay",
    "restore",
    "save",
    "shard_batch",
    "sharding_table",
    "start_distributed",
    "stop_after",
    "stop_early",
    "stop_on_nonfinite",
    "stop_on_spike",
    "tensorboard_writer",
    "tfds_source",
    "throughput",
    "value_and_grad",
    "verify",
    "wandb_writer",
    "watchdog",
    "weight_statistics",
]
