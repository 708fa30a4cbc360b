"""Batches of a trainer's datasets: which columns, in which order, made of examples by what."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import jax
import numpy as np

from stepfold import tree
from stepfold.adapter.collecting import Collect
from stepfold.adapter.parts.examples import shuffle_seed, transform
from stepfold.data.batches import batches
from stepfold.data.prefetch import prefetch
from stepfold.data.sources.grained import Grained
from stepfold.data.sources.kinds import is_stream, read_source
from stepfold.data.sources.rows import ENDLESS
from stepfold.errors import ConfigError

Prepare = Callable[[Any], Any]


def length_of(dataset: Any) -> int | None:
    """Give how many examples there are, or None where nobody knows.

    >>> length_of({"x": np.ones((6, 2))}), length_of(iter([1, 2])), length_of(None)
    (6, None, None)
    """
    if dataset is None or is_stream(dataset):
        return None
    length = read_source(dataset).length
    return None if length == ENDLESS else length


def check_again(name: str, dataset: Any) -> None:
    """Refuse what can be gone through only once, as a generator can.

    Raises:
      ConfigError: with what to give.
    """
    if hasattr(type(dataset), "__next__"):
        raise ConfigError(
            f"{name}: expected data that can be gone through for each evaluation, got "
            f"{tree.spell(dataset)}; give a list of it, or a function that makes it"
        )


class Loader:
    """Batches, each prepared when it is taken; all else is the batches' own.

    >>> import stepfold as sf
    >>> loader = Loader(sf.batches({"x": np.arange(6)}, 3, seed=0), with_mask, 2)
    >>> next(loader)["mask"].tolist(), loader.get_state()["step"], loader.steps_per_epoch
    ([True, True, True], 1, 2)
    """

    def __init__(self, inner: Any, prepare: Prepare, epoch_steps: int | None) -> None:
        self._inner, self._prepare, self.steps_per_epoch = inner, prepare, epoch_steps

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self._prepare(next(self._inner))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not while it is being copied
            raise AttributeError(name)
        return getattr(self._inner, name)


class Anew:
    """Batches that are made anew each time that they are gone through.

    >>> again = Anew(lambda: iter([1, 2, 3]), 2)
    >>> list(again), list(again), len(again)
    ([1, 2], [1, 2], 2)
    """

    def __init__(self, make: Callable[[], Iterator[Any]], steps: int | None) -> None:
        self._make, self._steps = make, steps

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._make(), self._steps)

    def __len__(self) -> int:
        if self._steps is None:
            raise TypeError("dataloader_eval: nobody knows how many batches there are")
        return self._steps


def training_batches(
    arguments: Any,
    dataset: Any,
    batch_size: int,
    *,
    collect: Collect | None,
    prepare: Prepare,
    epoch_steps: int | None,
    epochs: int | None = None,
) -> Loader:
    """Make the batches of a run: shuffled anew each epoch, without end, and without the rest.

    Args:
      arguments: `TrainingArguments`.
      dataset: any source or stream that `stepfold.batches` takes.
      batch_size: the examples of a batch, of all processes.
      collect: what makes a batch of a list of examples; None stacks them.
      prepare: what is done to each batch.
      epoch_steps: the batches of an epoch, if they are known.
      epochs: how often to go through a stream, where nobody knows the steps of the run.
    """
    seed = shuffle_seed(arguments)
    dataset, leave_out = without(dataset, arguments)
    grained = arguments.use_grain and not is_stream(dataset)
    if grained:
        threads = arguments.dataloader_num_workers
        dataset, seed = Grained(dataset, seed=seed, threads=threads), None
    stream = is_stream(dataset)
    made: Any = batches(
        dataset,
        batch_size,
        seed=None if stream else seed,
        start=0 if stream else arguments.step_start_point,
        epochs=epochs if stream else None,
        transform=leave_out,
        collate=collect,
        process_index=arguments.grain_shard_index,
        process_count=arguments.grain_shard_count,
    )
    epoch_steps = epoch_steps or getattr(made, "steps_per_epoch", None)
    if arguments.dataloader_num_workers and not grained:
        made = prefetch(made, size=arguments.dataloader_num_workers)
    return Loader(made, prepare, epoch_steps)


def evaluation_batches(
    arguments: Any,
    dataset: Any,
    batch_size: int,
    *,
    collect: Collect | None,
    prepare: Prepare,
    steps: int | None,
) -> Anew:
    """Make the batches of an evaluation: in order, once, the last one as long as it is.

    Several processes have to have as many rows each, so that there the last is filled up, under a
    mask, which the loss function has to heed.
    """
    dataset, leave_out = without(dataset, arguments)

    def make() -> Iterator[Any]:
        made = batches(
            dataset,
            batch_size,
            epochs=1,
            remainder="keep" if jax.process_count() == 1 else "pad",
            transform=leave_out,
            collate=collect,
            process_index=arguments.grain_shard_index,
            process_count=arguments.grain_shard_count,
        )
        return map(prepare, made)

    return Anew(make, steps)


def without(dataset: Any, arguments: Any) -> tuple[Any, Callable[[Any], Any] | None]:
    """Leave out columns: of a dict of arrays at once, of anything else example by example.

    Returns:
      The dataset, and what is to be done to each example, if anything is.
    """
    leave_out = transform(arguments)
    if leave_out is not None and isinstance(dataset, Mapping):
        return leave_out(dataset), None
    return dataset, leave_out


def with_mask(batch: Any) -> Any:
    """Add a mask that is true for every row, unless there is one, or the batch is no dict.

    >>> with_mask({"x": np.zeros((2, 3))})["mask"].tolist()
    [True, True]
    """
    if not isinstance(batch, Mapping) or "mask" in batch:
        return batch
    sizes = [np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
    return {**batch, "mask": np.ones(sizes[0], bool)} if sizes else batch
