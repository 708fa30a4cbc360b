"""Train a byte-level GPT on Python's own manual in a hand-written loop with checkpoints.

Run it with `python examples/own_loop.py`; it takes about half a minute on two cores. The loss
starts near ln 256 = 5.55 nats per byte and ends below 1.8 on held-out pages. Then the model
generates a few lines. Interrupt it and run it again: it resumes bit for bit, and generates the same
lines.
"""

import sys
from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepfold as sf

LENGTH, WIDTH, HEADS, LAYERS, BATCH, STEPS = 64, 96, 4, 2, 16, 300


def make_rows(text):
    """Split text into overlapping rows of inputs and the byte after them."""
    return np.lib.stride_tricks.sliding_window_view(text, LENGTH + 1)[:: LENGTH // 4]


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


def norm_and_shift(x):
    """Apply RMS norm, and take half of the channels from the previous byte."""
    x = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    own, previous = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([own, jnp.pad(previous, ((0, 0), (1, 0), (0, 0)))[:, :-1]], axis=-1)


def layer(x, w):
    """Apply attention and an MLP, both with residual connections."""
    split = (norm_and_shift(x) @ w["qkv"]).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
    q, k, v = jnp.moveaxis(split, 2, 0)
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]
    return x + jax.nn.relu(norm_and_shift(x) @ w["up"]) @ w["down"], None


def model(params, text):
    """Return the logits of the byte after each byte."""
    x, _ = jax.lax.scan(layer, params["embed"][text] + params["position"], params["layers"])
    return x @ params["embed"].T


def loss_fn(params, batch, _key):
    """Return the mean cross-entropy over all bytes."""
    logits = model(params, batch[:, :-1])
    return sf.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]))


@jax.jit
def generate(params, window, keys):
    """Sample a byte for each key, after a row of bytes."""

    def sample(window, key):
        byte = jax.random.categorical(key, model(params, window[None])[0, -1] / 0.7)
        window = jnp.append(window[1:], byte.astype(window.dtype))
        return window, window[-1]

    return jax.lax.scan(sample, window, keys)[1]


def main(directory="runs/own_loop"):
    """Train, evaluate and save, or resume after an interrupt or a kill."""
    text = np.frombuffer("".join(topics.topics.values()).encode("ascii", "ignore"), np.uint8)
    train, test = map(make_rows, np.split(text, [len(text) * 9 // 10]))

    rate = optax.warmup_cosine_decay_schedule(0.0, 8e-3, warmup_steps=20, decay_steps=STEPS)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))
    tx = sf.ema_params(tx, decay=0.95)
    state = sf.init_state(init, tx, jax.random.key(0))
    step = jax.jit(sf.make_train_step(loss_fn, tx), donate_argnums=0)
    eval_step = jax.jit(sf.make_eval_step(loss_fn))
    batches = sf.batches(train, BATCH, seed=0)

    with sf.Checkpoints(directory, every=75, keep=2) as series:
        if sf.checkpoint.latest_step(directory) is not None:
            restored = series.restore(state)
            state = restored.state
            batches.set_state(restored.data)
            print(f"resumed after step {restored.step}")
        for number in range(int(state.step) + 1, STEPS + 1):
            state, metrics = step(state, next(batches))
            if series.due(number):
                averaged = state._replace(params=sf.get_ema(state))
                test_batches = sf.batches(test[::16], 64, epochs=1, remainder="drop")
                test_loss = sf.evaluate(eval_step, averaged, test_batches)["loss"]
                loss = float(metrics["loss"].compute())
                print(f"step {number:3}  loss {loss:.4f}  test loss {test_loss:.4f}", flush=True)
                series.save(state, data=batches, metrics={"test/loss": test_loss})

    prompt, keys = test[0][1:], jax.random.split(jax.random.key(1), 240)
    text = np.array(generate(sf.get_ema(state), jnp.array(prompt), keys))
    print(f"--- prompt\n{bytes(prompt).decode()}\n--- generated\n{bytes(text).decode()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
