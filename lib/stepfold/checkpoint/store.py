"""The store of a series: everything that is read and written goes through one class.

`Checkpoints`, `restore` and `verify` use the methods of `Store` and nothing below them. The path
decides between `DirectoryStore` and, for object storage, `bucket.BucketStore`.

A step directory is named by its number. A step is renamed before it is removed, so that no reader
finds a part of it: `12.deleted` is being deleted, and `12.damaged` is kept for inspection.
"""

import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from stepfold.checkpoint import manifest
from stepfold.checkpoint.manifest import DamageError, ForeignError, NewerError, StepMetadata
from stepfold.checkpoint.steps import Lock, is_url, read_directory, unreadable
from stepfold.errors import CheckpointError

if TYPE_CHECKING:
    from stepfold.checkpoint.arrays import ArrayReader
    from stepfold.checkpoint.writer import OrbaxWriter

# What a killed process leaves behind. orbax writes a step into `orbax-checkpoint-tmp`; `saving`
# reserves the step for one run.
_LEFT_OVER = re.compile(r"\d+\.(saving|(deleted|orbax-checkpoint-tmp)(-\d+)?)")
_DAMAGED = re.compile(r"\d+\.damaged(-\d+)?")
_DAY = 24 * 60 * 60.0


class Store(Protocol):
    """Where the steps of a series are.

    With several processes, only process 0 changes anything, except for `begin` and `commit`.

    Of the errors of the system, its methods raise only `CheckpointError`.

    Attributes:
      location: the directory or the URL, as `open_store` takes it.
    """

    location: str

    # Reading

    def steps(self) -> list[int]:
        """List the steps in order, whether or not they are valid."""

    def has_step(self, step: int) -> bool:
        """Return whether a step is there; unlike a list of steps, never out of date."""

    def path_of(self, step: int) -> str:
        """Return the path of a step, for messages."""

    def other_names(self) -> list[str]:
        """List the names of damaged steps, and of what interrupted operations left behind."""

    def saved_at(self, step: int) -> float:
        """Return the time of a save, in seconds since the epoch."""

    def read_metadata(self, step: int) -> StepMetadata:
        """Check that a step is complete, and return its metadata; raise like `read_manifest`."""

    def read_manifest(self, step: int) -> manifest.Manifest:
        """Read the manifest of a step.

        Raises `DamageError` if the step is incomplete or was changed, `ForeignError` if another
        program wrote it, and `NewerError` if a newer version did.
        """

    def open_arrays(self, step: int, contents: manifest.Manifest) -> "ArrayReader":
        """Return a reader of the arrays of a step."""

    def read_note(self, name: str) -> Any:
        """Return what `write_note` wrote next to the steps, or None; raise `DamageError`."""

    # Saving

    def begin(
        self, state: Any, metadata: StepMetadata, before_commit: Callable[[], None] | None = None
    ) -> None:
        """Copy the state off the devices, and start to save it as a step in the background.

        On failure, its files are removed.
        """

    def commit(self, step: int) -> None:
        """Wait until the step is durable. Readers do not see it before.

        On failure, its files are removed.
        """

    def add_metadata(self, step: int, metrics: Mapping[str, Any], extra: Any) -> None:
        """Atomically add metrics to a step, and replace its `extra`."""

    def write_note(self, name: str, content: Any) -> None:
        """Atomically write JSON next to the steps, and return when it is durable."""

    def close(self) -> None:
        """End the threads that save."""

    # Removing

    def delete(self, step: int) -> None:
        """Delete a step so that no reader finds a part; a no-op if another run has deleted it."""

    def set_aside(self, step: int) -> str | None:
        """Rename a damaged step, so that no reader finds it; return None if that fails."""

    def clean(self) -> None:
        """Delete what killed processes left behind: unfinished saves and deletions.

        Steps, damaged steps, files of others and the unfinished saves of live runs are never
        deleted.
        """


def open_store(directory: Any, *, save: bool = False) -> Store:
    """Open the store at a path or a URL; `save` creates the directory, and prepares for saving.

    Raises:
      ConfigError: if there is no store for such a path.
      CheckpointError: if the path is not a directory, or is not writable.
    """
    if is_url(directory):
        from stepfold.checkpoint.bucket import BucketStore  # lazy: imports tensorstore

        return BucketStore(directory, save=save)
    path = read_directory(directory, make=save)
    if not save:
        return DirectoryStore(path)
    # Lazy: orbax takes longer to import than everything else together.
    from stepfold.checkpoint.writer import OrbaxWriter

    return DirectoryStore(path, OrbaxWriter())


class DirectoryStore:
    """Steps in a directory of a file system, in the layout of orbax."""

    def __init__(self, directory: Path, writer: "OrbaxWriter | None" = None) -> None:
        self.directory, self._writer = directory, writer
        self.location = str(directory)
        self._lock: Lock | None = None  # while a step is saved

    # Reading

    def steps(self) -> list[int]:
        names = [path.name for path in self._folders()]
        return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)

    def has_step(self, step: int) -> bool:
        return step in self.steps()

    def path_of(self, step: int) -> str:
        return str(self._path(step))

    def other_names(self) -> list[str]:
        names = sorted(path.name for path in self._folders())
        return [name for name in names if _LEFT_OVER.fullmatch(name) or _DAMAGED.fullmatch(name)]

    def saved_at(self, step: int) -> float:
        with self._converted_errors(step, "cannot be read"):
            return self._path(step).stat().st_mtime

    def read_metadata(self, step: int) -> StepMetadata:
        return manifest.read_metadata(self._path(step))

    def read_manifest(self, step: int) -> manifest.Manifest:
        return manifest.read_manifest(self._path(step))

    def open_arrays(self, step: int, contents: manifest.Manifest) -> "ArrayReader":
        from stepfold.checkpoint.arrays import ArrayReader  # lazy: imports tensorstore

        return ArrayReader(self._path(step), contents)

    def read_note(self, name: str) -> Any:
        path = self.directory / name
        return manifest.read_checked(path) if path.exists() else None

    # Saving

    def begin(
        self, state: Any, metadata: StepMetadata, before_commit: Callable[[], None] | None = None
    ) -> None:
        self._lock = Lock(self.directory)
        try:
            self._open_writer().begin(self._path(metadata.step), state, metadata, before_commit)
        except BaseException:
            self._release_lock()
            raise

    def commit(self, step: int) -> None:
        try:
            self._open_writer().wait(self._path(step))
        finally:
            self._release_lock()

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _open_writer(self) -> "OrbaxWriter":
        if self._writer is None:
            raise ValueError("expected a store that was opened with save=True")
        return self._writer

    def add_metadata(self, step: int, metrics: Mapping[str, Any], extra: Any) -> None:
        with self._converted_errors(step, "cannot be changed"):
            manifest.write_later(self._path(step), metrics, extra)

    def write_note(self, name: str, content: Any) -> None:
        try:
            manifest.replace_checked(self.directory / name, content)
        except OSError as error:
            raise CheckpointError(
                f"{self.directory / name}: cannot be written: {error.strerror or error}; make "
                "room, or change the permission"
            ) from error

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    # Removing

    def delete(self, step: int) -> None:
        lock = Lock(self.directory)
        try:
            with self._converted_errors(step, "cannot be deleted"), suppress(FileNotFoundError):
                _remove(_rename(self._path(step), "deleted"))
        finally:
            lock.release()

    def set_aside(self, step: int) -> str | None:
        try:
            return _rename(self._path(step), "damaged").name
        except OSError:
            return None

    def clean(self) -> None:
        # Does nothing while a process saves into the directory, since its save is not finished
        # either. On a file system without locks, deletes leftovers older than a day.
        lock = Lock(self.directory, alone=True)
        try:
            for path in self._folders():
                if lock.held is not False and _LEFT_OVER.fullmatch(path.name):
                    with suppress(OSError):  # another run may delete it as well
                        if lock.held or time.time() - path.lstat().st_mtime > _DAY:
                            _remove(path)
        finally:
            lock.release()

    def _path(self, step: int) -> Path:
        return self.directory / str(step)

    def _folders(self) -> list[Path]:
        try:
            return [path for path in self.directory.iterdir() if path.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise unreadable(self.directory, error) from error

    @contextmanager
    def _converted_errors(self, step: int, problem: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"{self._path(step)}: {problem}: {error.strerror or error}; check the permissions"
            ) from error


def complete_steps(store: Store) -> dict[int, StepMetadata]:
    """Read the metadata of all complete steps, in order; warn about those that cannot be read."""
    complete = {}
    for step in store.steps():
        try:
            complete[step] = store.read_metadata(step)
        except (DamageError, ForeignError, NewerError):
            continue
        except CheckpointError as error:
            warnings.warn(f"step {step} is left out: {error}", RuntimeWarning, stacklevel=2)
    return complete


def _remove(path: Path) -> None:
    if path.is_symlink():  # to a directory on another disk, which is not ours
        path.unlink()
    else:
        shutil.rmtree(path)


def metrics_of(complete: Mapping[int, StepMetadata]) -> dict[int, Mapping[str, Any]]:
    """Return the metrics of each step."""
    return {step: metadata.metrics or {} for step, metadata in complete.items()}


def _rename(path: Path, kind: str) -> Path:
    new = path.with_name(f"{path.name}.{kind}")
    count = 1
    while new.exists():
        count += 1
        new = path.with_name(f"{path.name}.{kind}-{count}")
    return path.rename(new)
