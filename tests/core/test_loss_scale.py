import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.core.loss_scale import LossScaleState, norm, unscale


def scaled_step(**options):
    tx = sf.dynamic_loss_scale(optax.sgd(1.0, momentum=0.9), **options)
    loss_fn = lambda p, b, k: sf.mean(p * b, jnp.ones(b.shape))
    step = sf.make_train_step(loss_fn, tx, precision="f16")
    return sf.init_state(jnp.ones(()), tx, jax.random.key(0)), step


def test_f16_without_a_scale_is_refused_when_built():
    for tx in (optax.adam(0.1), optax.chain(sf.dynamic_loss_scale(optax.adam(0.1)))):
        with pytest.raises(
            sf.ConfigError, match="precision='f16': gradients underflow in float16; wr"
        ):
            sf.make_train_step(lambda p, b, k: 0.0, tx, precision="f16")
    half = sf.Precision(jnp.float16)
    with pytest.raises(sf.ConfigError, match="gradients underflow in float16"):
        sf.make_train_step(lambda p, b, k: 0.0, optax.adam(0.1), precision=half)


@pytest.mark.parametrize("wrap", [lambda tx: sf.ema_params(tx, 0.9), sf.dynamic_loss_scale])
def test_a_scale_inside_another_optimizer_is_refused(wrap):
    tx = wrap(sf.dynamic_loss_scale(optax.sgd(1.0)))
    state = sf.init_state(jnp.ones(()), tx, jax.random.key(0))
    with pytest.raises(sf.ConfigError, match="dynamic_loss_scale: expected it once and around"):
        sf.make_train_step(lambda p, b, k: sf.mean(p * b), tx)(state, jnp.ones(2))


def test_small_gradients_survive_float16(run):
    def loss_fn(p, b, k):
        return sf.mean(p * b).compute() * jnp.float32(2.0**-26)  # less than float16 can hold

    def grad_norm(tx, run):
        state = sf.init_state(jnp.ones(()), tx, jax.random.key(0))
        step = run(sf.make_train_step(loss_fn, tx, precision="f16"))
        return step(state, jnp.ones(2))[1]["grad_norm"].compute()

    assert grad_norm(sf.dynamic_loss_scale(optax.sgd(1.0)), run) == 2.0**-26
    # Without jit, since the compiler may compute in more than it is asked to.
    assert grad_norm(sf.dynamic_loss_scale(optax.sgd(1.0), initial=1.0), lambda f: f) == 0.0


def test_the_scale_backs_off_to_its_minimum_and_grows_to_its_maximum(run):
    state, step = scaled_step(initial=8.0, minimum=4.0, maximum=16.0, period=2)
    step, scales = run(step), []
    good, bad = jnp.ones(2), jnp.array([1.0, jnp.inf])
    for batch in (good, good, good, good, good, bad, bad, bad, good, bad, good, good):
        state, _ = step(state, batch)
        scales.append(float(state.opt_state.scale))
    assert scales == [8, 16, 16, 16, 16, 8, 4, 4, 4, 4, 4, 8]


def test_the_scale_grows_once_in_a_period(run):
    state, step = scaled_step(initial=1.0, period=3)
    scales = []
    for _ in range(7):
        state, _ = run(step)(state, jnp.ones(2))
        scales.append(float(state.opt_state.scale))
    assert scales == [1, 1, 2, 2, 2, 4, 4]


def test_what_is_not_finite_ends_the_row_of_finite_updates(run):
    tx = sf.dynamic_loss_scale(optax.sgd(1.0), initial=8.0, period=3)
    state, seen = tx.init(jnp.ones(())), []
    for grad in (1.0, 1.0, jnp.inf, 1.0, 1.0, 1.0, 1.0):
        _, state = run(tx.update)(jnp.array(grad), state, jnp.ones(()))
        seen.append((float(state.scale), int(state.streak)))
    assert seen == [(8, 1), (8, 2), (4, 0), (4, 1), (4, 2), (8, 0), (8, 1)]


def test_a_step_that_is_bad_in_other_ways_ends_the_row_too(run):
    tx = sf.dynamic_loss_scale(optax.sgd(1.0), initial=1.0, period=3)
    infinite = lambda p, b, k: p * 1.0 + jnp.where(b > 5, jnp.inf, 0.0)  # with a finite gradient
    state, seen = sf.init_state(jnp.ones(()), tx, jax.random.key(0)), []
    step = run(sf.make_train_step(infinite, tx, precision="f16"))
    for batch in (1.0, 1.0, 9.0, 1.0, 1.0, 1.0):
        state, _ = step(state, jnp.array(batch))
        seen.append((float(state.opt_state.scale), int(state.opt_state.streak)))
    assert seen == [(1, 1), (1, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


def test_the_scale_changes_by_its_factor(run):
    state, step = scaled_step(initial=64.0, factor=4.0, period=1)
    state, _ = run(step)(state, jnp.ones(2))
    assert state.opt_state.scale == 256
    state, _ = run(step)(state, jnp.array([1.0, jnp.inf]))
    assert state.opt_state.scale == 64


def test_what_is_wrapped_gets_the_loss_and_not_the_scaled_one(run):
    tx = sf.dynamic_loss_scale(optax.contrib.reduce_on_plateau(patience=1))
    state = sf.init_state(jnp.ones(()), tx, jax.random.key(0))
    step = sf.make_train_step(lambda p, b, k: sf.mean(p * b), tx, precision="f16")
    state, _ = run(step)(state, jnp.array([1.0, 0.0]))
    assert state.opt_state.inner.best_value == 0.5


def test_float16_gradients_are_unscaled_without_passing_float16():
    scale = jnp.float32(2.0**17)  # more than float16 can hold
    unscaled = unscale(jnp.array([1024.0], jnp.float16), scale)
    assert unscaled.dtype == jnp.float16
    assert unscaled[0] == 2.0**-7


def hand_written(loss_fn):
    """Differentiate a loss by its parameters, its batch and its metrics."""

    def grad_fn(params, batch, key, model_state):
        def loss(params, batch):
            terms, metrics = loss_fn(params, batch, key)
            return terms["loss"].compute() + metrics["m"].compute(), (terms, metrics)

        by_both = jax.grad(loss, argnums=(0, 1), has_aux=True)
        (grads, push), (terms, metrics) = by_both(params, batch)
        metrics = {"push": sf.mean(push), "seen": sf.mean(grads)}
        return grads / jnp.maximum(1.0, abs(grads)), terms, metrics, model_state

    return grad_fn


def test_a_custom_gradient_sees_no_scale(run):
    def loss_fn(p, b, k):
        return sf.mean(p * b), {"m": sf.mean(b * b)}

    tx = sf.dynamic_loss_scale(optax.sgd(1.0), initial=2.0**10)
    state = sf.init_state(jnp.ones(()), tx, jax.random.key(0))
    step = run(sf.make_train_step(loss_fn, tx, precision="f16", grad=hand_written))
    batch = jnp.array([1.0, 3.0])
    after, metrics = step(state, batch)
    assert metrics["seen"].compute() == 2.0
    assert metrics["push"].compute() == (0.5 + 1.0 + 0.5 + 3.0) / 2
    assert (after.params, metrics["grad_norm"].compute()) == (0.0, 1.0)
    after, metrics = step(state, jnp.array([1.0, jnp.inf]))
    assert (after.opt_state.scale, metrics["skipped"].total) == (2.0**9, 1)


def test_a_backward_pass_that_overflows_backs_off_though_the_loss_is_finite(run):
    tx = sf.dynamic_loss_scale(optax.sgd(1.0))
    state = sf.init_state(jnp.ones(()), tx, jax.random.key(0))
    step = run(sf.make_train_step(lambda p, b, k: p * b, tx, precision="f16"))
    after, metrics = step(state, jnp.array(4.0))  # 4 * 2^15 is more than float16 can hold
    assert (after.params, after.opt_state.scale, metrics["skipped"].total) == (1.0, 2.0**14, 1)


def test_a_scale_that_is_no_power_of_two_costs_float64_nothing(run):
    with jax.enable_x64(True):
        tx = sf.dynamic_loss_scale(optax.sgd(1.0), initial=1000.0)
        state = sf.init_state(np.ones(3), tx, jax.random.key(0))
        step = run(sf.make_train_step(lambda p, b, k: (p * b).sum(), tx))
        after, _ = step(state, np.full(3, 0.3))
        np.testing.assert_allclose(after.params, 0.7, rtol=1e-15)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_norm_is_taken_in_float32(dtype):
    assert norm({"a": jnp.full(2**16, 4.0, dtype)}) == 4 * 2**8


def test_an_overflow_skips_all_but_the_scale(run):
    state, step = scaled_step()
    state, _ = run(step)(state, jnp.ones(2))
    after, metrics = run(step)(state, jnp.array([1.0, jnp.nan]))
    assert after.params == state.params
    assert after.opt_state.inner[0].trace == state.opt_state.inner[0].trace
    assert after.opt_state.scale == state.opt_state.scale / 2
    assert after.step == state.step + 1
    assert metrics["skipped"].total == 1
    assert metrics["loss"].count == 0


def test_a_model_state_that_overflows_alone_skips_what_is_wrapped_too(run):
    def loss(p, b, k, model_state):
        return sf.mean(p * b), {}, jnp.where(b[0] > 5, jnp.inf, model_state)

    tx = sf.dynamic_loss_scale(optax.adam(1.0), initial=1.0, period=1)  # its gradients are finite
    state = sf.init_state((jnp.ones(()), jnp.zeros(())), tx, jax.random.key(0), stateful=True)
    step = run(sf.make_train_step(loss, tx, precision="f16", stateful=True))
    after, metrics = step(state, jnp.array([9.0, 0.0]))
    assert metrics["skipped"].total == 1
    assert after.opt_state.scale == state.opt_state.scale
    assert after.opt_state.inner[0].count == 0
    assert (after.params, after.model_state) == (1, 0)


def test_gradients_are_unscaled_before_they_are_clipped():
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    tx = sf.dynamic_loss_scale(inner)
    params = jnp.array([3.0, 4.0])
    updates, _ = tx.update(params * 2.0**15 / 10, tx.init(params), params)
    np.testing.assert_allclose(updates, -params / 10, rtol=1e-6)


def test_the_metrics_are_those_of_the_loss_and_not_of_the_scaled_one(run):
    state, step = scaled_step(initial=2.0**10)
    _, metrics = run(step)(state, jnp.array([1.0, 3.0]))
    assert metrics["loss"].compute() == 2.0
    assert metrics["grad_norm"].compute() == 2.0


@pytest.mark.parametrize("n", [1, 4])
def test_scaling_changes_no_bit_in_float32(run, n):
    def trained(tx):
        loss_fn = lambda p, b, k: {"fit": sf.mean((p * b) ** 2, b > 0), "aux": (p**2).sum()}
        state = sf.init_state(jnp.arange(1.0, 4.0), tx, jax.random.key(0))
        step = run(sf.make_train_step(loss_fn, tx, accumulate=n))
        for i in range(3):
            state, _ = step(state, jax.random.normal(jax.random.key(i), (4, 3)))
        return np.asarray(state.params)

    scaled, plain = trained(sf.dynamic_loss_scale(optax.sgd(0.1))), trained(optax.sgd(0.1))
    np.testing.assert_allclose(scaled, plain, rtol=1e-6)


def test_it_is_an_optax_transformation_of_its_own(run):
    tx = sf.dynamic_loss_scale(optax.adam(0.1))
    params = {"w": jnp.array([-0.0, 1.0])}
    state = tx.init(params)
    assert isinstance(state, LossScaleState)
    updates, state = run(tx.update)({"w": jnp.array([jnp.nan, 1.0])}, state, params)
    after = optax.apply_updates(params, updates)
    assert np.asarray(after["w"]).tobytes() == np.asarray(params["w"]).tobytes()
    assert state.inner[0].count == 0
    assert state.scale == 2.0**14


def test_inner_transformations_get_the_extra_arguments():
    tx = sf.dynamic_loss_scale(optax.contrib.reduce_on_plateau(patience=1))
    state = tx.init(jnp.ones(2))
    _, state = tx.update(jnp.ones(2), state, jnp.ones(2), value=jnp.float32(0.5))
    assert state.inner.best_value == 0.5


@pytest.mark.parametrize(
    "options",
    [
        *({"initial": 0.5}, {"initial": 2.0**30}, {"initial": "a"}),
        *({"factor": 1.0}, {"period": 0}, {"period": None}, {"minimum": 0.0}),
    ],
)
def test_a_scale_that_cannot_be_is_refused(options):
    with pytest.raises(sf.ConfigError, match="dynamic_loss_scale: expected 0 < minimum <= initial"):
        sf.dynamic_loss_scale(optax.adam(0.1), **options)


def test_a_scale_around_no_optimizer_is_refused():
    with pytest.raises(sf.ConfigError, match="tx: expected an optax transformation"):
        sf.dynamic_loss_scale(0.1)
