"""Stream a source through grain, reshuffled in every epoch if there is a seed."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from stepfold.errors import ConfigError


class Grained:
    """A stream for `batches` that reads a source with `len` and `[i]` through grain.

    Grain's threads prefetch examples. The position is grain's state, so a run can resume mid-epoch.
    """

    def __init__(self, source: Any, *, seed: int | None = None, threads: int = 0) -> None:
        """Create the stream; `seed=None` keeps the source's order, `threads=0` reads on demand."""
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
        """Set the epoch of the next iterator."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        import grain

        examples = grain.MapDataset.source(self._source)
        if self._seed is not None:
            # grain takes 32-bit seeds; an odd factor separates the seeds of different runs.
            examples = examples.shuffle(seed=(self._seed + 0x9E3779B1 * self._epoch) % 2**32)
        reading = grain.ReadOptions(num_threads=self._threads, prefetch_buffer_size=32)
        return iter(examples.to_iter_dataset(reading))
