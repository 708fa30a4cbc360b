"""A step that tells more of its state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf


def loss_fn(params, batch, key):
    return sf.mean((params - batch) ** 2)


def make(tx, **functions):
    step = sf.observe(sf.make_train_step(loss_fn, tx), **functions)
    return step, sf.init_state(jnp.ones(4), tx, jax.random.key(0))


def test_the_learning_rate_is_that_of_each_step(run):
    schedule = optax.linear_schedule(0.5, 0.0, 5)
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)
    step, state = make(
        tx,
        kept=lambda state: optax.tree.get(state.opt_state, "hyperparams")["learning_rate"],
        told=lambda state: schedule(state.step - 1),
    )
    step = run(step)
    for count in range(4):
        state, metrics = step(state, jnp.zeros(4))
        for name in ("kept", "told"):
            assert float(metrics[name].compute()) == pytest.approx(0.5 - 0.1 * count)


def test_the_step_itself_is_not_changed():
    tx = optax.adam(0.1)
    step, state = make(tx, norm=lambda state: optax.tree.norm(state.params))
    new, metrics = step(state, jnp.zeros(4))
    plain, plainly = sf.make_train_step(loss_fn, tx)(state, jnp.zeros(4))
    jax.tree.map(np.testing.assert_array_equal, new.params, plain.params)
    assert metrics.keys() - plainly.keys() == {"norm"}
    assert float(metrics["norm"].compute()) == pytest.approx(float(jnp.linalg.norm(new.params)))


def test_fit_shows_it_step_by_step():
    step, state = make(optax.sgd(0.1), step=lambda state: state.step)
    seen = []
    batches = sf.batches(np.zeros((8, 4), np.float32), 4, seed=0)
    sf.fit(
        *(step, state, batches),
        steps=8,
        log_every=4,
        steps_per_call=2,
        hooks=[lambda event: seen.extend(event.per_step["train/step"])],
    )
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda state: None, "rate: expected one number of the state, got NoneType None"),
        (lambda state: state.key, "rate: expected one number of the state, got key<fry>"),
        (lambda state: state.params, r"rate: expected one number of the state, got float32\[4\]"),
    ],
)
def test_what_is_no_number_is_named(function, said):
    step, state = make(optax.sgd(0.1), rate=function)
    with pytest.raises(sf.ConfigError, match=said):
        step(state, jnp.zeros(4))


def test_a_metric_of_the_step_is_not_replaced():
    step, state = make(optax.sgd(0.1), loss=lambda state: 0.0)
    with pytest.raises(sf.ConfigError, match="other names than the step's own metrics, got loss"):
        step(state, jnp.zeros(4))


def test_arguments_are_checked():
    with pytest.raises(sf.ConfigError, match="observe: expected a step .* got None"):
        sf.observe(None)
    with pytest.raises(sf.ConfigError, match="rate: expected a function of the state, got float 0"):
        sf.observe(loss_fn, rate=0.1)
