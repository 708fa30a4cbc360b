"""An open series of checkpoints: when a save is due, what is kept, background saves, restores."""

import atexit
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, Unpack, get_args

import jax

from stepfold.checkpoint.claims import Leases
from stepfold.checkpoint.host_buffers import HostBuffers
from stepfold.checkpoint.manifest import DamageError, StepMetadata, step_metadata
from stepfold.checkpoint.policy import Policy, expendable_steps
from stepfold.checkpoint.restore import Restored, RestoreOptions, restore_from
from stepfold.checkpoint.results import LEASES
from stepfold.checkpoint.steps import Best, already_exists, order_by
from stepfold.checkpoint.store import (
    PendingSave,
    Store,
    complete_steps,
    has_own_step,
    metrics_of,
    open_to_save,
)
from stepfold.checkpoint.temporary import ContinuousSaves, open_temporary
from stepfold.checkpoint.tier import TierStore
from stepfold.checkpoint.verify import damage_of, newest_complete
from stepfold.core.processes import KeyValues, agreement, broadcast_from_first
from stepfold.core.state import check_not_donated
from stepfold.core.validation import is_url, read_choice
from stepfold.errors import CheckpointError, refuse, warn

SaveKind = Literal["permanent", "requested", "temporary"]


class StepReader:
    """Queries of a series, open or not: the base of `Checkpoints` and `Series`."""

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


class Series(StepReader):
    """A series of checkpoints that is open, as `with Checkpoints(…) as series` gives it.

    Leave the `with` block, or call `close`: it waits for the pending save and raises its error. If
    the interpreter exits before, the pending save leaves nothing on disk, and its error is printed
    to stderr. A closed series can still be read.

    Attributes:
      policy: the `Checkpoints` that opened it.
      directory: the directory of the series, or its URL.
      store: the store of the permanent steps.
      saved: the last permanent step that was saved since the series was opened.
      restored_temporary: whether the last restored step is a temporary one.
      evaluated: for each evaluation in another process, the last step whose result the run has
        read. Later steps that await the evaluation are kept. None keeps all steps that await one.

    >>> import jax.numpy as jnp, stepfold as sf, tempfile
    >>> with sf.Checkpoints(tempfile.mkdtemp(), every=10) as series:
    ...     for step in range(1, 26):
    ...         if series.due(step):
    ...             series.save({"w": jnp.full(2, step)}, step=step)
    >>> series.saved, series.restore({"w": jnp.zeros(2, int)}).state["w"]
    (20, Array([20, 20], dtype=int32))
    """

    def __init__(
        self,
        policy: Policy,
        path: str | os.PathLike[str],
        on_close: Callable[["Series"], None],
    ) -> None:
        self.policy, self.store = policy, open_to_save(path)
        # A path becomes absolute; a URL stays as given.
        location = self.store.location
        self.directory = location if is_url(location) else Path(location)
        self._retention = Retention(self.store, policy)
        self._temporary: TierStore | None = None
        if policy.temporary:
            self._temporary = open_temporary(policy.temporary, self.store)
            self._continuous = ContinuousSaves()
        self.saved: int | None = None
        self.restored_temporary = False
        self.evaluated: Mapping[str, int] | None = None
        self._saved_at = self._any_saved_at = time.monotonic()  # the latter in either directory
        self._saving: int | None = None  # the last step of which a save began
        self._due: dict[int, SaveKind] = {}  # what `due` has found for steps that are not saved yet
        self._continuous_due = 0
        self._is_requested = False
        self._notify: Callable[[], None] | None = None  # at a request
        self._buffers = HostBuffers() if policy.async_ else None
        self._pending: PendingSave | None = None
        self._thread: threading.Thread | None = None  # of the pending save
        self._errors: list[tuple[Store, BaseException]] = []  # of saves, not raised yet
        self._has_warned = False  # of temporary saves that fail
        self._has_ranked_metric: bool | None = None  # whether a save had it; None without metrics
        self._has_epochs: bool | None = None  # whether `due` was given one; None if not called
        with agreement(f"{self.directory}: not opened"):
            if self._temporary is not None:
                self._temporary.clean()
            if jax.process_index() == 0:
                self.store.clean(self._prune)
        self._is_open, self._on_close = True, on_close
        # If `close` is never called, print the error of the last save at exit, which joins threads.
        atexit.register(self.close)

    def close(self) -> None:
        """Wait for the pending save and close the series; idempotent."""
        if self._is_open:
            atexit.unregister(self.close)
            self._on_close(self)
            try:
                self.wait()
                if self._notify is None:  # `fit` checks both itself
                    self._warn_of_silence()
            finally:
                self._is_open, self._buffers = False, None
                if self._temporary is not None:
                    self._temporary.close()

    def _warn_of_silence(self) -> None:
        """Warn if the schedule or the ranking had no effect, because of how they were used."""
        policy, problem = self.policy, ""
        if policy.every_epochs and self._has_epochs is False and self.saved is None:
            problem = (
                "nothing was saved, since due was called without an epoch; with every_epochs, call "
                "due(step, epoch=…) where an epoch ends"
            )
        if self.ranking is not None and self._has_ranked_metric is False:
            problem = (
                f"no step is ranked, since none was saved with the metric {self.ranking[0]!r} of "
                "best=…; give it to save(metrics=…)"
            )
        if problem:
            warn(f"{self.directory}: {problem}", RuntimeWarning)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

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
        if (kind := self.kind_due(step, epoch)) is None:
            self._due.pop(step, None)
            return False
        self._due[step] = kind
        return True

    def kind_due(self, step: int, epoch: int | None = None) -> SaveKind | None:
        """Return which kind of save is due after `step` steps; see `due` and `save`."""
        policy, temporary = self.policy, self.policy.temporary
        if step < 1 or step == self.saved:
            return None
        if policy.due(step, epoch=epoch):
            return "permanent"
        if self._is_open and _is_late(policy.every_minutes, self._saved_at):
            return "permanent"
        if self._is_requested:
            return "requested"
        if temporary is None or self._temporary is None or step == self._saving:
            return None
        if temporary.every == "continuous":
            is_due = self._is_continuous_due(step)
        else:
            is_due = temporary.every is not None and step % temporary.every == 0
        is_late = partial(_is_late, temporary.every_minutes, self._any_saved_at)
        return "temporary" if is_due or is_late() else None

    def _is_continuous_due(self, step: int) -> bool:
        """Return whether a continuous save is due; collective at some of the steps."""
        saves = self._continuous
        if step >= saves.next_step:
            is_saving = self.saving is not None
            values = [saves.is_due(step, is_saving=is_saving), is_saving, saves.next_step]
            gathered = KeyValues("continuous").gather(values, "an answer")
            # By the clock of process 0, once the last save has ended in all processes.
            saves.next_step = gathered[0][2]
            is_due = gathered[0][0] and not any(is_saving for _, is_saving, _ in gathered)
            self._continuous_due = step if is_due else 0
        return step == self._continuous_due

    def request(self) -> None:
        """Request a permanent save in this series, as `Checkpoints.request` does in all of them."""
        self._check_open()
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
        kind: SaveKind | None = None,
        awaits: Sequence[str] = (),
        before_commit: Callable[[], None] | None = None,
        **deprecated: bool,
    ) -> None:
        """Save a state; `step`, `data`, `metrics` and `extra` are those of `stepfold.save`.

        Blocks for the previous save, and with `async_` only until the state is copied off the
        devices. Afterwards the state may be donated to a step, and numpy arrays may be modified.

        | kind of the save | in the directory of | kept |
        | --- | --- | --- |
        | "permanent" | `Checkpoints` | by `keep` |
        | "requested" | `Checkpoints` | like permanent ones, but counted apart |
        | "temporary" | `Temporary` | by the `keep` of that |

        Args:
          state: any tree of arrays, on any devices.
          step: the step number; defaults to `state.step`.
          data: the data position.
          metrics: numbers by name.
          extra: JSON-serializable values, with numpy arrays in them.
          kind: the kind; None takes the kind that `due` found for this step, and "permanent" if
            `due` found no save. A requested save at a step of the schedule is a permanent one.
          awaits: names of evaluations that another process makes of the step, which is kept until
            they have ended.
          before_commit: called in a background thread before the step is committed.
          **deprecated: `permanent=True` or `requested=True`, as in version 0.2, in place of `kind`.

        Raises:
          CheckpointError: if the previous save failed, this one cannot begin, or the step exists.
        """
        kind = _read_kind(kind, deprecated)
        if kind == "temporary" and self.policy.temporary is None:
            refuse("kind", "Checkpoints(temporary=…) to go with it", "kind='temporary' alone")
        if kind is None and self._is_temporary(state, step):
            kind = "temporary"
        arguments: Any = {"step": step, "data": data, "metrics": metrics, "extra": extra}
        arguments |= {"best": self.ranking, "awaits": awaits}
        if kind == "temporary" and self._temporary is not None:
            metadata = self._save_temporary(self._temporary, state, arguments, before_commit)
        else:
            metadata = self._save_permanent(kind, state, arguments, before_commit)
        if self.ranking is not None and metadata.metrics:
            has_metric = self.ranking[0] in metadata.metrics
            self._has_ranked_metric = self._has_ranked_metric or has_metric
        self._due = {step: due for step, due in self._due.items() if step > metadata.step}
        if not self.policy.async_:
            self.wait()

    def _save_permanent(
        self,
        kind: SaveKind | None,
        state: Any,
        arguments: Mapping[str, Any],
        before_commit: Callable[[], None] | None,
    ) -> StepMetadata:
        """Begin a save in the directory of the series; all processes agree on it."""
        with agreement(f"{self.directory}: not saved"):
            self.wait()
            metadata = self._validate(state, arguments)
            found = self._due.get(metadata.step)
            is_scheduled = found == "permanent" or self.policy.due(metadata.step)
            is_requested = (found if kind is None else kind) == "requested" and not is_scheduled
        self._is_requested = False
        metadata = metadata._replace(requested=is_requested)
        _make_room(self.store, metadata.step)
        self._begin(self.store, state, metadata, before_commit)
        self.saved, self._saved_at = metadata.step, self._any_saved_at
        return metadata

    def _save_temporary(
        self,
        store: TierStore,
        state: Any,
        arguments: Mapping[str, Any],
        before_commit: Callable[[], None] | None,
    ) -> StepMetadata:
        """Begin a save in the temporary directory; no process waits for another."""
        start = time.monotonic()
        self._join_thread()
        self._raise_errors(defers=jax.process_count() > 1)
        metadata = self._validate(state, arguments)
        self._saving, self._any_saved_at = metadata.step, time.monotonic()
        try:
            self._begin(store, state, metadata, before_commit)
        except CheckpointError as error:
            self._errors.append((store, error))
            self._raise_errors(defers=True)
        self._continuous.begin(time.monotonic() - start)
        return metadata

    def _is_temporary(self, state: Any, step: Any) -> bool:
        """Whether `due` found a temporary save due at this step."""
        if "temporary" not in self._due.values():
            return False
        check_not_donated(state)
        step = getattr(state, "step", None) if step is None else step
        return any(step == due for due, kind in self._due.items() if kind == "temporary")

    def _validate(self, state: Any, arguments: Mapping[str, Any]) -> StepMetadata:
        self._check_open()
        check_not_donated(state)
        return step_metadata(state, **arguments)

    def _begin(
        self,
        store: Store,
        state: Any,
        metadata: StepMetadata,
        before_commit: Callable[[], None] | None,
    ) -> None:
        self._pending = store.begin(state, metadata, before_commit, self._buffers)
        self._saving, self._any_saved_at = metadata.step, time.monotonic()
        self._thread = threading.Thread(
            target=self._finish, args=(store, metadata.step), name="stepfold-save", daemon=False
        )
        self._thread.start()

    def _finish(self, store: Store, step: int) -> None:
        """Commit a step and apply the retention policy, in the background."""
        try:
            prunes = store is self.store and jax.process_index() == 0
            if self._pending is not None:
                self._pending.commit(partial(self._prune, step) if prunes else None)
            self._has_warned = self._has_warned and store is not self._temporary
        except BaseException as error:  # noqa: BLE001  raised by `wait`, in the caller's thread
            self._errors.append((store, error))
        finally:
            self._pending = None  # which holds a copy of the state

    def _prune(self, step: int) -> None:
        """Delete the steps that are not kept, once the permanent `step` is saved."""
        if self._temporary is not None:
            try:
                self._temporary.delete_range(0, step)
            except CheckpointError as error:
                self._errors.append((self._temporary, error))
        self._retention.apply(step, self.evaluated)

    def wait(self) -> None:
        """Wait until the pending save is on disk, and raise its error."""
        self._join_thread()
        self._raise_errors()

    def wait_together(self) -> None:
        """Wait as `wait` does, but raise in all processes if one of them fails; collective.

        After the commit, process 0 alone may fail, for example when it deletes old steps.
        """
        with agreement(f"{self.directory}: not saved"):
            self.wait()

    def _join_thread(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _raise_errors(self, *, defers: bool = False) -> None:
        """Raise the errors of the saves that have ended.

        A `CheckpointError` of a temporary save does not end the run: the first since the last
        success is a warning. With `defers`, other errors are kept for a later call, at which all
        processes agree on them.
        """
        errors, self._errors = self._errors, []
        for store, error in errors:
            if store is not self._temporary or not isinstance(error, CheckpointError):
                if not defers:
                    raise error
                self._errors.append((store, error))
                continue
            if not self._has_warned:
                self._has_warned = True
                warn(
                    f"{store.location}: temporary saves fail, and the run continues without them: "
                    f"{error}",
                    RuntimeWarning,
                )

    # Afterwards

    def add_later(self, step: int, *, metrics: Mapping[str, Any], extra: Any) -> None:
        """Add metrics measured after the save to an existing step, and replace its `extra`."""
        self.wait()
        self._check_open()
        if jax.process_index() == 0:
            holding = (store for store in self._stores() if store.has_step(step))
            store = next(holding, self.store)
            metadata = step_metadata({}, step=step, data=None, metrics=metrics, extra=extra)
            store.add_metadata(step, metadata.metrics or {}, metadata.extra)
            if store is self.store:
                self._retention.forget(step)

    def prune(self) -> None:
        """Delete steps that are no longer kept, since evaluations may have ended after the save."""
        self.wait()
        steps = self.store.steps() if jax.process_index() == 0 else []
        if steps:
            last = steps[-1] if self.saved is None else self.saved
            self._retention.apply(last, self.evaluated)

    def delete_after(self, step: int, is_expendable: Callable[[Any], bool] | None = None) -> None:
        """Delete later steps, on process 0: all, or those whose `extra` the function accepts.

        The arrays in `extra` are not read.
        """
        self._check_open()
        self.saved = self._saving = None  # their numbers may be saved again
        if jax.process_index() > 0:
            return
        if self._temporary is not None and is_expendable is None:
            self._temporary.delete_range(step + 1, math.inf)
        for store in self._stores():
            for number in reversed([number for number in store.steps() if number > step]):
                with suppress(DamageError):  # it is never restored
                    if is_expendable is None or is_expendable(store.read_metadata(number).extra):
                        store.delete(number)

    def has_checkpoint(self) -> bool:
        """Return whether stepfold has saved a step here, even if all permanent ones are damaged.

        With several processes, only one of them calls this. Temporary steps count if one of them is
        good. If all are damaged, they are set aside, with a warning.
        """
        temporary = self._temporary
        if has_own_step(self.store) or temporary is None:
            return has_own_step(self.store)
        if temporary.newest_good() is not None:
            return True
        for step in temporary.steps():
            kept = temporary.set_aside(step)
            text = f"step {step} is damaged, kept as {kept}, and there is no other step"
            warn(f"{temporary.location}: {text}", RuntimeWarning)
        return False

    def restore(self, like: Any, **options: Unpack[RestoreOptions]) -> Restored:
        """Wait for the pending save, then restore as `Checkpoints.restore` does.

        While the series is open, damaged steps that are skipped are renamed to `12.damaged`, so
        that their numbers can be saved again.
        """
        self.wait()
        sets_aside = self._is_open  # after closing, it only reads
        restored, store = restore_from(self._stores(), like, set_aside=sets_aside, **options)
        self.restored_temporary = store is not self.store
        if self._temporary is not None and options.get("step", "latest") == "latest":
            self._warn_of_incomplete(self._temporary, restored.step)
        return restored

    def _warn_of_incomplete(self, temporary: TierStore, step: int) -> None:
        """Warn of temporary steps that are newer than the one that was restored."""
        lost = temporary.incomplete() if jax.process_index() == 0 else {}
        for number in sorted(number for number in lost if number > step):
            warn(
                f"{temporary.location}: step {number} is not complete, and step {step} is taken: "
                f"{lost[number]}",
                RuntimeWarning,
            )

    def _stores(self) -> Sequence[Store]:
        return [self.store] if self._temporary is None else [self.store, self._temporary]

    def _check_open(self) -> None:
        if not self._is_open:
            raise CheckpointError(
                f"{self.directory}: the series is closed; use a `with` block or open"
            )


def _read_kind(kind: Any, deprecated: Mapping[str, bool]) -> SaveKind | None:
    """Validate the kind of a save; in version 0.2 it was `permanent=True` or `requested=True`."""
    for name, value in deprecated.items():
        if name not in ("permanent", "requested"):
            raise TypeError(f"save() got an unexpected keyword argument {name!r}")
        new = f"kind={name!r}" if value else ""
        warn(f"save({name}={value}) is now save({new})", DeprecationWarning)
        kind = name if value else kind
    return None if kind is None else read_choice("kind", kind, get_args(SaveKind))


def _make_room(store: Store, step: int) -> None:
    """Check on process 0 that a step does not exist, or set it aside if damaged; collective.

    A damaged step is not restored, so a run that resumes comes to its number again.
    """
    message = already_exists(store.location, step)
    with agreement(message):
        if jax.process_index() > 0 or not store.has_step(step):
            return
        damage = damage_of(store, step)
        kept = damage and store.set_aside(step)
        if not kept:
            raise CheckpointError(message)
        warn(
            f"{store.location}: step {step} is damaged, kept as {kept}, and saved again: {damage}",
            RuntimeWarning,
        )


class Retention:
    """Delete the steps of one store that a policy does not keep."""

    def __init__(self, store: Store, policy: Policy) -> None:
        self._store, self._policy, self._leases = store, policy, Leases(store, LEASES)
        # The metadata of each complete step, which is read once, without its values.
        self._known: dict[int, StepMetadata] = {}

    def forget(self, step: int) -> None:
        """Forget the metadata of a step that has changed."""
        self._known.pop(step, None)

    def apply(self, last: int, evaluated: Mapping[str, int] | None) -> None:
        """Delete steps once `last` is saved; `evaluated` is that of the series."""
        if self._policy.keep is None:
            return
        self.forget(last)  # it may replace an earlier save of the step
        steps = self._read_steps()
        unscheduled = {step: each for step, each in steps.items() if each.requested}
        for_evaluation = {step for step, each in unscheduled.items() if each.awaits}
        requested = unscheduled.keys() - for_evaluation
        is_ranked = self._policy.best is not None
        metrics = metrics_of(self._store, steps) if is_ranked else {step: {} for step in steps}
        held = self._held_steps(steps, evaluated)
        expendable = expendable_steps(
            self._policy, metrics, requested, last=last, held=held, for_evaluation=for_evaluation
        )
        for step in expendable:
            self._store.delete(step)

    def _read_steps(self) -> Mapping[int, StepMetadata]:
        steps, known = self._store.steps(), self._known
        read = complete_steps(self._store, [step for step in steps if step not in known])
        known |= {step: each._replace(data=None, extra=None) for step, each in read.items()}
        self._known = {step: known[step] for step in steps if step in known}
        return self._known

    def _held_steps(
        self, steps: Mapping[int, StepMetadata], evaluated: Mapping[str, int] | None
    ) -> set[int]:
        """Return the steps that evaluations in other processes have yet to use, or are using."""
        awaited = {
            step
            for step, metadata in steps.items()
            for name in metadata.awaits
            if evaluated is None or evaluated.get(name, step) < step
        }
        return awaited.union(*(lease["steps"] for lease in self._leases.held()))


def _is_late(minutes: float | None, since: float) -> bool:
    """Return whether minutes have passed by the clock of process 0; collective unless None."""
    if minutes is None:
        return False
    return broadcast_from_first([int(time.monotonic() - since >= 60 * minutes)]) == [1]
