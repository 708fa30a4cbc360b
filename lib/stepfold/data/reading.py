"""Make a batch of rows: read, transform, collate and mask."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from stepfold import tree
from stepfold.data.sources.rows import Rows, Where, numbers
from stepfold.data.sources.stacking import stack
from stepfold.data.transforming import Transform
from stepfold.errors import DataError


class Making(NamedTuple):
    """Make a batch of examples."""

    transform: Transform | None = None
    collate: Callable[[list[Any]], Any] | None = None
    masked: bool = False

    @property
    def draws(self) -> bool:
        """Whether the transform draws random numbers."""
        return self.transform is not None and self.transform.seed is not None

    def __call__(self, examples: list[Any], indices: list[int], epoch: int, valid: Any) -> Any:
        """Make a batch of examples; `valid` is the mask, false at repeated examples."""
        if self.transform is not None:
            examples = self.transform(examples, indices, epoch)
        batch = stack(examples, indices) if self.collate is None else self.collate(examples)
        if batch is None:
            raise DataError("collate: expected a batch, got None; return what it makes")
        return with_mask(batch, valid) if self.masked else batch


class Reading(NamedTuple):
    """Make a batch of rows of a source."""

    rows: Rows
    making: Making

    def __call__(self, where: Where, epoch: int, valid: Any) -> Any:
        """Make a batch of these rows; `valid` is the mask, false at repeated rows."""
        self.rows.check()
        if self.making.transform is None and self.making.collate is None:
            batch = self.rows.take(where)
            return with_mask(batch, valid) if self.making.masked else batch
        return self.making(self.rows.examples(where), numbers(where), epoch, valid)


def with_mask(batch: Any, valid: Any) -> Any:
    """Add the mask `valid` to a batch, or combine it with the `mask` that is there."""
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
