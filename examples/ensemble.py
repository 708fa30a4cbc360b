"""Train six networks as one, by `jax.vmap` over states, and let them vote.

Run it with `python examples/ensemble.py`; it takes some seconds on two cores. A state is a tree and
a step is a function, so that six states are a state with one more axis, and six steps are the step
mapped over it. Each member has weights and a learning rate of its own; all see the same batches.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import stepfold as sf

MEMBERS, HIDDEN, BATCH, EPOCHS, TRAIN = 6, 24, 50, 40, 200


def init(key):
    """Make the parameters of a network with one hidden layer."""
    keys = jax.random.split(key)
    glorot = jax.nn.initializers.glorot_uniform()
    return {
        "hidden": {"w": glorot(keys[0], (64, HIDDEN)), "b": jnp.zeros(HIDDEN)},
        "output": {"w": glorot(keys[1], (HIDDEN, 10)), "b": jnp.zeros(10)},
    }


def model(params, image):
    """Give the logits of each digit."""
    hidden = jax.nn.relu(image @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["output"]["w"] + params["output"]["b"]


def loss_fn(params, batch, _key):
    """Take the masked mean of the cross-entropy."""
    logits = model(params, batch["image"])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return sf.mean(nll, batch["mask"])


def measure(states, batch):
    """Count what each member gets right, and what the mean of their probabilities does."""
    each = jax.nn.softmax(jax.vmap(model, in_axes=(0, None))(states.params, batch["image"]))
    accuracy = lambda p: sf.mean(p.argmax(-1) == batch["label"], batch["mask"])
    members = {f"member {i}": accuracy(each[i]) for i in range(MEMBERS)}
    return members | {"ensemble": accuracy(each.mean(0))}


def optimizer(rate):
    """Make an optimizer that keeps its learning rate in its state, where it can be mapped over."""
    return optax.inject_hyperparams(optax.adamw)(rate)


def born(key, rate):
    """Make the state of one member."""
    return sf.init_state(init, optimizer(rate), key)


def main():
    """Train all at once, one of them alone, and compare."""
    digits = load_digits()
    data = {"image": np.float32(digits.data / 16), "label": np.int32(digits.target)}
    rows = np.split(np.random.default_rng(0).permutation(len(digits.target)), [TRAIN])
    train, test = ({name: values[some] for name, values in data.items()} for some in rows)

    keys = jax.random.split(jax.random.key(0), MEMBERS)
    rates = np.geomspace(5e-3, 2e-2, MEMBERS, dtype=np.float32)
    step = sf.make_train_step(loss_fn, optimizer(0.0))  # the rate is that of the state
    together = jax.jit(jax.vmap(step, in_axes=(0, None)), donate_argnums=0)
    alone = jax.jit(step, donate_argnums=0)

    states, one = jax.jit(jax.vmap(born))(keys, rates), jax.jit(born)(keys[3], rates[3])
    for batch in sf.batches(train, BATCH, seed=0, epochs=EPOCHS, remainder="pad"):
        states, metrics = together(states, batch)
        one, _ = alone(one, batch)
    losses = np.array(metrics["loss"].compute())

    found = sf.evaluate(measure, states, sf.batches(test, 256, epochs=1, remainder="pad"))
    for i in range(MEMBERS):
        told = f"rate {rates[i]:.4f}  loss {losses[i]:.4f}"
        print(f"member {i}  {told}  test accuracy {found[f'member {i}']:.4f}")
    print(f"ensemble  test accuracy {found['ensemble']:.4f}")
    params = jax.device_get((states.params, one.params))
    apart = jax.tree.map(lambda every, w: abs(every[3] - w).max(), *params)
    print(f"member 3 trained alone differs by {max(jax.tree.leaves(apart)):.1e} at most")


if __name__ == "__main__":
    main()
