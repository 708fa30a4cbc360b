"""Rows that a disk did not take: they go before the next one, so that none is missing."""

from collections.abc import Callable, Mapping
from typing import Any


class Owed:
    """Write rows in their order, and those that could not be written again before any other.

    What goes wrong is raised each time, so that nobody is left to think that all is well.

    >>> room = []
    >>> def write(step, row):
    ...     if not room:
    ...         raise OSError("no space left")
    ...     print(step, row)
    >>> owed = Owed(write)
    >>> owed.put(10, {"loss": 0.5})
    Traceback (most recent call last):
    ...
    OSError: no space left
    >>> room.append("made")
    >>> owed.put(20, {"loss": 0.25})
    10 {'loss': 0.5}
    20 {'loss': 0.25}
    """

    def __init__(self, write: Callable[[int, Mapping[str, Any]], None]) -> None:
        self._write = write
        self._rows: list[tuple[int, Mapping[str, Any]]] = []

    def put(self, step: int, row: Mapping[str, Any]) -> None:
        """Write a row, after those that are owed.

        Raises:
          OSError: if one cannot be written; it is owed then.
        """
        self._rows.append((step, row))
        self.settle()

    def settle(self) -> None:
        """Write what is owed.

        Raises:
          OSError: if it still cannot be written.
        """
        while self._rows:
            first = self._rows.pop(0)
            try:
                self._write(*first)
            except OSError:
                self._rows.insert(0, first)
                raise

    def drop_after(self, step: int) -> None:
        """Forget the rows of all later steps."""
        self._rows = [row for row in self._rows if row[0] <= step]
