"""Bytes that devices send in a step, relative to the minimum for the layout.

A decoder of 12 layers is compiled, but not run, for 8 and for 64 virtual devices. With parameters
of P bytes, replication ("dp") needs one all-reduce of gradients per step, which sends 2 (n-1)/n P
from each device. Sharding ("fsdp") needs two all-gathers and one reduce-scatter, 3 (n-1)/n P.
Gradients come from the compiler or from `sf.sharding.reduce_once`. "as scatter" counts all-reduces
of sharded gradients as reduce-scatters, which GPU and TPU compilers emit and the CPU compiler does
not.
"""

import argparse
import json
import subprocess
import sys
from functools import partial

import jax
import optax
from decoder import init, loss_fn, make_batch
from jax.sharding import NamedSharding, PartitionSpec
from measure import Claim, show

import stepfold as sf

LAYOUTS = {
    "dp": ((-1, 1), lambda path, leaf: PartitionSpec()),
    "fsdp": ((1, -1), sf.sharding.fsdp()),
}


def measure(layers, width, counts, everything=True):
    """Compile each layout, with and without accumulation, with both gradients.

    `everything` includes cases without a claim.
    """
    return [
        compiled(layout, n, way, layers, width)
        for layout in LAYOUTS
        for n in counts
        for way in ("compiler", "reduce_once")
        if n == 1 or way == "reduce_once" or everything
    ]


def compiled(layout, n, way, layers, width):
    """Compile one step, and add up the bytes that it sends."""
    dims, rules = LAYOUTS[layout]
    mesh, tx = sf.make_mesh(dims, ("dp", "fsdp")), optax.adamw(1e-3)
    start = partial(init, layers=layers, width=width)
    shape = jax.eval_shape(lambda key: sf.init_state(start, tx, key), jax.random.key(0))
    plan = sf.make_sharding(shape, mesh, rules)
    if way == "reduce_once":
        loss, grad = loss_fn, sf.sharding.reduce_once(plan)
    else:
        # Without a constraint the compiler may shard activations like the parameters.
        rows = NamedSharding(mesh, PartitionSpec(("dp", "fsdp")))
        spread = partial(jax.lax.with_sharding_constraint, shardings=rows)
        loss, grad = partial(loss_fn, spread=spread), sf.make_grad
    step = sf.make_train_step(loss, tx, accumulate=n, grad=grad)
    report = sf.describe(step, shape, make_batch(4 * n * mesh.size), sharding=plan)

    params = 4 * report.parameters
    least = (2 if layout == "dp" else 3) * (mesh.size - 1) / mesh.size * params
    sums = [one for one in report.collectives if one.kind == "all-reduce"]
    kept = report.moved - (sum(one.moved for one in sums) / 2 if layout == "fsdp" else 0)
    return {
        "devices": mesh.size,
        "layout": layout,
        "microbatches": n,
        "gradient": way,
        "sent MiB": report.moved / 2**20,
        "least MiB": least / 2**20,
        "sent/least": report.moved / least,
        "as scatter": kept / least,
        "state/ideal": report.memory.state / (ideal(report, layout) or 1),
        "temp MiB": report.memory.temporaries / 2**20,
    }


def ideal(report, layout):
    """Return the bytes of state per device, if sharded evenly or replicated."""
    whole = 3 * 4 * report.parameters  # parameters and adam's two moments
    return whole / report.devices if layout == "fsdp" else whole


def judge(rows):
    """Return the claims about the rows."""

    def most(key, **wanted):
        return max(row[key] for row in rows if wanted.items() <= row.items())

    once = {"microbatches": 1}
    sent = {
        "dp, compiler's gradient without accumulation": most(
            "sent/least", layout="dp", gradient="compiler", **once
        ),
        "dp, reduce_once, with and without accumulation": most(
            "sent/least", layout="dp", gradient="reduce_once"
        ),
        "fsdp, compiler's gradient without accumulation, counted as reduce-scatter": most(
            "as scatter", layout="fsdp", gradient="compiler", **once
        ),
        "fsdp, reduce_once, with and without accumulation": most(
            "sent/least", layout="fsdp", gradient="reduce_once"
        ),
    }
    kept = most("state/ideal", layout="fsdp")
    return [
        *(Claim(f"bytes sent, {which}", over, 1.05, clock=False) for which, over in sent.items()),
        Claim("bytes of state on each device, fsdp", kept, 1.02, clock=False),
    ]


def main(argv=None):
    """Measure, print the tables and claims, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="8 devices and 2 layers")
    parser.add_argument(
        "--devices", type=int, help="print the rows for this number of devices as JSON"
    )
    options = parser.parse_args(argv)
    if options.devices:  # in a process of its own, since jax counts its devices when it starts
        jax.config.update("jax_num_cpu_devices", options.devices)
        # Nothing runs, so the code need not be fast.
        jax.config.update("jax_disable_most_optimizations", True)
        size = (2, 128, (1, 2), False) if options.quick else (12, 256, (1, 4))
        print(json.dumps(measure(*size)))
        return None
    rows = []
    for count in (8,) if options.quick else (8, 64):
        command = [sys.executable, __file__, f"--devices={count}", *["--quick"] * options.quick]
        rows += json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    show(rows, judge(rows))
    return rows


if __name__ == "__main__":
    main()
