"""What a run is begun with: its arguments, what it runs on, and the parameters it trains.

Neither the environment nor the command line are among it, since both may hold secrets, and what a
run keeps is shown around. The name of the program is.
"""

import math
import platform
import sys
from collections.abc import Mapping
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.checkpoint.checkpoints import Checkpoints
from stepfold.data.indexed import Batches
from stepfold.data.prefetch import Prefetch
from stepfold.data.streamed import Streamed
from stepfold.loop.asked import Asked
from stepfold.loop.condition import params_of
from stepfold.loop.evaluate import mesh_of
from stepfold.loop.event import Hook

_PACKAGES = ("stepfold", "jax", "jaxlib", "optax", "orbax-checkpoint", "numpy")


def facts_of(
    state: Any,
    batches: Any,
    asked: Asked,
    checkpoints: Checkpoints | None,
    epochs: int | None,
    time_limit: float | None,
) -> dict[str, Any]:
    """Say what a run is begun with, for JSON to hold; nothing of the state is kept alive."""
    pipeline = _pipeline(batches)
    mesh = mesh_of(state)
    return {
        "program": sys.argv[0] if sys.argv else "",
        "arguments": {
            "steps": asked.steps,
            "epochs": epochs,
            "log_every": asked.log_every,
            "steps_per_call": asked.steps_per_call,
            "time_limit": time_limit,
            "batches": {"kind": type(batches).__name__, **pipeline},
            "evaluations": [
                _plain(one, "name", "every", "every_epochs") for one in asked.evaluations
            ],
            "checkpoints": None if checkpoints is None else _described(checkpoints),
            "hooks": [_name(hook) for hook in asked.hooks],
        },
        "versions": versions(),
        "devices": {
            "kind": jax.devices()[0].device_kind,
            "count": jax.device_count(),
            "platform": jax.default_backend(),
            "processes": jax.process_count(),
        },
        "mesh": None if mesh is None else dict(mesh.shape),
        "seed": {"batches": pipeline.get("seed"), "key": _words(getattr(state, "key", None))},
        "parameters": _parameters(params_of(state, state)),
    }


def _pipeline(batches: Any) -> dict[str, Any]:
    """Say how stepfold's own batches are made; others' may be costly to ask."""
    if not isinstance(batches, Batches | Streamed | Prefetch) or not hasattr(batches, "get_state"):
        return {}
    said = batches.get_state()
    found = said.get("pipeline") if isinstance(said, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else {}


def _name(hook: Hook) -> str:
    """Name a hook by what made it."""
    name: str = getattr(hook, "__qualname__", type(hook).__qualname__)
    return name.partition(".<locals>")[0]


def _plain(value: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _described(checkpoints: Checkpoints) -> dict[str, Any]:
    names = [one.name for one in fields(checkpoints) if one.init]
    found = {name.rstrip("_"): getattr(checkpoints, name) for name in names}
    directory = checkpoints.directory
    return {**found, "directory": directory and str(Path(directory).absolute())}


def versions() -> dict[str, str]:
    """Tell the versions of Python and of what stepfold stands on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # run from its sources
            found[package] = "not installed"
    return found


def _words(key: Any) -> Any:
    """Give the words of a random key, where this process has them."""
    if not isinstance(key, jax.Array) or not key.is_fully_replicated:
        return None
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    return np.asarray(key).tolist()


def _parameters(params: Any) -> dict[str, Any]:
    leaves = [(name, leaf) for name, leaf in tree.named_leaves(params) if tree.is_array(leaf)]
    rows = [[name, list(one.shape), one.dtype.name, math.prod(one.shape)] for name, one in leaves]
    return {
        "count": sum(row[-1] for row in rows),
        "bytes": sum(int(getattr(leaf, "nbytes", 0)) for _, leaf in leaves),
        "leaves": rows,
    }
