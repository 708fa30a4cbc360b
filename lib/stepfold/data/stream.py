"""Batches of streams, which are sources without random access, and their positions."""

import copy
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from stepfold import tree
from stepfold.core.validation import read_integer
from stepfold.data.copies import copy_array, copy_example
from stepfold.data.dtypes import warn_of_wrapped
from stepfold.data.epochs import BatchSizes, Shard, Skips, refuse_size, size_at
from stepfold.data.sources import Source, check_examples, differences
from stepfold.errors import DataError, refuse
from stepfold.internals.datasets import has_shuffle_buffer

# Of an iterator or of its iterable. Grain's iterators have the first protocol. Hugging Face's
# streaming datasets and torch's stateful loaders have the second.
_PROTOCOLS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


class BatchIterator:
    """Base class of the iterators that `batches` returns.

    `pipeline` holds the settings that a saved position depends on, so that all others may change.
    """

    _source: Source | None = None  # streams have none

    def __init__(
        self, builder: Any, sizes: BatchSizes, shard: Shard, pipeline: dict[str, Any]
    ) -> None:
        self._builder, self._sizes, self._shard = builder, sizes, shard
        self._pipeline, self._skips = pipeline, Skips()
        # Stacking makes new arrays, and views of a source are of memory that it keeps.
        self.reuses_buffers = not builder.makes_new_arrays
        self._has_checked_values = False

    def __iter__(self) -> Self:
        return self

    @property
    def skipped(self) -> list[tuple[int, int]]:
        """The ranges of batch indices that are left out, merged and sorted."""
        return list(self._skips.ranges)

    def batch_index(self, step: int) -> int:
        """Return the index of the batch of a step among all batches, with those skipped."""
        return self._skips.index(read_integer("step", step, 0))

    @property
    def batch_sizes(self) -> BatchSizes:
        """The global batch sizes: pairs of a step and the size from that step on."""
        return [*{self._skips.step(index): size for index, size in self._sizes}.items()]

    def copied(self) -> Self:
        """Return a copy for other processes, which reads nothing of jax and checks no values."""
        new = copy.copy(self)
        new._shard.resolve()
        new._has_checked_values = True
        return new

    def _checked(self, batch: Any) -> Any:
        """Return a batch; warn if the first one has integers that jax would wrap around."""
        if not self._has_checked_values:
            self._has_checked_values = True
            warn_of_wrapped(batch)
        return batch

    def get_state(self) -> dict[str, Any]:
        """Return the position and the pipeline's settings, serializable as JSON."""
        raise NotImplementedError

    def _with_skips(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "skipped": [list(pair) for pair in self._skips.ranges]}

    def _read_state(self, state: Any, advice: str = "") -> tuple[int, int]:
        """Return the step and the batch index of a position; raise if it is of other batches."""
        current = self.get_state()
        # Only in a position of batches that skip some, or of a mixture whose weights have changed.
        optional = {"skipped", "index", "weights"}
        keys = current.keys() | optional
        is_position = isinstance(state, dict) and state.keys() | optional == keys
        if not is_position or not isinstance(state["pipeline"], dict):
            expected = f"a state that get_state() of such batches gave, with {', '.join(current)}"
            advice = "it was saved by another kind of iterator"
            refuse("batches", expected, tree.describe_value(state), advice, kind=DataError)
        differing = differences(state["pipeline"], self._pipeline, self._source)
        if differing:
            got = f"others: {'; '.join(differing)}"
            advice = f"make them as they were{advice.format(step=state['step'])}"
            expected = "the batches that the position was saved in"
            refuse("batches", expected, got, advice, kind=DataError)
        step = read_integer("state: step", state["step"], 0)
        skips = Skips().add(state.get("skipped", []))
        # The index after the last batch: later ranges may differ.
        after = skips.index(step - 1) + 1 if step else 0
        index = read_integer("state: index", state.get("index", after), 0)
        was, is_now = skips.before(index), self._skips.before(index)
        if was != is_now:
            expected = f"those that skip {was} before batch {index}, as when the position was saved"
            advice = (
                "give the same ranges to batches.without, or go back to a position before the "
                "first that differs"
            )
            refuse("batches", expected, f"some that skip {is_now}", advice, kind=DataError)
        return step, index


class StreamBatches(BatchIterator):
    """An iterator over batches of a stream, returned by `batches`.

    Each process reads the whole stream, and keeps its shard of the rows of each batch. After a
    batch has failed, the next call to `next` tries it again with the same examples.

    >>> import stepfold as sf
    >>> stream = sf.batches(lambda: range(5), 2, epochs=1, remainder="keep")
    >>> [batch.tolist() for batch in stream]
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        stream: "Stream",
        builder: Any,
        sizes: BatchSizes,
        shard: Shard,
        pipeline: dict[str, Any],
        epochs: int | None,
    ) -> None:
        super().__init__(builder, sizes, shard, pipeline)
        self._stream, self._drops = stream, pipeline["remainder"] == "drop"
        self._epochs = 1 if stream.is_iterator else epochs
        # The position after the last batch. Examples of the next one may be buffered already.
        self._step = self._index = self._epoch = self._row = 0
        self._position = stream.position()
        self._buffer: list[Any] = []

    def __next__(self) -> Any:
        self._shard.check_sizes(self._sizes)
        while self._epochs is None or self._epoch < self._epochs:
            size = size_at(self._sizes, self._index)
            self._read(size)
            count = len(self._buffer)
            if not count or (count < size and self._drops):
                self._end_epoch(size)
                continue
            is_skipped = self._index != self._skips.index(self._step)
            batch = None if is_skipped else self._checked(self._make(size))
            self._position = self._stream.position()
            self._step += not is_skipped
            self._index += 1
            self._row += count
            self._buffer = []
            if not is_skipped:
                return batch
        raise StopIteration

    def _read(self, size: int) -> None:
        """Buffer examples until there are enough for a batch, or the epoch ends."""
        try:
            self._stream.fill(self._buffer, size)
        except Exception as error:
            error.add_note(
                f"reading example {self._row + len(self._buffer)} of epoch {self._epoch} of the "
                f"stream, for the batch of step {self._step}"
            )
            raise

    def _make(self, size: int) -> Any:
        count, row, pads = len(self._buffer), self._row, self._builder.pads
        if not pads:
            self._shard.check_incomplete(self._step, count)
        first, last = self._shard.rows(size if pads else count)
        own = [index % count for index in range(first, last)]  # pad by repeating own rows
        mask = np.arange(first, last) < count if pads else None
        try:
            check_examples(self._buffer, range(row, row + count), "stream")
            examples = [self._buffer[index] for index in own]
            return self._builder.build(examples, [row + index for index in own], self._epoch, mask)
        except Exception as error:
            error.add_note(
                f"making the batch of step {self._step}: examples {row} to {row + count - 1} of "
                f"epoch {self._epoch}"
            )
            refuse_stop_iteration(error, self._step)
            raise

    def _end_epoch(self, size: int) -> None:
        if not self._row:
            if self._buffer:
                refuse_size(size, f"at most the {len(self._buffer)} examples of the stream")
            got = f"none in epoch {self._epoch} of the stream"
            advice = "if it can be read only once, give epochs=1, or a function that makes it"
            refuse("source", "examples", got, advice, kind=DataError)
        self._epoch += 1
        self._row, self._position, self._buffer = 0, "null", []
        self._stream.start(self._epoch)

    def without(self, ranges: Sequence[tuple[int, int]]) -> Self:
        """Return batches that skip ranges of these, as `Batches.without` does.

        The examples of a skipped batch are read. Both read one stream: use only the new batches.
        """
        new = copy.copy(self)
        new._skips, new._buffer = self._skips.add(ranges), [*self._buffer]
        if new._skips.before(self._index) != self._skips.before(self._index):
            expected = f"ranges from batch {self._index} on, since the stream is read up to there"
            refuse("without", expected, f"{ranges}", "make the batches again")
        return new

    def unbuilt(self) -> tuple[Self, Any]:
        """Return batches that are only read, and the builder that makes batches of them.

        Each is a tuple of arguments of the builder's `build`. Both read one stream: use only the
        new batches.
        """
        new = self.without([])
        new._builder, new._has_checked_values = _DeferredBuilder(self._builder.pads), True
        return new, self._builder

    def get_state(self) -> dict[str, Any]:
        """Return the position and the pipeline's settings, serializable as JSON.

        The position includes the stream's own state. A stream without a state can be saved, but not
        resumed.
        """
        state = {
            "step": self._step,
            "epoch": self._epoch,
            "row": self._row,
            "stream": json.loads(self._position),
            "pipeline": dict(self._pipeline),
        }
        return self._with_skips({**state, "index": self._index}) if self._skips.ranges else state

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a position from `get_state`, saved on any number of processes.

        Raises:
          DataError: if the state was saved by a different pipeline or after other skips, or the
            stream has no state of its own. `set_state` does not seek by reading the stream again.
        """
        step, index = self._read_state(state)
        epoch, row = (read_integer(f"state: {name}", state[name], 0) for name in ("epoch", "row"))
        position = state["stream"]
        if position is not None and "lost" not in position:
            self._stream.restore(epoch, position)
        elif position is None and (epoch or not self._stream.is_iterator):
            self._stream.start(epoch)  # or an iterator that has ended
        elif position is not None and step:
            raise DataError(
                f"batches: expected a position that can be restored, got step {step} of a stream, "
                f"but {position['lost']}; give a source with len() and [i], or skip by hand the "
                f"{row} examples of epoch {epoch} that were read, as in "
                f"sf.batches(itertools.islice(stream, {row}, None), …)"
            )
        elif step or self._step or self._buffer:  # if nothing was read, there is nothing to do
            got = f"one that has been read up to step {self._step}"
            advice = "an iterator can be read only once: create it again"
            refuse("batches", "an iterator that has not been read", got, advice, kind=DataError)
        self._step, self._index, self._epoch, self._row = step, index, epoch, row
        self._position, self._buffer = json.dumps(position), []

    @property
    def endless(self) -> bool:
        """Whether the stream is repeated forever, or has no end."""
        return self._epochs is None or self._stream.endless


class _DeferredBuilder(NamedTuple):
    """Stands in for a `BatchBuilder`, and returns its arguments, so that another builds later."""

    pads: bool

    def build(self, *arguments: Any) -> tuple[Any, ...]:
        return arguments


class Stream:
    """A source that is read in sequence, restarts in every epoch, and may have a position.

    An iterator can be read only once. All other streams can restart: an iterable, such as a grain
    `IterDataset`, a Hugging Face `IterableDataset` or a `tf.data.Dataset`, or a function that
    returns an iterator or an iterable. If it has `set_epoch`, this is called before each epoch, so
    that it can reshuffle.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.is_iterator = hasattr(type(source), "__next__")
        self.endless = self.is_iterator and bool(getattr(source, "endless", False))
        self.package = type(source).__module__.partition(".")[0]
        self._epoch, self._is_open = 0, self.is_iterator  # whether the epoch has been started
        self._iterator: Any = source  # of the current epoch
        self._state = _find_state(source)  # of the current epoch, if it has one
        self._restored_epoch: int | None = None
        self._error: Exception | None = None  # of the last read

    def start(self, epoch: int) -> None:
        """Start an epoch from its beginning, with the next example."""
        self._epoch, self._is_open = epoch, self.is_iterator

    def fill(self, examples: list[Any], count: int) -> None:
        """Append the next examples, until there are `count` or the epoch ends.

        They are copied, since a stream may fill one buffer again for each.
        """
        while len(examples) < count:
            try:
                example = self.read()
            except StopIteration:
                return
            if getattr(self._iterator, "reuses_buffers", True):
                example = copy_example(example, copy_array)
            examples.append(example)

    def read(self) -> Any:
        """Return the next example, or raise StopIteration."""
        if not self._is_open:
            self._start_epoch()
        try:
            example = next(self._iterator)
        except StopIteration:
            if self._error is not None:  # a generator that has raised ends silently
                expected = "a stream that continues after an error"
                got = f"one that ended after raising {self._error!r}"
                advice = "create the stream again, and restore the last position"
                refuse("source", expected, got, advice, kind=DataError, cause=self._error)
            raise
        except Exception as error:
            self._error = error
            raise
        self._error = None
        return example

    def _start_epoch(self) -> None:
        if self._restored_epoch == self._epoch:  # it would resume from the restored position
            expected = f"a stream that starts epoch {self._epoch} from its beginning"
            got = f"one that was restored to a position in it: {tree.describe_value(self._source)}"
            advice = "create the stream and its batches again"
            refuse("source", expected, got, advice, kind=DataError)
        _, self._iterator, self._state = self._open(self._epoch)
        self._error, self._is_open = None, True

    def position(self) -> str:
        """Return the position in the epoch as JSON text, or the reason why it is unknown.

        It is null at the start of an epoch. The text is a copy, so advancing the stream does not
        change it.
        """
        if not self._is_open:
            return "null"
        if self._state is None:
            # Only the type: a repr can be long, and contain an address that differs per process.
            reason = f"a stream of type {type(self._source).__name__} has no state of its own"
        elif has_shuffle_buffer(self._state.holder):
            reason = "the examples in its shuffle buffer are no part of its state"
        else:
            state = getattr(self._state.holder, self._state.getter)()
            try:  # grain's DataLoader returns bytes that hold text
                known = {"text": state.decode()} if type(state) is bytes else {"json": state}
                return json.dumps(known)
            except (TypeError, ValueError) as error:
                reason = f"its state cannot be written as JSON: {error}"
        return json.dumps({"lost": reason})

    def restore(self, epoch: int, position: dict[str, Any] | None) -> None:
        """Restore a position in an epoch that `position` returned, parsed from JSON."""
        if position is None:
            self.start(epoch)
            return
        iterable, iterator, state = self._source, self._iterator, self._state
        if not self.is_iterator:
            iterable, iterator, state = self._open(epoch)
        if state is None:
            expected = "a stream with its own state, like the one whose position was saved"
            got = tree.describe_value(self._source)
            refuse("source", expected, got, "give the same one", kind=DataError)
        value = position["text"].encode() if "text" in position else position["json"]
        try:
            getattr(state.holder, state.setter)(value)
        except Exception as error:
            error.add_note(f"setting the state of the stream with its own {state.setter}()")
            raise
        if state.holder is not iterator:  # the iterable has it: iterate it after restoring
            iterator = _iterate(iterable)
            self._restored_epoch = epoch if iterable is self._source else None
        self._iterator, self._state, self._error = iterator, state, None
        self._epoch, self._is_open = epoch, True

    def _open(self, epoch: int) -> tuple[Any, Any, "_State | None"]:
        """Start iterating an epoch; return the iterable, its iterator, and the state of either."""
        is_function = not hasattr(type(self._source), "__iter__")
        iterable = self._source() if is_function else self._source
        if hasattr(iterable, "set_epoch"):
            iterable.set_epoch(epoch)
        iterator = _iterate(iterable)
        return iterable, iterator, _find_state(iterator, iterable)


class _State(NamedTuple):
    """The object that has a stream's state, and the names of its getter and setter."""

    holder: Any
    getter: str
    setter: str


def _find_state(*objects: Any) -> _State | None:
    """Find the first object that has a state."""
    for holder in objects:
        for getter, setter in _PROTOCOLS:
            if hasattr(holder, getter) and hasattr(holder, setter):
                return _State(holder, getter, setter)
    return None


def _iterate(iterable: Any) -> Any:
    # Iterating a tf.data pipeline directly would yield tensors.
    if hasattr(iterable, "as_numpy_iterator"):
        return iterable.as_numpy_iterator()
    if not hasattr(type(iterable), "__iter__"):
        got = f"one that makes {tree.describe_value(iterable)}"
        advice = "return an iterable, or yield the examples"
        expected = "a function that makes an iterator or an iterable"
        refuse("source", expected, got, advice, kind=DataError)
    return iter(iterable)


def refuse_stop_iteration(error: Exception, step: int) -> None:
    """Convert StopIteration, which would silently end the iteration."""
    if isinstance(error, StopIteration):
        raise DataError(f"batches: StopIteration was raised at step {step}") from error
