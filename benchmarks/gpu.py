"""A decoder of a billion parameters uses an accelerator well, within the predicted memory.

A transformer in bfloat16 with scanned layers and rematerialization takes batches in microbatches,
with fused cuDNN attention on NVIDIA GPUs that support it, and its state sharded over all devices;
then without each of these in turn. Every case runs in a process of its own, since a device counts
its peak memory from the start of a process. Without an accelerator the model is tiny, and there are
no claims about speed. A CPU does not count memory, so "taken" is "-" there.

FLOPs are counted by hand: per token 6 for each parameter of a product (all but the embedding), and
for attention 6 for each layer, position and channel, half of 12 because of the causal mask.
Recomputation does not count. The MFU divides this by the peak, which is measured with products of
bfloat16 matrices in the same process. "dots/by hand" counts the products of the compiled program,
with loops as often as they run: it includes full attention and recomputation, but not cuDNN calls.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from measure import Claim, show

import stepfold as sf


class Size(NamedTuple):
    """How large the model, its batch on each device, and the product that is timed are."""

    layers: int
    width: int
    heads: int
    length: int
    vocab: int
    rows: int
    product: int
    steps: int  # in each timed block


LARGE = Size(18, 2048, 16, 2048, 32_768, rows=32, product=8192, steps=5)
# The products of GPT-2 with 124M parameters, but its head does not share the embedding's weights.
GPT2 = Size(12, 768, 12, 1024, 50_304, rows=64, product=8192, steps=5)
TINY = Size(2, 64, 2, 64, 256, rows=8, product=256, steps=1)
CASES = {
    "everything": {},
    "no accumulation": {"accumulate": 1},
    "no remat": {"remat": False},
    "attention by XLA": {"fused": False},
}


def init(size, key):
    """Initialize the parameters, with stacked layers."""
    wide = size.width
    shapes = {"qkv": (wide, 3 * wide), "proj": (wide, wide)}
    shapes |= {"up": (wide, 4 * wide), "down": (4 * wide, wide)}
    shapes = {name: (size.layers, *shape) for name, shape in shapes.items()}
    shapes |= {"embed": (size.vocab, wide), "out": (wide, size.vocab)}
    draws = zip(shapes.items(), jax.random.split(key, len(shapes)), strict=True)
    return {name: jax.random.normal(k, shape) * wide**-0.5 for (name, shape), k in draws}


def loss_fn(size, remat, attention, params, batch, key):
    """Return the loss of next-token prediction."""
    del key

    def layer(x, p):
        heads = (*x.shape[:2], 3, size.heads, size.width // size.heads)
        q, k, v = jnp.moveaxis((normed(x) @ p["qkv"]).reshape(heads), 2, 0)
        seen = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
        x = x + seen.reshape(x.shape) @ p["proj"]
        return x + jax.nn.gelu(normed(x) @ p["up"]) @ p["down"], None

    layers = {name: params[name] for name in ("qkv", "proj", "up", "down")}
    x = params["embed"][batch["tokens"]]
    x, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False) if remat else layer, x, layers)
    logits = (normed(x) @ params["out"]).astype(jnp.float32)
    return sf.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]))


def normed(x):
    """Apply RMS norm, with the mean square in float32."""
    square = jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(square + 1e-6).astype(x.dtype)


def flops(size, tokens):
    """Count the FLOPs of a step by hand, as described above."""
    products = 12 * size.width**2 * size.layers + size.width * size.vocab
    return tokens * (6 * products + 6 * size.layers * size.length * size.width)


def fused_on(device):
    """Return the fused attention of the device: cuDNN on NVIDIA GPUs since Ampere."""
    nvidia = device.platform == "gpu" and "cuda" in device.client.platform_version
    return "cudnn" if nvidia and float(device.compute_capability) >= 8 else None


def peak_of(device, width, times=8, rounds=7):
    """Time products of bfloat16 matrices on one device, and return FLOPs per second."""
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(width, width)).astype(np.float32) / math.sqrt(width)
    matrix = jax.device_put(jnp.asarray(matrix, jnp.bfloat16), device)

    @jax.jit
    def chain(x, matrix):
        return jax.lax.fori_loop(0, times, lambda _, x: x @ matrix, x)

    chain(matrix, matrix).block_until_ready()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        chain(matrix, matrix).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * width**3 * times / min(seconds)


def timed(step, state, batch, steps, blocks=5):
    """Return the median seconds of a step over blocks, after two steps of warm-up."""
    for _ in range(2):
        state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    seconds = []
    for _ in range(blocks):
        start = time.perf_counter()
        for _ in range(steps):
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append((time.perf_counter() - start) / steps)
    return statistics.median(seconds)


def measure(name, quick=False, size=LARGE):
    """Compile and run one case in this process; on a CPU, the model is tiny."""
    device, count = jax.devices()[0], jax.device_count()
    size = TINY if quick or device.platform == "cpu" else size
    options = {"accumulate": 4, "remat": True, "fused": True} | CASES[name]
    attention = fused_on(device) if options["fused"] else None
    peak = count * peak_of(device, size.product)

    tx, mesh = optax.adamw(1e-4), sf.make_mesh((1, -1), ("dp", "fsdp"))
    start, key = partial(init, size), jax.random.key(0)
    shape = jax.eval_shape(lambda key: sf.init_state(start, tx, key), key)
    plan = sf.make_sharding(shape, mesh)
    grad = sf.sharding.reduce_once(plan) if count > 1 else sf.make_grad
    loss = partial(loss_fn, size, options["remat"], attention)
    kept = {"accumulate": options["accumulate"], "precision": "bf16", "grad": grad}
    step = sf.make_train_step(loss, tx, **kept)
    draw = np.random.default_rng(0).integers
    tokens = draw(0, size.vocab, (size.rows * count, size.length + 1)).astype(np.int32)
    batch = sf.shard_batch({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, mesh)

    row = {
        "devices": f"{count} {device.device_kind}",
        "case": name,
        "attention": attention or "xla",
        "M parameters": sum(leaf.size for leaf in jax.tree.leaves(shape.params)) / 1e6,
        "peak TFLOPS": peak / 1e12,
    }
    took = dict.fromkeys(("ms a step", "tokens/s", "MFU"), "-")
    memory = dict.fromkeys(("predicted MiB", "temp MiB", "taken MiB"), "-")
    row |= took | {"compile s": "-", "dots/by hand": "-"} | memory
    began = time.perf_counter()
    try:
        step = sf.compile_step(step, shape, batch, sharding=plan)
        row["compile s"] = time.perf_counter() - began
        report = sf.describe(step, None, None)
        row["predicted MiB"] = report.memory.peak / 2**20
        row["temp MiB"] = report.memory.temporaries / 2**20
        seconds = timed(step, sf.init_state(start, tx, key, sharding=plan), batch, size.steps)
    except sf.errors.OutOfMemoryError:
        return row | {"ms a step": "too large"}
    seen, by_hand = batch["tokens"].size, flops(size, batch["tokens"].size)
    row |= {"ms a step": 1e3 * seconds, "tokens/s": seen / seconds}
    row |= {"MFU": by_hand / seconds / peak, "dots/by hand": report.flops.dots * count / by_hand}
    most = (device.memory_stats() or {}).get("peak_bytes_in_use")  # None on a CPU
    return row | ({"taken MiB": most / 2**20} if most and not quick else {})


def in_child(name):
    """Run one case in a process of its own."""
    command = [sys.executable, __file__, f"--case={name}"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def judge(rows):
    """Return the claims about the rows."""
    found = {row["case"]: row for row in rows}
    whole = found["everything"]
    claims = [
        Claim(f"temporaries, over those with {name}", whole["temp MiB"] / other, 1.0, clock=False)
        for name in ("no accumulation", "no remat")
        if name in found
        for other in [found[name]["temp MiB"]]
        if "-" not in (other, whole["temp MiB"])
    ]
    for row in rows:
        if row["taken MiB"] != "-":
            ratio = row["taken MiB"] / row["predicted MiB"]
            off = max(ratio, 1 / ratio)
            what = f"memory taken and predicted, the larger over the other, {row['case']}"
            claims.append(Claim(what, off, 1.15, clock=False))
    if "cpu" not in whole["devices"] and whole["MFU"] != "-":
        claims.append(Claim("share of the measured peak that is missed", 1 - whole["MFU"], 0.55))
    slow = found.get("attention by XLA", whole)["ms a step"]
    if whole["attention"] == "cudnn" and isinstance(slow, float):
        claims.append(Claim("time with fused attention, over XLA's", whole["ms a step"] / slow, 1))
    return claims


def main(argv=None):
    """Measure, print the tables and claims, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three cases in this process")
    parser.add_argument("--case", choices=list(CASES), help="run one case here, for JSON")
    options = parser.parse_args(argv)
    if options.case:
        print(json.dumps(measure(options.case)))
        return None
    if options.quick:  # the counted numbers stay the same, and compiling takes half the time
        jax.config.update("jax_disable_most_optimizations", True)
        rows = [measure(name, quick=True) for name in list(CASES)[:3]]
    else:
        rows = [in_child(name) for name in CASES]
    show(rows, judge(rows))
    return rows


if __name__ == "__main__":
    main()
