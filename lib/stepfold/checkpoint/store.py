"""The store of a series: everything that is read and written goes through one class.

`Checkpoints`, `restore` and `verify` use the methods of a `Store` and nothing below them. It is a
`DirectoryStore` or, for object storage, a `bucket.BucketStore`; see `open_store`.

A step directory is named by its number. A step is renamed before it is removed, so that no reader
finds a part of it: `12.deleted` is being deleted, and `12.damaged` is kept for inspection.
"""

import errno
import importlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import jax
import numpy as np

from stepfold.checkpoint import manifest
from stepfold.checkpoint.host_buffers import HostBuffers
from stepfold.checkpoint.manifest import (
    DamageError,
    ForeignError,
    Manifest,
    NewerError,
    NoManifestError,
    StepMetadata,
)
from stepfold.checkpoint.results import find_results, metrics_in
from stepfold.checkpoint.steps import (
    check_shared,
    converted_errors,
    join_location,
    locked,
    names_in,
    read_directory,
    sync,
)
from stepfold.core.processes import agreement, broadcast_from_first
from stepfold.core.validation import is_url
from stepfold.errors import CheckpointError, refuse, warn
from stepfold.internals.texts import ORBAX_UNFINISHED

if TYPE_CHECKING:
    from stepfold.checkpoint.arrays import ArrayReader
    from stepfold.checkpoint.bucket import BucketSave, BucketStore
    from stepfold.checkpoint.tier import TierSave, TierStore
    from stepfold.checkpoint.writer import OrbaxSave

# What a killed process leaves behind. `saving` is the claim of a run on the step, a file, or a
# folder of an earlier stepfold.
_LEFT_OVER = re.compile(rf"\d+\.(saving|(deleted|{ORBAX_UNFINISHED})(-\d+)?)")
_CLAIM = re.compile(r"(\d+)\.saving-[0-9a-f]{16}")
_DAMAGED = re.compile(r"\d+\.damaged(-\d+)?")
_DAY = 24 * 60 * 60.0
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)  # of a file system
# Names in a folder that only one layout has.
_LAYOUTS = {
    "directory": re.compile(r"(0|[1-9]\d*)"),
    "bucket": re.compile(r"(0|[1-9]\d*)\.commit|stepfold\.json"),
    "tier": re.compile(r"host\.json"),
}


class DirectoryStore:
    """Steps in a directory of a file system, in the layout of orbax.

    Its methods are those of every store. With several processes, only process 0 changes anything,
    except for saves. Of the errors of the system, they raise only `CheckpointError`.

    Attributes:
      location: the directory or the URL, as `open_store` takes it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.location = str(directory)

    # Reading

    def steps(self) -> list[int]:
        """List the steps in order, whether or not they are valid."""
        names = [path.name for path in self._folders()]
        return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)

    def has_step(self, step: int) -> bool:
        """Return whether a step exists; unlike `steps`, never out of date."""
        return step in self.steps()

    def path_of(self, step: int) -> str:
        """Return the path of a step, for messages."""
        return str(self._path(step))

    def other_names(self) -> list[str]:
        """List the names of damaged steps, and of what interrupted operations left behind."""
        damaged = [path for path in self._folders() if _DAMAGED.fullmatch(path.name)]
        return sorted(path.name for path in (*damaged, *self._leftovers()))

    def saved_at(self, step: int) -> float:
        """Return the time of a save, in seconds since the epoch."""
        with converted_errors(self._path(step), "cannot be read"):
            return self._path(step).stat().st_mtime

    def read_metadata(self, step: int) -> StepMetadata:
        """Check that a step is complete, and return its metadata; raise like `read_manifest`."""
        with manifest.checked_form(self.path_of(step)):
            return self._read_first(step)[0]

    def read_manifest(self, step: int) -> Manifest:
        """Read the manifest of a step, without its arrays.

        Raises `DamageError` if the step is incomplete or was changed, `ForeignError` if another
        program wrote it, and `NewerError` if a newer version did.
        """
        with manifest.checked_form(self.path_of(step)):
            metadata, first, size = self._read_first(step)
            others = [self._read_process(step, process) for process in range(1, first["processes"])]
            merged = manifest.merge_processes([first, *others], metadata)
            for name, array in merged.arrays.items():  # those that were added later are not listed
                path = manifest.stream_path(self._path(step) / manifest.STATE, array.stream)
                end = array.offset + array.leaf.bytes
                with converted_errors(path, "cannot be read"):
                    has_end = path.exists() and path.stat().st_size >= end
                if not has_end:
                    refuse(name, f"{end:,} bytes of {path.name}", "fewer", kind=DamageError)
            return merged._replace(bytes=size)

    def _read_first(self, step: int) -> tuple[StepMetadata, Any, int]:
        """Check that all files exist; return the metadata, first manifest and number of bytes."""
        folder = self._path(step) / manifest.STATE
        if not any(name.endswith(".json") for name in names_in(folder)):
            expected, got = "a checkpoint that stepfold saved", "a folder without a manifest"
            advice = "stepfold.restore reads what orbax saved alone; save that with stepfold.save"
            refuse(self.path_of(step), expected, got, advice, kind=NoManifestError)
        first = self._read_process(step, 0)
        recorded, sizes = manifest.read_checked(folder / manifest.FILES), _sizes(folder)
        for name, size in recorded.items():
            name.encode()  # raises for a lone surrogate, which cannot be printed
            if sizes.get(name) != size:
                got = f"{sizes[name]:,}" if name in sizes else "none"
                refuse(name, f"{size:,} bytes", got, kind=DamageError)
        later = self.read_note(f"{step}/{manifest.STATE}/{manifest.LATER}") or {}
        metadata = manifest.metadata_of(first, later, self.path_of(step), step)
        added = sum(size for name, size in sizes.items() if name.startswith("later"))
        return metadata, first, sum(recorded.values()) + added

    def _read_process(self, step: int, process: int) -> Any:
        path = self._path(step) / manifest.STATE / manifest.LEAVES.format(process)
        return manifest.check_process(manifest.read_checked(path), self.path_of(step))

    def open_arrays(self, step: int, contents: Manifest) -> "ArrayReader":
        """Return a reader of the arrays of a step."""
        from stepfold.checkpoint.arrays import ArrayReader  # lazy: imports tensorstore

        return ArrayReader(self._path(step), contents)

    def read_note(self, name: str) -> Any:
        """Return what `write_note` wrote next to the steps, or None; raise `DamageError`."""
        path = self.directory / name
        return manifest.read_checked(path) if path.exists() else None

    def list_notes(self, folder: str) -> list[str]:
        """List the names of the notes in a folder next to the steps, without that of the folder."""
        names = names_in(self.directory / folder)
        return sorted(name for name in names if not name.endswith(".new"))

    # Saving

    def begin(
        self,
        state: Any,
        metadata: StepMetadata,
        before_commit: Callable[[], None] | None = None,
        buffers: HostBuffers | None = None,
    ) -> "PendingSave":
        """Copy the state off the devices, and start to save it as a step in the background.

        With buffers, the state can be donated afterwards. The caller has to commit the result. If
        the save fails, its files are removed.
        """
        from stepfold.checkpoint.writer import OrbaxSave  # lazy: imports orbax

        path = self._path(metadata.step)
        return OrbaxSave(path, state, metadata, before_commit, buffers)

    def add_metadata(self, step: int, metrics: Mapping[str, Any], extra: Any) -> None:
        """Atomically add metrics to a step, and replace its `extra`."""
        manifest.add_metadata(self, step, f"{step}/{manifest.STATE}/", metrics, extra)

    def write_stream(self, name: str, arrays: Iterable[np.ndarray]) -> None:
        """Write arrays one after the other, and return when they are durable."""
        path = manifest.stream_path(self.directory, name)
        with converted_errors(path, "cannot be written"):
            manifest.write_stream(path, arrays)
            sync(path)

    def delete_stream(self, name: str) -> None:
        """Delete what `write_stream` wrote, if it exists."""
        with suppress(OSError):
            manifest.stream_path(self.directory, name).unlink()

    def write_note(self, name: str, content: Any) -> None:
        """Atomically write JSON next to the steps, and return when it is durable."""
        path = self.directory / name
        with converted_errors(path, "cannot be written"):
            self._write_temporary(path, ".new", content).replace(path)
            sync(path.parent)

    def add_note(self, name: str, content: Any) -> bool:
        """Write a note as `write_note` does, unless it exists; return whether it was written."""
        path = self.directory / name
        with converted_errors(path, "cannot be written"):
            new = self._write_temporary(path, f".{secrets.token_hex(4)}.new", content)
            try:
                os.link(new, path)  # unlike a rename, it fails if the path exists
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                if path.exists():
                    return False
                new.replace(path)  # two writers at once would both return True
            finally:
                new.unlink(missing_ok=True)
            sync(path.parent)
            return True

    def _write_temporary(self, path: Path, suffix: str, content: Any) -> Path:
        """Durably write JSON to a file that is to take a path; return its own path."""
        new = path.with_name(f"{path.name}{suffix}")
        path.parent.mkdir(exist_ok=True)
        manifest.write_checked(new, content)
        sync(new)
        return new

    # Removing

    def delete_note(self, name: str) -> None:
        """Delete a note, if it exists."""
        with converted_errors(self.directory / name, "cannot be deleted"):
            (self.directory / name).unlink(missing_ok=True)

    def delete(self, step: int) -> None:
        """Delete a step so that no reader finds a part; a no-op if another run has deleted it."""
        with (
            locked(self.directory),
            converted_errors(self._path(step), "cannot be deleted"),
            suppress(FileNotFoundError),
        ):
            _remove(_rename(self._path(step), "deleted"))

    def set_aside(self, step: int) -> str | None:
        """Rename a damaged step, so that no reader finds it; return None if that fails."""
        try:
            return _rename(self._path(step), "damaged").name
        except OSError:
            return None

    def clean(self, finish: Callable[[int], None] | None = None) -> None:
        """Delete what killed processes left behind: unfinished saves and deletions.

        Steps, damaged steps, files of others and the unfinished saves of live runs are never
        deleted. It does nothing while a process saves into the directory. On a file system without
        locks, it deletes leftovers older than a day.

        `finish` is called for each step that was committed by a run that was killed before
        `commit` called its own.
        """
        committed = []
        with locked(self.directory, alone=True) as held:
            for path in self._leftovers() if held is not False else []:
                with suppress(OSError):  # another run may delete it as well
                    if held or time.time() - path.lstat().st_mtime > _DAY:
                        claim = _CLAIM.fullmatch(path.name)
                        if claim and self._path(int(claim[1])).is_dir():
                            committed.append((path, int(claim[1])))
                        else:
                            _remove(path)
        for path, step in committed:  # without the lock, which deletions take
            if finish is not None:
                finish(step)
            with suppress(OSError):
                _remove(path)

    def _path(self, step: int) -> Path:
        return self.directory / str(step)

    def _folders(self) -> list[Path]:
        return [path for path in self._entries() if path.is_dir()]

    def _leftovers(self) -> list[Path]:
        """List the claims of saves, and the folders that interrupted operations left behind."""
        return [
            path
            for path in self._entries()
            if _CLAIM.fullmatch(path.name) or (_LEFT_OVER.fullmatch(path.name) and path.is_dir())
        ]

    def _entries(self) -> list[Path]:
        return [self.directory / name for name in names_in(self.directory)]


PermanentStore = Union[DirectoryStore, "BucketStore"]
Store = Union[PermanentStore, "TierStore"]
PendingSave = Union["OrbaxSave", "BucketSave", "TierSave"]


def open_store(directory: Any, *, save: bool = False) -> Store:
    """Open the store at a path or a URL; `save` creates the directory, and prepares for saving.

    A path and its URL, such as file:///a/folder, name the same series. Its layout is that of the
    steps in it: a bucket may have been downloaded. Only a new series has the layout that goes with
    its name.

    Raises:
      ConfigError: if there is no store for such a path.
      CheckpointError: if the path is not a directory, or is not writable.
    """
    path = local_path(directory)
    layout = path and _layout_of(path)
    if path is None or layout == "bucket" or (layout is None and is_url(directory)):
        from stepfold.checkpoint.bucket import BucketStore  # lazy: imports tensorstore

        url = directory if path is None or is_url(directory) else path.as_uri()
        return BucketStore(url, save=save)
    if layout == "tier":
        if save:
            expected, got = "the directory of a series", "that of its temporary steps"
            refuse(path, expected, got, "give another", kind=CheckpointError)
        from stepfold.checkpoint.tier import TierStore  # lazy: imports tensorstore

        return TierStore(path)
    if save:  # orbax takes longer to import than everything else: not at the first save
        importlib.import_module("stepfold.checkpoint.writer")
    return DirectoryStore(read_directory(path, make=save))


def local_path(directory: Any) -> Path | None:
    """Return the path that a path or a URL of a file system names; None for object storage."""
    if not is_url(directory):
        return read_directory(directory)
    from stepfold.object_storage import path_of_url  # lazy: imports tensorstore

    return path_of_url(directory)


def _layout_of(path: Path) -> str | None:
    """Return the layout of the steps in a folder; None if it has none."""
    names = names_in(path)
    layouts = {layout for layout, name in _LAYOUTS.items() if any(map(name.fullmatch, names))}
    if len(layouts) > 1:
        expected, got = "steps in one layout", "both folders of steps, and those of a bucket"
        advice = "move saves/, stepfold.json and the .commit files to another directory"
        refuse(path, expected, got, advice, kind=CheckpointError)
    return next(iter(layouts), None)


def open_to_read(directory: Any) -> Store:
    """Open the store of a series, or that of a run directory if it has no steps itself."""
    store = open_store(directory)
    inner = _below(store)
    if (is_url(inner) or os.path.isdir(inner)) and not store.steps():
        below = open_store(inner)
        return below if below.steps() else store
    return store


def open_together(directory: Any) -> Store:
    """Open the store that `open_to_read` opens on process 0; collective."""
    store, is_below = open_store(directory), False
    with agreement(f"{store.location}: cannot be listed"):
        if jax.process_index() == 0:
            is_below = open_to_read(directory).location != store.location
    return open_store(_below(store)) if broadcast_from_first([is_below])[0] else store


def _below(store: Store) -> str:
    return join_location(store.location, "checkpoints")


def open_to_save(path: Any) -> PermanentStore:
    """Open the store of a directory that all processes share; collective."""
    with agreement(f"{path}: not opened"):
        store: PermanentStore = open_store(path, save=True)  # type: ignore[assignment]
    if not is_url(store.location):
        check_shared(Path(store.location))
    return store


def complete_steps(store: Store, steps: Iterable[int] | None = None) -> dict[int, StepMetadata]:
    """Read the metadata of all complete steps, in order; warn about those that cannot be read.

    `steps` may list those to read.
    """
    complete = {}
    for step in store.steps() if steps is None else steps:
        try:
            complete[step] = store.read_metadata(step)
        except (DamageError, ForeignError, NewerError):
            continue
        except CheckpointError as error:
            warn(f"step {step} is left out: {error}", RuntimeWarning)
    return complete


def has_own_step(store: Store) -> bool:
    """Return whether a store has a step of stepfold, complete or damaged."""
    for step in reversed(store.steps()):
        try:
            store.read_metadata(step)
        except ForeignError:
            continue
        except DamageError:
            if not store.has_step(step):  # another run has deleted it meanwhile
                continue
        return True
    return False


def metrics_of(store: Store, complete: Mapping[int, StepMetadata]) -> dict[int, Mapping[str, Any]]:
    """Return the metrics of each step, with those that other processes have evaluated."""
    results = find_results(store)
    return {
        step: {**(metadata.metrics or {}), **metrics_in(store, results, step, metadata.identity)}
        for step, metadata in complete.items()
    }


def _sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of the files below a folder; refuse pipes and devices."""
    sizes = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        with converted_errors(path, "cannot be read"):
            try:
                status = path.stat()
            except OSError as error:
                if error.errno in manifest.MISSING:  # a link to nothing, or deleted meanwhile
                    continue
                raise
        if stat.S_ISREG(status.st_mode):
            sizes[name] = status.st_size
            if path.name == "manifest.ocdbt" and status.st_size > manifest.LARGEST:
                refuse(name, f"at most {manifest.LARGEST:,} bytes", "more", kind=DamageError)
        elif not stat.S_ISDIR(status.st_mode) or path.is_symlink():
            refuse(name, "a regular file", "another kind of file", kind=DamageError)
    return sizes


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():  # a link to a directory, which is not ours, or a claim
        path.unlink()
    else:
        shutil.rmtree(path)


def _rename(path: Path, kind: str) -> Path:
    new = path.with_name(f"{path.name}.{kind}")
    count = 1
    while new.exists():
        count += 1
        new = path.with_name(f"{path.name}.{kind}-{count}")
    return path.rename(new)
