"""The manifest of a checkpoint: every leaf, the checksum of every shard, and the step's metadata.

Each process writes its own manifest, since only it holds its shards. orbax stores no checksums of
values, so a flipped bit is restored as a different number. The manifests detect it.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from stepfold.checkpoint.leaves import Leaf, Region, checksum
from stepfold.checkpoint.sealed import DamageError, opened, seal, unreadable, unseal
from stepfold.checkpoint.syncing import sync
from stepfold.errors import CheckpointError

FORMAT = 1
STATE = "state"  # the subdirectory of a step that holds everything, as an orbax item
_LEAVES, _FILES = "leaves-{}.json", "files.json"
_LATER = "later.json"  # metrics and extra added after the commit; not listed in files.json


class NewerError(CheckpointError):
    """The checkpoint has the format of a newer stepfold."""


class ForeignError(CheckpointError):
    """The directory is not, or no longer, a stepfold checkpoint; it is left unchanged."""


class Words(NamedTuple):
    """Metadata of a checkpoint, as plain JSON values."""

    step: int
    data: Any = None
    metrics: Mapping[str, Any] | None = None
    extra: Any = None
    best: tuple[str, str] | None = None


class Manifest(NamedTuple):
    """The merged manifests of all processes of a step."""

    words: Words
    leaves: dict[str, Leaf]
    shards: dict[str, dict[Region, int]]
    data: list[Any]
    bytes: int

    def position(self) -> Any:
        """Return the data position of this process, or the one that all processes share."""
        if all(position == self.data[0] for position in self.data):
            return opened(self.data[0])
        if len(self.data) != jax.process_count():
            raise CheckpointError(
                f"data: expected {len(self.data)} processes, each with the position it saved, got "
                f"{jax.process_count()}; resume on as many, or use batches whose position does not "
                "depend on the process (stepfold.batches)"
            )
        return opened(self.data[jax.process_index()])


def write_leaves(
    folder: Path,
    words: Words,
    leaves: Mapping[str, Leaf],
    shards: Mapping[str, Mapping[Region, Any]],
) -> None:
    """Write the manifest of this process, with the checksums of its shards."""
    process = jax.process_index()
    content = {
        "format": FORMAT,
        "processes": jax.process_count(),
        "words": words._asdict() if process == 0 else {"step": words.step, "data": words.data},
        "leaves": leaves if process == 0 else {},
        "shards": [
            [name, part, checksum(array)]
            for name, parts in shards.items()
            for part, array in parts.items()
        ],
    }
    (folder / _LEAVES.format(process)).write_bytes(seal(content))


def write_files(folder: Path) -> None:
    """Record and sync all files once written; a step without this record is incomplete."""
    found = sorted(folder.rglob("*"))
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size for path in found if path.is_file()
    }
    (folder / _FILES).write_bytes(seal(files))
    for path in (*found, folder / _FILES, folder):
        sync(path)


def write_later(step: Path, metrics: Mapping[str, Any], extra: Any) -> None:
    """Atomically add metrics measured after the save, and replace `extra`."""
    folder = step / STATE
    known = {**(read_words(step).metrics or {}), **metrics}
    new = folder / f"{_LATER}.new"
    new.write_bytes(seal({"metrics": known, "extra": extra}))
    sync(new)
    os.replace(new, folder / _LATER)
    sync(folder)


def read_words(step: Path) -> Words:
    """Read the metadata of a step; raise like `read_manifest`."""
    return _words(step / STATE, _first(step)[0])


def read_manifest(step: Path) -> Manifest:
    """Read the manifest of a step, without its arrays.

    Raises `DamageError` if a file is missing or has the wrong size, or if a manifest fails its
    checksum. Raises another `CheckpointError` if a file is unreadable, or if another program or a
    newer stepfold wrote the step.
    """
    first, size = _first(step)
    others = [_read_process(step / STATE, k) for k in range(1, first["processes"])]
    shards: dict[str, dict[Region, int]] = {name: {} for name in first["leaves"]}
    for part in (first, *others):
        for name, index, crc in part["shards"]:
            shards[name][tuple(map(tuple, index))] = crc
    return Manifest(
        words=_words(step / STATE, first),
        leaves={
            name: Leaf(tuple(shape), *kind) for name, (shape, *kind) in first["leaves"].items()
        },
        shards=shards,
        data=[part["words"]["data"] for part in (first, *others)],
        bytes=size,
    )


def _first(step: Path) -> tuple[Any, int]:
    """Check that all files exist; return the manifest of process 0 and the total bytes."""
    folder = step / STATE
    if not is_ours(step):
        raise ForeignError(
            f"{step}: expected a checkpoint that stepfold saved, got a folder without a manifest; "
            "what orbax saved by itself is read with orbax, and saved again with stepfold.save"
        )
    first = _read_process(folder, 0)
    return first, _whole(folder)


def is_ours(step: Path) -> bool:
    """Return whether stepfold saved a step, rather than orbax on its own."""
    try:
        return any(name.endswith(".json") for name in os.listdir(step / STATE))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise unreadable(step / STATE, error) from error


def _words(folder: Path, content: Any) -> Words:
    words = Words(**content["words"])
    later = unseal(folder / _LATER) if (folder / _LATER).exists() else {}
    return words._replace(best=words.best and (words.best[0], words.best[1]), **later)


def _read_process(folder: Path, process: int) -> Any:
    content = unseal(folder / _LEAVES.format(process))
    if content["format"] > FORMAT:
        raise NewerError(
            f"{folder.parent}: expected format {FORMAT} or older, got {content['format']}; it was "
            "saved by a newer stepfold: upgrade with pip install -U stepfold"
        )
    return content


def _whole(folder: Path) -> int:
    """Check the names and sizes of all files; return the total bytes."""
    files = unseal(folder / _FILES)
    for name, size in files.items():
        path = folder / name
        try:
            found = path.stat().st_size if path.is_file() else None
        except OSError as error:
            raise unreadable(path, error) from error
        if found != size:
            got = "none" if found is None else f"{found:,}"
            raise DamageError(f"{name}: expected {size:,} bytes, got {got}")
    return sum(files.values())
