"""Parameters in and out of safetensors, the files that torch and Hugging Face read."""

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding, SingleDeviceSharding

from stepfold import tree
from stepfold.checkpoint.naming import Leaf, named_arrays
from stepfold.checkpoint.shards import file_of, read_shards, write_shards
from stepfold.checkpoint.tensors import CODES, require_safetensors
from stepfold.errors import CheckpointError, ConfigError, TreeMismatchError


def export_params(
    path: str | os.PathLike[str],
    params: Any,
    *,
    names: Callable[[str], str] | None = None,
    shard_size: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write parameters as safetensors, for torch, Hugging Face and anything else that reads them.

    The files are laid out and called as Hugging Face does it. Up to `shard_size` it is one file;
    beyond, files `model-00001-of-00003.safetensors` and so on, with `model.safetensors.index.json`
    to say which array is in which. Arrays are fetched one at a time, so that the host holds the
    largest of them and never the tree; those that are spread over several processes are gathered
    one at a time too. Then every process has to call this, process 0 writes, and all return, or
    raise, when it has. Otherwise process 0 writes what it has, and no process waits for it.

    A reader finds the earlier export or this one, whenever this is interrupted, and never a part of
    both: files are written aside, forced onto the disk, and renamed, the index last, and shards
    never take the name of one that is there (they become `model-00001-of-00003.2.safetensors`).
    What is left of an earlier export to the same path is removed at the end.

    safetensors holds no checksums: a byte that changes on the disk changes a parameter.

    Args:
      path: a file ending in `.safetensors`, or a directory, for `model.safetensors` in it.
      params: a tree of arrays. Random keys are none, nor are functions: an equinox module is
        filtered by `eqx.is_array` first.
      names: what to call an array in the file, a function of its path, such as `layers/0/kernel`.
        By default the `/` become `.`, as in torch. It only names: what has to look otherwise too is
        changed before, as the kernel below is, since torch wants the transpose.
      shard_size: how many bytes of arrays a file may have; a larger array has a file for itself.
      metadata: text for the header of each file. `format` is "pt" unless given: transformers
        refuses files that do not say one that it knows, and loads this one into torch.

    Raises:
      ConfigError: if an argument is not as described, two arrays would have one name, or
        safetensors has no such dtype; or if the safetensors package is not installed.
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
    # Lazy, since each process has to take part in every gathering, whatever process 0 does with it.
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
        for _ in arrays:  # what is left if the writing failed, and in the others all of it
            pass
        problem = _from_first(problem)
    if problem:
        raise CheckpointError(problem) from cause


def load_params(
    path: str | os.PathLike[str],
    like: Any,
    *,
    names: Callable[[str], str] | None = None,
    cast: bool = False,
) -> Any:
    """Read parameters from safetensors, each array straight to where it belongs.

    The files have to hold what `like` has, and nothing else. Where a leaf of `like` has a sharding
    each process reads only the parts that it keeps; the others go to the default device. Files are
    checked to be whole; their bytes cannot be, since safetensors holds no checksums.

    Args:
      path: a file, the index of several, or a directory with `model.safetensors` or
        `model.safetensors.index.json`, of which the first is taken, as Hugging Face does.
      like: a tree of arrays or `jax.ShapeDtypeStruct`s.
      names: what each array is called in the file, as for `export_params`.
      cast: convert floats to the floats that are wanted, and integers to integers that hold them;
        otherwise another dtype is an error.

    Returns:
      A tree like `like` of jax arrays, which share no memory with the files.

    Raises:
      ConfigError: if an argument is not as described, or jax cannot hold a dtype without
        `jax_enable_x64`; or if the safetensors package is not installed.
      CheckpointError: if a file is missing, cannot be read, or is not whole.
      TreeMismatchError: if the files hold something else; every difference is listed.

    >>> import jax, jax.numpy as jnp, stepfold as sf, tempfile
    >>> directory = tempfile.mkdtemp()
    >>> sf.export_params(directory, {"w": jnp.arange(3.0), "b": jnp.ones(())})
    >>> like = jax.eval_shape(lambda: {"w": jnp.zeros(3), "b": jnp.zeros(())})
    >>> sf.load_params(directory, like)["w"]
    Array([0., 1., 2.], dtype=float32)
    """
    require_safetensors()
    leaves = named_arrays("load_params: like", like, names)
    for leaf in leaves:
        _check_wanted(leaf)
    saved = read_shards(path)
    _match(path, leaves, saved, cast)
    placed = [_placed(leaf, saved[leaf.name]) for leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(like), placed)


def _read_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    said = {"format": "pt", **(metadata or {})}
    for key, text in said.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise ConfigError(f"metadata: expected text for text, got {key!r}: {text!r}")
    return said


def _check_exportable(leaf: Leaf) -> None:
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


def _split(leaves: Sequence[Leaf], limit: int) -> list[list[Leaf]]:
    """Fill files in the tree's order; within one the widest dtypes come first, to be aligned."""
    shards: list[list[Leaf]] = [[]]
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
    # An array keeps what numpy once asked of it, as long as it lives: a copy of it dies here.
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
    """Give every process the text of process 0."""
    sent = np.zeros(1000, np.uint8)
    content = np.frombuffer(text.encode()[: sent.size], np.uint8)
    sent[: content.size] = content
    got = np.asarray(multihost_utils.broadcast_one_to_all(sent))
    return got.tobytes().rstrip(b"\0").decode(errors="replace")


def _check_wanted(leaf: Leaf) -> None:
    if not tree.is_array(leaf.value):
        raise ConfigError(
            f"{leaf.path}: expected an array or a jax.ShapeDtypeStruct, got "
            f"{tree.spell(leaf.value)}"
        )
    mesh = getattr(getattr(leaf.value, "sharding", None), "mesh", None)
    if isinstance(mesh, jax.sharding.AbstractMesh):
        raise ConfigError(
            f"{leaf.path}: expected a sharding over devices, got one over {mesh}; give the "
            "shardings of a mesh, as make_sharding does"
        )


def _match(
    path: str | os.PathLike[str],
    leaves: Iterable[Leaf],
    saved: Mapping[str, np.ndarray[Any, Any]],
    cast: bool,
) -> None:
    wanted = {leaf.name: leaf for leaf in leaves}
    lines = [
        f"{leaf.path}: missing, expected {tree.spell(leaf.value)}, called {name}"
        for name, leaf in wanted.items()
        if name not in saved
    ]
    lines += [
        f"{name}: unexpected {tree.spell(saved[name])}" for name in saved if name not in wanted
    ]
    lines += [
        f"{leaf.path}: expected {tree.spell(leaf.value)}, got {tree.spell(saved[name])}"
        for name, leaf in wanted.items()
        if name in saved and not _fits(saved[name], leaf.value, cast)
    ]
    if lines:
        raise TreeMismatchError(
            "\n  ".join([f"load_params: {os.fspath(path)} holds another tree than `like`:", *lines])
            + "\nnames=… says what arrays are called there, cast=True converts their dtypes"
        )
    for leaf in wanted.values():
        if jax.dtypes.canonicalize_dtype(leaf.value.dtype) != leaf.value.dtype:
            raise ConfigError(
                f"{leaf.path}: expected a dtype that jax holds, got {tree.spell(leaf.value)}; set "
                "jax_enable_x64, or want 32 bits and give cast=True"
            )


def _fits(saved: np.ndarray[Any, Any], wanted: Any, cast: bool) -> bool:
    if saved.shape != tuple(wanted.shape):
        return False
    same = bool(saved.dtype == wanted.dtype)
    kinds = (jnp.floating, jnp.integer)
    return same or (
        cast and any(all(jnp.issubdtype(x.dtype, k) for x in (saved, wanted)) for k in kinds)
    )


def _placed(leaf: Leaf, saved: np.ndarray[Any, Any]) -> jax.Array:
    place = getattr(leaf.value, "sharding", None)
    if place is None or not getattr(leaf.value, "committed", True):
        return jnp.asarray(_taken(leaf, saved))
    # jax's own callback would give one copy to all devices that hold the same part, as numpy's
    # memory, which a step that its array is donated to may reuse.
    parts = [
        jax.device_put(_taken(leaf, saved[index or ()]), _on_device(device, place))
        for device, index in place.addressable_devices_indices_map(saved.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(saved.shape, place, parts)


def _on_device(device: jax.Device, place: Sharding) -> Sharding:
    return SingleDeviceSharding(device, memory_kind=place.memory_kind)


def _taken(leaf: Leaf, part: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Copy a part of the file, for jax uses memory of numpy's where it lies."""
    values = np.array(part, leaf.value.dtype, order="C")
    # Floats are rounded, which is what casting them is for; integers would be other integers.
    kept = values.dtype == part.dtype or jnp.issubdtype(values.dtype, jnp.floating)
    if not kept and not np.array_equal(values, part):
        raise TreeMismatchError(
            f"{leaf.path}: expected values that {values.dtype} holds, got {part.dtype} from "
            f"{part.min()} to {part.max()}"
        )
    return values
