import jax
import jax.numpy as jnp
import optax
import pytest

import stepfold as sf
from stepfold.core.optimizer import as_optimizer


def test_any_optimizer_takes_extra_arguments_and_strict_promotion():
    for tx in (optax.sgd(0.1), optax.adam(0.1), optax.MultiSteps(optax.adam(0.1), 2)):
        tx = as_optimizer(tx)
        params = jnp.ones(3)
        state = tx.init(params)
        updates, _ = tx.update(params, state, params, value=jnp.ones(()))
        assert updates.shape == (3,)


@pytest.mark.parametrize("form", [lambda tx: tx, lambda tx: tx.gradient_transformation()])
def test_multi_steps_hands_on_the_extra_arguments(run, form):
    plateau = optax.contrib.reduce_on_plateau(patience=1)
    tx = as_optimizer(form(optax.MultiSteps(plateau, 1)))
    params = jnp.ones(3)
    _, state = run(tx.update)(params, tx.init(params), params, value=jnp.float32(0.5))
    assert state.inner_opt_state.best_value == 0.5


def test_the_promotion_of_others_stays_strict():
    as_optimizer(optax.adam(0.1)).init(jnp.ones(2))
    with pytest.raises(jax.dtypes.TypePromotionError):
        jnp.ones(2) + jnp.ones(2, int)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        ("adam", "tx: expected an optax transformation, got str 'adam'"),
        (None, "tx: expected an optax transformation, got NoneType None"),
        (1e-3, "got float 0.001; give the optimizer itself, such as .* init_state makes its state"),
        (
            optax.adam,
            r"got function .*; did you mean to call it, .* or is it the rate, as in",
        ),
    ],
)
def test_what_is_no_optimizer_is_refused(tx, message):
    with pytest.raises(sf.ConfigError, match=message):
        as_optimizer(tx)
