"""Parameters in from safetensors, each array straight to where it belongs."""

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from stepfold import tree
from stepfold.checkpoint.leaves import Region, leaf_of
from stepfold.checkpoint.matching import match
from stepfold.checkpoint.naming import Named, named_arrays
from stepfold.checkpoint.placing import placed, regions_of
from stepfold.checkpoint.shards import read_shards
from stepfold.checkpoint.tensors import require_safetensors
from stepfold.errors import ConfigError


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
      A tree like `like`, of numpy's arrays where that has such, and otherwise of jax's. They share
      no memory with the files.

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
    arrays = read_shards(path)
    saved = {name: leaf_of(array) for name, array in arrays.items()}
    paths = {leaf.name: leaf.path for leaf in leaves}

    def path_of(name: str) -> str:
        return paths.get(name, name)

    sources = match(
        saved,
        like,
        where=str(path),
        advice="; names=… says what arrays are called there, and cast=True converts dtypes",
        rename=path_of,
        cast=cast,
    ).sources
    made = []
    for leaf in leaves:
        name = sources[leaf.path]
        regions = regions_of(leaf.path, saved[name], leaf.value)
        # Copies, since files change.
        parts = {part: np.array(arrays[name][_index(part)], order="C") for part in regions}
        made.append(placed(leaf.path, saved[name], leaf.value, parts))
    return jax.tree.unflatten(jax.tree.structure(like), made)


def _index(part: Region) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in part)


def _check_wanted(leaf: Named) -> None:
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
