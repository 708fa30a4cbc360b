"""stepfold: a training run is a fold of a step over batches."""

from stepfold.core.ema import ema_params, get_ema
from stepfold.core.gradients import value_and_grad
from stepfold.core.loss import mean
from stepfold.core.precision import Precision, dynamic_loss_scale
from stepfold.core.state import TrainState, init_state
from stepfold.core.step import make_eval_step, make_train_step
from stepfold.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LossError,
    RetraceError,
    ShardingError,
    StepfoldError,
    TreeMismatchError,
)

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "LossError",
    "Precision",
    "RetraceError",
    "ShardingError",
    "StepfoldError",
    "TrainState",
    "TreeMismatchError",
    "dynamic_loss_scale",
    "ema_params",
    "get_ema",
    "init_state",
    "make_eval_step",
    "make_train_step",
    "mean",
    "value_and_grad",
]
