"""Train a classifier of handwritten digits with `fit`: a bar, evaluations, checkpoints, metrics.

Run it with `python examples/quickstart.py`; it takes some seconds on two cores. Interrupt it, and
run it again. What it prints and keeps is in `runs/digits`, or in the folder given.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import stepfold as sf

HIDDEN, BATCH, EPOCHS = 256, 128, 40


def init(key):
    """Make the parameters of a network with one hidden layer."""
    keys = jax.random.split(key)
    glorot = jax.nn.initializers.glorot_uniform()
    return {
        "hidden": {"w": glorot(keys[0], (64, HIDDEN)), "b": jnp.zeros(HIDDEN)},
        "output": {"w": glorot(keys[1], (HIDDEN, 10)), "b": jnp.zeros(10)},
    }


def loss_fn(params, batch, key, *, dropout=0.0):
    """Take the masked mean of the cross-entropy, and of what is right as the accuracy."""
    hidden = jax.nn.relu(batch["image"] @ params["hidden"]["w"] + params["hidden"]["b"])
    kept = jax.random.bernoulli(key, 1 - dropout, hidden.shape)
    logits = (hidden * kept / (1 - dropout)) @ params["output"]["w"] + params["output"]["b"]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    hit = logits.argmax(-1) == batch["label"]
    return sf.mean(nll, batch["mask"]), {"accuracy": sf.mean(hit, batch["mask"])}


def smooth_step(loss):
    """Make a step that measures the average of the parameters, which the optimizer keeps."""
    measure = sf.make_eval_step(loss)
    return lambda state, batch: measure(state._replace(params=sf.get_ema(state)), batch)


def tell(event):
    """Print what an evaluation found: a hook is a function of an event."""
    if "test/loss" in event.metrics:
        loss, accuracy = (event.metrics[f"test/{name}"] for name in ("loss", "accuracy"))
        print(
            f"step {event.step:4}  test loss {loss:.4f}  test accuracy {accuracy:.4f}", flush=True
        )


def main(run_dir="runs/digits"):
    """Train, evaluate and save; interrupted, or killed, and run again, it goes on where it was."""
    digits = load_digits()
    data = {"image": np.float32(digits.data / 16), "label": np.int32(digits.target)}
    rows = np.split(np.random.default_rng(0).permutation(len(digits.target)), [1437])
    train, test = ({name: values[some] for name, values in data.items()} for some in rows)

    batches = sf.batches(train, BATCH, seed=0, epochs=EPOCHS, remainder="pad")
    tx = optax.adamw(optax.cosine_decay_schedule(3e-3, len(batches)))
    tx = sf.ema_params(tx, decay=0.99)
    dropping = lambda *args: loss_fn(*args, dropout=0.2)

    result = sf.fit(
        sf.make_train_step(dropping, tx, accumulate=2),
        sf.init_state(init, tx, jax.random.key(0)),
        batches,
        run_dir=run_dir,
        evaluation=sf.Evaluation(
            smooth_step(loss_fn),
            lambda: sf.batches(test, BATCH, epochs=1, remainder="pad"),
            every_epochs=5,
            name="test",
        ),
        checkpoints=sf.Checkpoints(every_epochs=5, keep=2, best="test/accuracy", mode="max"),
        hooks=[sf.progress(), tell],
    )
    print(f"{result.stop_reason}; look at {run_dir}/report.html")


if __name__ == "__main__":
    main(*sys.argv[1:])
