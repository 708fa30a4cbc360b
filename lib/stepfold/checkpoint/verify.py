"""Inspect checkpoints without restoring them: list, describe and verify steps."""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from stepfold.checkpoint.leaves import Leaf, map_arrays
from stepfold.checkpoint.manifest import DamageError, ForeignError
from stepfold.checkpoint.restore import Step, candidates
from stepfold.checkpoint.store import Store, open_to_read
from stepfold.errors import CheckpointError


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """Return the newest complete step, by the names and sizes of its files, or None.

    `directory` is that of a series or a run, or a URL, as in `restore`.

    >>> import jax.numpy as jnp, stepfold as sf, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> sf.checkpoint.latest_step(folder)
    >>> sf.save(folder, {"w": jnp.ones(2)}, step=3)
    >>> sf.checkpoint.latest_step(folder)
    3
    """
    return newest_complete(open_to_read(directory))


def newest_complete(store: Store) -> int | None:
    """Return the newest complete step of a store, or None."""
    for step in reversed(store.steps()):
        try:
            store.read_manifest(step)
        except (DamageError, ForeignError):
            continue
        return step
    return None


class Contents(NamedTuple):
    """The contents of a checkpoint.

    Attributes:
      step: the step at which it was saved.
      leaves: the metadata of each array, by path: its `shape`, `dtype`, and `key`, the
        implementation of a typed PRNG key, which is stored as its key data.
      data: the data position; a list of those of all processes if each saved its own, and there
        were more or fewer processes.
      extra: the `extra` that was saved.
      metrics: the `metrics` that were saved.
      bytes: its size on disk.
      arrays: the metadata of each numpy array in `data` and `extra`, by path. It stands for the
        array in `data` and `extra` too.

    >>> import jax.numpy as jnp, stepfold as sf, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> sf.save(folder, {"w": jnp.ones(2)}, step=3)
    >>> sf.checkpoint.contents(folder).leaves["w"].shape
    (2,)
    """

    step: int
    leaves: dict[str, Leaf]
    data: Any
    extra: Any
    metrics: dict[str, float]
    bytes: int
    arrays: dict[str, Leaf]


def contents(directory: str | os.PathLike[str], *, step: Step = "latest") -> Contents:
    """Describe a checkpoint, without reading its arrays.

    Args:
      directory: the directory or the URL of the series, or the run directory of `fit`.
      step: "latest", "best", or a number.

    Raises:
      CheckpointError: if there is no such step, or it is incomplete.

    >>> import jax.numpy as jnp, stepfold as sf, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> sf.save(folder, {"w": jnp.ones(2)}, step=3, extra={"lr": 0.1})
    >>> contents = sf.checkpoint.contents(folder)
    >>> contents.step, contents.extra
    (3, {'lr': 0.1})
    >>> {path: str(leaf) for path, leaf in contents.leaves.items()}
    {'w': 'float32[2]'}
    """
    store = open_to_read(directory)
    number, _ = candidates([store], step)[0]
    if step == "latest":
        # Without a complete step, read_manifest raises the problem of the newest.
        complete = newest_complete(store)
        number = number if complete is None else complete
    manifest = store.read_manifest(number)
    metadata = manifest.metadata
    data = manifest.position() if manifest.has_position else manifest.data
    leaf_of = lambda _, array: array.leaf
    return Contents(
        step=metadata.step,
        leaves=manifest.leaves,
        data=map_arrays(data, "data", leaf_of),
        extra=map_arrays(metadata.extra, "extra", leaf_of),
        metrics=dict(metadata.metrics or {}),
        bytes=manifest.bytes,
        arrays={name: array.leaf for name, array in manifest.arrays.items()},
    )


def verify(directory: str | os.PathLike[str]) -> dict[int, list[str]]:
    """Read every step and verify all of its values against their checksums.

    `directory` is that of a series or a run, or a URL, as in `restore`.

    Needs no device and changes nothing. Files that only orbax reads, such as `_METADATA`, are
    compared by size alone; `restore` does not need their content.

    Returns:
      The problems of each step, one line per part of a leaf; an empty list for a valid step. What
      cannot be read is a problem as well.

    >>> import jax.numpy as jnp, stepfold as sf, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> sf.save(folder, {"w": jnp.ones(2)}, step=3)
    >>> sf.checkpoint.verify(folder)
    {3: []}
    """
    verified = problems_by_step(open_to_read(directory))
    return {step: [str(problem) for problem in problems] for step, problems in verified}


def problems_by_step(store: Store) -> Iterator[tuple[int, list[CheckpointError]]]:
    """Verify one step after the other; leave out those that are deleted meanwhile."""
    for step in store.steps():
        problems = problems_of(store, step)
        if not problems or store.has_step(step):
            yield step, problems


def damage_of(store: Store, step: int) -> DamageError | None:
    """Return the first problem of a step that is damage, after reading all of its values."""
    damage = (problem for problem in problems_of(store, step) if isinstance(problem, DamageError))
    return next(damage, None)


def problems_of(store: Store, step: int) -> list[CheckpointError]:
    """List the problems of one step."""
    try:
        manifest = store.read_manifest(step)
    except CheckpointError as error:
        return [error]
    reader = store.open_arrays(step, manifest)
    stored = [name for name, leaf in manifest.leaves.items() if 0 not in leaf.shape]
    of_leaves = (each for problems in reader.map(reader.problems, stored) for each in problems)
    return [*of_leaves, *reader.stored_problems(manifest.arrays)]
