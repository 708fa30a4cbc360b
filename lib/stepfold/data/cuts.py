"""Compute which rows of which epoch make up the batch of a step, for any step."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax

from stepfold.data.integers import read_integer
from stepfold.errors import ConfigError, DataError


def read_sizes(batch_size: Any) -> list[tuple[int, int]]:
    """Parse a batch size, or a ramp of batch sizes, into pairs (from step, size)."""
    if callable(batch_size):
        raise ConfigError(
            "batch_size: expected an integer or pairs (from step, size), got a function; where a "
            "step begins would depend on every step before: give pairs such as "
            "[(0, 64), (1000, 256)]"
        )
    if not isinstance(batch_size, list | tuple):
        return [(0, read_integer("batch_size", batch_size, 1))]
    pairs = [pair for pair in batch_size if isinstance(pair, list | tuple) and len(pair) == 2]
    ramp = [
        (read_integer("batch_size: from step", step, 0), read_integer("batch_size: size", size, 1))
        for step, size in pairs
    ]
    steps = [step for step, _ in ramp]
    if len(pairs) < len(batch_size) or steps[:1] != [0] or sorted(set(steps)) != steps:
        raise ConfigError(
            "batch_size: expected pairs (from step, size), the first from step 0 and each from a "
            f"later step than the one before, got {batch_size!r}"
        )
    return ramp


def size_at(sizes: Sequence[tuple[int, int]], step: int) -> int:
    """Return the batch size of a step."""
    return sizes[bisect_right(sizes, step, key=lambda pair: pair[0]) - 1][1]


class Cut(NamedTuple):
    """The positions [start, stop) of an epoch in a batch; a short batch has fewer than `size`."""

    epoch: int
    start: int
    stop: int
    size: int
    alike: int
    """The number of consecutive full batches of this size and epoch, from this one on."""


class _Stretch(NamedTuple):
    """Consecutive steps of one batch size.

    They start at `offset` in `epoch`, and `rest` steps finish that epoch.
    """

    first: int
    end: float  # infinite for the last stretch
    size: int
    epoch: int
    offset: int
    rest: int
    each: int  # steps in each later epoch


class Cuts:
    """The division of epochs into batches, none of which spans two epochs.

    `sizes` are pairs (from step, batch size) in ascending order, the first from step 0. `whole`
    drops the remainder of every epoch. The start of each stretch of equal batch sizes is computed
    once, from the stretch before it, so that finding the rows of a step needs no earlier step.
    """

    def __init__(
        self, length: int, sizes: Sequence[tuple[int, int]], *, whole: bool, epochs: int | None
    ) -> None:
        self.length, self.sizes, self.whole = length, sizes, whole
        self._stretches: list[_Stretch] = []
        epoch = offset = 0
        self._firsts = [first for first, _ in sizes]
        for (first, size), end in zip(sizes, [*self._firsts[1:], math.inf], strict=True):
            each = self._steps(length, size)
            if not each:
                raise DataError(
                    f"batch_size: expected at most the {length} examples of the source, got {size},"
                    " and remainder='drop' would leave out every epoch; give a smaller batch_size, "
                    "or remainder='pad'"
                )
            rest = self._steps(length - offset, size)
            self._stretches.append(_Stretch(first, end, size, epoch, offset, rest, each))
            if end < math.inf:
                # The next stretch starts where this one would continue.
                epoch, offset, *_ = self._cut(self._stretches[-1], int(end))
        self.total = None if epochs is None else self._count(epochs)

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of batches per epoch, or None if their size changes."""
        return self._stretches[0].each if len(self._stretches) == 1 else None

    def _steps(self, rows: int, size: int) -> int:
        return rows // size if self.whole else -(-rows // size)

    def _cut(self, stretch: _Stretch, step: int) -> Cut:
        first, end, size, epoch, start, rest, each = stretch
        left = end - step
        step -= first
        if step >= rest:
            more, step = divmod(step - rest, each)
            epoch, start = epoch + 1 + more, 0
        start += step * size
        alike = int(min((self.length - start) // size, left))
        return Cut(epoch, start, min(start + size, self.length), size, alike)

    def _count(self, epochs: int) -> int:
        """Return the number of steps in all epochs."""
        for stretch in self._stretches:
            if stretch.epoch >= epochs:
                return stretch.first
            total = stretch.first + stretch.rest + (epochs - stretch.epoch - 1) * stretch.each
            if total <= stretch.end:
                return total
        raise AssertionError  # the last stretch has no end

    def at(self, step: int) -> Cut:
        """Return the rows of a step, without checking it against `total`."""
        return self._cut(self._stretches[bisect_right(self._firsts, step) - 1], step)

    def shorter(self) -> list[tuple[int, Cut]]:
        """List steps of short batches: at least one for every size that a short batch has."""
        found = []
        for stretch in self._stretches:
            end = stretch.end if self.total is None else min(stretch.end, self.total)
            ending = stretch.first + stretch.rest - 1
            for last in (ending, ending + stretch.each):
                cut = self._cut(stretch, last) if stretch.first <= last < end else None
                if cut is not None and cut.stop - cut.start < cut.size:
                    found.append((last, cut))
        return found


class Share(NamedTuple):
    """One process's shard of the rows; the shards in process order form the global batch."""

    process: int
    processes: int

    @classmethod
    def asked_of_jax(cls) -> Self:
        """Return the shard of this process, according to JAX."""
        return cls(jax.process_index(), jax.process_count())

    def rows(self, size: int) -> tuple[int, int]:
        """Return the start and stop of this process's rows in a global batch of `size`."""
        return self.process * size // self.processes, (self.process + 1) * size // self.processes

    def check_sizes(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Raise if a batch size in pairs (from step, size) is no multiple of the process count."""
        for step, size in sizes:
            if size % self.processes:
                below = size // self.processes * self.processes
                raise DataError(
                    f"batch_size: expected a multiple of the {self.processes} processes, got "
                    f"{size} from step {step} on; give {below or self.processes} or "
                    f"{math.ceil(size / self.processes) * self.processes}"
                )

    def check_short(self, step: int, rows: int) -> None:
        """Raise if the size of a short batch is not a multiple of the process count."""
        if rows % self.processes:
            raise DataError(
                f"remainder='keep': expected short batches to be shared out evenly over "
                f"{self.processes} processes, got {rows} rows at step {step}; use remainder='pad', "
                "which gives every batch the same size and a mask, or 'drop'"
            )


def read_share(index: Any, count: Any) -> Share | None:
    """Validate the process index and count; None if both are left to JAX."""
    if index is None and count is None:
        return None
    if index is None or count is None:
        raise ConfigError(
            f"process_index, process_count: expected both or neither, got {index!r} and {count!r}"
        )
    count = read_integer("process_count", count, 1)
    index = read_integer("process_index", index, 0)
    if index >= count:
        raise ConfigError(f"process_index: expected one below process_count={count}, got {index}")
    return Share(index, count)
