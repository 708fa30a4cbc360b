import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf

PARAMS = {"w": jnp.ones((3, 2)), "norm": {"scale": jnp.ones(2)}}
BATCH = {
    "x": np.ones((4, 3), np.float32),
    "label": np.arange(4, dtype=np.int32),
    "key": jax.random.key(1),
}


def dtypes_in(precision, params=PARAMS, batch=BATCH, make=sf.make_train_step, stateful=False):
    """Run a step and tell the dtypes that the loss function saw, and the state after."""
    seen = {}

    def loss_fn(params, batch, key, *model_state):
        seen.update(params=params, batch=batch, state=model_state)
        seen.update(jax.tree.map(lambda x: x.dtype.name, dict(seen)))
        loss = sum(x.sum().astype(jnp.float32) for x in jax.tree.leaves(params))
        return (loss, {}, model_state[0]) if stateful else loss

    tx = sf.dynamic_loss_scale(optax.adam(0.1))
    source = (params, {"mean": jnp.zeros(2)}) if stateful else params
    state = sf.init_state(source, tx, jax.random.key(0), stateful=stateful)
    if make is sf.make_eval_step:
        make(loss_fn, precision=precision)(state, batch)
        return seen, state
    return seen, make(loss_fn, tx, precision=precision, stateful=stateful)(state, batch)[0]


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


def test_the_model_state_is_not_cast():
    seen, state = dtypes_in("bf16", stateful=True)
    assert seen["state"] == ({"mean": "float32"},)
    assert state.model_state["mean"].dtype == jnp.float32


def test_float64_is_kept_by_f32_and_cast_by_bf16():
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64), PARAMS)
        assert dtypes_in("f32", wide)[0]["params"]["w"] == "float64"
        assert dtypes_in("bf16", wide)[0]["params"]["w"] == "bfloat16"


def test_a_dtype_may_be_given_by_its_name():
    assert sf.Precision("bfloat16") == sf.Precision(jnp.bfloat16)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64), PARAMS)
        assert dtypes_in(sf.Precision("float32"), wide)[0]["params"]["w"] == "float64"


def test_what_is_to_be_kept_is_not_cast():
    seen, _ = dtypes_in(sf.Precision(jnp.bfloat16, keep="norm|^batch/x"))
    assert seen["params"] == {"w": "bfloat16", "norm": {"scale": "float32"}}
    assert seen["batch"]["x"] == "float32"


def test_loss_and_means_are_float32_in_bf16(run):
    many = jnp.full(4096, 1 + 2**-7)
    step = sf.make_eval_step(lambda p, b, k: (sf.mean(b), {"m": sf.mean(b)}), precision="bf16")
    state = sf.init_state(PARAMS, optax.sgd(0.1), jax.random.key(0))
    metrics = run(step)(state, many)
    assert metrics["loss"].compute() == metrics["m"].compute() == 1 + 2**-7


@pytest.mark.parametrize("name", ["fp32", "bfloat16", None, 16, jnp.bfloat16])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(
        sf.ConfigError, match="precision: expected one of f32, bf16, f16 or a Precis"
    ):
        sf.make_train_step(lambda p, b, k: 0.0, optax.sgd(0.1), precision=name)


@pytest.mark.parametrize("dtype", [jnp.int32, "float99", bool, None])
def test_a_dtype_that_does_not_float_is_refused(dtype):
    with pytest.raises(sf.ConfigError, match="Precision.compute: expected a floating dtype, got"):
        sf.Precision(dtype)


@pytest.mark.parametrize("keep", ["(", 3])
def test_a_pattern_that_is_none_is_refused(keep):
    with pytest.raises(sf.ConfigError, match="Precision.keep: expected a regular expression, got"):
        sf.Precision(jnp.bfloat16, keep=keep)
