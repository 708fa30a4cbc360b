"""Going back to a checkpoint, and leaving out the batches that derailed the run.

The skipped batches are noted next to the checkpoints before any checkpoint is deleted, so that a
kill at any moment loses nothing. A run that resumes reads the note, and first deletes the
checkpoints that a killed run should have deleted: those after the step that it went back to, if
they were saved before the note.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from stepfold.checkpoint.manifest import DamageError
from stepfold.checkpoint.series import Series
from stepfold.core.processes import agreement, broadcast_from_first
from stepfold.errors import warn
from stepfold.json_files import check_plain, has_form, is_count, is_range, parse_json
from stepfold.loop.events import GoBack, Stop
from stepfold.loop.feed import BatchFeed

_NOTE = "rollbacks.json"


class Rollback(NamedTuple):
    """How a run went back, and why. `skipped` is a half-open range of batch indices."""

    at: int
    to: int
    skipped: tuple[int, int]
    why: str

    def __str__(self) -> str:
        first, stop = self.skipped
        batches = f"batch {first}" if stop == first + 1 else f"batches {first} to {stop - 1}"
        return f"{self.why}; went back from step {self.at} to {self.to}, without {batches}"


def _checked(note: Any) -> list[Any]:
    """Return a note if a run can have written it, or raise ValueError."""
    check_plain(note)
    if not has_form(note, [(is_count, is_count, is_range, str)]):
        raise ValueError("other JSON")
    if not all(to < at for at, to, _, _ in note):
        raise ValueError("a target that is not before the step")
    # A lone surrogate in a reason would raise where it is printed.
    return list(parse_json(json.dumps(note).encode()))


class Rollbacks:
    """The rollbacks of a run; with several processes, all of them call each method."""

    def __init__(self, series: Series, feed: BatchFeed) -> None:
        self._series, self._feed = series, feed
        self.done: list[Rollback] = []

    def load(self) -> None:
        """Read the note, and delete what a killed run has not deleted."""
        self.done = self._read()
        if self.done:
            # A checkpoint has the number of rollbacks before it was saved.
            self.delete_later(lambda extra: (extra or {}).get("rollbacks", 0) < len(self.done))

    def delete_later(self, is_obsolete: Callable[[Any], bool] | None = None) -> None:
        """Delete checkpoints later than the last target: all, or those with such an `extra`."""
        where = f"{self._series.directory}: later steps are not deleted"
        with agreement(where):
            self._series.delete_after(self.done[-1].to, is_obsolete)

    def drop_note(self) -> None:
        """Drop the note of an earlier run whose checkpoints are gone, even if it is damaged."""
        has_note = False
        with agreement(f"{self._series.directory}: {_NOTE} is not read"):
            if jax.process_index() == 0:
                try:
                    has_note = bool(self._read_note())
                except DamageError as error:
                    has_note = True
                    warn(f"{error}; it is replaced", RuntimeWarning)
        if broadcast_from_first([has_note])[0]:
            self._write()

    def find_target(self, request: GoBack) -> int | Stop:
        """Return the newest step to go back to, or why to stop instead."""
        if len(self.done) >= request.limit:
            times = "once" if len(self.done) == 1 else f"{len(self.done)} times"
            return Stop("spike", f"{request.why}; went back {times} before, the limit")
        latest, steps = request.to or 0, list[int]()
        with agreement(f"{self._series.directory}: not gone back"):
            self._series.wait()
            if jax.process_index() == 0:
                steps = [step for step in self._series.steps() if step <= latest]
        if steps := broadcast_from_first(steps):
            return max(steps)
        advice = "Checkpoints(at_start=True) saves one"
        return Stop("spike", f"{request.why}; there is no checkpoint before it ({advice})")

    def note(self, request: GoBack, step: int, used: int) -> Rollback:
        """Note what to skip, and to which step to go back, so that a resume does so too."""
        first, stop = request.skip  # type: ignore[misc]  # a pair, as the dispatcher checks
        # Batches are counted from the first of the data, as those used, steps from step 0.
        offset = 1 + step - used
        index = self._feed.skippable().batch_index
        skipped = index(first - offset), index(stop - 1 - offset) + 1
        rollback = Rollback(step, request.to or 0, skipped, request.why)
        self.done.append(rollback)
        self._write()
        return rollback

    def _read(self) -> list[Rollback]:
        note: list[Any] = []
        with agreement(f"{self._series.directory}: {_NOTE} is not read"):
            if jax.process_index() == 0:
                try:
                    note = self._read_note()
                except DamageError as error:
                    raise DamageError(
                        f"{error}; restore it from a copy, or move it away and give batches "
                        "without those that the run skipped"
                    ) from error
        note = broadcast_from_first(note)
        return [Rollback(at, to, (first, stop), why) for at, to, (first, stop), why in note]

    def _read_note(self) -> list[Any]:
        """Read and validate the note, since what it says leads to the deletion of checkpoints."""
        try:
            note = self._series.store.read_note(_NOTE)
            return _checked([] if note is None else note)
        except (DamageError, ValueError) as error:
            reason = str(error).removeprefix(f"{_NOTE}: ")
            raise DamageError(f"{self._series.directory}: {_NOTE} is damaged: {reason}") from error

    def _write(self) -> None:
        with agreement(f"{self._series.directory}: {_NOTE} is not written"):
            if jax.process_index() == 0:
                self._series.store.write_note(_NOTE, self.done)
