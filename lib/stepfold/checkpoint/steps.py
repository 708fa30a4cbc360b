"""The folders of a series: which steps there are, and how one comes to be there no more.

A step is a folder named by its number. Whatever takes one away renames it first, so that no step
is ever offered half: `12.deleted` is on its way out, and `12.damaged` is kept to be looked at.
"""

import re
import shutil
from pathlib import Path
from typing import Any

from stepfold.checkpoint.manifest import read_words
from stepfold.checkpoint.sealed import DamageError
from stepfold.errors import CheckpointError, ConfigError

# What a killed process leaves behind; `orbax-checkpoint-tmp` is what orbax writes a step into.
_LEFT_OVER = re.compile(r"\d+\.(deleted|orbax-checkpoint-tmp)(\W.*)?")


def read_directory(directory: Any, *, make: bool = False) -> Path:
    """Read the path of a series' directory, and make it where asked to.

    Raises:
      ConfigError: if it is no path on a file system.
      CheckpointError: if it is a file, or cannot be made.
    """
    if not isinstance(directory, str | Path) or not str(directory):
        raise ConfigError(f"directory: expected a path, got {directory!r}")
    if "://" in str(directory):
        raise ConfigError(
            f"directory: expected a path on a file system, got {str(directory)!r}; mount the bucket"
        )
    path = Path(directory).absolute()
    try:
        if make:
            path.mkdir(parents=True, exist_ok=True)
        is_file = path.exists() and not path.is_dir()
    except OSError as error:
        raise CheckpointError(
            f"{path}: expected a directory to save in, but it cannot be made: {error.strerror}; "
            "change the permission, or give another"
        ) from error
    if is_file:
        raise CheckpointError(f"{path}: expected a directory, got a file; give another path")
    return path


def path_of(directory: Path, step: int) -> Path:
    """Give the folder of a step."""
    return directory / str(step)


def steps_in(directory: Path) -> list[int]:
    """List the steps that have a folder, in order; it may be that of no good checkpoint."""
    if not directory.is_dir():
        return []
    names = [path.name for path in directory.iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def whole_steps(directory: Path) -> list[int]:
    """List the steps of which every file is there, in order, by name and size."""
    return [step for step in steps_in(directory) if is_whole(path_of(directory, step))]


def is_whole(step: Path) -> bool:
    """Tell whether every file of a step is there, by name and size."""
    try:
        read_words(step)
    except DamageError:
        return False
    except FileNotFoundError:  # deleted by another process meanwhile
        return False
    return True


def delete(directory: Path, step: int) -> None:
    """Delete a step, by another name first."""
    path = path_of(directory, step)
    shutil.rmtree(_rename(path, "deleted"))


def set_aside(directory: Path, step: int) -> Path | None:
    """Rename a damaged step, so that nobody is offered it; give None where that is not allowed."""
    try:
        return _rename(path_of(directory, step), "damaged")
    except OSError:
        return None


def is_aside(path: Path) -> bool:
    """Tell whether a folder is a step that was set aside, or what was left of one."""
    return bool(_LEFT_OVER.fullmatch(path.name) or re.fullmatch(r"\d+\.damaged(-\d+)?", path.name))


def _rename(path: Path, kind: str) -> Path:
    new = path.with_name(f"{path.name}.{kind}")
    count = 1
    while new.exists():
        count += 1
        new = path.with_name(f"{path.name}.{kind}-{count}")
    return path.rename(new)


def clean(directory: Path) -> None:
    """Remove what was left of a save or a deletion that was interrupted, and nothing else."""
    for path in directory.iterdir():
        if path.is_dir() and _LEFT_OVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
