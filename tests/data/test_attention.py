"""What attends to what in a packed row."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepfold as sf
from stepfold.data.attention import block_diagonal_mask
from stepfold.data.packing import pack


def sequences(lengths):
    return [np.full(n, i, np.int32) for i, n in enumerate(lengths)]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.booleans())
@pytest.mark.parametrize("xp", [np, jnp])
def test_attention_stays_within_an_example(xp, lengths, causal):
    (ids,) = [row["segment_ids"] for row in pack(sequences(lengths), length=24)]
    mask = block_diagonal_mask(xp.asarray(ids), causal=causal)
    wanted = [
        [(a == b and a > 0 and (not causal or j <= i)) or i == j for j, b in enumerate(ids)]
        for i, a in enumerate(ids)
    ]
    assert mask.tolist() == wanted
    assert mask.dtype == bool
    assert isinstance(mask, np.ndarray if xp is np else jax.Array)


def test_a_mask_is_made_of_batches_and_under_jit():
    ids = np.array([[[1, 1, 2, 0]], [[1, 2, 2, 2]]])
    made = jax.jit(lambda ids: block_diagonal_mask(ids, causal=True))(ids)
    assert made.shape == (2, 1, 4, 4)
    assert (made == block_diagonal_mask(ids, causal=True)).all()
    assert block_diagonal_mask([1, 1]).tolist() == [[True, True], [True, True]]


def test_attention_over_a_packed_row_is_that_over_each_example():
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (jax.random.normal(key, (1, 8, 2, 4)) for key in keys)
    (row,) = pack(sequences([3, 4]), length=8)
    mask = block_diagonal_mask(row["segment_ids"][None])[:, None]
    packed = jax.nn.dot_product_attention(query, key, value, mask=jnp.asarray(mask))
    assert jnp.isfinite(packed).all()
    for part in (slice(0, 3), slice(3, 7)):
        alone = jax.nn.dot_product_attention(query[:, part], key[:, part], value[:, part])
        assert jnp.allclose(packed[:, part], alone, atol=1e-6)


@pytest.mark.parametrize(
    ("ids", "got"),
    [(np.ones(3), "float64[3]"), (np.array(1), "int64[]"), (jnp.ones(2) > 0, "bool[")],
)
def test_what_is_no_segment_ids_is_refused(ids, got):
    with pytest.raises(
        sf.DataError,
        match=re.escape("block_diagonal_mask: expected integers of shape (…, length), got " + got),
    ):
        block_diagonal_mask(ids)
