"""Run the benchmarks, each as a program of its own, and say in one table what holds.

`python -m benchmarks [--quick] [--write PATH] [names...]`. A benchmark is a file of this folder
that has `main(argv)`, which gives rows, and `judge(rows)`, which gives the claims that follow. It
leaves with 1 if a benchmark fails, or a claim does not hold that does not hang on the clock.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FOLDER = Path(__file__).parent
PACKAGES = (
    *("stepfold", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "clu"),
    *("flax", "keras", "grain", "torch"),
)
HEAD = ("benchmark", "claim", "measured", "at most", "verdict")


def names():
    """Name the benchmarks, by what is in the folder."""
    return sorted(
        path.stem
        for path in FOLDER.glob("*.py")
        if path.name != "__main__.py" and "def main(" in path.read_text()
    )


def hand_over(name, path, arguments):
    """Run a benchmark in this process, and write its claims, as lines of the table, to a file."""
    benchmark, measure = import_module(name), import_module("measure")
    rows = benchmark.main(arguments)
    claims = [measure.Claim(*claim) for claim in benchmark.judge(rows)]
    lines = [
        (name, claim.what, f"{claim.measured:.3f}", str(claim.limit), claim.verdict)
        for claim in claims
    ]
    Path(path).write_text(json.dumps(lines))


def run(name, arguments):
    """Run a benchmark as a program of its own, and give its lines of the table."""
    print(f"\n== {name}", flush=True)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "lines.json"
        command = [sys.executable, __file__, f"--hand-over={path}", name, *arguments]
        done = subprocess.run(command, check=False)
        if done.returncode:
            return [(name, f"it runs, and left with {done.returncode}", "", "", "does not hold")]
        return [tuple(line) for line in json.loads(path.read_text())]


def heading():
    """Say what it was measured with, and on."""
    import jax  # last, so that a benchmark finds a device's memory free

    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    devices = f"{jax.device_count()} {jax.devices()[0].device_kind}"
    machine = f"{devices} device(s), {os.cpu_count()} cores of {platform.machine()}"
    return f"{', '.join(found)}\n{machine}, {platform.system()}"


def aligned(lines):
    """Line the table up, for a terminal."""
    widths = [max(map(len, column)) for column in zip(HEAD, *lines, strict=True)]
    padded = (zip(line, widths, strict=True) for line in (HEAD, *lines))
    return "\n".join("  ".join(cell.ljust(width) for cell, width in line) for line in padded)


def markdown(lines):
    """Write the table in Markdown."""
    rows = [HEAD, ["---"] * len(HEAD), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(argv=None):
    """Run those that are asked for, and give the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(names())}")
    parser.add_argument("--quick", action="store_true", help="each in its quick form, for seconds")
    parser.add_argument("--write", metavar="PATH", help="a file for the table, in Markdown")
    parser.add_argument("--hand-over", metavar="PATH", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    unknown = set(options.names) - set(names())
    if unknown:
        parser.error(f"expected names of {names()}, got {sorted(unknown)}")
    arguments = ["--quick"] * options.quick
    if options.hand_over:
        hand_over(*options.names, options.hand_over, arguments)
        return 0
    lines = [line for name in options.names or names() for line in run(name, arguments)]
    head = heading()
    print(f"\n{head}\n\n{aligned(lines)}")
    if options.write:
        Path(options.write).write_text(f"{head}\n\n{markdown(lines)}\n")
    return int(any(line[-1] == "does not hold" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
