"""Parameters as safetensors, the format of torch and Hugging Face.

There is one file, or several with an index.

An export replaces the one before atomically. Files are written to a temporary directory, synced and
renamed, the index last. Shards never reuse the name of an existing file: the old index, still in
place, would refer to the new bytes.
"""

import errno
import glob
import itertools
import json
import os
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from stepfold import tree
from stepfold.checkpoint.leaves import (
    Region,
    as_slices,
    bytes_of,
    converted,
    empty,
    leaf_of,
    make_leaf,
    overlap,
    region,
    regions_of,
    within,
)
from stepfold.checkpoint.names import LeafSlice, NamedArray, NameMap, array_of_leaf
from stepfold.checkpoint.restore import match
from stepfold.checkpoint.steps import check_regular, sync
from stepfold.core.processes import agreement
from stepfold.core.state import check_not_donated
from stepfold.core.validation import absolute_path, read_function, read_integer
from stepfold.errors import CheckpointError, ConfigError, TreeMismatchError, refuse
from stepfold.internals import texts

_SUFFIX, _INDEX = ".safetensors", ".safetensors.index.json"
_CODES = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64",
}  # fmt: skip
_DTYPES = {code: name for name, code in _CODES.items()}


def export_params(
    path: str | os.PathLike[str],
    params: Any,
    *,
    names: Callable[[str], str] | NameMap | None = None,
    shard_size: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Export parameters as safetensors, for torch, Hugging Face and other readers.

    Files follow the layout and names of Hugging Face. Up to `shard_size` there is one file; beyond,
    there are files `model-00001-of-00003.safetensors` and so on, and an index
    `model.safetensors.index.json`. The host holds the arrays of one file at a time. Arrays sharded
    over several processes are gathered one after another. In that case every process has to call
    this: process 0 writes, and all processes return, or raise, when it has finished. Otherwise
    process 0 writes its own arrays and no process waits for it.

    The export is atomic: after an interruption a reader finds the previous export or this one,
    never a mix. Shards never take the name of an existing file (they become
    `model-00001-of-00003.2.safetensors`). Files of an earlier export to the same path are removed
    at the end.

    safetensors has no checksums: a byte that changes on disk changes a parameter.

    Args:
      path: a file ending in ``.safetensors``, or a directory, which gets a `model.safetensors`.
      params: a tree of arrays, without PRNG keys and functions; filter an equinox module by
        `eqx.is_array` first.
      names: a function from the path of an array, such as `layers/0/kernel`, to its name in the
        file, or a `NameMap`, which also transposes, stacks and joins arrays. By default `/` becomes
        ``.``, as in torch.
      shard_size: maximum bytes of arrays per file, and in memory; a larger array gets its own file.
      metadata: text for the header of each file. `format` defaults to "pt": transformers rejects
        files without a format that it knows, and loads this one into torch.

    Raises:
      ConfigError: if an argument is invalid, two arrays have the same name, safetensors does not
        support a dtype, or the safetensors package is not installed.
      CheckpointError: if the files cannot be written.

    >>> import jax.numpy as jnp, os, safetensors.numpy, stepfold as sf, tempfile
    >>> params = {"kernel": jnp.arange(6.0).reshape(3, 2), "bias": jnp.zeros(2)}
    >>> as_torch = params | {"kernel": params["kernel"].T}
    >>> file = os.path.join(tempfile.mkdtemp(), "linear.safetensors")
    >>> names = lambda path: path.replace("kernel", "weight")
    >>> sf.checkpoint.export_params(file, as_torch, names=names)
    >>> {name: array.shape for name, array in sorted(safetensors.numpy.load_file(file).items())}
    {'bias': (2,), 'weight': (2, 3)}

    which `torch.nn.Linear(3, 2).load_state_dict(safetensors.torch.load_file(file))` takes.
    """
    _import_safetensors()
    target = _file_of(path)
    shard_size = read_integer("shard_size", shard_size)
    check_not_donated(params, "params")
    if metadata is not None and not isinstance(metadata, Mapping):
        refuse("metadata", "text by name", tree.describe_value(metadata))
    header = {"format": "pt", **(metadata or {})}
    for name, text in header.items():
        if not isinstance(name, str) or not isinstance(text, str):
            refuse("metadata", "text for text", f"{name!r}: {text!r}")
    leaves = _leaves_of("export_params: params", params)
    named = _named_arrays("export_params: params", leaves, names, with_copies=True)
    for where, leaf in leaves.items():
        _check_exportable(where, leaf)
    shards = _split(named, shard_size)
    # Lazy. A `map` continues after an error, unlike a generator.
    arrays = map(partial(_assemble, leaves), itertools.chain(*shards))
    together = not all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves.values())
    with agreement(f"{target}: not exported") if together else nullcontext():
        try:
            if jax.process_index() == 0:
                _replace_files(target, shards, arrays, header)
        except OSError as error:
            reason = error.strerror or error
            advice = _ADVICE.get(error.errno or 0, "give a path that can be written to")
            raise CheckpointError(
                f"export_params: {target} cannot be written: {reason}; {advice}"
            ) from error
        finally:
            if together:  # every process has to take part in every gather
                deque(arrays, maxlen=0)


def load_params(
    path: str | os.PathLike[str],
    like: Any,
    *,
    names: Callable[[str], str] | NameMap | None = None,
    cast: bool = False,
) -> Any:
    """Load parameters from safetensors, directly into their sharding.

    The files have to hold exactly the leaves of `like`. Each process reads only the parts that the
    shardings of `like` assign to it. Leaves without a sharding go to the default device. Files are
    checked for completeness, but not for changed bytes, since safetensors has no checksums.

    Args:
      path: a file, an index, or a directory with `model.safetensors` or
        `model.safetensors.index.json`. `model.safetensors` takes precedence, as in
        Hugging Face.
      like: a tree of arrays, also abstract ones as from `jax.eval_shape`.
      names: maps the paths of arrays to their names in the file, as for `export_params`.
      cast: convert between float dtypes, and from integers to integer dtypes that hold the values.
        Without it, a different dtype is an error.

    Returns:
      A tree like `like`, with numpy arrays where `like` has numpy arrays and jax arrays elsewhere.
      They share no memory with the files.

    Raises:
      ConfigError: if an argument is invalid, a dtype needs `jax_enable_x64`, or the safetensors
        package is not installed.
      CheckpointError: if a file is missing, unreadable or incomplete.
      TreeMismatchError: if the files do not match `like`; lists every difference.

    >>> import jax, jax.numpy as jnp, stepfold as sf, tempfile
    >>> directory = tempfile.mkdtemp()
    >>> sf.checkpoint.export_params(directory, {"w": jnp.arange(3.0), "b": jnp.ones(())})
    >>> like = jax.eval_shape(lambda: {"w": jnp.zeros(3), "b": jnp.zeros(())})
    >>> sf.checkpoint.load_params(directory, like)["w"]
    Array([0., 1., 2.], dtype=float32)
    """
    _import_safetensors()
    leaves = _leaves_of("load_params: like", like)
    named = _named_arrays("load_params: like", leaves, names)
    for where, leaf in leaves.items():
        _check_wanted(where, leaf)
    arrays = _map_arrays(path)
    _check_match(f"{path}", like, names, named, arrays, cast)
    tied = names.tied.items() if isinstance(names, NameMap) else ()
    sources: dict[str, list[tuple[LeafSlice, str, list[str]]]] = {where: [] for where in leaves}
    for name, array in named.items():
        copies = [copy for copy, original in tied if original == name and copy in arrays]
        for each in array.slices:
            sources[each.path].append((each, name, copies))
    loaded = []
    for where, leaf in leaves.items():
        regions = regions_of(where, leaf_of(leaf), leaf)
        parts = {each: _read(each, leaf, sources[where], arrays) for each in regions}
        loaded.append(make_leaf(where, leaf_of(leaf), leaf, parts))
    structure: Any = jax.tree.structure(like)
    return structure.unflatten(loaded)


def _import_safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ConfigError(
            "safetensors is not installed; run pip install 'stepfold[safetensors]'"
        ) from error
    return safetensors


# Names and arguments


def _leaves_of(argument: str, params: Any) -> dict[str, Any]:
    """Return the leaves of a tree by path, in the order of jax."""
    leaves: dict[str, Any] = {}
    for path, value in tree.named_leaves(params):
        if path in leaves:
            refuse(argument, "one array at each path", f"several at {path!r}", "rename a key")
        leaves[path] = value
    if not leaves:
        refuse(argument, "arrays", f"none: {tree.describe_value(params)}")
    return leaves


def _named_arrays(
    argument: str,
    leaves: Mapping[str, Any],
    names: Callable[[str], str] | NameMap | None,
    *,
    with_copies: bool = False,
) -> dict[str, NamedArray]:
    """Return the arrays of a file by name, which have to be unique."""
    described = {path: leaf_of(value) for path, value in leaves.items()}
    if isinstance(names, NameMap):
        arrays = names.arrays_of(argument, described)
        copies = names.tied.items() if with_copies else ()
        arrays |= {copy: arrays[name]._replace(name=copy) for copy, name in copies}
    else:
        arrays = {}
        if names is not None:
            read_function("names", names, "a function of a path, or a NameMap")
        for path, leaf in described.items():
            name = path.replace("/", ".") if names is None else names(path)
            if isinstance(name, str) and name in arrays:
                raise ConfigError(
                    f"{argument}: {arrays[name].slices[0].path} and {path} would both be called "
                    f"{name!r}; give names=… that tells them apart"
                )
            arrays[name] = array_of_leaf(name, path, leaf)
    for name, array in arrays.items():
        if not isinstance(name, str) or name in ("", "__metadata__"):
            got = f"{name!r}, which safetensors does not allow"
            advice = "put the array into a dict, or give names=…"
            refuse(argument, f"a name for the array at {array.slices[0].path!r}", got, advice)
    return arrays


def _check_exportable(path: str, value: Any) -> None:
    path, got = path or "params", tree.describe_value(value)
    if isinstance(value, jax.core.Tracer):
        refuse(path, "an array", "a tracer", "export outside of jit")
    is_array = isinstance(value, np.ndarray | np.generic | jax.Array)
    if not is_array or isinstance(value, np.ma.MaskedArray):
        refuse(path, "an array", got, "drop it, or make an array of it")
    if value.dtype.name not in _CODES:
        expected = f"a dtype that safetensors has ({', '.join(_CODES)})"
        refuse(path, expected, got, "cast it, or leave it out")


def _check_wanted(path: str, value: Any) -> None:
    path = path or "params"
    if not tree.is_array(value):
        refuse(path, "an array or a jax.ShapeDtypeStruct", tree.describe_value(value))
    mesh = getattr(getattr(value, "sharding", None), "mesh", None)
    if isinstance(mesh, jax.sharding.AbstractMesh):
        advice = "give the shardings of a mesh, as make_sharding does"
        refuse(path, "a sharding over devices", f"one over {mesh}", advice)


def _file_of(path: str | os.PathLike[str]) -> Path:
    """Resolve a path to a file; a directory means the `model.safetensors` in it."""
    if not isinstance(path, str | os.PathLike) or not f"{path}" or "\0" in f"{path}":
        refuse("path", "a path", repr(path))
    if "://" in os.fspath(path):
        refuse("path", "one on a disk", f"{os.fspath(path)}", "copy between there and a disk")
    file = absolute_path("path", path)
    return file if file.suffix == _SUFFIX else file / f"model{_SUFFIX}"


def _index_of(file: Path) -> Path:
    return file.with_name(file.stem + _INDEX)


# Writing


def _split(arrays: Mapping[str, NamedArray], limit: int) -> list[list[NamedArray]]:
    """Fill files in the order of the tree."""
    shards: list[list[NamedArray]] = [[]]
    room = limit
    for array in arrays.values():
        if array.leaf.bytes > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(array)
        room -= array.leaf.bytes
    return shards


def _assemble(leaves: Mapping[str, Any], array: NamedArray) -> np.ndarray[Any, Any]:
    """Make an array of a file, contiguous: safetensors writes other arrays in the wrong order."""
    values = [each.to_theirs(_on_host(leaves[each.path], each.ours)) for each in array.slices]
    if len(values) == 1:
        return np.asarray(values[0], order="C")
    joined = np.empty(array.leaf.shape, array.leaf.dtype)
    for each, value in zip(array.slices, values, strict=True):
        joined[as_slices(each.theirs)] = value
    return joined


def _on_host(value: Any, part: Region) -> np.ndarray[Any, Any]:
    """Fetch a region of an array."""
    if not isinstance(value, jax.Array):
        return np.asarray(value)[as_slices(part)]
    if part != region((), value.shape):
        sizes = [stop - start for start, stop in part]
        starts = [start for start, _ in part]  # dynamic: one program for all layers
        value = jax.lax.dynamic_slice(_with_auto_axes(value), starts, sizes)
    if not value.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(value, tiled=True))
    # np.asarray caches the host copy in the jax.Array; the cache of a temporary copy is freed here.
    return np.asarray(jnp.copy(value))


def _with_auto_axes(array: jax.Array) -> jax.Array:
    """Return the same buffers on a mesh whose axes jax lets us slice along."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or not sharding.mesh.explicit_axes:
        return array
    mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    buffers = [shard.data for shard in array.addressable_shards]
    auto = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return jax.make_array_from_single_device_arrays(array.shape, auto, buffers)


def _replace_files(
    target: Path,
    shards: Sequence[Sequence[NamedArray]],
    arrays: Iterator[np.ndarray[Any, Any]],
    metadata: Mapping[str, str],
) -> None:
    """Atomically replace the previous export to `target`; `arrays` yields those of all shards."""
    folder = target.parent
    folder.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    prefix = f".{target.name}.stepfold-"
    for killed in folder.glob(f"{glob.escape(prefix)}*"):
        shutil.rmtree(killed, ignore_errors=True)  # leaves files and links
    names = [target.name] if len(shards) == 1 else _free_names(target, len(shards))
    index = _index_of(target)
    weight_map: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=folder, prefix=prefix) as temporary:
        for name, shard in zip(names, shards, strict=True):
            _write(Path(temporary, name), {array.name: next(arrays) for array in shard}, metadata)
            weight_map |= {array.name: name for array in shard}
        if len(shards) > 1:
            total = sum(array.leaf.bytes for array in itertools.chain(*shards))
            content = {"metadata": {"total_size": total}, "weight_map": weight_map}
            new = Path(temporary, index.name)
            new.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
            sync(new)
            names.append(index.name)
        for name in names:
            if name == index.name:
                sync(folder)  # persist the new shards before the index that refers to them
            os.replace(Path(temporary, name), folder / name)
    sync(folder)  # persist the new names before the old files are deleted
    shard_name = re.compile(
        rf"{re.escape(target.stem)}-\d{{5}}-of-\d{{5}}(\.\d+)?{re.escape(_SUFFIX)}"
    )
    old_shards = sorted(file.name for file in folder.iterdir() if shard_name.fullmatch(file.name))
    for name in (target.name, index.name, *old_shards):  # the index before the shards in it
        if name not in names:
            (folder / name).unlink(missing_ok=True)


def _free_names(target: Path, count: int) -> list[str]:
    for attempt in itertools.count(1):
        end = f".{attempt}{_SUFFIX}" if attempt > 1 else _SUFFIX
        names = [f"{target.stem}-{i + 1:05d}-of-{count:05d}{end}" for i in range(count)]
        if not any(target.with_name(name).exists() for name in names):
            break
    return names


def _write(
    file: Path, arrays: dict[str, np.ndarray[Any, Any]], metadata: Mapping[str, str]
) -> None:
    safetensors = _import_safetensors()
    file.touch()
    mode = file.stat().st_mode  # the package replaces the file by one that only its owner reads
    try:
        safetensors.numpy.save_file(arrays, file, metadata=dict(metadata))
    except safetensors.SafetensorError as error:
        number = texts.OS_ERROR_NUMBER.search(str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code)) from error
    file.chmod(mode)
    sync(file)


_ADVICE = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there",
    errno.EISDIR: "give a name in it that ends in .safetensors",
    errno.EEXIST: "give a directory, or a file that ends in .safetensors",
    errno.ENOTDIR: "give a directory, or a file that ends in .safetensors",
}


# Reading


def _check_match(
    where: str,
    like: Any,
    names: Callable[[str], str] | NameMap | None,
    named: Mapping[str, NamedArray],
    arrays: Mapping[str, np.ndarray[Any, Any]],
    cast: bool,
) -> None:
    """Check that the files hold the arrays of `named`, and no others."""
    saved = {name: leaf_of(array) for name, array in arrays.items()}
    paths = {name: array.slices[0].path for name, array in named.items()}
    advice = "; names=… maps paths to their names there, and cast=True converts dtypes"
    if isinstance(names, NameMap):
        skipped = {name for name in saved if name in names.tied or names.ignores(name)}
        saved = {name: leaf for name, leaf in saved.items() if name in named or name not in skipped}
        paths = {name: f"{path} ({name})" for name, path in paths.items()}
        like = {
            path: jax.ShapeDtypeStruct(named[name].leaf.shape, jnp.dtype(named[name].leaf.dtype))
            for name, path in paths.items()
        }
        advice = "; correct the rules of the NameMap, ignore names, or convert dtypes by cast=True"

    def rename(name: str) -> str:
        return paths.get(name, name)

    match(saved, like, where=where, advice=advice, rename=rename, cast=cast)


def _read(
    wanted: Region,
    like: Any,
    sources: Iterable[tuple[LeafSlice, str, list[str]]],
    arrays: Mapping[str, np.ndarray[Any, Any]],
) -> np.ndarray[Any, Any]:
    """Copy a region of a leaf from arrays, each of which has tied copies."""
    values = empty(wanted, leaf_of(like).dtype)
    for each, name, copies in sources:
        both = overlap(wanted, each.ours)
        if both is None:
            continue
        target, source = (as_slices(within(both, base)) for base in (wanted, each.ours))
        saved = each.to_ours(arrays[name])[source]
        values[target] = converted(each.path, leaf_of(arrays[name]), like, saved)
        for copy in copies:
            other = arrays[copy]
            same = other.shape == arrays[name].shape and other.dtype == arrays[name].dtype
            if not same or bytes_of(each.to_ours(other)[source]) != bytes_of(saved):
                expected, got = f"a copy of {name}, as NameMap(tied=…) says", "other values"
                advice = "give it its own leaf, or ignore it"
                refuse(f"{each.path} ({copy})", expected, got, advice, kind=TreeMismatchError)
    return values


def _map_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Map the arrays of a file, of all files of an index, or of those of a directory."""
    file = _file_of(path)
    if os.fspath(path).endswith(".json"):
        return _map_indexed(absolute_path("path", path))
    if os.path.exists(file):  # also False for a name that is too long
        return _map_file(file)
    index = _index_of(file)
    if os.path.exists(index):
        return _map_indexed(index)
    advice = "give a .safetensors file, its index, or the directory of a model.safetensors"
    refuse(os.fspath(path), f"{file} or {index.name}", "neither", advice, kind=CheckpointError)


def _map_indexed(index: Path) -> dict[str, np.ndarray[Any, Any]]:
    weight_map = _read_index(index)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name in sorted(set(weight_map.values())):
        held = _map_file(index.with_name(name))
        listed = {tensor for tensor, holder in weight_map.items() if holder == name}
        if differing := held.keys() ^ listed:
            expected = f"the arrays of {name} as the index lists them"
            got = f"a difference in {', '.join(sorted(differing))}"
            refuse(index, expected, got, "export or copy all of them again", kind=CheckpointError)
        arrays |= held
    return arrays


def _read_index(index: Path) -> dict[str, str]:
    """Return the file of each array, by its name in the directory of the index."""
    try:
        check_regular(index, limit=1 << 30)
        content = json.loads(index.read_text(encoding="utf-8"))
        present = os.listdir(index.parent)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        got, advice = str(error), "export or copy it again"
        refuse(index, "an index in JSON", got, advice, kind=CheckpointError, cause=error)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    expected = "a weight_map of names to files in its directory"
    if not isinstance(weight_map, dict):
        got = tree.describe_value(content)
        refuse(index, expected, got, "export or copy it again", kind=CheckpointError)
    for file in weight_map.values():
        if file not in present:
            got, advice = f"{file!r:.80}, which is not there", "export or copy all of them again"
            refuse(index, expected, got, advice, kind=CheckpointError)
    return weight_map


def _map_file(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Map the arrays of a file that the package finds complete into memory, without reading."""
    safetensors = _import_safetensors()
    try:
        check_regular(file)
        with safetensors.safe_open(file, framework="numpy"):  # checks the header
            content = np.memmap(file, np.uint8, "r")
    except safetensors.SafetensorError as error:
        got = f"one of {file.stat().st_size} bytes of which the safetensors package says: {error}"
        advice, kind = "export or copy it again", CheckpointError
        refuse(file, "a whole safetensors file", got, advice, kind=kind, cause=error)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8:start].tobytes())
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        try:
            flat = content[start + begin : start + end].view(jnp.dtype(_DTYPES[entry["dtype"]]))
            arrays[name] = flat.reshape(entry["shape"])
        except (KeyError, ValueError) as error:
            expected = f"a dtype of {', '.join(_DTYPES)}, and a shape that numpy has"
            got, where = f"{entry['dtype']}{entry['shape']!s:.80}", f"{file}: {name}"
            refuse(where, expected, got, "export it again", kind=CheckpointError, cause=error)
    return arrays
