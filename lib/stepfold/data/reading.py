"""How the rows of a step become a batch: read, transformed, put together, and masked."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from stepfold import tree
from stepfold.data.sources import Rows, Where, numbers, stack
from stepfold.errors import DataError


class Reading(NamedTuple):
    """How rows become a batch."""

    rows: Rows
    transform: Callable[[Any], Any] | None
    collate: Callable[[list[Any]], Any] | None
    masked: bool

    def __call__(self, where: Where, valid: Any) -> Any:
        """Make the batch of these rows, of which some may be no repetition."""
        self.rows.check()
        batch = self._batch(where)
        return with_mask(batch, valid) if self.masked else batch

    def _batch(self, where: Where) -> Any:
        if self.transform is None and self.collate is None:
            return self.rows.take(where)
        examples = self.rows.examples(where)
        if self.transform is not None:
            examples = self._transformed(self.transform, examples, numbers(where))
        if self.collate is None:
            return stack(examples, numbers(where))
        batch = self.collate(examples)
        if batch is None:
            raise DataError("collate: expected a batch, got None; return what it makes")
        return batch

    @staticmethod
    def _transformed(
        transform: Callable[[Any], Any], examples: list[Any], indices: list[int]
    ) -> list[Any]:
        done: list[Any] = []
        try:
            for example in examples:
                done.append(transform(example))  # noqa: PERF401  how far it came is told
        except Exception as error:
            row = len(done)
            error.add_note(
                f"transforming index {indices[row]} of the source, row {row} of those asked for"
            )
            raise
        for index, example in zip(indices, done, strict=True):
            if example is None:
                raise DataError(
                    f"transform: expected an example, got None for index {index} of the source; "
                    "return the example, and leave out what is not wanted before batching"
                )
        return done


def with_mask(batch: Any, valid: Any) -> Any:
    """Say in a batch which of its rows are no repetition."""
    if not isinstance(batch, dict):
        raise DataError(
            "remainder='pad': expected batches that are a dict, to add a mask to, got "
            f"{tree.spell(batch)}; give a source such as {{'x': …}}"
        )
    mask = batch.get("mask")
    if mask is None:
        if all(np.shape(leaf)[:1] != valid.shape for leaf in jax.tree.leaves(batch)):
            raise DataError(
                f"remainder='pad': expected batches of {len(valid)} rows, to add a mask to, got "
                "none in what collate makes; use 'keep' or 'drop' where it changes their number"
            )
        return {**batch, "mask": valid}
    if not tree.is_array(mask) or mask.shape[:1] != valid.shape or not tree.is_data(mask):
        raise DataError(
            f"remainder='pad': expected a mask of {len(valid)} rows to combine with, got "
            f"{tree.spell(mask)}; call it something else than `mask`, or leave the padding to "
            "collate with remainder='keep'"
        )
    spread = valid.reshape(-1, *[1] * (mask.ndim - 1))
    return {**batch, "mask": np.where(spread, mask, np.zeros((), mask.dtype))}
