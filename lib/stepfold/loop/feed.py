"""Batches as the fold takes them: epoch after epoch, with their position, and what was waited."""

import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from stepfold import tree
from stepfold.errors import ConfigError, DataError


class Feed:
    """Pull batches, and know where they stand.

    Attributes:
      total: how many steps there are in all, or None if nobody can say.
      waited: the seconds that were spent waiting for batches.
      epoch_steps: the steps of an epoch, or None if nobody can say.
      endless: whether batches are known to have no end.
    """

    def __init__(self, batches: Any, epochs: int | None = None) -> None:
        see_iterable(batches)
        self._batches, self._left, self._iterator = batches, epochs, iter(batches)
        self._once = self._iterator is batches
        self.endless = bool(getattr(batches, "endless", False))
        self.epoch_steps = _steps_per_epoch(batches, self._once)
        if epochs is not None and self._once and self.epoch_steps is None:
            raise ConfigError(
                f"epochs={epochs}: expected batches that can be gone through again, or that know "
                f"their epochs, got {tree.spell(batches)}; give steps=…, or sf.batches(data, …)"
            )
        self.total = None if epochs is None or not self.epoch_steps else epochs * self.epoch_steps
        self.waited = 0.0

    def pull(self, step: int) -> Any:
        """Give the batch of a step.

        Raises:
          StopIteration: if there are no more.
          DataError: if an epoch has none at all.
        """
        start = time.perf_counter()
        try:
            return self._next()
        except StopIteration:
            raise
        except Exception as error:
            error.add_note(f"pulling the batch of step {step}")
            raise
        finally:
            self.waited += time.perf_counter() - start

    def _next(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            if self._once or self._left is None or self._left <= 1:
                raise
        self._left -= 1
        self._iterator = iter(self._batches)
        try:
            return next(self._iterator)
        except StopIteration:
            raise DataError("batches: expected batches in the next epoch too, got none") from None

    def position(self) -> Any:
        """Give the position to save, or None where the batches have none."""
        get_state = getattr(self._iterator, "get_state", None)
        if get_state is None:
            return None
        # Of what is gone through again, the epoch too.
        return get_state() if self._once else {"left": self._left, "position": get_state()}

    def go_to(self, position: Any, step: int) -> None:
        """Go to a saved position.

        Raises:
          DataError: if the batches cannot go there.
        """
        set_state = getattr(self._iterator, "set_state", None)
        if set_state is not None and position is None:
            raise DataError(
                f"batches: expected a position to resume at in the checkpoint of step {step}, but "
                "no position was saved; save with data=batches, or begin anew elsewhere"
            )
        if set_state is None:
            raise DataError(
                f"batches: expected some that can be resumed at step {step}, got "
                f"{tree.spell(self._batches)}, which have no get_state and set_state; give "
                "sf.batches(data, …), or begin anew in another directory"
            )
        if not self._once:
            self._left, position = position["left"], position["position"]
        set_state(position)


def see_iterable(batches: Any) -> None:
    """See that batches can be gone through, and are not one batch.

    Raises:
      ConfigError: if they are anything else.
    """
    is_one = isinstance(batches, str | bytes | dict) or tree.is_array(batches)
    if is_one or not isinstance(batches, Iterable):
        raise ConfigError(
            f"batches: expected an iterable of batches, got {tree.spell(batches)}; "
            "sf.batches(data, 256, seed=0) makes one"
        )


def _steps_per_epoch(batches: Any, once: bool) -> int | None:
    steps = getattr(batches, "steps_per_epoch", None)
    if steps is None and not once:
        with suppress(TypeError):  # no length, or none that it knows
            steps = len(batches)
    return steps
