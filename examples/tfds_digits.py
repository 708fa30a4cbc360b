"""Prepare a dataset of tensorflow_datasets, and train on it without TensorFlow.

Run it with `python examples/tfds_digits.py`; it takes a few seconds on two cores. Any dataset of
the catalog is read in the same way if it was prepared with `file_format="array_record"`.
"""

import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tensorflow_datasets as tfds
from sklearn.datasets import load_digits

import stepfold as sf

BATCH, EPOCHS = 128, 40


class Digits(tfds.core.GeneratorBasedBuilder):
    """The 1,797 handwritten digits of scikit-learn."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        image = tfds.features.Tensor(shape=(8, 8), dtype=np.float32)  # `Image` needs TensorFlow
        features = {"image": image, "label": tfds.features.ClassLabel(num_classes=10)}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, _):
        train, test = np.split(np.random.default_rng(0).permutation(1797), [1437])
        return {"train": self._generate_examples(train), "test": self._generate_examples(test)}

    def _generate_examples(self, rows):
        digits = load_digits()
        for i in rows.tolist():
            yield i, {"image": np.float32(digits.images[i] / 16), "label": digits.target[i]}


def noisy(example, rng):
    """Add noise that depends only on the seed, the epoch and the index of the example."""
    noise = rng.normal(scale=0.1, size=(8, 8)).astype(np.float32)
    return {**example, "image": example["image"] + noise}


def init(key):
    """Initialize a network with one hidden layer."""
    keys = jax.random.split(key)
    glorot = jax.nn.initializers.glorot_uniform()
    return {
        "hidden": {"w": glorot(keys[0], (64, 256)), "b": jnp.zeros(256)},
        "output": {"w": glorot(keys[1], (256, 10)), "b": jnp.zeros(10)},
    }


def loss_fn(params, batch, key):
    """Return the mean of the cross-entropy over rows that are not padding."""
    del key
    image = batch["image"].reshape(len(batch["image"]), 64)
    hidden = jax.nn.relu(image @ params["hidden"]["w"] + params["hidden"]["b"])
    logits = hidden @ params["output"]["w"] + params["output"]["b"]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    hit = logits.argmax(-1) == batch["label"]
    return sf.mean(nll, batch["mask"]), {"accuracy": sf.mean(hit, batch["mask"])}


def main():
    """Prepare the dataset, train in a new order each epoch, and evaluate on every test digit."""
    with tempfile.TemporaryDirectory() as folder:
        Digits(data_dir=folder, file_format="array_record").download_and_prepare()
        train = sf.tfds_source("digits", "train", data_dir=folder)
        test = sf.tfds_source("digits:1.0.0", "test", data_dir=folder)
        print(train, test, "TensorFlow" if "tensorflow" in sys.modules else "no TensorFlow")

        tx = optax.adamw(3e-3)
        state = sf.init_state(init, tx, jax.random.key(0))
        step = jax.jit(sf.make_train_step(loss_fn, tx), donate_argnums=0)
        options = {"seed": 0, "epochs": EPOCHS, "remainder": "pad", "transform": noisy}
        for batch in sf.batches(train, BATCH, **options):
            state, metrics = step(state, batch)
            if state.step % 80 == 0:
                print(f"step {int(state.step):4}  loss {float(metrics['loss'].compute()):.4f}")

        evaluate = jax.jit(sf.make_eval_step(loss_fn))
        total = None
        for batch in sf.batches(test, BATCH, epochs=1, remainder="pad"):  # the last has 104 of 128
            accuracy = evaluate(state, batch)["accuracy"]
            total = accuracy if total is None else total.merge(accuracy)
        print(f"test accuracy {float(total.compute()):.4f} over {int(total.count)} digits")


if __name__ == "__main__":
    main()
