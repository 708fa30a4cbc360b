"""What a source is to the rest of the library: a length, and rows by their indices."""

import sys
from typing import Any

from stepfold.data.order import Indices
from stepfold.data.sources.stacking import stack

ENDLESS = sys.maxsize
"""The length that says that a source has no end, as it does in grain."""

Where = slice | Indices


class Rows:
    """How examples are taken from a source; a subclass for each kind of source."""

    length: int
    fingerprint: Any = None
    """What a saved position is to belong to, besides the length: something JSON can hold."""

    def check(self) -> None:
        """Raise if the source is no longer what it was when this was made."""

    def examples(self, where: Where) -> list[Any]:
        """Give the examples one by one."""
        raise NotImplementedError

    def take(self, where: Where) -> Any:
        """Give the examples as one batch, each leaf with a new leading axis."""
        return stack(self.examples(where), numbers(where))


def numbers(where: Where) -> list[int]:
    """Spell out which indices are meant."""
    if isinstance(where, slice):
        return list(range(where.start, where.stop))
    return where.tolist()  # type: ignore[no-any-return]
