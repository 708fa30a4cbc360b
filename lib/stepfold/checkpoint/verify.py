"""Inspect checkpoints without restoring them: list, describe and verify steps."""

from pathlib import Path
from typing import Any, NamedTuple

from stepfold.checkpoint import steps
from stepfold.checkpoint.choosing import Step, candidates
from stepfold.checkpoint.leaves import Leaf
from stepfold.checkpoint.manifest import read_manifest
from stepfold.checkpoint.sealed import opened
from stepfold.errors import CheckpointError


def latest_step(directory: str | Path) -> int | None:
    """Return the newest complete step, by the names and sizes of its files, or None.

    >>> import jax.numpy as jnp, stepfold as sf, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> sf.latest_step(folder)
    >>> sf.save(folder, {"w": jnp.ones(2)}, step=3)
    >>> sf.latest_step(folder)
    3
    """
    place = steps.read_directory(directory)
    newest_first = reversed(steps.steps_in(place))
    return next((step for step in newest_first if steps.is_whole(steps.path_of(place, step))), None)


class Contents(NamedTuple):
    """The contents of a checkpoint.

    Attributes:
      step: the step at which it was saved.
      leaves: the metadata of each array, by path: its `shape`, `dtype`, and `key`, the
        implementation of a typed PRNG key, which is stored as its key data.
      data: the data position.
      extra: the `extra` that was saved.
      metrics: the `metrics` that were saved.
      bytes: its size on disk.

    >>> import jax.numpy as jnp, stepfold as sf, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> sf.save(folder, {"w": jnp.ones(2)}, step=3)
    >>> sf.contents(folder).leaves["w"].shape
    (2,)
    """

    step: int
    leaves: dict[str, Leaf]
    data: Any
    extra: Any
    metrics: dict[str, float]
    bytes: int


def contents(directory: str | Path, *, step: Step = "latest") -> Contents:
    """Describe a checkpoint, without reading its arrays.

    Args:
      directory: the directory of the series.
      step: "latest", "best", or a number.

    Raises:
      CheckpointError: if there is no such step, or it is incomplete.

    >>> import jax.numpy as jnp, stepfold as sf, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> sf.save(folder, {"w": jnp.ones(2)}, step=3, extra={"lr": 0.1})
    >>> found = sf.contents(folder)
    >>> found.step, found.extra, {path: str(leaf) for path, leaf in found.leaves.items()}
    (3, {'lr': 0.1}, {'w': 'float32[2]'})
    """
    place = steps.read_directory(directory)
    found = candidates(place, step)
    whole = [number for number in found if steps.is_whole(steps.path_of(place, number))]
    if step != "latest" or not whole:  # let read_manifest raise the problem
        whole = found
    manifest = read_manifest(steps.path_of(place, whole[0]))
    words = manifest.words
    return Contents(
        step=words.step,
        leaves=manifest.leaves,
        data=manifest.position(),
        extra=opened(words.extra),
        metrics=dict(words.metrics or {}),
        bytes=manifest.bytes,
    )


def verify(directory: str | Path) -> dict[int, list[str]]:
    """Read every step and verify all of its values against their checksums.

    Needs no device and changes nothing. Files that only orbax reads, such as `_METADATA`, are
    compared by size alone; `restore` does not need their content.

    Returns:
      The problems of each step, one line per part of a leaf; an empty list for a valid step.

    >>> import jax.numpy as jnp, stepfold as sf, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> sf.save(folder, {"w": jnp.ones(2)}, step=3)
    >>> sf.verify(folder)
    {3: []}
    """
    place = steps.read_directory(directory)
    return {step: problems_of(steps.path_of(place, step)) for step in steps.steps_in(place)}


def problems_of(path: Path) -> list[str]:
    """List what is wrong with one step."""
    from stepfold.checkpoint.arrays import Reader  # lazy: imports tensorstore

    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    reader = Reader(path, manifest.leaves, manifest.shards)
    stored = [name for name, leaf in manifest.leaves.items() if 0 not in leaf.shape]
    return [line for lines in reader.map(reader.problems, stored) for line in lines]
