"""A grain pipeline: stepfold uses its batches and its position."""

import grain
import jax
import numpy as np
import optax
import pytest
from tests.laws.network import bits
from tests.small import full_but

import stepfold as sf

from .course import TRAIN
from .test_optimizers import START, loss_fn

TX = optax.adam(2e-2)
STEP = sf.make_train_step(loss_fn, TX)


class Digits:
    """A source of examples, as grain asks for one."""

    def __len__(self):
        return len(TRAIN["label"])

    def __getitem__(self, index):
        return {name: values[index] for name, values in TRAIN.items()}

    def __repr__(self):
        return "Digits()"  # by which a loader knows that it goes on with the same source


class Shifted(grain.transforms.RandomMap):
    """Move an image by a pixel, or not."""

    def random_map(self, element, rng):
        image = np.roll(element["image"].reshape(8, 8), rng.integers(-1, 2), axis=1)
        return {**element, "image": image.ravel()}


def lazily():
    dataset = grain.MapDataset.source(Digits()).seed(0).shuffle().repeat()
    return iter(dataset.random_map(Shifted()).to_iter_dataset().batch(50, drop_remainder=True))


def by_a_loader():
    sampler = grain.samplers.IndexSampler(len(Digits()), shuffle=True, seed=0, num_epochs=2)
    operations = [Shifted(), grain.transforms.Batch(50, drop_remainder=True)]
    return iter(grain.DataLoader(data_source=Digits(), sampler=sampler, operations=operations))


def run(batches, steps, **options):
    state = sf.init_state(START, TX, jax.random.key(0))
    return sf.fit(STEP, state, batches, steps=steps, **options)


@pytest.mark.full
@pytest.mark.parametrize("batches", full_but([lazily], [lazily, by_a_loader]))
def test_run_resumes_bit_for_bit_at_the_position_of_grain(batches, tmp_path):
    whole = run(batches(), 12, log_every=3)
    for steps in (7, 12):
        checkpoints = sf.Checkpoints(every=5)
        resumed = run(batches(), steps, run_dir=tmp_path, checkpoints=checkpoints)
    assert resumed.resumed == 7
    assert bits(resumed.state) == bits(whole.state)
    curve = whole.history["train/loss"]
    assert curve[-1] < curve[0]
