"""Files of the trainer: checkpoints with arguments, safetensors for torch, and the model card."""

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from stepfold import tree
from stepfold.adapter.arguments import TrainingArguments
from stepfold.adapter.parts import RunParts
from stepfold.checkpoint.names import NameMap
from stepfold.checkpoint.restore import restore
from stepfold.checkpoint.safetensors import export_params
from stepfold.checkpoint.steps import read_directory
from stepfold.checkpoint.store import open_store
from stepfold.core.validation import absolute_path
from stepfold.errors import CheckpointError, ConfigError, TreeMismatchError, refuse
from stepfold.inspect.report import parameter_table
from stepfold.runs.info import versions
from stepfold.tree import describe_value


def path_and_state(*values: Any, default: Path | None = None) -> tuple[Path, Any]:
    """Return the path and the state among values in any order; None is left out."""
    paths = [value for value in values if isinstance(value, str | os.PathLike)]
    states = [value for value in values if not isinstance(value, str | os.PathLike | None)]
    if not paths and default is not None:
        paths = [default]
    if len(paths) != 1 or len(states) > 1:
        got = f"{len(paths)} and {len(states)}"
        advice = "write save_pretrained(path), or (state, save_directory=path)"
        refuse("save_pretrained", "one path and at most one state", got, advice)
    return absolute_path("save_directory", paths[0]), next(iter(states), None)


def holds_state(directory: Path, state: Any, step: int) -> bool:
    """Whether a directory has a checkpoint of this step with the values of this state."""
    if not open_store(directory).has_step(step):
        return False
    try:
        saved = restore(directory, state, step=step, fall_back=False).state
    except (CheckpointError, TreeMismatchError):
        return False

    def is_same(old: Any, new: Any) -> Any:
        if jnp.issubdtype(new.dtype, jax.dtypes.prng_key):
            old, new = jax.random.key_data(old), jax.random.key_data(new)
        is_float = jnp.issubdtype(new.dtype, jnp.inexact)
        return jnp.array_equal(old, new, equal_nan=bool(is_float))

    return all(map(bool, jax.tree.leaves(jax.tree.map(is_same, saved, state))))


# Files next to checkpoints and weights


def write_arguments(directory: str | Path, arguments: TrainingArguments) -> None:
    """Write `arguments.json`; if one has no JSON, such as a schedule, write that error instead."""
    try:
        text = arguments.to_json()
    except ConfigError as error:
        text = json.dumps({"arguments": str(error)})
    _write(directory, "arguments.json", text)


def check_metadata(config: Any, metadata: Any) -> dict[str, Any]:
    """Return objects to write by name, among them the configuration of the model."""
    if not isinstance(metadata, Mapping | None):
        refuse("metadata", "objects by name", describe_value(metadata), "{'tokenizer': tokenizer}")
    checked = {} if config is None else {"config": config}
    for name, value in {**checked, **(metadata or {})}.items():
        if not re.fullmatch(r"\w[\w.-]*", str(name)) or name == "arguments":
            refuse("metadata", "names of files without a suffix", repr(name))
        if name in (metadata or {}) and _as_json(value) is None and not _saves_itself(value):
            expected = "an object with save_pretrained, or a value that JSON holds"
            refuse(f"metadata[{name!r}]", expected, describe_value(value))
        checked[name] = value
    return checked


def _saves_itself(value: Any) -> bool:
    return callable(getattr(value, "save_pretrained", None)) and not isinstance(value, type)


def _as_json(value: Any) -> str | None:
    to_dict = getattr(value, "to_dict", None)
    if callable(to_dict) and not isinstance(value, type):
        value = to_dict()
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    try:
        return json.dumps(value, indent=2, ensure_ascii=False)
    except (TypeError, ValueError):
        return None


def write_metadata(directory: str | Path, metadata: Mapping[str, Any]) -> None:
    """Write each object by its `save_pretrained` to the folder, or as JSON to a file of its name.

    A configuration that neither can write is left out, since it may be any object.
    """
    for name, value in metadata.items():
        if not _saves_itself(value):
            if (text := _as_json(value)) is not None:
                _write(directory, f"{name}.json", text + "\n")
        elif jax.process_index() == 0:
            value.save_pretrained(os.fspath(read_directory(Path(directory), make=True)))


def _write(directory: str | Path, name: str, text: str) -> None:
    """Write a file on the first process, in one piece: a resume may be killed while it does."""
    if jax.process_index() == 0:
        folder = read_directory(Path(directory), make=True)
        new = folder / f"{name}.new"
        new.write_text(text, encoding="utf-8")
        new.replace(folder / name)


def save_for_torch(
    directory: str | Path,
    params: Any,
    *,
    names: NameMap | Callable[[str], str] | Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write parameters as safetensors, with the names and the layout of torch.

    By default `layers/0/kernel` becomes `layers.0.weight`, as do `scale` and `embedding`; `names`
    overrides some or, as a function of the path, all names. Dense kernels are transposed, and
    kernels of 2D and 3D convolutions change from (…, in, out) to (out, in, …). A kernel of three
    axes is unchanged, because it may be that of attention or of a convolution. A `NameMap` decides
    names and layouts alone.
    """
    if isinstance(names, NameMap):
        export_params(directory, params, names=names, metadata=metadata)
        return
    if not callable(names):
        names = _torch_names(params, {} if names is None else names)
    layout = jax.tree_util.tree_map_with_path(_torch_layout, params)
    export_params(directory, layout, names=names, metadata=metadata)


def _torch_names(params: Any, names: Mapping[str, str]) -> Callable[[str], str]:
    if not isinstance(names, Mapping):
        advice = "write {'head/kernel': 'lm_head.weight'}"
        refuse("names", "a function of a path, or names by path", describe_value(names), advice)
    paths = [path for path, _ in tree.named_leaves(params)]
    if missing := [path for path in names if path not in paths]:
        expected = f"paths of parameters, such as {', '.join(paths[:8])}"
        refuse("names", expected, ", ".join(missing), "correct or remove them")

    def torch_name(path: str) -> str:
        *parents, last = path.split("/")
        last = "weight" if last in ("kernel", "scale", "embedding") else last
        return names.get(path) or ".".join([*parents, last])

    return torch_name


def _torch_layout(path: tuple[Any, ...], leaf: Any) -> Any:
    if tree.path_name(path).rsplit("/", 1)[-1] != "kernel" or jnp.ndim(leaf) not in (2, 4, 5):
        return leaf
    return jnp.moveaxis(leaf, (-1, -2), (0, 1))


def write_card(path: str | os.PathLike[str], text: str) -> None:
    """Write a card to a file, or to `README.md` in a folder."""
    path = absolute_path("path", path)
    if path.is_dir() or not path.suffix:
        path = path / "README.md"
    read_directory(path.parent, make=True)
    path.write_text(text, encoding="utf-8")


def make_card(
    parts: RunParts,
    history: Mapping[str, Sequence[float]],
    notes: Mapping[str, Any],
    stopped: object = None,
) -> str:
    """Format the card of a run as markdown, without arguments that are None and empty sections."""
    arguments, mesh = parts.arguments, parts.mesh
    params = getattr(parts.state_shape, "params", parts.state_shape)
    devices = {
        "devices": mesh.size,
        "kind": mesh.devices.flat[0].device_kind,
        "processes": jax.process_count(),
        "mesh": dict(mesh.shape),
    }
    sections = {
        "Notes": _pairs(notes),
        "Results": _results(history),
        "Arguments": _pairs({k: v for k, v in arguments.to_dict().items() if v is not None}),
        "Parameters": f"```\n{parameter_table(params)}\n```",
        "Devices": _pairs(devices),
        "Versions": _pairs(versions()),
    }
    ended = [] if stopped is None else [f"The run ended: {stopped}."]
    body = [f"## {name}\n\n{section}" for name, section in sections.items() if section]
    return "\n\n".join([f"# {arguments.model_name}", *ended, *body]) + "\n"


def _pairs(values: Mapping[str, Any]) -> str:
    return _table(["name", "value"], [[name, f"`{value!r}`"] for name, value in values.items()])


def _results(history: Mapping[str, Sequence[float]]) -> str:
    rows = []
    for name, values in sorted(history.items()):
        if finite := list(filter(math.isfinite, values)):
            numbers = (values[0], values[-1], min(finite), max(finite))
            rows.append([name, len(values), *(f"{x:.5g}" for x in numbers), sparkline(values)])
    return _table(["metric", "values", "first", "last", "least", "greatest", "curve"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def line(cells: Sequence[Any]) -> str:
        escaped = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells]
        return f"| {' | '.join(escaped)} |"

    return "\n".join(map(line, [head, ["---"] * len(head), *rows])) if rows else ""


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """Draw values as a line of at most `width` blocks; a NaN or inf is a gap."""
    if len(values) > width:
        values = [values[i * (len(values) - 1) // (width - 1)] for i in range(width)]
    finite = list(filter(math.isfinite, values))
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = 7 / ((high - low) or 1.0)
    return "".join(
        "▁▂▃▄▅▆▇█"[round((x - low) * scale)] if math.isfinite(x) else " " for x in values
    )
