"""Export parameters as safetensors, the format of torch and Hugging Face."""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from stepfold import tree
from stepfold.checkpoint.naming import Named, named_arrays
from stepfold.checkpoint.shards import file_of, write_shards
from stepfold.checkpoint.tensors import CODES, require_safetensors
from stepfold.errors import CheckpointError, ConfigError


def export_params(
    path: str | os.PathLike[str],
    params: Any,
    *,
    names: Callable[[str], str] | None = None,
    shard_size: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Export parameters as safetensors, for torch, Hugging Face and other readers.

    Files follow the layout and names of Hugging Face. Up to `shard_size` there is one file; beyond,
    there are files `model-00001-of-00003.safetensors` and so on, and an index
    `model.safetensors.index.json`. Arrays are fetched one at a time, so the host holds the largest
    array and never the tree. Arrays sharded over several processes are also gathered one at a time.
    In that case every process has to call this: process 0 writes, and all processes return, or
    raise, when it has finished. Otherwise process 0 writes its own arrays and no process waits for
    it.

    The export is atomic: after an interruption a reader finds the previous export or this one,
    never a mix. Files are written to a temporary directory, synced and renamed, the index last.
    Shards never reuse the name of an existing file (they become
    `model-00001-of-00003.2.safetensors`). Files of an earlier export to the same path are removed
    at the end.

    safetensors has no checksums: a byte that changes on disk changes a parameter.

    Args:
      path: a file ending in `.safetensors`, or a directory, which gets a `model.safetensors`.
      params: a tree of arrays, without PRNG keys and functions; filter an equinox module by
        `eqx.is_array` first.
      names: maps the path of an array, such as `layers/0/kernel`, to its name in the file. By
        default `/` becomes `.`, as in torch. It changes only names. Change values beforehand, such
        as the kernel below, which torch expects transposed.
      shard_size: maximum bytes of arrays per file; a larger array gets its own file.
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
    >>> sf.export_params(file, as_torch, names=lambda path: path.replace("kernel", "weight"))
    >>> {name: array.shape for name, array in sorted(safetensors.numpy.load_file(file).items())}
    {'bias': (2,), 'weight': (2, 3)}

    which `torch.nn.Linear(3, 2).load_state_dict(safetensors.torch.load_file(file))` takes.
    """
    require_safetensors()
    target = file_of(path)
    if isinstance(shard_size, bool) or not isinstance(shard_size, int) or shard_size < 1:
        raise ConfigError(f"shard_size: expected bytes, an integer of at least 1, got {shard_size}")
    said = _read_metadata(metadata)
    leaves = named_arrays("export_params: params", params, names)
    for leaf in leaves:
        _check_exportable(leaf)
    shards = _split(leaves, shard_size)
    # Lazy: every process has to take part in every gather, even if the write fails on process 0.
    arrays = (_on_host(leaf.value) for shard in shards for leaf in shard)
    together = not all(getattr(leaf.value, "is_fully_addressable", True) for leaf in leaves)
    problem, cause = "", None
    if jax.process_index() == 0:
        try:
            specs = [{leaf.name: leaf.spec for leaf in shard} for shard in shards]
            write_shards(target, specs, arrays, said)
        except OSError as error:
            problem = f"export_params: {target} cannot be written: {_advice(error)}"
            cause = error
    if together:
        for _ in arrays:  # the rest if the write failed; on other processes, all of them
            pass
        problem = _from_first(problem)
    if problem:
        raise CheckpointError(problem) from cause


def _read_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    said = {"format": "pt", **(metadata or {})}
    for key, text in said.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise ConfigError(f"metadata: expected text for text, got {key!r}: {text!r}")
    return said


def _check_exportable(leaf: Named) -> None:
    value = leaf.value
    if isinstance(value, jax.core.Tracer):
        raise ConfigError(f"{leaf.path}: expected an array, got a tracer; export outside of jit")
    numpy = isinstance(value, np.ndarray | np.generic)
    if not (numpy or isinstance(value, jax.Array)) or isinstance(value, np.ma.MaskedArray):
        raise ConfigError(
            f"{leaf.path}: expected an array, got {tree.spell(value)}; leave out what is no "
            "parameter, or make an array of it"
        )
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise ConfigError(
            f"{leaf.path}: expected a parameter, got the random key {tree.spell(value)}; leave it "
            "out"
        )
    if value.dtype.name not in CODES:
        raise ConfigError(
            f"{leaf.path}: expected a dtype that safetensors has ({', '.join(CODES)}), got "
            f"{tree.spell(value)}; cast it, or leave it out"
        )


def _split(leaves: Sequence[Named], limit: int) -> list[list[Named]]:
    """Fill files in tree order; within a file, sort by dtype width to align the arrays."""
    shards: list[list[Named]] = [[]]
    room = limit
    for leaf in leaves:
        if leaf.spec.size > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(leaf)
        room -= leaf.spec.size
    return [sorted(shard, key=lambda leaf: -leaf.value.dtype.itemsize) for shard in shards]


def _on_host(value: Any) -> np.ndarray[Any, Any]:
    if not isinstance(value, jax.Array):
        return np.asarray(value)
    if not value.is_fully_addressable:
        return multihost_utils.process_allgather(value, tiled=True)  # type: ignore[no-any-return]
    # np.asarray caches the host copy in the jax.Array; the cache of a temporary copy is freed here.
    return np.asarray(jnp.copy(value))


def _advice(error: OSError) -> str:
    advice = {
        errno.ENOSPC: "make room there",
        errno.EDQUOT: "make room there",
        errno.EISDIR: "give a name in it that ends in .safetensors",
        errno.EEXIST: "give a directory, or a file that ends in .safetensors",
        errno.ENOTDIR: "give a directory, or a file that ends in .safetensors",
    }
    what_to_do = advice.get(error.errno or 0, "give a path that can be written to")
    return f"{error.strerror or error}; {what_to_do}"


def _from_first(text: str) -> str:
    """Broadcast the text of process 0."""
    sent = np.zeros(1000, np.uint8)
    content = np.frombuffer(text.encode()[: sent.size], np.uint8)
    sent[: content.size] = content
    got = np.asarray(multihost_utils.broadcast_one_to_all(sent))
    return got.tobytes().rstrip(b"\0").decode(errors="replace")
