import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stepfold as sf
from stepfold.inspect.report import not_reused, whole_leaves

TX = optax.adam(0.1)
W, B, COUNT, KEY = 64 * 128 * 4, 128 * 4, 4, 8


def init(key):
    return {"w": jax.random.normal(key, (64, 128)), "b": jnp.zeros(128)}


def loss_fn(params, batch, key):
    return sf.mean((batch["x"] @ params["w"] + params["b"]).mean(-1) * batch["y"])


STEP, EVAL = sf.make_train_step(loss_fn, TX), sf.make_eval_step(loss_fn)
BATCH = {"x": np.ones((16, 64), np.float32), "y": np.ones(16, np.float32)}


def compiled(dims=None, step=STEP, build=init, batch=BATCH, tx=TX, **options):
    shape = jax.eval_shape(lambda: sf.init_state(build, tx, jax.random.key(0)))
    plan = dims and sf.make_sharding(shape, sf.make_mesh(dims))
    return sf.compile_step(step, shape, batch, sharding=plan, **options)


PLACES = [None, (1, 8, 1, 1), (8, 1, 1, 1), (2, 4, 1, 1)]
places = pytest.mark.parametrize("dims", PLACES, ids=str)


# What is donated and not used again


@places
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 2},
        {"precision": "bf16"},
        {"skip_nonfinite": True},
        {"remat": True},
    ],
    ids=str,
)
def test_a_train_step_uses_all_it_is_given(options, dims):
    assert not_reused(compiled(dims, sf.make_train_step(loss_fn, TX, **options))) == []


def test_optimizers_with_more_state_use_all_they_are_given():
    for tx in (
        sf.ema_params(optax.adamw(optax.linear_schedule(0.1, 0.0, 9)), 0.9),
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
    ):
        assert not_reused(compiled((1, 8, 1, 1), sf.make_train_step(loss_fn, tx), tx=tx)) == []


def test_what_adafactor_never_reads_is_next_to_nothing():
    """It keeps a number for each leaf that is not factored, and overwrites it each time."""
    tx = optax.adafactor(0.1, min_dim_size_to_factor=8)
    unused = not_reused(compiled((1, 8, 1, 1), sf.make_train_step(loss_fn, tx), tx=tx))
    assert {size for _, size in unused} <= {4}


def test_what_is_not_donated_is_not_missed():
    assert not_reused(compiled(donate=False)) == []
    assert not_reused(compiled(step=EVAL)) == []


def quietly(step, state, batch):
    """Compile a step that wastes what it is given, of which jax warns at times."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        return sf.compile_step(step, state, batch)


def narrowing(state, batch):
    """Let the parameters slip into what the products were made in."""
    grads = jax.grad(lambda w: jnp.sum(jnp.tanh(batch @ w)))(state["w"])
    return {"w": (state["w"] - 0.1 * grads).astype(jnp.bfloat16), "n": state["n"] + 1}, {}


def narrowing_state(place=None):
    made = {"w": jnp.ones((64, 128)), "n": jnp.zeros((), jnp.int32)}
    return made if place is None else jax.device_put(made, place)


@pytest.mark.parametrize("on_mesh", [False, True])
def test_a_leaf_that_comes_back_in_another_dtype_is_named(on_mesh):
    place = NamedSharding(sf.make_mesh(), P()) if on_mesh else None
    assert not_reused(quietly(narrowing, narrowing_state(place), jnp.ones((8, 64)))) == [("w", W)]


def test_a_leaf_that_comes_back_cut_otherwise_is_counted_by_its_share():
    cut = NamedSharding(sf.make_mesh(), P("fsdp"))
    state = {"w": jax.device_put(jnp.ones((64, 128)), cut)}
    step = lambda state, batch: ({"w": (state["w"] * batch).astype(jnp.bfloat16)}, {})
    assert not_reused(quietly(step, state, jnp.ones(()))) == [("w", W // 8)]


def test_a_leaf_that_is_never_read_is_named():
    state = {"new": jnp.ones(8), "old": jnp.ones(1024)}
    step = lambda state, batch: ({"new": state["new"] * batch, "old": batch + jnp.zeros(1024)}, {})
    step = sf.compile_step(step, state, jnp.ones(()))
    assert not_reused(step) == [("old", 4096)]


def test_a_step_that_changes_nothing_uses_all_it_is_given():
    state = {"a": jnp.ones((64, 32)), "b": jnp.ones((64, 32)), "n": jnp.zeros((), jnp.int32)}
    swap = lambda state, batch: ({"a": state["b"], "b": state["a"], "n": state["n"]}, {})
    for step in (lambda state, batch: (state, {}), swap):
        assert not_reused(sf.compile_step(step, state, jnp.ones(()))) == []


def test_a_state_of_one_array_is_used_again():
    step = sf.compile_step(lambda state, batch: (state + batch, {}), jnp.ones(8), jnp.ones(8))
    assert not_reused(step) == []


@pytest.mark.parametrize(
    "name", ["plain", "it's", 'a"b', "a\\b", "a[0]", "a b", "a\nb", "a/b", "größe", "層", ""]
)
def test_any_name_is_found_again(name):
    state = {"params": {name: jnp.ones((8, 8)), "z": jnp.ones(4)}}
    step = lambda state, batch: (jax.tree.map(lambda leaf: leaf * batch, state), {})
    assert not_reused(sf.compile_step(step, state, jnp.ones(()))) == []


def test_many_layers_are_found_again():
    state = [{"w": jnp.ones((4, index + 1))} for index in range(12)]
    step = lambda state, batch: (jax.tree.map(lambda leaf: leaf * batch, state), {})
    assert not_reused(sf.compile_step(step, state, jnp.ones(()))) == []


# What is whole on each device


def test_large_leaves_that_are_whole_are_named():
    wide = lambda key: {"w": jnp.ones((64, 4096)), "b": jnp.zeros(128)}
    loss_fn = lambda params, batch, key: sf.mean((batch["x"] @ params["w"]).mean(-1))
    step, size = sf.make_train_step(loss_fn, TX), 64 * 4096 * 4
    of = lambda dims: whole_leaves(compiled(dims, step, wide))
    names = ["params/w", "opt_state/0/mu/w", "opt_state/0/nu/w"]
    assert of((8, 1, 1, 1)) == [(name, size) for name in names]
    assert of((1, 8, 1, 1)) == of(None) == []


def test_large_is_what_one_says():
    step = compiled((8, 1, 1, 1))
    assert whole_leaves(step) == []
    assert [name for name, _ in whole_leaves(step, W)][:1] == ["params/w"]
    assert whole_leaves(step, W + 1) == []


def test_a_leaf_that_is_cut_over_one_axis_of_several_is_not_whole():
    step = compiled((2, 4, 1, 1))
    assert [name for name, _ in whole_leaves(step, B)][:1] == ["params/b"]
