"""Load parameters from safetensors, directly into their sharding."""

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
    """Load parameters from safetensors, directly into their sharding.

    The files have to hold exactly the leaves of `like`. Each process reads only the parts that the
    shardings of `like` assign to it; leaves without a sharding go to the default device. Files are
    checked for completeness, but not for changed bytes, since safetensors has no checksums.

    Args:
      path: a file, an index, or a directory with `model.safetensors` or
        `model.safetensors.index.json`. `model.safetensors` takes precedence, as in
        Hugging Face.
      like: a tree of arrays or `jax.ShapeDtypeStruct`s.
      names: maps the path of an array to its name in the file, as for `export_params`.
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
        # Copy: memory-mapped files may change.
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
