"""Importing costs little more than jax and optax do.

Each import is that of a process of its own, in turns; that with clu is there to show what is put
off until the first metric is made. All of it is CPU time.
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
    """Import in a process of its own; give the CPU seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # As everywhere else, what Python has read once it need not read again.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(names, rounds):
    """Import in turns; return a row for each way."""
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
    """Say what is claimed of the rows, each with what was measured and its limit."""
    return [
        (f"CPU time of import {row['import']}, over jax and optax", row["over the first"], 1.2)
        for row in rows
        if row["import"].startswith("stepfold")
    ]


def main(argv=None):
    """Measure, print the table and the claims, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a round of some, for seconds")
    quick = parser.parse_args(argv).quick
    names = list(IMPORTS)
    rows = measure(names[:2], 1) if quick else measure(names, 15)
    show(rows, judge(rows))
    return rows


if __name__ == "__main__":
    main()
