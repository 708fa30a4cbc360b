"""Average the parameters of several checkpoints, leaf by leaf."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from stepfold import tree
from stepfold.checkpoint.leaves import Leaf, Region, make_leaf, regions_of
from stepfold.checkpoint.restore import candidates, match
from stepfold.checkpoint.store import open_together
from stepfold.core.processes import agreement
from stepfold.core.validation import read_instance, read_integer
from stepfold.errors import CheckpointError, TreeMismatchError, refuse

if TYPE_CHECKING:
    from stepfold.checkpoint.arrays import ArrayReader


def average_checkpoints(
    directory: str | os.PathLike[str],
    steps: Sequence[int],
    like: Any = None,
    *,
    part: str = "params",
) -> Any:
    """Average the parameters of several steps of a series.

    Every value is verified against its checksum. Leaves are read one after the other, added in
    float64, and rounded to their dtype. The host holds the result, and one leaf of one step at a
    time. Integers, booleans and PRNG keys have no mean; they have to be equal in all steps.

    With several processes, all of them call this, and each reads what its devices need.

    Args:
      directory: the directory or the URL of the series, or the run directory of `fit`.
      steps: the steps to average.
      like: the wanted parameters, concrete or abstract. Each leaf gets the sharding of its
        counterpart in `like`. None returns nested dicts of numpy arrays, by their paths.
      part: the path of the branch of the state to average; "" averages the whole state.

    Returns:
      The average, a tree like `like`. The rest of the checkpoints is not read.

    Raises:
      CheckpointError: if a step is missing or damaged.
      TreeMismatchError: if the steps or `like` have different leaves, or a leaf that has no mean
        differs; with its path.

    >>> import jax.numpy as jnp, stepfold as sf, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> for step in (1, 2, 3):
    ...     sf.save(folder, {"params": {"w": jnp.full(2, float(step))}}, step=step)
    >>> sf.checkpoint.average_checkpoints(folder, [1, 3], {"w": jnp.zeros(2)})
    {'w': Array([2., 2.], dtype=float32)}
    """
    if isinstance(steps, str | bytes | Mapping) or not isinstance(steps, Sequence | np.ndarray):
        refuse("steps", "a list of steps", tree.describe_value(steps))
    numbers = [read_integer("steps", step, minimum=0) for step in steps]
    if not numbers or len(set(numbers)) < len(numbers):
        refuse("steps", "different steps, at least one", f"{numbers}")
    read_instance("part", part, str, "the path of a branch, such as 'params'")
    store = open_together(directory)
    for number in numbers:
        candidates([store], number)  # raises if the step is missing
    with agreement(f"{store.location}: the average cannot be read"):
        manifests = {number: store.read_manifest(number) for number in numbers}
        branches = {
            number: _branch(contents.leaves, part) for number, contents in manifests.items()
        }
        first = branches[numbers[0]]
        for number, leaves in branches.items():
            _check_equal(first, leaves, f"{store.path_of(number)}: {part}", numbers[0])
        if like is None:
            empty = {name: np.empty(0, leaf.dtype) for name, leaf in first.items()}
            by_path = {tuple(name.split("/")): array for name, array in empty.items()}
            like = empty[""] if "" in empty else tree.nested(by_path)
        else:
            where = f"{store.path_of(numbers[0])}: {part}"
            match(first, like, where=where, advice=lambda _: "")
        readers = {
            store.path_of(number): store.open_arrays(number, contents)
            for number, contents in manifests.items()
        }
        average_leaves = []
        for name, wanted in tree.named_leaves(like):
            path, leaf = f"{part}/{name}".strip("/"), first[name]
            means = _means(readers, path, leaf, regions_of(path, leaf, wanted))
            average_leaves.append(make_leaf(path, leaf, wanted, means))
    structure: Any = jax.tree.structure(like)
    return structure.unflatten(average_leaves)


def _branch(leaves: Mapping[str, Leaf], part: str) -> dict[str, Leaf]:
    """Return the leaves below a path, by their paths from there."""
    prefix = part and f"{part}/"
    below = {n[len(prefix) :]: leaf for n, leaf in leaves.items() if f"{n}/".startswith(prefix)}
    if not below:
        names = ", ".join(sorted({name.partition("/")[0] for name in leaves}))
        refuse("part", "a path that was saved", repr(part), f"there are {names}")
    return below


def _check_equal(
    first: Mapping[str, Leaf], leaves: Mapping[str, Leaf], where: str, number: int
) -> None:
    if lines := [
        f"{name}: expected {first.get(name) or 'nothing'}, got {leaves.get(name) or 'nothing'}"
        for name in dict.fromkeys((*first, *leaves))
        if first.get(name) != leaves.get(name)
    ]:
        got = "others:\n  " + "\n  ".join(lines)
        refuse(where, f"the leaves of step {number}", got, kind=TreeMismatchError)


def _means(
    readers: Mapping[str, "ArrayReader"], name: str, leaf: Leaf, regions: list[Region]
) -> dict[Region, np.ndarray]:
    """Read regions of a leaf from one step after the other, and return their means."""
    dtype = jnp.dtype(leaf.dtype)
    has_mean = jnp.issubdtype(dtype, jnp.inexact)
    wide = np.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else np.float64
    totals: dict[Region, np.ndarray] = {}
    for path, reader in readers.items():
        try:
            arrays = reader.read_regions(name, regions)
        except CheckpointError as error:
            raise type(error)(f"{path}: {error}") from error
        for region, array in arrays.items():
            if region not in totals:
                totals[region] = array.astype(wide) if has_mean else array
            elif has_mean:
                totals[region] += array
            elif not np.array_equal(totals[region], array):
                got, advice = f"others, and {leaf} has no mean", "average a part without it"
                where, expected = f"{path}: {name}", "equal values in all steps"
                refuse(where, expected, got, advice, kind=TreeMismatchError)
    if has_mean:
        return {part: (total / len(readers)).astype(dtype) for part, total in totals.items()}
    return totals
