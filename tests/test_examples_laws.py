"""The examples keep the laws that `stepfold.testing` checks for users."""

import functools
import importlib
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold import testing

pytestmark = pytest.mark.usefixtures("standard_promotion")
EXAMPLES = Path(__file__).parent.parent / "examples"
RANDOM = np.random.default_rng(0)
KEY = jax.random.key(0)
LABELS = RANDOM.integers(10, size=6).astype(np.int32)
DIGITS = {"image": RANDOM.uniform(size=(6, 64)).astype(np.float32), "label": LABELS}
TEXT = RANDOM.integers(97, 120, size=(6, 65))


@pytest.fixture(autouse=True)
def import_examples(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


BATCHES = {
    "quickstart": DIGITS | {"mask": np.arange(6) < 5},
    "own_loop": TEXT.astype(np.uint8),
    "poisoned_data": DIGITS,
    "per_example_gradients": DIGITS | {"mask": np.arange(6) < 5},
    "lora": DIGITS | {"mask": np.arange(6) < 5},
}
LAWS = ["deterministic", "finite", "order", "split", "padding", "slope", "bf16"]


@pytest.mark.full
@pytest.mark.parametrize("name", BATCHES)
def test_the_loss_of_an_example_keeps_the_laws(name):
    example = importlib.import_module(name)
    batch = BATCHES[name]
    kept = testing.check_loss(example.loss_fn, example.init(KEY), batch)
    has_mask = isinstance(batch, dict) and "mask" in batch
    assert kept == [law for law in LAWS if law != "padding" or has_mask]


@pytest.mark.full
def test_dropout_of_the_quickstart_draws_from_its_key():
    example = importlib.import_module("quickstart")
    loss_fn = functools.partial(example.loss_fn, dropout=0.2)
    kept = testing.check_loss(loss_fn, example.init(KEY), BATCHES["quickstart"])
    assert kept == ["deterministic", "finite", "bf16"]


def test_the_batches_of_the_examples_are_functions_of_their_index():
    make = lambda: sf.batches(DIGITS, 4, seed=0, epochs=3, remainder="pad")
    assert testing.check_batches(make) == ["again", "form", "resume", "source"]
    transformer = importlib.import_module("sharded_transformer")
    assert testing.check_batches(lambda: transformer.batches(seed=0)) == ["again", "form"]


@pytest.mark.full
def test_the_step_of_the_sharded_transformer_is_the_same_on_each_mesh():
    example = importlib.import_module("sharded_transformer")
    meshes = [sf.make_mesh((1, -1, 2, 1)), sf.make_mesh((1, -1, 1, 1))]
    tx = optax.sgd(0.1)
    state = sf.init_state(example.init, tx, KEY)
    batch = next(example.batches(seed=0))
    for mesh in meshes:
        step = sf.make_train_step(example.make_loss(mesh), tx)
        testing.check_layouts(step, state, batch, [mesh], rules=example.RULES)


@pytest.mark.full
def test_a_quickstart_that_is_cut_ends_as_one_that_is_not():
    testing.check_resume(importlib.import_module("quickstart").main)
