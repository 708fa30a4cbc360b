"""Importing stepfold costs little more than importing jax and optax.

Each import has a process of its own, in turns. The import with clu shows the part that is
deferred until the first metric is created. All times are CPU times.
"""

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys

from measure import show

IMPORTS = {
    "jax, optax": "import jax, optax",
    "stepfold": "import stepfold",
    "stepfold.adapter": "import stepfold.adapter",
    "jax, optax, clu": "import jax, optax, clu.metrics",
}


def imported(code):
    """Import in a process of its own, and return its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Bytecode is cached, as usual.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(names, rounds):
    """Measure each import in turns."""
    order = random.Random(0)
    imported(IMPORTS[names[-1]])
    turns = [
        {name: imported(IMPORTS[name]) for name in order.sample(names, len(names))}
        for _ in range(rounds)
    ]
    return [
        {
            "import": name,
            "CPU s": statistics.median(turn[name] for turn in turns),
            "over the first": statistics.median(turn[name] / turn["jax, optax"] for turn in turns),
        }
        for name in names
    ]


def judge(rows):
    """Return the claims about the rows."""
    return [
        (f"CPU time of import {row['import']}, over jax and optax", row["over the first"], 1.2)
        for row in rows
        if row["import"].startswith("stepfold")
    ]


def main(argv=None):
    """Measure, print the tables and claims, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round of two imports")
    quick = parser.parse_args(argv).quick
    names = list(IMPORTS)
    rows = measure(names[:2], 1) if quick else measure(names, 15)
    show(rows, judge(rows))
    return rows


if __name__ == "__main__":
    main()
