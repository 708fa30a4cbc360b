"""Batches as a pure function of an integer: the batch at step i needs nothing but i."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Self

import jax
import numpy as np

from stepfold import tree
from stepfold.data.cuts import Cut, Cuts, read_integer, read_sizes
from stepfold.data.order import Indices, Order
from stepfold.data.reading import Reading
from stepfold.data.sources import ENDLESS, Where, read_source
from stepfold.errors import ConfigError, DataError

_REMAINDERS = ("drop", "pad", "keep")
_AHEAD = 32768  # rows whose order is found at once: numpy is slow on a few, and these fit a cache


def batches(
    source: Any,
    batch_size: int | Sequence[tuple[int, int]],
    *,
    seed: int | None = None,
    start: int = 0,
    epochs: int | None = None,
    remainder: Literal["drop", "pad", "keep"] = "drop",
    transform: Callable[[Any], Any] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    process_index: int | None = None,
    process_count: int | None = None,
) -> "Batches":
    """Make batches of a source, of which the batch at step i depends on i alone.

    Hence a run that begins at step ten million begins as fast as one at 0, a resumed run sees what
    an uninterrupted one sees, and so does one on another number of processes: each is given its
    share of the rows of the same global batch, and the shares in order are that batch. Batches that
    are in order, of arrays, are views of the source that cannot be written to.

    Args:
      source: what `len()` and `[i]` work on, or a tree of arrays with one leading axis.
      batch_size: the examples of a global batch; or a ramp, pairs of the step from which on a size
        holds, as `[(0, 64), (1000, 256)]`. It is not a function of the step, since to know where
        step i begins all the steps before it would have to be asked.
      seed: what the orders of the epochs follow from, each its own; None is the source's order.
      start: the step to begin at.
      epochs: how often to go through the source; None is for ever. Each epoch is cut by itself, so
        that no batch reaches into the next.
      remainder: what becomes of the rest of an epoch that fills no batch: "drop" leaves it out,
        "keep" makes a smaller batch of it, and "pad" fills it up with examples from the same rest,
        and adds to every batch a `mask` that is false for those. If examples have a `mask`, it is
        set to zero there.
      transform: a function of an example, before it becomes part of a batch.
      collate: what makes a batch of a list of examples; by default they are stacked leaf by leaf.
      process_index: which process this is; by default jax is asked when the first batch is made.
      process_count: how many processes there are.

    Raises:
      ConfigError: if an argument is not as described.
      DataError: if there is no example, or not enough for one batch.

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
    """
    sizes = read_sizes(batch_size)
    seed = None if seed is None else read_integer("seed", seed, 0)
    epochs = None if epochs is None else read_integer("epochs", epochs, 1)
    if remainder not in _REMAINDERS:
        raise ConfigError(f"remainder: expected 'drop', 'pad' or 'keep', got {remainder!r}")
    for name, function in (("transform", transform), ("collate", collate)):
        if function is not None and not callable(function):
            raise ConfigError(f"{name}: expected a function, got {tree.spell(function)}")
    share = _share(process_index, process_count)
    rows = read_source(source)
    if rows.length == ENDLESS and (seed is not None or epochs is not None):
        raise ConfigError(
            f"source: an endless one has no epochs and an order of its own, got seed={seed}, "
            f"epochs={epochs}; leave both out, and give the seed to what made the source"
        )
    pipeline = {
        "length": rows.length,
        "seed": seed,
        "batch_size": sizes[0][1] if len(sizes) == 1 else [list(pair) for pair in sizes],
        "epochs": epochs,
        "remainder": remainder,
        "source": rows.fingerprint,
    }
    cuts = Cuts(rows.length, sizes, whole=remainder == "drop", epochs=epochs)
    read = Reading(rows, transform, collate, remainder == "pad")
    order = Order(rows.length, seed)
    return Batches(read, cuts, order, share, pipeline, read_integer("start", start, 0))


def _share(index: int | None, count: int | None) -> tuple[int, int] | None:
    if index is None and count is None:
        return None
    if index is None or count is None:
        raise ConfigError(
            f"process_index, process_count: expected both or neither, got {index!r} and {count!r}"
        )
    count = read_integer("process_count", count, 1)
    if read_integer("process_index", index, 0) >= count:
        raise ConfigError(f"process_index: expected one below process_count={count}, got {index}")
    return index, count


class Batches:
    """An iterator over batches that can be asked for any of them; `batches` makes it.

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
        share: tuple[int, int] | None,
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

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to a position that `get_state` gave.

        Args:
          state: what it gave, on any number of processes.

        Raises:
          DataError: if it is the position in other batches than these.
        """
        known = isinstance(state, dict) and state.keys() == self.get_state().keys()
        if not known or not isinstance(state["pipeline"], dict):
            raise DataError(
                "batches: expected a state that get_state() of batches gave, with step and "
                f"pipeline, got {tree.spell(state)}; it was saved by another kind of iterator"
            )
        saved, now = state["pipeline"], self._pipeline
        differing = [
            f"{name} was {saved.get(name)!r} and is {now.get(name)!r}"
            for name in {**now, **saved}
            if saved.get(name) != now.get(name)
        ]
        if differing:
            raise DataError(
                f"batches: expected the batches that the position was saved in, got others: "
                f"{'; '.join(differing)}; make them as they were, or begin the new ones with "
                f"start={state['step']}"
            )
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

    def _rows(self, step: int) -> tuple[Where, Any]:
        """Give the indices of this process's rows, and which of them are no repetition."""
        ahead = self._ahead  # read once, since another thread may replace it
        if ahead is not None and 0 <= step - ahead.step < len(ahead.indices):
            indices = ahead.indices[step - ahead.step]
            return indices, np.ones(len(indices), bool) if self._read.masked else None
        if self._share is None:
            self._share = jax.process_index(), jax.process_count()
        if not self._checked:
            _check_share(self._share[1], self._cuts, self._read.masked)
            self._checked = True
        cut, first, last = self._mine(step)
        rows = cut.stop - cut.start
        valid = np.arange(first, last) < rows if self._read.masked else None
        if last > rows:  # the batch is filled up from its own rows, which are all valid
            return self._order(cut.epoch, cut.start + np.arange(first, last) % rows), valid
        if self._order.seed is None:
            return slice(cut.start + first, cut.start + last), valid
        self._ahead = _Ahead.of(self._order, step, cut, first, last)
        return self._ahead.indices[0], valid

    def _mine(self, step: int) -> tuple[Cut, int, int]:
        """Give the global batch of a step, and the first and the last of its rows that are here."""
        cut = self._cuts.at(step)
        size = cut.size if self._read.masked else cut.stop - cut.start
        index, count = self._share or (0, 1)
        return cut, index * size // count, (index + 1) * size // count


class _Ahead(NamedTuple):
    """The indices of this process's rows, from a step on, a row a step."""

    step: int
    indices: Indices

    @classmethod
    def of(cls, order: Order, step: int, cut: Cut, first: int, last: int) -> Self:
        steps = max(1, min(_AHEAD // (last - first), cut.alike))
        starts = cut.start + cut.size * np.arange(steps)[:, None]
        positions = (starts + np.arange(first, last)).ravel()
        return cls(step, order(cut.epoch, positions).reshape(steps, -1))


def _check_share(count: int, cuts: Cuts, masked: bool) -> None:
    for step, size in cuts.sizes:
        if size % count:
            below = size // count * count
            raise DataError(
                f"batch_size: expected a multiple of the {count} processes, got {size} from step "
                f"{step} on; give {below or count} or {math.ceil(size / count) * count}"
            )
    for step, cut in [] if masked else cuts.shorter():
        rows = cut.stop - cut.start
        if rows % count:
            raise DataError(
                f"remainder='keep': expected short batches to be shared out evenly over {count} "
                f"processes, got {rows} rows at step {step}; use remainder='pad', which gives "
                "every batch the same size and a mask, or 'drop'"
            )
