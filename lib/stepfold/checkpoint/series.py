"""An open series of checkpoints: background saves, retention, and waiting on close."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from stepfold import tree
from stepfold.checkpoint import steps
from stepfold.checkpoint.agreement import same_as_first
from stepfold.checkpoint.manifest import Words, write_later
from stepfold.checkpoint.restore import Restored, restore
from stepfold.checkpoint.retention import Best, expendable, metrics_in
from stepfold.checkpoint.sealed import integer, plain
from stepfold.core.state import check_not_donated
from stepfold.errors import CheckpointError, ConfigError


class Series:
    """Save states into one directory, one after another; opened by `Checkpoints`.

    Close it, or use a `with` block: closing waits for the pending save and raises its error. If it
    is not closed, the interpreter waits for the save at exit, and exits with an error if the save
    failed. Under Python 3.12.0 to 3.12.2 it does fail, since they cannot start threads by then.

    Attributes:
      directory: the directory of the series.
      every: steps between checkpoints.
      every_epochs: epochs between checkpoints.
      best: the metric that ranks steps, and "min" or "max".
      saved: the step that this series saved last.
    """

    def __init__(
        self,
        directory: Path,
        *,
        every: int | None = None,
        every_epochs: int | None = None,
        every_minutes: float | None = None,
        keep: int | None = None,
        keep_every: int | None = None,
        best: Best | None = None,
        keep_best: int = 1,
        background: bool = True,
    ) -> None:
        # Lazy: orbax takes longer to import than everything else together.
        from stepfold.checkpoint.store import Store

        self.directory = directory
        self.every, self.every_epochs, self.best = every, every_epochs, best
        self.saved: int | None = None
        self._keep, self._keep_every, self._keep_best = keep, keep_every, keep_best
        self._minutes, self._background = every_minutes, background
        self._saved_at = time.monotonic()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        if jax.process_index() == 0:
            steps.clean(directory)
        self._store = Store(directory)
        self._open = [self]
        # `atexit` is too late: by then no thread can start the threads that a save needs.
        threading._register_atexit(_leave, self._open)  # type: ignore[attr-defined]

    def due(self, step: int, *, epoch: int | None = None) -> bool:
        """Return whether a save is due after `step` steps.

        `epoch` is the number of finished epochs, if the last step ended one. `every_minutes` is
        measured by the clock of process 0. With several processes, each call then synchronizes all
        of them.
        """
        if step == self.saved or step < 1:
            return False
        by_step = self.every is not None and step % self.every == 0
        by_epoch = bool(epoch and self.every_epochs and epoch % self.every_epochs == 0)
        return by_step or by_epoch or self.is_late()

    def is_late(self) -> bool:
        """Return whether `every_minutes` have passed since the last save; `due` checks this too."""
        if self._minutes is None:
            return False
        late = time.monotonic() - self._saved_at >= 60 * self._minutes
        return same_as_first([int(late)]) == [1]

    def save(
        self,
        state: Any,
        *,
        step: int | None = None,
        data: Any = None,
        metrics: Mapping[str, Any] | None = None,
        extra: Any = None,
        before_commit: Callable[[], None] | None = None,
    ) -> None:
        """Save a state; the arguments are those of `stepfold.save`.

        Blocks for the previous save, and in background mode only until the state is copied off the
        devices. Afterwards the state may be donated to a step, and its numpy arrays may be
        modified. `before_commit` is called in a background thread before the step is committed.

        Raises:
          CheckpointError: if the previous save failed, this one cannot begin, or the step exists.
        """
        self.wait()
        if not self._open:
            raise CheckpointError(f"{self.directory}: expected an open series, got a closed one")
        check_not_donated(state)
        words = words_of(state, step=step, data=data, metrics=metrics, extra=extra, best=self.best)
        if steps.path_of(self.directory, words.step).exists():
            raise CheckpointError(
                f"{self.directory}: expected a new step, got {words.step}, which is there already; "
                "delete it, or save into another directory"
            )
        self._lock = steps.Lock(self.directory)
        try:
            self._store.begin(state, words, before_commit)
        except BaseException:
            self._lock.release()
            self._clean()
            raise
        self.saved, self._saved_at = words.step, time.monotonic()
        self._thread = threading.Thread(
            target=self._finish, args=(words.step,), name="stepfold-save"
        )
        self._thread.start()
        if not self._background:
            self.wait()

    def add_later(self, step: int, *, metrics: Mapping[str, Any], extra: Any) -> None:
        """Add metrics measured after the save to an existing step, and replace its `extra`."""
        self.wait()
        if jax.process_index() == 0:
            words = words_of({}, step=step, data=None, metrics=metrics, extra=extra)
            write_later(steps.path_of(self.directory, step), words.metrics or {}, words.extra)

    def _finish(self, step: int) -> None:
        try:
            self._store.wait(step)
            if self._keep is not None and jax.process_index() == 0:
                self._prune(self._keep)
        except BaseException as error:  # noqa: BLE001  raised by `wait`, in the caller's thread
            self._failure = error
        finally:
            self._lock.release()

    def _prune(self, keep: int) -> None:
        """Delete steps by the retention policy, but keep the step just saved as a valid one."""
        metrics = metrics_in(self.directory)
        for step in expendable(
            metrics,
            keep=keep,
            last=self.saved,
            keep_every=self._keep_every,
            best=self.best,
            keep_best=self._keep_best,
        ):
            try:
                steps.delete(self.directory, step)
            except OSError as error:
                raise CheckpointError(
                    f"{self.directory}: step {step} was to make room and cannot be deleted: {error}"
                ) from error

    @property
    def saving(self) -> int | None:
        """The step that is being written, if any."""
        return self.saved if self._thread is not None and self._thread.is_alive() else None

    def wait(self) -> None:
        """Wait until the pending save is on disk, and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self._clean()
            raise failure

    def _clean(self) -> None:
        """Remove the files of a failed save; retry, since orbax threads may still write."""
        for _ in range(40 if jax.process_index() == 0 else 0):
            if not steps.clean(self.directory):
                return
            time.sleep(0.05)

    def restore(self, like: Any, **options: Any) -> Restored:
        """Wait for the pending save, then restore as `stepfold.restore` does."""
        self.wait()
        return restore(self.directory, like, **options)

    def close(self) -> None:
        """Wait for the pending save and close the series; idempotent."""
        if not self._open:
            return
        try:
            self.wait()
        finally:
            self._open.clear()
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _leave(opened: list[Series]) -> None:
    """Close an unclosed series at exit, and exit with an error if its save failed."""
    for series in opened[:]:
        try:
            series.close()
        except BaseException:  # noqa: BLE001  there is no caller at exit
            with suppress(AttributeError, OSError, ValueError):  # stderr is missing or closed
                traceback.print_exc()
                sys.stderr.flush()
            with suppress(AttributeError, OSError, ValueError):
                sys.stdout.flush()
            os._exit(1)


def words_of(
    state: Any,
    *,
    step: int | None,
    data: Any,
    metrics: Mapping[str, Any] | None,
    extra: Any,
    best: tuple[str, str] | None = None,
) -> Words:
    """Validate the metadata of a step."""
    if hasattr(data, "get_state"):
        data = data.get_state()
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics: expected numbers by name, got {tree.spell(metrics)}")
    numbers = {name: _number(f"metrics/{name}", value) for name, value in (metrics or {}).items()}
    return Words(
        step=_step(state, step),
        data=plain(data, "data"),
        metrics=plain(numbers, "metrics"),
        extra=plain(extra, "extra"),
        best=best,
    )


def _step(state: Any, step: Any) -> int:
    if step is None:
        step = getattr(state, "step", None)
        if step is None:
            raise ConfigError(
                "step: expected a number, since the state has no `step` of its own; give step=…"
            )
    number = integer(step)
    if number is None or number < 0:
        raise ConfigError(f"step: expected an integer of at least 0, got {tree.spell(step)}")
    return number


def _number(name: str, value: Any) -> float:
    try:
        made = None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        made = None
    if made is None:
        raise ConfigError(f"{name}: expected a number, got {tree.spell(value)}")
    return made
