"""Save a single state, for custom training loops."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepfold.checkpoint.checkpoints import Checkpoints


def save(
    directory: str | Path,
    state: Any,
    *,
    step: int | None = None,
    data: Any = None,
    metrics: Mapping[str, Any] | None = None,
    extra: Any = None,
) -> None:
    """Save a state, and return when it is on disk.

    The save is atomic: after a crash or a power loss the step is either complete or absent. To save
    in the background and to delete old checkpoints, open a series (`Checkpoints`). With several
    processes, all of them call this, on a shared file system.

    Args:
      directory: the directory of the series, with one subdirectory per step.
      state: any tree of arrays, on any devices.
      step: the step number; defaults to `state.step`.
      data: the data position, or the batches themselves, whose `get_state` is called.
      metrics: numbers by name, one of which may rank the steps.
      extra: any JSON-serializable value, such as arguments or versions.

    Raises:
      CheckpointError: if the state cannot be saved, or the step already exists.
      ConfigError: if a leaf of the state is not an array, or the rest is not JSON-serializable.

    >>> import jax.numpy as jnp, stepfold as sf, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> batches = sf.batches(jnp.arange(10), 2, seed=0)
    >>> _ = next(batches)
    >>> sf.save(folder, {"w": jnp.ones(2)}, step=1, data=batches, metrics={"eval/loss": 0.5})
    >>> restored = sf.restore(folder, {"w": jnp.zeros(2)})
    >>> batches.set_state(restored.data)
    >>> restored.state["w"], restored.metrics
    (Array([1., 1.], dtype=float32), {'eval/loss': 0.5})
    """
    with Checkpoints(directory, keep=None, async_=False) as series:
        series.save(state, step=step, data=data, metrics=metrics, extra=extra)
