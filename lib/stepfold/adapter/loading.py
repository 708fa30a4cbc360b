"""Batches of the trainer: order, columns, padding, masks and data positions."""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal, Self

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stepfold import tree
from stepfold.adapter.arguments import TrainingArguments
from stepfold.adapter.fields import is_changed
from stepfold.adapter.from_arguments import transform
from stepfold.adapter.sizes import Sizes
from stepfold.core.axes import default_data_axes
from stepfold.core.validation import read_integer, takes_any_keyword
from stepfold.data.batches import batches
from stepfold.data.collate import check_truncate, collate
from stepfold.data.epochs import EpochEnds, Skips
from stepfold.data.prefetch import ReadAhead, prefetch
from stepfold.data.sources import ENDLESS, ArraySource, is_stream, read_source, stack
from stepfold.data.stream import BatchIterator
from stepfold.errors import CheckpointError, ConfigError, refuse, warn

Collect = Callable[[Any], Any]
Prepare = Callable[[Any], Any]


class TrainingLoader:
    """Apply `prepare` to each batch; other attributes are those of the iterator.

    `epoch_steps` is the number of batches in an epoch, if the iterator does not know it. `without`
    skips batches in place, since the trainer keeps this loader for the whole run.
    """

    def __init__(
        self, iterator: Any, prepare: Prepare = lambda batch: batch, epoch_steps: int | None = None
    ) -> None:
        self._iterator, self._prepare, self._epoch_steps = iterator, prepare, epoch_steps
        self._peeked: list[tuple[Any, Any]] = []  # the next batch and its position

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._peeked:
            return self._peeked.pop()[0]
        return self._prepare(next(self._iterator))

    def __len__(self) -> int:
        return len(self._iterator)

    def __bool__(self) -> bool:
        return True

    def peek(self) -> Any:
        """Return the next batch, and stay at its position."""
        if not self._peeked:
            position = self._iterator.get_state() if hasattr(self, "get_state") else None
            try:
                self._peeked.append((next(self), position))
            except StopIteration:
                refuse("dataloader_train", "a batch to compile for", "none")
        return self._peeked[0][0]

    @property
    def epoch_ends(self) -> EpochEnds | None:
        """Where epochs end: after `epoch_steps` batches, if the iterator does not know it."""
        ends: EpochEnds | None = getattr(self._iterator, "epoch_ends", None)
        if ends is not None or not self._epoch_steps:
            return ends
        skips = Skips(getattr(self._iterator, "skipped", ()))
        return EpochEnds.of_length(self._epoch_steps)._replace(skips=skips)

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of batches per epoch; None if it is not known, or not the same for all."""
        if self._epoch_steps and not getattr(self._iterator, "skipped", ()):
            return self._epoch_steps
        return getattr(self._iterator, "steps_per_epoch", None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # `_iterator` itself, during a copy
            raise AttributeError(name)
        value = getattr(self._iterator, name)
        if name == "get_state" and self._peeked:
            return lambda: self._peeked[0][1]
        own = {"set_state": self._move, "without": self._skip, "reweight": self._reweight}
        return own.get(name, value)

    def _move(self, position: Any) -> None:
        self._peeked.clear()
        self._iterator.set_state(position)

    def _skip(self, ranges: Any) -> Self:
        if self._peeked:
            self._move(self._peeked[0][1])
        self._iterator = self._iterator.without(ranges)
        return self

    def _reweight(self, weights: Any, step: int | None = None) -> None:
        if self._peeked:
            self._move(self._peeked[0][1])
        self._iterator.reweight(weights, step)


class EvaluationLoader:
    """Call `make` for each iteration, and yield at most `steps` of its batches."""

    def __init__(self, make: Callable[[], Iterator[Any]], steps: int | None) -> None:
        self._make, self._steps = make, steps

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._make(), self._steps)

    def __len__(self) -> int:
        if self._steps is None:
            raise TypeError("dataloader_eval: the number of batches is not known")
        return self._steps


def skippable(loader: Any) -> Any:
    """Return a loader whose `without` skips batches in place, if it can skip any."""
    can_skip = hasattr(loader, "without") and iter(loader) is loader
    return TrainingLoader(loader) if can_skip and not isinstance(loader, TrainingLoader) else loader


def training_batches(
    arguments: TrainingArguments, sizes: Sizes, dataset: Any, collect: Collect | None
) -> TrainingLoader:
    """Make training batches, reshuffled each epoch; incomplete batches are dropped.

    A source repeats without end; a stream is iterated once for each epoch, unless the number of
    steps is known.
    """
    workers, streams, seed = arguments.dataloader_num_workers, is_stream(dataset), None
    for name in ("shuffle_seed_train", "step_start_point") if streams else ():
        if is_changed(arguments, name):
            expected = "no value with a stream, which has its own order and start"
            advice = "leave it out, or give a dataset with len and [i]"
            refuse(name, expected, f"{getattr(arguments, name)}", advice)
    if arguments.shuffle_train_dataset and not streams:
        seed = arguments.shuffle_seed_train
        seed = arguments.seed if seed is None else seed
    dataset, drop_columns = without_columns(dataset, arguments)
    is_grain = arguments.use_grain and not streams
    if is_grain:
        dataset, seed = GrainStream(dataset, seed=seed, threads=workers), None
    loader: Any = batches(
        dataset,
        sizes.train_batch,
        seed=seed,
        start=arguments.step_start_point,
        epochs=arguments.num_train_epochs if streams and not sizes.steps else None,
        transform=drop_columns,
        collate=collect,
        process_index=arguments.grain_shard_index,
        process_count=arguments.grain_shard_count,
    )
    if workers and not is_grain:
        loader = prefetch(loader, size=workers)
    return TrainingLoader(loader, _mask_for(arguments), sizes.epoch_steps)


class GrainStream:
    """A stream for `batches` that reads a source with `len` and `[i]` through grain.

    Grain's threads prefetch examples. With a seed, the order is reshuffled in every epoch. The
    position is grain's state, so a run can resume mid-epoch.
    """

    def __init__(self, source: Any, *, seed: int | None = None, threads: int = 0) -> None:
        """Create the stream; `seed=None` keeps the source's order, `threads=0` reads on demand."""
        if find_spec("grain") is None:
            raise ConfigError("grain is not installed; run pip install 'stepfold[grain]'")
        # grain would take the arrays of a tree as examples.
        read = read_source(source)
        self._source: Any = read if isinstance(read, ArraySource) else source
        self._seed, self._threads, self._epoch = seed, threads, 0

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


def evaluation_batches(
    arguments: TrainingArguments,
    sizes: Sizes,
    dataset: Any,
    collect: Collect | None,
    mesh: Mesh | None = None,
) -> EvaluationLoader:
    """Make evaluation batches, which are read again in each evaluation.

    If the last one is padded, the loss function has to respect its mask.
    """
    if hasattr(type(dataset), "__next__"):
        expected = "data that can be iterated for each evaluation"
        advice = "give a list of it, or a function that makes it"
        refuse("dataset_eval", expected, tree.describe_value(dataset), advice)
    dataset, drop_columns = without_columns(dataset, arguments)
    make = functools.partial(
        one_pass,
        dataset,
        sizes.eval_batch,
        _mask_for(arguments),
        mesh,
        transform=drop_columns,
        collate=collect,
        process_index=arguments.grain_shard_index,
        process_count=arguments.grain_shard_count,
    )
    return EvaluationLoader(make, sizes.eval_steps)


def one_pass(
    dataset: Any, size: int, prepare: Prepare, mesh: Mesh | None, **options: Any
) -> Iterator[Any]:
    """Yield all examples in order, in batches of `sf.batches` with these options.

    On a mesh, a batch that does not divide by the devices is replicated. With several processes,
    which need the same number of rows, the last batch is padded.
    """
    remainder: Literal["keep", "pad"] = "keep" if jax.process_count() == 1 else "pad"
    loader = batches(dataset, size, epochs=1, remainder=remainder, **options)
    return (replicate_if_uneven(prepare(batch), mesh) for batch in loader)


def _mask_for(arguments: TrainingArguments) -> Prepare:
    return (lambda batch: batch) if "mask" in arguments.ids_to_pop_from_dataset else with_mask


def length_of(dataset: Any) -> int | None:
    """Return the number of examples; None if unknown."""
    if dataset is None or is_stream(dataset):
        return None
    length = read_source(dataset).length
    return None if length == ENDLESS else length


def without_columns(
    dataset: Any, arguments: TrainingArguments
) -> tuple[Any, Callable[[Any], Any] | None]:
    """Drop unused columns from a dict of arrays, or return the function that drops them later."""
    drop_columns = transform(arguments)
    if drop_columns is not None and isinstance(dataset, Mapping):
        return drop_columns(dataset), None
    return dataset, drop_columns


def with_mask(batch: Any) -> Any:
    """Add an all-True `mask` to a batch that is a dict of rows without one."""
    if not isinstance(batch, Mapping) or "mask" in batch:
        return batch
    has_rows = any(np.ndim(leaf) for leaf in jax.tree.leaves(batch))
    return {**batch, "mask": np.ones(num_rows(batch), bool)} if has_rows else batch


def num_rows(batch: Any) -> int:
    """Return the number of examples in a batch; 1 if no leaf has a leading axis."""
    sizes = [np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
    return int(sizes[0]) if sizes else 1


def replicate_if_uneven(batch: Any, mesh: Mesh | None) -> Any:
    """Replicate a batch whose rows do not divide by the devices of the data axes.

    With several processes it is unchanged, since each has its own rows, padded to the same number.
    """
    if mesh is None or jax.process_count() > 1:
        return batch
    shards = math.prod(mesh.shape[axis] for axis in default_data_axes(mesh.axis_names))
    if num_rows(batch) % shards == 0:
        return batch
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec()))


# Examples to batches


def refuse_batches(dataset: Any) -> None:
    """Refuse a loader of batches: each batch would be taken as one example."""
    is_loader = isinstance(dataset, BatchIterator | ReadAhead | TrainingLoader | EvaluationLoader)
    if is_loader or type(getattr(dataset, "batch_size", None)) is int:
        advice = (
            "give the data themselves and total_batch_size, or return the batches from "
            "configure_dataloaders of a subclass"
        )
        expected = "a dataset of single examples"
        refuse(
            "dataset_train, dataset_eval", expected, f"batches: {type(dataset).__name__}", advice
        )


def warn_of_batches(dataset: Any) -> None:
    """Warn of a list whose items look like batches: their arrays share the first axis alone.

    Examples differ: sequences of tokens have one axis, and an image and its mask share two.
    """
    if not isinstance(dataset, list) or not dataset:
        return
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(dataset[0])]
    common = next(
        (i for i, sizes in enumerate(zip(*shapes, strict=False)) if len({*sizes}) > 1), None
    )
    common = min(map(len, shapes), default=0) if common is None else common
    if common == 1 < max(map(len, shapes)) and len(shapes) > 1 and shapes[0][0] > 1:
        text = (
            f"dataset: each item looks like a batch of {shapes[0][0]} examples, and is taken as a "
            "single one; return batches from configure_dataloaders of a subclass, or, if these are "
            "examples, give data_collator=…"
        )
        warn(text)


def collator_of(collator: Collect | None, *datasets: Any) -> Collect | None:
    """Return a collator, or else the attribute `data_collator` of the first dataset with one."""
    own = (getattr(dataset, "data_collator", None) for dataset in datasets)
    return collator or next(filter(None, own), None)


def collect_of(
    arguments: TrainingArguments,
    collator: Collect | None,
    make: Callable[..., Collect],
    *,
    is_own: bool,
) -> Collect | None:
    """Return the function from a list of examples to a batch; None stacks them.

    `make` is the trainer's method that makes a collect function. If a subclass overrides it, as
    `is_own` says, its function is used. It gets the output of `collator`, or columns without one.
    Otherwise the function is `collator`. Without a collator but with `max_length`, it is that of
    `make`, which pads and truncates.
    """
    if collator is not None and not is_own and arguments.max_length is not None:
        expected = "None with a data_collator, which pads and truncates itself"
        refuse("max_length", expected, f"{arguments.max_length}", "leave out one of them")
    if not is_own and (collator is not None or arguments.max_length is None):
        return collator
    options = {
        "max_sequence_length": arguments.max_length,
        "truncation_mode": arguments.truncation_mode,
    }
    if not takes_any_keyword(make):
        parameters = inspect.signature(make).parameters
        options = {name: value for name, value in options.items() if name in parameters}
    collect = make(**options)
    if not is_own:
        return collect
    if collator is not None:
        return lambda examples: collect(collator(examples))

    def collect_columns(examples: list[Any]) -> Any:
        by_column = columns(examples)
        try:
            return collect(by_column)
        except Exception as error:
            if isinstance(by_column, Mapping):
                text = f"a dict of columns {sorted(map(str, by_column))}, not a list of examples"
                error.add_note(f"the function that {make.__name__} returns gets {text}")
            raise

    return collect_columns


def collect_function(max_sequence_length: int | None, truncation_mode: str) -> Collect:
    """Make a collate function for a list of examples or a dict of columns.

    Sequences are padded and truncated to the length. Without one, examples are stacked.
    """
    check_truncate("create_collect_function", truncation_mode)
    if max_sequence_length is None:
        return _stack
    length = read_integer("create_collect_function: max_sequence_length", max_sequence_length, 1)
    options: dict[str, Any] = {"length": length, "truncate": truncation_mode}
    return functools.partial(collate, **options)


def _stack(examples: Any) -> Any:
    if isinstance(examples, Mapping):
        return {name: np.asarray(column) for name, column in examples.items()}
    return stack(examples, range(len(examples)))


def columns(examples: Sequence[Any]) -> Any:
    """Turn examples into columns: arrays if all values have one shape, otherwise lists."""
    if not isinstance(examples[0], Mapping):
        return _stack(examples)
    return {name: _column([example[name] for example in examples]) for name in examples[0]}


def _column(values: list[Any]) -> Any:
    try:
        return np.stack([np.asarray(value) for value in values])
    except ValueError:  # of unequal shapes
        return values


# Positions


def seek(loader: Any, position: Any, step: int) -> None:
    """Move batches to a saved position or, without one, to a step.

    Only `sf.batches` over a source can move to a step; others have no position for each step.
    """
    if not (hasattr(loader, "get_state") and hasattr(loader, "set_state")):
        if position is not None:
            expected = f"batches that can be moved to step {step}"
            got = f"{tree.describe_value(loader)}, which have no get_state and set_state"
            refuse(
                "ckpt_path", expected, got, "give a dataset with len and [i]", kind=CheckpointError
            )
        return
    if position is None:
        position = position_at(loader, step)
        if not _follows_from_step(position) or position == loader.get_state():
            return
    loader.set_state(position)


def position_at(loader: Any, step: int) -> Any:
    """Return the position of batches at a step; that of a stream is the current one."""
    if not hasattr(loader, "get_state"):
        return None
    position = loader.get_state()
    return {**position, "step": step} if _follows_from_step(position) else position


def offset_of(position: Any, step: Any) -> int:
    """Return how many batches a position is ahead of the step of a state.

    A loader of a subclass may start later in the data. Batches that are behind the state are moved
    to its step.
    """
    return max(0, position["step"] - int(step)) if _follows_from_step(position) else 0


def _follows_from_step(position: Any) -> bool:
    """Whether the step alone determines a position, as for `sf.batches` over a source."""
    return isinstance(position, dict) and position.keys() - {"skipped"} == {"step", "pipeline"}
