"""Measure what a run spends its time on."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """The seconds that the loop spends in its parts, by name.

    The rest of its time, until `ended_at`, goes into steps: dispatching them and waiting for
    devices.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.ended_at: float | None = None  # on the clock of `time.perf_counter`

    def add(self, part: str, start: float) -> None:
        """Add the time since `start`."""
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, start)

    def end(self) -> None:
        """Note the end of the loop; waiting for the last save and closing hooks follow."""
        self.ended_at = time.perf_counter()
