"""Keep a learning rate from a narrow model in wider ones, by muP: an init and a scale by path.

Run it with `python examples/mup.py`; it takes some seconds on two cores. In the standard
parametrization a step of Adam changes the logits by more the wider the network is, so that each
width needs its own learning rate. Under muP (Yang et al., 2022) the change does not depend on the
width. With Adam, muP divides the updates of every matrix with a wide input by its width, and the
initial output layer by the square root of the width, both relative to a base width at which
nothing changes. The first is an optax transformation, the second a function for `init_state`.

The trap is the order of the chain. Adam divides by the size of the gradient, and so removes a
factor that comes before it: the scale comes after Adam.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_map_with_path
from sklearn.datasets import load_digits

import stepfold as sf

BASE, WIDTHS, RATE, STEPS, BATCH = 64, (64, 128, 512), 0.004, 8, 256
WIDE = ("hidden", "output")  # the matrices whose input grows with the width


def init(key, width):
    """Initialize a network in the standard parametrization."""
    shapes = {"input": (64, width), "hidden": (width, width), "output": (width, 10)}
    keys = dict(zip(shapes, jax.random.split(key, 3), strict=True))
    return {name: jax.random.normal(keys[name], s) / s[0] ** 0.5 for name, s in shapes.items()}


def init_mup(key, width):
    """Initialize a network for muP, with smaller outputs the wider it is."""
    params = init(key, width)
    return params | {"output": params["output"] * (BASE / width) ** 0.5}


def scale_by_width(base):
    """Multiply the update of each matrix with a wide input by the base width over its own."""

    def scale(path, update):
        return update * (base / len(update) if keystr(path, simple=True) in WIDE else 1)

    return optax.stateless(lambda updates, _: tree_map_with_path(scale, updates))


STANDARD = optax.adam(RATE)
MUP = optax.chain(optax.adam(RATE), scale_by_width(BASE))


def model(params, image):
    """Return the logits."""
    hidden = jax.nn.relu(jax.nn.relu(image @ params["input"]) @ params["hidden"])
    return hidden @ params["output"]


def loss_fn(params, batch, _key):
    """Return the mean of the cross-entropy."""
    logits = model(params, batch["image"])
    return sf.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]))


def change(make_params, tx, width):
    """Return the mean change of the logits over a few steps, and the last loss."""
    data = {"image": np.float32(load_digits().data / 16), "label": np.int32(load_digits().target)}
    state = sf.init_state(make_params(jax.random.key(0), width), tx, jax.random.key(1))
    before = model(state.params, data["image"])
    batches = sf.batches(data, BATCH, seed=0)
    result = sf.fit(sf.make_train_step(loss_fn, tx), state, batches, steps=STEPS)
    after = model(result.state.params, data["image"])
    return float(jnp.abs(after - before).mean()), result.history["train/loss"][-1]


def main(widths=WIDTHS):
    """Compare the change of the logits over widths."""
    print("width  standard: change  loss  muP: change   loss")
    for width in widths:
        standard, mup = change(init, STANDARD, width), change(init_mup, MUP, width)
        print(f"{width:5}  {standard[0]:16.3f}  {standard[1]:.3f}  {mup[0]:11.3f}  {mup[1]:.3f}")


if __name__ == "__main__":
    main()
