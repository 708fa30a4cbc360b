"""Errors on the way to a batch say how far it came."""

from collections.abc import Callable, Iterable
from typing import Any


def each(
    function: Callable[[Any], Any], items: Iterable[Any], note: Callable[[int], str]
) -> list[Any]:
    """Call a function on every item, and note on an error at which one it was raised.

    Args:
      function: what is called.
      items: what it is called on.
      note: a function of the position of an item, that says what was done with it.

    Returns:
      The list of what the function gave.

    >>> try:
    ...     each(lambda x: 1 // x, [2, 1, 0], lambda position: f"dividing by number {position}")
    ... except ZeroDivisionError as error:
    ...     print(error.__notes__)
    ['dividing by number 2']
    """
    done: list[Any] = []
    try:
        for item in items:
            done.append(function(item))  # noqa: PERF401  how far it came is told
    except Exception as error:
        error.add_note(note(len(done)))
        raise
    return done
