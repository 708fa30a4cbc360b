"""What opens a series of checkpoints: `Checkpoints`; and `save`, for a single step."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

from stepfold.checkpoint.policy import Policy
from stepfold.checkpoint.restore import Restored, RestoreOptions, restore_from
from stepfold.checkpoint.series import Series, StepReader
from stepfold.checkpoint.store import Store, open_store
from stepfold.checkpoint.temporary import find_temporary
from stepfold.checkpoint.tier import TierStore
from stepfold.checkpoint.verify import damage_of
from stepfold.errors import CheckpointError, StepfoldError, refuse


def save(
    directory: str | os.PathLike[str],
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
    processes, all of them call this, on a shared file system or a bucket. The step is on disk when
    process 0 returns; the others may return a moment earlier.

    Args:
      directory: the directory of the series, with one subdirectory per step; or, for object
        storage, a URL such as `s3://bucket/run` (see `Checkpoints`).
      state: any tree of arrays, on any devices.
      step: the step number; defaults to `state.step`.
      data: the data position, or the batches, whose `get_state` returns it. It may hold the same
        values as `extra`. Each process saves its own.
      metrics: numbers by name. `step="best"` and `Checkpoints(best=…)` rank steps by one of them.
      extra: JSON-serializable values, such as arguments or versions. Their dicts and lists may hold
        numpy arrays, such as a replay buffer. Process 0 saves it. Arrays are copied at the call,
        written in the background, and verified against their checksums like the state.

    Raises:
      CheckpointError: if the state cannot be saved, or the step already exists.
      ConfigError: if a leaf of the state is not an array, or another value cannot be stored.

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


@dataclass(frozen=True)
class Checkpoints(Policy, StepReader):
    """When to save a series of checkpoints in one directory, and which steps to keep.

    It does nothing on disk until it is opened: by `fit`, by a `with` block, or by `open`. Each
    opening returns a new `Series`, which has `save`.

    Saves are atomic, in object storage too. tensorstore finds the credentials in the environment or
    in a profile. `s3://bucket/run?endpoint=https://host` selects another server. Failed requests
    are retried for about one minute, and a request without an answer fails after five. Leftovers of
    killed runs are deleted once they are a day old.

    Attributes:
      directory: the directory of the series, or a URL such as `s3://bucket/run` or
        `gs://bucket/run`; None in `fit` means `run_dir/checkpoints`.
      every: steps between checkpoints.
      every_epochs: epochs between checkpoints.
      every_minutes: minutes between checkpoints; `fit` checks it at log points, and where it
        evaluates or ends an epoch.
      keep: number of latest checkpoints to keep; None keeps all. Checkpoints that were requested,
        or saved because they were the best so far, are counted apart, with the same limit. A step
        that awaits an evaluation in another process is always kept. A step saved only for such an
        evaluation is deleted after its result was read, at the next save or at the end.
      keep_every: keep every step that is a multiple of this number permanently.
      best: the metric that ranks checkpoints, such as `eval/loss`; the best ones are kept as well.
        `fit` also saves after each evaluation that improves it, between scheduled saves too. A
        metric of train steps ranks scheduled checkpoints only.
      mode: whether the "min" or the "max" of the metric is the best. None takes it from the name of
        the metric, such as "min" for a loss and "max" for an accuracy, and raises if the name
        leaves a doubt.
      keep_best: number of best checkpoints to keep.
      at_start: whether `fit` also saves before the first step, so that a run can go back to it.
      async_: whether to write in a background thread. A save then blocks only for the copy off the
        device and for the previous save. On CPU, that copy stays in memory for the next save.
      temporary: a second directory for more frequent saves, `Temporary(directory, every=…)`.

    >>> import jax.numpy as jnp, stepfold as sf, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with sf.Checkpoints(folder, every=10, keep=2) as series:
    ...     for step in range(1, 51):
    ...         if series.due(step):
    ...             series.save({"w": jnp.ones(2)}, step=step, metrics={"eval/loss": 1 / step})
    >>> sf.checkpoint.verify(folder)
    {40: [], 50: []}
    """

    # The open series, which a request reaches, and those that a `with` block closes.
    _open: list[Series] = field(default_factory=list, init=False, repr=False, compare=False)
    _entered: list[Series] = field(default_factory=list, init=False, repr=False, compare=False)

    def open(self, directory: str | os.PathLike[str] | None = None) -> Series:
        """Open the series, after cleaning up what killed runs left behind.

        Args:
          directory: the directory, if the policy has none.

        Raises:
          CheckpointError: if the path is not a directory, is not writable, or, with several
            processes, is not the same for all of them.
        """
        path = self.directory if self.directory is not None else directory
        if path is None:
            refuse("directory", "a path", "None", "give Checkpoints('runs/a', …)")
        series = Series(self, path, on_close=self._open.remove)
        self._open.append(series)
        return series

    def __enter__(self) -> Series:
        series = self.open()
        self._entered.append(series)
        return series

    def __exit__(self, *error: object) -> None:
        self._entered.pop().close()

    def request(self) -> None:
        """Request a permanent save, in a hook, another thread or a signal handler.

        `fit` saves after the current step, or call of several steps, and continues. With several
        processes, a request in one of them saves in all, at the same step, within about half a
        second or two steps. In your own loop, `Series.due` is True until the next permanent save;
        there, all processes have to request it before the same step.

        The request reaches every open series. If none is open, it raises a `CheckpointError`.

        >>> import jax.numpy as jnp, stepfold as sf, tempfile
        >>> checkpoints = sf.Checkpoints(tempfile.mkdtemp(), every=1000)
        >>> with checkpoints as series:
        ...     checkpoints.request()
        ...     series.due(5)
        True
        """
        if not self._open:
            raise CheckpointError(
                "Checkpoints.request: no series is open; request a save while fit runs, or in a "
                "`with` block"
            )
        for series in [*self._open]:
            series.request()

    def restore(self, like: Any, **options: Unpack[RestoreOptions]) -> Restored:
        """Restore as `stepfold.restore` does.

        With `temporary`, the newest step and a step by its number may be a temporary one.
        """
        stores = self._stores() or [open_store(self.directory)]
        with ExitStack() as stack:
            for store in stores:
                if isinstance(store, TierStore):
                    store.connect()
                    stack.callback(store.close)
            return restore_from(stores, like, **options)[0]

    def clean(self) -> list[str]:
        """Rename damaged steps to `12.damaged`, and delete what killed runs left behind.

        Compares every value of every step with its checksum, and returns the new names. With
        several processes, only one of them calls this.

        >>> import jax.numpy as jnp, pathlib, stepfold as sf, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> sf.save(folder, {"w": jnp.ones(2)}, step=12)
        >>> pathlib.Path(folder, "12/state/files.json").unlink()
        >>> sf.Checkpoints(folder).clean()
        ['12.damaged']
        """
        kept = []
        for store in self._stores() or [open_store(self.directory)]:
            store.clean()
            bad = [step for step in store.steps() if damage_of(store, step) is not None]
            kept += [name for step in bad if (name := store.set_aside(step)) is not None]
        return kept

    def _stores(self) -> Sequence[Store]:
        if self.directory is None:
            return ()
        stores = [open_store(self.directory)]
        if self.temporary is not None and (store := find_temporary(self.temporary, stores[0])):
            stores.append(store)
        return stores

    if not TYPE_CHECKING:  # a type checker knows that only an open series saves

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_") or not hasattr(Series, name):
                raise AttributeError(f"'Checkpoints' object has no attribute {name!r}")
            raise _NotOpenError(
                f"Checkpoints.{name} needs an open series; use a `with` block or open"
            )


class _NotOpenError(StepfoldError, AttributeError):
    """Also an AttributeError, so that `hasattr` returns False."""
