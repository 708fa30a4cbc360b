"""Generate with a key/value cache, and keep the checkpoint that generates the best answers.

Run it with `python examples/generation.py`; it takes about half a minute on two cores. A decoder
learns to sort digits, as in "3142=1234;". `generate` is one compiled program: it reads prompts of
several lengths at once, and then computes one position per byte. `sf.Evaluation` runs it on
held-out prompts, and the share of exact matches decides which checkpoint is the best.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepfold as sf

LAYERS, WIDTH, HEADS, DIGITS, STEPS = 2, 64, 4, 6, 300
LENGTH, DEPTH, END = 2 * DIGITS + 2, WIDTH // HEADS, ord(";")


def examples(count, seed):
    """Make prompts as "3142=", answers as long as those, and both in a row, padded at the end."""
    rng = np.random.default_rng(seed)
    sizes = {"prompt": DIGITS + 1, "answer": DIGITS + 1, "text": LENGTH}
    data = {name: np.zeros((count, size), np.int32) for name, size in sizes.items()}
    data["length"] = rng.integers(3, DIGITS + 2, count)
    for row, size in enumerate(data["length"] - 1):
        digits = rng.integers(ord("0"), ord("9") + 1, size)
        data["prompt"][row, : size + 1] = *digits, ord("=")
        data["answer"][row, : size + 1] = *np.sort(digits), END
        data["text"][row, : 2 * size + 2] = *digits, ord("="), *np.sort(digits), END
    return data


def init(key):
    """Initialize a decoder whose layers are stacked."""
    keys, normal = jax.random.split(key, 5), jax.nn.initializers.lecun_normal(batch_axis=0)
    shapes = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}  # in widths
    sizes = [(LAYERS, rows * WIDTH, columns * WIDTH) for rows, columns in shapes.values()]
    layers = dict(zip(shapes, map(normal, keys[:4], sizes), strict=True))
    embed = 0.1 * jax.random.normal(keys[4], (128 + LENGTH, WIDTH))
    return {"embed": embed[:128], "position": embed[128:], "layers": layers}


def decode(params, tokens, start, cache=None):
    """Read tokens, from the position `start` of each row on; return logits and the new cache."""
    rows, positions = jnp.arange(len(tokens))[:, None], start[:, None] + jnp.arange(tokens.shape[1])
    visible = jnp.arange(LENGTH) <= positions[:, None, :, None]
    normed = lambda x: x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)

    def layer(x, inputs):
        w, keys, values = inputs
        new = (normed(x) @ w["qkv"]).reshape(*x.shape[:2], 3, HEADS, DEPTH)
        keys = keys.at[rows, positions].set(new[:, :, 1])
        values = values.at[rows, positions].set(new[:, :, 2])
        mixed = jax.nn.dot_product_attention(new[:, :, 0], keys, values, mask=visible)
        x = x + mixed.reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(normed(x) @ w["up"]) @ w["down"], (keys, values)

    cache = cache or (jnp.zeros((LAYERS, len(tokens), LENGTH, HEADS, DEPTH)),) * 2
    x = params["embed"][tokens] + params["position"][positions]
    x, cache = jax.lax.scan(layer, x, (params["layers"], *cache))
    return normed(x) @ params["embed"].T, cache


@jax.jit
def generate(params, batch, key, temperature=1e-6):
    """Continue prompts, padded on the right, up to a semicolon; 0 follows it."""
    prompts, lengths = batch["prompt"], batch["length"]
    logits, cache = decode(params, prompts, jnp.zeros_like(lengths))
    # Bytes that are generated replace the keys and values of the padding.
    last = jnp.take_along_axis(logits, lengths[:, None, None] - 1, 1)[:, 0]

    def sample(carry, inputs):
        (logits, cache, has_ended), (i, key) = carry, inputs
        byte = jnp.where(has_ended, 0, jax.random.categorical(key, logits / temperature))
        logits, cache = decode(params, byte[:, None], lengths + i, cache)
        return (logits[:, 0], cache, has_ended | (byte == END)), byte

    start, count = (last, cache, jnp.zeros(len(prompts), bool)), DIGITS + 1
    return jax.lax.scan(sample, start, (jnp.arange(count), jax.random.split(key, count)))[1].T


def loss_fn(params, batch, _key):
    """Return the loss of the answers, from `length` to twice that, and their perplexity."""
    before, after = batch["text"][:, :-1], batch["text"][:, 1:]
    logits, _ = decode(params, before, jnp.zeros(len(before), int))
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, after)
    is_answer = (jnp.arange(1, LENGTH) // batch["length"][:, None] == 1) & batch["mask"][:, None]
    return sf.mean(nll, is_answer), {"perplexity": sf.perplexity(nll, is_answer)}


def measure(state, batch):
    """Compute the metrics of the loss, and the share of exact matches."""
    answer = generate(state.params, batch, state.key)
    exact = sf.mean((answer == batch["answer"]).all(-1), batch["mask"])
    return {**sf.make_eval_step(loss_fn)(state, batch), "exact_match": exact}


def main():
    """Train, and answer the held-out prompts with the best checkpoint."""
    tx = sf.ema_params(optax.adam(optax.cosine_decay_schedule(3e-3, STEPS)), 0.95)
    train = sf.batches(examples(20_000, seed=0), 128, seed=0, remainder="pad")
    test = examples(500, seed=1)
    test_batches = lambda: sf.batches(test, 128, epochs=1, remainder="pad")
    state = sf.init_state(init, tx, jax.random.key(0))
    result = sf.fit(
        sf.make_train_step(loss_fn, tx), state, train, steps=STEPS, run_dir="runs/generation",
        evaluation=sf.Evaluation(measure, test_batches, every=50, ema=True),
        checkpoints=sf.Checkpoints(every=50, keep=1, best="eval/exact_match"),
    )  # fmt: skip
    for name in ("exact_match", "perplexity"):
        print(name, *(f"{value:.3f}" for value in result.history[f"eval/{name}"]))
    params = sf.get_ema(sf.restore("runs/generation", result.state, step="best").state)
    answer = lambda params, batch: generate(params, batch, jax.random.key(0))
    for row, made in enumerate(sf.predict(answer, params, test_batches())[:3]):
        print(bytes([*test["prompt"][row, : test["length"][row]], *made]).decode().rstrip("\0"))


if __name__ == "__main__":
    main()
