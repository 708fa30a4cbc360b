"""Saving one state, for a loop of one's own."""

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
    """Save a state, and return when it is on the disk.

    It is there wholly or not at all, whatever happens meanwhile, a loss of power too. To save in
    the background, and to have old checkpoints deleted, open a series (`Checkpoints`). With several
    processes all of them call this, on one file system.

    Args:
      directory: where the steps of a run are, a folder each.
      state: any tree of arrays, on any devices.
      step: the number to save it under; `state.step`, if None.
      data: the position in the data, or the batches themselves, which are asked by `get_state`.
      metrics: numbers by name, one of which may say which step is the best.
      extra: anything that JSON can hold: arguments, versions.

    Raises:
      CheckpointError: if it could not be saved, or the step is there already.
      ConfigError: if something in the state is no array, or in the rest no JSON.

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
