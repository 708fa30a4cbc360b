"""Moments in bfloat16 train as those in float32 do, with half the bytes, if rounded stochastically.

A small GPT learns the bytes of Python's manual. All runs see the same batches and compute in
float32; they differ in how optimizer state, and parameters, are stored between steps. Each has
several seeds of the initial parameters. The noise is the standard deviation of the final losses of
float32 over the seeds. "nearest" is the naive cast: it rounds to the nearest bfloat16.
"""

import argparse
import statistics
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpt import batches, draw, nll
from measure import Claim, show

import stepfold as sf

WIDTH, BATCH = 64, 4
EXACT, MOMENTS, ALL = "float32", "bfloat16 moments, stochastic", "bfloat16 all, stochastic"
NEAREST, ALL_NEAREST = "bfloat16 moments, nearest", "bfloat16 all, nearest"


def nearest(tx):
    """Wrap an optimizer to cast its moments to bfloat16, as is often done by hand."""

    def init(params):
        return optax.tree.cast(tx.init(params), jnp.bfloat16)

    def update(grads, state, params):
        updates, state = tx.update(grads, optax.tree.cast(state, jnp.float32), params)
        return updates, optax.tree.cast(state, jnp.bfloat16)

    return optax.GradientTransformation(init, update)


# How the optimizer is wrapped, and the dtype of the parameters. Moments have the dtype of the
# parameters by default.
WAYS = {
    EXACT: (lambda tx: tx, jnp.float32),
    MOMENTS: (sf.optim.low_precision, jnp.float32),
    NEAREST: (nearest, jnp.float32),
    ALL: (sf.optim.low_precision, jnp.bfloat16),
    ALL_NEAREST: (lambda tx: tx, jnp.bfloat16),
}


def loss_fn(params, batch, key):
    """Return the mean loss of a byte."""
    del key
    return sf.mean(nll(params, batch))


def prepare(way, steps):
    """Return the jitted step and a function from a seed to the state."""
    wrap, dtype = WAYS[way]
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 20, steps, 3e-5)
    tx = wrap(optax.adamw(rate, b2=0.999, weight_decay=0.1))
    # "f32" casts bfloat16 parameters up, so that only what is stored differs.
    step = jax.jit(sf.make_train_step(loss_fn, tx, precision="f32"), donate_argnums=0)

    def start(seed):
        params = jax.tree.map(lambda w: jnp.asarray(w, dtype), draw(seed, WIDTH))
        return sf.init_state(params, tx, jax.random.key(0))

    return step, start


def final_loss(step, state, steps):
    """Train, and return the mean loss of the last tenth of the steps."""
    losses = []
    for batch in batches(steps, BATCH):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    last = jax.device_get(losses[-(steps // 10) :])
    return float(np.mean([loss.total / loss.count for loss in last]))


def size(tree):
    """Return the KiB of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)) / 1024


def measure(steps, seeds):
    """Train in each way with each seed; return a row for each way."""
    rows, exact = [], []
    for way in WAYS:
        step, start = prepare(way, steps)
        state = jax.eval_shape(partial(start, 0))
        parts = {"params KiB": size(state.params), "opt_state KiB": size(state.opt_state)}
        losses = [final_loss(step, start(seed), steps) for seed in range(seeds)]
        exact = exact or losses
        rows.append(
            {
                "stored": way,
                **{f"seed {seed}": loss for seed, loss in enumerate(losses)},
                "mean": statistics.mean(losses),
                "- float32": statistics.mean(losses) - statistics.mean(exact),
                "noise": statistics.stdev(exact),
                **parts,
            }
        )
    return rows


def judge(rows):
    """Return the claims about the rows."""
    ways = {row["stored"]: row for row in rows}
    moments, exact = ways[MOMENTS], ways[EXACT]
    halves = moments["opt_state KiB"] / exact["opt_state KiB"]
    claims = [Claim("bytes of the optimizer's state, over float32", halves, 0.501, clock=False)]
    for way in (MOMENTS, ALL):
        row = ways[way]
        apart = abs(row["- float32"]) / row["noise"]
        claims.append(Claim(f"{way}: final loss, in noises from float32", apart, 0.5, clock=False))
    return claims


def main(argv=None):
    """Measure, print the tables and claims, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="60 steps of two seeds")
    quick = parser.parse_args(argv).quick
    rows = measure(60, 2) if quick else measure(2000, 3)
    show(rows, judge(rows))
    return rows


if __name__ == "__main__":
    main()
