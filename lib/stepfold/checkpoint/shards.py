"""Read and atomically replace safetensors: a single file, or shards with an index.

After an interruption a reader finds the previous export or the new one. Files are written to a
temporary directory, synced and renamed, the index last. Shards never reuse the name of an existing
file: the old index, still in place, would refer to the new bytes.
"""

import errno
import glob
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepfold import tree
from stepfold.checkpoint.syncing import sync
from stepfold.checkpoint.tensors import Spec, read_tensors, write_tensors
from stepfold.errors import CheckpointError, ConfigError

_SUFFIX, _INDEX = ".safetensors", ".safetensors.index.json"


def file_of(path: str | os.PathLike[str]) -> Path:
    """Resolve a path to a file; a directory means the `model.safetensors` in it."""
    if "://" in os.fspath(path):
        raise ConfigError(
            f"path: expected one on a disk, got {os.fspath(path)}; copy between there and a disk"
        )
    file = Path(path)
    return file if file.suffix == _SUFFIX else file / f"model{_SUFFIX}"


def write_shards(
    target: Path,
    shards: Sequence[Mapping[str, Spec]],
    arrays: Iterator[np.ndarray[Any, Any]],
    metadata: Mapping[str, str],
) -> None:
    """Atomically replace the previous export to `target`.

    `target` is the single file, or the base name of several shards. `shards` holds the arrays of
    each file, and `arrays` yields all of them in that order. `metadata` goes into every header.
    """
    folder = target.parent
    folder.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    for killed in folder.glob(f".{glob.escape(target.name)}.*"):
        shutil.rmtree(killed)
    names = [target.name] if len(shards) == 1 else _free_names(target, len(shards))
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{target.name}.") as aside:
        for name, specs in zip(names, shards, strict=True):
            write_tensors(Path(aside, name), specs, itertools.islice(arrays, len(specs)), metadata)
        if len(shards) > 1:
            index = Path(aside, _index_of(target).name)
            _write_index(index, dict(zip(names, shards, strict=True)))
            names.append(index.name)
        for name in names:
            os.replace(Path(aside, name), folder / name)
    sync(folder)  # persist the new names before the old files are deleted
    for outdated in _exported(target):
        if outdated.name not in names:
            outdated.unlink()


def _index_of(target: Path) -> Path:
    return target.with_name(target.stem + _INDEX)


def _free_names(target: Path, count: int) -> list[str]:
    for again in itertools.count(1):
        end = f".{again}{_SUFFIX}" if again > 1 else _SUFFIX
        names = [f"{target.stem}-{i + 1:05d}-of-{count:05d}{end}" for i in range(count)]
        if not any(target.with_name(name).exists() for name in names):
            break
    return names


def _write_index(file: Path, shards: Mapping[str, Mapping[str, Spec]]) -> None:
    sizes = [spec.size for specs in shards.values() for spec in specs.values()]
    places = {name: shard for shard, specs in shards.items() for name in specs}
    content = {"metadata": {"total_size": sum(sizes)}, "weight_map": places}
    with file.open("x", encoding="utf-8") as out:
        json.dump(content, out, indent=2, ensure_ascii=False)
        out.flush()
        os.fsync(out.fileno())


def _exported(target: Path) -> list[Path]:
    """List the files of all exports to a target, the index before the shards it refers to."""
    shard = re.compile(rf"{re.escape(target.stem)}-\d{{5}}-of-\d{{5}}(\.\d+)?{re.escape(_SUFFIX)}")
    shards = [file for file in target.parent.iterdir() if shard.fullmatch(file.name)]
    return [file for file in (target, _index_of(target)) if file.exists()] + shards


def read_shards(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Memory-map a file, all files of an index, or those of a directory.

    Returns views of the files by name. Copy whatever outlives the files. Raises `CheckpointError`
    if a file is missing, unreadable, or differs from the index.
    """
    file = file_of(path)
    if os.fspath(path).endswith(".json"):
        return _read_indexed(Path(path))
    if file.exists():
        return read_tensors(file)
    if _index_of(file).exists():
        return _read_indexed(_index_of(file))
    raise CheckpointError(
        f"{os.fspath(path)}: expected {file}, or {_index_of(file).name} beside it, got neither; "
        "give a file that ends in .safetensors, its index, or the directory of a model.safetensors"
    )


def _read_indexed(index: Path) -> dict[str, np.ndarray[Any, Any]]:
    places = _read_index(index)
    found: dict[str, np.ndarray[Any, Any]] = {}
    for shard in sorted(set(places.values())):
        if not index.with_name(shard).exists():
            raise CheckpointError(
                f"{index}: expected {shard} beside it, got no such file; export or copy all of "
                "them again"
            )
        arrays = read_tensors(index.with_name(shard))
        differing = arrays.keys() ^ {name for name, file in places.items() if file == shard}
        if differing:
            raise CheckpointError(
                f"{index}: expected in {shard} what the index says, got a difference in "
                f"{', '.join(sorted(differing))}; export or copy all of them again"
            )
        found |= arrays
    return found


def _read_index(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(
            f"{index}: expected an index in JSON, got {error}; export or copy it again"
        ) from error
    places = content.get("weight_map") if isinstance(content, dict) else None
    # with_name accepts only a plain file name, so every file is in the directory of the index.
    named = isinstance(places, dict) and all(
        isinstance(file, str) and file.endswith(_SUFFIX) and Path(file).name == file
        for file in places.values()
    )
    if not named:
        raise CheckpointError(
            f"{index}: expected a weight_map of names to files beside it, got "
            f"{tree.spell(content)}; export or copy it again"
        )
    return places  # type: ignore[return-value]
