"""`precision` casts what it says, and the loss scale follows overflows."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.core.precision import norm, unscale

PARAMS = {"w": jnp.ones((3, 2)), "norm": {"scale": jnp.ones(2)}}
BATCH = {
    "x": np.ones((4, 3), np.float32),
    "label": np.arange(4, dtype=np.int32),
    "key": jax.random.key(1),
}


def dtypes_in(precision, params=PARAMS, batch=BATCH, make=sf.make_train_step, stateful=False):
    """Trace a step; return the dtypes that the loss function saw, and the state after."""
    seen = {}

    def loss_fn(params, batch, key, *model_state):
        seen.update(params=params, batch=batch, state=model_state)
        seen.update(jax.tree.map(lambda x: x.dtype.name, dict(seen)))
        loss = sum(x.sum().astype(jnp.float32) for x in jax.tree.leaves(params))
        return (loss, {}, model_state[0]) if stateful else loss

    tx = sf.dynamic_loss_scale(optax.adam(0.1))
    source = (params, {"mean": jnp.zeros(2)}) if stateful else params
    start = lambda source: sf.init_state(source, tx, jax.random.key(0), stateful=stateful)
    state = jax.eval_shape(start, source)
    if make is sf.make_eval_step:
        jax.eval_shape(make(loss_fn, precision=precision), state, batch)
        return seen, state
    step = make(loss_fn, tx, precision=precision, stateful=stateful)
    return seen, jax.eval_shape(step, state, batch)[0]


@pytest.mark.parametrize(
    ("name", "dtype"), [("f32", "float32"), ("bf16", "bfloat16"), ("f16", "float16")]
)
@pytest.mark.parametrize("make", [sf.make_train_step, sf.make_eval_step])
def test_a_name_says_what_is_computed_in(name, dtype, make):
    seen, state = dtypes_in(name, make=make)
    assert seen["params"] == {"w": dtype, "norm": {"scale": dtype}}
    assert seen["batch"] == {"x": dtype, "label": "int32", "key": "key<fry>"}
    for tree in (state.params, state.opt_state.inner[0].mu):
        assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {jnp.dtype(jnp.float32)}


def test_parameters_and_optimizer_stay_in_their_own_dtype():
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    seen, state = dtypes_in("f32", low)
    assert seen["params"]["w"] == "float32"
    for tree in (state.params, state.opt_state.inner[0].nu):
        assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("make", [sf.make_train_step, sf.make_eval_step])
def test_nothing_is_cast_by_default(make):
    mixed = {"w": jnp.ones((3, 2), jnp.bfloat16), "norm": {"scale": jnp.ones(2)}}
    seen, _ = dtypes_in(None, mixed, BATCH | {"x": np.ones((4, 3), np.float16)}, make=make)
    assert seen["params"] == {"w": "bfloat16", "norm": {"scale": "float32"}}
    assert seen["batch"]["x"] == "float16"
    assert inspect.signature(make).parameters["precision"].default is None


@pytest.mark.parametrize("options", [{"accumulate": 4}])
def test_bf16_parameters_stay_bf16_by_default(options):
    seen = set()

    def loss_fn(params, batch, key):
        product = batch @ params
        seen.add(product.dtype.name)
        return sf.mean(product**2)

    tx = optax.adam(0.1)
    state = sf.init_state(jnp.ones(3, jnp.bfloat16), tx, jax.random.key(0))
    step = jax.jit(sf.make_train_step(loss_fn, tx, **options))
    state, metrics = step(state, jnp.ones((8, 3), jnp.bfloat16))
    assert seen == {"bfloat16"}
    assert state.params.dtype == state.opt_state[0].mu.dtype == jnp.bfloat16
    assert metrics["loss"].compute().dtype == metrics["grad_norm"].compute().dtype == jnp.float32


def test_bf16_gradients_are_accumulated_in_float32_by_default():
    loss_fn = lambda params, batch, key: sf.mean(params * batch)
    batch = jnp.array([256.0] + 255 * [1.0], jnp.bfloat16)  # 256 + 1 is 256 in bfloat16
    take = lambda **options: sf.make_grad(loss_fn, accumulate=256, **options)(
        jnp.ones((), jnp.bfloat16), batch, jax.random.key(0), ()
    )
    grads, *_ = take()
    assert grads.dtype == jnp.bfloat16
    assert grads == jnp.bfloat16(511 / 256)
    assert take(accumulator_dtype=None)[0] < 511 / 256 * 0.9


def test_the_model_state_is_not_cast():
    seen, state = dtypes_in("bf16", stateful=True)
    assert seen["state"] == ({"mean": "float32"},)
    assert state.model_state["mean"].dtype == jnp.float32


def test_float64_is_kept_by_f32_and_cast_by_bf16():
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64), PARAMS)
        assert dtypes_in("f32", wide)[0]["params"]["w"] == "float64"
        assert dtypes_in("bf16", wide)[0]["params"]["w"] == "bfloat16"


def test_what_is_to_be_kept_is_not_cast():
    seen, _ = dtypes_in(sf.Precision(jnp.bfloat16, keep="norm|^batch/x"))
    assert seen["params"] == {"w": "bfloat16", "norm": {"scale": "float32"}}
    assert seen["batch"]["x"] == "float32"


ROWS = np.float32([[100.7, 3.0], [-200.3, 0.1], [7.77, 5.0]])  # bfloat16 has three digits


@pytest.mark.parametrize(
    ("batch", "read"),
    [
        ((ROWS, ROWS), lambda batch: batch),
        ([ROWS, ROWS], lambda batch: batch),
        ((ROWS, ROWS, np.ones((3, 1), np.float32)), lambda batch: batch[:2]),
        (({"a": ROWS}, {"boxes": ROWS}), lambda batch: (batch[0]["a"], batch[1]["boxes"])),
        ({"x": ROWS, "y": ROWS}, lambda batch: (batch["x"], batch["y"])),
        ({"x": ROWS, "y": {"boxes": ROWS}}, lambda batch: (batch["x"], batch["y"]["boxes"])),
    ],
)
@pytest.mark.parametrize("make", [sf.make_train_step, sf.make_eval_step])
def test_the_targets_of_a_pair_or_below_a_name_are_not_narrowed(batch, read, make):
    def loss_fn(params, batch, key):
        x, y = read(batch)
        assert x.dtype == jnp.bfloat16
        return sf.mean((params.astype(jnp.float32) - y) ** 2)

    tx = optax.sgd(0.1)
    state = sf.init_state(jnp.zeros(()), tx, jax.random.key(0))
    args = (tx,) if make is sf.make_train_step else ()
    returned = jax.jit(make(loss_fn, *args, precision="bf16"))(state, batch)
    metrics = returned[1] if args else returned
    assert float(metrics["loss"].compute()) == pytest.approx(float((ROWS**2).mean()), rel=1e-6)


def test_loss_and_means_are_float32_in_bf16():
    many = jnp.full(4096, 1 + 2**-7)
    step = sf.make_eval_step(lambda p, b, k: (sf.mean(b), {"m": sf.mean(b)}), precision="bf16")
    state = sf.init_state(PARAMS, optax.sgd(0.1), jax.random.key(0))
    metrics = jax.jit(step)(state, many)
    assert metrics["loss"].compute() == metrics["m"].compute() == 1 + 2**-7


@pytest.mark.parametrize("name", ["fp32", "bfloat16", 16, jnp.bfloat16, False])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(
        sf.errors.ConfigError,
        match="precision: expected one of f32, bf16, f16, a Precision or None",
    ):
        sf.make_train_step(lambda p, b, k: 0.0, optax.sgd(0.1), precision=name)


@pytest.mark.parametrize("dtype", [jnp.int32, "float99", bool, None])
def test_a_dtype_that_does_not_float_is_refused(dtype):
    with pytest.raises(
        sf.errors.ConfigError, match="Precision.compute: expected a floating dtype, got"
    ):
        sf.Precision(dtype)


@pytest.mark.parametrize("keep", ["(", 3])
def test_a_pattern_that_is_none_is_refused(keep):
    with pytest.raises(
        sf.errors.ConfigError, match="Precision.keep: expected a regular expression, got"
    ):
        sf.Precision(jnp.bfloat16, keep=keep)


# the loss scale


def test_f16_without_a_scale_is_refused_when_built():
    for tx in (optax.adam(0.1), optax.chain(sf.dynamic_loss_scale(optax.adam(0.1)))):
        with pytest.raises(
            sf.errors.ConfigError, match="precision='f16': gradients underflow in float16; wr"
        ):
            sf.make_train_step(lambda p, b, k: 0.0, tx, precision="f16")
    half = sf.Precision(jnp.float16)
    with pytest.raises(sf.errors.ConfigError, match="gradients underflow in float16"):
        sf.make_train_step(lambda p, b, k: 0.0, optax.adam(0.1), precision=half)


@pytest.mark.parametrize("wrap", [lambda tx: sf.ema_params(tx, 0.9), sf.dynamic_loss_scale])
def test_a_scale_inside_another_optimizer_is_refused(wrap):
    tx = wrap(sf.dynamic_loss_scale(optax.sgd(1.0)))
    state = sf.init_state(jnp.ones(()), tx, jax.random.key(0))
    with pytest.raises(
        sf.errors.ConfigError, match="dynamic_loss_scale is inside another optimizer"
    ):
        sf.make_train_step(lambda p, b, k: sf.mean(p * b), tx)(state, jnp.ones(2))


def test_small_gradients_survive_float16():
    def loss_fn(p, b, k):
        return sf.mean(p * b).compute() * jnp.float32(2.0**-26)  # less than float16 can hold

    def grad_norm(tx, run):
        state = sf.init_state(jnp.ones(()), tx, jax.random.key(0))
        step = run(sf.make_train_step(loss_fn, tx, precision="f16"))
        return step(state, jnp.ones(2))[1]["grad_norm"].compute()

    assert grad_norm(sf.dynamic_loss_scale(optax.sgd(1.0)), jax.jit) == 2.0**-26
    # Without jit, since the compiler may compute in more than it is asked to.
    assert grad_norm(sf.dynamic_loss_scale(optax.sgd(1.0), initial=1.0), lambda f: f) == 0.0


def scales_after(grads, **options):
    """Update with each gradient, and list the scale after it."""
    tx = sf.dynamic_loss_scale(optax.sgd(1.0), **options)
    update, state, scales = jax.jit(tx.update), tx.init(np.float32(1.0)), []
    for grad in grads:
        _, state = update(np.float32(grad), state, np.float32(1.0))
        scales.append(float(state.scale))
    return scales


@pytest.mark.parametrize(
    ("grads", "options", "scales"),
    [
        (  # to its minimum and to its maximum
            [1, 1, 1, 1, 1, np.inf, np.inf, np.inf, 1, np.inf, 1, 1],
            {"initial": 8.0, "minimum": 4.0, "maximum": 16.0, "period": 2},
            [8, 16, 16, 16, 16, 8, 4, 4, 4, 4, 4, 8],
        ),
        ([1] * 7, {"initial": 1.0, "period": 3}, [1, 1, 2, 2, 2, 4, 4]),
        ([1, np.nan], {"initial": 64.0, "factor": 4.0, "period": 1}, [256, 64]),
    ],
)
def test_the_scale_backs_off_and_grows(grads, options, scales):
    assert scales_after(grads, **options) == scales


def test_a_step_that_is_bad_in_other_ways_ends_the_row_too():
    tx = sf.dynamic_loss_scale(optax.sgd(1.0), initial=1.0, period=3)
    infinite = lambda p, b, k: p * 1.0 + jnp.where(b > 5, jnp.inf, 0.0)  # with a finite gradient
    state, seen = sf.init_state(jnp.ones(()), tx, jax.random.key(0)), []
    step = jax.jit(sf.make_train_step(infinite, tx, precision="f16"))
    for batch in (1.0, 1.0, 9.0, 1.0, 1.0, 1.0):
        state, _ = step(state, jnp.array(batch))
        seen.append((float(state.opt_state.scale), int(state.opt_state.streak)))
    assert seen == [(1, 1), (1, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


def test_what_is_wrapped_gets_the_loss_and_not_the_scaled_one():
    tx = sf.dynamic_loss_scale(optax.contrib.reduce_on_plateau(patience=1))
    state = sf.init_state(jnp.ones(()), tx, jax.random.key(0))
    step = sf.make_train_step(lambda p, b, k: sf.mean(p * b), tx, precision="f16")
    state, _ = jax.jit(step)(state, jnp.array([1.0, 0.0]))
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


def test_a_custom_gradient_sees_no_scale():
    def loss_fn(p, b, k):
        return sf.mean(p * b), {"m": sf.mean(b * b)}

    tx = sf.dynamic_loss_scale(optax.sgd(1.0), initial=2.0**10)
    state = sf.init_state(jnp.ones(()), tx, jax.random.key(0))
    step = jax.jit(sf.make_train_step(loss_fn, tx, precision="f16", grad=hand_written))
    batch = jnp.array([1.0, 3.0])
    after, metrics = step(state, batch)
    assert metrics["seen"].compute() == 2.0
    assert metrics["push"].compute() == (0.5 + 1.0 + 0.5 + 3.0) / 2
    assert (after.params, metrics["grad_norm"].compute()) == (0.0, 1.0)
    after, metrics = step(state, jnp.array([1.0, jnp.inf]))
    assert (after.opt_state.scale, metrics["skipped"].total) == (2.0**9, 1)


def test_a_backward_pass_that_overflows_backs_off_though_the_loss_is_finite():
    tx = sf.dynamic_loss_scale(optax.sgd(1.0))
    state = sf.init_state(jnp.ones(()), tx, jax.random.key(0))
    step = jax.jit(sf.make_train_step(lambda p, b, k: p * b, tx, precision="f16"))
    after, metrics = step(state, jnp.array(4.0))  # 4 * 2^15 is more than float16 can hold
    assert (after.params, after.opt_state.scale, metrics["skipped"].total) == (1.0, 2.0**14, 1)


def test_a_scale_that_is_no_power_of_two_costs_float64_nothing():
    with jax.enable_x64(True):
        tx = sf.dynamic_loss_scale(optax.sgd(1.0), initial=1000.0)
        state = sf.init_state(np.ones(3), tx, jax.random.key(0))
        step = jax.jit(sf.make_train_step(lambda p, b, k: (p * b).sum(), tx))
        after, _ = step(state, np.full(3, 0.3))
        np.testing.assert_allclose(after.params, 0.7, rtol=1e-15)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_norm_is_taken_in_float32(dtype):
    assert norm({"a": jnp.full(2**16, 4.0, dtype)}) == 4 * 2**8


def test_a_model_state_that_overflows_alone_skips_what_is_wrapped_too():
    def loss(p, b, k, model_state):
        return sf.mean(p * b), {}, jnp.where(b[0] > 5, jnp.inf, model_state)

    tx = sf.dynamic_loss_scale(optax.adam(1.0), initial=1.0, period=1)  # its gradients are finite
    state = sf.init_state((jnp.ones(()), jnp.zeros(())), tx, jax.random.key(0), stateful=True)
    step = jax.jit(sf.make_train_step(loss, tx, precision="f16", stateful=True))
    after, metrics = step(state, jnp.array([9.0, 0.0]))
    assert metrics["skipped"].total == 1
    assert after.opt_state.scale == state.opt_state.scale
    assert after.opt_state.inner[0].count == 0
    assert (after.params, after.model_state) == (1, 0)


@pytest.mark.parametrize(
    "options",
    [
        *({"initial": 0.5}, {"initial": 2.0**30}, {"initial": "a"}),
        *({"factor": 1.0}, {"period": 0}, {"period": None}, {"minimum": 0.0}),
    ],
)
def test_a_scale_that_cannot_be_is_refused(options):
    with pytest.raises(
        sf.errors.ConfigError, match="dynamic_loss_scale: expected 0 < minimum <= initial"
    ):
        sf.dynamic_loss_scale(optax.adam(0.1), **options)
    with pytest.raises(sf.errors.ConfigError, match="tx: expected an optax transformation"):
        sf.dynamic_loss_scale(0.1)
