"""What is in a checkpoint: every leaf, the checksum of every shard, and the words beside them.

Each process writes a manifest of its own, since it alone has its shards at hand. What orbax stores
has no checksums over values: a flipped bit comes back as another number. These have, and they are
of the numbers as they were in memory, so that they hold the way to the disk to account as well.
"""

import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.checkpoint.sealed import DamageError, opened, seal, unreadable, unseal
from stepfold.errors import CheckpointError, ConfigError

FORMAT = 1
STATE = "state"  # the folder of a step that everything is in: the arrays, as orbax has them
_LEAVES, _FILES = "leaves-{}.json", "files.json"
_LATER = "later.json"  # beside them, and none of the files there are: what was measured since

Region = tuple[tuple[int, int], ...]

# What zarr, in which orbax stores, has a name for.
_STORED = (
    *("bool", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)


class NewerError(CheckpointError):
    """Say that a checkpoint is of a version to come."""


class ForeignError(CheckpointError):
    """Say that a folder is no checkpoint of ours, or no longer, and is left as it is."""


class Leaf(NamedTuple):
    """What is known of a leaf without reading it; `key` is the kind of a typed PRNG key."""

    shape: tuple[int, ...]
    dtype: str
    key: str | None = None

    def __str__(self) -> str:
        """Spell it as `tree.spell` does an array."""
        shape = self.shape if self.key is None else self.shape[:-1]
        kind = self.dtype if self.key is None else f"key<{self.key}>"
        return f"{kind}[{','.join(map(str, shape))}]"

    @property
    def bytes(self) -> int:
        """Count the bytes of all its elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * jnp.dtype(self.dtype).itemsize


class Words(NamedTuple):
    """What a checkpoint holds besides arrays; all of it is plain."""

    step: int
    data: Any = None
    metrics: Mapping[str, Any] | None = None
    extra: Any = None
    best: tuple[str, str] | None = None


class Manifest(NamedTuple):
    """What all the processes' manifests of a step say together."""

    words: Words
    leaves: dict[str, Leaf]
    shards: dict[str, dict[Region, int]]
    data: list[Any]
    bytes: int

    def position(self) -> Any:
        """Give the position in the data of this process, where each has one of its own."""
        if all(position == self.data[0] for position in self.data):
            return opened(self.data[0])
        if len(self.data) != jax.process_count():
            raise CheckpointError(
                f"data: expected {len(self.data)} processes, each with the position it saved, got "
                f"{jax.process_count()}; resume on as many, or use batches whose position does not "
                "depend on the process (stepfold.batches)"
            )
        return opened(self.data[jax.process_index()])


def arrays_of(state: Any) -> dict[str, Any]:
    """Name the leaves of a state, as arrays that nobody else writes to.

    Typed keys become the numbers that they are made of.

    Raises:
      ConfigError: if a leaf is no array, or two are called the same.
    """
    arrays: dict[str, Any] = {}
    seen: dict[str, str] = {}
    for name, leaf in tree.named_leaves(state):
        other = seen.setdefault(stored_name(name), name)
        if other is not name:
            raise ConfigError(
                f"state: expected a name of its own for every leaf, got {other!r} and {name!r}, "
                "which are stored under one; rename a key"
            )
        if not tree.is_data(leaf):
            raise ConfigError(
                f"{name}: expected an array, got {tree.spell(leaf)}; keep functions and settings "
                "out of the state, or give them as extra=…"
            )
        arrays[name] = _numbers(name, leaf)
        if str(arrays[name].dtype) not in _STORED:
            raise ConfigError(
                f"{name}: expected a dtype that can be stored ({', '.join(_STORED)}), got "
                f"{tree.spell(leaf)}; cast it"
            )
    _check_branches(arrays)
    if not any(array.size for array in arrays.values()):
        raise ConfigError("state: expected arrays to save, got none with elements")
    return arrays


def _check_branches(arrays: Mapping[str, Any]) -> None:
    for name in arrays:
        parts = name.split("/")
        for length in range(1, len(parts)):
            branch = "/".join(parts[:length])
            if branch in arrays:
                raise ConfigError(
                    f"state: expected a leaf or a branch at {branch!r}, got both, since there is "
                    f"{name!r}; rename a key"
                )


def leaves_of(state: Any) -> dict[str, Leaf]:
    """Tell how each leaf is stored, by name."""
    return {name: leaf_of(leaf) for name, leaf in tree.named_leaves(state)}


def stored_name(name: str) -> str:
    """Give the name that orbax stores a leaf under: it joins by dots."""
    return name.replace("/", ".")


def _numbers(name: str, leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        if isinstance(leaf, np.ma.MaskedArray):
            raise ConfigError(
                f"{name}: expected an array, got a masked one; save its data and its mask"
            )
        made = np.array(leaf)  # a copy, since numpy's arrays may change while they are written
        return made.astype(made.dtype.newbyteorder("="), copy=False)
    if jax.process_count() > 1 and leaf.is_fully_addressable:
        raise ConfigError(
            f"{name}: expected an array that all {jax.process_count()} processes have their part "
            "in, got one of this process alone; give the state a plan (init_state(…, "
            "sharding=plan)), or place it (place(state, plan))"
        )
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def is_key(leaf: Any) -> bool:
    """Tell whether a leaf is an array of typed PRNG keys, or an abstract one."""
    return tree.is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def impl_of(key: Any) -> str:
    """Name the kind of a key, of an abstract one too, which `jax.random.key_impl` does not take."""
    impls: list[str] = []
    jax.eval_shape(lambda key: impls.append(str(jax.random.key_impl(key))), key)
    return impls[0]


def leaf_of(leaf: Any) -> Leaf:
    """Tell how a leaf is stored, of an abstract one too."""
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return Leaf(data.shape, str(data.dtype), impl_of(leaf))
    if not tree.is_array(leaf):
        leaf = np.asarray(leaf)
    return Leaf(tuple(leaf.shape), leaf.dtype.name)


def shards_of(array: Any) -> dict[Region, Any]:
    """Give the parts of an array that this process is to account for, on the host.

    What has several copies is counted once, and what numpy holds, by the first process.
    """
    if not isinstance(array, jax.Array):
        return {region((), array.shape): array} if jax.process_index() == 0 else {}
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    return {region(shard.index, array.shape): np.asarray(shard.data) for shard in shards}


def region(index: Sequence[slice], shape: Sequence[int]) -> Region:
    """Spell an index of slices out, with a start and a stop for each axis."""
    full = [*index, *[slice(None)] * (len(shape) - len(index))]
    return tuple(part.indices(size)[:2] for part, size in zip(full, shape, strict=True))


def checksum(array: np.ndarray) -> int:
    """Compute the crc32 of an array's elements in C order.

    >>> checksum(np.arange(4, dtype=np.int32)) == checksum(np.arange(8, dtype=np.int32)[:4])
    True
    """
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


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
    """Write down which files there are, when all is written; a step without this is half a step."""
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / _FILES).write_bytes(seal(files))


def write_later(step: Path, metrics: Mapping[str, Any], extra: Any) -> None:
    """Write down what was measured of a step after it was saved, at once or not at all."""
    folder = step / STATE
    known = {**(read_words(step).metrics or {}), **metrics}
    new = folder / f"{_LATER}.new"
    new.write_bytes(seal({"metrics": known, "extra": extra}))
    os.replace(new, folder / _LATER)


def read_words(step: Path) -> Words:
    """Read what a step holds beside its arrays; raises as `read_manifest` does."""
    return _words(step / STATE, _first(step)[0])


def read_manifest(step: Path) -> Manifest:
    """Read what a step holds, without its arrays.

    Raises:
      DamageError: if a file is missing, of another size, or a manifest not as it was written.
      CheckpointError: if another program, or a newer stepfold, wrote it.
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
    """Check that the files are there; read the manifest that says most, and count their bytes."""
    folder = step / STATE
    if not is_ours(step):
        raise ForeignError(
            f"{step}: expected a checkpoint that stepfold saved, got a folder without a manifest; "
            "what orbax saved by itself is read with orbax, and saved again with stepfold.save"
        )
    first = _read_process(folder, 0)
    return first, _whole(folder)


def is_ours(step: Path) -> bool:
    """Tell whether stepfold saved a step, and not orbax by itself, or nobody."""
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
    """Check by name and size that all of the files are there; give the bytes of all of them."""
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
