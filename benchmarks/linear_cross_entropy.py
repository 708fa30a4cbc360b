"""The cross-entropy of a linear layer needs the logits of one block, and no product twice.

Loss and gradients of a layer with a vocabulary are computed in three ways: plainly, by
`sf.linear_cross_entropy`, and with `jax.checkpoint` around each block of a scan. The table shows
temporaries, FLOPs of products, and wall time. The first two are also shown for a device of a TPU
v5e, if libtpu is installed: 8,192 tokens in bfloat16, a vocabulary of 131,072.
"""

import argparse
import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from measure import Claim, ratios, show, take_turns

import stepfold as sf
from stepfold.inspect.flops import count


def plain(features, kernel, labels):
    """Compute the mean loss from the logits of all rows."""
    logits = jnp.matmul(features, kernel, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum() / len(labels)


def blocks(features, kernel, labels, *, size):
    """Compute it with the logits of one block at a time."""
    return sf.linear_cross_entropy(features, kernel, labels, block_size=size).compute()


def checkpointed(features, kernel, labels, *, size):
    """Compute it by a scan over blocks, whose logits the backward pass computes again."""
    part = jax.checkpoint(plain)
    cut = lambda x: x.reshape(-1, size, *x.shape[1:])
    add = lambda total, block: (total + part(block[0], kernel, block[1]), None)
    total, _ = jax.lax.scan(add, jnp.zeros(()), (cut(features), cut(labels)))
    return total / (len(labels) // size)


def measure(shape, size, rounds, dtype=jnp.float32, sharding=None):
    """Compile each way for `(rows, features, vocabulary)`, and time it without a `sharding`."""
    rows, width, vocabulary = shape
    make = partial(jax.ShapeDtypeStruct, sharding=sharding)
    arguments = make((rows, width), dtype), make((width, vocabulary), dtype)
    arguments = *arguments, make((rows,), jnp.int32)
    ways = {"plain": plain, "ours": partial(blocks, size=size)}
    ways["checkpoint"] = partial(checkpointed, size=size)
    traced = {n: jax.jit(jax.value_and_grad(f, (0, 1))).trace(*arguments) for n, f in ways.items()}
    compiled = {name: each.lower().compile() for name, each in traced.items()}
    memory = {n: c.memory_analysis().temp_size_in_bytes / 2**20 for n, c in compiled.items()}
    flops = {name: count(each.jaxpr).dots for name, each in traced.items()}
    times, error = None, {}
    if not sharding:
        rng = np.random.default_rng(0)
        values = [jnp.asarray(rng.normal(size=x.shape), dtype) for x in arguments[:2]]
        values.append(jnp.asarray(rng.integers(0, vocabulary, rows), jnp.int32))
        run = lambda program: lambda: jax.block_until_ready(program(*values))
        times = take_turns({name: run(program) for name, program in compiled.items()}, rounds)
        grads = {name: program(*values)[1][1] for name, program in compiled.items()}
        norm = jnp.linalg.norm(grads["plain"])
        error = {
            name: float(jnp.linalg.norm(g - grads["plain"]) / norm) for name, g in grads.items()
        }
    # The gradient of the kernel in float32, and float32 logits of a block, twice.
    expected = 4 * (width * vocabulary + 2 * size * vocabulary + rows * width) / 2**20
    return [
        {
            "device": "v5e" if sharding else jax.devices()[0].platform,
            "way": name,
            "temp MiB": memory[name],
            "temp/plain": memory[name] / memory["plain"],
            "temp/expected": memory[name] / expected,
            "dots/plain": flops[name] / flops["plain"],
            "time/plain": ratios(times[name], times["plain"])[1] if times else "-",
            "error": error.get(name, "-"),
        }
        for name in ways
    ]


def judge(rows):
    """Return the claims about the rows."""
    ours = [row for row in rows if row["way"] == "ours"]
    (timed,) = (row for row in ours if row["time/plain"] != "-")
    (again,) = (r for r in rows if r["way"] == "checkpoint" and r["time/plain"] != "-")
    most = lambda key: max(row[key] for row in ours)
    return [
        Claim("temporaries, relative to the plain loss", most("temp/plain"), 0.6, clock=False),
        Claim(
            "temporaries, relative to a gradient of the kernel and twice the logits of a block",
            most("temp/expected"),
            1.1,
            clock=False,
        ),
        Claim("FLOPs of products, relative to the plain loss", most("dots/plain"), 1, clock=False),
        Claim("error of the kernel's gradient, relative", timed["error"], 1e-5, clock=False),
        Claim("time, relative to the plain loss", timed["time/plain"], 1.1),
        Claim("time, relative to jax.checkpoint", timed["time/plain"] / again["time/plain"], 0.95),
    ]


def main(argv=None):
    """Measure, print the tables and claims, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small layer, and no TPU")
    quick = parser.parse_args(argv).quick
    rows = measure((1024, 64, 2048), 128, 3) if quick else measure((4096, 256, 16384), 512, 7)
    if not quick and importlib.util.find_spec("libtpu"):
        mesh = sf.make_mesh(devices=sf.sharding.devices_of("v5e:1x1"))
        sharding = jax.NamedSharding(mesh, jax.P())
        rows += measure((8192, 2048, 131072), 1024, 0, jnp.bfloat16, sharding)
    show(rows, judge(rows))
    return rows


if __name__ == "__main__":
    main()
