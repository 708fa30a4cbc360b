"""The shuffle order of an epoch is a uniform permutation with random access."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfold.data import order as module
from stepfold.data.order import Order, make_key, permute


def chi_square(counts, expected):
    """Return how many standard deviations counts are from uniform."""
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@given(st.integers(1, 3000), st.integers(0, 2**70), st.integers(0, 2**40))
def test_permute_is_a_bijection(length, seed, epoch):
    found = permute(np.arange(length), length, make_key(seed, epoch))
    np.testing.assert_array_equal(np.sort(found), np.arange(length))


@pytest.mark.parametrize("length", [2**14 + 1, 2**31, 2**31 + 1, 2**40 + 5, 2**63 - 1])
def test_order_of_a_long_epoch_has_random_access(length):
    order = Order(length, 0)
    positions = np.array([k * (length - 1) // 9_999 for k in range(10_000)])
    found = order(0, positions)
    assert found.min() >= 0
    assert found.max() < length
    assert len(np.unique(found)) == len(positions)
    np.testing.assert_array_equal(order(0, positions[-3:]), found[-3:])
    bins = np.histogram(found, 16, range=(0, length))[0]
    assert abs(chi_square(bins, len(found) / 16)) < 5


@given(
    st.integers(1, 2**14), st.integers(0, 2**70), st.integers(0, 2**40), st.integers(0, 2**32 - 1)
)
def test_short_epochs_are_sorted_by_random_numbers_then_positions(length, seed, epoch, stream):
    sequence = np.random.SeedSequence(seed, spawn_key=(stream, epoch))
    draws = np.random.Philox(sequence).random_raw(length)
    sorted_positions = np.lexsort((np.arange(length), draws >> np.uint64(14)))
    np.testing.assert_array_equal(
        Order(length, seed, stream)(epoch, np.arange(length)), sorted_positions
    )


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_all_orders_of_few_examples_are_equally_likely(length):
    seen = Counter(
        tuple(Order(length, seed)(epoch, np.arange(length)).tolist())
        for seed in range(600)
        for epoch in range(5)
    )
    orders = math.factorial(length)
    assert len(seen) == orders
    assert chi_square(np.array(list(seen.values())), 3000 / orders) < 5


@pytest.mark.parametrize("few", [1 << 14, 16], ids=["sorted", "computed"])
@pytest.mark.parametrize("length", [17, 101])
def test_positions_and_successors_of_indices_are_uniform(length, few, monkeypatch):
    monkeypatch.setattr(module, "_SORTED_UP_TO", np.uint64(few))
    counts, pairs = np.zeros((length, length)), np.zeros((length, length))
    for seed in range(1000):
        found = Order(length, seed)(0, np.arange(length))
        counts[np.arange(length), found] += 1
        pairs[found[:-1], found[1:]] += 1
    assert abs(chi_square(counts, 1000 / length)) < 5
    others = pairs[~np.eye(length, dtype=bool)]
    assert abs(chi_square(others, 1000 / length)) < 5


@pytest.mark.parametrize("length", [20_011, 10**6, 2**40])
def test_neighbours_and_epochs_are_uncorrelated(length):
    positions = np.arange(20_000)
    for seed in range(5):
        order = Order(length, seed)
        now, then = order(0, positions).astype(float), order(1, positions).astype(float)
        for one, two in ((now[:-1], now[1:]), (now, then), (now, positions)):
            assert abs(np.corrcoef(one, two)[0, 1]) * math.sqrt(len(one)) < 4.5


def test_seed_epoch_and_stream_change_the_order():
    choices = itertools.product((0, 1, 2**32, 2**64), (0, 1), (0, 1, 2**33))
    made = [tuple(Order(50, seed, s)(epoch, np.arange(50))) for seed, s, epoch in choices]
    assert len(set(made)) == len(made)


def test_orders_do_not_change_between_versions():
    # Saved positions would become invalid.
    for length, epoch, start in [
        (7, 0, [6, 3, 2, 4, 1, 5, 0]),
        (10**9, 3, [550836170, 420037856, 716433994, 796551296]),
        (10**12, 3, [520527967170, 421114782313, 83640708604, 273160990998]),
    ]:
        assert Order(length, 0)(epoch, np.arange(len(start))).tolist() == start
