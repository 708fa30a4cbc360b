"""Mix sources in exact proportions, with random access to any example."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from stepfold import tree
from stepfold.core.validation import as_integer, read_instance, read_integer
from stepfold.data.order import Indices, Order, Rows
from stepfold.data.sources import ENDLESS, Source, read_source, row_list
from stepfold.errors import DataError, refuse

Weights = Sequence[float] | Mapping[str, float]
"""The relative weights of all sources, in their order or by name."""

_PERIOD = 1 << 30  # the product of two numbers below it fits an int64
_MIN_SHARE = 5e-8  # of the weights, which rounding to the period changes by less than 1 %


def mix(
    sources: Sequence[tuple[Any, float]] | Mapping[str, tuple[Any, float]],
    *,
    seed: int | None = None,
    stages: Sequence[tuple[int, Weights]] = (),
    source_key: str | None = None,
) -> "Mixture":
    """Mix sources by weight into an infinite source.

    Weights are of examples: after `pack`, a source of longer documents has a larger share of the
    tokens. To mix by tokens, divide each weight by the mean length of the documents of its source.

    Example i depends only on i, not on earlier reads. Sources alternate as evenly as their weights
    allow: with weights 3 and 1, any four consecutive examples are three of the first source and one
    of the second. Each source is iterated at its own pace. With a seed, it is reshuffled on every
    pass.

    With `stages`, the weights change at given examples. A source continues in each stage where the
    stage before left it.

    With `source_key`, an example says which source it is of. So `mean_by` can report the loss of
    each.

    Args:
      sources: pairs (source, weight), in a list or by name. Weights are relative. A source may
        itself be a mixture.
      seed: the shuffle seed; None keeps the order of the sources.
      stages: pairs (first example, weights) in ascending order: the weights of all sources from
        that example on, in a list or by name. With stages, weights may be 0, to start or end a
        source.
      source_key: the key under which examples, which are dicts, get the number of their source.

    Returns:
      A source of length `sys.maxsize`, which stands for infinite. It has no epochs. Its `names` are
      those of the sources, "0", "1", … if they are a list.

    Raises:
      ConfigError: if `sources` is empty, or a weight or a stage is not as described. A weight is
        a positive finite number, and at least 5e-8 of their sum.
      DataError: if a source is invalid or empty.

    >>> import numpy as np
    >>> import stepfold as sf
    >>> mixture = sf.mix([(np.arange(100), 3), (-np.arange(1, 9), 1)])
    >>> stream = sf.batches(mixture, 8)
    >>> next(stream), next(stream)
    (array([ 0,  1, -1,  2,  3,  4, -2,  5]), array([ 6,  7, -3,  8,  9, 10, -4, 11]))
    >>> parts = [(np.arange(100), 1), (-np.arange(1, 9), 0)]
    >>> next(sf.batches(sf.mix(parts, stages=[(4, (1, 1)), (8, (0, 1))]), 12))
    array([ 0,  1,  2,  3,  4, -1,  5, -2, -3, -4, -5, -6])
    >>> mixture = sf.mix({"web": ({"x": np.zeros(5)}, 1), "code": ({"x": np.ones(5)}, 1)},
    ...                  source_key="source")
    >>> next(sf.batches(mixture, 4)), mixture.names
    ({'source': array([0, 1, 0, 1], dtype=int32), 'x': array([0., 1., 0., 1.])}, ('web', 'code'))
    """
    pairs = [*sources.values()] if isinstance(sources, Mapping) else sources
    if not isinstance(pairs, list | tuple) or not pairs:
        got, advice = type(pairs).__name__, "such as [(old, 3), (new, 1)]"
        refuse("mix", "a list of pairs (source, weight)", got if pairs else "none", advice)
    names = [*sources] if isinstance(sources, Mapping) else [str(i) for i in range(len(pairs))]
    for name in [*names, *([] if source_key is None else [source_key])]:
        read_instance("mix", name, str, "names and a source_key that are strings")
    seed = None if seed is None else read_integer("mix: seed", seed, 0)
    parts, weights = [], []
    for number, pair in enumerate(pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            refuse("mix", f"a pair (source, weight) at {number}", tree.describe_value(pair))
        weights.append(_read_weight(f"at {number}", pair[1], zero=bool(stages)))
        try:
            parts.append(read_source(pair[0]))
        except DataError as error:
            error.add_note(f"reading source {number} of the mixture")
            raise
    all_stages = [(0, weights), *_read_stages(stages, names)]
    return Mixture(parts, all_stages, seed, names, source_key)


def _read_stages(stages: Any, names: Sequence[str]) -> list[tuple[int, list[Fraction]]]:
    def is_stage(value: Any) -> bool:
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        return is_pair and bool(_in_order(value[1], names))

    if not isinstance(stages, list | tuple) or not all(map(is_stage, stages)):
        expected = f"pairs (first example, weights), with {len(names)} weights as there are sources"
        refuse("mix: stages", expected, repr(stages))
    read: list[tuple[int, list[Fraction]]] = []
    for first, weights in stages:
        minimum = read[-1][0] + 1 if read else 1
        first = read_integer("mix: stages: first example", first, minimum)
        where, ordered = f"in the stage from {first} on", _in_order(weights, names)
        read.append((first, [_read_weight(where, weight, zero=True) for weight in ordered]))
    return read


def _in_order(weights: Any, names: Sequence[str]) -> Sequence[Any]:
    """Return the weights in the order of the sources; none if they are not those of all sources."""
    if isinstance(weights, Mapping):
        return [weights[name] for name in names] if weights.keys() == set(names) else ()
    return weights if isinstance(weights, list | tuple) and len(weights) == len(names) else ()


def _read_weight(where: str, weight: Any, *, zero: bool) -> Fraction:
    is_number = isinstance(weight, int | float | np.number | Fraction) and weight is not True
    if not is_number or not math.isfinite(weight) or weight < 0 or (weight == 0 and not zero):
        expected = f"a finite weight {'of at least' if zero else 'above'} 0 {where}"
        refuse("mix", expected, repr(weight), "to use nothing of a source, leave it out")
    # From the decimal form: 0.1 is exactly 1/10, not the nearest binary fraction.
    return weight if isinstance(weight, Fraction) else Fraction(str(weight))


class Mixture(Source):
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

    def __init__(
        self,
        parts: Sequence[Source],
        stages: Sequence[tuple[int, Sequence[Fraction]]],
        seed: int | None,
        names: Sequence[str],
        source_key: str | None = None,
    ) -> None:
        self._parts, self.names, self._source_key = parts, tuple(names), source_key
        self.keeps_arrays = all(part.keeps_arrays for part in parts)
        self._orders = [Order(part.length, seed, stream) for stream, part in enumerate(parts)]
        self._first_stages = dict(stages)
        self._set_stages(self._first_stages)
        self.fingerprint = {
            "seed": seed,
            "weights": self._stages[0].weights,
            "lengths": [part.length for part in parts],
            "sources": [part.fingerprint for part in parts],
        }
        if len(stages) > 1:
            later = [[stage.first, stage.weights] for stage in self._stages[1:]]
            self.fingerprint["stages"] = later

    def difference(self, saved: Any) -> str:
        now, count = self.fingerprint, len(self._parts)
        if not isinstance(saved, dict) or len(saved.get("sources", ())) != count:
            return super().difference(saved)
        differing = [
            f"{name} were {saved.get(name)!r} and are {now.get(name)!r}"
            for name in {**now, **saved}
            if name != "sources" and saved.get(name) != now.get(name)
        ]
        for name, part, fingerprint in zip(self.names, self._parts, saved["sources"], strict=True):
            if text := part.difference(fingerprint):
                differing.append(f"in {name!r}, the {text}")
        return f"source was another mixture: {'; '.join(differing)}" if differing else ""

    def _set_stages(self, shares_from: Mapping[int, Sequence[Fraction]]) -> None:
        drawn, self._stages = [0] * len(self._parts), list[_Stage]()
        for first, shares in sorted(shares_from.items()):
            if self._stages:
                drawn = self._stages[-1].drawn_before(first)
            self._stages.append(_Stage(first, _scale(first, shares), drawn))
        self._firsts = [stage.first for stage in self._stages]

    def spell_weights(self, weights: Any) -> list[str]:
        """Check the weights of all sources; return them in order, exactly, as text for JSON."""
        ordered = _in_order(weights, self.names)
        if not ordered:
            expected = f"a weight for each of the sources {', '.join(self.names)}"
            refuse("reweight", expected, repr(weights))
        pairs = zip(self.names, ordered, strict=True)
        shares = [_read_weight(f"of {name}", weight, zero=True) for name, weight in pairs]
        if not any(shares):
            refuse("reweight", "a weight above 0", "only 0")
        return [str(share) for share in shares]

    def with_changes(self, changes: Sequence[tuple[int, Sequence[str]]]) -> Self:
        """Return the mixture with the weights of `spell_weights` from given examples on."""
        count = len(self.names)
        try:
            later = {first: [Fraction(weight) for weight in weights] for first, weights in changes}
            is_valid = all(
                as_integer(first) is not None
                and first >= 0
                and len(shares) == count
                and min(shares) >= 0 < max(shares)
                for first, shares in later.items()
            )
        except (TypeError, ValueError, ZeroDivisionError):
            is_valid = False
        if not is_valid:
            expected = f"pairs of an example and {count} weights, as get_state() gave"
            refuse("state: weights", expected, repr(changes), kind=DataError)
        new = copy.copy(self)
        new._set_stages({**self._first_stages, **later})
        return new

    def __getitem__(self, index: int) -> Any:
        if index < 0:
            refuse("mix", "an index of at least 0", f"{index}: there is no end", kind=IndexError)
        return self.examples(slice(index, index + 1))[0]

    def check_length(self) -> None:
        for part in self._parts:
            part.check_length()

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the source number and the index in that source of examples of the mixture.

        Each source in turn is separated from all later ones by a rule for two sources: of the first
        i examples, it provides its share by weight, rounded.
        """
        positions = np.asarray(positions)
        which, index = np.zeros_like(positions), np.empty_like(positions)
        numbers = np.searchsorted(self._firsts, positions, "right") - 1
        for present in np.unique(numbers).tolist():
            stage, left = self._stages[present], np.flatnonzero(numbers == present)
            ahead = positions[left] - stage.first
            for number, weight, total in stage.splits():
                before = _due(ahead, weight, total)
                mine = _due(ahead + 1, weight, total) > before
                index[left[mine]] = self._index(number, before[mine] + stage.drawn[number])
                which[left[mine]] = number
                left, ahead = left[~mine], (ahead - before)[~mine]
        return which, index

    def _index(self, number: int, count: Indices) -> Indices:
        """Return the index of the count-th example drawn from a source, over all passes."""
        order: Any = self._orders[number]  # numpy's stubs of Python 3.11 take no union of indices
        if order.length == ENDLESS or not count.size:
            return count
        passes, positions = np.divmod(count, order.length)
        index, by_pass = np.empty_like(count), passes.argsort(kind="stable")
        epochs, starts = np.unique(passes[by_pass], return_index=True)
        ends = [*starts[1:].tolist(), len(count)]
        for epoch, start, end in zip(epochs.tolist(), starts.tolist(), ends, strict=True):
            rows = by_pass[start:end]
            index[rows] = order(epoch, positions[rows])
        return index

    def examples(self, rows: Rows) -> list[Any]:
        by_row: dict[int, Any] = {}
        for number, own, some in self._read(rows, lambda part, index: part.examples(index)):
            labeled = (self._with_number(example, np.int32(number)) for example in some)
            by_row.update(zip(own, labeled, strict=True))
        return [by_row[row] for row in range(len(by_row))]

    def take(self, rows: Rows) -> Any:
        read = self._read(rows, lambda part, index: part.take(index))
        first, *others = (jax.tree.map(lambda leaf: leaf[0], batch) for *_, batch in read)
        for other in others:
            lines = tree.diff(first, other, "example")
            if lines:
                expected = "examples of one structure, shape and dtype from all sources"
                advice = "make them the same with transform=…"
                refuse("mix", expected, "; ".join(lines), advice, kind=DataError)
        order = np.argsort(np.concatenate([own for _, own, _ in read]))
        parts = (
            self._with_number(batch, np.full(len(own), number, np.int32))
            for number, own, batch in read
        )
        return jax.tree.map(lambda *leaves: np.concatenate(leaves).take(order, 0), *parts)

    def _with_number(self, example: Any, number: Any) -> Any:
        """Add the number of its source to an example, or their numbers to a batch."""
        key = self._source_key
        if key is None:
            return example
        if not isinstance(example, Mapping) or key in example:
            is_dict = isinstance(example, Mapping)
            got = f"one that has it: {sorted(example)}" if is_dict else tree.describe_value(example)
            expected = f"examples that are dicts without {key!r}, to add the number of the source"
            refuse("mix: source_key", expected, got, "give another key", kind=DataError)
        return {**example, key: number}

    def _read(
        self, rows: Rows, read: Callable[[Source, Indices], Any]
    ) -> list[tuple[int, list[int], Any]]:
        """Read from each source; return its number, the positions in `rows`, and the examples."""
        which, index = self.locate(np.asarray(row_list(rows), np.int64))
        results = []
        for number, part in enumerate(self._parts):
            own = np.flatnonzero(which == number)
            try:
                if own.size:
                    results.append((number, own.tolist(), read(part, index[own])))
            except Exception as error:
                error.add_note(f"reading from source {number} of the mixture")
                raise
        return results


class _Stage(NamedTuple):
    """The integer weights from an example on, and how many of each source were drawn before it."""

    first: int
    weights: list[int]
    drawn: list[int]

    def splits(self) -> list[tuple[int, int, int]]:
        """List the sources in use: number, weight, and the sum of this and all later weights."""
        weights = enumerate(self.weights)
        return [(number, w, sum(self.weights[number:])) for number, w in weights if w]

    def drawn_before(self, example: int) -> list[int]:
        """Return how many of each source are drawn before an example of this stage."""
        left, drawn = np.asarray(example - self.first, np.int64), [*self.drawn]
        for number, weight, total in self.splits():
            due = _due(left, weight, total)
            drawn[number] += int(due)
            left = left - due
        return drawn


def _scale(first: int, weights: Sequence[Fraction]) -> list[int]:
    """Scale weights to integers, rounded to about 1e-9 if their period is too long."""
    if not any(weights):
        refuse("mix", f"a weight above 0 from example {first} on", "only 0")
    shares = [weight / sum(weights) for weight in weights]
    period = min(_PERIOD, math.lcm(*(share.denominator for share in shares)))
    scaled = [round(share * period) for share in shares]
    for number, (share, weight) in enumerate(zip(shares, scaled, strict=True)):
        if abs(weight - share * period) > share * period / 100:
            expected = f"a weight at {number} of at least {_MIN_SHARE} of the sum of all"
            advice = "to use nothing of a source, leave it out"
            refuse("mix", expected, f"{float(share):.3g} of it", advice)
    return scaled


def _due(count: Indices, weight: int, total: int) -> Indices:
    """Return how many of the first `count` examples are of a source, by its share of `total`."""
    periods, count = np.divmod(count, total)
    return periods * weight + (count * weight + total // 2) // total
