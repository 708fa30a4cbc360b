"""Batches as a pure function of an integer: the batch at step i needs nothing but i."""

from typing import Any, NamedTuple, Self

import numpy as np

from stepfold.data.cuts import Cut, Cuts, Share
from stepfold.data.integers import read_integer
from stepfold.data.order import Indices, Order
from stepfold.data.reading import Reading
from stepfold.data.resuming import check_position
from stepfold.data.sources.rows import ENDLESS, Where
from stepfold.errors import DataError

_AHEAD = 32768  # rows whose order is found at once: numpy is slow on a few, and these fit a cache


class Batches:
    """An iterator over batches of a source that can be asked for any; `batches` makes it.

    It can be resumed by grain's protocol, `get_state` and `set_state`. With `epochs`, its `len` is
    the number of steps in all of them, whatever has been taken.

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
            # A TypeError, by which list() and progress bars know that there is no length.
            raise TypeError("batches: there is no length without epochs; give epochs=…")
        return self._cuts.total

    def __bool__(self) -> bool:
        return True

    @property
    def endless(self) -> bool:
        """Whether there is always one more."""
        return self._cuts.total is None

    @property
    def steps_per_epoch(self) -> int | None:
        """The batches of an epoch; None if there are no epochs, or their size changes."""
        return None if self._cuts.length == ENDLESS else self._cuts.steps_per_epoch

    def at(self, step: int) -> Any:
        """Give the batch of a step, and leave the iteration where it is.

        Args:
          step: any step from 0 on.

        Raises:
          IndexError: if the last epoch is over by then.
        """
        step = read_integer("step", step, 0)
        if self._cuts.total is not None and step >= self._cuts.total:
            raise IndexError(f"batches: expected a step below {self._cuts.total}, got {step}")
        return self._make(step)

    def get_state(self) -> dict[str, Any]:
        """Give the position, and what it is a position in, for JSON to hold."""
        return {"step": self._step, "pipeline": dict(self._pipeline)}

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the position of the batch of a step, wherever the iteration is."""
        return {**self.get_state(), "step": step}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to a position that `get_state` gave.

        Args:
          state: what it gave, on any number of processes.

        Raises:
          DataError: if it is the position in other batches than these.
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
            if isinstance(error, StopIteration):  # would end the iteration, as if all were well
                raise DataError(f"batches: StopIteration came up at step {step}") from error
            raise

    def _rows(self, step: int) -> tuple[Where, int, Any]:
        """Give the indices of this process's rows, their epoch, and which are no repetition."""
        masked, ahead = self._read.making.masked, self._ahead  # once: a thread may replace it
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
        if last > rows:  # the batch is filled up from its own rows, which are all valid
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
        """Give the global batch of a step, and the first and the last of its rows that are here."""
        cut = self._cuts.at(step)
        size = cut.size if self._read.making.masked else cut.stop - cut.start
        return cut, *(self._share or Share(0, 1)).rows(size)


class _Ahead(NamedTuple):
    """The indices of this process's rows, from a step on, a row a step."""

    step: int
    epoch: int
    indices: Indices

    @classmethod
    def of(cls, order: Order, step: int, cut: Cut, first: int, last: int) -> Self:
        steps = max(1, min(_AHEAD // (last - first), cut.alike))
        starts = np.arange(cut.start, cut.start + steps * cut.size, cut.size)
        positions = (starts[:, None] + np.arange(first, last)).ravel()
        return cls(step, cut.epoch, order(cut.epoch, positions).reshape(steps, -1))
