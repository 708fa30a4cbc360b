"""Accumulation needs the memory of one microbatch and the FLOPs of the full batch.

A small decoder takes one update on a batch of masked sequences, with an auxiliary loss term, in 1,
4, 16 and 64 microbatches. The table shows the temporaries of the compiled step, its FLOPs, the CPU
time of tracing and compiling, and the wall time of an update, compared with a hand-written scan and
with `optax.MultiSteps` in a Python loop. These two average the means of the microbatches, which is
not the mean of the batch where masks differ.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import optax
from decoder import init, loss_fn, make_batch
from measure import Claim, ratios, show, take_turns

import stepfold as sf
from stepfold.inspect.flops import count


def scanned_step(n, tx, state, batch):
    """Take an update with the usual hand-written scan: the mean of the microbatch means."""

    def body(total, micro):
        return jax.tree.map(jnp.add, total, _plain_grad(state.params, micro)), None

    start = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params)
    total, _ = jax.lax.scan(body, start, _split(batch, n))
    return _updated(tx, state, *jax.tree.map(lambda x: x / n, total))


def micro_step(tx, state, batch):
    """Take one microbatch step of `optax.MultiSteps`."""
    return _updated(tx, state, *_plain_grad(state.params, batch))


def _plain_grad(params, batch):
    def loss(params):
        return sum(term.compute() for term in loss_fn(params, batch, None).values())

    return jax.value_and_grad(loss)(params)


def _updated(tx, state, loss, grads):
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    state = state._replace(step=state.step + 1, params=params, opt_state=opt_state)
    return state, {"loss": loss, "grad_norm": optax.tree.norm(grads)}


def _split(batch, n):
    return jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), batch)


def measure(counts, size, rounds, compiles):
    """Measure an update for each number of microbatches, the first of them one.

    `expected` is the number of temporaries according to the claim. The number of `MultiSteps`
    includes the gradients that it keeps between steps.
    """
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    batch, built, runs = make_batch(size), {}, {}

    def build(name, step, tx, batches):
        state = sf.init_state(init, tx, jax.random.key(0))
        built[name] = jax.jit(step, donate_argnums=0).lower(state, batches[0]).compile()
        runs[name] = _runner(built[name], state, batches)

    ours = {n: sf.make_train_step(loss_fn, tx, accumulate=n) for n in counts}
    ours = {n: partial(build, ("ours", n), step, tx, [batch]) for n, step in ours.items()}
    building = take_turns(ours, compiles, warm=compiles > 1)
    for n in counts:
        build(("scan", n), partial(scanned_step, n, tx), tx, [batch])
        multi, parts = optax.MultiSteps(tx, n).gradient_transformation(), _split(batch, n)
        parts = [jax.tree.map(lambda x, i=i: x[i], parts) for i in range(n)]
        build(("multi", n), partial(micro_step, multi), multi, parts)
    times = take_turns(runs, rounds)

    params = jax.tree.leaves(jax.eval_shape(init, jax.random.key(0)))
    gradient = sum(leaf.size * leaf.dtype.itemsize for leaf in params) / 2**20
    temporaries = {k: v.memory_analysis().temp_size_in_bytes / 2**20 for k, v in built.items()}
    texts = {n: built["ours", n].as_text() for n in counts}
    shape = jax.eval_shape(lambda: sf.init_state(init, tx, jax.random.key(0)))
    steps = {n: sf.make_train_step(loss_fn, tx, accumulate=n) for n in counts}
    flops = {n: count(jax.make_jaxpr(step)(shape, batch)).dots for n, step in steps.items()}
    return [
        {
            "microbatches": n,
            "temp MiB": temporaries["ours", n],
            "expected": (temporaries["ours", 1] - gradient) / n + min(n, 2) * gradient,
            "gradient": gradient,
            "scan's": temporaries["scan", n],
            "MultiSteps'": temporaries["multi", n] + gradient,
            "dots/full": flops[n] / flops[1],
            "HLO/full": texts[n].count("\n") / texts[1].count("\n"),
            "compile/full": ratios(building[n], building[1])[0],
            "time/full": ratios(times["ours", n], times["ours", 1])[1],
            "time/scan": ratios(times["ours", n], times["scan", n])[1],
            "time/MultiSteps": ratios(times["ours", n], times["multi", n])[1],
        }
        for n in counts
    ]


def _runner(step, state, batches):
    held = [state]

    def run():
        for batch in batches:
            held[0], metrics = step(held[0], batch)
        jax.block_until_ready((held, metrics))

    return run


def judge(rows):
    """Return the claims about the rows."""
    most = {name: max(row[name] for row in rows[1:]) for name in rows[0]}
    least = {name: min(row[name] for row in rows[1:]) for name in rows[0]}
    text = most["HLO/full"] / least["HLO/full"]
    return [
        Claim(
            "temporaries, relative to 1/n of the activations of the full batch, the gradient of a "
            "microbatch and one gradient buffer",
            max(row["temp MiB"] / row["expected"] for row in rows[1:]),
            1.05,
            clock=False,
        ),
        Claim(
            "FLOPs of products, relative to the full batch", most["dots/full"], 1.02, clock=False
        ),
        Claim("program text is flat in n, most to least", text, 1.1, clock=False),
        Claim("CPU time to compile, relative to the full batch", most["compile/full"], 1.25),
        Claim("time of an update, relative to the inexact scan by hand", most["time/scan"], 1.05),
        Claim("time of an update, relative to optax.MultiSteps", most["time/MultiSteps"], 1.05),
    ]


def main(argv=None):
    """Measure, print the tables and claims, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small batch and few rounds")
    quick = parser.parse_args(argv).quick
    if quick:  # the counted numbers stay the same, and compiling takes half the time
        jax.config.update("jax_disable_most_optimizations", True)
    rows = measure((1, 4), 8, 1, 1) if quick else measure((1, 4, 16, 64), 64, 11, 3)
    show(rows, judge(rows))
    return rows


if __name__ == "__main__":
    main()
