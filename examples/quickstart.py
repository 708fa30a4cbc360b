"""Train a classifier of handwritten digits, in a loop of one's own.

Run it with `python examples/quickstart.py`; it takes some seconds on two cores.
"""

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


def batches(data, order):
    """Cut the examples into batches of one size; the last one is filled up and masked."""
    for start in range(0, len(order), BATCH):
        rows = np.resize(order[start : start + BATCH], BATCH)
        mask = np.arange(BATCH) < len(order) - start
        yield {name: values[rows] for name, values in data.items()} | {"mask": mask}


def main():
    """Train, print the loss as it falls, and measure on what was not trained on."""
    digits = load_digits()
    data = {"image": np.float32(digits.data / 16), "label": np.int32(digits.target)}
    rng = np.random.default_rng(0)
    train, test = np.split(rng.permutation(len(digits.target)), [1437])

    steps = EPOCHS * -(-len(train) // BATCH)
    tx = sf.ema_params(optax.adamw(optax.cosine_decay_schedule(3e-3, steps)), decay=0.99)
    state = sf.init_state(init, tx, jax.random.key(0))
    dropping = lambda *args: loss_fn(*args, dropout=0.2)
    step = jax.jit(sf.make_train_step(dropping, tx, accumulate=2), donate_argnums=0)

    for epoch in range(EPOCHS):
        for batch in batches(data, rng.permutation(train)):
            state, metrics = step(state, batch)
        if epoch % 5 == 0 or epoch == EPOCHS - 1:
            print(f"step {int(state.step):4}  loss {float(metrics['loss'].compute()):.4f}")

    evaluate = jax.jit(sf.make_eval_step(loss_fn))
    smooth = state._replace(params=sf.get_ema(state))
    total = None
    for batch in batches(data, test):
        accuracy = evaluate(smooth, batch)["accuracy"]
        total = accuracy if total is None else total.merge(accuracy)
    print(f"test accuracy {float(total.compute()):.4f} over {int(total.count)} digits")


if __name__ == "__main__":
    main()
