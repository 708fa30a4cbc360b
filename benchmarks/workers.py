"""Two worker processes halve the time of a slow transform, and a ready batch costs little.

Batches of 32 examples, whose transform takes 2 ms each in Python, are made by the loop itself, by a
thread, and by worker processes; and by those of grain and of torch's DataLoader, if installed.
Batches of 1 MB and of 100 MB are received when they are ready.
"""

import argparse
import contextlib
import importlib.util
import operator
import os
import random
import statistics
import time
import timeit
from functools import partial
from pathlib import Path

import numpy as np
from measure import Claim, show

from stepfold.data.batches import batches
from stepfold.data.prefetch import prefetch
from stepfold.data.workers import workers

SIZE = 32


class Slow:
    """A transform that computes in Python, a given number of turns."""

    def __init__(self, turns):
        self.turns = turns

    def __call__(self, example):
        total = 0
        for i in range(self.turns):
            total += i * i
        return {"x": np.full(100, float(example), np.float32)}


class Large:
    """A transform that makes an array of a given size."""

    def __init__(self, size):
        self.size = size

    def __call__(self, example):
        return {"x": np.full(self.size >> 3, float(example), np.float64)}


class Examples:
    """The transformed examples, for torch."""

    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        return self.transform(index)


def taking(milliseconds):
    """Make a slow transform that takes a given time on an idle machine."""
    turns = 10_000
    seconds = min(timeit.repeat(partial(Slow(turns), 0), number=1, repeat=20))
    return Slow(round(turns * milliseconds / 1e3 / seconds))


def ours(count, transform, size=SIZE):
    """Make batches with workers of stepfold."""
    return workers(batches(range(10**6), size, transform=transform), count)


def in_thread(transform, size=SIZE):
    """Make batches in a thread."""
    return prefetch(batches(range(10**6), size, transform=transform))


def in_grain(count, transform, size=SIZE):
    """Make batches with worker processes of grain."""
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # else they do not start in a script
    # Its threads prefetch hundreds of batches by default, and gain nothing here.
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    examples = grain.MapDataset.source(range(10**6)).map(transform)
    dataset = examples.batch(size).to_iter_dataset(reading)
    options = grain.MultiprocessingOptions(count, per_worker_buffer_size=2)
    return iter(dataset.mp_prefetch(options))


def in_torch(count, transform, size=SIZE):
    """Make batches with worker processes of torch, as numpy arrays."""
    from torch.utils.data import DataLoader

    loader = DataLoader(
        Examples(transform), size, num_workers=count, prefetch_factor=2, collate_fn=stacked
    )
    return iter(loader)


def stacked(examples):
    """Stack examples of one array."""
    return {"x": np.stack([example["x"] for example in examples])}


def peers():
    """Return the makers of batches with workers of other libraries that are installed."""
    makers = {"grain": in_grain, "torch": in_torch}
    return {name: make for name, make in makers.items() if importlib.util.find_spec(name)}


def end(stream):
    """End the processes and threads of a stream."""
    if hasattr(stream, "close"):
        stream.close()


def throughput(milliseconds, count, rounds):
    """Measure the time of a batch, by who makes it, once the processes have started."""
    transform = taking(milliseconds)
    makers = {
        "the loop": partial(ours, 0),
        "a thread": in_thread,
        "1 worker": partial(ours, 1),
        "2 workers": partial(ours, 2),
        **{f"2 workers of {name}": partial(make, 2) for name, make in peers().items()},
    }
    seconds, made = {name: [] for name in makers}, {}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(makers), len(makers)):
            stream = makers[name](transform)
            # Until what was made during the start is used up.
            made[name] = [next(stream)["x"].tobytes() for _ in range(10)]
            start = time.perf_counter()
            for _ in range(count):
                next(stream)
            seconds[name].append((time.perf_counter() - start) / count)
            end(stream)
            del stream
    return [
        {
            "made by": name,
            "ms a batch": min(seconds[name]) * 1e3,
            "of the loop's": min(seconds[name]) / min(seconds["the loop"]),
            "batches that differ": sum(map(operator.ne, made[name], made["the loop"])),
        }
        for name in makers
    ]


def receiving(size, rounds):
    """Measure the time of a batch that is ready, the start, and the memory of the processes."""
    rows = []
    for name, make in {"ours": ours, **peers()}.items():
        start = time.perf_counter()
        stream = make(2, Large(size), 1)
        next(stream)
        started, ready = time.perf_counter() - start, []
        for _ in range(6):
            next(stream)
        for _ in range(rounds):
            time.sleep(0.02 + size / 4e8)
            start = time.perf_counter()
            batch = next(stream)
            ready.append(time.perf_counter() - start)
        rows.append(
            {
                "two workers": name,
                "MB of a batch": size >> 20,
                "start, s": started,
                "ready batch, ms": statistics.median(ready) * 1e3,
                "MB of processes": memory() / 2**20,
            }
        )
        end(stream)
        del stream, batch
    return rows


def memory():
    """Return the bytes of all processes below this one, their share of what others use too."""
    total, parents = 0, {os.getpid()}
    for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):  # it has ended
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in parents:
                parents.add(int(path.name))
                lines = (path / "smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024


def judge(rows):
    """Return the claims about the rows."""
    made = {row["made by"]: row for row in rows if "made by" in row}
    received = [row for row in rows if "two workers" in row]
    claims = [
        Claim(
            "batches of two workers that differ from those of the loop",
            made["2 workers"]["batches that differ"],
            0,
            clock=False,
        ),
        Claim("time of two workers, relative to the loop", made["2 workers"]["of the loop's"], 0.6),
    ]
    for name, row in made.items():
        if " of " in name:
            ratio = made["2 workers"]["ms a batch"] / row["ms a batch"]
            claims.append(Claim(f"time of two workers, relative to {name}", ratio, 1.1))
    for row in received:
        if row["two workers"] == "ours":
            what = f"ms to receive a ready batch of {row['MB of a batch']} MB"
            claims.append(Claim(what, row["ready batch, ms"], 1.0))
    return claims


def main(argv=None):
    """Measure, print the tables and claims, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short transforms and few rounds")
    quick = parser.parse_args(argv).quick
    rows = throughput(0.1, 3, 1) if quick else throughput(2, 10, 5)
    for size in (1 << 20,) if quick else (1 << 20, 100 << 20):
        rows += receiving(size, 2 if quick else 7)
    show(rows, judge(rows))
    return rows


if __name__ == "__main__":
    main()
