"""Resumable batches of a source or a stream, sharded over processes.

A batch takes one path: `Batches._rows` computes which rows the step needs, the source reads them,
and `BatchBuilder` transforms the examples, collates or stacks them into new arrays, and adds the
mask. A stream has no rows to choose from: `StreamBatches` buffers its next examples, and hands them
to the same `BatchBuilder`.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Self

import jax
import numpy as np

from stepfold import tree
from stepfold.core.validation import read_choice, read_function, read_instance, read_integer
from stepfold.data.collate import collate as collate_examples
from stepfold.data.copies import RefillGuard, copy_example, copy_writeable, view_read_only
from stepfold.data.epochs import EpochEnds, Epochs, Shard, Span, read_sizes
from stepfold.data.mixture import Mixture, Weights
from stepfold.data.order import Indices, Order, Rows, make_key
from stepfold.data.sources import ENDLESS, Source, is_stream, read_source, row_list, stack
from stepfold.data.stream import BatchIterator, Stream, StreamBatches, refuse_stop_iteration
from stepfold.errors import DataError, refuse, warn
from stepfold.internals import texts

_AHEAD = 32768  # rows to shuffle in one call: amortizes numpy's overhead, and still fits a cache
_TRANSFORM_STREAM = (1 << 32) - 1  # a stream of the seed that no shuffle order uses


def batches(
    source: Any,
    batch_size: int | Sequence[tuple[int, int]],
    *,
    seed: int | None = None,
    start: int = 0,
    epochs: int | None = None,
    remainder: Literal["drop", "pad", "keep"] | None = None,
    transform: Callable[..., Any] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    process_index: int | None = None,
    process_count: int | None = None,
) -> "Batches | StreamBatches":
    """Make batches of a source, where the batch at step i depends only on i.

    Starting at step 10,000,000 is as fast as starting at step 0, and a resumed run sees the same
    batches as an uninterrupted one. So does a run on another number of processes: each process gets
    its shard of the rows of the same global batch. In-order batches of arrays are read-only views
    of the source; all others are new arrays.

    Arrays keep their dtypes, and Python numbers become int64, float64 and bool, as in numpy. jax
    reads 64-bit numbers as 32-bit ones unless x64 is enabled. It wraps integers that do not fit; a
    warning names any in the first batch. Batches of `mix`, `collate` and `pack` have the same
    dtypes.

    By default, the batches have no end: the source is repeated, and the loop decides when to stop,
    as `sf.fit(…, steps=…)` does. For one pass, such as an evaluation, give `epochs=1`, and
    `remainder="pad"` or `"keep"`: the default, "drop", leaves out up to `batch_size - 1` examples
    of every epoch. With a seed, each epoch leaves out different ones; without one, `epochs=…` warns
    unless `remainder="drop"` is given.

    A stream supports only sequential reads. It is an iterator, an iterable without `[i]` (a grain
    `IterDataset`, a streaming Hugging Face dataset, a `tf.data.Dataset`), or a function that
    returns either. Every process reads the whole stream and keeps its shard of the rows. `batches`
    neither shuffles a stream nor seeks in it. A stream resumes from its own state, if it has one.

    Examples may be generated from their index, and stay reproducible:
    `sf.batches(range(n), 64, seed=0, transform=lambda i, rng: {"x": rng.normal(size=8)})`. The
    guide explains :doc:`/ideas/batches-as-functions`.

    Args:
      source: an object with `len()` and `[i]`, a tree of arrays that share their leading axis, or a
        stream of examples. If an object has a `fingerprint`, a value that JSON can hold, it is part
        of saved positions: `set_state` refuses a position with another fingerprint.
      batch_size: the global batch size; or a ramp, pairs of a step and the size from that step on,
        such as `[(0, 64), (1000, 256)]`. `fit` compiles its step for each size in advance. It
        cannot be a function of the step, because finding the rows of step i would take a call for
        every earlier step.
      seed: the seed of the shuffle order, which differs in every epoch, and of the generators for
        `transform`. None keeps the source's order. Streams and infinite sources have their own
        order, and use a seed only for `transform`.
      start: the first step.
      epochs: the number of epochs. None repeats the source without end, or reads it once if it
        cannot be read again. No batch spans two epochs. A resumed run may use another number.
      remainder: how to handle the examples at the end of an epoch that do not fill a batch. "drop",
        the default, skips them, "keep" makes a smaller batch of them, for which a jitted step
        compiles again, and "pad" repeats them until the batch is full. "pad" also adds a `mask` to
        every batch, which is false for the repeated rows; a `mask` in the examples is set to zero
        there instead.
      transform: a function of an example, applied before batching; or of an example and a
        `numpy.random.Generator`, if it has two arguments without a default. The random numbers
        depend only on the seed, the epoch and the index of the example. The example is a copy,
        which the function may change, except for arrays of an array source or a list: those are
        read-only views.
      collate: a function from a list of examples to a batch; by default, leaves are stacked. The
        examples are copies as for `transform`.
      process_index: the index of this process; by default JAX's, read with the first batch.
      process_count: the number of processes.

    Raises:
      ConfigError: if an argument is invalid.
      DataError: if the source has no examples, or too few for one batch.

    >>> import numpy as np, stepfold as sf
    >>> source = {"x": np.arange(5), "y": np.arange(5) ** 2}
    >>> for batch in sf.batches(source, 2, epochs=1, remainder="pad"):
    ...     print(batch["x"], batch["mask"])
    [0 1] [ True  True]
    [2 3] [ True  True]
    [4 4] [ True False]
    >>> first, second = sf.batches(source, 2, seed=0, epochs=1)
    >>> resumed = next(sf.batches(source, 2, seed=0, epochs=1, start=1))
    >>> np.array_equal(resumed["y"], second["y"])
    True

    Random transforms are reproducible too:

    >>> flip = lambda x, rng: -x if rng.random() < 0.5 else x
    >>> next(sf.batches(np.arange(6), 6, seed=0, transform=flip))
    array([-3,  2,  4,  1, -5,  0])
    >>> next(sf.batches(iter(range(6)), 6, seed=0, transform=flip))
    array([ 0,  1,  2, -3,  4, -5])
    """
    sizes = read_sizes(batch_size)
    seed = None if seed is None else read_integer("seed", seed, 0)
    start = read_integer("start", start, 0)
    epochs = None if epochs is None else read_integer("epochs", epochs, 1)
    is_chosen, remainder = remainder is not None, "drop" if remainder is None else remainder
    read_choice("remainder", remainder, ("drop", "pad", "keep"))
    if collate is not None:
        read_function("collate", collate)
    transform_seed = seed if _takes_generator(transform, seed) else None
    # A seed that no transform uses is refused for sources that have their own order.
    order_seed = seed if transform_seed is None else None
    builder = BatchBuilder(transform, transform_seed, collate, remainder == "pad")
    shard = Shard(process_index, process_count)
    # A saved position is only valid for these settings. The number of epochs does not matter.
    pipeline: dict[str, Any] = {
        "seed": seed,
        "batch_size": sizes[0][1] if len(sizes) == 1 else [list(pair) for pair in sizes],
        "remainder": remainder,
    }
    if is_stream(source):
        stream = Stream(source)
        _check_stream(stream, order_seed, start, epochs)
        pipeline["stream"] = stream.package
        return StreamBatches(stream, builder, sizes, shard, pipeline, epochs)
    rows = read_source(source)
    if rows.length == ENDLESS:
        if epochs is not None or order_seed is not None:
            expected = "no seed and no epochs for an infinite source, which has its own order"
            advice = "leave both out, and give the seed to the function that made the source"
            refuse("source", expected, f"seed={seed}, epochs={epochs}", advice)
        seed = None
    pipeline |= {"length": rows.length, "source": rows.fingerprint}
    steps = Epochs(rows.length, sizes, drop=remainder == "drop", epochs=epochs)
    left_out = rows.length % sizes[-1][1]
    if left_out and not is_chosen and epochs is not None and seed is None:
        warn(
            f"remainder: by default, 'drop' leaves the last {left_out} of {rows.length} examples "
            "out of every epoch; give remainder='pad' and use its mask, or 'keep', or 'drop'",
        )
    return Batches(rows, builder, steps, Order(rows.length, seed), shard, pipeline, start)


def _check_stream(stream: Stream, seed: int | None, start: int, epochs: int | None) -> None:
    if seed is not None:
        advice = "shuffle it where it is made, or give a list of it"
        refuse("seed", "none for a stream, which has its own order", f"{seed}", advice)
    if start:
        advice = (
            "resume a stream that has a state, such as grain's, with set_state(), give a list of "
            "it, or skip examples by hand: sf.batches(itertools.islice(stream, n, None), …)"
        )
        refuse("start", "0 for a stream, which is read from its beginning", f"{start}", advice)
    if stream.is_iterator and epochs is not None and epochs > 1:
        advice = "give a list of it, or a function that makes it, such as lambda: read(path)"
        refuse("epochs", "1 for an iterator, which can be read only once", f"{epochs}", advice)


class Batches(BatchIterator):
    """An iterator over batches with random access by step; returned by `batches`.

    It is resumable by grain's protocol, `get_state` and `set_state`. With `epochs`, its `len` is
    the number of steps in all epochs, including those already iterated.

    >>> import numpy as np, stepfold as sf
    >>> stream = sf.batches(np.arange(10), 3, seed=0, epochs=2)
    >>> len(stream), np.array_equal(stream.at(1), list(stream)[1])
    (6, True)
    """

    def __init__(
        self,
        source: Source,
        builder: "BatchBuilder",
        epochs: Epochs,
        order: Order,
        shard: Shard,
        pipeline: dict[str, Any],
        step: int,
    ) -> None:
        super().__init__(builder, epochs.sizes, shard, pipeline)
        self._source: Source = source
        self._epochs, self._order, self._step = epochs, order, step
        self._total = epochs.total
        self._changes: list[Any] = []  # of the weights of a mixture: pairs (example, weights)
        self._is_checked = False
        self._ahead = _Ahead(0, 0, np.empty((0, 0), np.int64))

    def __next__(self) -> Any:
        if self._total is not None and self._step >= self._total:
            raise StopIteration
        batch = self._checked(self._make(self._step))
        self._step += 1
        return batch

    def at(self, step: int) -> Any:
        """Return the batch of a step, without changing the position.

        Raises:
          IndexError: if the step is past the last epoch.
        """
        step = read_integer("step", step, 0)
        if self._total is not None and step >= self._total:
            refuse("batches", f"a step below {self._total}", f"{step}", kind=IndexError)
        return self._checked(self._make(step))

    def _make(self, step: int) -> Any:
        builder, index = self._builder, self._skips.index(step)
        if not self._is_checked:
            self._check_shards()
        try:
            self._source.check_length()
            rows, epoch, mask = self._rows(index)
            if builder.transform is None and builder.collate is None:
                return _with_mask(self._source.take(rows), mask)
            examples, keeps = self._source.examples(rows), self._source.keeps_arrays
            return builder.build(examples, row_list(rows), epoch, mask, keeps_arrays=keeps)
        except Exception as error:
            span, start, stop = self._share(index)
            last = min(span.start + stop, span.stop) - 1
            error.add_note(
                f"making the batch of step {step}: positions {span.start + start} to {last} of "
                f"epoch {span.epoch}"
            )
            refuse_stop_iteration(error, step)
            raise

    def _check_shards(self) -> None:
        """Raise if this or a later batch does not divide evenly over the processes."""
        self._shard.check_sizes(self._sizes)
        for step in [] if self._builder.pads else self._epochs.incomplete_steps():
            span = self._epochs.span(step)
            self._shard.check_incomplete(step, span.stop - span.start)
        self._is_checked = True

    def _rows(self, index: int) -> tuple[Rows, int, Any]:
        """Return this process's rows of a batch, its epoch, and its mask, or None without one."""
        pads, ahead = self._builder.pads, self._ahead  # read once: another thread may replace it
        if 0 <= index - ahead.start < len(ahead.rows):
            rows: Any = ahead.rows[index - ahead.start]
            return rows, ahead.epoch, np.ones(len(rows), np.bool_) if pads else None
        span, start, stop = self._share(index)
        count = span.stop - span.start
        mask = np.arange(start, stop) < count if pads else None
        if stop > count:  # pad the batch by repeating its rows
            rows = self._order(span.epoch, span.start + np.arange(start, stop) % count)
        elif self._order.seed is None:
            rows = slice(span.start + start, span.start + stop)
        else:
            ahead = self._ahead = self._shuffle_ahead(index, span, start, stop)
            rows = ahead.rows[0]
        return rows, span.epoch, mask

    def _shuffle_ahead(self, index: int, span: Span, start: int, stop: int) -> "_Ahead":
        steps = max(1, min(_AHEAD // (stop - start), span.full_batches_left))
        end = span.start + steps * span.size
        positions: Rows = slice(span.start, end)
        if stop - start < span.size:  # only this process's share
            by_batch = np.arange(span.start, end).reshape(steps, span.size)
            positions = by_batch[:, start:stop].ravel()
        rows: Any = self._order(span.epoch, positions)
        return _Ahead(index, span.epoch, rows.reshape(steps, stop - start))

    def _share(self, index: int) -> tuple[Span, int, int]:
        """Return the rows of a batch, and the start and stop of this process's share of them."""
        span = self._epochs.span(index)
        size = span.size if self._builder.pads else span.stop - span.start
        return span, *self._shard.rows(size)

    def count_rows(self, step: int) -> tuple[int, int] | None:
        """Return the rows of the batch of a step without padding: of this process, and of all.

        None if the numbers depend on `collate`.
        """
        if self._builder.collate is not None and not self._builder.pads:
            return None
        span, start, stop = self._share(self._skips.index(read_integer("step", step, 0)))
        count = span.stop - span.start
        return min(max(count - start, 0), stop - start), count

    def without(self, ranges: Sequence[tuple[int, int]]) -> Self:
        """Return batches at the same step that skip further ranges.

        A range is a half-open pair of batch indices, which count the batches without any skip. A
        step counts the batches that are returned, so a skip moves later batches to earlier steps.
        The ranges are part of the position: one that was saved after other skips is refused.

        >>> import numpy as np, stepfold as sf
        >>> stream = sf.batches(np.arange(10), 2, epochs=1).without([(1, 3)])
        >>> [batch.tolist() for batch in stream], stream.skipped, stream.batch_index(1)
        ([[0, 1], [6, 7], [8, 9]], [(1, 3)], 3)
        """
        new = copy.copy(self)
        new._skips = self._skips.add(ranges)
        if self._epochs.total is not None:
            new._total = new._skips.step(self._epochs.total)
            if not new._total:
                expected = f"ranges that leave one of the {self._epochs.total} batches"
                refuse("without", expected, f"{new._skips.ranges}")
        return new

    def get_state(self) -> dict[str, Any]:
        """Return the position and the pipeline's settings, serializable as JSON."""
        return self.state_at(self._step)

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the state whose next batch is that of `step`."""
        state: dict[str, Any] = {"step": step, "pipeline": dict(self._pipeline)}
        if self._changes:
            state["weights"] = [*self._changes]
        return self._with_skips(state) if self._skips.ranges else state

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a position from `get_state`, saved on any number of processes.

        Raises:
          DataError: if the state was saved by a different pipeline, or after other skips.
        """
        step, _ = self._read_state(state, ", or make new ones with start={step}")
        self._change(state.get("weights", []))
        self._step = step

    def reweight(self, weights: Weights, step: int | None = None) -> None:
        """Change the weights of a mixture, from the batch of a step on, by default the next.

        A batch is then a function of its step and of the changes. They are part of the position:
        `set_state` restores those that it was saved with. Each source continues where it is. A
        later stage of the mixture replaces the weights again.

        >>> import numpy as np, stepfold as sf
        >>> parts = {"old": (np.arange(100), 1), "new": (-np.arange(100), 1)}
        >>> stream = sf.batches(sf.mix(parts), 4)
        >>> first = next(stream)
        >>> stream.reweight({"old": 3, "new": 1})
        >>> first, next(stream)
        (array([ 0,  0,  1, -1]), array([ 2,  3, -2,  4]))
        """
        source = self._source
        if not isinstance(source, Mixture):
            expected, advice = "those of a mixture", "give sf.batches(sf.mix(…), …)"
            refuse("reweight", expected, tree.describe_value(source), advice)
        step = self._step if step is None else read_integer("step", step, self._step)
        first = self._epochs.span(self._skips.index(step)).start
        before = [change for change in self._changes if change[0] < first]
        self._change([*before, [first, source.spell_weights(weights)]])

    def _change(self, changes: list[Any]) -> None:
        if changes != self._changes and isinstance(self._source, Mixture):
            self._changes, self._source = changes, self._source.with_changes(changes)

    def __len__(self) -> int:
        if self._total is None:
            # list() and progress bars treat a TypeError as an unknown length.
            raise TypeError("batches: there is no length without epochs; give epochs=…")
        return self._total

    def __bool__(self) -> bool:
        return True

    @property
    def endless(self) -> bool:
        """Whether the iterator never ends."""
        return self._total is None

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of batches in one pass over the source, whether or not `epochs` is given.

        It is None for a mixture, which has no end, and if the number differs between passes: with a
        `batch_size` that changes, and after `without`.
        """
        is_constant = self._epochs.length != ENDLESS and not self._skips.ranges
        return self._epochs.steps_per_epoch if is_constant else None

    @property
    def epoch_ends(self) -> EpochEnds | None:
        """Where epochs end, even if their number of batches changes; None without epochs."""
        return None if self._epochs.length == ENDLESS else EpochEnds(self._epochs, self._skips)


class _Ahead(NamedTuple):
    """This process's rows of shuffled full batches of one epoch, from a batch index on."""

    start: int
    epoch: int
    rows: Indices  # of shape (batches, rows)


class BatchBuilder(NamedTuple):
    """Make a batch of examples: transform them, collate or stack them, and add the mask."""

    transform: Callable[..., Any] | None
    transform_seed: int | None  # None if the transform takes no generator
    collate: Callable[[list[Any]], Any] | None
    pads: bool

    def build(
        self,
        examples: list[Any],
        indices: list[int],
        epoch: int,
        mask: Any,
        *,
        keeps_arrays: bool = False,
    ) -> Any:
        """Make a batch; `indices` are those of the examples in the source.

        The functions of the user get copies, since what they change may be kept by the source,
        repeated in this batch, or used again after an error. `keeps_arrays` is that of the source.
        """
        if self.transform is not None or not self.makes_new_arrays:
            copy_leaf = view_read_only if keeps_arrays else copy_writeable
            examples = [copy_example(example, copy_leaf) for example in examples]
        try:
            if self.transform is not None:
                examples = self._transformed(examples, indices, epoch)
            batch = stack(examples, indices) if self.collate is None else self.collate(examples)
        except ValueError as error:
            if texts.READ_ONLY.search(str(error)):
                error.add_note(
                    "arrays of the source are read-only, since a change would be seen in the next "
                    "epoch: change a copy, as of example['x'].copy()"
                )
            raise
        if batch is None:
            refuse("collate", "a batch", "None", "return the batch", kind=DataError)
        return _with_mask(batch, mask)

    @property
    def makes_new_arrays(self) -> bool:
        """Whether each batch is new arrays: a `collate` of the user might refill one buffer."""
        function = self.collate.func if isinstance(self.collate, partial) else self.collate
        return function is None or function is collate_examples

    def _transformed(self, examples: list[Any], indices: list[int], epoch: int) -> list[Any]:
        function: Any = self.transform
        if self.transform_seed is not None:
            key = make_key(self.transform_seed, epoch, _TRANSFORM_STREAM)[0, :2]
        transformed, guard = list[Any](), RefillGuard()
        for row, (index, example) in enumerate(zip(indices, examples, strict=True)):
            draws = () if self.transform_seed is None else (_generator(key, index),)
            try:
                new = function(example, *draws)
            except Exception as error:
                error.add_note(
                    f"transforming index {index} of the source, row {row} of those requested"
                )
                raise
            if new is None:
                got = f"None for index {index} of the source"
                advice = "return the example, and filter the source before batching"
                refuse("transform", "an example", got, advice, kind=DataError)
            transformed.append(guard(new))
        return transformed


def _generator(key: Any, index: int) -> np.random.Generator:
    # The index is the highest word of the counter, so the streams of two examples never overlap.
    counter = np.zeros(4, np.uint64)
    counter[3] = index
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def _with_mask(batch: Any, valid: Any) -> Any:
    """Add the mask `valid`, unless it is None, or combine it with the `mask` of the batch."""
    if valid is None:
        return batch
    argument, count = "remainder='pad'", len(valid)
    expected = "batches that are a dict, to add a mask to"
    read_instance(argument, batch, dict, expected, "give a source such as {'x': …}", kind=DataError)
    mask = batch.get("mask")
    if mask is None:
        if all(np.shape(leaf)[:1] != valid.shape for leaf in jax.tree.leaves(batch)):
            expected = f"batches of {count} rows, to add a mask to"
            advice = "use 'keep' or 'drop' where it changes their number"
            refuse(argument, expected, "none in what collate makes", advice, kind=DataError)
        return {**batch, "mask": valid}
    if not tree.is_array(mask) or mask.shape[:1] != valid.shape or not tree.is_data(mask):
        got, expected = tree.describe_value(mask), f"a mask of {count} rows to combine with"
        advice = "rename it, or leave the padding to collate with remainder='keep'"
        refuse(argument, expected, got, advice, kind=DataError)
    valid = valid.reshape(-1, *[1] * (mask.ndim - 1))
    return {**batch, "mask": np.where(valid, mask, np.zeros((), mask.dtype))}


def _takes_generator(transform: Any, seed: int | None) -> bool:
    """Whether a transform takes a random generator: whether it has two required arguments."""
    if transform is None:
        return False
    read_function("transform", transform)
    try:
        parameters = inspect.signature(transform).parameters.values()
    except ValueError:  # some C functions have no signature
        return False
    count = sum(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in parameters
    )
    if count > 2:
        expected = "a function of an example, or of an example and a random generator"
        got = f"{tree.describe_value(transform)} of {count} arguments"
        refuse("transform", expected, got, "give the others by functools.partial or a default")
    if count == 2 and seed is None:
        expected = "a seed for the random generator that is its second argument"
        advice = "give seed=…, or the argument a default"
        refuse("transform", expected, "seed=None", advice)
    return count == 2
