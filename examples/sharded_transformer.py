"""Shard a byte-level transformer over eight devices with four rules, and inspect its step.

It trains on Python's own manual, on eight virtual CPU devices; the same code runs on eight real
devices. Parameters are sharded over "fsdp" (each device stores a part) and over "tp" (each device
computes a part of every layer). One constraint shards activations over examples. The number of
steps can be given: `python examples/sharded_transformer.py 100`.
"""

import math
import sys
from functools import partial
from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import stepfold as sf

LAYERS, WIDTH, HEADS, LENGTH, BATCH, STEPS = 4, 128, 4, 128, 32, 40

RULES = [
    ("embed", P("tp", None)),
    ("(query|key|value|up)$", P(None, "fsdp", "tp")),  # the leading axis is that of the layers
    ("(out|down)$", P(None, "tp", "fsdp")),
    sf.sharding.fsdp(),  # all others; norms are below its minimum size and stay replicated
]


def init(key):
    """Initialize the parameters, with those of the layers stacked along a leading axis."""

    def normal(key, *shape):
        return jax.random.normal(key, shape) / math.sqrt(shape[-2])

    keys = iter(jax.random.split(key, 8))
    square, wide = (LAYERS, WIDTH, WIDTH), (LAYERS, WIDTH, 4 * WIDTH)
    names = {"query": square, "key": square, "value": square, "out": square, "up": wide}
    layers = {name: normal(next(keys), *shape) for name, shape in names.items()}
    layers |= {"down": normal(next(keys), LAYERS, 4 * WIDTH, WIDTH)}
    layers |= {name: jnp.ones((LAYERS, WIDTH)) for name in ("norm_in", "norm_mid")}
    return {"embed": normal(next(keys), 256, WIDTH), "layers": layers}


def norm(x, scale):
    """Apply RMS norm."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def layer(constrain, x, w):
    """Apply attention and an MLP, both with residual connections."""
    split = (*x.shape[:2], HEADS, WIDTH // HEADS)
    h = norm(x, w["norm_in"])
    q, k, v = ((h @ w[name]).reshape(split) for name in ("query", "key", "value"))
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]
    x = x + jax.nn.gelu(norm(x, w["norm_mid"]) @ w["up"]) @ w["down"]
    return constrain(x), None


def make_loss(mesh):
    """Make the loss of next-byte prediction, with activations sharded over examples."""
    sharding = jax.sharding.NamedSharding(mesh, P(("dp", "fsdp"), None, None))
    constrain = partial(jax.lax.with_sharding_constraint, shardings=sharding)

    def loss_fn(params, batch, key):
        del key
        x = constrain(params["embed"][batch["text"]])
        x, _ = jax.lax.scan(partial(layer, constrain), x, params["layers"])
        logits, targets = (x @ params["embed"].T)[:, :-1], batch["text"][:, 1:]
        return sf.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))

    return loss_fn


def batches(seed):
    """Draw random pieces of Python's manual forever."""
    text = np.frombuffer("".join(topics.topics.values()).encode(), np.uint8)
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(len(text) - LENGTH, size=BATCH)
        yield {"text": text[starts[:, None] + np.arange(LENGTH)].astype(np.int32)}


def main(steps=STEPS):
    """Plan, inspect the step, and train."""
    if jax.config.jax_num_cpu_devices < 2:
        jax.config.update("jax_num_cpu_devices", 8)
    mesh = sf.make_mesh((1, -1, 2, 1))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, weight_decay=0.01))

    shape = jax.eval_shape(lambda key: sf.init_state(init, tx, key), jax.random.key(0))
    plan = sf.make_sharding(shape, mesh, RULES)
    print(sf.sharding.sharding_table(shape.params, plan.params), "\n")

    step, data = sf.make_train_step(make_loss(mesh), tx), batches(seed=0)
    batch = sf.shard_batch(next(data), mesh)
    print(sf.describe(step, shape, batch, sharding=plan, tokens=BATCH * LENGTH), "\n")

    state = sf.init_state(init, tx, jax.random.key(0), sharding=plan)  # created sharded
    step = sf.compile_step(step, state, batch)
    for i in range(steps):
        state, metrics = step(state, sf.shard_batch(next(data), mesh))
        loss = float(metrics["loss"].compute())  # waits, since virtual devices share few threads
        if i % 10 == 0 or i == steps - 1:
            print(f"step {i:3}  loss {loss:.3f}")
    return loss


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
