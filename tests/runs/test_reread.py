"""Batches of a run are read again, and their position stays."""

import numpy as np
import pytest
from tests.loop.test_feed import Counting

import stepfold as sf
from stepfold.loop.feed import BatchFeed, DataPosition
from stepfold.runs.reread import reread


def test_batches_are_read_again_and_left_where_they_were():
    batches = sf.batches(np.arange(20), 1)
    for _ in range(8):
        next(batches)
    with reread(batches, DataPosition(3, batches.state_at(3)), began=0) as again:
        assert [int(next(again)[0]) for _ in range(2)] == [3, 4]
    assert int(next(batches)[0]) == 8
    with reread([10, 11, 12], DataPosition(4, None), began=0) as again:
        assert [next(again) for _ in range(3)] == [11, 12, 10]


def test_batches_are_read_again_across_the_end_of_an_epoch():
    batches = Counting(3)
    feed = BatchFeed(batches, epochs=3)
    for _ in range(2):
        feed.next_batch(0)
    with reread(batches, feed.mark(2, 2), began=0) as again:
        assert [*again] == [2, 0, 1, 2, 0, 1, 2]


def test_what_cannot_be_read_again_is_refused():
    words = "batches: expected a list, or batches with get_state and set_state, .* got generator"
    with (
        pytest.raises(sf.errors.DataError, match=words),
        reread((x for x in "a"), DataPosition(0, None), 0),
    ):
        pass
