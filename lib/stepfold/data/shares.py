"""Which rows of a global batch belong to which process."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax

from stepfold.data.integers import read_integer
from stepfold.errors import ConfigError, DataError


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
