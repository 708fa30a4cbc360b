"""The interface of a source: a length, and rows by index."""

import sys
from typing import Any

from stepfold.data.order import Indices
from stepfold.data.sources.stacking import stack

ENDLESS = sys.maxsize
"""The length of an infinite source, as in grain."""

Where = slice | Indices


class Rows:
    """Base class of sources, with a subclass for each kind."""

    length: int
    fingerprint: Any = None
    """Identifies the source in saved positions, besides its length; serializable as JSON."""

    def check(self) -> None:
        """Raise if the source has changed since this object was created."""

    def examples(self, where: Where) -> list[Any]:
        """Return the examples as a list."""
        raise NotImplementedError

    def take(self, where: Where) -> Any:
        """Return the examples as one batch, each leaf with a new leading axis."""
        return stack(self.examples(where), numbers(where))


def numbers(where: Where) -> list[int]:
    """Convert a slice or an index array to a list of indices."""
    if isinstance(where, slice):
        return list(range(where.start, where.stop))
    return where.tolist()  # type: ignore[no-any-return]
