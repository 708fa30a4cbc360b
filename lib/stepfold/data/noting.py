"""Add the position of the failing item to errors."""

from collections.abc import Callable, Iterable
from typing import Any


def each(
    function: Callable[[Any], Any], items: Iterable[Any], note: Callable[[int], str]
) -> list[Any]:
    """Map a function over items; on an error, add `note` of the position of the failing item."""
    done: list[Any] = []
    try:
        for item in items:
            done.append(function(item))  # noqa: PERF401  the note needs the position
    except Exception as error:
        error.add_note(note(len(done)))
        raise
    return done
