"""How fast train steps follow one another, evaluations left out."""

import time

from stepfold.loop.event import Event

_NEW = 0.3  # the weight of the last interval in the smoothed pace


class Pace:
    """Measure the seconds of train steps by the events that come.

    The first interval is left out, since it holds what is compiled.

    Attributes:
      rate: steps a second, smoothed; None before it is known.
    """

    def __init__(self) -> None:
        self.rate: float | None = None
        self._step = 0
        self._time: float | None = None

    def add(self, event: Event) -> tuple[int, float] | None:
        """Take in an event; give the steps since the last one, and the seconds they took.

        Nothing is given where they are not known, nor for an evaluation, whose time does not count.
        """
        now = time.perf_counter() if event.time is None else event.time
        steps, before = event.step - self._step, self._time
        self._step, self._time = event.step, now
        if before is None or not event.is_train or steps < 1 or now <= before:
            return None
        rate = steps / (now - before)
        self.rate = rate if self.rate is None else 1 / ((1 - _NEW) / self.rate + _NEW / rate)
        return steps, now - before
