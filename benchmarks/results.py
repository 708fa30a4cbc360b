"""Train to numbers that others published, and compare.

`python benchmarks/results.py --write results.json` trains everything, and keeps each finished run
in the file, so that the same command continues after an interruption. `--only NAME` does one
experiment. `--show results.json` prints the tables of a file in Markdown, which the guide shows.

- `mnist1d`: four models on MNIST-1D, five seeds each.
- `nanogpt`: the CPU setting of nanoGPT, in `fit` and in its loop in torch.
- `cartpole`: PPO on CartPole, in one `scan` and in `fit`.
- `everything`: a decoder that loses a process and goes back from a spike, and a plain one.
- `gpu`: GPT-2 of 124M parameters, where there is a GPU.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import cartpole
import everything
import gpu
import jax
import mnist1d
import nanogpt
from measure import Claim, show

import stepfold as sf

PACKAGES = ("jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "torch")
EVERYTHING_SEEDS = 3


class Record:
    """Finished runs by name, in a file if there is a path."""

    def __init__(self, path=None):
        self.path = None if path is None else Path(path)
        exists = self.path is not None and self.path.exists()
        self.runs = json.loads(self.path.read_text()) if exists else {}

    def keep(self, name, train, *args, **options):
        """Return the result of a run: the recorded one, or that of `train`."""
        if name not in self.runs:
            load, began, cpu = os.getloadavg()[0], time.perf_counter(), time.process_time()
            result = train(*args, **options)
            seconds = round(time.perf_counter() - began, 1)
            used = {"seconds": seconds, "cpu": round(time.process_time() - cpu, 1), "load": load}
            self.runs[name] = result | used | {"on": heading()}
            print(f"{name}: {seconds} s", flush=True)
            self.write()
        return self.runs[name]

    def write(self):
        """Replace the file, with one line for each run."""
        if self.path is not None:
            lines = [f"{json.dumps(name)}: {json.dumps(run)}" for name, run in self.runs.items()]
            partial = self.path.with_suffix(".partial")
            partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
            partial.replace(self.path)


def heading():
    """Describe the versions and the machine."""
    versions = [f"Python {platform.python_version()}", f"stepfold {sf.__version__}"]
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    devices = f"{jax.device_count()} {jax.devices()[0].device_kind}"
    return f"{', '.join(versions)}; {devices} device(s), {os.cpu_count()} cores of {processor()}"


def processor():
    """Return the name of the processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# Experiments: each trains with `record.keep`, and returns its rows


def run_mnist1d(record, quick):
    """Train the four models of MNIST-1D."""
    seeds, steps = (range(1), 250) if quick else (range(5), mnist1d.STEPS)
    rows = []
    for name, published in mnist1d.PUBLISHED.items():
        runs = [record.keep(f"mnist1d/{name}/{i}", mnist1d.train, name, i, steps) for i in seeds]
        ends = [run["accuracy"] for run in runs]
        rows.append(
            {
                "MNIST-1D": name,
                "published": published,
                "test accuracy": statistics.mean(ends),
                "spread": statistics.stdev(ends) if len(ends) > 1 else "-",
                "lowest": min(ends),
                "highest": max(ends),
                "best on the way": statistics.mean(run["best"] for run in runs),
                "seeds": len(ends),
            }
        )
    return rows


def run_nanogpt(record, quick):
    """Train nanoGPT in `fit`, and in torch if it is installed or its run is recorded."""
    steps, every = (2, 2) if quick else (nanogpt.STEPS, nanogpt.EVERY)
    names = ["fit", "torch"]
    if quick or (find_spec("torch") is None and "nanogpt" not in record.runs):
        print("nanogpt: the loop in torch is left out: --quick, or torch is not installed")
        names = ["fit"]
    found = record.keep("nanogpt", nanogpt.train, names, 0, steps, every)
    rows = []
    for name in nanogpt.WAYS:
        if name not in found:
            continue
        losses, cpu, wall = (found[name][key] for key in ("loss", "cpu", "seconds"))
        per_step = lambda seconds: 1e3 * statistics.median(seconds) / every
        pairs = zip(losses, found["fit"]["loss"], strict=True)
        rows.append(
            {
                "nanoGPT": name,
                "steps": steps,
                "loss before": losses[0],
                "loss": losses[-1],
                "largest difference": max(abs(one - other) for one, other in pairs),
                "CPU ms a step": per_step(cpu[2:] or cpu),
                "wall ms a step": per_step(wall[2:] or wall),
                "CPU s": sum(cpu),
            }
        )
    return rows


def run_cartpole(record, quick):
    """Train PPO in one scan and in `fit`."""
    seeds, updates = (range(1), 2) if quick else (range(5), cartpole.UPDATES)
    rows = []
    for name, train in cartpole.WAYS.items():
        runs = [record.keep(f"cartpole/{name}/{i}", train, i, updates) for i in seeds]
        best = [run["likelier actions"] for run in runs]
        rows.append(
            {
                "CartPole": name,
                "published": 500,
                "likelier actions, mean": statistics.mean(best),
                "lowest": min(best),
                "last tenth of training": statistics.mean(run["trained"] for run in runs),
                "CPU s": statistics.median(run["cpu"] for run in runs),
                "updates": updates,
                "seeds": len(best),
            }
        )
    return rows


def run_everything(record, quick):
    """Train the decoder plainly, and with everything on."""
    seeds, steps = (range(1), 120) if quick else (range(EVERYTHING_SEEDS), everything.STEPS)
    rows = []
    for seed in seeds:
        plain = record.keep(f"plain/{seed}", everything.plain, seed, steps)
        eventful = record.keep(f"everything/{seed}", everything.everything, seed, steps)
        rows.append(
            {
                "seed": seed,
                "loss of the plain run": plain["loss"],
                "loss with everything": eventful["loss"],
                "difference": eventful["loss"] - plain["loss"],
                "batches skipped": sum(stop - first for first, stop in eventful["skipped"]),
                "processes lost": len(eventful["died"]),
                "parts on": len(eventful["parts"]),
            }
        )
    return rows


def run_gpu(record, quick):
    """Measure GPT-2 of 124M parameters, where there is a GPU; this was not tested."""
    if quick or jax.devices()[0].platform == "cpu":
        print("gpu: left out, there is no GPU")
        return []
    return [record.keep("gpu", gpu.measure, "everything", size=gpu.GPT2)]


EXPERIMENTS = {
    "mnist1d": run_mnist1d,
    "nanogpt": run_nanogpt,
    "cartpole": run_cartpole,
    "everything": run_everything,
    "gpu": run_gpu,
}


# Tables and claims


def judge(rows):
    """Return the claims about the rows. Those about published numbers need a whole run."""
    return [
        *judge_mnist1d([row for row in rows if "MNIST-1D" in row]),
        *judge_nanogpt({row["nanoGPT"]: row for row in rows if "nanoGPT" in row}),
        *judge_cartpole({row["CartPole"]: row for row in rows if "CartPole" in row}),
        *judge_everything([row for row in rows if "loss with everything" in row]),
    ]


def judge_mnist1d(rows):
    """Compare with the table of the paper, and the models with each other."""
    found = {row["MNIST-1D"]: 1 - row["test accuracy"] for row in rows}
    if rows:
        yield Claim("errors of the CNN, over the MLP's", found["CNN"] / found["MLP"], 1.0, False)
    for row in rows:
        if row["seeds"] > 1:
            what = f"test accuracy of the {row['MNIST-1D']} below the published one"
            yield Claim(what, row["published"] - row["test accuracy"], 0.03, clock=False)


def judge_nanogpt(rows):
    """Compare `fit` with the loop in torch."""
    if "fit" in rows:
        fit = rows["fit"]
        yield Claim("loss of nanoGPT, over that before", fit["loss"] / fit["loss before"], 1, False)
    if "torch" in rows:
        row = rows["torch"]
        yield Claim("largest difference from torch", row["largest difference"], 0.01, False)
        ratio = rows["fit"]["CPU ms a step"] / row["CPU ms a step"]
        yield Claim("CPU time of a step in fit, over torch", ratio, 1.0)


def judge_cartpole(rows):
    """Compare with the largest return, and the two ways with each other."""
    if not rows:
        return
    one, other = (row["last tenth of training"] for row in rows.values())
    yield Claim("return under scan, less that in fit", abs(one - other), 5, clock=False)
    for name, row in rows.items():
        if row["seeds"] > 1:
            short = row["published"] - row["likelier actions, mean"]
            yield Claim(f"return by {name} below the largest", short, 10, clock=False)


def judge_everything(rows):
    """Compare the decoder with everything on with the plain one of the same seed."""
    if not rows:
        return
    largest = max(abs(row["difference"]) for row in rows)
    yield Claim("loss with everything on, less the plain one", largest, 0.05, clock=False)
    calm = [row for row in rows if row["processes lost"] != 1 or row["batches skipped"] != 2]
    yield Claim("runs with everything on to which nothing happened", len(calm), 0, clock=False)
    plain = [row["loss of the plain run"] for row in rows]
    if len(rows) > 2:
        mean = abs(statistics.mean(row["difference"] for row in rows))
        what = "mean difference, over the standard deviation of plain seeds"
        yield Claim(what, mean / statistics.stdev(plain), 1.0, clock=False)


def markdown(rows):
    """Format rows as Markdown tables, as the guide shows them."""
    spell = lambda value: f"{value:.4g}" if isinstance(value, float) else f"{value}"
    lines = []
    for columns, alike in itertools.groupby(rows, key=tuple):
        cells = [columns, ["---"] * len(columns), *(map(spell, row.values()) for row in alike)]
        lines += [*(f"| {' | '.join(line)} |" for line in cells), ""]
    return "\n".join(lines)


def main(argv=None):
    """Train, print the tables and claims, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps of each, with one seed")
    parser.add_argument("--only", choices=EXPERIMENTS, action="append", help="some experiments")
    parser.add_argument("--write", metavar="PATH", help="a JSON file that keeps finished runs")
    parser.add_argument("--show", metavar="PATH", help="print the tables of a file in Markdown")
    options = parser.parse_args(argv)
    if options.quick:  # in child processes too; compiling takes half the time
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        jax.config.update("jax_disable_most_optimizations", True)
    record = Record(options.show or options.write)
    names = options.only or list(EXPERIMENTS)
    rows = [row for name in names for row in EXPERIMENTS[name](record, options.quick)]
    if options.show:
        print(markdown(rows))
    else:
        show(rows, judge(rows))
    return rows


if __name__ == "__main__":
    main()
