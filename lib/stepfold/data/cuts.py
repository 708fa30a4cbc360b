"""Which rows of which epoch a step gets: arithmetic on integers, whatever step is asked for."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax

from stepfold.data.integers import read_integer
from stepfold.errors import ConfigError, DataError


def read_sizes(batch_size: Any) -> list[tuple[int, int]]:
    """Read a batch size, or a ramp of them, as pairs (from step, size)."""
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
    """Give the batch size of a step.

    >>> [size_at([(0, 64), (2, 256)], step) for step in range(4)]
    [64, 64, 256, 256]
    """
    return sizes[bisect_right(sizes, step, key=lambda pair: pair[0]) - 1][1]


class Cut(NamedTuple):
    """The rows [start, stop) of an epoch's order, for a batch of `size`, which may be more."""

    epoch: int
    start: int
    stop: int
    size: int
    alike: int
    """How many steps from here on are full ones of this size and epoch."""


class _Stretch(NamedTuple):
    """The steps of one batch size: `rest` of them end the epoch that they begin in."""

    first: int
    end: float  # infinite for the last one
    size: int
    epoch: int
    offset: int
    rest: int
    each: int  # steps in every epoch after that


class Cuts:
    """The epochs, each cut into batches by itself.

    What a step gets follows from where its stretch of equal batch sizes begins, and that from the
    stretch before: a few numbers for a ramp, and one division for a step.

    Args:
      length: the length of an epoch.
      sizes: pairs (from step, batch size), by steps, the first from 0.
      whole: whether the rest of an epoch that fills no batch is left out.
      epochs: how many there are, or None for no end.

    Raises:
      DataError: if a batch is larger than an epoch of which the rest is left out.

    >>> cuts = Cuts(10, [(0, 4), (2, 3)], whole=False, epochs=2)
    >>> [cuts.at(step)[:3] for step in range(cuts.total)]
    [(0, 0, 4), (0, 4, 8), (0, 8, 10), (1, 0, 3), (1, 3, 6), (1, 6, 9), (1, 9, 10)]
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
                # Where the next stretch begins is where this one would go on.
                epoch, offset, *_ = self._cut(self._stretches[-1], int(end))
        self.total = None if epochs is None else self._count(epochs)

    @property
    def steps_per_epoch(self) -> int | None:
        """The batches of an epoch, or None if their size changes."""
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
        """Give the number of steps in all epochs, the first step at which the last one is over."""
        for stretch in self._stretches:
            if stretch.epoch >= epochs:
                return stretch.first
            total = stretch.first + stretch.rest + (epochs - stretch.epoch - 1) * stretch.each
            if total <= stretch.end:
                return total
        raise AssertionError  # the last stretch has no end

    def at(self, step: int) -> Cut:
        """Give what a step gets; there are `total` steps."""
        return self._cut(self._stretches[bisect_right(self._firsts, step) - 1], step)

    def shorter(self) -> list[tuple[int, Cut]]:
        """List the steps of short batches, one of every size there is."""
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
    """A process's share of the rows: those of all processes, in order, are the global batch.

    >>> Share(process=1, processes=4).rows(12)
    (3, 6)
    """

    process: int
    processes: int

    @classmethod
    def asked_of_jax(cls) -> Self:
        """Give this process's share of the work of all."""
        return cls(jax.process_index(), jax.process_count())

    def rows(self, size: int) -> tuple[int, int]:
        """Give the first of this process's rows in a batch, and the one after the last."""
        return self.process * size // self.processes, (self.process + 1) * size // self.processes

    def check_sizes(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Refuse batch sizes, pairs (from step, size), that do not divide by the processes."""
        for step, size in sizes:
            if size % self.processes:
                below = size // self.processes * self.processes
                raise DataError(
                    f"batch_size: expected a multiple of the {self.processes} processes, got "
                    f"{size} from step {step} on; give {below or self.processes} or "
                    f"{math.ceil(size / self.processes) * self.processes}"
                )

    def check_short(self, step: int, rows: int) -> None:
        """Refuse a short batch that does not divide by the processes."""
        if rows % self.processes:
            raise DataError(
                f"remainder='keep': expected short batches to be shared out evenly over "
                f"{self.processes} processes, got {rows} rows at step {step}; use remainder='pad', "
                "which gives every batch the same size and a mask, or 'drop'"
            )


def read_share(index: Any, count: Any) -> Share | None:
    """Read which process this is of how many, or None where jax is to be asked."""
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
