"""A small transformer that scans over its layers, and a mixture of experts, for the layouts."""

import jax
import jax.numpy as jnp
import numpy as np

import stepfold as sf

LAYERS, WIDTH, HEADS, HIDDEN, WORDS, LENGTH, EXAMPLES, EXPERTS = 2, 32, 8, 64, 32, 16, 16, 8


def init(key):
    keys = iter(jax.random.split(key, 6))
    normal = lambda *shape: jax.random.normal(next(keys), shape) / shape[-1] ** 0.5
    return {
        "embed": normal(WORDS, WIDTH),
        "layers": {
            "norm": jnp.ones((LAYERS, 2, WIDTH)),
            "qkv": normal(LAYERS, WIDTH, 3, HEADS, WIDTH // HEADS),
            "out": normal(LAYERS, HEADS, WIDTH // HEADS, WIDTH),
            "up": normal(LAYERS, WIDTH, HIDDEN),
            "down": normal(LAYERS, HIDDEN, WIDTH),
        },
        "head": normal(WIDTH, WORDS),
    }


def apply(params, words, place):
    """Give the logits; `place` may say where activations of (example, position, …) are to be."""

    def layer(x, params):
        q, k, v = jnp.einsum("btd,dnhe->nbthe", _normed(x, params["norm"][0]), params["qkv"])
        scores = jnp.einsum("bthe,bshe->bhts", q, k) / q.shape[-1] ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        mixed = jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(scores), v)
        x = place(x + jnp.einsum("bthe,hed->btd", mixed, params["out"]))
        hidden = jax.nn.gelu(_normed(x, params["norm"][1]) @ params["up"])
        return place(x + hidden @ params["down"]), None

    x, _ = jax.lax.scan(layer, place(params["embed"][words]), params["layers"])
    return x @ params["head"]


def _normed(x, scale):
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def loss_with(place):
    def loss(params, batch, key):
        logits = apply(params, batch["words"], place)[:, :-1]
        targets, mask = batch["words"][:, 1:], batch["mask"][:, 1:]
        scale = jax.nn.logsumexp(logits, -1)
        nll = scale - (logits * jax.nn.one_hot(targets, WORDS, dtype=logits.dtype)).sum(-1)
        hit = logits.argmax(-1).astype(targets.dtype) == targets
        terms = {"nll": sf.mean(nll, mask), "scale": sf.mean(1e-4 * scale**2)}
        return terms, {"accuracy": sf.mean(hit, mask)}

    return loss


loss = loss_with(lambda x: x)


def batch(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, LENGTH + 1, size=EXAMPLES)
    return {
        "words": rng.integers(0, WORDS, size=(EXAMPLES, LENGTH), dtype=np.int32),
        "mask": np.arange(LENGTH) < lengths[:, None],
    }


def init_experts(key):
    keys = iter(jax.random.split(key, 3))
    normal = lambda *shape: jax.random.normal(next(keys), shape) / shape[-2] ** 0.5
    return {
        "router": normal(WIDTH, EXPERTS),
        "experts": {"up": normal(EXPERTS, WIDTH, HIDDEN), "down": normal(EXPERTS, HIDDEN, WIDTH)},
    }


def expert_loss(params, batch, key):
    words = jax.nn.one_hot(batch["words"], WIDTH, dtype=params["router"].dtype)
    x = (words * batch["mask"][:, :, None].astype(words.dtype)).sum(1)
    shares = jax.nn.softmax(x @ params["router"])
    chosen = jax.nn.one_hot(shares.argmax(-1), EXPERTS, dtype=x.dtype)
    hidden = jax.nn.gelu(jnp.einsum("bd,be,edf->ebf", x, chosen, params["experts"]["up"]))
    made = jnp.einsum("ebf,efd,be->bd", hidden, params["experts"]["down"], chosen * shares)
    balance = EXPERTS * (chosen.mean(0) * shares.mean(0)).sum()
    return {"error": sf.mean((made - x) ** 2), "balance": 1e-2 * balance}
