"""Parameters that stay as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.adapter.parts.freezing import frozen

PARAMS = {"embed": {"w": jnp.array([-0.0, 1.0])}, "head": jnp.array([1.0, 2.0])}


def one_step(tx):
    state = sf.init_state(PARAMS, tx, jax.random.key(0))
    loss_fn = lambda params, batch, key: (params["embed"]["w"] * 100 + params["head"]).sum()
    return state, sf.make_train_step(loss_fn, tx)(state, None)[0]


def test_not_one_bit_of_them_changes():
    _, new = one_step(frozen(optax.adamw(0.1, weight_decay=0.5), "^embed/"))
    assert np.signbit(new.params["embed"]["w"]).tolist() == [True, False]
    np.testing.assert_array_equal(new.params["embed"]["w"], PARAMS["embed"]["w"])
    assert (new.params["head"] != PARAMS["head"]).all()


def test_they_have_no_state():
    state, _ = one_step(frozen(optax.adam(0.1), "embed"))
    shapes = [leaf.shape for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert shapes == [(2,), (2,)]  # two moments of the head alone


def test_they_have_no_part_in_the_norm():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    _, new = one_step(frozen(tx, "embed"))
    np.testing.assert_allclose(new.params["head"], PARAMS["head"] - 0.5**0.5, rtol=1e-6)


def test_what_wants_the_loss_is_given_it():
    _, new = one_step(frozen(optax.polyak_sgd(), "embed"))
    assert (new.params["head"] != PARAMS["head"]).all()


@pytest.mark.parametrize(("pattern", "many"), [("zzz", "none"), ("", "all")])
def test_a_pattern_that_tells_nothing_apart(pattern, many):
    tx = frozen(optax.sgd(0.1), pattern)
    with pytest.raises(sf.ConfigError, match=f"it is in {many} of embed/w, head"):
        tx.init(PARAMS)
