"""Stochastic rounding is right in the mean, and draws the same bits on any mesh.

Each law is checked through `sf.optim.low_precision`, and has mutants that have to fail it.
"""

import functools
import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import stepfold as sf

from . import network

module = importlib.import_module("stepfold.optim.low_precision")

COUNTS, SIGMAS = 4096, 5.0
RNG = np.random.default_rng(0)
MESH = []  # of the state that is trained, for a mutant
right_round, right_bits = module._round, module._random_bits


def stored():
    """Return an optimizer whose state is its last gradient, so that a law sees what is stored."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda grads, *_: (grads, grads)
    )


def round_often(values, counts=COUNTS):
    """Round a tree of values at each of the first updates."""
    tx = sf.optim.low_precision(stored())
    state = tx.init(values)

    @jax.vmap
    def at(count):
        return tx.update(values, state._replace(count=count), values)[1].inner

    return jax.tree.map(lambda x: np.asarray(x, np.float64), at(jnp.arange(counts, dtype=np.int32)))


def neighbours(x):
    """Return the bfloat16 numbers around float32 numbers: towards zero, and away from it."""
    words = np.float32(x).view(np.uint32)
    down = words & np.uint32(0xFFFF0000)
    up = np.where(down == words, words, down + np.uint32(0x10000))
    return down.view(np.float32).astype(np.float64), up.view(np.float32).astype(np.float64)


# Laws


def check_mean():
    values = RNG.normal(size=64) * 10.0 ** RNG.integers(-30, 30, 64)
    values = values.astype(np.float32)
    low, high = neighbours(values)
    rounded = round_often(jnp.asarray(values))
    assert ((rounded == low) | (rounded == high)).all()
    share = (values - low) / (high - low)
    error = ((rounded - low) / (high - low)).mean(0) - share
    assert (abs(error) < SIGMAS * np.sqrt(share * (1 - share) / COUNTS) + 1e-4).all()


def check_independence():
    half = jnp.full((32, 16), 1 + 2.0**-8, jnp.float32)  # halfway between two numbers
    rounded = round_often({"a": half, "b": half})
    a, b = (np.sign(rounded[name] - (1 + 2.0**-8)).reshape(COUNTS, -1) for name in "ab")
    pairs = {
        "one update": (a, np.ones_like(a)),
        "two leaves": (a, b),
        "an update and the next": (a[1:], a[:-1]),
        "two updates": (a[COUNTS // 2 :], a[: COUNTS // 2]),
        "neighbours": (a[:, 1:], a[:, :-1]),
        "rows": (a[:, 16:], a[:, :-16]),
    }
    for name, (x, y) in pairs.items():
        for axis in (None, 0, 1):  # together, over the updates, over the elements
            size = x.size if axis is None else x.shape[axis]
            assert (abs((x * y).mean(axis)) < 1.2 * SIGMAS / math.sqrt(size)).all(), (name, axis)


def check_exactness():
    words = np.arange(1 << 16, dtype=np.uint16)
    every = words.view(jnp.bfloat16.dtype).astype(np.float32)
    tx = sf.optim.low_precision(stored())
    state = tx.init(every)
    for count in range(3):
        state = state._replace(count=jnp.int32(count))
        got = np.asarray(jax.jit(tx.update)(every, state, every)[1].inner)
        finite = ~np.isnan(every)
        assert (got.view(np.uint16)[finite] == words[finite]).all()
        assert np.isnan(got[~finite].astype(np.float32)).all()
        # A NaN with only low bits, and one that overflows into the sign if bits are added.
        odd = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32)
        odd = odd.view(np.float32)
        assert np.isnan(tx.update(odd, tx.init(odd), odd)[1].inner.astype(np.float32)).all()


def adam_states(wrap, grads):
    """Return updates and moments after each gradient."""
    tx = wrap(optax.adam(1e-3))
    params = jnp.zeros_like(grads[0])
    with jax.numpy_dtype_promotion("standard"):

        def step(state, grad):
            updates, state = tx.update(grad, state, params)
            inner = state.inner[0] if hasattr(state, "inner") else state[0]
            return state, (updates, inner.mu, inner.nu)

        found = jax.lax.scan(step, tx.init(params), grads)[1]
    return [np.asarray(x, np.float64) for x in found]


def check_one_step(wrap=sf.optim.low_precision):
    grads = jnp.asarray(RNG.normal(size=(1, 4096)), jnp.float32)
    exact, got = adam_states(lambda tx: tx, grads), adam_states(wrap, grads)
    np.testing.assert_allclose(got[0], exact[0], rtol=1e-6)  # the update is not rounded
    for moment, right in zip(got[1:], exact[1:], strict=True):
        low, high = neighbours(right)
        near = abs(right) * 1e-6
        assert ((abs(moment) >= abs(low) - near) & (abs(moment) <= abs(high) + near)).all()
        assert (moment != right).any()


def check_no_stall(wrap=sf.optim.low_precision):
    """Check that moments follow gradients that become small, and those that become large."""
    scales = np.repeat([1.0, 0.1, 1.0], 4000)[:, None]
    grads = jnp.asarray(scales * np.ones((1, 64)), jnp.float32)
    nu = adam_states(wrap, grads)[2]
    assert (nu >= 0).all()
    for step in (3999, 7999, 11999):
        exact = adam_states(lambda tx: tx, grads)[2][step, 0]
        assert nu[step].mean() == pytest.approx(exact, rel=0.05)


def check_parameters(wrap=sf.optim.low_precision):
    """Check that adding small updates to bfloat16 parameters is right in the mean."""
    tx, step = wrap(optax.sgd(1.0)), 2.0**-12
    grads = jnp.full(4096, step, jnp.bfloat16)
    params = jnp.tile(jnp.array([1.0, -3.0, 0.5, 1e-3], jnp.bfloat16), 1024)

    @jax.jit
    def fold(params):
        def body(carry, _):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            with jax.numpy_dtype_promotion("standard"):
                return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, tx.init(params)), length=256)[0][0]

    moved = np.asarray(fold(params), np.float64) - np.asarray(params, np.float64)
    np.testing.assert_allclose(moved.reshape(-1, 4).mean(0), -256 * step, rtol=0.05)


def check_addition(wrap=sf.optim.low_precision):
    """Check that a sum is one of the neighbours of the exact one, also if terms nearly cancel."""
    draw = lambda: RNG.normal(size=1 << 16) * 10.0 ** RNG.integers(-8, 8, 1 << 16)
    params, grads = jnp.asarray(draw(), jnp.bfloat16), jnp.asarray(draw(), jnp.float32)
    # Every second update leaves little of the parameter.
    near = params.astype(jnp.float32) * (1 + 2.0 ** -RNG.integers(3, 24, 1 << 16)).astype(
        np.float32
    )
    grads = jnp.where(jnp.arange(1 << 16) % 2 == 0, grads, near)
    tx = wrap(optax.sgd(1.0))
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
        got = np.asarray(jax.jit(optax.apply_updates)(params, updates), np.float64)
    low, high = neighbours(np.asarray(params, np.float32) - np.asarray(grads))
    assert ((got == low) | (got == high)).all()


def trained_bits(dims):
    """Train on a mesh, and return the bits of the state; half of the parameters are bfloat16."""
    mesh = sf.make_mesh((*dims, 1, 1), devices=jax.devices()[: math.prod(dims)])
    rng = np.random.default_rng(0)
    MESH[:] = [mesh]
    dtypes = {"a": jnp.float32, "b": jnp.bfloat16}
    params = {name: rng.normal(size=(32, 64)).astype(dtype) for name, dtype in dtypes.items()}
    params["bias"] = np.zeros(7, jnp.bfloat16)  # no number of devices divides it
    tx = sf.optim.low_precision(optax.adamw(0.01))
    state = sf.init_state(params, tx, jax.random.key(0))
    plan = sf.make_sharding(state, mesh, sf.sharding.fsdp(min_size=64))
    state = sf.sharding.place(state, plan)
    if dims[1] > 1:
        assert not state.opt_state.inner[0].nu["a"].is_fully_replicated

    def loss_fn(params, batch, key):
        return sf.mean((jnp.tanh(batch @ params["a"]) @ params["b"].T + params["bias"].sum()) ** 2)

    step = sf.make_train_step(
        loss_fn, tx, precision="f32", grad=sf.sharding.ordered(plan, blocks=8)
    )
    batch = sf.shard_batch(rng.normal(size=(16, 32)).astype(np.float32), mesh)
    options = {"xla_allow_excess_precision": False}
    step = sf.compile_step(step, state, batch, compiler_options=options)
    for _ in range(3):
        state, _ = step(state, batch)
    return network.bits(jax.device_get((state.params, state.opt_state)))


@functools.cache
def bits_of_one_device():
    return trained_bits((1, 1))  # no mutant is another one there


def check_meshes():
    want = bits_of_one_device()
    assert trained_bits((2, 4)) == want


LAWS = [
    *(check_mean, check_independence, check_exactness),
    *(check_one_step, check_no_stall, check_parameters, check_addition),
    pytest.param(check_meshes, marks=pytest.mark.full),
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law(law):
    law()


# Mutants


def nearest(x, _count, _number):
    return x.astype(jnp.bfloat16)


def toward_zero(x, _count, _number):
    words = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(words, jnp.float32).astype(jnp.bfloat16)


def with_added_noise(x, count, number):
    noise = right_bits(x.shape, count, number).astype(jnp.float32) / 2.0**16 - 0.5
    return (x * (1 + noise * 2.0**-7)).astype(jnp.bfloat16)


def without_care_for_nan(x, count, number):
    words = jax.lax.bitcast_convert_type(x, jnp.uint32) + right_bits(x.shape, count, number)
    return jax.lax.bitcast_convert_type((words >> 16).astype(jnp.uint16), jnp.bfloat16)


def of_eight_bits(shape, count, number):
    return right_bits(shape, count, number) >> 8


def same_at_each_update(shape, count, number):
    return right_bits(shape, jnp.zeros_like(count), number)


def same_in_each_leaf(shape, count, number):
    return right_bits(shape, count, 0)


def same_in_each_row(shape, count, number):
    return jnp.broadcast_to(right_bits(shape[-1:], count, number), shape)


def shifted_by_the_update(shape, count, number):
    position = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
    return module._mix(position + count.astype(jnp.uint32) + jnp.uint32(number)) >> 16


def of_the_shard(shape, count, number):
    mesh, (*rest, last) = MESH[0], shape
    size = mesh.shape["fsdp"]
    if last % size:
        return right_bits(shape, count, number)
    return jax.shard_map(
        lambda count: right_bits((*rest, last // size), count, number),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(*[None] * len(rest), "fsdp"),
        check_vma=False,
    )(count)


def cast(tx):
    """Cast the moments to bfloat16 between updates, the naive way."""
    wide = lambda tree: optax.tree.cast(tree, jnp.float32)

    def update(grads, state, params):
        updates, state = tx.update(wide(grads), wide(state), params)
        return updates, optax.tree.cast(state, jnp.bfloat16)

    return optax.GradientTransformation(
        lambda params: optax.tree.cast(tx.init(params), jnp.bfloat16), update
    )


def computing_in_bfloat16(tx):
    """Let the optimizer itself compute in bfloat16."""
    low = lambda tree: optax.tree.cast(tree, jnp.bfloat16)
    return optax.GradientTransformation(
        lambda params: tx.init(low(params)),
        lambda grads, state, params: tx.update(low(grads), state, low(params)),
    )


def with_updates_in_bfloat16(tx):
    right = sf.optim.low_precision(tx)

    def update(grads, state, params):
        updates, state = right.update(grads, state, params)
        return optax.tree.cast(updates, jnp.bfloat16), state

    return optax.GradientTransformation(right.init, update)


def rounding_the_updates(tx):
    """Round the update, and not the sum."""
    right = sf.optim.low_precision(tx)

    def update(grads, state, params):
        updates, new = tx.update(optax.tree.cast(grads, jnp.float32), state.inner, params)
        updates = jax.tree.map(lambda u: right_round(u, state.count, 9), updates)
        return updates, state._replace(count=state.count + 1, inner=new)

    return optax.GradientTransformation(right.init, update)


MUTANTS = [
    *((nearest, law) for law in (check_mean, check_no_stall, check_parameters)),
    *((toward_zero, law) for law in (check_mean, check_no_stall, check_parameters)),
    *((with_added_noise, law) for law in (check_mean, check_exactness)),
    (without_care_for_nan, check_exactness),
    *((of_eight_bits, law) for law in (check_mean, check_no_stall)),
    *((same_at_each_update, law) for law in (check_mean, check_independence)),
    *((same_in_each_leaf, check_independence), (same_in_each_row, check_independence)),
    (shifted_by_the_update, check_independence),
    pytest.param(of_the_shard, check_meshes, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("mutant", "law"), MUTANTS, ids=lambda x: x.__name__)
def test_another_rounding_fails_the_law(mutant, law, monkeypatch):
    replaced = "_random_bits" if "shape" in mutant.__code__.co_varnames[:1] else "_round"
    monkeypatch.setattr(module, replaced, mutant)
    with pytest.raises(AssertionError):
        law()


@pytest.mark.parametrize(
    ("wrap", "law"),
    [
        *((cast, check_no_stall), (computing_in_bfloat16, check_no_stall)),
        *((computing_in_bfloat16, check_one_step), (with_updates_in_bfloat16, check_addition)),
        *((rounding_the_updates, check_parameters), (rounding_the_updates, check_addition)),
    ],
    ids=lambda x: x.__name__,
)
def test_another_wrapper_fails_the_law(wrap, law):
    with pytest.raises(AssertionError):
        law(wrap)
