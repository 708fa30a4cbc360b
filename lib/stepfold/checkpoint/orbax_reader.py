"""Read steps that orbax saved without stepfold: by orbax itself, and so without checksums."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from stepfold import tree
from stepfold.checkpoint.leaves import Leaf, Region, make_leaf, region, regions_of
from stepfold.checkpoint.manifest import DamageError

_TREE = "_METADATA"  # the file that describes a tree of arrays, in its folder


def is_of_orbax(step: Path) -> bool:
    """Whether orbax has saved arrays in the folder of a step."""
    return bool(_trees_in(step))


def _trees_in(step: Path) -> list[Path]:
    folders = (step, *sorted(step.glob("*")))  # none if the step was deleted meanwhile
    return [folder for folder in folders if (folder / _TREE).exists()]


@contextmanager
def _as_damage(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        text = f"{folder}: orbax cannot read it: {str(error).strip() or type(error).__name__}"
        raise DamageError(text) from error


class OrbaxReader:
    """The arrays of a step.

    A `CheckpointManager` saves one tree of arrays, or several items by name. The paths of several
    begin with the name of the item, as in `params/kernel`; those of a single one do not.

    Attributes:
      leaves: their shapes and dtypes, by path.
    """

    def __init__(self, step: Path) -> None:
        self._orbax = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        folders = [
            folder for folder in (step, *sorted(step.iterdir())) if (folder / _TREE).exists()
        ]
        self._items = {folder.name if len(folders) > 1 else "": folder for folder in folders}
        self._trees = {name: self._describe(folder) for name, folder in self._items.items()}
        self.leaves = {
            path: Leaf(tuple(array.shape), jnp.dtype(array.dtype).name)
            for name, described in self._trees.items()
            for path, array in tree.named_leaves(described, name)
        }

    def read(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Read leaves by path, each with the kind, sharding and dtype of the wanted one."""
        read: dict[str, Any] = {}
        for name, described in self._trees.items():
            named = tree.named_leaves(described, name)
            paths, form = [path for path, _ in named], cast(Any, jax.tree.structure(described))
            # What is not wanted is not read.
            item = [array if path in wanted else ocp.PLACEHOLDER for path, array in named]
            arguments = [self._argument(path, wanted.get(path)) for path in paths]
            restored = self._restore(
                self._items[name], form.unflatten(item), form.unflatten(arguments)
            )
            arrays = dict(zip(paths, form.flatten_up_to(restored), strict=True))
            read |= {path: arrays[path] for path in paths if path in wanted}
        return {
            path: make_leaf(path, self.leaves[path], wanted[path], _parts_of(array))
            for path, array in read.items()
        }

    def _describe(self, folder: Path) -> Any:
        with _as_damage(folder):
            described: Any = ocp.PyTreeCheckpointHandler().metadata(folder)
            return getattr(described, "tree", described)

    def _restore(self, folder: Path, item: Any, arguments: Any) -> Any:
        with _as_damage(folder):
            return self._orbax.restore(
                folder, args=ocp.args.PyTreeRestore(item, restore_args=arguments)
            )

    def _argument(self, path: str, like: Any) -> ocp.RestoreArgs:
        """Ask for the shards of this process, or for a whole array on the host."""
        if like is None or len(regions_of(path, self.leaves[path], like)) == 1:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(sharding=like.sharding)


def _parts_of(array: Any) -> dict[Region, np.ndarray]:
    if not isinstance(array, jax.Array):
        return {region((), np.shape(array)): np.asarray(array)}
    shards = array.addressable_shards
    return {region(shard.index, array.shape): np.asarray(shard.data) for shard in shards}
