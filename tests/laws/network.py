"""A small network with dropout and running statistics, and the bits of a tree, for the laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf

EXAMPLES, WIDTH, HIDDEN = 16, 3, 5


def init(key):
    first, second = jax.random.split(key)
    params = {
        "in": jax.random.normal(first, (WIDTH, HIDDEN)),
        "out": jax.random.normal(second, (HIDDEN,)),
    }
    return params, {"seen": jnp.zeros((), jnp.int32), "mean": jnp.zeros(HIDDEN)}


def stateful_loss(params, batch, key, model_state):
    hidden = jnp.tanh(batch["x"] @ params["in"])
    centre = 0.9 * model_state["mean"] + 0.1 * hidden.mean(0)
    model_state = {"seen": model_state["seen"] + 1, "mean": centre}
    kept = jax.random.bernoulli(key, 0.8, hidden.shape).astype(hidden.dtype)
    error = ((hidden - centre) * kept @ params["out"] - batch["y"]) ** 2
    terms = {"fit": sf.mean(error, batch["mask"]), "weight": 1e-2 * (params["out"] ** 2).sum()}
    return terms, {"close": sf.mean(error < 1, batch["mask"])}, model_state


def loss(params, batch, _key):
    hidden = jnp.tanh(batch["x"] @ params["in"])
    predicted = (hidden @ params["out"]).astype(batch["y"].dtype)
    error = (predicted - batch["y"]) ** 2
    terms = {"fit": sf.mean(error, batch["mask"]), "weight": 1e-2 * (params["out"] ** 2).sum()}
    return terms, {"close": sf.mean(error < 1, batch["mask"])}


def batch(seed, examples=EXAMPLES):
    rng = np.random.default_rng(seed)
    return {
        "x": jnp.asarray(rng.normal(size=(examples, WIDTH)), jnp.float32),
        "y": jnp.asarray(rng.normal(size=examples), jnp.float32),
        "mask": jnp.asarray(rng.uniform(size=examples) < 0.7),
    }


def bits(tree):
    """Give every leaf's bytes, so that NaNs and signed zeros count."""
    raw = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(tree)
    ]
    return [np.asarray(x).tobytes() for x in raw]


@pytest.fixture
def compile_fast():
    """Compile in half the time, where results are equal up to rounding."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
