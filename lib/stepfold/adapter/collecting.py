"""From examples to a batch: padded and cut to one length, or stacked as they are."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stepfold.data.collate import collate
from stepfold.data.integers import read_integer
from stepfold.data.leaves import check_truncate
from stepfold.data.sources.stacking import stack

Collect = Callable[[Any], Any]


def collect_function(max_sequence_length: int | None, truncation_mode: str) -> Collect:
    """Make the function that makes a batch of a list of examples, or of a dict of columns.

    With a length, sequences are padded and cut to it, which `stepfold.collate` does; without one,
    examples are stacked, and have to be of one shape.

    Raises:
      ConfigError: if the length or the mode is none.

    >>> collect = collect_function(4, "keep_end")
    >>> collect([{"ids": [1, 2, 3, 4, 5]}, {"ids": [6]}])["ids"].tolist()
    [[2, 3, 4, 5], [6, 0, 0, 0]]
    >>> collect({"ids": [[1], [2, 3]]})["mask"].sum(1).tolist()
    [1, 2]
    """
    check_truncate("create_collect_function", truncation_mode)
    if max_sequence_length is None:
        return stacked
    read_integer("create_collect_function: max_sequence_length", max_sequence_length, 1)

    def padded(examples: Any) -> Any:
        return collate(examples, length=max_sequence_length, truncate=truncation_mode)  # type: ignore[arg-type]

    return padded


def stacked(examples: Any) -> Any:
    """Stack examples leaf by leaf; columns are stacked as they are.

    >>> stacked([{"x": 1.0}, {"x": 2.0}])
    {'x': array([1., 2.])}
    """
    if isinstance(examples, Mapping):
        return {name: np.asarray(column) for name, column in examples.items()}
    return stack(examples, range(len(examples)))


def columns(examples: Sequence[Any]) -> Any:
    """Turn examples into columns: arrays where all have one shape, and otherwise lists.

    It is what a collect function of one's own is given, so that it may return it as it is.

    >>> columns([{"ids": [1], "label": 0}, {"ids": [2, 3], "label": 1}])
    {'ids': [[1], [2, 3]], 'label': array([0, 1])}
    """
    if not isinstance(examples[0], Mapping):
        return stacked(examples)
    names = examples[0].keys()
    return {name: _column([example[name] for example in examples]) for name in names}


def _column(values: list[Any]) -> Any:
    shapes = {np.shape(value) for value in values if not _is_ragged(value)}
    if len(shapes) == 1 and not any(map(_is_ragged, values)):
        return np.stack([np.asarray(value) for value in values])
    return values


def _is_ragged(value: Any) -> bool:
    return isinstance(value, list) and len({np.ndim(inner) for inner in value}) > 1
