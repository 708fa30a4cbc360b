"""When there is something to do besides the step."""

from collections.abc import Sequence
from typing import Any


class Schedule:
    """Know the steps of log points, of evaluations and saves, of the ends of epochs, and the last.

    >>> from types import SimpleNamespace
    >>> save = SimpleNamespace(every=25, every_epochs=None)
    >>> schedule = Schedule(10, [save], epoch_steps=16, by_epoch=True, total=40)
    >>> steps = [0]
    >>> while steps[-1] < 40:
    ...     steps.append(schedule.next_after(steps[-1]))
    >>> steps
    [0, 10, 16, 20, 25, 30, 32, 40]
    """

    def __init__(
        self,
        log_every: int,
        due: Sequence[Any],
        *,
        epoch_steps: int | None,
        by_epoch: bool,
        total: int | None,
    ) -> None:
        """Say what there is to do.

        Args:
          log_every: the steps from one log point to the next.
          due: what has `every` and `every_epochs`, each a number or None.
          epoch_steps: the steps of an epoch, or None if nobody can say.
          by_epoch: whether anybody wants to hear of the end of each.
          total: the last step, or None if nobody can say.
        """
        self._log_every, self._epoch_steps, self._total = log_every, epoch_steps or 0, total
        told = [self._epoch_steps] if by_epoch and epoch_steps else []
        self._log_points = [log_every, *told]
        self._all = [*self._log_points, *(steps for one in due for steps in self._steps_of(one))]

    def _steps_of(self, due: Any) -> list[int]:
        by_epoch = (due.every_epochs or 0) * self._epoch_steps
        return [steps for steps in (due.every, by_epoch) if steps]

    def next_after(self, step: int) -> int:
        """Give the next step at which there is something to do."""
        points = [(step // every + 1) * every for every in self._all]
        return min(points if self._total is None else [*points, self._total])

    def is_due(self, what: Any, step: int) -> bool:
        """Tell whether it is time for one of those that have an `every`."""
        return any(step % every == 0 for every in self._steps_of(what))

    def is_log_point(self, step: int) -> bool:
        """Tell whether an interval of train metrics ends with a step."""
        return step == self._total or any(step % every == 0 for every in self._log_points)

    def epochs_done(self, step: int) -> int | None:
        """Give how many epochs were done, if one has just ended."""
        ended = self._epoch_steps and step % self._epoch_steps == 0
        return step // self._epoch_steps if ended else None
