import jax
import jax.numpy as jnp
import optax
import pytest

import stepfold as sf
from stepfold.adapter.schedules import rate_of, schedule_paths, with_schedule_at

SCHEDULE = optax.linear_schedule(1.0, 0.0, 10)
PARAMS = {"w": jnp.ones(2)}


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(SCHEDULE),
        optax.chain(optax.clip(1.0), optax.sgd(SCHEDULE)),
        optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
        sf.dynamic_loss_scale(optax.lion(SCHEDULE)),
    ],
)
def test_the_count_of_a_schedule_is_found_and_moved(tx):
    state = sf.init_state(PARAMS, tx, jax.random.key(0))
    paths = schedule_paths(state.opt_state)
    assert set(paths) <= {name for name, _ in sf.tree.named_leaves(state)}
    moved = state._replace(opt_state=with_schedule_at(state.opt_state, 6))
    assert jax.tree.structure(moved) == jax.tree.structure(state)
    assert float(rate_of(SCHEDULE)(moved)) == 0.5


def test_where_there_is_no_count_the_steps_count():
    state = sf.init_state(PARAMS, optax.sgd(0.1), jax.random.key(0))
    assert schedule_paths(state.opt_state) == []
    assert float(rate_of(SCHEDULE)(state._replace(step=jnp.int32(3)))) == pytest.approx(0.8)


def test_adams_own_count_stays():
    moved = with_schedule_at(optax.adam(SCHEDULE).init(PARAMS), 6)
    assert int(moved[0].count) == 0
