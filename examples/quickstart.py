"""Train a classifier of handwritten digits with `fit`: progress, evaluation, checkpoints, metrics.

Run it with `python examples/quickstart.py`; it takes a few seconds on two cores. Interrupt it and
run it again to see it resume. It writes to `runs/digits`, or to the directory given.
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
    """Initialize a network with one hidden layer."""
    keys = jax.random.split(key)
    glorot = jax.nn.initializers.glorot_uniform()
    return {
        "hidden": {"w": glorot(keys[0], (64, HIDDEN)), "b": jnp.zeros(HIDDEN)},
        "output": {"w": glorot(keys[1], (HIDDEN, 10)), "b": jnp.zeros(10)},
    }


def loss_fn(params, batch, key, *, dropout=0.0):
    """Return the masked mean of the cross-entropy, with the accuracy as a metric."""
    hidden = jax.nn.relu(batch["image"] @ params["hidden"]["w"] + params["hidden"]["b"])
    kept = jax.random.bernoulli(key, 1 - dropout, hidden.shape)
    logits = (hidden * kept / (1 - dropout)) @ params["output"]["w"] + params["output"]["b"]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    hit = logits.argmax(-1) == batch["label"]
    return sf.mean(nll, batch["mask"]), {"accuracy": sf.mean(hit, batch["mask"])}


def smooth_step(loss):
    """Make a step that evaluates the moving average of the parameters."""
    measure = sf.make_eval_step(loss)
    return lambda state, batch: measure(state._replace(params=sf.get_ema(state)), batch)


def print_evaluation(event):
    """Print the metrics of an evaluation. A hook is a function of an event."""
    if "test/loss" in event.metrics:
        loss, accuracy = (event.metrics[f"test/{name}"] for name in ("loss", "accuracy"))
        print(
            f"step {event.step:4}  test loss {loss:.4f}  test accuracy {accuracy:.4f}", flush=True
        )


def main(run_dir="runs/digits"):
    """Train, evaluate and save, or resume after an interrupt or a kill."""
    digits = load_digits()
    data = {"image": np.float32(digits.data / 16), "label": np.int32(digits.target)}
    rows = np.split(np.random.default_rng(0).permutation(len(digits.target)), [1437])
    train, test = ({name: values[split] for name, values in data.items()} for split in rows)

    batches = sf.batches(train, BATCH, seed=0, epochs=EPOCHS, remainder="pad")
    tx = optax.adamw(optax.cosine_decay_schedule(3e-3, len(batches)))
    tx = sf.ema_params(tx, decay=0.99)
    train_loss = lambda *args: loss_fn(*args, dropout=0.2)

    result = sf.fit(
        sf.make_train_step(train_loss, tx, accumulate=2),
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
        hooks=[sf.progress(), print_evaluation],
    )
    print(f"{result.stop_reason}; see {run_dir}/report.html")


if __name__ == "__main__":
    main(*sys.argv[1:])
