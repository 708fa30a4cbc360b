"""What `save_pretrained` writes, and where a checkpoint is found again."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from stepfold import tree
from stepfold.adapter.arguments import readers
from stepfold.adapter.arguments.names import refuse_unknown
from stepfold.adapter.for_torch import Names, check_names, torch_layout, torch_names
from stepfold.adapter.positions import position_of
from stepfold.checkpoint.export import export_params
from stepfold.checkpoint.save import save
from stepfold.checkpoint.steps import read_directory, steps_in
from stepfold.errors import CheckpointError, ConfigError

ARGUMENTS = "arguments.json"


def path_and_state(state: Any, save_directory: Any, ckpt_path: Any) -> tuple[Path, Any]:
    """Tell the path from the state, in whichever order they were given.

    Raises:
      ConfigError: if there is no path, or more than one.

    >>> path_and_state("runs/a", None, None), path_and_state(None, "runs/a", None)
    ((PosixPath('runs/a'), None), (PosixPath('runs/a'), None))
    """
    given = (state, save_directory, ckpt_path)
    paths = [what for what in given if isinstance(what, str | os.PathLike)]
    states = [
        what for what in given if what is not None and not isinstance(what, str | os.PathLike)
    ]
    if len(paths) != 1 or len(states) > 1:
        raise ConfigError(
            f"save_pretrained: expected one path and at most one state, got {len(paths)} and "
            f"{len(states)}; write save_pretrained(path), or (state, save_directory=path)"
        )
    return Path(paths[0]), next(iter(states), None)


def refuse_gathering(gather_fns: Any) -> None:
    """Refuse functions that gather.

    Raises:
      ConfigError: if there are any.
    """
    if gather_fns is not None:
        raise ConfigError(
            "gather_fns: expected None, since arrays are saved from where they are, and restored "
            f"to where they are wanted, got {tree.spell(gather_fns)}"
        )


def torch_options(given: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """Read the one option that there is.

    Raises:
      ConfigError: if there is another one.
    """
    refuse_unknown("save_pretrained", given or {}, [name])
    return dict(given or {})


def save_run(trainer: Any, path: Path, state: Any) -> Path:
    """Save a trainer's state, the position in its data, and its arguments."""
    step = int(getattr(state, "step", 0))
    try:
        arguments = trainer.arguments.to_json()
    except ConfigError as error:  # a schedule of one's own, say, which is code
        arguments = json.dumps({"arguments": str(error)})
    found = {name: curve[-1] for name, curve in trainer.history.items() if len(curve)}
    data = None if trainer.dataloader_train is None else position_of(trainer.dataloader_train, step)
    return save_whole(path, state, arguments=arguments, data=data, metrics=found)


def write_card(path: str | os.PathLike[str], text: str) -> None:
    """Write a card to a file, or as `README.md` into a folder."""
    place = Path(path)
    if place.is_dir() or not place.suffix:
        place = place / "README.md"
    read_directory(place.parent, make=True)
    place.write_text(text, encoding="utf-8")


def save_whole(
    directory: str | Path,
    state: Any,
    *,
    arguments: str | None,
    data: Any = None,
    metrics: Mapping[str, Any] | None = None,
) -> Path:
    """Save a state as a checkpoint, and the arguments beside it, for people and programs.

    Args:
      directory: where it goes; in a folder named by the step.
      state: the state.
      arguments: the arguments as JSON, or None if that cannot hold them.
      data: the position in the data.
      metrics: numbers by name.

    Returns:
      The folder of the step.

    >>> import jax.numpy as jnp, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> state = {"w": jnp.ones(2)}
    >>> path = save_whole(folder, state, arguments="{}", metrics={"loss": 0.5})
    >>> sorted(entry.name for entry in Path(folder).iterdir())
    ['0', 'arguments.json']
    """
    place = Path(directory)
    number = int(getattr(state, "step", 0))
    save(place, state, step=number, data=data, metrics=metrics)
    if arguments is not None and jax.process_index() == 0:
        (place / ARGUMENTS).write_text(arguments, encoding="utf-8")
    return place / str(number)


def save_for_torch(
    directory: str | Path,
    params: Any,
    *,
    names: Names = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write parameters as safetensors that torch loads, called and laid out as torch has them.

    >>> import jax.numpy as jnp, safetensors.numpy, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> save_for_torch(folder, {"dense": {"kernel": jnp.ones((3, 2))}})
    >>> safetensors.numpy.load_file(folder + "/model.safetensors")["dense.weight"].shape
    (2, 3)
    """
    check_names(params, names)
    export_params(directory, torch_layout(params), names=torch_names(names), metadata=metadata)


def find_checkpoint(path: str | Path, folder: str = "checkpoints") -> tuple[Path, int | None]:
    """Find the directory of the steps that a path means, and which step, if it says so.

    Args:
      path: a run's folder, the folder of its checkpoints, or a step in there.
      folder: what the checkpoints' folder is called in a run's.

    Raises:
      CheckpointError: if there is no checkpoint.

    >>> find_checkpoint("runs/nowhere")
    Traceback (most recent call last):
    ...
    stepfold.errors.CheckpointError: runs/nowhere: expected a checkpoint, ...
    """
    place = Path(readers.path("checkpoint", path))
    if place.is_dir() and place.name.isdigit() and int(place.name) in _steps(place.parent):
        return place.parent, int(place.name)
    for directory in (place, place / folder):
        if _steps(directory):
            return directory, None
    raise CheckpointError(
        f"{place}: expected a checkpoint, a folder of them, or a run's folder with {folder}/ in it"
    )


def _steps(directory: Path) -> list[int]:
    return steps_in(read_directory(directory)) if directory.is_dir() else []
