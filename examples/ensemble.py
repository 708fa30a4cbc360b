"""Train an ensemble of six networks with `jax.vmap` over states, and average their predictions.

Run it with `python examples/ensemble.py`; it takes a few seconds on two cores. A state is a pytree
and a step is a function: six states are one state with a leading axis, and the step is mapped over
it. Each member has its own weights and its own learning rate; all see the same batches.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import stepfold as sf

MEMBERS, HIDDEN, BATCH, EPOCHS, TRAIN = 6, 24, 50, 40, 200


def init(key):
    """Initialize a network with one hidden layer."""
    keys = jax.random.split(key)
    glorot = jax.nn.initializers.glorot_uniform()
    return {
        "hidden": {"w": glorot(keys[0], (64, HIDDEN)), "b": jnp.zeros(HIDDEN)},
        "output": {"w": glorot(keys[1], (HIDDEN, 10)), "b": jnp.zeros(10)},
    }


def model(params, image):
    """Return the logits."""
    hidden = jax.nn.relu(image @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["output"]["w"] + params["output"]["b"]


def loss_fn(params, batch, _key):
    """Return the masked mean of the cross-entropy."""
    logits = model(params, batch["image"])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return sf.mean(nll, batch["mask"])


def measure(states, batch):
    """Measure the accuracy of each member and of the mean of their probabilities."""
    probabilities = jax.nn.softmax(
        jax.vmap(model, in_axes=(0, None))(states.params, batch["image"])
    )
    accuracy = lambda p: sf.mean(p.argmax(-1) == batch["label"], batch["mask"])
    members = {f"member {i}": accuracy(probabilities[i]) for i in range(MEMBERS)}
    return members | {"ensemble": accuracy(probabilities.mean(0))}


def optimizer(rate):
    """Make an optimizer with the learning rate in its state, so that `vmap` maps over it."""
    return optax.inject_hyperparams(optax.adamw)(rate)


def init_member(key, rate):
    """Initialize the state of one member."""
    return sf.init_state(init, optimizer(rate), key)


def main(epochs=EPOCHS):
    """Train all members at once and one of them alone, and compare."""
    digits = load_digits()
    data = {"image": np.float32(digits.data / 16), "label": np.int32(digits.target)}
    rows = np.split(np.random.default_rng(0).permutation(len(digits.target)), [TRAIN])
    train, test = ({name: values[split] for name, values in data.items()} for split in rows)

    keys = jax.random.split(jax.random.key(0), MEMBERS)
    rates = np.geomspace(5e-3, 2e-2, MEMBERS, dtype=np.float32)
    step = sf.make_train_step(loss_fn, optimizer(0.0))  # the rate comes from the state
    together = jax.jit(jax.vmap(step, in_axes=(0, None)), donate_argnums=0)
    alone = jax.jit(step, donate_argnums=0)

    states, member = (
        jax.jit(jax.vmap(init_member))(keys, rates),
        jax.jit(init_member)(keys[3], rates[3]),
    )
    for batch in sf.batches(train, BATCH, seed=0, epochs=epochs, remainder="pad"):
        states, metrics = together(states, batch)
        member, _ = alone(member, batch)
    losses = np.array(metrics["loss"].compute())

    metrics = sf.evaluate(measure, states, sf.batches(test, 256, epochs=1, remainder="pad"))
    for i in range(MEMBERS):
        accuracy = metrics[f"member {i}"]
        rate, loss = f"rate {rates[i]:.4f}", f"loss {losses[i]:.4f}"
        print(f"member {i}  {rate}  {loss}  test accuracy {accuracy:.4f}")
    print(f"ensemble  test accuracy {metrics['ensemble']:.4f}")
    params = jax.device_get((states.params, member.params))
    errors = jax.tree.map(lambda stacked, w: abs(stacked[3] - w).max(), *params)
    print(f"member 3 trained alone differs by {max(jax.tree.leaves(errors)):.1e} at most")


if __name__ == "__main__":
    main()
