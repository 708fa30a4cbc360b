"""A trainer object and its arguments, and the functions that make the parts of a run of them."""

from stepfold.adapter.arguments import TrainingArguments, by_any_name
from stepfold.adapter.from_arguments import (
    cast_params,
    checkpoints,
    make_loss,
    make_mesh,
    make_optimizer,
    make_schedule,
    precision,
    sharding_rules,
    start_processes,
    transform,
    writers,
)
from stepfold.adapter.hooks import StopTraining, Watcher
from stepfold.adapter.outputs import (
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
    TrainerOutput,
)
from stepfold.adapter.protocol import BaseTrainerProtocol
from stepfold.adapter.sizes import Plan, plan
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
    "by_any_name",
    "cast_params",
    "checkpoints",
    "make_loss",
    "make_mesh",
    "make_optimizer",
    "make_schedule",
    "plan",
    "precision",
    "sharding_rules",
    "start_processes",
    "transform",
    "writers",
]
