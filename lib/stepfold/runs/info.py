"""`run.json`: the configuration of a run, the machine it runs on, and how each attempt ended."""

import json
import math
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stepfold import tree
from stepfold.checkpoint.checkpoints import Checkpoints
from stepfold.checkpoint.leaves import is_key, to_json
from stepfold.core.state import params_of
from stepfold.data.prefetch import ReadAhead
from stepfold.data.stream import BatchIterator
from stepfold.errors import DataError, refuse, warn
from stepfold.json_files import has_form, is_count, read_json
from stepfold.loop.evaluate import Evaluation, mesh_of
from stepfold.writers.base import replace_file
from stepfold.writers.jsonl import has_rows, last_step

NAME = "run.json"
FORMAT = 2  # in format 1, of stepfold 0.1, an attempt has `stopped` and `error` instead of `stop`
_FILES = (NAME, "metrics.jsonl", "metrics.csv", "metrics.csv.jsonl", "report.html", "capsules")
_PACKAGES = ("stepfold", "jax", "jaxlib", "optax", "orbax-checkpoint", "numpy")
_ADVICE = "move it away, and the rest of the run is shown without it"


def run_metadata(
    state: Any,
    batches: Any,
    arguments: Mapping[str, Any],
    evaluations: Sequence[Evaluation] = (),
    checkpoints: Checkpoints | None = None,
    config: Mapping[str, Any] | None = None,
    hooks: Sequence[str] = (),
    upload: str | None = None,
) -> dict[str, Any]:
    """Describe a run as JSON: its config, arguments, versions, devices, seeds and parameters.

    The environment and the command line are left out, since they may hold secrets. The result holds
    no reference to the state.
    """
    # Only of stepfold's own batches, since `get_state` of others may be expensive.
    is_own = isinstance(batches, BatchIterator | ReadAhead) and hasattr(batches, "get_state")
    position = batches.get_state() if is_own else None
    pipeline = (position.get("pipeline") if isinstance(position, Mapping) else None) or {}
    if skipped := getattr(batches, "skipped", None):
        pipeline = {**pipeline, "skipped": skipped}
    mesh = mesh_of(state)
    params = tree.named_leaves(params_of(state, state))
    leaves = {name: leaf for name, leaf in params if tree.is_array(leaf)}
    return {
        "program": sys.argv[0] if sys.argv else "",
        "config": config,
        "arguments": {
            **arguments,
            "upload": upload,
            "batches": {"kind": type(batches).__name__, **pipeline},
            "evaluations": [_describe(evaluation) for evaluation in evaluations],
            "checkpoints": None if checkpoints is None else _settings(checkpoints),
            "hooks": [name.partition(".<locals>")[0] for name in hooks],
        },
        "versions": versions(),
        "devices": {
            "kind": jax.devices()[0].device_kind,
            "count": jax.device_count(),
            "platform": jax.default_backend(),
            "processes": jax.process_count(),
        },
        "mesh": None if mesh is None else dict(mesh.shape),
        "seed": {
            "batches": pipeline.get("seed"),
            "key": read_key(state),
        },
        "parameters": {
            "count": sum(math.prod(leaf.shape) for leaf in leaves.values()),
            "bytes": sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values()),
            "leaves": [
                [name, [*leaf.shape], leaf.dtype.name, math.prod(leaf.shape)]
                for name, leaf in leaves.items()
            ],
        },
    }


def read_key(state: Any) -> list[int] | None:
    """Return the numbers of the key of a state, if each process has it."""
    key: Any = getattr(state, "key", None)
    if not isinstance(key, jax.Array) or not key.is_fully_replicated:
        return None
    numbers: list[int] = np.asarray(jax.random.key_data(key) if is_key(key) else key).tolist()
    return numbers


def read_config(config: Any) -> dict[str, Any] | None:
    """Convert a mapping or a dataclass to JSON, or raise with the path of what JSON cannot hold."""
    if config is None:
        return None
    plain = to_json(_plain(config), "config")
    if not isinstance(plain, dict):
        got = tree.describe_value(config)
        refuse("config", "a mapping or a dataclass", got, "give {'rate': 1e-3, …}")
    names = [name for name, _ in _named_values(plain)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        refuse("config", "a path for each value", f"{twice!r} for two", "rename a key")
    return plain


def _plain(node: Any) -> Any:
    """Convert dataclasses to dicts, and NaN and inf, which JSON lacks, to text."""
    if is_dataclass(node) and not isinstance(node, type):
        return {each.name: _plain(getattr(node, each.name)) for each in fields(node)}
    if isinstance(node, Mapping):
        return {name: _plain(value) for name, value in node.items()}
    if isinstance(node, list | tuple):
        return [_plain(value) for value in node]
    return str(node) if isinstance(node, float) and not math.isfinite(node) else node


def flatten_config(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Name the values of a config by their paths, such as `optimizer/rate`; lists are values."""
    return dict(_named_values(config or {}))


def _named_values(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    is_value = lambda node: node is None or isinstance(node, list) or node == {}
    leaves = jax.tree_util.tree_leaves_with_path({**config}, is_leaf=is_value) if config else []
    return [(tree.path_name(path), value) for path, value in leaves]


def flatten_settings(info: Mapping[str, Any]) -> dict[str, Any]:
    """Name what decides the steps of a run besides its config, such as `versions/jax`."""
    sections = ("arguments", "versions", "devices", "mesh", "seed", "parameters")
    return flatten_config({name: info[name] for name in sections if info.get(name) is not None})


def config_changes(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> dict[str, list[Any]]:
    """Return the old and new values that differ, by path; None where a value is missing."""
    return changes_of(flatten_config(before), flatten_config(after))


def changes_of(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the old and new values that differ, by name; None where a value is missing."""
    return {
        name: [old.get(name), new.get(name)]
        for name in {**old, **new}
        if (name in old, old.get(name)) != (name in new, new.get(name))
    }


def _settings(checkpoints: Checkpoints) -> dict[str, Any]:
    names = [field.name for field in fields(checkpoints) if field.init]
    settings = {name.rstrip("_"): getattr(checkpoints, name) for name in names}
    if (temporary := checkpoints.temporary) is not None:
        settings["temporary"] = {**vars(temporary), "directory": str(temporary.directory)}
    if directory := checkpoints.directory:
        settings["directory"] = str(directory)
    return settings


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what a run computes."""
    numbers = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            numbers[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # imported from a source tree
            numbers[package] = "not installed"
    return numbers


def read_run_info(run_dir: Path) -> dict[str, Any]:
    """Read `run.json` and convert format 1; empty if there is no file."""
    path = run_dir / NAME
    try:
        info = read_json(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        refuse(path, "JSON", f"a damaged file: {error}", _ADVICE, kind=DataError)
    number = info.get("format") if isinstance(info, dict) else None
    if type(number) is int and number > FORMAT:
        expected, got = f"format {FORMAT} or earlier", f"{number}, of a later stepfold"
        advice = f"upgrade with pip install -U stepfold, or {_ADVICE}"
        refuse(path, expected, got, advice, kind=DataError)
    if not has_form(info, _FORM):
        refuse(path, "a run.json that fit wrote", "other JSON", _ADVICE, kind=DataError)
    for attempt in info["attempts"] if number == 1 else ():
        # Format 1 says only in prose why an attempt stopped.
        stopped, raised = attempt.pop("stopped", None), attempt.pop("error", None)
        stop = None if stopped is None else {"kind": "unknown", "message": stopped}
        if raised is not None:
            message = f"{raised['type']}: {raised['message']}".removesuffix(": ")
            stop = {"kind": "error", "message": message}
        attempt["stop"] = stop
    return {**info, "format": FORMAT}


def _is_time(value: Any) -> bool:
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


_is_number = lambda value: type(value) in (int, float) and abs(value) < 1e300
_is_unix_time = lambda value: type(value) in (int, float) and 0 <= value < 1e11
_is_mode = lambda value: value in ("min", "max")
_are_changes = lambda value: (
    isinstance(value, dict)
    and all(isinstance(pair, list) and len(pair) == 2 for pair in value.values())
)
# The entries that the report reads; others may hold anything.
_ATTEMPT = {
    **dict.fromkeys(("began", "updated?", "ended?"), _is_time),
    **dict.fromkeys(("from", "to", "total?"), is_count),
    "stop?": {"kind": str, "message": str},
    "stopped?": str,
    "error?": {"type": str, "message": str},  # of format 1
    "pause?": _is_number,
    "clock?": [(_is_number, _is_number, _is_number)],
    "parts?": [(str, _is_number)],
    "saves?": is_count,
    "config_changes?": _are_changes,
    "changes?": _are_changes,
    "compiled?": {
        **{name: {"count": is_count, "seconds": _is_number} for name in ("loaded", "new")},
        "steps": [{}],
        "reasons": [str],
    },
}
_LOSS = {
    **dict.fromkeys(("lost", "source"), str),
    **dict.fromkeys(("at", "from"), is_count),
    "processes": [is_count],
    "seconds": _is_number,
    "time": _is_unix_time,
}
_LEAF = (str, [is_count], str, is_count)
_FORM = {
    "format": lambda value: type(value) is int and value >= 1,
    "program?": str,
    "config?": {},
    "arguments?": {
        "evaluations?": [{"name": str}],
        "checkpoints?": {"directory?": str, "best?": str, "mode?": _is_mode},
    },
    "devices?": {},
    "parameters?": {"count": is_count, "bytes": is_count, "leaves?": [_LEAF]},
    "attempts": [_ATTEMPT],
    "losses?": [_LOSS],
}


def _describe(evaluation: Evaluation) -> dict[str, Any]:
    """Return the schedule of an evaluation, and the options that it has."""
    described = {name: getattr(evaluation, name) for name in ("name", "every", "every_epochs")}
    options = ("at_start", "ema", "remote")
    return described | {name: True for name in options if getattr(evaluation, name)}


def write_run_info(run_dir: Path, info: Mapping[str, Any]) -> None:
    """Write `run.json` atomically, with a line for each entry."""
    entries = {**info, "format": FORMAT}.items()
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in entries]
    replace_file(run_dir / NAME, ("{\n " + ",\n ".join(lines) + "\n}\n").encode())


def move_previous_run(directory: Path | None, step: int, files: Iterable[Path] = ()) -> None:
    """Move the files of an earlier run aside if they have metrics of steps after `step`.

    Call it before a run that is not resumed writes to them: those of its directory, and `files` of
    writers.
    """
    by_folder = {} if directory is None else {directory: dict.fromkeys(_FILES)}
    for file in files:
        by_folder.setdefault(file.parent, {})[file.name] = None
    for folder, names in by_folder.items():
        steps = [last_step(folder / name) for name in names if has_rows(folder / name)]
        last = max((number for number in steps if number is not None), default=step)
        if last <= step:
            continue
        number = 1
        while (aside := folder / f"previous-{number}").exists():
            number += 1
        aside.mkdir()
        for name in names:
            if (folder / name).exists():
                os.rename(folder / name, aside / name)
        argument = "run_dir" if folder == directory else "log_to"
        warn(
            f"{argument}: this run starts at step {step}, but an earlier run has metrics up to "
            f"step {last}; its files are now in {aside}. To resume a run, keep its checkpoints",
        )
