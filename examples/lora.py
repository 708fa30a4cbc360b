"""Teach a trained network more with low-rank factors, and freeze all else by its path.

Run it with `python examples/lora.py`; it takes some seconds on two cores. The network has learnt
the digits 0 to 4. To each matrix `w` come two factors, and the loss function computes with
`w + a @ b`: that is all there is to LoRA. The optimizer is told by a regular expression what to
train, and keeps moments of nothing else.
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
    """Make the parameters of a network with one hidden layer."""
    keys = jax.random.split(key)
    glorot = jax.nn.initializers.glorot_uniform()
    return {
        "hidden": {"w": glorot(keys[0], (64, HIDDEN)), "bias": jnp.zeros(HIDDEN)},
        "output": {"w": glorot(keys[1], (HIDDEN, 10)), "bias": jnp.zeros(10)},
    }


def loss_fn(params, batch, _key):
    """Take the masked mean of the cross-entropy, and of what is right as the accuracy."""
    hidden = jax.nn.relu(batch["image"] @ params["hidden"]["w"] + params["hidden"]["bias"])
    logits = hidden @ params["output"]["w"] + params["output"]["bias"]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    hit = logits.argmax(-1) == batch["label"]
    return sf.mean(nll, batch["mask"]), {"accuracy": sf.mean(hit, batch["mask"])}


def factors(params, key):
    """Draw two factors for each matrix; their product is zero at first."""

    def pair(w, key):
        a = jax.random.normal(key, (w.shape[0], RANK)) / np.sqrt(w.shape[0])
        return {"a": a, "b": jnp.zeros((RANK, w.shape[1]))}

    keys = jax.random.split(key, len(params))
    return {name: pair(params[name]["w"], key) for name, key in zip(params, keys, strict=True)}


def merged(params):
    """Add up what was there and what is learnt: parameters as the loss function knows them."""
    base, lora = jax.lax.stop_gradient(params["base"]), params["lora"]
    return {
        name: {**layer, "w": layer["w"] + lora[name]["a"] @ lora[name]["b"]}
        for name, layer in base.items()
    }


def label(path, _leaf):
    """Say of a parameter, by its path, to which optimizer it goes."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return "trained" if re.search(TRAINED, name) else "frozen"


def rows(data, which):
    """Take rows of all columns."""
    return {name: values[which] for name, values in data.items()}


def train(loss, state, tx, data):
    """Go through the data some times."""
    step = jax.jit(sf.make_train_step(loss, tx), donate_argnums=0)
    for batch in sf.batches(data, BATCH, seed=0, epochs=EPOCHS, remainder="pad"):
        state, _ = step(state, batch)
    return state


def tell(name, loss, state, data):
    """Print the accuracy on the digits that the base has learnt, and on the others."""
    measure = jax.jit(sf.make_eval_step(loss))
    for digits, some in ("0-4", data["label"] < 5), ("5-9", data["label"] >= 5):
        batches = sf.batches(rows(data, some), 256, epochs=1, remainder="pad")
        found = sf.evaluate(measure, state, batches)
        print(f"{name} on {digits}: accuracy {found['accuracy']:.4f}")


def main():
    """Learn five digits with all parameters, and the other five with a few."""
    digits = load_digits()
    data = {"image": np.float32(digits.data / 16), "label": np.int32(digits.target)}
    order = np.random.default_rng(0).permutation(len(digits.target))
    train_data, test = rows(data, order[:1400]), rows(data, order[1400:])

    tx = optax.adam(2e-3)
    base = sf.init_state(init, tx, jax.random.key(0))
    base = train(loss_fn, base, tx, rows(train_data, train_data["label"] < 5))
    tell("base", loss_fn, base, test)

    params = {"base": base.params, "lora": factors(base.params, jax.random.key(1))}
    labels = jax.tree_util.tree_map_with_path(label, params)
    groups = {"trained": optax.adam(5e-3), "frozen": optax.set_to_zero()}
    tx = optax.multi_transform(groups, labels)
    state = sf.init_state(params, tx, jax.random.key(2))
    print(sf.parameter_table(state.params))
    adapted = lambda params, *rest: loss_fn(merged(params), *rest)
    state = train(adapted, state, tx, train_data)
    tell("adapted", adapted, state, test)

    size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    print(f"optimizer state: {size(state.opt_state):,} bytes; the base's: {size(base.opt_state):,}")
    same = jax.tree.all(jax.tree.map(np.array_equal, state.params["base"], base.params))
    print(f"the base is {'' if same else 'not '}as it was, bit for bit")


if __name__ == "__main__":
    main()
