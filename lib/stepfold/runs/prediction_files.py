"""A folder of predictions: files of rows, written atomically, and an index of their data."""

import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.checkpoint.steps import converted_errors, locked, read_directory, sync
from stepfold.core.processes import agreement, broadcast_from_first
from stepfold.core.transfers import allow_transfers
from stepfold.errors import CheckpointError, refuse
from stepfold.json_files import has_form, read_json

_INDEX = "predictions.json"
_SHARD = re.compile(r"rows-\d{12}-\d{12}\.npz")
_PART = ".part"  # ends the names of incomplete files
_ADVICE = "make room or change the permission, and call predict again, which continues"


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


_FORM = {
    "format": lambda value: value == 1,
    "state": _is_dict,
    "data": _is_dict,
    "outputs": _is_dict,
    "rows?": lambda value: type(value) is int,
}


class PredictionFiles:
    """The files in a folder. All processes call the methods, and process 0 writes.

    Rows are buffered until they fill a file. The file gets its name once it is on disk, so that all
    files with such names are complete, and a kill loses at most the rows of one file. The index is
    written before the first of them.

    Attributes:
      rows: the number of rows in the files.
      is_complete: whether earlier calls have written all rows.
    """

    def __init__(self, path: Path, shard_rows: int) -> None:
        self._path, self._shard_rows = path, shard_rows
        self._writes = jax.process_index() == 0
        self._buffer: list[dict[str, np.ndarray]] = []
        self._buffered = self.rows = 0
        self._index: dict[str, Any] = {}
        self._ranges: list[list[int]] = []  # of the rows of each file
        self.is_complete = self._is_checked = False

    @classmethod
    @contextmanager
    def opened(cls, to: Any, shard_rows: int) -> Iterator["PredictionFiles"]:
        """Open a folder, to which no other call may write in the meantime."""
        with ExitStack() as stack:
            with agreement("predict: not started"):
                is_first = jax.process_index() == 0
                files = cls(read_directory(to, make=is_first), shard_rows)
                if is_first:
                    stack.enter_context(_lock(files._path))
                    files._read()
            found: list[Any] = [files._ranges, files.is_complete]
            files._ranges, files.is_complete = broadcast_from_first(found)
            files.rows = files._ranges[-1][1] if files._ranges else 0
            yield files

    def _read(self) -> None:
        """Read what an earlier call has left, and delete its incomplete files."""
        with converted_errors(self._path, "cannot be read", _ADVICE):
            for part in self._path.glob(f".*{_PART}"):
                part.unlink()
            files = sorted(name for name in os.listdir(self._path) if _SHARD.fullmatch(name))
            has_index = (self._path / _INDEX).exists()
        if files and not has_index:
            got = f"{files[0]} without {_INDEX}"
            refuse("to", "a folder of predict, or an empty one", got, "give another folder")
        row = 0
        for name in files:
            start, stop = map(int, re.findall(r"\d+", name))
            if start != row:
                raise CheckpointError(
                    f"to: {self._path} has no row {row} before {name}; delete the files of later "
                    "rows, which are then predicted again"
                )
            self._ranges.append([start, stop])
            row = stop
        if has_index:
            self._read_index()
            # The last files of complete ones may be deleted, to predict their rows again.
            self.is_complete = self._index.get("rows") == row
        for name, (start, stop) in zip(files, self._ranges, strict=True):
            self._check_file(self._path / name, stop - start, is_last=name == files[-1])

    def _read_index(self) -> None:
        path = self._path / _INDEX
        with converted_errors(path, "cannot be read", _ADVICE):
            try:
                self._index = read_json(path)
                is_index = has_form(self._index, _FORM)
            except ValueError:
                is_index = False
        if not is_index:
            advice = "delete the folder, or give another"
            refuse(path, "an index of predict", "another file", advice, kind=CheckpointError)

    def _check_file(self, path: Path, rows: int, *, is_last: bool) -> None:
        """Read a file, which a disk fault or a power loss may have damaged."""
        damage = ""
        with converted_errors(path, "cannot be read", _ADVICE):
            try:
                # np.load leaves a damaged file open that it opens itself.
                with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                    form = {name: _form_of(arrays[name]) for name in arrays.files}
                    counts = {len(arrays[name]) for name in arrays.files}
                if form != self._index["outputs"] or counts != {rows}:
                    damage = "other arrays"
            except (ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
                damage = f"a damaged file: {error}"
        if damage:
            files, whose = ("it", "its") if is_last else ("it and the files after it", "their")
            advice = f"delete {files}, and {whose} rows are predicted again"
            refuse(path, f"{rows} rows", damage, advice, kind=CheckpointError)

    def check(self, state: Mapping[str, int], data: Mapping[str, Any]) -> None:
        """Refuse predictions of another state or of other data."""
        identity = json.loads(json.dumps({"state": state, "data": data}))
        with agreement("predict: not started"):
            if self._index:
                old = {f"state/{name}": bits for name, bits in self._index["state"].items()}
                new = {f"state/{name}": bits for name, bits in state.items()}
                self._compare("state", old, new)
                self._compare("data", *_comparable(self._index["data"], identity["data"]))
        if self._writes and not self._index:
            self._index = {"format": 1, **identity}

    def _compare(self, what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        differing = [name for name in {**new, **old} if new.get(name) != old.get(name)]
        if differing:
            more = ", …" * (len(differing) > 3)
            got = f"one whose {', '.join(differing[:3])}{more} differ"
            advice = "give another folder, or delete this one"
            refuse("to", f"a folder of predictions of the same {what}", got, advice)

    def add(self, outputs: Any) -> None:
        """Add rows, and write those that fill a file."""
        arrays = {name or "output": leaf for name, leaf in tree.named_leaves(outputs)}
        if not self._is_checked:
            self._is_checked = True
            with agreement("predict: not started"):
                self._check_outputs(arrays, len(jax.tree.leaves(outputs)))
        self._buffer.append(arrays if self._writes else {})
        self._buffered += len(next(iter(arrays.values())))
        while self._buffered >= self._shard_rows:
            self._write(self._shard_rows)

    def _check_outputs(self, arrays: Mapping[str, np.ndarray], count: int) -> None:
        for name, array in arrays.items():
            if array.dtype.isbuiltin != 1:  # numpy's files have no name for bfloat16
                advice = "cast it in the step"
                refuse(f"outputs/{name}", "a dtype of numpy's", f"{array.dtype}", advice)
        if len(arrays) < count:
            refuse("outputs", "outputs with different paths", f"{sorted(arrays)}", "rename some")
        if not self._writes:
            return
        form = {name: _form_of(array) for name, array in arrays.items()}
        if "outputs" in self._index:
            self._compare("outputs", self._index["outputs"], form)
        else:
            self._index["outputs"] = form
            self._write_index()

    def finish(self) -> list[Path]:
        """Write the remaining rows and a complete index; return the paths of the files."""
        if self._buffered:
            self._write(self._buffered)
        with agreement("predict: the index is not written"):
            if self._writes and self._index.get("rows") is None:
                self._index["rows"] = self.rows
                self._write_index()
            elif self._writes and self._index["rows"] != self.rows:
                expected, got = f"{self._index['rows']} rows, as before", f"{self.rows}"
                refuse("to", expected, got, "give another folder, or delete this one")
        return [self._path / _name(*each) for each in self._ranges]

    def _write(self, count: int) -> None:
        stop = self.rows + count
        name = _name(self.rows, stop)
        with agreement(f"predict: {name} is not written"):
            if self._writes:
                names = self._buffer[0]
                joined = {name: np.concatenate([b[name] for b in self._buffer]) for name in names}
                self._buffer = [{name: array[count:] for name, array in joined.items()}]
                head = {name: array[:count] for name, array in joined.items()}
                _replace(self._path / name, lambda file: _write_arrays(file, head))
        self._ranges.append([self.rows, stop])
        self.rows = stop
        self._buffered -= count

    def _write_index(self) -> None:
        content = json.dumps(self._index, indent=1).encode()
        _replace(self._path / _INDEX, lambda file: file.write(content))


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with locked(path, alone=True) as held:
        if held is False:
            raise CheckpointError(
                f"to: another call of predict writes to {path}; wait for it, or give another folder"
            )
        yield


def _name(start: int, stop: int) -> str:
    return f"rows-{start:012}-{stop:012}.npz"


def _form_of(array: np.ndarray) -> list[Any]:
    return [str(array.dtype), list(array.shape[1:])]


def _comparable(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what to compare of two descriptions: first batches only if they have equal sizes."""
    is_equal = old["first"][0] == new["first"][0]
    return [{**each, "first": each["first"] if is_equal else None} for each in (old, new)]


def _replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file under another name, wait until it is on disk, and rename it."""
    part = path.with_name(f".{path.name}{_PART}")
    with converted_errors(path, "cannot be written", _ADVICE):
        try:
            with part.open("wb") as file:
                write(file)
            sync(part)
            part.replace(path)
            sync(path.parent)
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise


def _write_arrays(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a file as `np.savez` does, without the time, so that equal rows make equal bytes."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)


def fingerprint(arrays: Any) -> dict[str, int]:
    """Compute 32 bits of each array in a tree, by its path.

    They are sums of hashed integers, so they do not depend on how the arrays are sharded. If one
    value changes, they change for certain, and otherwise almost certainly.
    """
    names = [name for name, _ in tree.named_leaves(arrays)]
    if not names:
        return {}
    with allow_transfers("host_to_device"):
        bits = _fingerprints(jax.tree.leaves(arrays))
    return dict(zip(names, jax.device_get(bits).tolist(), strict=True))


@jax.jit
def _fingerprints(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([_fingerprint(leaf) for leaf in leaves])


def _fingerprint(leaf: jax.Array) -> jax.Array:
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)
    words = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
    position = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        indices = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        position = position * np.uint32(size) + indices
    # The last step of MurmurHash3, which maps different words to different ones.
    mixed = words ^ (position * np.uint32(0x9E3779B1))
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE35)
    total: jax.Array = (mixed ^ (mixed >> 16)).sum(dtype=jnp.uint32)
    return total
