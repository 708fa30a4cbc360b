"""The directory of a series: its path and lock, durability, the order of its steps by a metric."""

import errno
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

from stepfold.core.metric_modes import mode_of
from stepfold.core.processes import KeyValues, agreement, broadcast_from_first, spell_processes
from stepfold.core.validation import absolute_path, is_url
from stepfold.errors import CheckpointError, refuse

Best = tuple[str, str]  # a metric, and "min" or "max"


def read_directory(directory: Any, *, make: bool = False, name: str = "directory") -> Path:
    """Validate the path of a directory, and create the directory if `make` is set.

    `name` is that of the argument.
    """
    path = absolute_path(name, directory)
    # tensorstore takes a backslash for a slash, and refuses the others.
    if re.search(r"\\|\.__lock(/|$)|[\udc80-\udcff]", path.as_posix()):
        expected = "a path without a backslash, a name that ends in .__lock, or non-UTF-8 bytes"
        refuse(name, expected, repr(str(path)), "rename it")
    try:
        is_file = path.exists() and not path.is_dir()
    except OSError as error:  # such as a name that is too long
        got, kind = f"an invalid path: {error.strerror}", CheckpointError
        refuse(path, "a directory", got, "give another", kind=kind, cause=error)
    if is_file:
        refuse(path, "a directory", "a file", "give another path", kind=CheckpointError)
    if make:
        problem = ""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"one that cannot be made: {error.strerror}"
        if not problem and not os.access(path, os.W_OK | os.X_OK):
            problem = "one without permission to write"
        if problem:
            advice = "change the permission, or give another"
            refuse(path, "a directory to save in", problem, advice, kind=CheckpointError)
    return path


def split_location(location: str) -> tuple[str, int | None]:
    """Split the path or the URL of a step into that of the series and its number.

    The number is None if it is not the path of a step. The parent keeps the query of a URL.
    """
    base, mark, query = location.partition("?") if is_url(location) else (location, "", "")
    parent, _, name = base.rstrip("/").rpartition("/")
    is_root = not parent.strip("/") or parent.endswith("/")  # of a file system, or a bucket
    number = int(name) if name.isdecimal() and not is_root else None
    return f"{parent}{mark}{query}", number


def join_location(location: str, name: str) -> str:
    """Return the path or the URL of a name below a location; a URL keeps its query."""
    base, mark, query = location.partition("?") if is_url(location) else (location, "", "")
    return f"{base.rstrip('/')}/{name}{mark}{query}"


def already_exists(location: Any, step: int) -> str:
    """Return the message for a step that is saved twice."""
    return f"{location}: step {step} already exists; delete it, or save into another directory"


@contextmanager
def converted_errors(
    path: Path, problem: str, advice: str = "change the permission, or make room"
) -> Iterator[None]:
    """Convert an `OSError` to a `CheckpointError`: it does not mean that a step is damaged."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: {problem}: {error.strerror or error}; {advice}") from error


def names_in(folder: Path) -> list[str]:
    """List the names in a folder; none if there is no such folder."""
    with converted_errors(folder, "cannot be read"):
        try:
            return os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []


def check_regular(
    path: Path, kind: type[CheckpointError] = CheckpointError, limit: float = math.inf
) -> None:
    """Refuse a file that may block or never end when read: a pipe, a device, or a huge one."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        got = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        refuse(path, "a regular file", got, "give another path", kind=kind)
    if status.st_size > limit:
        refuse(path, f"at most {limit:,} bytes", f"{status.st_size:,}", kind=kind)


@contextmanager
def locked(directory: Path, *, alone: bool = False) -> Iterator[bool | None]:
    """Hold a lock on a directory, which protects unfinished saves and deletions from `Store.clean`.

    Saves and deletions share it; `clean` needs it alone. It is an `flock` on the directory itself,
    without a lock file, and the system releases it if the process is killed. Yields False if
    another process has it, and None if the system cannot tell, as on a file system without locks.
    """
    if fcntl is None or not directory.is_dir():
        yield None
        return
    with converted_errors(directory, "cannot be read"):
        file = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
            held: bool | None = True
        except BlockingIOError:
            held = False
        except OSError:  # no locks, or, as on NFS, no exclusive lock of a directory
            held = None
        yield held
    finally:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_UN)  # forked processes have the file open too
        os.close(file)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on disk, where the system supports it.

    Neither orbax nor a rename waits for that. Without it, a power loss may leave a step with a name
    but an empty manifest, after the older steps were deleted.
    """
    if os.name == "nt":  # Windows cannot open directories
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # unsupported by the file system
            raise
    finally:
        os.close(descriptor)


# Ranking


def read_best(best: Any, mode: str | None = None) -> Best | None:
    """Validate the metric that ranks checkpoints, and its mode; see `mode_of`."""
    return None if best is None else (best, mode_of("best", best, mode))


def order_by(best: Best, metrics: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """List the steps that have a finite metric, the best first; ties keep the older step first."""
    name, mode = best
    sign = 1 if mode == "min" else -1
    ranked = []
    for step, known in metrics.items():
        value: Any = known.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and math.isfinite(value):
            ranked.append((sign * value, step))
    return [step for _, step in sorted(ranked)]


# Shared by processes

_VISIBLE_SECONDS = 3.0  # for a new file to show on the other hosts


def check_shared(directory: Path) -> None:
    """Check that all processes see the same directory; collective."""
    processes = jax.process_count()
    if processes == 1:
        return
    number = secrets.randbits(62)
    probe = directory / f".visible-{broadcast_from_first([number])[0]:x}"
    with agreement(f"{directory}: cannot be written"):
        if jax.process_index() == 0:
            probe.touch()
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not (is_visible := probe.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    visible = KeyValues("directory").gather(is_visible, "an answer", where=str(directory))
    if jax.process_index() == 0:
        probe.unlink(missing_ok=True)
    if blind := [process for process, sees in enumerate(visible) if not sees]:
        expected = f"a directory that all {processes} processes share"
        got = f"one in which {spell_processes(blind)} cannot see the files of process 0"
        advice = "give one on a shared file system"
        refuse(directory, expected, got, advice, kind=CheckpointError)
