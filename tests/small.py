"""What most tests train: examples, a loss, a step that is compiled once, and a state to start from.

The model is the number `w`, which moves to the mean of `x`. Import what a test needs from here, and
define only what its claim depends on.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.hooks.objects import as_hook
from stepfold.loop.hook import Hooks

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


class Shown:
    """A hook or sink that is shown events one by one, with its state after them."""

    def __init__(self, hook):
        self.is_sink = isinstance(hook, sf.Sink)
        self.hook = hook if self.is_sink else as_hook(hook)
        self._hooks = Hooks([], [hook]) if self.is_sink else Hooks([self.hook])
        self.state = self.hook.init

    def __call__(self, event):
        """Show it an event; return what a hook returned."""
        if self.is_sink:
            self.state = self.hook.write(self.state, event)
            return None
        self.state, returned = self.hook.update(self.state, event)
        return returned

    def start(self, step=0, total=None):
        """Show it that a run begins after `step`; return what a hook returned."""
        if self.is_sink:
            return self.hook.open(step, total, step)
        event = sf.Event(step, total, {}, None, kind="start")
        return self(event) if "start" in self.hook.also else None

    def save(self):
        """Return what a checkpoint keeps of it."""
        return json.loads(json.dumps(self._hooks.to_saved((self.state,))))

    def resume(self, saved, step=0, total=None):
        """Continue from a checkpoint of `step`; return what a hook returned."""
        (self.state,) = self._hooks.from_saved(saved, (self.state,))
        return self.start(step, total)


def ones(shape=(), dtype=np.float32):
    """Return an array without compiling, which modules should not do while they are imported."""
    return jax.device_put(np.ones(shape, dtype))


def full_but(default, cases):
    """Mark the cases of a grid as slow proofs, but for those that run by default."""
    given = lambda case: case if isinstance(case, tuple) else (case,)
    is_slow = lambda case: case not in default
    return [pytest.param(*given(c), marks=[pytest.mark.full] * is_slow(c)) for c in cases]
