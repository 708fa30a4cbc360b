"""Files of the trainer: checkpoints with arguments, safetensors for torch, and the model card."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from stepfold import tree
from stepfold.adapter.loading import position_at
from stepfold.checkpoint.safetensors import export_params
from stepfold.checkpoint.series import save
from stepfold.checkpoint.steps import absolute_path, read_directory
from stepfold.errors import ConfigError, refuse
from stepfold.inspect.report import parameter_table
from stepfold.loop.run_info import versions

if TYPE_CHECKING:
    from stepfold.adapter.trainer import Trainer


def path_and_state(*values: Any) -> tuple[Path, Any]:
    """Return the path and the state among values in any order; None is left out."""
    paths = [value for value in values if isinstance(value, str | os.PathLike)]
    states = [value for value in values if not isinstance(value, str | os.PathLike | None)]
    if len(paths) != 1 or len(states) > 1:
        raise ConfigError(
            f"save_pretrained: expected one path and at most one state, got {len(paths)} and "
            f"{len(states)}; write save_pretrained(path), or (state, save_directory=path)"
        )
    return absolute_path("save_directory", paths[0]), next(iter(states), None)


def save_state(trainer: "Trainer", directory: Path, state: Any) -> Path:
    """Save a state in `directory/<step>`, and the arguments as `arguments.json`; return the former.

    If an argument has no JSON, such as a custom schedule, the file names it instead.
    """
    step = int(getattr(state, "step", 0))
    try:
        text = trainer.arguments.to_json()
    except ConfigError as error:
        text = json.dumps({"arguments": str(error)})
    data = position_at(trainer.dataloader_train, step)
    metrics = {name: curve[-1] for name, curve in trainer.history.items() if len(curve)}
    save(directory, state, step=step, data=data, metrics=metrics)
    if jax.process_index() == 0:
        (directory / "arguments.json").write_text(text, encoding="utf-8")
    return directory / str(step)


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
        expected = "a function of a path, or names by path"
        refuse(
            "names", expected, tree.describe_value(names), "write {'head/kernel': 'lm_head.weight'}"
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
    path = absolute_path("path", path)
    if path.is_dir() or not path.suffix:
        path = path / "README.md"
    read_directory(path.parent, make=True)
    path.write_text(text, encoding="utf-8")


def make_card(trainer: "Trainer") -> str:
    """Format the card of a run as markdown, without arguments that are None and empty sections."""
    arguments, mesh, shape = trainer.arguments, trainer.mesh, trainer.state_shape
    path, loaded, left = trainer.checkpoint_path, trainer.loaded, trainer.left
    devices = {
        "devices": mesh.size,
        "kind": mesh.devices.flat[0].device_kind,
        "processes": jax.process_count(),
        "mesh": dict(mesh.shape),
    }
    sections = {
        "Notes": _pairs({"checkpoint": path, "loaded": loaded, "not loaded": left}),
        "Results": _results(trainer.history),
        "Arguments": _pairs({k: v for k, v in arguments.to_dict().items() if v is not None}),
        "Parameters": f"```\n{parameter_table(getattr(shape, 'params', shape))}\n```",
        "Devices": _pairs(devices),
        "Versions": _pairs(versions()),
    }
    ended = [] if trainer.stopped is None else [f"The run ended: {trainer.stopped}."]
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
