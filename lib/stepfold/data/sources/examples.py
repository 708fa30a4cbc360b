"""The source for any object with `len()` and `[i]`."""

from typing import Any

from stepfold import tree
from stepfold.data.noting import each
from stepfold.data.sources.rows import Rows, Where, numbers
from stepfold.errors import DataError


class Examples(Rows):
    """Rows of any object with `len()` and `[i]`."""

    def __init__(self, source: Any) -> None:
        self._source, self.length = source, len(source)
        if not self.length:
            raise DataError(f"source: expected examples, got none: {tree.spell(source)}")

    def check(self) -> None:
        """Raise if the length of the source has changed."""
        if len(self._source) != self.length:
            raise DataError(
                f"source: expected the {self.length} examples it had when the batches were made, "
                f"got {len(self._source)}; make new batches when the source has changed"
            )

    def examples(self, where: Where) -> list[Any]:
        """Return the examples as a list, read in one call if the source has `__getitems__`."""
        indices = numbers(where)
        several = getattr(self._source, "__getitems__", None)
        found = self._one_by_one(indices) if several is None else self._at_once(several, indices)
        if len(found) != len(indices):
            raise DataError(
                f"source: expected {len(indices)} examples of __getitems__({_short(indices)}), got "
                f"{len(found)}"
            )
        for index, example in zip(indices, found, strict=True):
            if example is None:
                raise DataError(
                    f"source: expected an example at index {index}, got None; leave out what is "
                    "missing before the source is given (of a filtered grain dataset, give "
                    "dataset.to_iter_dataset())"
                )
        return found

    def _one_by_one(self, indices: list[int]) -> list[Any]:
        note = lambda row: (
            f"reading index {indices[row]} of the source, row {row} of those asked for"
        )
        return each(self._source.__getitem__, indices, note)

    def _at_once(self, several: Any, indices: list[int]) -> list[Any]:
        try:
            return list(several(indices))
        except Exception as error:
            error.add_note(f"reading indices {_short(indices)} of the source at once")
            raise


def _short(indices: list[int]) -> str:
    return str(indices) if len(indices) <= 8 else f"[{str(indices[:8])[1:-1]}, …]"
