"""Apply transforms to examples, with reproducible random generators."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from stepfold import tree
from stepfold.data.noting import each
from stepfold.data.order import make_key
from stepfold.errors import ConfigError, DataError

_STREAM = (1 << 32) - 1  # a stream of the seed that no shuffle order uses


class Transform(NamedTuple):
    """A transform of examples, made by `read_transform`."""

    function: Callable[..., Any]
    seed: int | None
    """The seed of the generators, or None if the function takes no generator."""

    def __call__(self, examples: list[Any], indices: list[int], epoch: int) -> list[Any]:
        """Transform examples; `indices` are their indices in the source."""
        function = self.function
        if self.seed is not None:
            key = make_key(self.seed, epoch, _STREAM)[0, :2]
            function = lambda pair: self.function(pair[0], _generator(key, pair[1]))
        note = lambda row: (
            f"transforming index {indices[row]} of the source, row {row} of those asked for"
        )
        items = examples if self.seed is None else zip(examples, indices, strict=True)
        done: list[Any] = each(function, items, note)
        for index, example in zip(indices, done, strict=True):
            if example is None:
                raise DataError(
                    f"transform: expected an example, got None for index {index} of the source; "
                    "return the example, and leave out what is not wanted before batching"
                )
        return done


def read_transform(function: Any, seed: int | None) -> Transform | None:
    """Validate a function of an example, or of an example and a random generator.

    The function gets a generator if it has two arguments without a default. The random numbers
    depend only on the seed, the epoch and the index of the example. So they are the same after a
    seek or a resume, for any batch size, and on any number of processes.
    """
    if function is None:
        return None
    if not callable(function):
        raise ConfigError(f"transform: expected a function, got {tree.spell(function)}")
    wanted = _arguments(function)
    if wanted > 2:
        raise ConfigError(
            "transform: expected a function of an example, or of an example and a random generator,"
            f" got {tree.spell(function)} of {wanted} arguments; give the others by "
            "functools.partial or a default"
        )
    if wanted == 2 and seed is None:
        raise ConfigError(
            "transform: expected a seed for the random generator that is its second argument, got "
            "seed=None; give seed=…, or the argument a default"
        )
    return Transform(function, seed if wanted == 2 else None)


def _arguments(function: Any) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some C functions have no signature
        return 1
    return sum(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in parameters
    )


def _generator(key: Any, index: int) -> np.random.Generator:
    # The index is the highest word of the counter, so the streams of two examples never overlap.
    counter = np.zeros(4, np.uint64)
    counter[3] = index
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
