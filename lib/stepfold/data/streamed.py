"""Batches of a stream, which supports only sequential reads."""

import json
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from stepfold.data.cuts import Share, size_at
from stepfold.data.integers import read_integer
from stepfold.data.reading import Making
from stepfold.data.resuming import check_position
from stepfold.data.sources.streams import Stream
from stepfold.errors import DataError


class Streamed:
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
        stream: Stream,
        making: Making,
        sizes: Sequence[tuple[int, int]],
        share: Share | None,
        pipeline: dict[str, Any],
        epochs: int | None,
    ) -> None:
        self._stream, self._making, self._sizes = stream, making, sizes
        self._share, self._pipeline = share, pipeline
        self._epochs = 1 if stream.once else epochs
        self._whole = pipeline["remainder"] == "drop"
        # The position after the last complete batch; part of the next may be buffered already.
        self._step = self._epoch = self._row = 0
        self._position = stream.position() if stream.once else "null"
        self._pending: list[Any] = []
        self._begun = stream.once
        self._broken: Exception | None = None

    def __iter__(self) -> Self:
        return self

    @property
    def endless(self) -> bool:
        """Whether the stream is repeated forever."""
        return self._epochs is None

    def __next__(self) -> Any:
        if self._share is None:
            self._share = Share.asked_of_jax()
        self._share.check_sizes(self._sizes)
        while self._epochs is None or self._epoch < self._epochs:
            size = size_at(self._sizes, self._step)
            self._read(size)
            if len(self._pending) == size or (self._pending and not self._whole):
                return self._give(self._share, size)
            self._end_epoch(size)
        raise StopIteration

    def _read(self, size: int) -> None:
        """Buffer examples until there are enough for a batch, or the stream ends."""
        try:
            if not self._begun:
                self._stream.begin(self._epoch)
                self._begun = True
            while len(self._pending) < size:
                self._pending.append(self._stream.read())
                self._broken = None
        except StopIteration:
            if self._broken is not None:  # a generator that has raised ends silently
                raise DataError(
                    f"source: expected the stream to go on, got its end after it had raised "
                    f"{self._broken!r}; make the stream anew, and go to the last position"
                ) from self._broken
        except Exception as error:
            self._broken = error
            error.add_note(
                f"reading example {self._row + len(self._pending)} of epoch {self._epoch} of the "
                f"stream, for the batch of step {self._step}"
            )
            raise

    def _give(self, share: Share, size: int) -> Any:
        rows = len(self._pending)
        if not self._making.masked:
            share.check_short(self._step, rows)
        try:
            batch = self._make(share, size)
        except Exception as error:
            error.add_note(
                f"making the batch of step {self._step}: examples {self._row} to "
                f"{self._row + rows - 1} of epoch {self._epoch}"
            )
            if isinstance(error, StopIteration):  # would silently end the iteration
                raise DataError(f"batches: StopIteration came up at step {self._step}") from error
            raise
        self._position = self._stream.position()
        self._step += 1
        self._row += rows
        self._pending = []
        return batch

    def _make(self, share: Share, size: int) -> Any:
        rows = len(self._pending)
        first, last = share.rows(size if self._making.masked else rows)
        for row, example in enumerate(self._pending):
            if example is None:
                raise DataError(
                    f"source: expected an example, got None as example {self._row + row} of the "
                    "stream; leave out what is missing before the stream is given"
                )
        # A batch is padded by repeating its own rows.
        mine = [row % rows for row in range(first, last)]
        valid = np.arange(first, last) < rows if self._making.masked else None
        examples, indices = [self._pending[row] for row in mine], [self._row + row for row in mine]
        return self._making(examples, indices, self._epoch, valid)

    def _end_epoch(self, size: int) -> None:
        if not self._row:
            if self._pending:
                raise DataError(
                    f"batch_size: expected at most the {len(self._pending)} examples of the stream,"
                    f" got {size}, and remainder='drop' would leave out every epoch; give a smaller"
                    " batch_size, or remainder='pad'"
                )
            raise DataError(
                f"source: expected examples, got none in epoch {self._epoch} of the stream; if it "
                "can be read only once, give epochs=1, or a function that makes it anew"
            )
        self._epoch += 1
        self._row, self._position, self._pending, self._begun = 0, "null", [], False

    def get_state(self) -> dict[str, Any]:
        """Return the position and the pipeline's settings, serializable as JSON.

        The position includes the stream's own state. A stream without a state can be saved, but not
        resumed.
        """
        return {
            "step": self._step,
            "epoch": self._epoch,
            "row": self._row,
            "stream": json.loads(self._position),
            "pipeline": dict(self._pipeline),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a position from `get_state`, saved on any number of processes.

        Raises:
          DataError: if the state was saved by a different pipeline, or the stream has no state of
            its own. `set_state` does not seek by reading the stream again.
        """
        check_position(state, self.get_state())
        step, epoch, row = (
            read_integer(f"state: {name}", state[name], 0) for name in ("step", "epoch", "row")
        )
        position = state["stream"]
        if position is not None and "lost" not in position:
            self._stream.go_to(epoch, position)
            self._begun = True
        elif position is None and (epoch or not self._stream.once):
            self._begun = False  # start of an epoch, or a read-once stream that has ended
        elif step or self._step or self._pending:  # if nothing was read, there is nothing to do
            why = position["lost"] if position else "this one can be read only once"
            raise DataError(
                f"batches: expected a position that can be gone to, got step {step} of a stream of "
                f"which is known: {why}; give a source with len() and [i], or leave out by hand "
                f"the {row} examples of epoch {epoch} that were read, as in "
                f"sf.batches(itertools.islice(stream, {row}, None), …)"
            )
        self._step, self._epoch, self._row = step, epoch, row
        self._position, self._pending = json.dumps(state["stream"]), []
        self._broken = None
