"""The step directories of a series: listing, deletion, locking and cleanup.

A step directory is named by its number. Removing a step renames it first, so that no reader finds a
partial step: `12.deleted` is being deleted, and `12.damaged` is kept for inspection.
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

# What a killed process leaves behind. orbax writes a step into `orbax-checkpoint-tmp`; `saving`
# reserves the step for one run.
_LEFT_OVER = re.compile(r"\d+\.(deleted|saving|orbax-checkpoint-tmp)(\W.*)?")


def read_directory(directory: Any, *, make: bool = False) -> Path:
    """Validate the path of a series' directory, and create it if `make` is set."""
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
    """Return the directory of a step."""
    return directory / str(step)


def steps_in(directory: Path) -> list[int]:
    """List the steps that have a directory, in order, whether or not they are valid."""
    names = [path.name for path in _folders(directory)]
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def words_in(directory: Path) -> dict[int, Words]:
    """Read the metadata of all complete steps, in order."""
    found = {}
    for step in steps_in(directory):
        with suppress(DamageError, ForeignError, NewerError):
            found[step] = read_words(path_of(directory, step))
    return found


def whole_steps(directory: Path) -> list[int]:
    """List the complete steps, in order, by the names and sizes of their files."""
    return list(words_in(directory))


def is_whole(step: Path) -> bool:
    """Return whether all files of a step exist, by name and size."""
    try:
        read_words(step)
    except (DamageError, ForeignError):
        return False
    return True


def delete(directory: Path, step: int) -> None:
    """Rename a step, then delete it; a no-op if another run has deleted it."""
    try:
        path = _rename(path_of(directory, step), "deleted")
    except FileNotFoundError:
        return
    if path.is_symlink():  # a link to another disk
        path.unlink()
    else:
        shutil.rmtree(path)


def set_aside(directory: Path, step: int) -> Path | None:
    """Rename a damaged step, so that no reader finds it; return None if that fails."""
    try:
        return _rename(path_of(directory, step), "damaged")
    except OSError:
        return None


def is_aside(path: Path) -> bool:
    """Return whether a directory is a damaged step, or left over from an interrupted operation."""
    return bool(_LEFT_OVER.fullmatch(path.name) or re.fullmatch(r"\d+\.damaged(-\d+)?", path.name))


def _rename(path: Path, kind: str) -> Path:
    new = path.with_name(f"{path.name}.{kind}")
    count = 1
    while new.exists():
        count += 1
        new = path.with_name(f"{path.name}.{kind}-{count}")
    return path.rename(new)


class Lock:
    """Protect unfinished saves from cleanup; the system releases the lock if the process is killed.

    The lock is an `flock` on the directory itself. It needs no lock file, and saves share it.
    """

    def __init__(self, directory: Path, *, alone: bool = False) -> None:
        """Acquire the lock, exclusively if `alone`; `held` is False if it is taken."""
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
        """Release the lock."""
        if self._file >= 0:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._file, fcntl.LOCK_UN)  # forked processes have the file open too
            os.close(self._file)
            self._file = -1


def clean(directory: Path) -> bool:
    """Remove what interrupted saves and deletions left, and return whether there was anything.

    A no-op while any process saves into the directory.
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
