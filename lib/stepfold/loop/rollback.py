"""Going back to a checkpoint, and leaving out the batches with which a run went wrong.

A kill at any moment loses nothing. What is left out is noted next to the checkpoints before any of
them is deleted. A run that resumes reads the note, and first deletes the checkpoints that should be
gone: those after the step that the run went back to, if they were saved before the note.
"""

from typing import Any, NamedTuple

import jax

from stepfold.checkpoint.series import Series
from stepfold.core.processes import agreement, broadcast_from_first
from stepfold.loop.data import BatchFeed
from stepfold.loop.hooks.base import GoBack, Stop

_NOTE = "rollbacks.json"


class Rollback(NamedTuple):
    """One time that a run went back. `skipped` is a half-open range of batch indices."""

    at: int
    to: int
    skipped: tuple[int, int]
    why: str

    def __str__(self) -> str:
        first, stop = self.skipped
        batches = f"batch {first}" if stop == first + 1 else f"batches {first} to {stop - 1}"
        return f"{self.why}; went back from step {self.at} to {self.to}, without {batches}"


class Rollbacks:
    """All times that a run went back; with several processes, all of them call each method."""

    def __init__(self, series: Series, feed: BatchFeed) -> None:
        self._series, self._feed = series, feed
        self.done: list[Rollback] = []

    def resume(self) -> None:
        """Read the note, and delete what a killed run has not deleted."""
        note = self._read()
        self.done = [Rollback(at, to, (first, stop), why) for at, to, (first, stop), why in note]
        if self.done:
            # The run state counts the rollbacks before the checkpoint was saved.
            is_gone = lambda extra: (extra or {}).get("rollbacks", 0) < len(self.done)
            with agreement(f"{self._series.directory}: not resumed"):
                self._series.delete_after(self.done[-1].to, is_gone)

    def restart(self) -> None:
        """Forget the note of an earlier run, whose checkpoints are gone."""
        if self._read():
            self._write()

    def find_target(self, request: GoBack) -> int | Stop:
        """Return the newest step to go back to, or why to stop instead."""
        if len(self.done) >= request.limit:
            times = "once" if len(self.done) == 1 else f"{len(self.done)} times"
            return Stop("spike", f"{request.why}; went back {times} before")
        latest, steps = request.to or 0, list[int]()
        with agreement(f"{self._series.directory}: not gone back"):
            self._series.wait()
            if jax.process_index() == 0:
                steps = [step for step in self._series.steps() if step <= latest]
        if steps := broadcast_from_first(steps):
            return max(steps)
        return Stop("spike", f"{request.why}; there is no checkpoint before it to go back to")

    def go_back(self, request: GoBack, step: int) -> Rollback:
        """Note what to skip, and delete checkpoints later than `request.to`, the target.

        The caller restores it, and then skips.
        """
        first, stop = request.skip  # type: ignore[misc]  # a pair, as the dispatcher checks
        # The batch of step n is number n - 1 of the run, which used some of an earlier one.
        offset = 1 + step - self._feed.used
        index = self._feed.skippable().batch_index
        skipped = index(first - offset), index(stop - 1 - offset) + 1
        rollback = Rollback(step, request.to or 0, skipped, request.why)
        self.done.append(rollback)
        self._write()
        with agreement(f"{self._series.directory}: later steps are not deleted"):
            self._series.delete_after(rollback.to)
        return rollback

    def as_json(self) -> list[dict[str, Any]]:
        """Return what `run.json` holds."""
        return [rollback._asdict() for rollback in self.done]

    def _read(self) -> list[Any]:
        note: list[Any] = []
        with agreement(f"{self._series.directory}: {_NOTE} is not read"):
            if jax.process_index() == 0:
                note = self._series.read_note(_NOTE) or []
        return broadcast_from_first(note)

    def _write(self) -> None:
        with agreement(f"{self._series.directory}: {_NOTE} is not written"):
            if jax.process_index() == 0:
                self._series.write_note(_NOTE, self.done)
