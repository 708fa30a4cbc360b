"""How often a step was compiled, and how long what was timed took."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class CompilationTracker:
    """Count how often a function was traced, which is how often it was compiled.

    >>> import jax, numpy as np
    >>> tracker = CompilationTracker()
    >>> double = jax.jit(tracker.tracked(lambda x: 2 * x))
    >>> _ = double(np.ones(2)), double(np.ones(2)), double(np.ones(3))
    >>> tracker.compilations
    2
    """

    def __init__(self) -> None:
        self.compilations = 0

    def tracked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Give the function that counts."""

        def counted(*arguments: Any) -> Any:
            self.compilations += 1
            return function(*arguments)

        return counted


class Timers:
    """Add up the seconds of what has a name.

    >>> timer = Timers()
    >>> with timer("evaluation"):
    ...     pass
    >>> timer.seconds["evaluation"] < 1
    True
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begun: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what is in the block."""
        self._begun[name] = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.running(name)
            del self._begun[name]

    def running(self, name: str) -> float:
        """Give for how long a block has been running; 0 if it is not."""
        return time.perf_counter() - self._begun[name] if name in self._begun else 0.0
