"""Names of version 0.2, and where they are now. They work until 0.4, with a warning."""

import inspect
from importlib import import_module

from stepfold.errors import warn

# For each module, the names that were in `stepfold` itself.
_MOVED_TO = {
    "checkpoint": (
        "Contents NameMap NameRule Restored Series average_checkpoints contents export_params "
        "latest_step load_params verify"
    ),
    "data": "Batches block_diagonal_mask",
    "debug": "Capsule Replay check_step read_capsule replay",
    "errors": (
        "CheckpointError ConfigError DataError LossError OutOfMemoryError PeerTimeoutError "
        "RetraceError ShardingError TreeMismatchError"
    ),
    "hooks": (
        "BaseHook GoBack Replace Reweight callback every memory_use only_warn profile "
        "roll_back_on_nonfinite roll_back_on_spike stop_early stop_on_corruption "
        "stop_on_nonfinite stop_on_spike stragglers throughput watchdog weight_statistics"
    ),
    "inspect": "CompiledStep Report choose choose_remat parameter_table",
    "optim": "clip_by_ordered_norm low_precision ordered_norm skip_spikes",
    "runs": "RunEvaluation",
    "sharding": "devices_of fsdp ordered place reduce_once sharding_table",
    "writers": (
        "Writer async_writer console_writer csv_writer jsonl_writer multi_writer "
        "tensorboard_writer trackio_writer wandb_writer"
    ),
}
MOVED = {name: f"{module}.{name}" for module, names in _MOVED_TO.items() for name in names.split()}
# Names that are gone, and what to write.
GONE = {
    "Elastic": "is gone; give fit the step itself, and start the script with `python -m stepfold "
    "launch`, which starts all processes again when one dies; they resume from "
    "Checkpoints(temporary=Temporary(directory, every=…, replicas=1))",
    "average": "is now sf.checkpoint.average_checkpoints",
    "stop_after": "is now fit(time_limit=…)",
    "value_and_grad": "is now make_grad",
}


def find_moved(name: str) -> object:
    """Return what a name of `stepfold` in version 0.2 meant, with a warning, or raise.

    >>> import stepfold as sf
    >>> sf.stop_after
    Traceback (most recent call last):
    ...
    AttributeError: stepfold: stop_after is now fit(time_limit=…)
    """
    if name in GONE:
        # `from stepfold import x` hides an AttributeError, and with it the new name.
        is_import = any("importlib" in frame.filename for frame in inspect.stack(0)[2:3])
        raise (ImportError if is_import else AttributeError)(f"stepfold: {name} {GONE[name]}")
    if name not in MOVED:
        raise AttributeError(f"module 'stepfold' has no attribute {name!r}")
    module, _, attribute = MOVED[name].rpartition(".")
    warn(
        f"sf.{name} is now sf.{MOVED[name]}; `python -m stepfold rename FILES` rewrites it",
        DeprecationWarning,
    )
    return getattr(import_module(f"stepfold.{module}"), attribute)
