"""Fine-tune a GPT-2 of the hub, and export it under the hub's names, for transformers and others.

Run it with `python examples/gpt2.py`; it takes a few seconds on two cores. It writes a small random
model to `runs/gpt2/base`, and trains it. Given the folder of a `config.json` and safetensors, it
trains that model. One map of names serves both directions: it stacks the layers for a scan, and
splits the matrix that holds query, key and value.
"""

import json
import sys
from functools import partial
from pathlib import Path
from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepfold as sf

CONFIG = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 3, "n_head": 4}
CONFIG |= {"model_type": "gpt2", "layer_norm_epsilon": 1e-5, "architectures": ["GPT2LMHeadModel"]}
STEPS, BATCH, LENGTH = 50, 16, 64


def name_map(prefix=""):
    """Map our paths to the hub's names. Files that transformers wrote begin with `transformer.`."""
    parts = [
        ("norm_in", "ln_1"),
        ("norm_mid", "ln_2"),
        ("out", "attn.c_proj"),
        ("up", "mlp.c_fc"),
        ("down", "mlp.c_proj"),
    ]
    fused = tuple(f"layers/{name}/{{kind}}" for name in ("query", "key", "value"))
    return sf.checkpoint.NameMap(
        [
            ("embed", prefix + "wte.weight"),
            ("position", prefix + "wpe.weight"),
            ("norm/{kind}", prefix + "ln_f.{kind}"),
            sf.checkpoint.NameRule(fused, prefix + "h.{layer}.attn.c_attn.{kind}", axis=-1),
            *((f"layers/{o}/{{kind}}", f"{prefix}h.{{layer}}.{t}.{{kind}}") for o, t in parts),
        ],
        # Causal masks, and the embedding once more.
        ignore=[*(prefix + f"h.{{layer}}.attn.{m}bias" for m in ("", "masked_")), "lm_head"],
    )


def init(config, key):
    """Initialize the parameters, with those of the layers stacked along a leading axis."""
    width, depth = config["n_embd"], config["n_layer"]
    keys = iter(jax.random.split(key, 8))
    normal = lambda *shape: 0.02 * jax.random.normal(next(keys), shape)
    linear = lambda n, m: {"weight": normal(depth, n, m), "bias": jnp.zeros((depth, m))}
    norm = lambda *shape: {"weight": jnp.ones(shape), "bias": jnp.zeros(shape)}
    layers = {name: linear(width, width) for name in ("query", "key", "value", "out")}
    layers |= {"up": linear(width, 4 * width), "down": linear(4 * width, width)}
    layers |= {name: norm(depth, width) for name in ("norm_in", "norm_mid")}
    embed, position = normal(config["vocab_size"], width), normal(config["n_positions"], width)
    return {"embed": embed, "position": position, "layers": layers, "norm": norm(width)}


def apply(config, params, tokens):
    """Return the logits of the next token at every position."""

    def norm(w, x):
        x = x - x.mean(-1, keepdims=True)
        x *= jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + config["layer_norm_epsilon"])
        return x * w["weight"] + w["bias"]

    def layer(x, w):
        linear = lambda name, x: x @ w[name]["weight"] + w[name]["bias"]
        h = norm(w["norm_in"], x)
        split = (*x.shape[:2], config["n_head"], -1)
        q, k, v = (linear(name, h).reshape(split) for name in ("query", "key", "value"))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x += linear("out", attended.reshape(x.shape))
        h = jax.nn.gelu(linear("up", norm(w["norm_mid"], x)), approximate=True)
        return x + linear("down", h), None

    x = params["embed"][tokens] + params["position"][: tokens.shape[1]]
    x, _ = jax.lax.scan(layer, x, params["layers"])
    return norm(params["norm"], x) @ params["embed"].T


def loss_fn(config, params, batch, _key):
    """Return the mean cross-entropy of the next token."""
    logits = apply(config, params, batch)[:, :-1]
    return sf.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]))


def main(folder=None, prefix="", steps=STEPS):
    """Load, fine-tune, export."""
    names = name_map(prefix)
    if folder is None:
        folder = Path("runs/gpt2/base")
        sf.checkpoint.export_params(folder, init(CONFIG, jax.random.key(0)), names=names)
        (folder / "config.json").write_text(json.dumps(CONFIG))
    config = json.loads(Path(folder, "config.json").read_text())
    like = jax.eval_shape(partial(init, config), jax.random.key(0))
    params = sf.checkpoint.load_params(folder, like, names=names, cast=True)

    text = "".join(topics.topics.values()).encode()[: 4096 * LENGTH]  # bytes as tokens
    rows = np.frombuffer(text, np.uint8).astype(np.int32).reshape(-1, LENGTH)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    step = sf.make_train_step(partial(loss_fn, config), tx)
    state = sf.init_state(params, tx, jax.random.key(1))
    result = sf.fit(step, state, sf.batches(rows, BATCH, seed=0), steps=steps, log_every=10)
    print("loss", *(f"{loss:.3f}" for loss in result.history["train/loss"]))

    sf.checkpoint.export_params("runs/gpt2/tuned", result.state.params, names=names)
    Path("runs/gpt2/tuned/config.json").write_text(json.dumps(config))
    print("GPT2LMHeadModel.from_pretrained('runs/gpt2/tuned') loads it")


if __name__ == "__main__":
    main(*sys.argv[1:])
