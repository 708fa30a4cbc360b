"""Train on paragraphs of different lengths, packed into rows with almost no padding.

Run it with `python examples/packing.py`; it takes about twenty seconds on two cores. A packed row
carries segment IDs: attention stays within a paragraph, positions restart at each one, and no byte
is predicted from another paragraph. The loss equals that of one paragraph per row.
"""

import sys
from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepfold as sf

LENGTH, WIDTH, HEADS, LAYERS, BATCH, STEPS = 256, 64, 4, 2, 16, 80


def paragraphs():
    """List the paragraphs of Python's manual as bytes."""
    texts = (text.split("\n\n") for text in topics.topics.values())
    return [np.frombuffer(part.encode(), np.uint8) for text in texts for part in text if part]


def unpacked(examples):
    """Make rows of one paragraph each, in the format of packed rows."""
    batch = sf.collate([{"tokens": x} for x in examples], length=LENGTH, truncate="keep_start")
    rows = {**batch, "segment_ids": np.int32(batch["mask"])}
    rows["positions"] = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), batch["mask"].shape)
    return rows


def init(key):
    """Initialize the parameters, with those of the layers stacked along a leading axis."""
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    normal = jax.nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
    keys = iter(jax.random.split(key, 6))
    return {
        "embed": 0.05 * jax.random.normal(next(keys), (256, WIDTH)),
        "position": 0.05 * jax.random.normal(next(keys), (LENGTH, WIDTH)),
        "layers": {name: normal(next(keys), (LAYERS, *shape)) for name, shape in shapes.items()},
    }


def layer(mask, x, w):
    """Apply attention and an MLP, both with residual connections."""
    norm = lambda x: x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    split = (norm(x) @ w["qkv"]).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
    q, k, v = jnp.moveaxis(split, 2, 0)
    x = x + jax.nn.dot_product_attention(q, k, v, mask=mask).reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]


def loss_fn(params, batch, key):
    """Return the mean over bytes that follow a byte of the same paragraph."""
    del key
    ids = batch["segment_ids"]
    mask = sf.data.block_diagonal_mask(ids, causal=True)[:, None]
    x = params["embed"][batch["tokens"]] + params["position"][batch["positions"]]
    for i in range(LAYERS):
        x = layer(mask, x, jax.tree.map(lambda w, i=i: w[i], params["layers"]))
    logits, targets = (x @ params["embed"].T)[:, :-1], batch["tokens"][:, 1:]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return sf.mean(nll, (ids[:, 1:] == ids[:, :-1]) & batch["mask"][:, 1:])


def evaluate(step, state, batches):
    """Merge the loss exactly over batches."""
    total = None
    for batch in batches:
        loss = step(state, batch)["loss"]
        total = loss if total is None else total.merge(loss)
    return float(total.compute()), int(total.count)


def main(steps=STEPS):
    """Pack and train, then evaluate the same paragraphs packed and one per row."""
    examples = paragraphs()
    packed = list(sf.pack(examples, length=LENGTH, truncate="keep_start"))
    full = np.mean([row["mask"].mean() for row in packed])
    print(f"{len(examples)} paragraphs in {len(packed)} rows, {full:.1%} full")

    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 20, steps))
    state = sf.init_state(init, tx, jax.random.key(0))
    step = jax.jit(sf.make_train_step(loss_fn, tx), donate_argnums=0)
    for _, batch in zip(range(steps), sf.batches(packed, BATCH, seed=0), strict=False):
        state, metrics = step(state, batch)
        if state.step % 20 == 0:
            print(f"step {int(state.step):3}  loss {float(metrics['loss'].compute()):.4f}")

    eval_step = jax.jit(sf.make_eval_step(loss_fn))
    test = examples[:320]
    rows = list(sf.pack(test, length=LENGTH, truncate="keep_start"))
    options = {"epochs": 1, "remainder": "pad"}
    loss, count = evaluate(eval_step, state, sf.batches(rows, 64, **options))
    print(f"packed      {len(rows):4} rows  loss {loss:.6f} over {count} bytes")
    loss, count = evaluate(eval_step, state, sf.batches(test, 64, collate=unpacked, **options))
    print(f"one per row {len(test):4} rows  loss {loss:.6f} over {count} bytes")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
