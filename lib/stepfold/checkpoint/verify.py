"""Looking at checkpoints without restoring: which there are, and whether they are good."""

from pathlib import Path

from stepfold.checkpoint import steps
from stepfold.checkpoint.manifest import read_manifest
from stepfold.errors import CheckpointError


def latest_step(directory: str | Path) -> int | None:
    """Give the newest step that is wholly there, by the names and sizes of its files, or None.

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


def verify(directory: str | Path) -> dict[int, list[str]]:
    """Read every step and compare all of its values with what was saved.

    Needs no device, and changes nothing.

    Returns:
      What is wrong with each step, a line for each part of a leaf; nothing, if it is good.

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
    from stepfold.checkpoint.arrays import Reader  # tensorstore, when first used

    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    reader = Reader(path, manifest.leaves, manifest.shards)
    stored = [name for name, leaf in manifest.leaves.items() if 0 not in leaf.shape]
    return [line for lines in reader.map(reader.problems, stored) for line in lines]
