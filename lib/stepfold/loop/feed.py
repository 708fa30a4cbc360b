"""The batches of a run, and their position for checkpoints."""

import copy
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import numpy as np

from stepfold import tree
from stepfold.checkpoint.leaves import check_values
from stepfold.data.epochs import EpochEnds
from stepfold.errors import DataError, refuse, warn

_LARGE = 1 << 20  # bytes of arrays in a position that is not kept in memory


class DataPosition(NamedTuple):
    """A step, and the position of the batch after it; None if the batches have no position."""

    step: int
    position: Any


class BatchFeed:
    """Pull batches, epoch after epoch, and track their position.

    The run counts the batches that its steps have used since the first of the data; methods get
    that number as `used`. `epoch_ends` says where epochs end, and `epoch_steps` is their length if
    they are equally long. Both are None if unknown, as is `total`, the number of batches of all
    epochs. With `keep_recent`, `recent` holds the last batches if they cannot be read again.

    Batches with a method `read_state` depend on the state of the run, which they get before each
    pull. Those, and batches whose position holds large arrays such as a replay buffer, cannot go
    back to an earlier position.
    """

    def __init__(
        self,
        batches: Any,
        epochs: int | None = None,
        *,
        steps_per_call: int = 1,
        keep_recent: bool = False,
    ) -> None:
        check_batches(batches)
        self.batches, self.iterator = batches, iter(batches)
        self.is_iterator = self.iterator is batches
        self.endless = bool(getattr(batches, "endless", False))
        self._may_reuse_buffers = _may_reuse_buffers(batches, self.iterator)
        methods = "get_state", "set_state"
        self.is_resumable = all(hasattr(self.iterator, method) for method in methods)
        self.steps_per_call = steps_per_call
        self._epochs = self._epochs_left = epochs
        if epochs is not None and self.is_iterator and self.epoch_ends is None:
            expected = "batches that can be iterated again, or that know their epochs"
            refuse(f"epochs={epochs}", expected, batches, "give steps=…, or sf.batches(data, …)")
        self.reads_state = hasattr(self.iterator, "read_state")
        self._is_large = False  # the position
        # Whether the position survives an unused batch.
        self.can_go_back = not (self.is_resumable and self.reads_state)
        can_reread = self.is_resumable or isinstance(batches, list | tuple)
        can_reread = can_reread and not self.reads_state
        # With several processes, each would keep only its own rows of a batch.
        keeps = keep_recent and not can_reread and jax.process_count() == 1
        self.recent = RecentBatches() if keeps else None
        self.wait_seconds = 0.0
        self.check_next_position = False  # once, so that later pulls cost nothing
        position = self._state() if self.is_resumable else None
        self.first_used = self._pulled = _count_in(position) or 0
        self._known: tuple[int, Any] = (-1, None)  # batches used by then, and the position
        self._keep(position, self.first_used)

    @property
    def epoch_steps(self) -> int | None:
        steps: int | None = getattr(self.batches, "steps_per_epoch", None)
        if steps is None and not self.is_iterator:
            with suppress(TypeError):  # it has no length
                steps = len(self.batches)
        return steps

    @property
    def epoch_ends(self) -> EpochEnds | None:
        ends: EpochEnds | None = getattr(self.batches, "epoch_ends", None)
        if ends is None and (steps := self.epoch_steps):
            ends = EpochEnds.of_length(steps)
        return ends

    @property
    def total(self) -> int | None:
        if not self._epochs or self.epoch_ends is None:
            return None
        return self.epoch_ends.count_steps(self._epochs, self.first_used)

    def batches_left(self, used: int) -> float | None:
        """The number of batches left, inf if they are endless, or None if it is not certain."""
        if self.endless:
            return math.inf
        length = None
        if isinstance(self.batches, list | tuple):
            length = (self._epochs or 1) * len(self.batches)
        elif hasattr(self.iterator, "state_at"):  # the length of others may be an estimate
            with suppress(TypeError):
                length = len(self.batches)
        return None if length is None else max(0, length - used)

    def next_batch(self, step: int, state: Any = None) -> Any:
        """Pull the next batch, or raise StopIteration; `step` counts the steps before it."""
        start = time.perf_counter()
        self._pulled += 1  # until it is used, the position is not certain
        try:
            if self.reads_state:
                self.iterator.read_state(state)
            batch = self.pull()
            if self._may_reuse_buffers:
                batch = _copy(batch)
            if self.check_next_position:  # the position before the first batch may hold less
                self._check_position()
            if self.recent is not None:
                self.recent.add(step + 1, batch)
        except StopIteration:
            self._pulled -= 1
            raise
        except Exception as error:
            error.add_note(f"pulling the batch of step {step}")
            raise
        else:
            return batch
        finally:
            self.wait_seconds += time.perf_counter() - start

    def _check_position(self) -> None:
        self.check_next_position = False
        position = self._state()
        check_values(position, "batches: get_state()")
        if reason := _find_lost(position):
            warn(
                f"batches: expected a position to resume at from a checkpoint, got none: {reason}; "
                "the state is saved, but a resume will be refused: give sf.batches a source with "
                "len() and [i], which seed=… shuffles, or a stream with get_state and set_state",
            )

    def pull(self) -> Any:
        """Return the next batch, perhaps of the next epoch, or raise StopIteration."""
        try:
            return next(self.iterator)
        except StopIteration:
            if self.is_iterator or self._epochs_left is None or self._epochs_left <= 1:
                raise
        self._epochs_left -= 1
        self.iterator = iter(self.batches)
        try:
            return next(self.iterator)
        except StopIteration:
            advice = "give an iterable that starts again, or steps=…"
            refuse("batches", "some in the next epoch too", "none", advice, kind=DataError)

    def position(self, used: int) -> Any:
        """Return the position of the next batch to use, or None if it is not known.

        After a failed step or pull, batches may be ahead of the last step. `sf.batches` computes
        the position after any number of batches, by `state_at`. Other batches go back to the last
        known position, and those used since are pulled again.
        """
        if not self.is_resumable:
            return None
        before, known = self._known
        if before == used:
            return known
        if self.is_iterator and hasattr(self.iterator, "state_at"):
            position = self.iterator.state_at(used)
        else:
            position = self._state()
            if self._pulled != used and _count_in(position) != used:
                position = self._pull_again(used) if self.can_go_back else None
        self._keep(position, used)
        return position

    def _pull_again(self, used: int) -> Any:
        """Go back to the last known position, and return the one after `used` batches."""
        before, position = self._known
        self._set(position)
        for _ in range(used - before):
            self.pull()
        self._pulled = used
        return self._state()

    def mark(self, step: int, used: int) -> DataPosition:
        """Return the position after a step to keep in memory; it is None if it is large."""
        position = None if self._is_large else self.position(used)
        return DataPosition(step, None if self._is_large else position)

    def has_position(self, used: int) -> bool:
        """Whether the position is known, even after a failed step or pull."""
        return self._pulled == used or self.can_go_back

    def _keep(self, position: Any, used: int) -> None:
        """Keep a position, to return it again and to go back to it, unless it is large."""
        self._known = (-1, None) if self._is_large else (used, position)

    def _state(self) -> Any:
        state = self.iterator.get_state()
        if not self._is_large and _array_bytes(state) > _LARGE:
            self._is_large, self.can_go_back = True, False
        # Iterators may reuse what they return. A save copies arrays itself.
        state = state if self._is_large else copy.deepcopy(state)
        return state if self.is_iterator else {"left": self._epochs_left, "position": state}

    def seek(
        self, position: Any, step: int, used: int | None = None, *, needs_batches: bool = True
    ) -> int:
        """Go to a saved position, and return the number of batches used before it.

        If the position has no count, it is `used`, or else `step`. Without `needs_batches`, batches
        that cannot be resumed are left as they are.
        """
        if needs_batches and not self.is_resumable:
            expected = f"get_state and set_state, to be resumed at step {step}"
            advice = "give sf.batches(data, …), or start in another directory"
            refuse("batches", expected, self.batches, advice, kind=DataError)
        if needs_batches:
            if position is None:
                expected = f"a position to resume at in the checkpoint of step {step}"
                advice = "save with data=batches, or start in another directory"
                refuse("batches", expected, "none", advice, kind=DataError)
            self._set(position if self._is_large else copy.deepcopy(position))
        count = _count_in(position)
        self._pulled = next(n for n in (count, used, step) if n is not None)
        self._keep(position, self._pulled)
        return self._pulled

    def skip(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Skip ranges of batch indices, which begin after the position."""
        self.batches = self.iterator = self.skippable().without(ranges)
        self._known = (-1, None)

    def reweight(self, weights: Any, first: int) -> None:
        """Change the weights of a mixture, from a batch on, counted from the first of the data."""
        if not self.is_iterator or not hasattr(self.iterator, "reweight"):
            expected = "those of a mixture, whose weights a hook can change"
            refuse("batches", expected, self.batches, "give sf.batches(sf.mix(…), …)")
        self.iterator.reweight(weights, first)
        self._known = (-1, None)

    def skippable(self) -> Any:
        """Return the iterator; raise if it cannot skip batches."""
        if not self.is_iterator or not hasattr(self.iterator, "without"):
            expected = "some that can skip a part, for a run that goes back"
            refuse("batches", expected, self.batches, "give sf.batches(data, …)")
        return self.iterator

    def _set(self, position: Any) -> None:
        if not self.is_iterator:
            left = position["left"]
            if left != self._epochs_left:
                self.iterator = iter(self.batches)
            self._epochs_left, position = left, position["position"]
        self.iterator.set_state(position)


class RecentBatches(Mapping[int, Any]):
    """The batches of the last steps, for batches that cannot be read again.

    Once they need more than `LIMIT` bytes, the oldest are dropped.
    """

    LIMIT = 256 * 1024**2

    def __init__(self) -> None:
        self._batches: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}

    def add(self, step: int, batch: Any) -> None:
        """Keep the batch of a step, unless that would keep memory of devices."""
        leaves: list[Any] = jax.tree.leaves(batch)
        if any(isinstance(leaf, jax.Array) for leaf in leaves):
            return
        size = sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
        while self._sizes and sum(self._sizes.values()) + size > self.LIMIT:
            self.drop_until(next(iter(self._sizes)))
        if size <= self.LIMIT:
            self._batches[step], self._sizes[step] = batch, size

    def drop_until(self, step: int) -> None:
        """Drop the batches of the steps up to one."""
        for old in [old for old in self._batches if old <= step]:
            del self._batches[old], self._sizes[old]

    def __getitem__(self, step: int) -> Any:
        return self._batches[step]

    def __iter__(self) -> Iterator[int]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def batch_sizes(batches: Any) -> Sequence[tuple[int, int]]:
    """Return the sizes of global batches, as pairs (from batch, size); empty if unknown."""
    sizes: Sequence[tuple[int, int]] = getattr(batches, "batch_sizes", ())
    return sizes


TRAINING_BATCHES = "sf.batches(data, 256, seed=0)"
WHOLE_DATA = "sf.batches(data, 256, epochs=1, remainder='pad')"


def owned(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield batches; copy those of an iterator that may reuse its buffers."""
    iterator = iter(batches)
    return map(_copy, iterator) if _may_reuse_buffers(batches, iterator) else iterator


def _may_reuse_buffers(batches: Any, iterator: Any) -> bool:
    """Whether an iterator may overwrite a batch before the step has read it.

    A dispatched step may read numpy arrays after the next batch was pulled.
    """
    is_held = isinstance(batches, list | tuple)
    return not is_held and bool(getattr(iterator, "reuses_buffers", True))


def _copy(batch: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, batch)


def check_batches(batches: Any, argument: str = "batches", make: str = TRAINING_BATCHES) -> None:
    """Refuse a single batch, and anything else that is not an iterable of batches."""
    is_single = isinstance(batches, str | bytes | dict) or tree.is_array(batches)
    if is_single or not isinstance(batches, Iterable):
        got, advice = tree.describe_value(batches), f"{make} makes one"
        refuse(argument, "an iterable of batches", got, advice)


def _array_bytes(value: Any) -> int:
    """Return the size of the arrays in a position, which may hold anything."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return sum(map(_array_bytes, value))
    return value.nbytes if isinstance(value, np.ndarray) else 0


def _count_in(position: Any) -> int | None:
    """Return the number of batches before a position, as `sf.batches` stores it, or None."""
    count = position.get("step") if isinstance(position, dict) else None
    return count if type(count) is int else None


def _find_lost(position: Any) -> str | None:
    """Return why a position of `sf.batches` over a stream cannot be restored, or None."""
    if not isinstance(position, dict):
        return None
    if position.keys() == {"lost"}:
        return str(position["lost"])
    return next(filter(None, map(_find_lost, position.values())), None)
