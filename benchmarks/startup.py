"""Importing costs little more than jax and optax do, and a kept program saves compiling it.

Each import is that of a process of its own, in turns; that with clu is there to show what is put
off until the first metric is made. A first step is what `compile_step` and the first call take, for
a small decoder, after jax has forgotten all it knew: without a cache, with one that is empty, and
with one that has the program. All of it is CPU time.
"""

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial

import jax
import optax
from decoder import init, loss_fn, make_batch
from measure import show

import stepfold as sf

TX = optax.adamw(1e-3)

IMPORTS = {
    "jax, optax": "import jax, optax",
    "stepfold": "import stepfold",
    "stepfold.adapter": "import stepfold.adapter",
    "jax, optax, clu": "import jax, optax, clu.metrics",
}


def imported(code):
    """Import in a process of its own; give the CPU seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # As everywhere else, what Python has read once it need not read again.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_step(state, cache):
    """Compile a step and run it once; give the CPU seconds that it took, of the whole process."""
    jax.clear_caches()
    batch, start = make_batch(8), time.process_time()
    step = sf.make_train_step(loss_fn, TX)
    step = sf.compile_step(step, state, batch, donate=False, compilation_cache=cache)
    jax.block_until_ready(step(state, batch))
    return time.process_time() - start


def steps(state):
    """Take a first step in each way, one after the other."""
    with tempfile.TemporaryDirectory() as cache:
        return {
            "no cache": first_step(state, None),
            "an empty cache": first_step(state, cache),
            "a kept program": first_step(state, cache),
        }


def rounds_of(take, rounds):
    """Measure all ways in each round; give a list for each."""
    found = [take() for _ in range(rounds)]
    return {name: [one[name] for one in found] for name in found[0]}


def rows_of(what, times, against):
    """Make a row of each way."""
    return [
        {
            "what": what,
            "way": name,
            "CPU s": statistics.median(seconds),
            "over the first": statistics.median(
                a / b for a, b in zip(seconds, times[against], strict=True)
            ),
        }
        for name, seconds in times.items()
    ]


def measure(names, rounds, layers):
    """Measure imports, and first steps."""
    order = random.Random(0)
    imported(IMPORTS[names[-1]])
    turn = lambda: {name: imported(IMPORTS[name]) for name in order.sample(names, len(names))}
    imports = rounds_of(turn, rounds)
    state = sf.init_state(partial(init, layers=layers), TX, jax.random.key(0))
    firsts = rounds_of(partial(steps, state), max(1, rounds // 3))
    return rows_of("import", imports, "jax, optax") + rows_of("first step", firsts, "no cache")


def judge(rows):
    """Say what is claimed of the rows, each with what was measured and its limit."""
    found = {row["way"]: row["over the first"] for row in rows}
    ours = [name for name in found if name.startswith("stepfold")]
    return [
        *((f"CPU time of import {name}, over jax and optax", found[name], 1.2) for name in ours),
        ("CPU time of a first step with a kept program", found["a kept program"], 0.33),
        ("CPU time of a first step with an empty cache", found["an empty cache"], 1.1),
    ]


def main(argv=None):
    """Measure, print the table and the claims, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a round of some, for seconds")
    quick = parser.parse_args(argv).quick
    names = list(IMPORTS)
    rows = measure(names[:2], 1, layers=1) if quick else measure(names, 15, layers=4)
    show(rows, judge(rows))
    return rows


if __name__ == "__main__":
    main()
