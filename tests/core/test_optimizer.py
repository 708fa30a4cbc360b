"""Optimizers of any kind are taken, and what is none is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.core.optimizer import as_optimizer, still_finite

UP = optax.chain(optax.contrib.normalize(), optax.sgd(0.02))


def step_of(tx, params=None):
    params = {"w": jnp.ones(3)} if params is None else params
    state = sf.init_state(params, tx, jax.random.key(0))
    return jax.jit(sf.make_train_step(lambda p, b, k: (p["w"] ** 2).sum(), tx))(state, None)[0]


def trace(tx):
    def step(params):
        state = sf.init_state(params, tx, jax.random.key(0))
        return sf.make_train_step(lambda p, b, k: (p["w"] ** 2).sum(), tx)(state, None)

    jax.eval_shape(step, {"w": jnp.ones(3)})


def test_any_optimizer_takes_extra_arguments_and_strict_promotion():
    for tx in (optax.sgd(0.1), optax.adam(0.1), optax.MultiSteps(optax.adam(0.1), 2)):
        tx = as_optimizer(tx)
        update = lambda p, tx=tx: tx.update(p, tx.init(p), p, value=jnp.ones(()))[0]
        assert jax.eval_shape(update, jnp.ones(3)).shape == (3,)


@pytest.mark.parametrize("form", [lambda tx: tx, lambda tx: tx.gradient_transformation()])
def test_multi_steps_passes_on_the_extra_arguments(form):
    plateau = optax.contrib.reduce_on_plateau(patience=1)
    tx = as_optimizer(form(optax.MultiSteps(plateau, 1)))
    params = jnp.ones(3)
    _, state = jax.jit(tx.update)(params, tx.init(params), params, value=jnp.float32(0.5))
    assert state.inner_opt_state.best_value == 0.5


@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: sf.ema_params(tx, 0.9)])
def test_an_update_is_given_the_keywords_that_it_takes(wrap):
    tx = wrap(optax.contrib.sam(optax.sgd(0.1), UP))  # takes grad_fn= alone, and says any
    assert step_of(tx).params["w"][0] > 1  # uphill first


def test_parameters_may_be_given_by_their_name():
    tx = as_optimizer(optax.GradientTransformation(lambda p: (), lambda u, s, p: (p, s)))
    assert tx.update(1.0, (), params=2.0, value=3.0) == (2.0, ())


@pytest.mark.parametrize(
    ("tx", "said"),
    [
        (optax.lbfgs(0.1), "missing .*'value_fn'"),
        (optax.contrib.sophia(0.1), "obj_fn must be"),
        (optax.contrib.sam(optax.sgd(0.1), UP, opaque_mode=True), "grad_fn must be"),
    ],
)
def test_an_optimizer_that_evaluates_the_loss_itself_is_told_apart(tx, said):
    message = f"tx: expected an optimizer that needs only the .*{said}.*turn off its line search"
    with pytest.raises(sf.errors.ConfigError, match=message):
        trace(tx)
    trace(optax.lbfgs(0.1, linesearch=None))


def test_a_part_that_does_not_take_what_it_says_is_named():
    sam = optax.contrib.sam(optax.sgd(0.1), UP)
    message = r"tx: expected every part .* value=loss, .*transparent_update_fn.*; put optax.Gradi"
    with pytest.raises(sf.errors.ConfigError, match=message):
        trace(optax.chain(optax.clip(1.0), sam))
    trace(optax.chain(optax.clip(1.0), optax.GradientTransformation(sam.init, sam.update)))


def test_what_else_goes_wrong_in_an_optimizer_is_left_as_it_is():
    def update(updates, state, params=None):
        raise TypeError("of my own")

    with pytest.raises(TypeError) as raised:
        trace(optax.GradientTransformation(lambda params: (), update))
    assert str(raised.value) == "of my own"


@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: sf.ema_params(tx, 0.9)])
def test_lookahead_on_one_set_of_parameters_is_refused_when_built(wrap):
    tx = wrap(optax.lookahead(optax.sgd(0.1), 5, 0.5))
    message = (
        r"lookahead expects optax.LookaheadParams.init_synced\(params\), got dict; .*grads.fast"
    )
    with pytest.raises(sf.errors.ConfigError, match=message):
        trace(tx)
    trace(optax.sgd(0.1))


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
    with pytest.raises(sf.errors.ConfigError, match=message):
        as_optimizer(tx)


# values that are not finite


def test_finite_values_of_every_kind_are_still_finite():
    mixed = {"n": jnp.int32(3), "key": jax.random.key(0), "none": None, "x": jnp.ones(2)}
    assert jax.jit(still_finite)(mixed, mixed)
    assert jax.jit(still_finite)({}, {})


def test_values_that_become_nan_or_inf_are_found():
    pairs = [
        *((0.0, jnp.nan), (0.0, jnp.inf), (jnp.inf, jnp.nan), (jnp.inf, -jnp.inf)),
        *((0j, complex("nan")), (0j, complex(0.0, jnp.inf))),
    ]
    for values in pairs:
        old, new = ({"a": np.ones(2), "b": np.array([1, value])} for value in values)
        assert not still_finite(old, new)
        assert still_finite(old, old)


def test_values_that_were_not_finite_before_may_stay_so():
    for value in (np.nan, np.inf):
        worst = np.array([1.0, value])
        assert still_finite(worst, worst)
