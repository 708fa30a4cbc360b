"""stepfold: a training run is a fold of a step over batches.

What most programs use is here. The rest is in the modules `checkpoint`, `data`, `debug`, `errors`,
`hooks`, `inspect`, `optim`, `runs`, `sharding`, `writers`, `adapter` and `testing`. All of it is
imported on first use, so that `import stepfold` alone takes milliseconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers and editors
    from stepfold.checkpoint import Checkpoints, Temporary, restore, save
    from stepfold.cluster import start_distributed
    from stepfold.core import (
        EvalFn,
        GradFn,
        LossFn,
        Precision,
        StepFn,
        TrainState,
        dynamic_loss_scale,
        init_state,
        make_eval_step,
        make_grad,
        make_train_step,
        mean,
        mean_by,
        observe,
        perplexity,
    )
    from stepfold.data import batches, collate, files, mix, pack, prefetch, tfds_source, workers
    from stepfold.errors import StepfoldError
    from stepfold.hooks import progress
    from stepfold.inspect import compile_step, describe
    from stepfold.loop import Evaluation, Event, Hook, Sink, Stop, evaluate, iterate
    from stepfold.optim import ema_params, get_ema, linear_cross_entropy
    from stepfold.runs import FitResult, RunDirectory, evaluate_run, fit, predict
    from stepfold.sharding import make_mesh, make_sharding, shard_batch
    from stepfold.writers import log_to

__version__ = "0.2.0"

__all__ = [
    "Checkpoints",
    "EvalFn",
    "Evaluation",
    "Event",
    "FitResult",
    "GradFn",
    "Hook",
    "LossFn",
    "Precision",
    "RunDirectory",
    "Sink",
    "StepFn",
    "StepfoldError",
    "Stop",
    "Temporary",
    "TrainState",
    "batches",
    "collate",
    "compile_step",
    "describe",
    "dynamic_loss_scale",
    "ema_params",
    "evaluate",
    "evaluate_run",
    "files",
    "fit",
    "get_ema",
    "init_state",
    "iterate",
    "linear_cross_entropy",
    "log_to",
    "make_eval_step",
    "make_grad",
    "make_mesh",
    "make_sharding",
    "make_train_step",
    "mean",
    "mean_by",
    "mix",
    "observe",
    "pack",
    "perplexity",
    "predict",
    "prefetch",
    "progress",
    "restore",
    "save",
    "shard_batch",
    "start_distributed",
    "tfds_source",
    "workers",
]

# Where each name is, as the imports for type checkers say.
_NAMES = {
    "checkpoint": "Checkpoints Temporary restore save",
    "cluster": "start_distributed",
    "core": (
        "EvalFn GradFn LossFn Precision StepFn TrainState dynamic_loss_scale init_state "
        "make_eval_step make_grad make_train_step mean mean_by observe perplexity"
    ),
    "data": "batches collate files mix pack prefetch tfds_source workers",
    "errors": "StepfoldError",
    "hooks": "progress",
    "inspect": "compile_step describe",
    "loop": "Evaluation Event Hook Sink Stop evaluate iterate",
    "optim": "ema_params get_ema linear_cross_entropy",
    "runs": "FitResult RunDirectory evaluate_run fit predict",
    "sharding": "make_mesh make_sharding shard_batch",
    "writers": "log_to",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
# The public modules, then those of the implementation.
_PUBLIC = (
    *("adapter", "checkpoint", "data", "debug", "errors", "hooks", "inspect", "optim", "runs"),
    *("sharding", "testing", "writers"),
)
_SUBMODULES = (
    *_PUBLIC,
    *("cluster", "core", "internals", "json_files", "lazy", "loop", "moved", "object_storage"),
    *("rename", "table", "tree"),
)


def __dir__() -> list[str]:
    return [*__all__, *_PUBLIC, "__version__"]


def __getattr__(name: str) -> object:
    """Import a public name or a module; an old name warns of its new place."""
    if name in _SUBMODULES:
        return import_module(f"stepfold.{name}")
    if name in _MODULES:
        value = getattr(import_module(f"stepfold.{_MODULES[name]}"), name)
        globals()[name] = value  # the next use does not come here
        return value
    if name.startswith("__"):
        raise AttributeError(f"module 'stepfold' has no attribute {name!r}")
    from stepfold.moved import find_moved

    return find_moved(name)
