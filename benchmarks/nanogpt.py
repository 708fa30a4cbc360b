"""The CPU setting of nanoGPT by `fit`, and by its loop in torch, for `results`.

Model, schedule, AdamW and clipping are those of `python train.py config/train_shakespeare_char.py
--device=cpu` with the options of nanoGPT's README: 4 layers of width 128, 64 characters, batches of
12, 2,000 steps. The text is Python's manual, by characters. The validation loss is of the whole
last tenth of it, not of 20 random batches as there. Weights and batches are the same in both ways.
Each way has its own process with one core, and both train at the same time. On a machine that
others use, CPU seconds say more than wall seconds.
"""

import itertools
import json
import math
import os
import subprocess
import sys
import time
from functools import cache, partial
from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepfold as sf

LAYERS, HEADS, WIDTH, LENGTH, BATCH = 4, 4, 128, 64, 12
STEPS, WARMUP, EVERY = 2000, 100, 250
RATE, LEAST_RATE, DECAY, BETAS = 1e-3, 1e-4, 0.1, (0.9, 0.99)


@cache
def text():
    """Return the characters of Python's manual as integers, for training and validation."""
    characters = "".join(topics.topics.values())
    codes = np.unique(list(characters), return_inverse=True)[1].astype(np.int32)
    return np.split(codes, [len(codes) * 9 // 10])


def vocabulary():
    """Return the number of different characters."""
    return int(max(part.max() for part in text())) + 1


def training_batches(seed):
    """Return batches of random pieces, of which each is a function of its step."""
    codes = text()[0]
    piece = lambda start: codes[start : start + LENGTH + 1]
    cut = lambda start, _rng: {"x": piece(start)[:-1], "y": piece(start)[1:]}
    return sf.batches(range(len(codes) - LENGTH), BATCH, seed=seed, transform=cut)


def validation_batches():
    """Return all of the validation text in batches, each character once."""
    codes = text()[1]
    count = (len(codes) - 1) // LENGTH
    x, y = (codes[first : first + count * LENGTH].reshape(count, LENGTH) for first in (0, 1))
    return sf.batches({"x": x, "y": y}, 5 * BATCH, epochs=1, remainder="pad")


def draw(seed, layers=LAYERS, width=WIDTH):
    """Draw the weights as numpy arrays, with stacked layers."""
    rng = np.random.default_rng(seed)
    last = 0.02 / math.sqrt(2 * layers)

    def normal(*shape, scale=0.02):
        return (scale * rng.normal(size=shape)).astype(np.float32)

    stacked = {
        "norm_in": np.ones((layers, width), np.float32),
        "qkv": normal(layers, width, 3 * width),
        "proj": normal(layers, width, width, scale=last),
        "norm_mid": np.ones((layers, width), np.float32),
        "up": normal(layers, width, 4 * width),
        "down": normal(layers, 4 * width, width, scale=last),
    }
    ends = {"embed": normal(vocabulary(), width), "place": normal(LENGTH, width)}
    return ends | {"norm": np.ones(width, np.float32), "layers": stacked}


def normed(x, scale):
    """Apply layer norm."""
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def features(params, tokens):
    """Return what the last layer makes of each token."""

    def layer(x, p):
        qkv = (normed(x, p["norm_in"]) @ p["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1)
        heads = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True)
        x = x + heads.reshape(x.shape) @ p["proj"]
        up = jax.nn.gelu(normed(x, p["norm_mid"]) @ p["up"], approximate=False)
        return x + up @ p["down"], None

    x = params["embed"][tokens] + params["place"]
    return normed(jax.lax.scan(layer, x, params["layers"])[0], params["norm"])


def loss_fn(params, batch, _key):
    """Return the mean loss of the next character; the head has the weights of the embedding."""
    logits = features(params, batch["x"]) @ params["embed"].T
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    mask = batch.get("mask")
    return sf.mean(nll, None if mask is None else mask[:, None])


def rate(step, steps=STEPS, *, np=jnp):
    """Return the learning rate of a step: a linear warmup, and then a cosine."""
    warm = RATE * (step + 1) / (WARMUP + 1)
    done = (step - WARMUP) / (steps - WARMUP)
    cosine = LEAST_RATE + 0.5 * (1 + np.cos(math.pi * done)) * (RATE - LEAST_RATE)
    return np.where(step < WARMUP, warm, cosine)


def optimizer(steps=STEPS, clip=None):
    """Make AdamW with clipping and the schedule; norms do not decay."""
    decays = {"embed": True, "place": True, "norm": False}
    norms = ("norm_in", "norm_mid")
    decays["layers"] = {name: name not in norms for name in (*norms, "qkv", "proj", "up", "down")}
    adamw = optax.adamw(partial(rate, steps=steps), *BETAS, weight_decay=DECAY, mask=decays)
    return optax.chain(clip or optax.clip_by_global_norm(1.0), adamw)


def with_fit(steps, every, seed, evaluated, clocks):
    """Train with `fit`; `evaluated` gets the clocks after training, and the validation loss."""
    tx = optimizer(steps)
    measure = sf.make_eval_step(loss_fn)

    def evaluate(state):
        jax.block_until_ready(state)
        done = clocks()
        evaluated(done, sf.evaluate(measure, state, validation_batches())["loss"])
        return {}

    sf.fit(
        sf.make_train_step(loss_fn, tx),
        sf.init_state(draw(seed), tx, jax.random.key(seed)),
        training_batches(seed),
        steps=steps,
        evaluation=sf.Evaluation(evaluate, every=every, at_start=True),
    )


def with_torch(steps, every, seed, evaluated, clocks):
    """Train as the loop of nanoGPT does, without `torch.compile`, as its README says for CPUs."""
    import torch
    import torch.nn.functional as F  # noqa: N812  the usual name

    weights = draw(seed)
    stacked = weights.pop("layers")
    weights |= {f"{name}{i}": stacked[name][i] for name in stacked for i in range(LAYERS)}
    p = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in weights.items()}

    def loss_of(batch):
        tokens, labels = (torch.tensor(batch[name]).long() for name in ("x", "y"))
        x = p["embed"][tokens] + p["place"]
        for i in range(LAYERS):
            qkv = F.layer_norm(x, (WIDTH,), p[f"norm_in{i}"]) @ p[f"qkv{i}"]
            split = qkv.view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            heads = F.scaled_dot_product_attention(*split, is_causal=True)
            x = x + heads.transpose(1, 2).reshape(x.shape) @ p[f"proj{i}"]
            up = F.gelu(F.layer_norm(x, (WIDTH,), p[f"norm_mid{i}"]) @ p[f"up{i}"])
            x = x + up @ p[f"down{i}"]
        logits = F.layer_norm(x, (WIDTH,), p["norm"]) @ p["embed"].T
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")

    def validation_loss():
        with torch.no_grad():
            kept = [
                loss_of(batch)[torch.from_numpy(np.asarray(batch["mask"])) > 0]
                for batch in validation_batches()
            ]
        return float(torch.cat(kept).mean())

    groups = [
        {"params": [x for x in p.values() if x.dim() >= 2], "weight_decay": DECAY},
        {"params": [x for x in p.values() if x.dim() < 2], "weight_decay": 0.0},
    ]
    tx = torch.optim.AdamW(groups, RATE, BETAS)
    evaluated(clocks(), validation_loss())
    for step, batch in zip(range(steps), training_batches(seed), strict=False):
        for group in tx.param_groups:
            group["lr"] = float(rate(step, steps, np=np))
        loss_of(batch).mean().backward()
        torch.nn.utils.clip_grad_norm_(p.values(), 1.0)
        tx.step()
        tx.zero_grad(set_to_none=True)
        if (step + 1) % every == 0:
            evaluated(clocks(), validation_loss())


WAYS = {"fit": with_fit, "torch": with_torch}


def child(name, core, *numbers):
    """Train in this process, on one core, and print a line after each evaluation."""
    os.sched_setaffinity(0, {int(core)})

    def clocks():
        return time.perf_counter(), time.process_time()

    began = clocks()

    def evaluated(done, loss):
        nonlocal began
        point = {"loss": loss, "seconds": done[0] - began[0], "cpu": done[1] - began[1]}
        print(json.dumps(point), flush=True)
        began = clocks()

    WAYS[name](*map(int, numbers), evaluated, clocks)


def train(names, seed, steps=STEPS, every=EVERY):
    """Train at the same time in each way, each on its core.

    Returns:
      For each way the validation losses, and the wall and CPU seconds of the training before each.
    """
    cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
    numbers = [str(number) for number in (steps, every, seed)]
    running = {
        name: subprocess.Popen(
            [sys.executable, __file__, name, str(core), *numbers],
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, core in zip(names, cores, strict=False)
    }
    found = {}
    for name, process in running.items():
        points = [json.loads(line) for line in process.communicate()[0].splitlines()]
        if process.returncode:
            raise SystemExit(f"{name} ended with exit code {process.returncode}")
        found[name] = {key: [point[key] for point in points] for key in points[0]}
    return found


if __name__ == "__main__":
    child(*sys.argv[1:])
