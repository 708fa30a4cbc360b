"""What most tests train: examples, a loss, a step that is compiled once, and a state to start from.

The model is the number `w`, which moves to the mean of `x`. Import what a test needs from here, and
define only what its claim depends on.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf

TX = optax.sgd(0.1)


def examples(count=16):
    """Return `count` examples {"x"}, all different."""
    return {"x": np.linspace(-1.0, 2.0, count, dtype=np.float32)}


def loss_fn(params, batch, key):
    return sf.mean((params["w"] - batch["x"]) ** 2)


def masked_loss_fn(params, batch, key):
    """Return the same loss for batches with a mask, as `sf.batches(remainder="pad")` makes them."""
    return sf.mean((params["w"] - batch["x"]) ** 2, batch["mask"])


def noisy_loss_fn(params, batch, key):
    """Return a loss that depends on the key of the step, so that a wrong key shows."""
    noise = jax.random.normal(key, batch["x"].shape)
    return sf.mean((params["w"] - batch["x"] + noise) ** 2)


STEP = sf.make_train_step(loss_fn, TX)
EVAL_STEP = sf.make_eval_step(loss_fn)


@functools.cache
def _initial():
    return sf.init_state({"w": jnp.ones(())}, TX, jax.random.key(0))


def start():
    """Copy the initial state, since a run donates it; `init_state` compiles at each call."""
    return jax.tree.map(jnp.copy, _initial())


def batches(size=4, **options):
    """Return resumable batches of the examples, in a shuffled order."""
    return sf.batches(examples(), size, **{"seed": 0, **options})


class Counter:
    """A stream of {"x"}, numbers from 0, that knows its position."""

    def __init__(self, count):
        self.count, self.next = count, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == self.count:
            raise StopIteration
        self.next += 1
        return {"x": np.int64(self.next - 1)}

    def get_state(self):
        return self.next

    def set_state(self, state):
        self.next = state


def ones(shape=(), dtype=np.float32):
    """Return an array without compiling, which modules should not do while they are imported."""
    return jax.device_put(np.ones(shape, dtype))


def full_but(default, cases):
    """Mark the cases of a grid as slow proofs, but for those that run by default."""
    given = lambda case: case if isinstance(case, tuple) else (case,)
    is_slow = lambda case: case not in default
    return [pytest.param(*given(c), marks=[pytest.mark.full] * is_slow(c)) for c in cases]
