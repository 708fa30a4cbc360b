"""Files of a trainer: checkpoints with arguments, safetensors for torch, and the card of a run."""

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
    """Return the path and the state among the arguments of `save_pretrained`, in either order.

    Raises:
      ConfigError: if there is no path, or more than one.

    >>> path_and_state("runs/a", None, None), path_and_state(None, "runs/a", None)
    ((PosixPath('runs/a'), None), (PosixPath('runs/a'), None))
    """
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
    """Save a state as a checkpoint, and the arguments as `arguments.json` next to it.

    Where an argument has no JSON, such as a schedule of your own, the file says which one.

    Args:
      directory: the directory of the steps.
      state: the state.
      arguments: the arguments of the run.
      data: the position in the data.
      metrics: numbers by name.

    Returns:
      The folder of the step.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> path = save_state(folder, {"w": jnp.ones(2)}, arguments=TrainingArguments())
    >>> path.name, sorted(entry.name for entry in path.parent.iterdir())
    ('0', ['0', 'arguments.json'])
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
    """Return the directory of the steps at a path, and the step if the path is that of one.

    Args:
      path: the folder of a run, of its checkpoints, or of one step.
      folder: the name of the checkpoints' folder in a run's folder.

    Raises:
      CheckpointError: if there is no checkpoint.

    >>> find_checkpoint("runs/nowhere")
    Traceback (most recent call last):
    ...
    stepfold.errors.CheckpointError: runs/nowhere: expected a checkpoint, ...
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

    By default `layers/0/kernel` is named `layers.0.weight`, and so are `scale` and `embedding`.
    Kernels of dense layers are transposed, and those of convolutions over two or three dimensions
    change from (…, in, out) to (out, in, …). A kernel of three axes stays as it is, because it may
    belong to an attention or to a convolution.

    Args:
      directory: the directory of the files.
      params: the parameters.
      names: names in torch by path, for some of the parameters; or a function of the path.
      metadata: text for the header of each file.

    Raises:
      ConfigError: if `names` has a path that is not in `params`.

    >>> import safetensors.numpy, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> save_for_torch(folder, {"dense": {"kernel": jnp.ones((3, 2))}})
    >>> safetensors.numpy.load_file(folder + "/model.safetensors")["dense.weight"].shape
    (2, 3)
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
    """Write a card to a file, or to `README.md` in a folder.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> write_card(folder, "# digits")
    >>> (Path(folder) / "README.md").read_text()
    '# digits'
    """
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
    r"""Write a card of a run as markdown.

    Args:
      title: the name of the model.
      arguments: the arguments of the run by name; those that are None are left out.
      params: the parameters, or abstract ones.
      mesh: the mesh; None lists all devices.
      history: the values of each metric.
      stop_reason: why the run ended.
      notes: more values by name.

    >>> text = make_card("digits", arguments={"learning_rate": 0.1}, params={"w": jnp.ones(3)},
    ...                  history={"train/loss": [2.0, 1.0, 0.5]})
    >>> print("\n".join(line for line in text.splitlines() if "loss" in line))
    | train/loss | 3 | 2 | 0.5 | 0.5 | 2 | █▃▁ |
    """
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
