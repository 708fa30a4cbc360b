"""Read steps that orbax saved without stepfold: by orbax itself, and so without checksums."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.checkpoint.leaves import Leaf, Region, make_leaf, region, regions_of
from stepfold.checkpoint.manifest import DamageError
from stepfold.internals.orbax import HOST, describe_tree, read_tree

_TREE = "_METADATA"  # the file that describes a tree of arrays, in its folder


class OrbaxReader:
    """The arrays of a step.

    A `CheckpointManager` saves one tree of arrays, or several items by name. The paths of several
    begin with the name of the item, as in `params/kernel`; those of a single one do not.

    Attributes:
      leaves: their shapes and dtypes, by path; empty if orbax has saved none.
    """

    def __init__(self, step: Path) -> None:
        folders = [step, *sorted(step.glob("*"))]  # none if the step was deleted meanwhile
        folders = [folder for folder in folders if (folder / _TREE).exists()]
        self._trees: list[tuple[Path, Any, list[str]]] = []  # with the paths of its leaves
        self.leaves: dict[str, Leaf] = {}
        for folder in folders:
            with _as_damage(folder):
                described = describe_tree(folder)
            named = tree.named_leaves(described, folder.name if len(folders) > 1 else "")
            self._trees.append((folder, described, [path for path, _ in named]))
            for path, array in named:
                self.leaves[path] = Leaf(tuple(array.shape), jnp.dtype(array.dtype).name)

    def read(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Read leaves by path, each with the kind, sharding and dtype of the wanted one."""
        leaves: dict[str, Any] = {}
        for folder, described, paths in self._trees:
            shardings = [self._sharding(path, wanted.get(path)) for path in paths]
            with _as_damage(folder):
                arrays = dict(zip(paths, read_tree(folder, described, shardings), strict=True))
            for path in wanted.keys() & arrays.keys():
                parts = _parts_of(arrays[path])
                leaves[path] = make_leaf(path, self.leaves[path], wanted[path], parts)
        return leaves

    def _sharding(self, path: str, like: Any) -> Any:
        """Return the sharding to read an array with; `HOST` if this process needs all of it."""
        if like is None:
            return None
        leaf = self.leaves[path]
        return HOST if regions_of(path, leaf, like) == [region((), leaf.shape)] else like.sharding


@contextmanager
def _as_damage(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        text = f"{folder}: orbax cannot read it: {str(error).strip() or type(error).__name__}"
        raise DamageError(text) from error


def _parts_of(array: Any) -> dict[Region, np.ndarray]:
    if not isinstance(array, jax.Array):
        return {region((), np.shape(array)): np.asarray(array)}
    shards = array.addressable_shards
    return {region(shard.index, array.shape): np.asarray(shard.data) for shard in shards}
