"""A small byte-level GPT in plain jax, with weights and batches."""

import math
from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

LAYERS, WIDTH, HEADS, LENGTH, BATCH = 2, 128, 4, 64, 16
# Keras adds epsilon before the bias correction of the second moment, and the others add it after.
# With a small epsilon all results agree.
ADAMW = {"b1": 0.9, "b2": 0.99, "eps": 1e-12, "weight_decay": 0.1}
RATE = 3e-3


def draw(seed=0, width=WIDTH):
    """Draw the weights for all libraries as numpy arrays."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return (rng.normal(size=shape) / math.sqrt(shape[0])).astype(np.float32)

    def layer():
        norms = {name: np.ones(width, np.float32) for name in ("norm_in", "norm_mid")}
        dense = {"qkv": normal(width, 3 * width), "proj": normal(width, width)}
        dense |= {"up": normal(width, 4 * width), "down": normal(4 * width, width)}
        return norms | dense

    ends = {"embed": normal(256, width), "place": normal(LENGTH, width)}
    ends |= {"norm": np.ones(width, np.float32), "out": normal(width, 256)}
    return ends | {"layers": [layer() for _ in range(LAYERS)]}


def batches(steps, size=BATCH):
    """Yield the same random pieces of Python's manual every time."""
    text = np.frombuffer("".join(topics.topics.values()).encode(), np.uint8)
    rng = np.random.default_rng(1)
    for _ in range(steps):
        starts = rng.integers(len(text) - LENGTH, size=(size, 1))
        pieces = text[starts + np.arange(LENGTH + 1)].astype(np.int32)
        yield {"x": pieces[:, :-1], "y": pieces[:, 1:]}


def norm(x, scale):
    """Apply layer norm."""
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def nll(params, batch):
    """Return the loss of each byte."""
    x = params["embed"][batch["x"]] + params["place"]
    for p in params["layers"]:
        qkv = norm(x, p["norm_in"]) @ p["qkv"]
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
        heads = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + heads.reshape(x.shape) @ p["proj"]
        x = x + jax.nn.gelu(norm(x, p["norm_mid"]) @ p["up"]) @ p["down"]
    logits = norm(x, params["norm"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
