"""Batches of an indexable source, as a pure function of the step."""

from typing import Any, NamedTuple, Self

import numpy as np

from stepfold.data.cuts import Cut, Cuts, Share
from stepfold.data.integers import read_integer
from stepfold.data.order import Indices, Order
from stepfold.data.reading import Reading
from stepfold.data.resuming import check_position
from stepfold.data.sources.rows import ENDLESS, Where
from stepfold.errors import DataError

_AHEAD = 32768  # rows to shuffle in one call: amortizes numpy's overhead, and still fits a cache


class Batches:
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
        read: Reading,
        cuts: Cuts,
        order: Order,
        share: Share | None,
        pipeline: dict[str, Any],
        step: int,
    ) -> None:
        self._read, self._cuts, self._order, self._pipeline = read, cuts, order, pipeline
        self._step, self._share = step, share
        self._checked = False
        self._ahead: _Ahead | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._cuts.total is not None and self._step >= self._cuts.total:
            raise StopIteration
        batch = self._make(self._step)
        self._step += 1
        return batch

    def __len__(self) -> int:
        if self._cuts.total is None:
            # list() and progress bars treat a TypeError as an unknown length.
            raise TypeError("batches: there is no length without epochs; give epochs=…")
        return self._cuts.total

    def __bool__(self) -> bool:
        return True

    @property
    def endless(self) -> bool:
        """Whether the iterator never ends."""
        return self._cuts.total is None

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of batches per epoch; None without epochs, or if the batch size changes."""
        return None if self._cuts.length == ENDLESS else self._cuts.steps_per_epoch

    def at(self, step: int) -> Any:
        """Return the batch of a step, without changing the position.

        Raises:
          IndexError: if the step is past the last epoch.
        """
        step = read_integer("step", step, 0)
        if self._cuts.total is not None and step >= self._cuts.total:
            raise IndexError(f"batches: expected a step below {self._cuts.total}, got {step}")
        return self._make(step)

    def get_state(self) -> dict[str, Any]:
        """Return the position and the pipeline's settings, serializable as JSON."""
        return {"step": self._step, "pipeline": dict(self._pipeline)}

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the state whose next batch is that of `step`."""
        return {**self.get_state(), "step": step}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a position from `get_state`, saved on any number of processes.

        Raises:
          DataError: if the state was saved by a different pipeline.
        """
        otherwise = "make them as they were, or begin the new ones with start={step}"
        check_position(state, self.get_state(), otherwise)
        self._step = read_integer("state: step", state["step"], 0)

    def _make(self, step: int) -> Any:
        try:
            return self._read(*self._rows(step))
        except Exception as error:
            cut, first, last = self._mine(step)
            error.add_note(
                f"making the batch of step {step}: positions {cut.start + first} to "
                f"{min(cut.start + last, cut.stop) - 1} of epoch {cut.epoch}"
            )
            if isinstance(error, StopIteration):  # would silently end the iteration
                raise DataError(f"batches: StopIteration came up at step {step}") from error
            raise

    def _rows(self, step: int) -> tuple[Where, int, Any]:
        """Return the indices of this process's rows, the epoch, and the mask, false at repeats."""
        masked, ahead = self._read.making.masked, self._ahead  # read once: a thread may replace it
        if ahead is not None and 0 <= step - ahead.step < len(ahead.indices):
            indices = ahead.indices[step - ahead.step]
            return indices, ahead.epoch, np.ones(len(indices), bool) if masked else None
        if self._share is None:
            self._share = Share.asked_of_jax()
        if not self._checked:
            self._check(self._share)
        cut, first, last = self._mine(step)
        rows = cut.stop - cut.start
        valid = np.arange(first, last) < rows if masked else None
        if last > rows:  # pad the batch by repeating its own rows
            positions = cut.start + np.arange(first, last) % rows
            return self._order(cut.epoch, positions), cut.epoch, valid
        if self._order.seed is None:
            return slice(cut.start + first, cut.start + last), cut.epoch, valid
        self._ahead = _Ahead.of(self._order, step, cut, first, last)
        return self._ahead.indices[0], cut.epoch, valid

    def _check(self, share: Share) -> None:
        share.check_sizes(self._cuts.sizes)
        for step, cut in [] if self._read.making.masked else self._cuts.shorter():
            share.check_short(step, cut.stop - cut.start)
        self._checked = True

    def _mine(self, step: int) -> tuple[Cut, int, int]:
        """Return the global batch of a step, and the start and stop of this process's rows."""
        cut = self._cuts.at(step)
        size = cut.size if self._read.making.masked else cut.stop - cut.start
        return cut, *(self._share or Share(0, 1)).rows(size)


class _Ahead(NamedTuple):
    """The indices of this process's rows for consecutive steps, one row of `indices` per step."""

    step: int
    epoch: int
    indices: Indices

    @classmethod
    def of(cls, order: Order, step: int, cut: Cut, first: int, last: int) -> Self:
        steps = max(1, min(_AHEAD // (last - first), cut.alike))
        starts = np.arange(cut.start, cut.start + steps * cut.size, cut.size)
        positions = (starts[:, None] + np.arange(first, last)).ravel()
        return cls(step, cut.epoch, order(cut.epoch, positions).reshape(steps, -1))
