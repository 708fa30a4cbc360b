"""A small decoder of masked sequences with an auxiliary loss, for the benchmarks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

import stepfold as sf

VOCAB, LENGTH, HEADS = 512, 64, 4


def init(key, *, layers=3, width=128):
    """Initialize the parameters, with stacked layers."""
    shapes = {"qkv": (width, 3 * width), "proj": (width, width)}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    shapes = {name: (layers, *shape) for name, shape in shapes.items()}
    shapes |= {"embed": (VOCAB, width), "out": (width, VOCAB)}
    draws = zip(shapes.items(), jax.random.split(key, len(shapes)), strict=True)
    return {name: jax.random.normal(k, s) * s[-2] ** -0.5 for (name, s), k in draws}


def loss_fn(params, batch, key, spread=lambda x: x, remat=None):
    """Return the masked token loss and a penalty on all logits, with separate denominators.

    `spread` is applied to the activations between layers, as a sharding constraint. `remat` is a
    policy of `jax.checkpoint` for each layer.
    """
    del key
    layer = partial(_layer, spread)
    if remat is not None:
        layer = jax.checkpoint(layer, policy=remat)
    layers = {name: params[name] for name in ("qkv", "proj", "up", "down")}
    x = spread(params["embed"][batch["tokens"]])
    x, _ = jax.lax.scan(layer, x, layers)
    logits = _normed(x) @ params["out"]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    penalty = 1e-4 * jax.nn.logsumexp(logits, -1) ** 2
    return {"nll": sf.mean(nll, batch["mask"]), "penalty": sf.mean(penalty)}


def _layer(spread, x, p):
    heads = (*x.shape[:2], 3, HEADS, x.shape[-1] // HEADS)
    q, k, v = jnp.moveaxis((_normed(x) @ p["qkv"]).reshape(heads), 2, 0)
    attention = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
    x = x + checkpoint_name(attention, "attention") @ p["proj"]
    hidden = checkpoint_name(_normed(x) @ p["up"], "hidden")
    return spread(x + jax.nn.gelu(hidden) @ p["down"]), None


def _normed(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def make_batch(size):
    """Draw random sequences, each masked after a random length."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (size, LENGTH + 1)).astype(np.int32)
    mask = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (size, 1))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}
