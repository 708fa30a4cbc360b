"""What every model library is put through: digits to learn, to be measured on, to come back to."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits
from tests.laws.network import bits

import stepfold as sf

_DIGITS = load_digits()
_DATA = {"image": np.float32(_DIGITS.data / 16), "label": np.int32(_DIGITS.target)}
TRAIN = {name: values[:1500] for name, values in _DATA.items()}
TEST = {name: values[1500:] for name, values in _DATA.items()}
STEPS, SAVED = 60, 25
TX, KEY = optax.adam(5e-3), jax.random.key(0, impl="rbg")  # whose draws compile in no time


class Client(NamedTuple):
    """A model of some library, as stepfold takes it.

    Attributes:
      start: what `init_state` is given: a function of a key, or a tree of the library's own arrays.
      loss: the loss function to train with, which carries a model state.
      measure: the one to evaluate with: no dropout, and the running statistics.
    """

    start: Any
    loss: Callable[..., Any]
    measure: Callable[..., Any]

    def state(self):
        return sf.init_state(self.start, TX, KEY, stateful=True)


def score(logits, batch):
    """Give the loss and the metrics of logits, of which some examples may be padding."""
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    hit = logits.argmax(-1) == batch["label"]
    mask = batch.get("mask")
    return sf.mean(nll, mask), {"accuracy": sf.mean(hit, mask)}


def digits(**options):
    return sf.batches(TRAIN, 100, **{"seed": 0, **options})


def measured(eval_step, state, batch_size):
    test = sf.batches(TEST, batch_size, epochs=1, remainder="pad")
    return sf.evaluate(eval_step, state, test)


class Trained(NamedTuple):
    """A client that has learned: its step and how often that was traced, its state, its run."""

    client: Client
    step: Callable[..., Any]
    traced: list[int]
    measure: Callable[..., Any]
    state: sf.TrainState
    history: Any
    folder: Any


def train(client, folder):
    traced = []

    def loss(*args):
        traced.append(len(traced))
        return client.loss(*args)

    step = jax.jit(sf.make_train_step(loss, TX, stateful=True), donate_argnums=0)
    result = sf.fit(
        step,
        client.state(),
        digits(),
        steps=STEPS,
        run_dir=folder,
        checkpoints=sf.Checkpoints(every=SAVED, keep=None),
    )
    measure = jax.jit(sf.make_eval_step(client.measure, stateful=True))
    return Trained(client, step, traced, measure, result.state, result.history, folder)


def check_it_learned(trained):
    curve = trained.history["train/loss"]
    assert curve[0] > 1
    assert curve[-1] < 0.25
    found = measured(trained.measure, trained.state, len(TEST["label"]))
    assert found["loss"] < 0.5
    assert found["accuracy"] > 0.85


def check_it_is_measured_alike(trained):
    """Neither dropout nor the statistics of a batch have a part in a measure, nor has padding."""
    whole = measured(trained.measure, trained.state, len(TEST["label"]))
    for name, value in measured(trained.measure, trained.state, 64).items():
        np.testing.assert_allclose(value, whole[name], rtol=1e-5)


def check_it_goes_on(trained):
    """A loop of one's own comes from the middle to the same bits, by a step traced once for all."""
    restored = sf.restore(
        trained.folder / "checkpoints", jax.eval_shape(trained.client.state), step=SAVED
    )
    batches = digits()
    batches.set_state(restored.data)
    state = restored.state
    while int(state.step) < STEPS:
        state, _ = trained.step(state, next(batches))
    assert bits(state) == bits(trained.state)
    assert trained.traced == [0]


def check_the_model_is_left_whole(trained):
    """What the library owns was copied, and not donated to the step."""
    arrays = [x for x in jax.tree.leaves(trained.client.start) if isinstance(x, jax.Array)]
    assert arrays or callable(trained.client.start)
    assert not any(array.is_deleted() for array in arrays)
