"""The manifest of a checkpoint: every leaf, the checksum of every shard, and the step's metadata.

Each process writes its own manifest, since only it holds its shards. orbax stores no checksums of
values, so a flipped bit is restored as a different number. The manifests detect it. They are JSON
files, preceded by a line with their own checksum.
"""

import errno
import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from stepfold import tree
from stepfold.checkpoint.checksums import add_checksum, without_checksum
from stepfold.checkpoint.leaves import (
    STORED,
    Leaf,
    Region,
    StoredArray,
    bytes_of,
    checksum,
    copy_array,
    describe_arrays,
    find_arrays,
    from_json,
    take_arrays,
    to_json,
)
from stepfold.checkpoint.steps import Best, check_regular, converted_errors, sync
from stepfold.core.validation import read_instance, read_integer
from stepfold.errors import CheckpointError, refuse

FORMAT = 2  # in 1, the metadata was named "words", and had no arrays
STATE = "state"  # the subdirectory of a step that holds everything, as an orbax item
LEAVES, FILES = "leaves-{}.json", "files.json"
LATER = "later.json"  # metrics and extra added after the commit; not listed in files.json
ARRAYS, LATER_ARRAYS = "arrays-{}", "later-{}"  # the arrays in the metadata, and in LATER
_UPGRADE = "it was saved by a newer stepfold: upgrade with pip install -U stepfold"
LARGEST = 1 << 30  # bytes of a manifest
MISSING = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
_KEY_SIZES = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}  # of jax; others are the user's own

Shards = Mapping[str, Mapping[Region, Any]]


class DamageError(CheckpointError):
    """The stored data is damaged or incomplete; another step may be valid."""


class NewerError(CheckpointError):
    """The checkpoint has the format of a newer stepfold."""


class ForeignError(CheckpointError):
    """The directory is not, or no longer, a stepfold checkpoint; it is left unchanged."""


class NoManifestError(ForeignError):
    """The directory has no manifest: another program has saved it, if it is a checkpoint."""


class StepMetadata(NamedTuple):
    """Metadata of a checkpoint.

    To save, `data` and `extra` are plain JSON with numpy arrays in it. After reading, they are the
    values that were saved, with a `StoredArray` for each array.

    `awaits` has the names of evaluations that another process makes of the step. `identity` is set
    when a step is read: a digest of the values that process 0 saved, the same for equal states.
    """

    step: int
    data: Any = None
    metrics: Mapping[str, Any] | None = None
    extra: Any = None
    best: Best | None = None
    requested: bool = False  # rather than scheduled
    awaits: Sequence[str] = ()
    identity: str = ""


class Manifest(NamedTuple):
    """The merged manifests of all processes of a step."""

    metadata: StepMetadata
    leaves: dict[str, Leaf]
    shards: dict[str, dict[Region, StoredArray]]
    data: list[Any]
    bytes: int
    location: Any = None  # a folder and its objects' size in object storage, or `StepLocations`

    @property
    def has_position(self) -> bool:
        """Whether `position` returns one, on this number of processes."""
        is_shared = all(position == self.data[0] for position in self.data)
        return is_shared or len(self.data) == jax.process_count()

    def position(self) -> Any:
        """Return the data position of this process, or the one that all processes share."""
        if not self.has_position:
            expected = f"{len(self.data)} processes, each with the position it saved"
            advice = f"start {len(self.data)}, or use sf.batches, whose position all share"
            refuse("data", expected, f"{jax.process_count()}", advice, kind=CheckpointError)
        # Shared by all if the number of processes differs.
        return self.data[jax.process_index() % len(self.data)]

    @property
    def arrays(self) -> dict[str, StoredArray]:
        """The arrays in the positions and in `extra`, by their paths."""
        data = self.data[0] if len(self.data) == 1 else self.data
        return find_arrays(data, "data") | find_arrays(self.metadata.extra, "extra")


# Writing


def step_metadata(
    state: Any,
    *,
    step: int | None,
    data: Any,
    metrics: Mapping[str, Any] | None,
    extra: Any,
    best: Best | None = None,
    awaits: Sequence[str] = (),
) -> StepMetadata:
    """Validate the values saved next to a state, and copy them."""
    if hasattr(data, "get_state"):
        data = data.get_state()
    metrics = {} if metrics is None else metrics
    read_instance("metrics", metrics, Mapping, "numbers by name")
    step = getattr(state, "step", None) if step is None else step
    if step is None:
        refuse("step", "a number", "none, and the state has no `step`", "give step=…")
    numbers = {name: _number(f"metrics/{name}", value) for name, value in metrics.items()}
    step = read_integer("step", step, minimum=0)
    if not _is_count(step):
        refuse("step", "an integer below 2**63", f"{step}")
    return StepMetadata(
        step=step,
        data=to_json(data, "data", copy_array),
        metrics=to_json(numbers, "metrics"),
        extra=to_json(extra, "extra", copy_array),
        best=best,
        awaits=[*awaits],
    )


def _number(name: str, value: Any) -> float:
    if not isinstance(value, str | bytes):  # float("1") is a number
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    refuse(name, "a number", tree.describe_value(value))


def process_manifest(
    metadata: StepMetadata,
    leaves: Mapping[str, Leaf],
    shards: Shards,
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Describe the part of this process, with the checksums of its shards.

    Also return the arrays in the metadata, which are the content of the stream `ARRAYS`.
    """
    process, processes = jax.process_index(), jax.process_count()
    arrays: list[np.ndarray] = []
    fields = {"step": metadata.step, "data": take_arrays(metadata.data, arrays)}
    if process == 0:
        fields = metadata._asdict() | fields | {"extra": take_arrays(metadata.extra, arrays)}
        del fields["identity"]
        if not metadata.awaits:  # an earlier stepfold does not know the name
            del fields["awaits"]
    content = {
        "format": FORMAT,
        "processes": processes,
        "metadata": fields,
        "leaves": leaves if process == 0 else {},
        "shards": [
            [name, part, checksum(array)]
            for name, parts in shards.items()
            for part, array in parts.items()
        ],
        "arrays": describe_arrays(arrays),
    }
    return content, arrays


def add_metadata(
    store: Any, step: int, folder: str, metrics: Mapping[str, Any], extra: Any
) -> None:
    """Atomically add metrics to a step in a folder of a store, and replace its `extra`."""
    known, name = store.read_metadata(step).metrics or {}, f"{folder}{LATER}"
    number = (store.read_note(name) or {}).get("stream", 0) + 1
    stream = f"{folder}{LATER_ARRAYS}".format
    content, arrays = later_content({**known, **metrics}, extra, number)
    if arrays:
        store.write_stream(stream(number), arrays)
    store.write_note(name, content)
    # Keep the previous one, which another process may be reading.
    store.delete_stream(stream(number - 2))


def later_content(
    metrics: Mapping[str, Any], extra: Any, number: int
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Describe what is added to a step, and return its arrays, the content of a stream."""
    arrays: list[np.ndarray] = []
    content = {"metrics": {**metrics}, "extra": take_arrays(extra, arrays)}
    if arrays or number > 1:
        content |= {"stream": number, "arrays": describe_arrays(arrays)}
    return content, arrays


def write_leaves(
    folder: Path,
    metadata: StepMetadata,
    leaves: Mapping[str, Leaf],
    shards: Shards,
) -> None:
    """Write the manifest of this process, and the arrays in its metadata."""
    process = jax.process_index()
    content, arrays = process_manifest(metadata, leaves, shards)
    write_checked(folder / LEAVES.format(process), content)
    if arrays:
        write_stream(stream_path(folder, ARRAYS.format(process)), arrays)


def stream_path(folder: Path | str, stream: str) -> Path:
    """Return the path of the file that a directory has for a stream."""
    return Path(folder) / f"{stream}.bin"


def write_stream(path: Path, arrays: Iterable[np.ndarray]) -> None:
    """Write arrays one after the other."""
    with path.open("wb") as file:
        for array in arrays:
            file.write(bytes_of(array))


def write_files(folder: Path) -> None:
    """Record and sync all files once written; a step without this record is incomplete."""
    paths = sorted(folder.rglob("*"))
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size for path in paths if path.is_file()
    }
    write_checked(folder / FILES, files)
    for path in (*paths, folder / FILES, folder):
        sync(path)


# Reading


# A valid checksum does not make the content valid: other software may have written it.


@contextmanager
def checked_form(step: Path | str) -> Iterator[None]:
    """Convert the errors of manifests with an intact checksum but unexpected content."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise DamageError(f"{step}: the manifests are not those of stepfold: {error!r}") from error


def check_format(content: Any, where: Path | str) -> Any:
    """Return the content if this version knows its format."""
    _expect(_is_count(content["format"]), "format", content["format"])
    if content["format"] > FORMAT:
        got = f"{content['format']}"
        refuse(where, f"format {FORMAT} or older", got, _UPGRADE, kind=NewerError)
    return content


def check_process(content: Any, where: Path | str) -> Any:
    """Return the manifest of a process, converted to the current format."""
    if check_format(content, where)["format"] < 2:
        content |= {"metadata": content["words"], "arrays": []}
    return content


def metadata_of(first: Any, later: Any, where: Path | str, step: int) -> StepMetadata:
    """Return the metadata of the manifest of process 0, with the values added after the commit."""
    later, arrays = _decode_later(later), stored_arrays(ARRAYS.format(0), first["arrays"])
    fields = {"requested": False, "awaits": []} | first["metadata"]
    fields |= {name: from_json(fields[name], arrays) for name in ("data", "extra")} | later
    known = [name for name in StepMetadata._fields if name != "identity"]
    if unknown := fields.keys() - {*known}:
        expected = f"metadata of {', '.join(known)}"
        refuse(where, expected, f"{', '.join(sorted(unknown))} as well", _UPGRADE, kind=NewerError)
    _expect(not later.keys() - {"metrics", "extra"}, LATER, list(later))
    _expect(_is_count(fields["step"]), "step", fields["step"])
    if fields["step"] != step:
        got = f"a copy of that of step {fields['step']}"
        advice = "give the directory its number, or move it elsewhere"
        refuse(where, f"the checkpoint of step {step}", got, advice, kind=ForeignError)
    _expect(type(fields["requested"]) is bool, "requested", fields["requested"])
    metrics, best, awaits = fields["metrics"], fields["best"], fields["awaits"]
    are_names = isinstance(awaits, list) and all(isinstance(name, str) for name in awaits)
    _expect(are_names, "awaits", awaits)
    for name, value in (metrics or {}).items():
        name.encode()
        _expect(type(value) in (int, float), "a metric", value)
        float(value)  # raises for an integer beyond the range of floats
    is_best = isinstance(best, list) and [type(item) for item in best] == [str, str]
    _expect(best is None or (is_best and best[1] in ("min", "max")), "best", best)
    saved = json.dumps([first["processes"], first["shards"]]).encode()
    identity = hashlib.sha256(saved).hexdigest()[:16]
    return StepMetadata(**fields | {"best": best and (best[0], best[1]), "identity": identity})


def _decode_later(later: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values added after the commit, with the arrays that were written for them."""
    values, number = dict(later), later.get("stream", 0)
    _expect(_is_count(number), "stream", number)
    arrays = stored_arrays(LATER_ARRAYS.format(number), values.pop("arrays", []))
    values.pop("stream", None)
    return values | {"extra": from_json(values["extra"], arrays)} if "extra" in values else values


def stored_arrays(stream: str, table: Any) -> dict[int, StoredArray]:
    """Return the arrays of a stream by their numbers."""
    arrays: dict[int, StoredArray] = {}
    offset = 0
    for number, (shape, dtype, crc) in enumerate(table):
        leaf = read_leaf(f"{number} of {stream}", shape, dtype, None)
        _expect(_is_count(crc), f"a checksum in {stream}", crc)
        arrays[number] = StoredArray(leaf, crc, stream, offset)
        offset += leaf.bytes
    return arrays


def merge_processes(processes: Sequence[Any], metadata: StepMetadata) -> Manifest:
    """Merge the manifests of all processes."""
    leaves = {name: read_leaf(name, *leaf) for name, leaf in processes[0]["leaves"].items()}
    _expect(leaves, "leaves", leaves)
    shards: dict[str, dict[Region, StoredArray]] = {name: {} for name in leaves}
    total, data = 0, list[Any]()
    for number, process in enumerate(processes):
        _expect(process["processes"] == len(processes), "processes", process["processes"])
        own = process["metadata"]
        _expect(own["step"] == metadata.step, "step", own["step"])
        arrays = stored_arrays(ARRAYS.format(number), process["arrays"])
        data.append(from_json(own["data"], arrays))
        offset = 0
        for name, index, crc in process["shards"]:
            part = tuple((start, stop) for start, stop in index)
            _expect(_is_count(crc) and part not in shards[name], f"a shard of {name}", part)
            shard = Leaf(tuple(stop - start for start, stop in part), leaves[name].dtype)
            shards[name][part] = StoredArray(shard, crc, f"{number}", offset)
            offset += shard.bytes
        total += offset
    for name, leaf in leaves.items():
        _check_coverage(name, leaf, shards[name])
    merged = Manifest(metadata, leaves, shards, data, total)
    total += sum(array.leaf.bytes for array in merged.arrays.values())
    return merged._replace(bytes=total)


def read_leaf(name: str, shape: Any, dtype: Any, key: Any) -> Leaf:
    """Return a leaf of a manifest, if it is valid."""
    leaf = Leaf(tuple(shape), dtype, key)
    name.encode()
    is_valid: Any = all(map(_is_count, leaf.shape)) and dtype in STORED
    is_valid = is_valid and math.prod(size or 1 for size in leaf.shape) < 1 << 58
    if is_valid and key is not None:  # its last axis holds the words of one key
        is_valid = isinstance(key, str) and dtype == "uint32" and leaf.shape
        is_valid = is_valid and _KEY_SIZES.get(key, leaf.shape[-1]) == leaf.shape[-1]
    _expect(is_valid, f"leaf {name}", [shape, dtype, key])
    return leaf


def _check_coverage(name: str, leaf: Leaf, parts: Collection[Region]) -> None:
    """Check that the shards of a leaf form a grid, which covers every element exactly once."""
    if 0 in leaf.shape:  # nothing is stored
        return
    cells = 1
    for axis, size in enumerate(leaf.shape):
        intervals = sorted({part[axis] for part in parts})
        cells *= len(intervals)
        ends = [0, *(end for interval in intervals for end in interval), size]
        is_exact = all(map(_is_count, ends)) and ends[::2] == ends[1::2]
        _expect(is_exact and len(set(ends)) == len(intervals) + 1, f"shards of {name}", intervals)
    is_exact = len(parts) == cells and all(len(part) == len(leaf.shape) for part in parts)
    _expect(is_exact, f"shards of {name}", list(parts))


def _expect(is_valid: object, what: str, got: Any) -> None:
    if not is_valid:
        raise ValueError(f"{what} cannot be {tree.describe_value(got)}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


# JSON files with a checksum


def write_checked(path: Path, content: Any) -> None:
    """Write plain content as JSON, preceded by a line with its checksum."""
    path.write_bytes(encode_checked(content))


def read_checked(path: Path) -> Any:
    """Read what `write_checked` wrote; raise `DamageError` if it is missing or was changed."""
    with converted_errors(path, "cannot be read"):
        try:
            check_regular(path, DamageError, LARGEST)
            content = path.read_bytes()
        except OSError as error:
            if error.errno in MISSING:
                raise DamageError(f"{path.name}: missing") from None
            raise
    return decode_checked(content, path.name)


def encode_checked(content: Any) -> bytes:
    """Encode plain content as JSON, preceded by a line with its checksum."""
    return add_checksum(json.dumps(content).encode())


def decode_checked(content: bytes, name: str) -> Any:
    """Invert `encode_checked`; raise `DamageError` if it was changed."""
    if (text := without_checksum(content)) is None:
        raise DamageError(f"{name}: its checksum does not fit its content")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        refuse(name, "JSON of stepfold", repr(error), kind=DamageError, cause=error)


def read_fields(store: Any, name: str) -> dict[str, Any] | None:
    """Return a note that holds a dict; None if it is missing, damaged, or not a dict."""
    with suppress(DamageError):
        note = store.read_note(name)
        return note if isinstance(note, dict) else None
    return None
