"""Compute which rows of which epoch make up the batch of a step, without the steps before it."""

import math
import operator
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import jax

from stepfold.core.validation import read_integer
from stepfold.errors import DataError, refuse

BatchSizes = Sequence[tuple[int, int]]
"""Batch sizes: pairs (from step, size) in ascending order, the first from step 0."""


class Skips:
    """Half-open ranges of batch indices that are left out, merged and sorted.

    A batch index counts all batches, a step only those that are left.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self.ranges: list[tuple[int, int]] = []
        for first, stop in sorted(ranges):
            if self.ranges and first <= self.ranges[-1][1]:
                first, last = self.ranges.pop()
                stop = max(last, stop)
            self.ranges.append((first, stop))

    def index(self, step: int) -> int:
        """Return the batch index of a step."""
        index = step
        for first, stop in self.ranges:
            if index >= first:
                index += stop - first
        return index

    def step(self, index: int) -> int:
        """Return how many batches are left before a batch index."""
        return index - sum(min(stop, index) - first for first, stop in self.before(index))

    def before(self, index: int) -> list[tuple[int, int]]:
        """Return the ranges that begin before a batch index."""
        return [pair for pair in self.ranges if pair[0] < index]

    def add(self, ranges: Any) -> "Skips":
        """Add the ranges of an argument or of a saved position."""
        try:
            pairs = [(operator.index(first), operator.index(stop)) for first, stop in ranges]
            are_valid = all(0 <= first < stop for first, stop in pairs)
        except (TypeError, ValueError):
            are_valid = False
        if not are_valid:
            expected = (
                "a list of pairs (first, stop) of batch indices, each first at least 0 and below "
                "its stop, such as [(9000, 9040)]"
            )
            refuse("without", expected, repr(ranges))
        return Skips([*self.ranges, *pairs])


class Span(NamedTuple):
    """The rows of a batch: positions [start, stop) of an epoch, fewer than `size` at its end."""

    epoch: int
    start: int
    stop: int
    size: int
    full_batches_left: int
    """The number of consecutive full batches of this size and epoch, from this one on."""


class _Segment(NamedTuple):
    """Consecutive steps with one batch size, from position `offset` of `epoch` on."""

    start: int
    end: float  # infinite for the last segment
    size: int
    epoch: int
    offset: int
    first_epoch_steps: int  # those left in `epoch`
    epoch_steps: int  # those of every later epoch


class Epochs:
    """The division of epochs into batches, none of which spans two epochs.

    `drop` drops the remainder of every epoch. `total` is the number of steps in all epochs, or None
    if they have no end.
    """

    def __init__(self, length: int, sizes: BatchSizes, *, drop: bool, epochs: int | None) -> None:
        self.length, self.sizes, self._drop = length, sizes, drop
        self._segments: list[_Segment] = []
        self._starts = [start for start, _ in sizes]
        epoch = offset = 0
        for (start, size), end in zip(sizes, [*self._starts[1:], math.inf], strict=True):
            epoch_steps = self._steps(length, size)
            if not epoch_steps:
                refuse_size(size, f"at most the {length} examples of the source")
            steps_left = self._steps(length - offset, size)
            segment = _Segment(start, end, size, epoch, offset, steps_left, epoch_steps)
            self._segments.append(segment)
            if end < math.inf:  # the next segment starts where this one would continue
                epoch, offset, *_ = self._span(segment, int(end))
        self.total = None if epochs is None else self.count_steps(epochs)

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of batches per epoch, or None if their size changes."""
        return self._segments[0].epoch_steps if len(self._segments) == 1 else None

    def span(self, step: int) -> Span:
        """Return the rows of a step, without checking it against `total`."""
        return self._span(self._segments[bisect_right(self._starts, step) - 1], step)

    def incomplete_steps(self) -> list[int]:
        """List steps of incomplete batches, at least one for every size that they have."""
        steps = []
        for segment in self._segments:
            end = segment.end if self.total is None else min(segment.end, self.total)
            epoch_end = segment.start + segment.first_epoch_steps - 1
            for step in (epoch_end, epoch_end + segment.epoch_steps):
                if segment.start <= step < end:
                    span = self._span(segment, step)
                    if span.stop - span.start < span.size:
                        steps.append(step)
        return steps

    def _steps(self, rows: int, size: int) -> int:
        return rows // size if self._drop else -(-rows // size)

    def _span(self, segment: _Segment, step: int) -> Span:
        start, end, size, epoch, offset, first_epoch_steps, epoch_steps = segment
        steps = step - start
        if steps >= first_epoch_steps:
            epochs, steps = divmod(steps - first_epoch_steps, epoch_steps)
            epoch, offset = epoch + 1 + epochs, 0
        offset += steps * size
        full = int(min((self.length - offset) // size, end - step))
        return Span(epoch, offset, min(offset + size, self.length), size, full)

    def count_steps(self, epochs: int) -> int:
        """Return the number of steps in the first epochs."""

        def count(segment: _Segment) -> int:  # if its batch size did not change
            later_epochs = epochs - segment.epoch - 1
            first_epoch_end = segment.start + segment.first_epoch_steps
            return first_epoch_end + later_epochs * segment.epoch_steps

        return next(count(each) for each in self._segments if count(each) <= each.end)


class EpochEnds(NamedTuple):
    """Where epochs end. Epochs have unequal numbers of steps if some batches are skipped."""

    epochs: Epochs
    skips: Skips

    @classmethod
    def of_length(cls, steps: int) -> "EpochEnds":
        """Make the ends of epochs that all have the same number of steps."""
        return cls(Epochs(steps, [(0, 1)], drop=True, epochs=None), Skips())

    def done(self, step: int) -> int:
        """Return how many epochs have no batch left after `step` steps."""
        return self.epochs.span(self.skips.index(step)).epoch

    def end(self, epochs: int) -> int:
        """Return the number of steps in the first epochs."""
        return self.skips.step(self.epochs.count_steps(epochs))

    def count_steps(self, epochs: int, start: int) -> int:
        """Return the steps from `start` to the end of `epochs` epochs, its own included."""
        return self.end((self.done(start) if start else 0) + epochs) - start


def read_sizes(batch_size: Any) -> BatchSizes:
    """Read a batch size, or a ramp of batch sizes."""
    if callable(batch_size):
        advice = (
            "finding the rows of a step would take a call for every earlier step: give pairs such "
            "as [(0, 64), (1000, 256)]"
        )
        refuse("batch_size", "an integer or pairs (from step, size)", "a function", advice)
    if not isinstance(batch_size, list | tuple):
        return [(0, read_integer("batch_size", batch_size, 1))]
    pairs = [pair for pair in batch_size if isinstance(pair, list | tuple) and len(pair) == 2]
    sizes = [
        (read_integer("batch_size: from step", step, 0), read_integer("batch_size: size", size, 1))
        for step, size in pairs
    ]
    steps = [step for step, _ in sizes]
    if len(pairs) < len(batch_size) or steps[:1] != [0] or sorted(set(steps)) != steps:
        order = "the first from step 0 and each from a later step than the one before"
        refuse("batch_size", f"pairs (from step, size), {order}", repr(batch_size))
    return sizes


def refuse_size(size: int, expected: str) -> NoReturn:
    """Refuse a batch size that no epoch fills."""
    got = f"{size}, and remainder='drop' would leave out every epoch"
    advice = "give a smaller batch_size, or remainder='pad'"
    refuse("batch_size", expected, got, advice, kind=DataError)


def size_at(sizes: BatchSizes, step: int) -> int:
    """Return the batch size of a step."""
    return sizes[bisect_right(sizes, step, key=lambda pair: pair[0]) - 1][1]


class Shard:
    """The rows of this process in each global batch; in process order, shards form the batch.

    If `index` and `count` are None, they are JAX's, read at the first batch.
    """

    def __init__(self, index: Any, count: Any) -> None:
        if (index is None) != (count is None):
            refuse("process_index, process_count", "both or neither", f"{index!r} and {count!r}")
        self._fixed: tuple[int, int] | None = None
        if count is not None:
            count = read_integer("process_count", count, 1)
            index = read_integer("process_index", index, 0)
            if index >= count:
                refuse("process_index", f"one below process_count={count}", f"{index}")
            self._fixed = index, count

    @cached_property
    def _share(self) -> tuple[int, int]:
        return self._fixed or (jax.process_index(), jax.process_count())

    def resolve(self) -> None:
        """Read JAX's process index now, so that a copy in another process has it."""
        self._share  # noqa: B018  it is cached

    def rows(self, size: int) -> tuple[int, int]:
        """Return the start and stop of this process's rows in a global batch of `size`."""
        index, count = self._share
        return index * size // count, (index + 1) * size // count

    def check_sizes(self, sizes: BatchSizes) -> None:
        """Raise if a batch size is not a multiple of the process count."""
        _, count = self._share
        for step, size in sizes:
            if size % count:
                below = size // count * count
                expected = f"a multiple of the {count} processes"
                got = f"{size} from step {step} on"
                advice = f"give {below or count} or {below + count}"
                refuse("batch_size", expected, got, advice, kind=DataError)

    def check_incomplete(self, step: int, rows: int) -> None:
        """Raise if the size of an incomplete batch is not a multiple of the process count."""
        _, count = self._share
        if rows % count:
            expected = f"incomplete batches to divide evenly over {count} processes"
            advice = (
                "use remainder='pad', which gives every batch the same size and a mask, or 'drop'"
            )
            got = f"{rows} rows at step {step}"
            refuse("remainder='keep'", expected, got, advice, kind=DataError)
