"""What is done to an example before it becomes part of a batch."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from stepfold import tree
from stepfold.adapter.arguments.training import TrainingArguments
from stepfold.errors import DataError


def transform(arguments: TrainingArguments) -> Callable[[Any], Any] | None:
    """Make what leaves columns out of an example, for `sf.batches`; None leaves all in.

    >>> from stepfold.adapter import TrainingArguments, transform
    >>> arguments = TrainingArguments(ids_to_pop_from_dataset=("id",), remove_unused_columns=True)
    >>> transform(arguments)({"id": 7, "text": "a word", "tokens": [1, 2]})
    {'tokens': [1, 2]}
    """
    popped, unused = frozenset(arguments.ids_to_pop_from_dataset), arguments.remove_unused_columns
    if not (popped or unused):
        return None

    def without_columns(example: Any) -> Any:
        if not isinstance(example, Mapping):
            raise DataError(
                f"ids_to_pop_from_dataset, remove_unused_columns: expected examples with columns "
                f"by name, got {tree.spell(example)}; leave both fields out"
            )
        return {
            name: value
            for name, value in example.items()
            if name not in popped and not (unused and _is_unused(value))
        }

    return without_columns


def _is_unused(value: Any) -> bool:
    """Tell whether a column is of what no step can take."""
    return value is None or np.asarray(value, dtype=None).dtype.kind in "OUSMm"


def shuffle_seed(arguments: TrainingArguments) -> int | None:
    """Give what the orders of the epochs follow from; None is the data's own order.

    >>> from stepfold.adapter import TrainingArguments, shuffle_seed
    >>> shuffle_seed(TrainingArguments(seed=1, shuffle_seed_train=3))
    3
    """
    if not arguments.shuffle_train_dataset:
        return None
    chosen = arguments.shuffle_seed_train
    return arguments.seed if chosen is None else chosen
