"""Fine-tune a Llama of the hub with LoRA, merge the factors, and export it under the hub's names.

Run it with `python examples/llama.py`; it takes a few seconds on two cores. It writes a small
random model to `runs/llama/base`, and trains it. Given the folder of another Llama with unscaled
positions and a head of its own, it trains that. The map of names transposes matrices, stacks layers
for a scan, and joins query, key and value in one matrix.
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

CONFIG = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}
CONFIG |= {"model_type": "llama", "rope_theta": 1e4, "architectures": ["LlamaForCausalLM"]}
STEPS, BATCH, LENGTH, RANK = 50, 16, 64, 4


def name_map(config):
    """Map our paths to the hub's names, with linear layers that are (out, in)."""
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    at, linear = "model.layers.{layer}.", partial(sf.NameRule, transpose=(1, 0))
    qkv = tuple(f"{at}self_attn.{name}_proj.weight" for name in "qkv")
    rules = [
        ("embed", "model.embed_tokens.weight"),
        ("norm", "model.norm.weight"),
        linear("head", "lm_head.weight"),
        ("layers/norm_in", at + "input_layernorm.weight"),
        ("layers/norm_mid", at + "post_attention_layernorm.weight"),
        linear("layers/qkv", qkv, sizes=(heads, shared, shared)),
        linear("layers/out", at + "self_attn.o_proj.weight"),
        linear("layers/{name}", at + "mlp.{name}_proj.weight"),  # gate, up and down
    ]
    return sf.NameMap(rules, ignore=[at + "self_attn.rotary_emb"])  # a buffer of older files


def init(config, key):
    """Initialize the parameters, with those of the layers stacked along a leading axis."""
    width, hidden = config["hidden_size"], config["intermediate_size"]
    fused = width + 2 * width * config["num_key_value_heads"] // config["num_attention_heads"]
    shapes = {"qkv": (width, fused), "out": (width, width), "gate": (width, hidden)}
    shapes |= {"up": (width, hidden), "down": (hidden, width)}
    keys, depth = iter(jax.random.split(key, 7)), config["num_hidden_layers"]
    normal = lambda *shape: 0.02 * jax.random.normal(next(keys), shape)
    layers = {name: normal(depth, *shape) for name, shape in shapes.items()}
    layers |= {name: jnp.ones((depth, width)) for name in ("norm_in", "norm_mid")}
    embed, head = normal(config["vocab_size"], width), normal(width, config["vocab_size"])
    return {"embed": embed, "layers": layers, "norm": jnp.ones(width), "head": head}


def apply(config, params, tokens):
    """Return the logits of the next token at every position."""
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    size = config["hidden_size"] // heads
    theta = (config.get("rope_parameters") or config)["rope_theta"]  # new files, old files
    frequencies = theta ** (-np.arange(0, size, 2, np.float32) / size)
    angles = np.arange(tokens.shape[1], dtype=np.float32)[:, None] * frequencies
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def norm(scale, x):
        mean = jnp.square(x).mean(-1, keepdims=True)
        return x * jax.lax.rsqrt(mean + config["rms_norm_eps"]) * scale

    def rotate(x):
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def layer(x, w):
        qkv = (norm(w["norm_in"], x) @ w["qkv"]).reshape(*x.shape[:2], -1, size)
        q, k, v = jnp.split(qkv, (heads, heads + shared), axis=2)
        attended = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x += attended.reshape(x.shape) @ w["out"]
        h = norm(w["norm_mid"], x)
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None

    x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
    return norm(params["norm"], x) @ params["head"]


def init_factors(params, key):
    """Initialize two factors for each stacked matrix. Their product starts at zero."""
    a = lambda w: jax.random.normal(key, (*w.shape[:2], RANK)) / np.sqrt(w.shape[1])
    pair = lambda w: (a(w), jnp.zeros((len(w), RANK, w.shape[2]))) if w.ndim == 3 else None
    return jax.tree.map(pair, params["layers"])


def merge(params, factors):
    """Add the products of the factors to the matrices."""
    add = lambda w, pair: w if pair is None else w + pair[0] @ pair[1]
    return params | {"layers": jax.tree.map(add, params["layers"], factors)}


def loss_fn(config, factors, batch, _key, base):
    """Return the mean cross-entropy of the next token. The base is state that never changes."""
    logits = apply(config, merge(base, factors), batch["tokens"])[:, :-1]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    return sf.mean(nll), {}, base


def main(folder=None, steps=STEPS):
    """Load, train the factors, merge, export."""
    if folder is None:
        folder = Path("runs/llama/base")
        sf.export_params(folder, init(CONFIG, jax.random.key(0)), names=name_map(CONFIG))
        (folder / "config.json").write_text(json.dumps(CONFIG))
    config = json.loads(Path(folder, "config.json").read_text())
    like, names = jax.eval_shape(partial(init, config), jax.random.key(0)), name_map(config)
    base = sf.load_params(folder, like, names=names, cast=True)

    text = np.frombuffer("".join(topics.topics.values()).encode(), np.uint8)  # bytes as tokens
    rows = np.int32(text[: len(text) // LENGTH * LENGTH].reshape(-1, LENGTH))
    tx, variables = optax.adam(1e-2), (init_factors(base, jax.random.key(1)), base)
    state = sf.init_state(variables, tx, jax.random.key(2), stateful=True)
    step = sf.make_train_step(partial(loss_fn, config), tx, stateful=True)
    step = jax.jit(step, donate_argnums=0)
    for i, batch in zip(range(steps), sf.batches({"tokens": rows}, BATCH, seed=0), strict=False):
        state, metrics = step(state, batch)
        if i % 10 == 0 or i == steps - 1:
            print(f"step {i:3}  loss {float(metrics['loss'].compute()):.3f}")

    sf.export_params("runs/llama/tuned", merge(base, state.params), names=names)
    Path("runs/llama/tuned/config.json").write_text(json.dumps(config))
    print("LlamaForCausalLM.from_pretrained('runs/llama/tuned') loads it")


if __name__ == "__main__":
    main(*sys.argv[1:])
