"""Collating costs as much as copying by hand, and packing fills rows quickly.

64 sequences, truncated and padded to 1,024, are collated from numpy rows and from Python lists,
compared with the best hand-written loop: one assignment per row, and a broadcast mask. 20,000
sequences of about 200 tokens are packed into rows of 1,024 with several window sizes, compared with
the first-fit packing of grain, if installed.
"""

import argparse
from functools import partial

import numpy as np
from measure import Claim, ratios, show, take_turns

from stepfold.data.collate import collate
from stepfold.data.packing import pack

LENGTH = 1024


def by_hand(examples):
    """Collate with a loop that knows the key and its dtype."""
    tokens = np.zeros((len(examples), LENGTH), np.int32)
    lengths = []
    for row, example in zip(tokens, examples, strict=True):
        kept = example["tokens"][-LENGTH:]
        lengths.append(len(kept))
        row[: len(kept)] = kept
    mask = np.arange(LENGTH, dtype=np.int32) < np.array(lengths, np.int32)[:, None]
    return {"tokens": tokens, "mask": mask}


def sequences(lengths):
    """Make examples of random tokens."""
    draw = np.random.default_rng(0).integers
    return [{"tokens": draw(0, 50_000, n, np.int32)} for n in lengths]


def collating(rounds, repeats):
    """Measure `collate` against the hand-written loop for each kind of input."""
    short, long = (
        sequences(np.random.default_rng(1).integers(*ends, 64))
        for ends in ((100, 1024), (100, 1300))
    )
    kinds = {
        "numpy rows": short,
        "numpy rows, some cut": long,
        "int64 rows": [{"tokens": example["tokens"].astype(np.int64)} for example in short],
        "lists": [{"tokens": example["tokens"].tolist()} for example in short],
    }
    runs = {}
    for kind, examples in kinds.items():
        ours, theirs = partial(collate, length=LENGTH), by_hand
        wanted, made = theirs(examples), ours(examples)
        if not all(np.array_equal(made[name], wanted[name]) for name in wanted):
            raise SystemExit(f"{kind}: collate and the hand-written loop return different batches")
        runs[kind, "ours"] = _repeated(partial(ours, examples), repeats)
        runs[kind, "theirs"] = _repeated(partial(theirs, examples), repeats)
    times = take_turns(runs, rounds)
    return [
        {
            "collate": kind,
            "us": min(wall for _, wall in times[kind, "ours"]) / repeats * 1e6,
            "by hand": min(wall for _, wall in times[kind, "theirs"]) / repeats * 1e6,
            "hand/ours": ratios(times[kind, "theirs"], times[kind, "ours"])[1],
        }
        for kind in kinds
    ]


def _repeated(run, repeats):
    def runs():
        for _ in range(repeats):
            run()

    return runs


def packing(count, windows, rounds):
    """Measure the throughput and the fill of packed rows for each window, and for grain."""
    lengths = np.random.default_rng(2).exponential(200, count).clip(1, LENGTH).astype(int)
    examples, total = sequences(lengths), int(lengths.sum())
    ours = {
        f"window {window}": partial(pack, examples, length=LENGTH, window=window)
        for window in windows
    }
    makers = ours | grain_packing(examples)
    fills = {}
    for name, make in makers.items():
        rows = list(make())
        fills[name] = total / (len(rows) * LENGTH)
        if sum(int(np.sum(ids_of(row) > 0)) for row in rows) != total:
            raise SystemExit(f"{name}: tokens are lost")
    times = take_turns({name: partial(_drain, make) for name, make in makers.items()}, rounds)
    theirs = next((name for name in makers if name not in ours), None)
    return [
        {
            "pack": name,
            "Mtokens/s": total / min(wall for _, wall in times[name]) / 1e6,
            "fill": fills[name],
            "empty": 1 - fills[name],
            "over grain": ratios(times[theirs], times[name])[1] if theirs else "-",
        }
        for name in makers
    ]


def _drain(make):
    for _ in make():
        pass


def ids_of(row):
    """Return the segment IDs, which have another name in grain."""
    if isinstance(row, tuple):
        row = row[0]
    return row["segment_ids"] if "segment_ids" in row else row["tokens_segment_ids"]


def grain_packing(examples):
    """Return the first-fit packing of grain by name, or nothing without grain."""
    try:
        import grain
        from grain.experimental import FirstFitPackIterDataset
    except ImportError as error:
        print(f"grain is left out: {error}\n")
        return {}

    # The threads of grain are for sources that wait, and make this five times slower.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)

    def make():
        return FirstFitPackIterDataset(
            grain.MapDataset.source(examples).to_iter_dataset(options),
            length_struct={"tokens": LENGTH},
            num_packing_bins=64,
        )

    return {"grain first-fit": make}


def judge(rows):
    """Return the claims about the rows."""
    slowest = {row["collate"]: 1 / row["hand/ours"] for row in rows if "collate" in row}
    packed = {row["pack"]: row for row in rows if "pack" in row}
    default = packed["window 2048"]
    arrays, lists = slowest["numpy rows"], slowest["lists"]
    claims = [
        Claim("time to collate numpy rows, relative to the loop by hand", arrays, 1.05),
        Claim("time to collate lists, relative to the loop by hand", lists, 1.05),
        Claim(
            "share of packed rows that is padding, window 2048",
            default["empty"],
            0.005,
            clock=False,
        ),
    ]
    if "grain first-fit" in packed:
        claims.append(Claim("time to pack, relative to grain's", 1 / default["over grain"], 0.1))
    return claims


def main(argv=None):
    """Measure, print the tables and claims, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few sequences and rounds")
    quick = parser.parse_args(argv).quick
    collated = collating(3, 2) if quick else collating(101, 10)
    packed = packing(4096, (2048,), 1) if quick else packing(20_000, (512, 1024, 2048), 7)
    rows = collated + packed
    show(rows, judge(rows))
    return rows


if __name__ == "__main__":
    main()
