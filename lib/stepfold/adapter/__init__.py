"""A trainer object, its arguments, and functions that make the parts of a run from them.

`arguments.py` has the fields, and `fields.py` the rule of what each accepts. `from_arguments.py`
makes the parts of a run, and `trainer.py` is the trainer. `qurious.py` and `hezar.py` have trainers
with the methods of those libraries.
"""

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
from stepfold.adapter.sizes import Sizes, compute_sizes
from stepfold.adapter.trainer import Trainer
from stepfold.errors import warn

__all__ = [
    "BaseTrainerProtocol",
    "Sizes",
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
    "compute_sizes",
    "make_loss",
    "make_mesh",
    "make_optimizer",
    "make_schedule",
    "precision",
    "sharding_rules",
    "start_processes",
    "transform",
    "writers",
]


def __getattr__(name: str) -> object:
    """Return what a name of version 0.2 meant, with a warning."""
    new = {"Plan": "Sizes", "plan": "compute_sizes"}.get(name)
    if new is None:
        raise AttributeError(f"module 'stepfold.adapter' has no attribute {name!r}")
    warn(f"sf.adapter.{name} is now sf.adapter.{new}", DeprecationWarning)
    return globals()[new]
