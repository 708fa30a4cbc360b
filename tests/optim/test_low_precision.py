"""`low_precision` rounds the moments and nothing else, in any optimizer."""

import inspect
import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.small import full_but, ones

import stepfold as sf
from stepfold.tree import named_leaves

PARAMS = {"w": ones((16, 8)), "b": ones(8), "s": ones()}
BATCH = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)


def loss_fn(params, batch, key):
    hidden = jnp.tanh(batch.astype(params["w"].dtype) @ params["w"] + params["b"])
    return sf.mean((hidden * params["s"]).astype(jnp.float32) ** 2)


def low(tree=PARAMS):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


def train(tx, steps=3, params=PARAMS, state=None, batches=None, **options):
    state = sf.init_state(params, tx, jax.random.key(0)) if state is None else state
    step = jax.jit(sf.make_train_step(loss_fn, tx, **options))
    for batch in batches or [BATCH] * steps:
        state, metrics = step(state, batch)
    return state, metrics


def bits(tree):
    data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return {path: np.asarray(data(x)).tobytes() for path, x in named_leaves(tree)}


def rounded(state):
    """List the paths in bfloat16 below the inner state."""
    leaves = [(path, x) for path, x in named_leaves(state.inner) if x.dtype == jnp.bfloat16]
    return {path for path, _ in leaves}


# Which leaves

MASK = {"w": True, "b": False, "s": False}
GROUPS = {"w": "a", "b": "b", "s": "b"}


@pytest.mark.parametrize(
    ("tx", "paths"),
    [
        (optax.adam(0.1), "0/mu/b 0/mu/w 0/nu/b 0/nu/w"),
        (optax.sgd(0.1, momentum=0.9), "0/trace/b 0/trace/w"),
        (optax.lion(0.1), "0/mu/b 0/mu/w"),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(0.1)), "1/0/v/b 1/0/v/w"),
        (optax.adafactor(0.1, min_dim_size_to_factor=1), "0/v/b"),
        (
            optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9),
            "inner_state/0/trace/b inner_state/0/trace/w",
        ),
        (optax.masked(optax.trace(0.9), MASK), "inner_state/trace/w"),
        (
            optax.partition({"a": optax.trace(0.9), "b": optax.sgd(0.1)}, GROUPS),
            "inner_states/a/inner_state/trace/w",
        ),
        (sf.ema_params(optax.trace(0.9), 0.9), "inner/trace/b inner/trace/w"),
        (sf.ema_params(optax.trace(0.9), 0.9, debias=True), "inner/trace/b inner/trace/w"),
        (sf.optim.skip_spikes(optax.trace(0.9), window=8), "inner/trace/b inner/trace/w"),
        # What starts as the parameters: a rounded copy would move the iterate or the distance.
        (
            optax.contrib.schedule_free_sgd(0.1),
            "",
        ),
        (
            optax.contrib.prodigy(0.1),
            "exp_avg/b exp_avg/w exp_avg_sq/b exp_avg_sq/w grad_sum/b grad_sum/w",
        ),
        (optax.scale_by_lbfgs(), ""),  # differences of rounded parameters would be noise
        (optax.adam(0.1, mu_dtype=jnp.bfloat16), "0/mu/b 0/mu/s 0/mu/w 0/nu/b 0/nu/w"),
    ],
)
def test_moments_are_rounded_and_nothing_else(tx, paths):
    tx = sf.optim.low_precision(tx)
    state = sf.init_state(PARAMS, tx, jax.random.key(0))
    assert rounded(state.opt_state) == set(paths.split())
    step = sf.make_train_step(loss_fn, tx)
    after, _ = jax.eval_shape(step, state, BATCH)
    assert rounded(after.opt_state) == set(paths.split())


def test_one_array_of_the_shape_of_a_window_does_not_make_losses_moments():
    tx = sf.optim.low_precision(
        sf.optim.skip_spikes(sf.ema_params(optax.trace(0.9), 0.9), window=8)
    )
    assert rounded(tx.init(jnp.ones(8))) == {"inner/inner/trace"}


def test_the_dtypes_that_an_optimizer_has_by_itself_reach_it():
    # MultiSteps keeps the state of an optimizer in a branch, which must have the same dtypes.
    inner = optax.MultiSteps(optax.adam(0.1, mu_dtype=jnp.bfloat16), 2).gradient_transformation()
    state, _ = train(sf.optim.low_precision(inner), 2)
    assert state.opt_state.inner.gradient_step == 1


# What it computes


def test_counts_schedules_and_hyperparameters_are_exact():
    rate = optax.linear_schedule(0.3, 0.1, 7)
    tx = sf.optim.low_precision(optax.inject_hyperparams(optax.adam)(rate))
    state, _ = train(tx, 3)
    used = state.opt_state.inner.hyperparams["learning_rate"]
    assert float(used) == pytest.approx(float(rate(2)), rel=1e-6)
    assert (state.opt_state.count, state.opt_state.inner.count) == (3, 3)


@pytest.mark.parametrize("wraps", ["inside", "around"])
def test_an_average_of_bfloat16_parameters_is_float32_inside_and_around(wraps):
    tx, steps = optax.sgd(2.0**-10), 5  # too small to move a bfloat16 by itself
    if wraps == "inside":
        tx = sf.optim.low_precision(sf.ema_params(tx, 0.5))
    else:
        tx = sf.ema_params(sf.optim.low_precision(tx), 0.5)
    params = {"w": jnp.ones(4096, jnp.bfloat16)}
    state = sf.init_state(params, tx, jax.random.key(0))
    step = jax.jit(sf.make_train_step(lambda p, b, k: p["w"].astype(jnp.float32).sum(), tx))
    want = 1.0
    for i in range(steps):
        state, _ = step(state, None)
        want = 0.5 * want + 0.5 * (1 - (i + 1) * 2.0**-10)
    average = sf.get_ema(state.opt_state)["w"]
    assert average.dtype == jnp.float32
    assert float(average.mean()) == pytest.approx(want, abs=2e-4)
    assert float(state.params["w"].astype(jnp.float32).mean()) == pytest.approx(
        1 - steps * 2.0**-10, abs=3e-4
    )


SKIPPING = {
    "skip_spikes inside": lambda tx: sf.optim.low_precision(sf.optim.skip_spikes(tx, window=4)),
    "skip_spikes around": lambda tx: sf.optim.skip_spikes(sf.optim.low_precision(tx), window=4),
    "apply_if_finite inside": lambda tx: sf.optim.low_precision(optax.apply_if_finite(tx, 4)),
    "skip_nonfinite": sf.optim.low_precision,
}


@pytest.mark.parametrize("way", full_but(["skip_nonfinite"], SKIPPING))
def test_a_skipped_update_keeps_every_bit(way):
    params = low()
    tx, skip = SKIPPING[way](optax.adam(0.1)), way == "skip_nonfinite"
    start = sf.init_state(params, tx, jax.random.key(0))
    bad = BATCH * np.float32(np.nan)
    after, _ = train(tx, state=start, batches=[bad], skip_nonfinite=skip)
    moments = lambda state: {
        k: v for k, v in bits(state.opt_state).items() if re.search("mu|nu", k)
    }
    assert bits(after.params) == bits(start.params)
    assert moments(after) == moments(start) != {}
    good, _ = train(tx, state=start, skip_nonfinite=skip)
    skipped, _ = train(tx, state=good, batches=[bad], skip_nonfinite=skip)
    assert bits(skipped.params) == bits(good.params)
    assert moments(skipped) == moments(good) != moments(start)


def test_the_sign_of_a_zero_that_is_not_updated_stays():
    params = {"w": jnp.array([-0.0, 1.0], jnp.bfloat16)}
    tx = sf.optim.low_precision(sf.optim.skip_spikes(optax.sgd(0.1)))
    update = jax.jit(lambda loss: tx.update(params, tx.init(params), params, value=loss)[0])
    with jax.numpy_dtype_promotion("standard"):
        after = optax.apply_updates(params, update(jnp.float32(jnp.nan)))
    assert bits(after) == bits(params)


@pytest.mark.full
def test_a_nan_is_stored_as_one():
    tx = sf.optim.low_precision(optax.sgd(0.1, momentum=0.9))
    state = tx.init(PARAMS)
    grads = PARAMS | {"w": PARAMS["w"].at[0, 0].set(jnp.nan).at[0, 1].set(-jnp.inf)}
    updates, state = tx.update(grads, state, PARAMS)
    trace = state.inner[0].trace["w"]
    assert jnp.isnan(trace[0, 0])
    assert trace[0, 1] == -jnp.inf
    assert jnp.isfinite(trace[1:]).all()
    assert jnp.isnan(updates["w"][0, 0])


def test_a_loss_scale_around_it_backs_off_and_inside_it_is_refused():
    tx = sf.dynamic_loss_scale(sf.optim.low_precision(optax.adam(0.1)))
    start, _ = train(tx, precision="f16")
    after, metrics = train(tx, state=start, batches=[np.inf * BATCH], precision="f16")
    assert metrics["skipped"].total == 1
    assert after.opt_state.scale == start.opt_state.scale / 2
    assert bits(after.opt_state.inner) == bits(start.opt_state.inner)
    with pytest.raises(
        sf.errors.ConfigError, match="dynamic_loss_scale is inside another optimizer"
    ):
        train(sf.optim.low_precision(sf.dynamic_loss_scale(optax.adam(0.1))))


@pytest.mark.full
def test_it_may_be_in_groups_masks_and_accumulation():
    params = low()
    inner = sf.optim.low_precision(optax.adam(0.1))
    for tx in (
        optax.masked(inner, MASK),
        optax.partition({"a": inner, "b": optax.set_to_zero()}, GROUPS),
        optax.MultiSteps(inner, 2).gradient_transformation(),
        sf.optim.low_precision(optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()),
    ):
        state, _ = train(tx, params=params, accumulate=2)
        assert {x.dtype for x in jax.tree.leaves(state.params)} == {params["w"].dtype}
        assert (state.params["w"] != params["w"]).all()


@pytest.mark.full
def test_second_moments_decay_where_a_cast_stalls():
    """Gradients become a tenth, so their second moment has to become a hundredth."""
    grads = jnp.concatenate([jnp.ones(1000), jnp.full(6000, 0.1)])
    params = jnp.zeros(256)

    def nu_after(tx, cast=lambda state: state, widen=lambda state: state):
        def body(state, grad):
            _, state = tx.update(jnp.full(256, grad), widen(state), params)
            return cast(state), None

        with jax.numpy_dtype_promotion("standard"):
            state = jax.lax.scan(body, cast(tx.init(params)), grads)[0]
        return float(optax.tree.get(state, "nu").astype(jnp.float32).mean())

    adam = optax.adam(1e-3)
    naive = [partial(optax.tree.cast, dtype=dtype) for dtype in (jnp.bfloat16, jnp.float32)]
    exact = nu_after(adam)
    assert nu_after(sf.optim.low_precision(adam)) == pytest.approx(exact, rel=0.03)
    assert nu_after(adam, *naive) > 10 * exact  # it has not moved from where the large ones left it


# Transformations, checkpoints, memory


@pytest.mark.full
def test_states_may_be_stacked():
    tx = sf.optim.low_precision(optax.adam(0.1))
    starts = [jax.tree.map(lambda x, s=s: s * x, PARAMS) for s in (1.0, 2.0)]
    states = [sf.init_state(params, tx, jax.random.key(0)) for params in starts]
    step = sf.make_train_step(loss_fn, tx)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
    stacked, _ = jax.jit(jax.vmap(step, (0, None)))(stacked, BATCH)
    for i, state in enumerate(states):
        alone, _ = jax.jit(step)(state, BATCH)
        for a, b in zip(*map(jax.tree.leaves, (stacked.opt_state, alone.opt_state)), strict=True):
            np.testing.assert_allclose(np.float32(a[i]), np.float32(b), rtol=2.0**-6)
    inits = jax.vmap(lambda s: sf.init_state(s * PARAMS["w"], tx, jax.random.key(0)))
    assert inits(jnp.arange(2.0)).opt_state.inner[0].nu.dtype == jnp.bfloat16


@pytest.mark.full
def test_a_run_continues_from_a_checkpoint_bit_for_bit(tmp_path):
    params = low()
    tx = sf.optim.low_precision(optax.adam(0.1))
    state, _ = train(tx, 2, params=params)
    sf.save(tmp_path, state)
    like = jax.eval_shape(lambda key: sf.init_state(params, tx, key), jax.random.key(1))
    restored = sf.restore(tmp_path, like).state
    assert bits(train(tx, 2, state=restored)[0]) == bits(train(tx, 4, params=params)[0])


def test_a_cast_of_parameters_alone_is_an_error_that_says_so(tmp_path):
    tx = sf.optim.low_precision(optax.adam(0.1))
    sf.save(tmp_path, train(tx)[0])
    new = sf.init_state(low(), tx, jax.random.key(1))
    with pytest.raises(
        sf.errors.TreeMismatchError, match="only dtypes differ: cast=True converts them"
    ):
        sf.restore(tmp_path, new)
    got = sf.restore(tmp_path, new, cast=True).state
    assert got.params["w"].dtype == jnp.bfloat16


def report_of(tx, params, dims=None):
    shape = jax.eval_shape(lambda: sf.init_state(params, tx, jax.random.key(0)))
    plan = dims and sf.make_sharding(shape, sf.make_mesh(dims))
    loss = lambda params, batch, key: sf.mean((batch @ params.astype(jnp.float32)) ** 2)
    batch = jax.ShapeDtypeStruct((8, 256), jnp.float32)
    return plan, sf.describe(sf.make_train_step(loss, tx), shape, batch, sharding=plan)


def test_the_state_takes_half_the_memory_and_rounding_takes_none():
    params = jnp.ones((256, 256))
    size = params.nbytes
    plain, rounding = (
        report_of(tx, params)[1].memory
        for tx in (optax.adam(0.1), sf.optim.low_precision(optax.adam(0.1)))
    )
    assert plain.opt_state == 2 * size + 4
    assert rounding.opt_state == size + 8
    assert rounding.temporaries - plain.temporaries < 0.6 * size  # no word for each element


def test_the_moments_are_sharded_as_the_parameters_without_communication():
    params = jnp.ones((256, 256), jnp.bfloat16)
    tx = sf.optim.low_precision(optax.adam(0.1))
    plan, report = report_of(tx, params, (1, 8, 1, 1))
    assert plan.opt_state.inner[0].nu.spec == plan.params.spec
    assert report.memory.opt_state == 2 * params.nbytes // 8 + 8
    _, plain = report_of(optax.adam(0.1), params, (1, 8, 1, 1))
    assert len(report.collectives) == len(plain.collectives)


# Refusals


@pytest.mark.parametrize(
    "dtype", [jnp.float16, jnp.float32, jnp.float8_e5m2, "float64", jnp.int8, None, "half of it"]
)
def test_another_dtype_is_refused(dtype):
    with pytest.raises(
        sf.errors.ConfigError,
        match=r"low_precision: expected the dtype jnp.bfloat16, got .*underflow",
    ):
        sf.optim.low_precision(optax.adam(0.1), dtype)


def test_the_dtype_of_version_0_2_is_accepted():
    tx = optax.adam(0.1)
    for old in (
        lambda: sf.optim.low_precision(tx, jnp.bfloat16),
        lambda: sf.optim.low_precision(tx, dtype="bfloat16"),
    ):
        with pytest.warns(DeprecationWarning, match="low_precision: leave out dtype") as caught:
            state = old().init(PARAMS)
        assert caught[0].filename == __file__
        chex.assert_trees_all_equal(state, sf.optim.low_precision(tx).init(PARAMS))
    assert [*inspect.signature(sf.optim.low_precision).parameters] == ["tx"]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float64, jnp.float8_e4m3fn])
def test_parameters_of_other_dtypes_are_refused(dtype):
    with (
        jax.enable_x64(True),
        pytest.raises(
            sf.errors.ConfigError, match=r"params/b: expected float32 or bfloat16 .*, got flo"
        ),
    ):
        sf.optim.low_precision(optax.adam(0.1)).init(
            {"a": np.ones(2, np.float32), "b": jnp.ones(2, dtype)}
        )


def test_an_update_without_parameters_is_refused():
    tx = sf.optim.low_precision(optax.sgd(0.1))
    with pytest.raises(
        sf.errors.ConfigError, match="low_precision: pass the parameters, tx.update"
    ):
        tx.update(PARAMS, tx.init(PARAMS))
