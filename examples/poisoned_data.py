"""Train over a dataset with damaged stretches: go back, skip them, and continue.

Run it with `python examples/poisoned_data.py`; it takes a few seconds on two cores. Two stretches
of the digits are damaged: images that were never scaled, whose loss is a spike, and a NaN. Where
the loss shows it, `fit` restores the checkpoint before, skips the batches, and continues. The
skipped ranges are in `run.json`, in the report and in the checkpoints, so that a resume skips them
too. The result has the bits of a run that skipped them from the start.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import stepfold as sf

BATCH, EPOCHS = 16, 2


def init(key):
    """Initialize a network with one hidden layer."""
    keys = jax.random.split(key)
    glorot = jax.nn.initializers.glorot_uniform()
    return {"hidden": glorot(keys[0], (64, 128)), "output": glorot(keys[1], (128, 10))}


def loss_fn(params, batch, _key):
    """Return the mean cross-entropy, with the accuracy as a metric."""
    logits = jax.nn.relu(batch["image"] @ params["hidden"]) @ params["output"]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return sf.mean(nll), {"accuracy": sf.mean(logits.argmax(-1) == batch["label"])}


def damaged_digits():
    """Read the digits, of which batches 50 to 52 are not scaled, and one of batch 70 is a NaN."""
    digits = load_digits()
    image, label = np.float32(digits.data / 16), np.int32(digits.target)
    train = {"image": np.tile(image[:1440], (EPOCHS, 1)), "label": np.tile(label[:1440], EPOCHS)}
    train["image"][50 * BATCH : 53 * BATCH] *= 10_000
    train["image"][70 * BATCH + 3, 5] = np.nan
    return train, {"image": image[1440:], "label": label[1440:]}


def train(batches, run_dir, hooks=()):
    """Train on all batches, with a checkpoint every 20 steps."""
    tx = optax.adam(1e-2)
    return sf.fit(
        sf.make_train_step(loss_fn, tx),
        sf.init_state(init, tx, jax.random.key(0)),
        batches,
        run_dir=run_dir,
        checkpoints=sf.Checkpoints(every=20),
        hooks=hooks,
        log_every=5,
    )


def main(run_dir="runs/poisoned"):
    """Train with and without going back, and compare with a run that knew what to skip."""
    data, test = damaged_digits()
    batches = lambda: sf.batches(data, BATCH, epochs=1)
    measure = sf.make_eval_step(loss_fn)
    accuracy = lambda state: sf.evaluate(measure, state, [test])["accuracy"]

    plain = train(batches(), f"{run_dir}/plain")
    print(f"without going back: {plain.stop_reason}; test accuracy {accuracy(plain.state):.3f}")

    hooks = [
        sf.hooks.on_spike(action="go_back", window=20, deviations=50.0, skip=3),
        sf.hooks.on_nonfinite(action="go_back"),
    ]
    result = train(batches(), f"{run_dir}/going_back", hooks)
    for entry in json.loads(Path(run_dir, "going_back/run.json").read_text())["rollbacks"]:
        print(f"skipped batches {entry['skipped']}: {entry['why']}")
    print(f"going back: {result.stop_reason}; test accuracy {accuracy(result.state):.3f}")

    known = train(batches().without([(50, 53), (70, 71)]), f"{run_dir}/known")
    same = jax.tree.map(jnp.array_equal, result.state.params, known.state.params)
    print(f"the same bits as a run that knew: {all(jax.tree.leaves(same))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
