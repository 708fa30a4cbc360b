"""The trainer's clothes: arguments by name, and the parts of a run made from them."""

from stepfold.adapter.arguments.names import by_any_name
from stepfold.adapter.arguments.training import TrainingArguments
from stepfold.adapter.outputs import (
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
    TrainerOutput,
)
from stepfold.adapter.parts.checkpoints import best_metric, best_mode, checkpoints
from stepfold.adapter.parts.devices import make_mesh, sharding_rules, start_processes
from stepfold.adapter.parts.examples import shuffle_seed, transform
from stepfold.adapter.parts.loss import make_loss
from stepfold.adapter.parts.optimizer import make_optimizer
from stepfold.adapter.parts.precision import cast_params, precision, remat
from stepfold.adapter.parts.schedule import make_schedule
from stepfold.adapter.parts.writers import logs_of, wandb_options, writers, writes_everywhere
from stepfold.adapter.planning import Plan, plan
from stepfold.adapter.protocol import BaseTrainerProtocol
from stepfold.adapter.stopping import StopTraining
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
