"""Streams: sources that support only sequential reads."""

from typing import Any, NamedTuple

from stepfold import tree
from stepfold.data.sources.positions import Owner, lost
from stepfold.errors import DataError


class Stream:
    """A sequential source that restarts in every epoch, and may have a position.

    An iterator can be read only once. All other streams can restart: an iterable, such as a grain
    `IterDataset`, a Hugging Face `IterableDataset` or a `tf.data.Dataset`, or a function that
    returns an iterator or an iterable. If it has `set_epoch`, this is called before each epoch, so
    that it can reshuffle.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.once = hasattr(type(source), "__next__")
        self.package = type(source).__module__.partition(".")[0]
        self._opened = _Opened(source, source, Owner.among(source))
        self._sent_to: int | None = None

    def begin(self, epoch: int) -> None:
        """Start an epoch from its beginning."""
        if self._sent_to == epoch:  # it would resume from the restored position
            raise DataError(
                f"source: expected a stream to begin epoch {epoch} anew, got one that was sent on "
                f"to a place in it: {tree.spell(self._source)}; make it and its batches anew"
            )
        self._opened = self._open(epoch)

    def go_to(self, epoch: int, position: dict[str, Any]) -> None:
        """Restore a position in an epoch that `position` returned."""
        opened = self._opened if self.once else self._open(epoch)
        held, iterator, owner = opened
        if owner is None:
            raise DataError(
                "source: expected a stream with a state of its own, as that has which the position "
                f"was saved of, got {tree.spell(self._source)}; give the same one"
            )
        owner.write(position)
        if owner.thing is not iterator:  # the iterable has the state: iterate it after restoring
            opened = _Opened(held, _iterator_of(held), owner)
            self._sent_to = epoch if held is self._source else None
        self._opened = opened

    def read(self) -> Any:
        """Return the next example, or raise StopIteration."""
        return next(self._opened.iterator)

    def position(self) -> str:
        """Return the position in the epoch as JSON text, or the reason why it is unknown."""
        owner = self._opened.owner
        if owner is None:
            return lost(f"{tree.spell(self._source)} has no state of its own")
        return owner.read()

    def _open(self, epoch: int) -> "_Opened":
        is_made = not hasattr(type(self._source), "__iter__")
        held = self._source() if is_made else self._source
        if hasattr(held, "set_epoch"):
            held.set_epoch(epoch)
        iterator = _iterator_of(held)
        return _Opened(held, iterator, Owner.among(iterator, held))


class _Opened(NamedTuple):
    held: Any
    iterator: Any
    owner: Owner | None
    """The one of the two that has the state, if any."""


def _iterator_of(held: Any) -> Any:
    # Iterating a tf.data pipeline directly would yield tensors.
    as_numpy = getattr(held, "as_numpy_iterator", None)
    if as_numpy is not None:
        return as_numpy()
    if not hasattr(type(held), "__iter__"):
        raise DataError(
            "source: expected a function that makes an iterator or an iterable, got one that "
            f"makes {tree.spell(held)}; let it return what is to be read, or yield it"
        )
    return iter(held)
