import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.loop.condition import has_nan, is_whole, params_of, steps_of


def state(w=1.0):
    return sf.init_state({"w": jnp.full(3, w)}, optax.adam(1.0), jax.random.key(0))


def donated():
    gone = state()
    jax.jit(lambda x: x, donate_argnums=0)(gone)
    return gone


def test_a_state_tells_how_far_it_is():
    assert steps_of(state()._replace(step=jnp.int32(7))) == 7
    assert steps_of((1, 2)) == 0


def test_states_that_are_stacked_are_refused_where_one_is_folded():
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state())
    step = jax.vmap(sf.make_train_step(lambda p, x, key: sf.mean(x @ p["w"]), optax.adam(1.0)))
    with pytest.raises(sf.ConfigError, match=r"step: .* got int32\[2\]; fold states"):
        sf.fit(step, states, [jnp.ones((2, 4, 3))])


def test_what_was_donated_is_not_whole():
    assert is_whole(state())
    assert is_whole({"w": np.ones(2)})
    gone = donated()
    assert not is_whole(gone)


def test_what_a_failed_step_left_is_not_whole():
    huge = jax.jit(jnp.outer)  # of 64 TiB
    assert not is_whole({"w": huge(jnp.ones(1 << 22), jnp.ones(1 << 22))})


@pytest.mark.parametrize(("w", "nan"), [(1.0, False), (np.nan, True), (-np.inf, False)])
def test_only_what_is_no_number_is_not_worth_keeping(w, nan):
    assert has_nan(state(w)) is nan
    assert not has_nan({"w": jnp.nan})


def test_of_several_states_none_may_have_a_nan():
    assert not has_nan({"actor": state(), "critic": state()})
    assert has_nan({"actor": state(), "critic": state(np.nan)})
    assert has_nan((state(np.nan), state()))


def test_parameters_are_found_in_whatever_holds_states():
    pair = state(1.0), {"critic": state(2.0), "replay": jnp.ones(9)}
    assert [leaf[0] for leaf in jax.tree.leaves(params_of(pair, ()))] == [1.0, 2.0]
    assert params_of(pair[0], ()) is pair[0].params
    assert params_of({"w": jnp.ones(2)}, "unknown") == "unknown"
