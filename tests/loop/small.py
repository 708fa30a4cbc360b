"""A small state, and a step on it that is compiled once for all tests of the loop."""

import jax
import jax.numpy as jnp
import optax

import stepfold as sf

TX = optax.sgd(0.1)
STEP = sf.make_train_step(lambda params, batch, key: sf.mean((params["w"] - batch["x"]) ** 2), TX)
_INITIAL = sf.init_state({"w": jnp.ones(())}, TX, jax.random.key(0))


def start():
    """Copy the initial state, since a run donates it; `init_state` compiles at each call."""
    return jax.tree.map(jnp.copy, _INITIAL)
