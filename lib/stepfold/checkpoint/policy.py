"""When to save a series of checkpoints, and which of them to keep; and `save`, for one of them."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from stepfold.checkpoint.restore import Restored, restore_from
from stepfold.checkpoint.series import Series, StepReader, is_scheduled
from stepfold.checkpoint.steps import Best, read_best
from stepfold.checkpoint.store import Store, open_store
from stepfold.checkpoint.temporary import Temporary, find_temporary
from stepfold.checkpoint.tier import TierStore
from stepfold.checkpoint.verify import damage_of
from stepfold.core.validation import (
    absolute_path,
    check_flags,
    is_url,
    read_instance,
    read_integer,
    read_positive,
)
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
      data: the data position, or the batches themselves, whose `get_state` is called. It may hold
        anything that `extra` may; each process saves its own.
      metrics: numbers by name, one of which may rank the steps.
      extra: JSON-serializable values, such as arguments or versions, with numpy arrays anywhere in
        their dicts and lists, such as a replay buffer. Process 0 saves it. Arrays are copied here,
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
class Checkpoints(StepReader):
    """When to save a series of checkpoints in one directory, and which steps to keep.

    It does nothing on disk until it is opened: by `fit`, by a `with` block, or by `open`. Each
    opening gives a new `Series`, which saves.

    A step is complete or absent, in object storage too. Credentials come from the environment or a
    profile, as tensorstore finds them, and `s3://bucket/run?endpoint=https://host` names another
    server. A request that fails is repeated for about one minute, and one without an answer fails
    after five. What a killed run leaves there is deleted once it is a day old.

    Attributes:
      directory: the directory of the series, or a URL such as `s3://bucket/run` or
        `gs://bucket/run`; None in `fit` means `run_dir/checkpoints`.
      every: steps between checkpoints.
      every_epochs: epochs between checkpoints.
      every_minutes: minutes between checkpoints; `fit` checks it at log points, and where it
        evaluates or ends an epoch.
      keep: number of latest checkpoints to keep; None keeps all. Those that were requested, or
        saved because they were the best so far, are counted apart: as many of them are kept. A step
        that waits for an evaluation in another process is always kept. One that was saved only for
        that is deleted at the next save, or at the end, once its result was read.
      keep_every: keep every step that is a multiple of this number permanently.
      best: the metric that ranks checkpoints, such as `eval/loss`; the best ones are kept as well.
        `fit` also saves after each evaluation that improves it, between scheduled saves too. A
        metric of train steps ranks scheduled checkpoints only.
      mode: whether the "min" or the "max" of the metric is the best. None takes it from the name of
        the metric, such as "min" for a loss and "max" for an accuracy, and raises if the name
        leaves a doubt.
      keep_best: number of best checkpoints to keep.
      at_start: whether `fit` saves before the first step too, so that a run can go back to there.
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

    directory: str | os.PathLike[str] | None = None
    _: KW_ONLY
    every: int | None = None
    every_epochs: int | None = None
    every_minutes: float | None = None
    keep: int | None = 3
    keep_every: int | None = None
    best: str | None = None
    mode: str | None = None
    keep_best: int = 1
    at_start: bool = False
    async_: bool = True
    temporary: Temporary | None = None
    # The open series, so that a request reaches them, and those that `with` opened.
    _open: list[Series] = field(default_factory=list, init=False, repr=False, compare=False)
    _entered: list[Series] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.directory is not None and not is_url(self.directory):
            directory = absolute_path("directory", self.directory)  # the working one may change
            object.__setattr__(self, "directory", directory)
        for name in ("every", "every_epochs", "keep", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None or name == "keep_best":
                object.__setattr__(self, name, read_integer(name, value))
        check_flags(at_start=self.at_start, async_=self.async_)
        if self.every_minutes is not None:
            read_positive("every_minutes", self.every_minutes)
        if self.mode is not None and self.best is None:
            refuse("mode", "best=… to go with it", f"mode={self.mode!r} alone")
        read_best(self.best, self.mode)
        if self.best is None and self.keep_best != 1:
            refuse("keep_best", "best=… to go with it", f"keep_best={self.keep_best} alone")
        for name, default in (("keep_every", None), ("keep_best", 1)):
            if self.keep is None and getattr(self, name) != default:
                got, advice = "keep=None, which keeps all steps", "give a number, or leave it out"
                refuse(name, "a number as keep to go with it", got, advice)
        if self.temporary is not None:
            read_instance("temporary", self.temporary, Temporary, "sf.Temporary('path', every=…)")

    @property
    def ranking(self) -> Best | None:
        return read_best(self.best, self.mode)

    @property
    def schedules(self) -> list[Any]:
        """What has saves at known steps: itself, and `temporary` with a number as `every`."""
        temporary = self.temporary
        has_steps = temporary is not None and isinstance(temporary.every, int)
        return [self, temporary] if has_steps else [self]

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
        return Series(self, path)

    def __enter__(self) -> Series:
        series = self.open()
        self._entered.append(series)
        return series

    def __exit__(self, *error: object) -> None:
        self._entered.pop().close()

    def due(self, step: int, *, epoch: int | None = None) -> bool:
        """Return whether `every` or `every_epochs` schedules a save after `step` steps.

        `epoch` is the number of finished epochs, if the last step ended one.
        """
        return is_scheduled(step, epoch, self.every, self.every_epochs)

    def request(self) -> None:
        """Request a permanent save, in a hook, another thread or a signal handler.

        `fit` saves after the step or call that is running, and continues. With several processes, a
        request in one of them saves in all, at the same step, within about half a second or two
        steps. In a loop of your own, `Series.due` is True until the next permanent save; there, all
        processes request it before the same step.

        It reaches every series that is open. Without one, it raises a `CheckpointError`.

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
            series.receive_request()

    def restore(self, like: Any, **options: Any) -> Restored:
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

        Every value of every step is compared with its checksum. Returns the new names. With several
        processes, one of them calls this.

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
