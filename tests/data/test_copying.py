"""Batches keep what is in them, however few buffers their source fills in turns."""

import jax.numpy as jnp
import numpy as np
import pytest

from stepfold.data.copying import Copying


@pytest.mark.parametrize("buffers", [1, 2, 3, 4])
def test_buffers_that_come_round_among_the_few_are_copied_for_good(buffers):
    copied, ring = Copying(few=5), [np.zeros(2) for _ in range(buffers)]
    given = []
    for number in range(20):
        ring[number % buffers][:] = number
        given.append(copied({"x": ring[number % buffers]})["x"])
    assert [batch.tolist() for batch in given] == [[number] * 2 for number in range(20)]


def test_batches_with_memory_of_their_own_are_copied_only_at_first():
    copied, batches = Copying(few=3), [np.full(2, number) for number in range(6)]
    given = [copied(batch) for batch in batches]
    assert [one is two for one, two in zip(given, batches, strict=True)] == [False] * 3 + [True] * 3


def test_views_of_one_array_that_do_not_meet_are_left_alone():
    whole, copied = np.arange(20).reshape(10, 2), Copying(few=3)
    given = [copied(whole[i : i + 2]) for i in range(0, 10, 2)]
    assert [np.shares_memory(batch, whole) for batch in given] == [False] * 3 + [True] * 2


def test_what_is_no_array_of_numpys_is_given_as_it_is():
    batch = {"x": jnp.zeros(2), "n": 3, "text": "a", "none": None, "empty": np.zeros((0, 2))}
    copied = Copying(few=2)
    for given in (copied(batch), copied(batch), copied(batch)):
        assert given["x"] is batch["x"]
        assert (given["n"], given["text"], given["none"]) == (3, "a", None)
    assert given is batch  # an array without elements has no memory to share
