"""Trees of arrays as sources."""

import tracemalloc
from collections import OrderedDict
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf
from stepfold import tree
from stepfold.data.sources.arrays import Arrays


class Pair(NamedTuple):
    x: np.ndarray
    y: np.ndarray


X = np.arange(24).reshape(8, 3)
INDICES = np.array([6, 0, 6])


@pytest.mark.parametrize(
    "array",
    [X, jnp.asarray(X), np.asfortranarray(X), X[::-1], np.arange(48).reshape(8, 6)[:, ::2]],
    ids=["numpy", "jax", "fortran", "reversed", "strided"],
)
def test_arrays_give_rows(array):
    rows = Arrays(array)
    assert rows.length == 8
    np.testing.assert_array_equal(rows.take(INDICES), np.asarray(array)[INDICES])
    np.testing.assert_array_equal(rows.take(slice(2, 4)), np.asarray(array)[2:4])
    np.testing.assert_array_equal(rows.examples(INDICES), np.asarray(array)[INDICES])


def test_a_few_rows_of_an_array_in_another_order_do_not_copy_it():
    rows = Arrays(np.ones((1000, 1000), order="F"))
    tracemalloc.start()
    rows.take(INDICES)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000  # of the eight million bytes


def test_rows_in_order_are_views_that_cannot_be_written_to():
    source = {"x": X.copy()}
    batch = Arrays(source).take(slice(1, 3))
    assert np.shares_memory(batch["x"], source["x"])
    with pytest.raises(ValueError, match="read-only"):
        batch["x"][0] = 0
    source["x"][0] = 1  # the source itself is as it was
    shuffled = Arrays(source).take(INDICES)
    shuffled["x"][0] = 0


@pytest.mark.parametrize(
    "source",
    [
        {"x": X, "y": {"z": X[:, 0]}},
        (X, X[:, 0]),
        Pair(X, X[:, 0]),
        OrderedDict(b=X, a=X[:, 0]),
        {"x": X, "nothing": None},
    ],
    ids=lambda source: type(source).__name__,
)
def test_a_tree_of_arrays_gives_the_same_tree(source):
    batch = Arrays(source).take(INDICES)
    assert type(batch) is type(source)
    assert tree.diff(batch, jax.tree.map(lambda leaf: leaf[INDICES], source)) == []


def test_text_can_be_read_and_not_batched():
    rows = Arrays({"text": np.array(["a", "b"])})
    assert rows.examples(slice(0, 1)) == [{"text": "a"}]
    with pytest.raises(sf.DataError, match=r"source/text: expected numbers .* with transform=…"):
        rows.take(slice(0, 1))
