"""A series of checkpoints: when to save, background saves, and which steps to keep."""

import atexit
import dataclasses
import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import jax

from stepfold import tree
from stepfold.checkpoint.manifest import DamageError, from_json, step_metadata
from stepfold.checkpoint.restore import Restored, restore_from
from stepfold.checkpoint.steps import (
    Best,
    absolute_path,
    expendable,
    is_url,
    order_by,
    read_best,
    read_directory,
)
from stepfold.checkpoint.store import (
    Store,
    check_is_new,
    complete_steps,
    metrics_of,
    open_store,
    open_to_save,
)
from stepfold.checkpoint.verify import newest_complete
from stepfold.core.processes import agreement, broadcast_from_first
from stepfold.core.state import check_not_donated
from stepfold.core.validation import check_count, check_flags, check_positive
from stepfold.errors import CheckpointError, ConfigError


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


@dataclass
class _Session:
    """The state of a series, used once it is opened."""

    # The permanent one, and the temporary one if there is one; None before, and empty once closed.
    stores: Sequence[Store] | None = None
    saved: int | None = None
    saved_at: float = 0.0
    any_saved_at: float = 0.0  # in either directory
    saving: int | None = None  # the last step of which a save began
    temporary_due: int | None = None  # the step for which a temporary save alone is due
    restored_temporary: bool = False
    is_requested: bool = False
    notify: Callable[[], None] | None = None  # at a request
    thread: threading.Thread | None = None
    failure: BaseException | None = None


@dataclass(frozen=True)
class Temporary:
    """A directory for frequent saves, such as a local disk: `Checkpoints(temporary=Temporary(…))`.

    A permanent save, one in the directory of the series, deletes the temporary steps up to its own.
    Saves by request, at a signal, and at the end are permanent; `best`, `keep_best` and
    `keep_every` act on permanent steps alone. A resume takes the newest good step of either.

    Each series has a folder in the directory, named by a hash of its real path or URL, so that runs
    can share the directory. To start a series over, delete both. Several processes need to see the
    same directory: a disk of one host serves the processes on that host only.

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
        check_count("keep", self.keep)
        if self.every is None and self.every_minutes is None:
            raise ConfigError("temporary: expected every=… or every_minutes=…, got neither")

    def folder_of(self, series: Store) -> Path:
        """Return the folder of a series."""
        location = series.location
        # Links are resolved, since they may change, and a directory may have several names.
        names = [location] if is_url(location) else [os.path.realpath(location), location]
        digests = [hashlib.sha256(os.fsencode(name)).hexdigest()[:16] for name in names]
        folders = [read_directory(self.directory) / f"series-{digest}" for digest in digests]
        # Earlier versions used the name as it was given.
        return next((folder for folder in folders if folder.is_dir()), folders[0])


@dataclass(frozen=True)
class Checkpoints:
    """A series of checkpoints in one directory.

    It does nothing on disk until it is opened: by `fit`, by a `with` block, or by `open`, which
    return an opened copy. The same `Checkpoints` can be opened again.

    Leave the `with` block, or call `close`: it waits for the pending save and raises its error. A
    save that is pending when the interpreter exits cannot be finished. It leaves nothing, and its
    error is printed to stderr.

    In object storage, a step is one object that is written last, so that the step is complete or
    absent there too. Credentials come from the environment or a profile, as tensorstore finds them.
    `s3://bucket/run?endpoint=https://host` names another server; `file:///a/folder` has the layout
    of a bucket. A request that fails is repeated for about one minute, and one without an answer
    fails after five. What a killed run leaves there is deleted once it is a day old.

    Attributes:
      directory: the directory of the series, or a URL such as `s3://bucket/run` or
        `gs://bucket/run`; None in `fit` means `run_dir/checkpoints`.
      every: steps between checkpoints.
      every_epochs: epochs between checkpoints.
      every_minutes: minutes between checkpoints; `fit` checks it at log points, and where it
        evaluates or ends an epoch.
      keep: number of latest checkpoints to keep; None keeps all.
      keep_every: keep every step that is a multiple of this number permanently.
      best: the metric that ranks checkpoints, such as `eval/loss`; the best ones are kept as well.
      mode: whether the "min" or the "max" of the metric is the best. If None, "min" where the last
        part of the metric's name contains "loss", otherwise "max".
      keep_best: number of best checkpoints to keep.
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
    async_: bool = True
    temporary: Temporary | None = None
    _session: _Session = field(default_factory=_Session, init=False, repr=False, compare=False)
    _entered: "list[Checkpoints]" = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    # Of the open copies. They share the list, so that a request to any reaches them.
    _sessions: list[_Session] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.directory is not None and not is_url(self.directory):
            directory = absolute_path("directory", self.directory)  # the working one may change
            object.__setattr__(self, "directory", directory)
        for name in ("every", "every_epochs", "keep", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None or name == "keep_best":
                check_count(name, value)
        check_flags(async_=self.async_)
        if self.every_minutes is not None:
            check_positive("every_minutes", self.every_minutes)
        if self.mode is not None and self.best is None:
            raise ConfigError(f"mode: expected best=… to go with it, got mode={self.mode!r} alone")
        read_best(self.best, self.mode)
        if self.temporary is not None and not isinstance(self.temporary, Temporary):
            got = tree.spell(self.temporary)
            raise ConfigError(f"temporary: expected sf.Temporary('path', every=…), got {got}")

    @property
    def ranking(self) -> Best | None:
        """The metric that ranks steps, and "min" or "max"; None without `best`."""
        return read_best(self.best, self.mode)

    # Opening and closing

    def open(self, directory: str | os.PathLike[str] | None = None) -> Self:
        """Return an opened copy, after cleaning up what killed runs left behind.

        Args:
          directory: used if the series has no directory of its own.

        Raises:
          CheckpointError: if the path is not a directory, is not writable, or, with several
            processes, is not the same for all of them.
        """
        path = self.directory if self.directory is not None else directory
        if path is None:
            raise ConfigError("directory: expected a path, got None; give Checkpoints('runs/a', …)")
        stores = [open_to_save(path)]
        if self.temporary is not None:
            stores.append(open_to_save(self.temporary.folder_of(stores[0])))
        # A path becomes absolute; a URL stays as given.
        directory = path if is_url(path) else Path(stores[0].location)
        opened = dataclasses.replace(self, directory=directory)
        now = time.monotonic()
        session = _Session(stores, saved_at=now, any_saved_at=now)
        object.__setattr__(opened, "_session", session)
        with agreement(f"{directory}: not opened"):
            for store in stores if jax.process_index() == 0 else []:
                store.clean(partial(opened._prune, store))
        object.__setattr__(opened, "_sessions", self._sessions)
        self._sessions.append(session)
        # Without `close`: print the error of the last save. Threads were joined by then.
        atexit.register(opened.close)
        return opened

    def close(self) -> None:
        """Wait for the pending save and close the series; idempotent."""
        session = self._session
        if session.stores:
            atexit.unregister(self.close)
            self._sessions.remove(session)
            try:
                self.wait()
            finally:
                session.stores = ()

    def __enter__(self) -> Self:
        opened = self if self._session.stores else self.open()
        self._entered.append(opened)
        return opened

    def __exit__(self, *error: object) -> None:
        self._entered.pop().close()

    # Saving

    def due(self, step: int, *, epoch: int | None = None) -> bool:
        """Return whether a save is due after `step` steps, permanent or temporary.

        `epoch` is the number of finished epochs, if the last step ended one. `every_minutes` is
        measured by the clock of process 0. With several processes, each call then synchronizes all
        of them.
        """
        session, temporary = self._session, self.temporary
        session.temporary_due = None
        if step == session.saved or step < 1:
            return False
        by_step = self.every is not None and step % self.every == 0
        by_epoch = bool(epoch and self.every_epochs and epoch % self.every_epochs == 0)
        if by_step or by_epoch or session.is_requested or self.is_late():
            return True
        if temporary is None or not session.stores or step == session.saving:
            return False
        by_step = temporary.every is not None and step % temporary.every == 0
        if by_step or _is_late(temporary.every_minutes, session.any_saved_at):
            session.temporary_due = step
        return session.temporary_due == step

    def is_late(self) -> bool:
        """Return whether `every_minutes` have passed since the last save; `due` checks this too."""
        return bool(self._session.stores) and _is_late(self.every_minutes, self._session.saved_at)

    def request(self) -> None:
        """Request a permanent save, in a hook, another thread or a signal handler.

        `fit` saves after the step or call that is running, and continues. With several processes, a
        request in one of them saves in all, at the same step, within about half a second or two
        steps. In a loop of your own, `due` is True until the next permanent save; there, all
        processes request it before the same step.

        Call it on the `Checkpoints` that you gave to `fit`: it reaches the copies that are open.
        Without an open copy it raises a `CheckpointError`.

        >>> import jax.numpy as jnp, stepfold as sf, tempfile
        >>> checkpoints = sf.Checkpoints(tempfile.mkdtemp(), every=1000)
        >>> with checkpoints as series:
        ...     checkpoints.request()
        ...     series.due(5)
        True
        """
        if not self._sessions:
            raise CheckpointError(
                f"{self.directory}: expected an open series to save in, got none; request a save "
                "while fit runs, or in a `with` block"
            )
        for session in [*self._sessions]:
            session.is_requested = session.notify is None
            if session.notify is not None:
                session.notify()

    def on_request(self, notify: Callable[[], None]) -> None:
        """Call a function at each request, instead of making `due` True."""
        self._opened()
        self._session.notify = notify

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
    ) -> None:
        """Save a state; the arguments are those of `stepfold.save`.

        Blocks for the previous save, and with `async_` only until the state is copied off the
        devices. Afterwards the state may be donated to a step, and its numpy arrays may be
        modified. `before_commit` is called in a background thread before the step is committed.

        The save is a temporary one only if `due` found nothing else due for this step;
        `permanent=True` makes it permanent then too.

        Raises:
          CheckpointError: if the previous save failed, this one cannot begin, or the step exists.
        """
        with agreement(f"{self.directory}: not saved"):
            self.wait()
            stores, session = self._opened(), self._session
            check_not_donated(state)
            metadata = step_metadata(
                state, step=step, data=data, metrics=metrics, extra=extra, best=self.ranking
            )
        number = metadata.step
        is_temporary = session.temporary_due == number and not permanent
        store = stores[-1 if is_temporary else 0]
        if not is_temporary:
            session.is_requested = False
        check_is_new(store, number)
        store.begin(state, metadata, before_commit)
        session.saving, session.any_saved_at = number, time.monotonic()
        if not is_temporary:
            session.saved, session.saved_at = number, session.any_saved_at
        session.thread = threading.Thread(
            target=self._finish, args=(store, number), name="stepfold-save", daemon=False
        )
        session.thread.start()
        if not self.async_:
            self.wait()

    def add_later(self, step: int, *, metrics: Mapping[str, Any], extra: Any) -> None:
        """Add metrics measured after the save to an existing step, and replace its `extra`."""
        self.wait()
        stores = self._opened()
        if jax.process_index() == 0:
            store = next((store for store in stores if store.has_step(step)), stores[0])
            metadata = step_metadata({}, step=step, data=None, metrics=metrics, extra=extra)
            store.add_metadata(step, metadata.metrics or {}, metadata.extra)

    def read_note(self, name: str) -> Any:
        """Return the JSON that `write_note` wrote next to the steps, or None."""
        return self._opened()[0].read_note(name)

    def write_note(self, name: str, content: Any) -> None:
        """Atomically write JSON next to the steps, on process 0, and return when it is durable."""
        self._opened()[0].write_note(name, content)

    def delete_after(self, step: int, is_expendable: Callable[[Any], bool] | None = None) -> None:
        """Delete later steps, on process 0: all, or those whose `extra` the function accepts."""
        stores = self._opened()
        self._session.saved = self._session.saving = None  # their numbers may be saved again
        for store in stores if jax.process_index() == 0 else []:
            for number in reversed([number for number in store.steps() if number > step]):
                with suppress(DamageError):  # it is never restored
                    if is_expendable is None or is_expendable(
                        from_json(store.read_metadata(number).extra)
                    ):
                        store.delete(number)

    def _opened(self) -> Sequence[Store]:
        stores = self._session.stores
        if not stores:
            got = "one that is not open" if stores is None else "a closed one"
            raise CheckpointError(
                f"{self.directory}: expected an open series, got {got}; use a `with` block or open"
            )
        return stores

    def _finish(self, store: Store, step: int) -> None:
        """Commit a step and apply the retention policy, in the background."""
        try:
            is_first = jax.process_index() == 0
            store.commit(step, partial(self._prune, store, step) if is_first else None)
        except BaseException as error:  # noqa: BLE001  raised by `wait`, in the caller's thread
            self._session.failure = error

    def _prune(self, store: Store, step: int) -> None:
        """Delete steps by the retention policy, except for the step that was just saved."""
        policy: dict[str, Any] = {
            "keep": self.keep,
            "keep_every": self.keep_every,
            "best": self.ranking,
            "keep_best": self.keep_best,
        }
        if self.temporary is not None:
            _, temporary = self._opened()
            if store is temporary:
                policy = {"keep": self.temporary.keep}
            else:
                for old in temporary.steps():
                    if old <= step:
                        temporary.delete(old)
        if policy["keep"] is not None:  # otherwise, do not read all steps
            metrics = metrics_of(complete_steps(store))
            for old in expendable(metrics, last=step, **policy):
                store.delete(old)

    def wait(self) -> None:
        """Wait until the pending save is on disk, and raise its error."""
        session = self._session
        if session.thread is not None:
            session.thread.join()
            session.thread = None
        if session.failure is not None:
            failure, session.failure = session.failure, None
            raise failure

    # Reading

    @property
    def saved(self) -> int | None:
        """The step that was saved last since the series was opened; a permanent one."""
        return self._session.saved

    @property
    def saving(self) -> int | None:
        """The step that is being written, if any."""
        thread = self._session.thread
        return self._session.saving if thread is not None and thread.is_alive() else None

    @property
    def restored_temporary(self) -> bool:
        """Whether the step that was restored last is a temporary one."""
        return self._session.restored_temporary

    def steps(self) -> list[int]:
        """List the steps, permanent and temporary, whether or not they are valid."""
        return sorted({step for store in self._readable() for step in store.steps()})

    def latest_step(self) -> int | None:
        """Return the newest complete step, permanent or temporary, or None."""
        newest = map(newest_complete, self._readable())
        return max((step for step in newest if step is not None), default=None)

    def best_step(self) -> int | None:
        """Return the permanent step with the best metric, or None."""
        stores = self._readable()
        if self.ranking is None or not stores:
            return None
        metrics = metrics_of(complete_steps(stores[0]))
        return next(iter(order_by(self.ranking, metrics)), None)

    def _readable(self) -> Sequence[Store]:
        """Return the store of the series, and that of the temporary steps if there is one."""
        if self._session.stores or self.directory is None:
            return self._session.stores or ()
        stores = [open_store(self.directory)]
        if self.temporary is not None:
            stores.append(open_store(self.temporary.folder_of(stores[0])))
        return stores

    def restore(self, like: Any, **options: Any) -> Restored:
        """Wait for the pending save, then restore as `stepfold.restore` does.

        With `temporary`, the newest step and a step by its number may be a temporary one.
        """
        self.wait()
        stores = self._readable() or [open_store(self.directory)]
        restored, store = restore_from(stores, like, **options)
        self._session.restored_temporary = store is not stores[0]
        return restored


def _is_late(minutes: float | None, since: float) -> bool:
    """Return whether minutes have passed by the clock of process 0; collective unless None."""
    if minutes is None:
        return False
    return broadcast_from_first([int(time.monotonic() - since >= 60 * minutes)]) == [1]
