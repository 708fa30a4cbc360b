"""A train step costs the host no more than a hand-written step.

The same model and optimizer (many tiny leaves, `optax.adamw`) in the same container, with the
state donated: through `make_train_step`, called by `jax.jit` and by `compile_step`, and by hand,
returning loss and gradient norm as the same metrics, as plain totals and weights, or as bare
scalars, which cannot be merged exactly. All steps share one state, so that its address in
memory favors none. Programs that are compiled earlier run a few percent faster, so each step occurs
twice, in the order a b c d e e d c b a, and counts with the mean. Times are per step, over
blocks of steps, the ratios medians of those in a round; the ratio of the two copies shows how far
to trust them.
"""

import argparse
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from clu.metrics import Average
from measure import Claim, ratios, show, take_turns

import stepfold as sf

WIDTH, EXAMPLES = 8, 8


def squares(params, batch):
    """Return the squared error of each example. Every leaf is a unit of one layer."""
    units = jnp.tanh(batch["x"] @ jnp.stack(params).T)
    return (units.mean(-1) - batch["y"]) ** 2


def by_hand(tx, report):
    """Make a step without a library."""

    def step(state, batch):
        def loss(params):
            return squares(params, batch).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        state = state._replace(step=state.step + 1, params=params, opt_state=opt_state)
        return state, report(value, optax.tree.norm(grads))

    return step


def scalars(loss, norm):
    """Report bare numbers."""
    return {"loss": loss, "grad_norm": norm}


def averages(loss, norm):
    """Report the same metrics as stepfold."""
    return {name: Average(**parts) for name, parts in totals(loss, norm).items()}


def totals(loss, norm):
    """Report totals and weights, which can be merged exactly over steps."""
    loss = {"total": loss * EXAMPLES, "count": jnp.full((), EXAMPLES, jnp.float32)}
    return {"loss": loss, "grad_norm": {"total": norm, "count": jnp.ones(())}}


def measure(leaves, rounds, block):
    """Measure all steps on a state with about this number of leaves."""
    tx, rng = optax.adamw(1e-3), np.random.default_rng(0)
    params = [rng.normal(size=WIDTH).astype(np.float32) for _ in range(round(leaves / 3) - 1)]
    x = rng.normal(size=(EXAMPLES, WIDTH)).astype(np.float32)
    batch = {"x": x, "y": np.ones(EXAMPLES, np.float32)}
    # Committed to its device, as `compile_step` returns it: otherwise jit compiles each step twice.
    # A program of 1,500 leaves takes 4,500 memory maps, and Linux allows a process 65,530
    # (`vm.max_map_count`). XLA's compiler dies with SIGSEGV when there are no more.
    state = jax.device_put(sf.init_state(params, tx, jax.random.key(0)), jax.devices()[0])

    def loss_fn(params, batch, key):
        del key
        return sf.mean(squares(params, batch))

    makers = {
        "ours": partial(sf.make_train_step, loss_fn, tx),
        "ours, compile_step": partial(sf.make_train_step, loss_fn, tx),
        "by hand, same metrics": partial(by_hand, tx, averages),
        "by hand, totals": partial(by_hand, tx, totals),
        "by hand, scalars": partial(by_hand, tx, scalars),
    }
    names = [(name, 1) for name in makers] + [(name, 2) for name in reversed(makers)]
    built = {name: _built(name[0], makers[name[0]](), state, batch) for name in names}
    steps, flops = ({name: pair[i] for name, pair in built.items()} for i in (0, 1))
    kinds = {name: jax.eval_shape(make(), state, batch)[1] for name, make in makers.items()}
    held = [state]
    calls = {name: _python_calls(step, held, batch) for name, step in steps.items()}
    runs = {name: partial(_fold, step, held, batch, block) for name, step in steps.items()}
    times = take_turns(runs, rounds)
    both = {name: np.add(times[name, 1], times[name, 2]) / block / 2 * 1e6 for name in makers}
    return [
        {
            "state leaves": len(jax.tree.leaves(held)),
            "step": name,
            "metric leaves": len(jax.tree.leaves(kinds[name])),
            "Python calls": calls[name, 1],
            "CPU us": float(np.median(both[name][:, 0])),
            "wall us": float(np.median(both[name][:, 1])),
            "copies, CPU": ratios(times[name, 1], times[name, 2])[0],
            "FLOPs, ours/it": flops["ours", 1] / flops[name, 1],
            "CPU, ours/it": float(ratios(both["ours"], both[name])[0]),
            "wall, ours/it": float(ratios(both["ours"], both[name])[1]),
        }
        for name in makers
    ]


def _fold(step, held, batch, times):
    for _ in range(times):
        held[0], metrics = step(held[0], batch)
    jax.block_until_ready((held, metrics))


def _built(name, step, state, batch):
    """Compile a step, and return the callable and its FLOPs."""
    if name.endswith("compile_step"):
        step = sf.compile_step(step, state, batch)
        return step, step.compiled.cost_analysis()["flops"]
    step = jax.jit(step, donate_argnums=0)
    return step, step.lower(state, batch).compile().cost_analysis()["flops"]


def _python_calls(step, held, batch):
    """Count the Python function calls of one compiled call, the minimum of a few runs."""
    counts = []
    for _ in range(5):
        seen = []
        sys.setprofile(lambda _, event, arg, seen=seen: seen.append((event, arg)))
        try:
            held[0], _ = step(held[0], batch)
        finally:
            sys.setprofile(None)
        counts.append(sum(event == "call" for event, _ in seen))
    return min(counts)


def judge(rows):
    """Return the claims about the rows."""
    others = [row for row in rows if row["step"].startswith("by hand")]
    flops = max(row["FLOPs, ours/it"] for row in others)
    claims = [Claim("FLOPs against a step by hand", flops, 1.001, clock=False)]
    for row in others:
        name = f"host time against {row['step']}, {row['state leaves']} leaves"
        claims.append(Claim(name, max(row["CPU, ours/it"], row["wall, ours/it"]), 1.02))
    for row in rows:
        if row["step"].endswith("compile_step"):
            name = f"host time of compile_step against jit, {row['state leaves']} leaves"
            claims.append(Claim(name, 1 / min(row["CPU, ours/it"], row["wall, ours/it"]), 1.02))
    return claims


def main(argv=None):
    """Measure, print the tables and claims, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few leaves and rounds")
    quick = parser.parse_args(argv).quick
    sizes = [(20, 1, 20)] if quick else [(20, 100, 300), (1_500, 30, 4)]
    rows = [row for size in sizes for row in measure(*size)]
    show(rows, judge(rows))
    return rows


if __name__ == "__main__":
    main()
