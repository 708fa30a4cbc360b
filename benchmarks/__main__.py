"""Run each benchmark in its own process, and print one table of all claims.

`python -m benchmarks [--quick] [--write PATH] [names...]`. A benchmark is a file of this folder
with `main(argv)`, which returns rows, and `judge(rows)`, which returns claims. The exit code is 1
if a benchmark fails or a claim that does not depend on time does not hold.
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
    """List the benchmarks in this folder."""
    return sorted(
        path.stem
        for path in FOLDER.glob("*.py")
        if path.name != "__main__.py" and "def main(" in path.read_text()
    )


def run_here(name, path, arguments):
    """Run a benchmark in this process, and write its lines of the table to a file."""
    benchmark, measure = import_module(name), import_module("measure")
    rows = benchmark.main(arguments)
    claims = [measure.Claim(*claim) for claim in benchmark.judge(rows)]
    lines = [
        (name, claim.what, f"{claim.measured:.3f}", str(claim.limit), claim.verdict)
        for claim in claims
    ]
    Path(path).write_text(json.dumps(lines))


def run(name, arguments):
    """Run a benchmark in a process of its own, and return its lines of the table."""
    print(f"\n== {name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines.json"
        command = [sys.executable, __file__, f"--lines-to={path}", name, *arguments]
        done = subprocess.run(command, check=False)
        if done.returncode:
            return [(name, f"it runs, exit code {done.returncode}", "", "", "does not hold")]
        return [tuple(line) for line in json.loads(path.read_text())]


def heading():
    """Describe the versions and the machine."""
    import jax  # last, since it takes memory of the device

    versions = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"no {package}")
    devices = f"{jax.device_count()} {jax.devices()[0].device_kind}"
    machine = f"{devices} device(s), {os.cpu_count()} cores of {platform.machine()}"
    return f"{', '.join(versions)}\n{machine}, {platform.system()}"


def aligned(lines):
    """Align the table for a terminal."""
    widths = [max(map(len, column)) for column in zip(HEAD, *lines, strict=True)]
    padded = (zip(line, widths, strict=True) for line in (HEAD, *lines))
    return "\n".join("  ".join(cell.ljust(width) for cell, width in line) for line in padded)


def markdown(lines):
    """Format the table as Markdown."""
    rows = [HEAD, ["---"] * len(HEAD), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(argv=None):
    """Run the selected benchmarks, and return the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help=f"one of {', '.join(names())}")
    parser.add_argument("--quick", action="store_true", help="run the short form of each")
    parser.add_argument("--write", metavar="PATH", help="a file for the table, in Markdown")
    parser.add_argument("--lines-to", metavar="PATH", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    unknown = set(options.names) - set(names())
    if unknown:
        parser.error(f"expected names of {names()}, got {sorted(unknown)}")
    arguments = ["--quick"] * options.quick
    if options.lines_to:
        run_here(*options.names, options.lines_to, arguments)
        return 0
    lines = [line for name in options.names or names() for line in run(name, arguments)]
    head = heading()
    print(f"\n{head}\n\n{aligned(lines)}")
    if options.write:
        Path(options.write).write_text(f"{head}\n\n{markdown(lines)}\n")
    return int(any(line[-1] == "does not hold" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
