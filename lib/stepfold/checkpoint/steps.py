"""The folders of a series: which steps there are, and how one comes to be there no more.

A step is a folder named by its number. Whatever takes one away renames it first, so that no step
is ever offered half: `12.deleted` is on its way out, and `12.damaged` is kept to be looked at.
"""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

from stepfold.checkpoint.manifest import ForeignError, NewerError, Words, read_words
from stepfold.checkpoint.sealed import DamageError, unreadable
from stepfold.errors import CheckpointError, ConfigError

# What a killed process leaves behind; `orbax-checkpoint-tmp` is what orbax writes a step into, and
# `saving` keeps it to one run.
_LEFT_OVER = re.compile(r"\d+\.(deleted|saving|orbax-checkpoint-tmp)(\W.*)?")


def read_directory(directory: Any, *, make: bool = False) -> Path:
    """Read the path of a series' directory, and make it where asked to.

    Raises:
      ConfigError: if it is no path on a file system.
      CheckpointError: if it is a file, or cannot be made.
    """
    if not isinstance(directory, str | Path) or not str(directory):
        raise ConfigError(f"directory: expected a path, got {directory!r}")
    if re.match(r"\w{2,}:/", str(directory)):
        raise ConfigError(
            f"directory: expected a path on a file system, got {str(directory)!r}; mount the bucket"
        )
    path = Path(directory).absolute()
    if os.sep == "/" and "\\" in str(path):
        raise ConfigError(
            "directory: expected a path without a backslash, which tensorstore takes for a slash, "
            f"got {str(path)!r}; rename it"
        )
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path}: expected a directory, got a file; give another path")
    try:
        if make:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{path}: expected a directory to save in, but it cannot be made: {error.strerror}; "
            "change the permission, or give another"
        ) from error
    if make and not os.access(path, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{path}: expected a directory to save in, but there is no permission to write there; "
            "change it, or give another"
        )
    return path


def path_of(directory: Path, step: int) -> Path:
    """Give the folder of a step."""
    return directory / str(step)


def steps_in(directory: Path) -> list[int]:
    """List the steps that have a folder, in order; it may be that of no good checkpoint."""
    names = [path.name for path in _folders(directory)]
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def words_in(directory: Path) -> dict[int, Words]:
    """Read what lies beside the arrays of the steps that are whole, in order."""
    found = {}
    for step in steps_in(directory):
        with suppress(DamageError, ForeignError, NewerError):
            found[step] = read_words(path_of(directory, step))
    return found


def whole_steps(directory: Path) -> list[int]:
    """List the steps of which every file is there, in order, by name and size."""
    return list(words_in(directory))


def is_whole(step: Path) -> bool:
    """Tell whether every file of a step is there, by name and size."""
    try:
        read_words(step)
    except (DamageError, ForeignError):
        return False
    return True


def delete(directory: Path, step: int) -> None:
    """Delete a step, by another name first; one that another run has deleted is gone already."""
    try:
        path = _rename(path_of(directory, step), "deleted")
    except FileNotFoundError:
        return
    if path.is_symlink():  # to where another disk keeps it
        path.unlink()
    else:
        shutil.rmtree(path)


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


class Lock:
    """Say while a save is under way that what it writes is not left over; a kill releases it.

    It is the system's lock on the directory itself, which takes no file, and which others share.
    """

    def __init__(self, directory: Path, *, alone: bool = False) -> None:
        """Take the lock; `held` tells whether it was to be had, where it is wanted `alone`."""
        self.held, self._file = True, -1
        if fcntl is None or not directory.is_dir():
            return
        try:
            self._file = os.open(directory, os.O_RDONLY)
        except OSError as error:
            raise unreadable(directory, error) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
        except BlockingIOError:
            self.held = False
        except OSError:  # a file system without locks
            self.held = True

    def release(self) -> None:
        """Let go of it."""
        if self._file >= 0:
            with suppress(OSError):  # where there are no locks
                fcntl.flock(self._file, fcntl.LOCK_UN)  # what was forked has the file open too
            os.close(self._file)
            self._file = -1


def clean(directory: Path) -> bool:
    """Remove what was left of a save or a deletion that was interrupted, and nothing else.

    Nothing is removed while a save into the directory is under way, by whomever.

    Returns:
      Whether something was there to remove.
    """
    lock = Lock(directory, alone=True)
    try:
        left = [path for path in _folders(directory) if _LEFT_OVER.fullmatch(path.name)]
        for path in left if lock.held else []:
            shutil.rmtree(path, ignore_errors=True)
        return bool(left) and lock.held
    finally:
        lock.release()


def _folders(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(directory, error) from error
