"""What it means that a tree came back as it was saved: bit for bit, and of the same kind."""

import jax
import jax.numpy as jnp
import numpy as np

from stepfold.tree import named_leaves


def numbers_of(leaf):
    """Give a leaf as jax's array of numbers or numpy's, which a typed key is not."""
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def bits(leaf):
    """Give the bytes of a leaf, so that NaNs and signed zeros count."""
    return np.asarray(numbers_of(leaf)).tobytes()


def check_same(got, wanted):
    """Compare containers, kinds, dtypes, places and bits of two trees."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (name, have), (_, want) in zip(named_leaves(got), named_leaves(wanted), strict=True):
        assert type(have) is type(want), name
        assert np.shape(have) == np.shape(want), name
        if hasattr(want, "dtype"):
            assert have.dtype == want.dtype, name
        if isinstance(want, jax.Array):
            assert have.sharding == want.sharding, name
            assert have.committed == want.committed, name
            parts = zip(
                numbers_of(have).addressable_shards,
                numbers_of(want).addressable_shards,
                strict=True,
            )
            for mine, theirs in parts:
                assert (mine.device, mine.index) == (theirs.device, theirs.index), name
                assert bits(mine.data) == bits(theirs.data), name
        assert bits(have) == bits(want), name
