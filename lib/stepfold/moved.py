"""Names of version 0.2, and where they are now. They work until 0.4, with a warning."""

import inspect
from collections.abc import Container
from functools import partial
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
        "BaseHook GoBack Replace Reweight callback every memory_use only_warn profile stop_early "
        "stop_on_corruption stragglers throughput watchdog weight_statistics"
    ),
    "inspect": "CompiledStep Report choose choose_remat parameter_table",
    "optim": "clip_by_ordered_norm low_precision ordered_norm skip_spikes",
    "runs": "RunEvaluation",
    "sharding": "devices_of fsdp ordered place reduce_once sharding_table",
    "writers": "Writer async_writer multi_writer",
}
# Names that have changed too.
_RENAMED = {
    "console_writer": "writers.console",
    "csv_writer": "writers.jsonl",
    "jsonl_writer": "writers.jsonl",
    "roll_back_on_nonfinite": "hooks.on_nonfinite",
    "roll_back_on_spike": "hooks.on_spike",
    "stop_on_nonfinite": "hooks.on_nonfinite",
    "stop_on_spike": "hooks.on_spike",
    "tensorboard_writer": "writers.tensorboard",
    "trackio_writer": "writers.wandb",
    "wandb_writer": "writers.wandb",
}
MOVED = {
    **{name: f"{module}.{name}" for module, names in _MOVED_TO.items() for name in names.split()},
    **_RENAMED,
}
# Arguments that a new name needs to do what the old one did.
ARGUMENTS: dict[str, dict[str, str | bool]] = {
    "csv_writer": {"csv": True},
    "roll_back_on_nonfinite": {"action": "go_back"},
    "roll_back_on_spike": {"action": "go_back"},
    "trackio_writer": {"library": "trackio"},
}
# For each function, arguments by their old names, with the new ones.
KEYWORDS = {
    "Evaluation": {"elsewhere": "remote"},
    "hooks.on_nonfinite": {"pattern": "metric"},
    "hooks.on_spike": {"sigma": "deviations"},
    "optim.skip_spikes": {"sigma": "deviations"},
}
# Words in the names of hooks in checkpoints.
_HOOKS = {name: _RENAMED[name].removeprefix("hooks.") for name in _RENAMED if "_on_" in name}
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
        f"sf.{name} is now sf.{spell(name)}; `python -m stepfold rename FILES` rewrites it",
        DeprecationWarning,
    )
    value = getattr(import_module(f"stepfold.{module}"), attribute)
    return partial(value, **ARGUMENTS[name]) if name in ARGUMENTS else value


def spell(name: str) -> str:
    """Return the place of an old name, with the arguments that it needs.

    >>> spell("csv_writer")
    'writers.jsonl(csv=True)'
    """
    return f"{MOVED[name]}({spell_arguments(name)})" if name in ARGUMENTS else MOVED[name]


def spell_arguments(name: str) -> str:
    """Return the arguments that the new name needs, as in a call.

    >>> spell_arguments("trackio_writer")
    'library="trackio"'
    """
    values = {key: f'"{x}"' if isinstance(x, str) else x for key, x in ARGUMENTS[name].items()}
    return ", ".join(f"{key}={value}" for key, value in values.items())


def current_hook_name(saved: str, names: Container[str]) -> str:
    """Return the name now of a hook in a checkpoint, unless one of `names` has the saved one.

    >>> current_hook_name("every stop_on_spike train/loss", [])
    'every on_spike train/loss'
    """
    return saved if saved in names else " ".join(_HOOKS.get(w, w) for w in saved.split(" "))
