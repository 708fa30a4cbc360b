import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepfold as sf
from stepfold.loop.replaying.narrowing import culprits, only, rows_of, spelled


def test_rows_are_what_all_arrays_have_in_front():
    batch = {"x": np.zeros((6, 2)), "y": jnp.zeros(6), "scale": np.float32(2), "name": "a"}
    assert rows_of(batch) == 6


def test_without_a_common_axis_there_are_no_rows():
    words = "batch: expected one leading axis, to take rows of, got batch/x of 6, batch/y of 3"
    with pytest.raises(sf.DataError, match=words):
        rows_of({"x": np.zeros((6, 2)), "y": np.zeros(3)})
    with pytest.raises(sf.DataError, match="got no array with an axis"):
        rows_of({"scale": np.float32(2)})


def test_rows_stay_in_their_places_and_others_are_copies_of_them():
    batch = {"x": np.arange(8), "key": jax.random.split(jax.random.key(0), 8)}
    taken = only(batch, (2, 5))
    assert taken["x"].tolist() == [2, 2, 2, 2, 2, 5, 5, 5]
    assert (taken["key"][7] == batch["key"][5]).all()


def test_a_batch_on_devices_stays_where_it_is():
    batch = sf.shard_batch({"x": np.arange(8)}, sf.make_mesh())
    taken = only(batch, (3,))
    assert taken["x"].sharding == batch["x"].sharding
    assert np.asarray(taken["x"]).tolist() == [3] * 8


@given(st.integers(1, 40), st.sets(st.integers(0, 39)))
def test_every_row_that_is_bad_alone_is_found(count, bad):
    bad = {row for row in bad if row < count}
    if bad:
        found = list(culprits(tuple(range(count)), lambda rows: bool(bad & set(rows))))
        assert found == [(row,) for row in sorted(bad)]


@given(st.integers(2, 64), st.sets(st.integers(0, 63), min_size=2, max_size=4))
def test_rows_that_are_bad_only_together_are_found_with_few_runs(count, together):
    together = {row % count for row in together}
    runs = []
    is_bad = lambda rows: runs.append(rows) or together <= set(rows)
    assert list(culprits(tuple(range(count)), is_bad)) == [tuple(sorted(together))]
    assert len(runs) <= 2 * (len(together) + 1) * (count.bit_length() + 1)


def test_a_row_is_written_with_its_small_numbers():
    batch = {"x": np.arange(6).reshape(3, 2), "image": np.zeros((3, 9), np.float32), "n": 4}
    assert spelled(batch, 1) == "image=float32[9], x=[2 3]"
    assert spelled(np.float32([1, 0]), 1) == "0.0"
