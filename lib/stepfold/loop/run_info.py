"""`run.json`: the configuration of a run, the machine it runs on, and how each attempt ended."""

import json
import math
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.checkpoint.checkpoints import Checkpoints
from stepfold.core.state import params_of
from stepfold.data.indexed import Batches
from stepfold.data.prefetch import Prefetch
from stepfold.data.streamed import Streamed
from stepfold.errors import DataError
from stepfold.loop.evaluate import Evaluation, mesh_of
from stepfold.loop.hooks.base import Hook, hook_name

NAME = "run.json"
FORMAT = 2  # in format 1, of stepfold 0.1, an attempt has `stopped` and `error` instead of `stop`
_PACKAGES = ("stepfold", "jax", "jaxlib", "optax", "orbax-checkpoint", "numpy")
_ADVICE = "move it away, and the rest of the run is shown without it"


def run_metadata(
    state: Any,
    batches: Any,
    *,
    arguments: Mapping[str, Any],
    evaluations: Sequence[Evaluation],
    checkpoints: Checkpoints | None,
    hooks: Sequence[Hook],
) -> dict[str, Any]:
    """Describe a run as JSON: its arguments, versions, devices, seeds and parameters.

    The environment and the command line are left out, since they may hold secrets. The result holds
    no reference to the state.
    """
    pipeline = _describe_batches(batches)
    mesh = mesh_of(state)
    return {
        "program": sys.argv[0] if sys.argv else "",
        "arguments": {
            **arguments,
            "batches": {"kind": type(batches).__name__, **pipeline},
            "evaluations": [
                {name: getattr(evaluation, name) for name in ("name", "every", "every_epochs")}
                for evaluation in evaluations
            ],
            "checkpoints": None if checkpoints is None else _describe_checkpoints(checkpoints),
            "hooks": [hook_name(hook).partition(".<locals>")[0] for hook in hooks],
        },
        "versions": versions(),
        "devices": {
            "kind": jax.devices()[0].device_kind,
            "count": jax.device_count(),
            "platform": jax.default_backend(),
            "processes": jax.process_count(),
        },
        "mesh": None if mesh is None else dict(mesh.shape),
        "seed": {"batches": pipeline.get("seed"), "key": _key_data(getattr(state, "key", None))},
        "parameters": _describe_parameters(params_of(state, state)),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what a run computes."""
    numbers = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            numbers[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # imported from a source tree
            numbers[package] = "not installed"
    return numbers


def _describe_batches(batches: Any) -> dict[str, Any]:
    """Return the settings of stepfold's own batches; `get_state` of others may be expensive."""
    if not isinstance(batches, Batches | Streamed | Prefetch) or not hasattr(batches, "get_state"):
        return {}
    position = batches.get_state()
    pipeline = position.get("pipeline") if isinstance(position, Mapping) else None
    return dict(pipeline) if isinstance(pipeline, Mapping) else {}


def _describe_checkpoints(checkpoints: Checkpoints) -> dict[str, Any]:
    names = [field.name for field in fields(checkpoints) if field.init]
    directory = checkpoints.directory
    return {
        **{name.rstrip("_"): getattr(checkpoints, name) for name in names},
        "directory": directory and str(Path(directory).absolute()),
    }


def _key_data(key: Any) -> Any:
    """Return the words of a random key, if this process has them."""
    if not isinstance(key, jax.Array) or not key.is_fully_replicated:
        return None
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(key) if is_typed else key).tolist()


def _describe_parameters(params: Any) -> dict[str, Any]:
    leaves = [(name, leaf) for name, leaf in tree.named_leaves(params) if tree.is_array(leaf)]
    rows = [[name, [*leaf.shape], leaf.dtype.name, math.prod(leaf.shape)] for name, leaf in leaves]
    return {
        "count": sum(row[-1] for row in rows),
        "bytes": sum(int(getattr(leaf, "nbytes", 0)) for _, leaf in leaves),
        "leaves": rows,
    }


def read_run_info(run_dir: Path) -> dict[str, Any]:
    """Read `run.json`; empty if there is none. Format 1 is converted.

    Raises:
      DataError: if it is damaged, edited to something else, or of a later stepfold.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_run_info(folder, {"attempts": []})
    >>> read_run_info(folder)
    {'attempts': [], 'format': 2}
    """
    path = run_dir / NAME
    try:
        info = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DataError(f"{path}: expected JSON, got a damaged file: {error}; {_ADVICE}") from None
    number = info.get("format") if isinstance(info, dict) else None
    if type(number) is not int or number < 1:
        raise DataError(f"{path}: expected a run.json that fit wrote, got other JSON; {_ADVICE}")
    if number > FORMAT:
        raise DataError(
            f"{path}: expected format {FORMAT} or earlier, got {number}, of a later stepfold; "
            f"upgrade with pip install -U stepfold, or {_ADVICE}"
        )
    _check(info, _FORM, path)
    if number == 1:
        info["attempts"] = [_upgrade(attempt) for attempt in info["attempts"]]
    return {**info, "format": FORMAT}


def write_run_info(run_dir: Path, info: Mapping[str, Any]) -> None:
    """Write `run.json` atomically, with a line for each entry."""
    entries = {**info, "format": FORMAT}.items()
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in entries]
    replace_file(run_dir / NAME, "{\n " + ",\n ".join(lines) + "\n}\n")


def replace_file(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old content or the new.

    Raises:
      OSError: if it cannot be written; the file is as it was before.
    """
    new = path.with_name(path.name + ".new")
    try:
        # The name of a run's directory need not be UTF-8, and the page shows it.
        new.write_text(text, encoding="utf-8", errors="replace")
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


class _Kind(NamedTuple):
    """A kind of value: its description, and a test for it."""

    description: str
    test: Callable[[Any], bool]


def _is_time(value: Any) -> bool:
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


_TEXT = _Kind("a string", lambda value: isinstance(value, str))
_COUNT = _Kind("an integer of at least 0", lambda value: type(value) is int and 0 <= value < 2**63)
_NUMBER = _Kind("a number", lambda value: type(value) in (int, float) and abs(value) < 1e300)
_TIME = _Kind("a time, as 2026-01-31T12:00:00+00:00", _is_time)
_MODE = _Kind("'min' or 'max'", lambda value: value in ("min", "max"))
# The entries that the report reads. One with `?` may be missing or null; other entries may hold
# anything. `[form]` is a list of any length, and a tuple a list of exactly these.
_FORM: Mapping[str, Any] = {
    "program?": _TEXT,
    "arguments?": {
        "evaluations?": [{"name": _TEXT}],
        "checkpoints?": {"directory?": _TEXT, "best?": _TEXT, "mode?": _MODE},
    },
    "devices?": {},
    "parameters?": {
        "count": _COUNT,
        "bytes": _COUNT,
        "leaves?": [(_TEXT, [_COUNT], _TEXT, _COUNT)],
    },
    "attempts": [
        {
            "began": _TIME,
            "from": _COUNT,
            "to": _COUNT,
            "total?": _COUNT,
            "updated?": _TIME,
            "ended?": _TIME,
            "stop?": {"kind": _TEXT, "message": _TEXT},
            "stopped?": _TEXT,
            "error?": {"type": _TEXT, "message": _TEXT},
            "pause?": _NUMBER,
            "clock?": [(_NUMBER, _NUMBER, _NUMBER)],
        }
    ],
}


def _check(value: Any, form: Any, path: Path, *keys: object) -> None:
    """Raise a DataError that names the entry of `run.json` that does not have its form."""
    if isinstance(form, _Kind):
        valid, expected = form.test(value), form.description
    elif isinstance(form, Mapping):
        valid, expected = isinstance(value, dict), "an object"
    elif isinstance(form, tuple):
        valid = isinstance(value, list) and len(value) == len(form)
        expected = f"a list of {len(form)}"
    else:
        valid, expected = isinstance(value, list), "a list"
    if not valid:
        raise DataError(
            f"{path}: {'/'.join(map(str, keys))}: expected {expected}, got {tree.spell(value)}; "
            f"correct it, or {_ADVICE}"
        )
    if isinstance(form, Mapping):
        for key, inner in form.items():
            name = key.removesuffix("?")
            if name == key or value.get(name) is not None:
                _check(value.get(name), inner, path, *keys, name)
    elif not isinstance(form, _Kind):
        for index, inner in enumerate(form if isinstance(form, tuple) else form * len(value)):
            _check(value[index], inner, path, *keys, index)


def _upgrade(attempt: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an attempt of format 1, which says only in prose why it stopped."""
    upgraded = {name: v for name, v in attempt.items() if name not in ("stopped", "error")}
    error, stopped, stop = attempt.get("error"), attempt.get("stopped"), None
    if error is not None:
        message = f"{error['type']}: {error['message']}" if error["message"] else error["type"]
        stop = {"kind": "error", "message": message}
    elif stopped is not None:
        stop = {"kind": "unknown", "message": stopped}
    return {**upgraded, "stop": stop}
