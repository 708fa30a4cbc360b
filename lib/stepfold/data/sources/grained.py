"""A source read by grain, in an order of its own each epoch."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from stepfold.errors import ConfigError


class Grained:
    """Give the examples of a source through grain, epoch by epoch; a stream for `batches`.

    Threads of grain's read ahead. Where the iterator stands is known to grain, so that a run goes
    on in mid-epoch.

    >>> import stepfold as sf
    >>> stream = sf.batches(Grained(list(range(6)), seed=0), 3)
    >>> first, second, third = (next(stream).tolist() for _ in range(3))
    >>> sorted(first + second), first != third
    ([0, 1, 2, 3, 4, 5], True)
    """

    def __init__(self, source: Any, *, seed: int | None = None, threads: int = 0) -> None:
        """Say what to read.

        Args:
          source: anything with `len` and `[i]`.
          seed: what the orders follow from; None is the source's.
          threads: how many threads read; 0 reads when asked.

        Raises:
          ConfigError: if it is no such source, or grain is not installed.
        """
        if find_spec("grain") is None:
            raise ConfigError(
                "use_grain: expected grain, which is not installed; install it with "
                "pip install 'stepfold[grain]'"
            )
        if not (hasattr(type(source), "__getitem__") and hasattr(type(source), "__len__")):
            raise ConfigError(
                "use_grain: expected a source with len and [i] for grain to read, got "
                f"{type(source).__name__}; give what is a stream already with use_grain=False"
            )
        self._source, self._seed, self._threads, self._epoch = source, seed, threads, 0

    def __len__(self) -> int:
        return len(self._source)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that is begun next."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        import grain

        examples = grain.MapDataset.source(self._source)
        if self._seed is not None:
            # grain takes seeds of 32 bits; an odd factor keeps those of two runs apart.
            examples = examples.shuffle(seed=(self._seed + 0x9E3779B1 * self._epoch) % 2**32)
        reading = grain.ReadOptions(num_threads=self._threads, prefetch_buffer_size=32)
        return iter(examples.to_iter_dataset(reading))
