"""Shuffled batches cost little more than indexing, at any step; prefetching hides waiting sources.

Batches of rows of 64 float32 are drawn from datasets of several sizes, compared with numpy indexing
with one permutation per epoch, and with shuffled batches of grain, if installed. The first batch of
a run that starts at step ten million is compared with that of a run that starts at step 0. Batches
are prefetched from sources that wait and from sources that compute: "hidden" is the share of the
shorter of both times that prefetching saves.
"""

import argparse
import importlib.util
import itertools
import time
import timeit
from functools import partial

import numpy as np
from measure import Claim, ratios, show, take_turns

from stepfold.data.batches import batches
from stepfold.data.prefetch import prefetch

FAR = 10_000_000
SETS = [(2_000, 64), (2_000, 256), (20_000, 64), (20_000, 256), (200_000, 64), (200_000, 256)]


def shuffling(sizes, rounds, steps):
    """Measure the throughput of shuffled batches for each size of the dataset."""
    rows = []
    for size, batch in sizes:
        source = np.random.default_rng(3).random((size, 64), np.float32)
        # Whole epochs, so that both draw the same number of permutations.
        count = -(-steps // (size // batch)) * (size // batch)
        streams = {"ours": batches(source, batch, seed=0), "numpy": indexed(source, batch)}
        runs = {name: partial(_take, stream, count) for name, stream in streams.items()}
        times = take_turns(runs, rounds)
        ours, numpys = (min(wall for _, wall in times[name]) / count for name in runs)
        rows.append(
            {
                "shuffled rows": size,
                "batch": batch,
                "Mrows/s": batch / ours / 1e6,
                "us": ours * 1e6,
                "numpy, us": numpys * 1e6,
                "ours/numpy": ratios(times["numpy"], times["ours"])[1],
                "ours/grain": grain_seconds(source, batch) / ours if has_grain() else "-",
            }
        )
    return rows


def indexed(source, batch):
    """Yield batches by numpy indexing with one permutation per epoch."""
    generator = np.random.default_rng(0)
    while True:
        order = generator.permutation(len(source))
        for start in range(0, len(source) - batch + 1, batch):
            yield source[order[start : start + batch]]


def has_grain():
    """Whether grain is installed."""
    return importlib.util.find_spec("grain") is not None


def grain_seconds(source, batch, count=20):
    """Time a batch of grain without its threads, which only help sources that wait."""
    import grain

    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    dataset = grain.MapDataset.source(source).shuffle(seed=0).repeat().batch(batch)
    stream = iter(dataset.to_iter_dataset(options))
    return min(timeit.repeat(partial(_take, stream, count), number=1, repeat=5)) / count


def _take(stream, count):
    for _ in itertools.islice(stream, count):
        pass


def seeking(rounds):
    """Measure the time to the first batch at a late step and at step 0."""
    rows = []
    for size in (20_000, 1_000_000):
        source = np.zeros((size, 4), np.float32)
        first = lambda start, source=source: next(batches(source, 256, seed=0, start=start))
        times = take_turns({start: partial(first, start) for start in (0, FAR)}, rounds)
        rows.append(
            {
                "first batch of rows": size,
                "at step 0, us": min(wall for _, wall in times[0]) * 1e6,
                f"at {FAR}, us": min(wall for _, wall in times[FAR]) * 1e6,
                "far/near": ratios(times[FAR], times[0])[1],
            }
        )
    return rows


def python():
    """Compute in Python, holding the GIL."""
    sum(range(1000))


def numpy(large=np.ones(1 << 16)):  # noqa: B008  made once
    """Compute in numpy, which releases the GIL."""
    np.sqrt(large, out=large)


def lasting(kind, seconds):
    """Make a function that waits, or computes as long as that takes on an idle machine."""
    if kind == "waiting":
        return partial(time.sleep, seconds)
    work = {"python": python, "numpy": numpy}[kind]
    unit = min(timeit.repeat(work, number=10, repeat=20)) / 10
    return partial(_repeated, work, round(seconds / unit))


def _repeated(work, count):
    for _ in range(count):
        work()


KINDS = [
    ("waiting", 4, "waiting", 4),
    ("waiting", 2, "waiting", 6),
    ("waiting", 6, "waiting", 2),
    ("waiting", 4, "python", 4),
    ("numpy", 4, "waiting", 4),
    ("python", 4, "waiting", 4),
    ("numpy", 4, "numpy", 4),
    ("python", 4, "python", 4),
]


def hiding(count, rounds):
    """Measure how much of the shorter time prefetching hides, for kinds of source and step."""
    rows = []
    for reads, read, steps, step in KINDS:
        run = partial(_loop, count, lasting(reads, read / 1e3), lasting(steps, step / 1e3))
        times = take_turns({wrap: partial(run, wrap) for wrap in (iter, prefetch)}, rounds)
        alone, ahead = (min(wall for _, wall in times[wrap]) / count for wrap in (iter, prefetch))
        # The share of the shorter time in both; nothing hides the first batch.
        most = alone * min(read, step) / (read + step) * (count - 1) / count
        rows.append(
            {
                "source": f"{reads} {read} ms",
                "step": f"{steps} {step} ms",
                "alone, ms": alone * 1e3,
                "ahead, ms": ahead * 1e3,
                "hidden": (alone - ahead) / most,
            }
        )
    return rows


def _loop(count, read, step, wrap):
    for _ in wrap(read() for _ in range(count)):
        step()


def handing_over(count, rounds):
    """Measure the cost of passing a batch between threads."""
    runs = {
        size: (lambda size=size: _take(prefetch(itertools.repeat(0, count), size=size), count))
        for size in (1, 2, 16)
    }
    times = take_turns(runs, rounds)
    return [
        {
            "hand-off, size": size,
            "us a batch": min(wall for _, wall in times[size]) / count * 1e6,
        }
        for size in runs
    ]


def judge(rows):
    """Return the claims about the rows."""
    claims = [
        Claim(
            f"time of {row['batch']} of {row['shuffled rows']} rows shuffled, relative to numpy's",
            1 / row["ours/numpy"],
            # An epoch of 2,000 rows has few batches to spread the cost of its order over.
            1.3 if row["shuffled rows"] < 20_000 else 1.1,
        )
        for row in rows
        if "shuffled rows" in row
    ]
    far = max(row["far/near"] for row in rows if "far/near" in row)
    waits = [
        row["hidden"]
        for row in rows
        if "hidden" in row and "waiting" in row["source"] and "waiting" in row["step"]
    ]
    return [
        *claims,
        Claim("time of the first batch, far over near", far, 1.5),
        Claim("share of waiting that a waiting step does not hide", 1 - min(waits), 0.1),
    ]


def main(argv=None):
    """Measure, print the tables and claims, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few batches and rounds")
    quick = parser.parse_args(argv).quick
    shuffled = shuffling(SETS[1:4:2], 3, 50) if quick else shuffling(SETS, 31, 700)
    sought = seeking(3 if quick else 101)
    hidden = hiding(5, 1) if quick else hiding(50, 5)
    handed = handing_over(200, 3) if quick else handing_over(5000, 9)
    rows = shuffled + sought + hidden + handed
    show(rows, judge(rows))
    return rows


if __name__ == "__main__":
    main()
