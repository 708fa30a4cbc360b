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

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what is in the block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
