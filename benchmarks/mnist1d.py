"""MNIST-1D of Greydanus and Kobak, and the four models of its table, for `results`.

The data are generated as the paper describes: a template of twelve points for each digit is padded,
stretched, scaled, shifted, made noisy, sheared, and sampled at forty points. The models, Adam at
0.01, batches of 100 and 6,000 steps are those of the notebook of the paper. The random numbers are
others, so the examples are other ones of the same distribution. The mean over seeds is compared.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepfold as sf

PUBLISHED = {"logistic": 0.32, "MLP": 0.68, "CNN": 0.94, "GRU": 0.91}
LENGTH, CLASSES, BATCH, RATE, STEPS = 40, 10, 100, 1e-2, 6000

# The heights that define the ten digits, from the paper.
TEMPLATES = """
5 6 6.5 6.75 7 7 7 7 6.75 6.5 6 5
5 3 3 3.4 3.8 4.2 4.6 5 5.4 5.8 5 5
5 6 6.5 6.5 6 5.25 4.75 4 3.5 3.5 4 5
5 6 6.5 6.5 6 5 5 6 6.5 6.5 6 5
5 4.4 3.8 3.2 2.6 2.6 5 5 5 5 5 5
5 3 3 3 3 5 6 6.5 6.5 6 4.5 5
5 4 3.5 3.25 3 3 3 3 3.25 3.5 4 5
5 7 7 6.6 6.2 5.8 5.4 5 4.6 4.2 5 5
5 4 3.5 3.5 4 5 5 4 3.5 3.5 4 5
5 4 3.5 3.5 4 5 5 5 5 4.7 4.3 5
"""


@cache
def draw(seed=42, examples=5000):
    """Draw four fifths of the examples for training, and the rest for a test."""
    heights = np.array([line.split() for line in TEMPLATES.split("\n")[1:-1]], np.float64)
    heights = (heights - heights.mean(1, keepdims=True)) / heights.std(1, keepdims=True)
    heights = (heights - heights[:, :1]) / 6  # so that each begins and ends at zero
    rng = np.random.default_rng(seed)
    label = rng.permutation(np.arange(examples) % CLASSES).astype(np.int32)
    x = np.stack([disturb(heights[digit], rng) for digit in label])
    x = ((x - x.mean()) / x.std()).astype(np.float32)
    rows = np.split(np.arange(examples), [examples * 4 // 5])
    return [{"x": x[split], "label": label[split]} for split in rows]


def disturb(x, rng):
    """Make one example of a template."""
    x = np.concatenate([x + 1e-8, np.zeros(rng.integers(36, 61))])  # only the padding is zero
    x = resample(x, 72) * (1 + 0.4 * (rng.random() - 0.5))
    x = np.roll(x, rng.integers(48))
    x = np.where(x != 0, x, smooth(0.25 * rng.normal(size=x.shape)))
    x = x + 0.02 * rng.normal(size=x.shape)
    x = x - 0.75 * (rng.random() - 0.5) * np.linspace(-0.5, 0.5, x.size)
    return resample(x, LENGTH)


def resample(x, length):
    """Interpolate linearly."""
    return np.interp(np.linspace(0, 1, length), np.linspace(0, 1, x.size), x)


def smooth(x):
    """Apply a Gaussian filter with a standard deviation of two points, mirrored at the ends."""
    weights = np.exp(-0.5 * (np.arange(-8, 9) / 2) ** 2)
    return np.convolve(np.pad(x, 8, "symmetric"), weights / weights.sum(), "valid")


# Models: for each one a function that initializes it, and one that returns its logits


def uniform(key, fan_in, **shapes):
    """Draw weights and biases between plus and minus `fan_in ** -0.5`, as torch does."""
    keys = jax.random.split(key, len(shapes))
    at_most = fan_in**-0.5
    return {
        name: jax.random.uniform(k, shape, minval=-at_most, maxval=at_most)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def dense(key, fan_in, out):
    """Initialize an affine layer."""
    return uniform(key, fan_in, w=(fan_in, out), b=(out,))


def affine(layer, x):
    """Apply an affine layer."""
    return x @ layer["w"] + layer["b"]


def init_logistic(key):
    """Initialize a linear classifier."""
    return dense(key, LENGTH, CLASSES)


def init_mlp(key, width=100):
    """Initialize two hidden layers, of which the second is residual."""
    sizes = [(LENGTH, width), (width, width), (width, CLASSES)]
    return [dense(k, *size) for k, size in zip(jax.random.split(key, 3), sizes, strict=True)]


def mlp(params, x):
    """Return the logits of the MLP."""
    hidden = jax.nn.relu(affine(params[0], x))
    return affine(params[2], hidden + jax.nn.relu(affine(params[1], hidden)))


def init_cnn(key, channels=25):
    """Initialize three convolutions with stride 2, and an affine layer of their five points."""
    sizes = [(5, channels), (3 * channels, channels), (3 * channels, channels)]
    sizes = [*sizes, (5 * channels, CLASSES)]
    return [dense(k, *size) for k, size in zip(jax.random.split(key, 4), sizes, strict=True)]


def cnn(params, x):
    """Return the logits of the CNN.

    A convolution is a product with all windows, which on CPUs is faster than XLA's convolution.
    """
    x = x[..., None]
    for layer in params[:-1]:
        padded = jnp.pad(x, [(0, 0), (1, 1), (0, 0)])
        width = len(layer["w"]) // x.shape[-1]
        end = padded.shape[1] - width + 1
        windows = [padded[:, first : first + end : 2] for first in range(width)]
        x = jax.nn.relu(affine(layer, jnp.concatenate(windows, -1)))
    return affine(params[-1], x.reshape(len(x), -1))


def init_gru(key, width=6):
    """Initialize a GRU for each direction, and an affine layer of all their states."""
    *keys, last = jax.random.split(key, 3)
    shapes = {"w": (1, 3 * width), "b": (3 * width,), "u": (width, 3 * width), "c": (3 * width,)}
    cells = [uniform(k, width, **shapes) for k in keys]
    cells = jax.tree.map(lambda *leaves: jnp.stack(leaves), *cells)
    return {"cells": cells, "out": dense(last, 2 * width * LENGTH, CLASSES)}


def gru(params, x):
    """Return the logits of the GRU that reads in both directions."""

    def read(cell, x):
        inputs = jnp.moveaxis(affine(cell, x[..., None]), 1, 0)

        def step(state, inputs):
            of_input = jnp.split(inputs, 3, -1)
            of_state = jnp.split(state @ cell["u"] + cell["c"], 3, -1)
            reset, keep = (
                jax.nn.sigmoid(a + b) for a, b in zip(of_input[:2], of_state[:2], strict=True)
            )
            new = jnp.tanh(of_input[2] + reset * of_state[2])
            state = keep * state + (1 - keep) * new
            return state, state

        start = jnp.zeros((len(x), cell["u"].shape[0]))
        return jax.lax.scan(step, start, inputs)[1]

    states = jax.vmap(read)(params["cells"], jnp.stack([x, x[:, ::-1]]))
    return affine(params["out"], jnp.moveaxis(states, 2, 0).reshape(len(x), -1))


MODELS = {
    "logistic": (init_logistic, affine),
    "MLP": (init_mlp, mlp),
    "CNN": (init_cnn, cnn),
    "GRU": (init_gru, gru),
}


def train(name, seed, steps=STEPS):
    """Train a model; return its test accuracy at the end, and on the way."""
    init, model = MODELS[name]
    training, test = draw()

    def loss_fn(params, batch, _key):
        logits = model(params, batch["x"])
        hit = logits.argmax(-1) == batch["label"]
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return sf.mean(nll), {"accuracy": sf.mean(hit)}

    tx = optax.adam(RATE)
    result = sf.fit(
        sf.make_train_step(loss_fn, tx),
        sf.init_state(init, tx, jax.random.key(seed)),
        sf.batches(training, BATCH, seed=seed),
        steps=steps,
        evaluation=sf.Evaluation(sf.make_eval_step(loss_fn), [test], every=250, name="test"),
        log_every=250,
        steps_per_call=50,
    )
    accuracy = result.history["test/accuracy"]
    return {
        "accuracy": accuracy[-1],
        "best": max(accuracy),
        "training accuracy": result.history["train/accuracy"][-1],
        "steps": list(accuracy.steps),
        "accuracies": list(accuracy),
    }
