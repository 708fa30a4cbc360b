"""Read batches of a run again, to rerun its steps."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stepfold.errors import DataError, refuse
from stepfold.loop.feed import BatchFeed, DataPosition


@contextmanager
def reread(batches: Any, start: DataPosition, began: int) -> Iterator[Iterator[Any]]:
    """Iterate batches again from an earlier position, and restore their position afterwards.

    `began` is the step before the first batch of a list; other batches are resumed by position.
    """
    if isinstance(batches, list | tuple):
        yield (batches[(step - began) % len(batches)] for step in itertools.count(start.step))
        return
    feed = BatchFeed(batches)
    if not feed.is_resumable or feed.reads_state or start.position is None:
        expected = "a list, or batches with get_state and set_state, to read them again"
        refuse("batches", expected, batches, "give sf.batches(data, …)", kind=DataError)
    before = feed.position(feed.first_used)
    try:
        feed.seek(start.position, start.step)
        yield _read_on(feed)
    finally:
        feed.seek(before, start.step)


def _read_on(feed: BatchFeed) -> Iterator[Any]:
    """Yield the batches from the present position on, of later epochs too."""
    while True:
        try:
            batch = feed.pull()
        except StopIteration:
            return
        yield batch
