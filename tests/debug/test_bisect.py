"""The rows that make a step fail are found, alone or together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepfold as sf
from stepfold.debug.bisect import (
    find_bad_rows,
    minimal_bad_rows,
    nonfinite_inputs,
    select_rows,
    without_rows,
)

X = {"x": np.float32([1, 0, 3, 0])}


def has_zero(batch):
    return bool((np.asarray(batch["x"]) == 0).any())


def test_bad_rows_are_named_with_their_values():
    assert find_bad_rows(X, has_zero) == (((1,), (3,)), ["row 1: x=0.0", "row 3: x=0.0"])
    batch = {"x": np.arange(6).reshape(3, 2), "image": np.zeros((3, 9), np.float32), "n": 4}
    notes = find_bad_rows(batch, lambda batch: 2 in batch["x"])[1]
    assert notes == ["row 1: image=float32[9], x=[2 3]"]
    assert find_bad_rows(np.float32([1, 0]), lambda batch: 0 in batch)[1] == ["row 1: 0.0"]


def test_if_all_rows_are_bad_the_note_says_so():
    examples, notes = find_bad_rows({"x": np.zeros(40, np.float32)}, has_zero)
    assert len(examples) == 16
    assert notes[0].startswith("more than 16 of 40 rows make it fail: look at what they share")
    assert find_bad_rows({"x": np.zeros(3)}, has_zero)[1][0].startswith("3 of 3 rows make it fail")
    assert find_bad_rows({"x": np.zeros(1)}, has_zero) == (((0,),), ["row 0: x=0.0"])
    examples, notes = find_bad_rows({"x": np.float32([0] * 9 + [1])}, has_zero)
    assert (len(examples), len(notes)) == (9, 4)


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        ({"x": np.zeros((6, 2)), "y": np.zeros(3)}, "batch/x of 6, batch/y of 3"),
        ({"scale": np.float32(2)}, "none"),
    ],
)
def test_without_a_common_axis_there_are_no_rows(batch, sizes):
    examples, notes = find_bad_rows(batch, lambda batch: True)
    assert examples == ()
    assert notes == [
        "examples: rows cannot be separated: batch: expected one leading axis in all arrays, got "
        + sizes
    ]


def test_rows_stay_in_their_places_and_copies_fill_the_others():
    batch = {"x": np.arange(8), "key": jax.random.split(jax.random.key(0), 8), "name": "a"}
    selected = select_rows(batch, (2, 5))
    assert selected["x"].tolist() == [2, 2, 2, 2, 2, 5, 5, 5]
    assert (selected["key"][7] == batch["key"][5]).all()
    assert selected["name"] == "a"
    assert without_rows(X, {1, 3})["x"].tolist() == [1, 1, 3, 3]
    assert without_rows(X, range(4)) is None


def test_a_batch_on_devices_keeps_its_sharding():
    batch = sf.shard_batch({"x": np.arange(8)}, sf.make_mesh())
    selected = select_rows(batch, (3,))
    assert selected["x"].sharding == batch["x"].sharding
    assert np.asarray(selected["x"]).tolist() == [3] * 8


@given(st.integers(1, 40), st.sets(st.integers(0, 39)))
def test_every_row_that_is_bad_alone_is_found(count, bad):
    bad = {row for row in bad if row < count}
    if bad:
        sets = list(minimal_bad_rows(range(count), lambda rows: bool(bad & set(rows))))
        assert sets == [(row,) for row in sorted(bad)]


@given(st.integers(2, 64), st.sets(st.integers(0, 63), min_size=2, max_size=4))
def test_rows_that_are_bad_only_together_are_found_with_few_runs(count, together):
    together = {row % count for row in together}
    runs = []
    is_bad = lambda rows: runs.append(rows) or together <= set(rows)
    assert list(minimal_bad_rows(range(count), is_bad)) == [tuple(sorted(together))]
    assert len(runs) <= 2 * (len(together) + 1) * (count.bit_length() + 1)


@pytest.mark.parametrize(
    ("rows", "named"), [((), ["batch/x", "batch/y"]), ({1}, ["batch/x"]), ({0}, [])]
)
def test_arrays_with_nonfinite_values_in_bad_rows_are_named(rows, named):
    batch = {"x": np.float32([1, np.inf]), "y": jnp.array([1, 1, np.nan]), "n": np.arange(2)}
    assert nonfinite_inputs(batch, rows) == [
        f"{name} contains NaN or inf in the batch itself" for name in named
    ]
