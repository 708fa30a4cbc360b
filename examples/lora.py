"""Fine-tune a trained network with LoRA, and freeze all other parameters by their path.

Run it with `python examples/lora.py`; it takes a few seconds on two cores. The base network has
learned the digits 0 to 4. Each matrix `w` gets two low-rank factors, and the loss function uses
`w + a @ b`. A regular expression selects the parameters to train, and the optimizer keeps moments
only for these.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import stepfold as sf

HIDDEN, RANK, BATCH, EPOCHS = 512, 4, 64, 15
TRAINED = "^lora/"


def init(key):
    """Initialize a network with one hidden layer."""
    keys = jax.random.split(key)
    glorot = jax.nn.initializers.glorot_uniform()
    return {
        "hidden": {"w": glorot(keys[0], (64, HIDDEN)), "bias": jnp.zeros(HIDDEN)},
        "output": {"w": glorot(keys[1], (HIDDEN, 10)), "bias": jnp.zeros(10)},
    }


def loss_fn(params, batch, _key):
    """Return the masked mean of the cross-entropy, with the accuracy as a metric."""
    hidden = jax.nn.relu(batch["image"] @ params["hidden"]["w"] + params["hidden"]["bias"])
    logits = hidden @ params["output"]["w"] + params["output"]["bias"]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    hit = logits.argmax(-1) == batch["label"]
    return sf.mean(nll, batch["mask"]), {"accuracy": sf.mean(hit, batch["mask"])}


def init_factors(params, key):
    """Initialize two factors for each matrix. Their product starts at zero."""

    def init_pair(w, key):
        a = jax.random.normal(key, (w.shape[0], RANK)) / np.sqrt(w.shape[0])
        return {"a": a, "b": jnp.zeros((RANK, w.shape[1]))}

    keys = jax.random.split(key, len(params))
    return {name: init_pair(params[name]["w"], key) for name, key in zip(params, keys, strict=True)}


def merge(params):
    """Add the product of the factors to each matrix of the base."""
    base, lora = jax.lax.stop_gradient(params["base"]), params["lora"]
    return {
        name: {**layer, "w": layer["w"] + lora[name]["a"] @ lora[name]["b"]}
        for name, layer in base.items()
    }


def label(path, _leaf):
    """Choose the optimizer of a parameter by its path."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return "trained" if re.search(TRAINED, name) else "frozen"


def select(data, index):
    """Select rows of every column."""
    return {name: values[index] for name, values in data.items()}


def train(loss, state, tx, data, epochs):
    """Train for a few epochs."""
    step = jax.jit(sf.make_train_step(loss, tx), donate_argnums=0)
    for batch in sf.batches(data, BATCH, seed=0, epochs=epochs, remainder="pad"):
        state, _ = step(state, batch)
    return state


def print_accuracy(name, loss, state, data):
    """Print the accuracy on the digits of the base, and on the new ones."""
    measure = jax.jit(sf.make_eval_step(loss))
    for digits, index in ("0-4", data["label"] < 5), ("5-9", data["label"] >= 5):
        batches = sf.batches(select(data, index), 256, epochs=1, remainder="pad")
        metrics = sf.evaluate(measure, state, batches)
        print(f"{name} on {digits}: accuracy {metrics['accuracy']:.4f}")


def main(epochs=EPOCHS):
    """Learn five digits with all parameters, then the other five with the factors."""
    digits = load_digits()
    data = {"image": np.float32(digits.data / 16), "label": np.int32(digits.target)}
    order = np.random.default_rng(0).permutation(len(digits.target))
    train_data, test = select(data, order[:1400]), select(data, order[1400:])

    tx = optax.adam(2e-3)
    base = sf.init_state(init, tx, jax.random.key(0))
    base = train(loss_fn, base, tx, select(train_data, train_data["label"] < 5), epochs)
    print_accuracy("base", loss_fn, base, test)

    params = {"base": base.params, "lora": init_factors(base.params, jax.random.key(1))}
    labels = jax.tree_util.tree_map_with_path(label, params)
    groups = {"trained": optax.adam(5e-3), "frozen": optax.set_to_zero()}
    tx = optax.multi_transform(groups, labels)
    state = sf.init_state(params, tx, jax.random.key(2))
    print(sf.inspect.parameter_table(state.params))
    adapted = lambda params, *rest: loss_fn(merge(params), *rest)
    state = train(adapted, state, tx, train_data, epochs)
    print_accuracy("adapted", adapted, state, test)

    size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    print(f"optimizer state: {size(state.opt_state):,} bytes; the base's: {size(base.opt_state):,}")
    same = jax.tree.all(jax.tree.map(np.array_equal, state.params["base"], base.params))
    print(f"the base is {'un' if same else ''}changed, bit for bit")


if __name__ == "__main__":
    main()
