"""Mix sources in exact proportions, with random access to any example."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from stepfold import tree
from stepfold.data.integers import read_integer
from stepfold.data.order import Indices, Order
from stepfold.data.sources.kinds import read_source
from stepfold.data.sources.rows import ENDLESS, Rows, Where, numbers
from stepfold.errors import ConfigError, DataError

_PERIOD = 1 << 30  # the product of two numbers below it fits an int64


def mix(sources: Sequence[tuple[Any, float]], *, seed: int | None = None) -> "Mixture":
    """Mix sources by weight into an infinite source.

    Example i depends only on i, not on earlier reads. Sources alternate as evenly as their weights
    allow: with weights 3 and 1, any four consecutive examples are three of the first source and one
    of the second. Each source is iterated at its own pace. With a seed, it is reshuffled on every
    pass.

    Args:
      sources: pairs (source, weight). Weights are relative. A source may itself be a mixture.
      seed: the shuffle seed; None keeps the order of the sources.

    Returns:
      A source of length `sys.maxsize`, which stands for infinite. It has no epochs.

    Raises:
      ConfigError: if `sources` is empty, or a weight is not a positive finite number.
      DataError: if a source is invalid or empty.

    >>> import numpy as np
    >>> import stepfold as sf
    >>> mixture = sf.mix([(np.arange(100), 3), (-np.arange(1, 9), 1)])
    >>> stream = sf.batches(mixture, 8)
    >>> next(stream), next(stream)
    (array([ 0,  1, -1,  2,  3,  4, -2,  5]), array([ 6,  7, -3,  8,  9, 10, -4, 11]))
    """
    if not isinstance(sources, list | tuple) or not sources:
        raise ConfigError(
            f"mix: expected pairs (source, weight), at least one, got {tree.spell(sources)}"
        )
    for position, pair in enumerate(sources):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ConfigError(
                f"mix: expected a pair (source, weight) at {position}, got {tree.spell(pair)}"
            )
    weights = [_weight(position, weight) for position, (_, weight) in enumerate(sources)]
    seed = None if seed is None else read_integer("mix: seed", seed, 0)
    return Mixture([_read(k, source) for k, (source, _) in enumerate(sources)], weights, seed)


def _weight(position: int, weight: Any) -> Fraction:
    number = isinstance(weight, int | float | np.number | Fraction) and not isinstance(weight, bool)
    if not number or not math.isfinite(weight) or weight <= 0:
        raise ConfigError(
            f"mix: expected a finite weight above 0 at {position}, got {weight!r}; leave the "
            "source out if it shall give nothing"
        )
    # From the decimal form: 0.1 is exactly 1/10, not the nearest binary fraction.
    return weight if isinstance(weight, Fraction) else Fraction(str(weight))


def _read(position: int, source: Any) -> Rows:
    try:
        return read_source(source)
    except DataError as error:
        error.add_note(f"reading source {position} of the mixture")
        raise


def _whole(weights: Sequence[Fraction]) -> list[int]:
    """Scale weights to integers; rounded to about 1e-9 if their common period is too long."""
    parts = [weight / sum(weights) for weight in weights]
    period = min(_PERIOD, math.lcm(*(part.denominator for part in parts)))
    return [max(1, round(part * period)) for part in parts]


class Mixture(Rows):
    """An infinite source, returned by `mix`.

    >>> import numpy as np, stepfold as sf
    >>> mixture = sf.mix([(["a", "b"], 2), (["c"], 1)])
    >>> [mixture[i] for i in range(6)]
    ['a', 'c', 'b', 'a', 'c', 'b']
    >>> which, index = mixture.locate(np.array([3]))
    >>> which, index  # example 3 is example 0 of source 0
    (array([0]), array([0]))
    """

    length = ENDLESS

    def __init__(self, parts: Sequence[Rows], weights: Sequence[Fraction], seed: int | None):
        self._parts, self._weights = parts, _whole(weights)
        self._orders = [Order(part.length, seed, stream) for stream, part in enumerate(parts)]
        self.fingerprint = {
            "seed": seed,
            "weights": self._weights,
            "lengths": [part.length for part in parts],
            "sources": [part.fingerprint for part in parts],
        }

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Any:
        if index < 0:
            raise IndexError(f"mix: expected an index of at least 0, got {index}: there is no end")
        return self.examples(slice(index, index + 1))[0]

    def check(self) -> None:
        """Raise if one of the sources has changed."""
        for part in self._parts:
            part.check()

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the source number and the index in that source of examples of the mixture.

        Each source in turn is separated from all later ones by a rule for two sources: of the first
        i examples, it provides its share by weight, rounded.
        """
        which, index = np.zeros_like(positions), np.empty_like(positions)
        left, ahead = np.arange(len(positions)), np.asarray(positions)
        for number, weight in enumerate(self._weights):
            total = sum(self._weights[number:])
            before = _due(ahead, weight, total)
            mine = _due(ahead + 1, weight, total) > before
            index[left[mine]] = self._index(number, before[mine])
            which[left[mine]] = number
            left, ahead = left[~mine], (ahead - before)[~mine]
        return which, index

    def _index(self, number: int, count: Indices) -> Indices:
        """Return the index of the count-th example drawn from a source, over all passes."""
        order, index = self._orders[number], np.empty_like(count)
        if order.length == ENDLESS:
            return count
        passes, positions = np.divmod(count, order.length)
        for epoch in np.unique(passes).tolist():
            here = passes == epoch
            index[here] = order(epoch, positions[here])
        return index

    def examples(self, where: Where) -> list[Any]:
        """Return the examples as a list."""
        asked = self._ask(where, lambda part, index: part.examples(index))
        found = {
            row: example for rows, some in asked for row, example in zip(rows, some, strict=True)
        }
        return [found[row] for row in range(len(found))]

    def take(self, where: Where) -> Any:
        """Return the examples as one batch."""
        asked = self._ask(where, lambda part, index: part.take(index))
        wanted, *others = (jax.tree.map(lambda leaf: leaf[0], batch) for _, batch in asked)
        for other in others:
            lines = tree.diff(wanted, other, "example")
            if lines:
                raise DataError(
                    "mix: expected examples of one structure, shape and dtype from all sources, "
                    f"got {'; '.join(lines)}; make them the same with transform=…"
                )
        back = np.argsort(np.concatenate([rows for rows, _ in asked]))
        return jax.tree.map(
            lambda *leaves: np.concatenate(leaves).take(back, 0), *(batch for _, batch in asked)
        )

    def _ask(
        self, where: Where, read: Callable[[Rows, Indices], Any]
    ) -> list[tuple[list[int], Any]]:
        """Read from each source; return its row numbers and what `read` returned for them."""
        which, index = self.locate(np.asarray(numbers(where), np.int64))
        found = []
        for number, part in enumerate(self._parts):
            rows = np.flatnonzero(which == number)
            try:
                if rows.size:
                    found.append((rows.tolist(), read(part, index[rows])))
            except Exception as error:
                error.add_note(f"reading from source {number} of the mixture")
                raise
        return found


def _due(count: Indices, weight: int, total: int) -> Indices:
    periods, count = np.divmod(count, total)
    return periods * weight + (count * weight + total // 2) // total
