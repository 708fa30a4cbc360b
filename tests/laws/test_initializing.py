"""A state is that of an init function compiled for itself, whatever was initialized before."""

import random
from contextlib import ExitStack

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import stepfold as sf

from .network import bits

pytestmark = pytest.mark.not_optimized

MESHES = [
    jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=devices)
    for devices in (jax.devices()[:4], jax.devices()[4:], jax.devices()[3::-1])
]

CHOICES = {
    "seed": [0, 1],
    "constant": [0.0, -0.0, 1.0, np.nan],
    "size": [4, 8],
    "dtype": ["float32", "bfloat16"],
    "name": ["w", "v"],
    "optimizer": [optax.sgd, optax.adam, optax.adagrad],
    "source": ["function", "tree", "constraint", "plan"],
    "mesh": MESHES,
    "axis": [None, "x"],
    "key": [jax.random.key, jax.random.PRNGKey],
    "context": ["none", "x64", "matmul", "device", "impl"],
}


def initialize(draw, *, apart):
    """Initialize a state; with `apart`, by a program that jit compiles for this call alone."""
    dtype, spec = jnp.dtype(draw["dtype"]), PartitionSpec(draw["axis"])
    placement = NamedSharding(draw["mesh"], spec)

    def init(key):
        rows = jax.random.normal(key, (draw["size"], draw["size"]))
        if draw["source"] == "constraint":
            rows = jax.lax.with_sharding_constraint(rows, placement)
        constant = jnp.asarray(np.full(draw["size"], draw["constant"], np.float32))
        return {draw["name"]: (rows @ rows).astype(dtype), "constant": constant.astype(dtype)}

    with ExitStack() as stack:
        if draw["context"] == "x64":
            stack.enter_context(jax.enable_x64(True))
        if draw["context"] == "matmul":
            stack.enter_context(jax.default_matmul_precision("bfloat16"))
        if draw["context"] == "device":
            stack.enter_context(jax.default_device(jax.devices()[5]))
        if draw["context"] == "impl":
            stack.enter_context(jax.default_prng_impl("rbg"))
        key, tx = draw["key"](draw["seed"]), draw["optimizer"](0.1)
        source, sharding = init, None
        if draw["source"] == "tree":
            source = jax.tree.map(np.asarray, jax.jit(init)(key))
        if draw["source"] == "plan":
            shape = jax.eval_shape(lambda key: sf.init_state(init, tx, key), key)
            sharding = jax.tree.map(
                lambda leaf: placement if draw["size"] in leaf.shape else placement.update(spec=()),
                shape,
            )
        if not apart:
            return sf.init_state(source, tx, key, sharding=sharding)
        build = lambda key: sf.init_state(source, tx, key, sharding=sharding)
        return jax.jit(build, out_shardings=sharding)(key)


def is_weak(leaf):
    return getattr(leaf, "weak_type", False)


def test_no_state_is_that_of_an_earlier_program(count):
    rng = random.Random(0)
    draw = {name: rng.choice(values) for name, values in CHOICES.items()}
    for _ in range(count(3, 600)):
        changed = rng.choice([*CHOICES])  # one thing at a time, so that programs are almost equal
        draw |= {changed: rng.choice(CHOICES[changed])}
        got, want = initialize(draw, apart=False), initialize(draw, apart=True)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert bits(got) == bits(want)
        for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert (mine.dtype, is_weak(mine)) == (other.dtype, is_weak(other))
            assert mine.sharding.is_equivalent_to(other.sharding, mine.ndim)
            assert mine.committed == other.committed
