"""Fine-tune a Llama of the hub with LoRA, merge the factors, and export it under the hub's names.

Run it with `python examples/llama.py`; it takes a few seconds on two cores. It trains a small
random model, or that of a folder, if it has plain rotary embeddings and an untied head. The map of
names transposes matrices, stacks layers for a scan, and joins query, key and value in one matrix.
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
    at, linear = "model.layers.{layer}.", partial(sf.checkpoint.NameRule, transpose=(1, 0))
    qkv = tuple(f"{at}self_attn.{name}_proj.weight" for name in "qkv")
    rules = [
        ("embed", "model.embed_tokens.weight"),
        ("norm", "model.norm.weight"),
        linear("head", "lm_head.weight"),
        ("layers/{name}_layernorm", at + "{name}_layernorm.weight"),  # input, post_attention
        linear("layers/qkv", qkv, sizes=(heads, shared, shared)),
        linear("layers/out", at + "self_attn.o_proj.weight"),
        linear("layers/{name}", at + "mlp.{name}_proj.weight"),  # gate, up, down
    ]
    return sf.checkpoint.NameMap(rules, ignore=[at + "self_attn.rotary_emb"])  # in older files


def init(config, key):
    """Initialize the parameters, with those of the layers stacked along a leading axis."""
    width, hidden = config["hidden_size"], config["intermediate_size"]
    fused = width + 2 * width * config["num_key_value_heads"] // config["num_attention_heads"]
    shapes = {"qkv": (width, fused), "out": (width, width), "down": (hidden, width)}
    shapes |= {"gate": (width, hidden), "up": (width, hidden)}
    keys, depth = iter(jax.random.split(key, 7)), config["num_hidden_layers"]
    normal = lambda *shape: 0.02 * jax.random.normal(next(keys), shape)
    layers = {name: normal(depth, *shape) for name, shape in shapes.items()}
    layers |= {f"{at}_layernorm": jnp.ones((depth, width)) for at in ("input", "post_attention")}
    top = {"embed": normal(config["vocab_size"], width), "norm": jnp.ones(width)}
    return {**top, "layers": layers, "head": normal(width, config["vocab_size"])}


def apply(config, params, tokens):
    """Return the logits of the next token at every position."""
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    size, eps = config["hidden_size"] // heads, config["rms_norm_eps"]
    theta = (config.get("rope_parameters") or config)["rope_theta"]  # new files, old files
    angles = np.outer(np.arange(tokens.shape[1]), theta ** (-np.arange(0, size, 2) / size))
    turn = np.complex64(np.exp(1j * angles))[:, None]
    norm = lambda scale, x: x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps) * scale

    def layer(x, w):
        qkv = (norm(w["input_layernorm"], x) @ w["qkv"]).reshape(*x.shape[:2], -1, size)
        qk, v = jnp.split(qkv, [heads + shared], axis=2)
        qk = jax.lax.complex(*jnp.split(qk, 2, axis=-1)) * turn
        q, k = jnp.split(jnp.concatenate([qk.real, qk.imag], axis=-1), [heads], axis=2)
        x += jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]
        h = norm(w["post_attention_layernorm"], x)
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
    logits = apply(config, merge(base, factors), batch)[:, :-1]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    return sf.mean(nll), {}, base


def main(folder=None, steps=STEPS):
    """Load, train the factors, merge, export."""
    config = CONFIG if folder is None else json.loads(Path(folder, "config.json").read_text())
    names, start, key = name_map(config), partial(init, config), jax.random.key(0)
    if folder is None:
        sf.checkpoint.export_params(folder := "runs/llama/base", start(key), names=names)
    base = sf.checkpoint.load_params(folder, jax.eval_shape(start, key), names=names, cast=True)
    text = "".join(topics.topics.values()).encode()[: 4096 * LENGTH]  # bytes as tokens
    rows = np.frombuffer(text, np.uint8).astype(np.int32).reshape(-1, LENGTH)
    tx, variables = optax.adam(1e-2), (init_factors(base, jax.random.key(1)), base)
    step = sf.make_train_step(partial(loss_fn, config), tx, stateful=True)
    state = sf.init_state(variables, tx, jax.random.key(2), stateful=True)
    result = sf.fit(step, state, sf.batches(rows, BATCH, seed=0), steps=steps, log_every=10)
    print("loss", *(f"{loss:.3f}" for loss in result.history["train/loss"]))
    sf.checkpoint.export_params("runs/llama/tuned", merge(base, result.state.params), names=names)
    Path("runs/llama/tuned/config.json").write_text(json.dumps(config))
    print("LlamaForCausalLM.from_pretrained('runs/llama/tuned') loads it")


if __name__ == "__main__":
    main(*sys.argv[1:])
