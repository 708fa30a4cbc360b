"""Files of the trainer: checkpoints with arguments, safetensors for torch, and the model card."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from stepfold import tree
from stepfold.adapter.arguments import TrainingArguments
from stepfold.checkpoint.export import export_params
from stepfold.checkpoint.save import save
from stepfold.checkpoint.steps import read_directory, steps_in
from stepfold.errors import CheckpointError, ConfigError
from stepfold.inspect.parameters import parameter_table
from stepfold.loop.hooks.base import Stop
from stepfold.loop.run_info import versions


def path_and_state(state: Any, save_directory: Any, ckpt_path: Any) -> tuple[Path, Any]:
    """Return the path and the state among the arguments of `save_pretrained`, in either order."""
    paths: list[Any] = []
    states: list[Any] = []
    for value in (state, save_directory, ckpt_path):
        if value is not None:
            (paths if isinstance(value, str | os.PathLike) else states).append(value)
    if len(paths) != 1 or len(states) > 1:
        raise ConfigError(
            f"save_pretrained: expected one path and at most one state, got {len(paths)} and "
            f"{len(states)}; write save_pretrained(path), or (state, save_directory=path)"
        )
    return Path(paths[0]), next(iter(states), None)


def save_state(
    directory: str | Path,
    state: Any,
    *,
    arguments: TrainingArguments,
    data: Any = None,
    metrics: Mapping[str, Any] | None = None,
) -> Path:
    """Save a state in `directory/<step>`, and the arguments as `arguments.json`; return the former.

    If an argument has no JSON, such as a custom schedule, the file names it instead.
    """
    directory, step = Path(directory), int(getattr(state, "step", 0))
    try:
        text = arguments.to_json()
    except ConfigError as error:
        text = json.dumps({"arguments": str(error)})
    save(directory, state, step=step, data=data, metrics=metrics)
    if jax.process_index() == 0:
        (directory / "arguments.json").write_text(text, encoding="utf-8")
    return directory / str(step)


def find_checkpoint(path: str | Path, folder: str = "checkpoints") -> tuple[Path, int | None]:
    """Return the directory of the steps, and the step if the path is that of one.

    The path is that of a run, of its checkpoints, or of one step.
    """
    if not isinstance(path, str | os.PathLike) or not str(path).strip():
        raise ConfigError(f"checkpoint: expected a path, got {path!r}; give the folder of a step")
    path = Path(path)
    if path.is_dir() and path.name.isdigit() and int(path.name) in _steps(path.parent):
        return path.parent, int(path.name)
    for directory in (path, path / folder):
        if _steps(directory):
            return directory, None
    raise CheckpointError(
        f"{path}: expected a checkpoint, a folder of them, or a run's folder with {folder}/ in it"
    )


def _steps(directory: Path) -> list[int]:
    return steps_in(read_directory(directory)) if directory.is_dir() else []


def save_for_torch(
    directory: str | Path,
    params: Any,
    *,
    names: Callable[[str], str] | Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write parameters as safetensors, with the names and the layout of torch.

    By default `layers/0/kernel` becomes `layers.0.weight`, as do `scale` and `embedding`; `names`
    overrides some or, as a function of the path, all names. Dense kernels are transposed, and
    kernels of 2D and 3D convolutions change from (…, in, out) to (out, in, …). A kernel of three
    axes is unchanged, because it may belong to attention or to a convolution.
    """
    if not callable(names):
        names = _torch_names(params, {} if names is None else names)
    layout = jax.tree_util.tree_map_with_path(_torch_layout, params)
    export_params(directory, layout, names=names, metadata=metadata)


def _torch_names(params: Any, names: Mapping[str, str]) -> Callable[[str], str]:
    if not isinstance(names, Mapping):
        raise ConfigError(
            f"names: expected a function of a path, or names by path, got {tree.spell(names)}; "
            "write {'head/kernel': 'lm_head.weight'}"
        )
    paths = [path for path, _ in tree.named_leaves(params)]
    if missing := [path for path in names if path not in paths]:
        raise ConfigError(
            f"names: expected paths of parameters, such as {', '.join(paths[:8])}, got "
            f"{', '.join(missing)}; correct or remove them"
        )

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
    path = Path(path)
    if path.is_dir() or not path.suffix:
        path = path / "README.md"
    read_directory(path.parent, make=True)
    path.write_text(text, encoding="utf-8")


def make_card(
    title: str,
    *,
    arguments: Mapping[str, Any],
    params: Any,
    mesh: Mesh | None = None,
    history: Mapping[str, Sequence[float]] | None = None,
    stop_reason: Stop | str | None = None,
    notes: Mapping[str, Any] | None = None,
) -> str:
    """Format the card of a run as markdown, without arguments that are None and empty sections."""
    devices = jax.devices() if mesh is None else list(mesh.devices.flat)
    hardware = {
        "devices": len(devices),
        "kind": devices[0].device_kind,
        "processes": jax.process_count(),
    } | ({} if mesh is None else {"mesh": dict(mesh.shape)})
    sections = {
        "Notes": _pairs(notes or {}),
        "Results": _results(history or {}),
        "Arguments": _pairs({k: v for k, v in arguments.items() if v is not None}),
        "Parameters": f"```\n{parameter_table(params)}\n```",
        "Devices": _pairs(hardware),
        "Versions": _pairs(versions()),
    }
    head = [f"# {title}"] + [f"The run ended: {stop_reason}."] * (stop_reason is not None)
    body = [f"## {name}\n\n{section}" for name, section in sections.items() if section]
    return "\n\n".join(head + body) + "\n"


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
    """Draw values as a line of at most `width` blocks; a NaN or inf is a gap.

    >>> sparkline([0, 1, 2, float("nan"), 3])
    '▁▃▆ █'
    """
    if len(values) > width:
        values = [values[i * (len(values) - 1) // (width - 1)] for i in range(width)]
    finite = list(filter(math.isfinite, values))
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = 7 / ((high - low) or 1.0)
    return "".join(
        "▁▂▃▄▅▆▇█"[round((x - low) * scale)] if math.isfinite(x) else " " for x in values
    )
