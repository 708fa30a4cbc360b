"""When saves are due that follow one another, and cost the loop little of its time."""

import statistics
import time
from collections import deque

_SHARE = 0.01  # of the time of the loop that saves may take
_LOOK_SECONDS = 1.0  # between two looks at the clock, since processes may have to agree on it
_RECENT = 9  # intervals and saves that count


class ContinuousSaves:
    """Decide at which steps to save, by what the loop has lost for the saves before.

    A save costs the time for which it blocks the loop, and what it slows down the steps during its
    writes. Both show in an interval between two looks: it takes longer than as many steps without a
    save.

    >>> saves = ContinuousSaves()
    >>> saves.is_due(1, is_saving=False)  # nothing is known yet
    False
    """

    def __init__(self) -> None:
        self.next_step = 0  # of the next look, and of the first save that may be due
        self._look: tuple[int, float] | None = None  # the step and the time of the last one
        self._paces: deque[float] = deque(maxlen=_RECENT)  # seconds for a step without a save
        self._losses: deque[float] = deque(maxlen=_RECENT)  # seconds for a save
        self._blocked = self._slower = 0.0  # seconds for the last save so far
        self._has_save = False  # since the last look
        self._began: float | None = None  # when the last save began

    def is_due(self, step: int, *, is_saving: bool) -> bool:
        """Look at the clock; return whether a save is due after a step."""
        now = time.monotonic()
        if self._look is not None and step > self._look[0]:
            self._measure(step - self._look[0], now - self._look[1], is_saving)
        self._look, self._has_save = (step, now), is_saving
        pace = statistics.median(self._paces) if self._paces else 0.0
        self.next_step = step + max(1, round(_LOOK_SECONDS / pace) if pace else 1)
        if not pace or is_saving:
            return False
        loss = statistics.median(self._losses) if self._losses else 0.0
        return self._began is None or now - self._began >= loss / _SHARE

    def begin(self, seconds: float) -> None:
        """Note that a save has begun, which blocked the loop for some time."""
        self._has_save, self._blocked, self._slower = True, seconds, 0.0
        self._began = time.monotonic() - seconds

    def _measure(self, steps: int, seconds: float, is_saving: bool) -> None:
        if not self._has_save:
            self._paces.append(seconds / steps)
            return
        if self._paces:
            self._slower += seconds - steps * statistics.median(self._paces)
        if not is_saving:
            self._losses.append(max(self._blocked, self._slower))
