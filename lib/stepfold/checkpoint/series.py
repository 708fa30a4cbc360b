"""A series of checkpoints: when to save, background saves, and which steps to keep."""

import atexit
import glob
import hashlib
import os
import re
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Self

import jax

from stepfold.checkpoint.claims import Leases
from stepfold.checkpoint.manifest import DamageError, StepMetadata, step_metadata
from stepfold.checkpoint.restore import Restored, restore_from
from stepfold.checkpoint.results import LEASES
from stepfold.checkpoint.steps import (
    Best,
    already_exists,
    expendable,
    order_by,
    read_best,
    read_directory,
)
from stepfold.checkpoint.store import (
    Store,
    complete_steps,
    has_own_step,
    local_path,
    metrics_of,
    open_store,
    open_to_save,
)
from stepfold.checkpoint.verify import damage_of, newest_complete
from stepfold.core.processes import Group, agreement, broadcast_from_first
from stepfold.core.state import check_not_donated
from stepfold.core.validation import (
    absolute_path,
    check_flags,
    is_url,
    read_instance,
    read_integer,
    read_positive,
)
from stepfold.errors import CheckpointError, StepfoldError, refuse
from stepfold.internals import texts


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
class Temporary:
    """A second directory for frequent saves, such as a local disk.

    Give it as `Checkpoints(temporary=Temporary(…))`. A permanent save, one in the directory of the
    series, deletes the temporary steps up to its own. Saves by request, at a signal, and at the end
    are permanent; `best`, `keep_best` and `keep_every` act on permanent steps alone. A resume takes
    the newest good step of either.

    Each series has a folder in the directory, so that runs can share the directory. It is named by
    the real path or URL of the series and by an identity, which is stored in `series.json` next to
    the permanent steps. Temporary steps belong to one series; a new series at the same path ignores
    them. A temporary save that fails, as on a full disk,
    causes a warning. Several processes need to see the same directory: a disk of one host serves
    the processes on that host only.

    Attributes:
      directory: the directory, which is not a URL.
      every: steps between temporary saves.
      every_minutes: minutes since the last save of either kind, checked as in `Checkpoints`.
      keep: number of latest temporary steps to keep.

    >>> import jax.numpy as jnp, stepfold as sf, tempfile
    >>> folder, local = tempfile.mkdtemp(), tempfile.mkdtemp()
    >>> checkpoints = sf.Checkpoints(folder, every=10, temporary=sf.Temporary(local, every=2))
    >>> with checkpoints as series:
    ...     for step in range(1, 14):
    ...         if series.due(step):
    ...             series.save({"w": jnp.full(2, step)}, step=step)
    >>> series.steps(), sf.latest_step(folder), series.restore({"w": jnp.zeros(2, int)}).step
    ([10, 12], 10, 12)
    """

    directory: str | os.PathLike[str]
    _: KW_ONLY
    every: int | None = None
    every_minutes: float | None = None
    keep: int = 1
    every_epochs: ClassVar[None] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", read_directory(self.directory))
        Checkpoints(every=self.every, every_minutes=self.every_minutes)  # checks them
        read_integer("keep", self.keep)
        if self.every is None and self.every_minutes is None:
            refuse("temporary", "every=… or every_minutes=…", "neither")

    def folder_of(self, series: Store, identity: str) -> Path:
        """Return the folder of a series."""
        return read_directory(self.directory) / f"{_folder_prefix(series)}-{identity}"

    def warn_about_others(self, series: Store, identity: str) -> None:
        """Warn if an earlier series in the same directory has left temporary steps."""
        directory = read_directory(self.directory)
        for folder in sorted(directory.glob(f"{glob.escape(_folder_prefix(series))}*")):
            if folder != self.folder_of(series, identity) and open_store(folder).steps():
                warnings.warn(
                    f"{folder}: temporary steps of an earlier series in {series.location}, which "
                    "was deleted or moved, are not continued; delete them, or move it back",
                    RuntimeWarning,
                    stacklevel=2,
                )


def _folder_prefix(series: Store) -> str:
    # Links are resolved, since they may change, and a directory may have several names.
    path = local_path(series.location)
    name = series.location if path is None else os.path.realpath(path)
    return f"series-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"


# A directory that is deleted and made again has the same name, but another identity.
_IDENTITY = "series.json"


def _read_identity(series: Store) -> str | None:
    """Return the identity of a series with temporary steps, or None."""
    with suppress(DamageError):
        note = series.read_note(_IDENTITY)
        identity = note.get("id") if isinstance(note, dict) else None
        if isinstance(identity, str) and re.fullmatch("[0-9a-f]{8}", identity):
            return identity
    return None


def _open_temporary(temporary: Temporary, series: Store, group: Group | None) -> Store | None:
    """Open the store of temporary steps, or return None if the disk is full; collective."""
    identity = None
    with agreement(f"{series.location}: not opened", group):
        if jax.process_index() == 0:
            identity = _read_identity(series)
            if identity is None:
                identity = secrets.token_hex(4)
                temporary.warn_about_others(series, identity)
                series.write_note(_IDENTITY, {"id": identity})
    folder = temporary.folder_of(series, broadcast_from_first([identity], group)[0] or "")
    try:
        return open_to_save(folder, group)
    except CheckpointError as error:
        if not texts.DISK_FULL.search(str(error)):
            raise
        warnings.warn(
            f"{folder}: the run continues without temporary saves: {error}",
            RuntimeWarning,
            stacklevel=4,
        )
        return None


_POLL_SECONDS = 0.05  # between two looks at a save that other processes write too
_OPEN, _HOW_TO_OPEN = "an open series", "use a `with` block or open"
_Kind = Literal["permanent", "requested", "temporary"]


class _StepReader:
    """What both the policy and an open series can read."""

    @property
    def ranking(self) -> Best | None:
        """The metric that ranks steps, and "min" or "max"; None without `best`."""
        raise NotImplementedError

    def _stores(self) -> Sequence[Store]:
        """Return the store of the series, and that of the temporary steps if there is one."""
        raise NotImplementedError

    def steps(self) -> list[int]:
        """List the steps, permanent and temporary, whether or not they are valid."""
        return sorted({step for store in self._stores() for step in store.steps()})

    def latest_step(self) -> int | None:
        """Return the newest complete step, permanent or temporary, or None."""
        newest = map(newest_complete, self._stores())
        return max((step for step in newest if step is not None), default=None)

    def best_step(self) -> int | None:
        """Return the permanent step with the best metric, or None."""
        stores = self._stores()
        if self.ranking is None or not stores:
            return None
        metrics = metrics_of(stores[0], complete_steps(stores[0]))
        return next(iter(order_by(self.ranking, metrics)), None)


@dataclass(frozen=True)
class Checkpoints(_StepReader):
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
        saved because they were the best so far or for an evaluation in another process, are counted
        apart: as many of them are kept. A step that waits for such an evaluation is always kept.
      keep_every: keep every step that is a multiple of this number permanently.
      best: the metric that ranks checkpoints, such as `eval/loss`; the best ones are kept as well.
        `fit` also saves after each evaluation in which it is better than before, whatever the
        schedule. A metric of train steps ranks scheduled checkpoints only.
      mode: whether the "min" or the "max" of the metric is the best. None takes it from the name of
        the metric, such as "min" for a loss and "max" for an accuracy, and raises if the name
        leaves a doubt.
      keep_best: number of best checkpoints to keep.
      at_start: whether `fit` saves before the first step too, so that a run can go back to there.
      async_: whether to write in a background thread. A save then blocks only for the copy off the
        device and for the previous save.
      temporary: a second directory for more frequent saves, `Temporary(directory, every=…)`.

    >>> import jax.numpy as jnp, stepfold as sf, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with sf.Checkpoints(folder, every=10, keep=2) as series:
    ...     for step in range(1, 51):
    ...         if series.due(step):
    ...             series.save({"w": jnp.ones(2)}, step=step, metrics={"eval/loss": 1 / step})
    >>> sf.verify(folder)
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
    _open: "list[Series]" = field(default_factory=list, init=False, repr=False, compare=False)
    _entered: "list[Series]" = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.directory is not None and not is_url(self.directory):
            directory = absolute_path("directory", self.directory)  # the working one may change
            object.__setattr__(self, "directory", directory)
        for name in ("every", "every_epochs", "keep", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None or name == "keep_best":
                read_integer(name, value)
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

    def open(self, directory: str | os.PathLike[str] | None = None) -> "Series":
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

    def __enter__(self) -> "Series":
        series = self.open()
        self._entered.append(series)
        return series

    def __exit__(self, *error: object) -> None:
        self._entered.pop().close()

    def due(self, step: int, *, epoch: int | None = None) -> bool:
        """Return whether `every` or `every_epochs` schedules a save after `step` steps.

        `epoch` is the number of finished epochs, if the last step ended one.
        """
        by_step = self.every is not None and step % self.every == 0
        by_epoch = bool(epoch and self.every_epochs and epoch % self.every_epochs == 0)
        return step >= 1 and (by_step or by_epoch)

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
            advice = "request a save while fit runs, or in a `with` block"
            refuse(self.directory, f"{_OPEN} to save in", "none", advice, kind=CheckpointError)
        for series in [*self._open]:
            series.receive_request()

    def restore(self, like: Any, **options: Any) -> Restored:
        """Restore as `stepfold.restore` does.

        With `temporary`, the newest step and a step by its number may be a temporary one.
        """
        return restore_from(self._stores() or [open_store(self.directory)], like, **options)[0]

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
        if self.temporary is not None and (identity := _read_identity(stores[0])) is not None:
            stores.append(open_store(self.temporary.folder_of(stores[0], identity)))
        return stores

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_") or not hasattr(Series, name):
            raise AttributeError(f"'Checkpoints' object has no attribute {name!r}")
        refuse(name, _OPEN, "one that is not open", _HOW_TO_OPEN, kind=_NotOpenError)


class _NotOpenError(StepfoldError, AttributeError):
    """Also an AttributeError, so that `hasattr` returns False."""


class Series(_StepReader):
    """A series of checkpoints that is open, as `with Checkpoints(…) as series` gives it.

    Leave the `with` block, or call `close`: it waits for the pending save and raises its error. A
    save that is pending when the interpreter exits cannot be finished. It leaves nothing, and its
    error is printed to stderr. After that, a series can still be read.

    Attributes:
      policy: the `Checkpoints` that opened it.
      directory: the directory of the series, or its URL.
      saved: the step that was saved last since the series was opened; a permanent one.
      restored_temporary: whether the step that was restored last is a temporary one.
      evaluated: the last step of each evaluation in another process whose result the run has read.
        Later steps that await the evaluation are kept. None keeps all that await one.

    >>> import jax.numpy as jnp, stepfold as sf, tempfile
    >>> with sf.Checkpoints(tempfile.mkdtemp(), every=10) as series:
    ...     for step in range(1, 26):
    ...         if series.due(step):
    ...             series.save({"w": jnp.full(2, step)}, step=step)
    >>> series.saved, series.restore({"w": jnp.zeros(2, int)}).state["w"]
    (20, Array([20, 20], dtype=int32))
    """

    def __init__(
        self, policy: Checkpoints, path: str | os.PathLike[str], group: Group | None = None
    ) -> None:
        self.policy, self._permanent = policy, open_to_save(path, group)
        # A path becomes absolute; a URL stays as given.
        location = self._permanent.location
        self.directory = location if is_url(location) else Path(location)
        self._temporary: Store | None = None
        if policy.temporary is not None:
            self._temporary = _open_temporary(policy.temporary, self._permanent, group)
        self.group = group  # see `join`
        self.saved: int | None = None
        self.restored_temporary = False
        self._saved_at = self._any_saved_at = time.monotonic()  # the latter in either directory
        self._saving: int | None = None  # the last step of which a save began
        self._due: tuple[int, _Kind] | None = None  # the step that is due, and the save it needs
        self._is_requested = False
        self._notify: Callable[[], None] | None = None  # at a request
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._problem: CheckpointError | None = None  # of a temporary save
        self._has_warned = False
        self._has_ranked_metric: bool | None = None  # whether a save had it; None without metrics
        self._has_epochs: bool | None = None  # whether `due` was given one; None if not called
        # By store and step; see `_kept_steps`.
        self._known: dict[str, dict[int, StepMetadata]] = {}
        self._leases = Leases(self._permanent, LEASES)
        self.evaluated: Mapping[str, int] | None = None
        with agreement(f"{self.directory}: not opened", group):
            for store in self._stores() if jax.process_index() == 0 else []:
                store.clean(partial(self._prune, store))
        self._is_open = True
        policy._open.append(self)
        # Without `close`: print the error of the last save. Threads were joined by then.
        atexit.register(self.close)

    def close(self) -> None:
        """Wait for the pending save and close the series; idempotent."""
        if self._is_open:
            atexit.unregister(self.close)
            self.policy._open.remove(self)
            try:
                self.wait()
                if self._notify is None:  # `fit` checks both itself
                    self._warn_of_silence()
            finally:
                self._is_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def store(self) -> Store:
        """The store of the permanent steps."""
        return self._permanent

    @property
    def temporary(self) -> Temporary | None:
        """The schedule of temporary saves, if there is one."""
        return self.policy.temporary

    @property
    def ranking(self) -> Best | None:
        return self.policy.ranking

    @property
    def saving(self) -> int | None:
        """The step that is being written, if any."""
        return self._saving if self._thread is not None and self._thread.is_alive() else None

    # Saving

    def due(self, step: int, *, epoch: int | None = None) -> bool:
        """Return whether a save is due after `step` steps, permanent or temporary.

        `epoch` is the number of finished epochs, if the last step ended one. `every_minutes` is
        measured by the clock of process 0. With several processes, each call then synchronizes all
        of them.
        """
        self._has_epochs = self._has_epochs or epoch is not None
        kind = None if step == self.saved or step < 1 else self._kind_due(step, epoch)
        self._due = None if kind is None else (step, kind)
        return kind is not None

    def _kind_due(self, step: int, epoch: int | None) -> _Kind | None:
        policy, temporary = self.policy, self.temporary
        if policy.due(step, epoch=epoch):
            return "permanent"
        if self._is_open and _is_late(policy.every_minutes, self._saved_at, self.group):
            return "permanent"
        if self._is_requested:
            return "requested"
        if temporary is None or self._temporary is None or step == self._saving:
            return None
        by_step = temporary.every is not None and step % temporary.every == 0
        is_due = by_step or _is_late(temporary.every_minutes, self._any_saved_at, self.group)
        return "temporary" if is_due else None

    def request(self) -> None:
        """Request a permanent save, as `Checkpoints.request` does."""
        self.policy.request()

    def receive_request(self) -> None:
        """Make the next `due` True, or call the function given to `on_request`."""
        self._is_requested = self._notify is None
        if self._notify is not None:
            self._notify()

    def on_request(self, notify: Callable[[], None]) -> None:
        """Call a function at each request, instead of making `due` True."""
        self._check_open()
        self._notify = notify

    def save(
        self,
        state: Any,
        *,
        step: int | None = None,
        data: Any = None,
        metrics: Mapping[str, Any] | None = None,
        extra: Any = None,
        before_commit: Callable[[], None] | None = None,
        permanent: bool = False,
        requested: bool = False,
        awaits: Sequence[str] = (),
    ) -> None:
        """Save a state; the arguments are those of `stepfold.save`.

        Blocks for the previous save, and with `async_` only until the state is copied off the
        devices. Afterwards the state may be donated to a step, and numpy arrays may be modified.
        `before_commit` is called in a background thread before the step is committed.

        | the save is | if |
        | --- | --- |
        | requested | `requested=True`, and no permanent save is due at this step |
        | temporary | `due` found only a temporary save due, and `permanent=False` |
        | permanent | otherwise |

        A requested save is permanent too, and counts among the requested steps. `awaits` names
        evaluations that another process makes of the step, which is kept until then.

        Raises:
          CheckpointError: if the previous save failed, this one cannot begin, or the step exists.
        """
        with agreement(f"{self.directory}: not saved", self.group):
            self.wait()
            self._check_open()
            check_not_donated(state)
            metadata = step_metadata(
                state, step=step, data=data, metrics=metrics, extra=extra, best=self.ranking,
                awaits=awaits,
            )  # fmt: skip
            kind = self._kind_of(metadata.step, permanent=permanent, requested=requested)
        if self.ranking is not None and metadata.metrics:
            has_metric = self.ranking[0] in metadata.metrics
            self._has_ranked_metric = self._has_ranked_metric or has_metric
        if kind == "temporary" and self._temporary is not None:
            self._saving, self._any_saved_at = metadata.step, time.monotonic()
            try:
                self._begin(self._temporary, state, metadata, before_commit)
            except CheckpointError as error:
                self._problem = error
                self._warn()
        else:
            self._is_requested = False
            metadata = metadata._replace(requested=kind == "requested")
            self._begin(self._permanent, state, metadata, before_commit)
            self.saved, self._saved_at = metadata.step, self._any_saved_at
        if not self.policy.async_:
            self.wait()

    def _kind_of(self, step: int, *, permanent: bool, requested: bool) -> _Kind:
        due = self._due[1] if self._due is not None and self._due[0] == step else None
        if requested and due != "permanent" and not self.policy.due(step):
            return "requested"
        return "permanent" if due is None or (permanent and due == "temporary") else due

    def _begin(
        self,
        store: Store,
        state: Any,
        metadata: StepMetadata,
        before_commit: Callable[[], None] | None,
    ) -> None:
        _make_room(store, metadata.step)
        store.begin(state, metadata, before_commit)
        self._saving, self._any_saved_at = metadata.step, time.monotonic()
        self._thread = threading.Thread(
            target=self._finish, args=(store, metadata.step), name="stepfold-save", daemon=False
        )
        self._thread.start()

    def add_later(self, step: int, *, metrics: Mapping[str, Any], extra: Any) -> None:
        """Add metrics measured after the save to an existing step, and replace its `extra`."""
        self.wait()
        self._check_open()
        if jax.process_index() == 0:
            holding = (store for store in self._stores() if store.has_step(step))
            store = next(holding, self._permanent)
            metadata = step_metadata({}, step=step, data=None, metrics=metrics, extra=extra)
            store.add_metadata(step, metadata.metrics or {}, metadata.extra)
            self._known.get(store.location, {}).pop(step, None)

    def read_note(self, name: str) -> Any:
        """Return the JSON that `write_note` wrote next to the steps, or None."""
        self._check_open()
        return self._permanent.read_note(name)

    def write_note(self, name: str, content: Any) -> None:
        """Atomically write JSON next to the steps, on process 0, and return when it is durable."""
        self._check_open()
        self._permanent.write_note(name, content)

    def delete_after(self, step: int, is_expendable: Callable[[Any], bool] | None = None) -> None:
        """Delete later steps, on process 0: all, or those whose `extra` the function accepts.

        The arrays in `extra` are not read.
        """
        self._check_open()
        self.saved = self._saving = None  # their numbers may be saved again
        for store in self._stores() if jax.process_index() == 0 else []:
            for number in reversed([number for number in store.steps() if number > step]):
                with suppress(DamageError):  # it is never restored
                    if is_expendable is None or is_expendable(store.read_metadata(number).extra):
                        store.delete(number)

    def join(self, group: Group, *, lost: str = "") -> None:
        """Save with the processes of a group from now on; all of them call each method.

        `lost` says which processes have died. A save that waits for them is given up.
        """
        self.group = group
        for store in self._stores():
            store.group = group
            store.abandon(lost)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        # Process 0, which is alive, may have committed the step before.
        if self._saving is not None:
            exists = any(store.has_step(self._saving) for store in self._stores())
            if not group.meet(exists, "the end of a save")[0]:
                self.saved = self._saving = None
        self._failure = self._problem = None

    def get_progress(self) -> list[Any]:
        """Return what was saved and restored last, which is equal in all processes."""
        return [self.saved, self._saving, self.restored_temporary]

    def set_progress(self, progress: Sequence[Any]) -> None:
        """Continue a series that other processes have written, as `get_progress` says."""
        self.saved, self._saving, self.restored_temporary = progress

    def wait(self) -> None:
        """Wait until the pending save is on disk, and raise its error."""
        if self.group is not None and self._thread is not None:  # which may wait for a dead process
            while not self.group.poll(not self._is_saving(), "a save"):
                self._is_saving(_POLL_SECONDS)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._warn()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _is_saving(self, seconds: float = 0.0) -> bool:
        """Wait for the pending save at most so long; return whether it is still pending."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is not None and self._thread.is_alive()

    def _warn(self) -> None:
        """Warn of the first temporary save that failed since the last success."""
        problem, self._problem = self._problem, None
        if problem is not None and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._temporary and self._temporary.location}: temporary saves fail, and the "
                f"run continues without them: {problem}",
                RuntimeWarning,
                stacklevel=3,
            )

    def _warn_of_silence(self) -> None:
        """Warn if the schedule or the ranking had no effect, because of how they were used."""
        policy, problem = self.policy, ""
        if policy.every_epochs and self._has_epochs is False and self.saved is None:
            problem = (
                "every_epochs: expected due(step, epoch=…) where an epoch ends, got no epoch; "
                "nothing was saved"
            )
        if self.ranking is not None and self._has_ranked_metric is False:
            problem = (
                f"best: expected the metric {self.ranking[0]!r} in save(metrics=…), got others "
                "alone; no step is ranked"
            )
        if problem:
            warnings.warn(f"{self.directory}: {problem}", RuntimeWarning, stacklevel=3)

    def has_checkpoint(self) -> bool:
        """Return whether stepfold has saved a step here, even if all of them are damaged now."""
        return any(map(has_own_step, self._stores()))

    def restore(self, like: Any, **options: Any) -> Restored:
        """Wait for the pending save, then restore as `Checkpoints.restore` does.

        While the series is open, damaged steps that are skipped are renamed to `12.damaged`, so
        that their numbers can be saved again.
        """
        self.wait()
        options |= {"set_aside": self._is_open}  # after closing, it only reads
        restored, store = restore_from(self._stores(), like, **options)
        self.restored_temporary = store is not self._permanent
        return restored

    def _stores(self) -> Sequence[Store]:
        return [self._permanent, *([] if self._temporary is None else [self._temporary])]

    def _check_open(self) -> None:
        if not self._is_open:
            refuse(self.directory, _OPEN, "a closed one", _HOW_TO_OPEN, kind=CheckpointError)

    def _finish(self, store: Store, step: int) -> None:
        """Commit a step and apply the retention policy, in the background."""
        try:
            is_first = jax.process_index() == 0
            store.commit(step, partial(self._prune, store, step) if is_first else None)
            self._has_warned = self._has_warned and store is not self._temporary
        except BaseException as error:  # noqa: BLE001  raised by `wait`, in the caller's thread
            if store is self._temporary and isinstance(error, CheckpointError):
                self._problem = error
            else:
                self._failure = error

    def _prune(self, store: Store, step: int) -> None:
        """Delete steps by the retention policy, except for the step that was just saved."""
        policy, temporary = self.policy, self._temporary
        options: dict[str, Any] = {
            "keep": policy.keep,
            "keep_every": policy.keep_every,
            "best": policy.ranking,
            "keep_best": policy.keep_best,
        }
        if policy.temporary is not None and store is temporary:
            options = {"keep": policy.temporary.keep}
        elif temporary is not None:
            try:
                for old in temporary.steps():
                    if old <= step:
                        temporary.delete(old)
            except CheckpointError as error:
                self._problem = error
        if options["keep"] is not None:  # otherwise, do not read all steps
            self._known.get(store.location, {}).pop(step, None)  # it may replace another
            kept = self._kept_steps(store)
            requested = {step for step, metadata in kept.items() if metadata.requested}
            if store is self._permanent:
                options["held"] = self._held_steps(kept)
            is_ranked = options.get("best") is not None
            metrics = metrics_of(store, kept) if is_ranked else {step: {} for step in kept}
            for old in expendable(metrics, requested, last=step, **options):
                store.delete(old)

    def _held_steps(self, kept: Mapping[int, StepMetadata]) -> set[int]:
        """Return the steps that evaluations in other processes have yet to use, or are using."""
        held = {
            step
            for step, metadata in kept.items()
            if any(self._is_awaited(name, step) for name in metadata.awaits)
        }
        return held.union(*(lease["steps"] for lease in self._leases.held()))

    def _is_awaited(self, name: str, step: int) -> bool:
        return self.evaluated is None or self.evaluated.get(name, step) < step

    def _kept_steps(self, store: Store) -> Mapping[int, StepMetadata]:
        """Return the metadata of each complete step without its values, reading each step once."""
        steps, known = store.steps(), self._known.get(store.location, {})
        read = complete_steps(store, [step for step in steps if step not in known])
        known |= {step: each._replace(data=None, extra=None) for step, each in read.items()}
        self._known[store.location] = {step: known[step] for step in steps if step in known}
        return self._known[store.location]


def _make_room(store: Store, step: int) -> None:
    """Check on process 0 that a step does not exist, or set it aside if damaged; collective.

    A damaged step is not restored, so a run that resumes comes to its number again.
    """
    message = already_exists(store.location, step)
    with agreement(message, store.group):
        if jax.process_index() > 0 or not store.has_step(step):
            return
        damage = damage_of(store, step)
        kept = damage and store.set_aside(step)
        if not kept:
            raise CheckpointError(message)
        warnings.warn(
            f"{store.location}: step {step} is damaged, kept as {kept}, and saved again: {damage}",
            RuntimeWarning,
            stacklevel=4,
        )


def _is_late(minutes: float | None, since: float, group: Group | None) -> bool:
    """Return whether minutes have passed by the clock of process 0; collective unless None."""
    if minutes is None:
        return False
    return broadcast_from_first([int(time.monotonic() - since >= 60 * minutes)], group) == [1]
