"""The schedule of a run: pure functions of a step that return what is due after it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepfold.data.epochs import EpochEnds

_LONG = 20  # steps between log points: with as many, the next one is too late to read metrics


@dataclass(frozen=True)
class Schedule:
    """When something is due: log points, evaluations, saves, the ends of epochs and of the run.

    The device needs work while hooks run, so the metrics of a log point are read `delay` steps
    later, at the step `read_step(log_point)`. They are read at once at an evaluation, a save, and
    the end of an epoch or of the run, which depend on what hooks return. No call of several steps
    crosses the step of a read, so `delay_of` chooses a step that usual calls reach anyway.

    Attributes:
      log_every: the steps between log points, counted from step 0 of the state.
      total: the step at which the run ends; None if the batches say so.
      recurring: objects with `every` and `every_epochs`, each an integer or None: evaluations and
        saves.
      epoch_ends: where epochs end, counted from the first batch of the data, after `first_step`.
      logs_epochs: whether hooks are called at the ends of epochs, which are log points then.
      size_changes: the steps after which the batch size changes; no call of several steps crosses
        one.
    """

    log_every: int
    total: int | None = None
    recurring: Sequence[Any] = ()
    epoch_ends: EpochEnds | None = None
    first_step: int = 0
    logs_epochs: bool = False
    size_changes: Sequence[int] = ()
    delay: int = 0

    @staticmethod
    def delay_of(log_every: int) -> int:
        """Return the delay for a distance of log points, unless a hook needs the exact state.

        Metrics are read at the next log point; if that is 20 steps away or more, they are read 10
        steps later, or 16 for multiples of 8 that are none of 10.
        """
        if log_every < _LONG:
            return log_every
        return 16 if log_every % 8 == 0 and log_every % 10 else 10

    def is_log_point(self, step: int) -> bool:
        """Whether an interval of train metrics ends with a step."""
        return step == self.total or step % self.log_every == 0 or self._ends_logged_epoch(step)

    def is_due(self, item: Any, step: int) -> bool:
        """Whether one of `recurring` is due after a step."""
        if item.every and step % item.every == 0:
            return True
        epochs = self.epochs_done(step) if item.every_epochs else None
        return epochs is not None and epochs % item.every_epochs == 0

    def evaluates(self, evaluation: Any, step: int, began: int) -> bool:
        """Whether an evaluation is scheduled at a step; at the end, all of them run anyway.

        `began` is the step at which the run began.
        """
        if step == self.total:
            return False
        return evaluation.at_start if step == began else self.is_due(evaluation, step)

    def epochs_done(self, step: int) -> int | None:
        """Return the number of epochs done if one ends with a step, else None."""
        used = step - self.first_step
        if self.epoch_ends is None or used <= 0:
            return None
        done = self.epoch_ends.done(used)
        return done if done > self.epoch_ends.done(used - 1) else None

    def reads_all(self, step: int) -> bool:
        """Whether the metrics of all log points up to a step are read before the next one."""
        is_needed = not self.delay or step == self.total or self._ends_logged_epoch(step)
        return is_needed or any(self.is_due(item, step) for item in self.recurring)

    def read_until(self, step: int) -> int:
        """Return the last log point whose metrics are read after a step."""
        return step if self.reads_all(step) else step - self.delay

    def read_step(self, log_point: int) -> int:
        """Return the step after which the metrics of a log point are read."""
        later = range(log_point, log_point + self.delay)
        return next((step for step in later if self.reads_all(step)), log_point + self.delay)

    def next_log_point(self, step: int) -> float:
        """Return the first log point after a step."""
        following: list[float] = [step + self.log_every - step % self.log_every]
        following += [self._next_epochs(step, 1)] if self.logs_epochs else []
        following += [] if self.total is None else [self.total]
        return min([each for each in following if each > step])

    def next_due(self, step: int) -> float:
        """Return the first step after one at which anything is due."""
        following: list[float] = [self.next_log_point(step)]
        following += [each for each in self.size_changes if each > step]
        for item in self.recurring:
            following += [step + item.every - step % item.every] if item.every else []
            following += [self._next_epochs(step, item.every_epochs)] if item.every_epochs else []
        return min(following)

    def _next_epochs(self, step: int, count: int) -> float:
        """Return the next step that ends an epoch whose number is a multiple of `count`."""
        if self.epoch_ends is None:
            return math.inf
        done = self.epoch_ends.done(step - self.first_step)
        return self.first_step + self.epoch_ends.end((done // count + 1) * count)

    def _ends_logged_epoch(self, step: int) -> bool:
        return self.logs_epochs and self.epochs_done(step) is not None
