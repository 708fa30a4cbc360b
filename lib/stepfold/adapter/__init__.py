"""A trainer object and its arguments, and the functions that make the parts of a run of them."""

from stepfold.adapter.arguments import TrainingArguments, by_any_name
from stepfold.adapter.from_arguments import (
    Plan,
    best_metric,
    best_mode,
    cast_params,
    checkpoints,
    logs_of,
    make_loss,
    make_mesh,
    make_optimizer,
    make_schedule,
    plan,
    precision,
    remat,
    sharding_rules,
    shuffle_seed,
    start_processes,
    transform,
    wandb_options,
    writers,
    writes_everywhere,
)
from stepfold.adapter.hooks import StopTraining, Watcher
from stepfold.adapter.outputs import (
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
    TrainerOutput,
)
from stepfold.adapter.protocol import BaseTrainerProtocol
from stepfold.adapter.trainer import Trainer

__all__ = [
    "BaseTrainerProtocol",
    "Plan",
    "StopTraining",
    "Trainer",
    "TrainerConfigureDataloaderOutput",
    "TrainerConfigureFunctionOutput",
    "TrainerConfigureModelOutput",
    "TrainerOutput",
    "TrainingArguments",
    "Watcher",
    "best_metric",
    "best_mode",
    "by_any_name",
    "cast_params",
    "checkpoints",
    "logs_of",
    "make_loss",
    "make_mesh",
    "make_optimizer",
    "make_schedule",
    "plan",
    "precision",
    "remat",
    "sharding_rules",
    "shuffle_seed",
    "start_processes",
    "transform",
    "wandb_options",
    "writers",
    "writes_everywhere",
]
