"""What the benchmarks share: taking turns, counting arithmetic, and saying what was found."""

import functools
import math
import random
import re
import statistics
import time

import numpy as np


def take_turns(runs, rounds):
    """Time functions against each other, each once a round, in an order that is drawn anew.

    Args:
      runs: functions without arguments, by name.
      rounds: how often each runs, after once that is not timed.

    Returns:
      For each name a list of `(CPU seconds of the whole process, wall seconds)`, one a round.
    """
    times = {name: [] for name in runs}
    for run in runs.values():
        run()
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(runs), len(runs)):
            start = time.process_time(), time.perf_counter()
            runs[name]()
            end = time.process_time(), time.perf_counter()
            times[name].append((end[0] - start[0], end[1] - start[1]))
    return times


def ratios(these, those):
    """Give the medians of CPU and of wall time's ratios, each taken within one round."""
    pairs = list(zip(these, those, strict=True))
    return [statistics.median(a[i] / b[i] for a, b in pairs) for i in (0, 1)]


def show(rows, claims):
    """Print rows as one table, and below it each claim with whether it holds.

    Args:
      rows: dicts with the same keys, which become the columns.
      claims: what is said, the number measured, and the largest number for which it holds.
    """
    lines = [list(rows[0])] + [[_spell(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print()
    for claim, measured, limit in claims:
        verdict = "holds" if measured <= limit else "does not hold"
        print(f"{verdict}: {claim} ({measured:.3f}, at most {limit})")


def _spell(value):
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if value < 100 else f"{value:.0f}"


_HEAD = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_LINE = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_CALLED = re.compile(
    r"(?:body|condition|calls|to_apply|\w+_computations?)=\{?(%[^},]+(?:, %[^},]+)*)"
)
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_ELEMENTWISE = {"add", "subtract", "multiply", "divide", "maximum", "minimum", "negate", "abs"}
_ELEMENTWISE |= {"power", "sqrt", "rsqrt", "tanh", "logistic", "erf", "log", "log-plus-one"}
_ELEMENTWISE |= {"exponential", "exponential-minus-one"}


def count_flops(hlo):
    """Count the operations that an optimized HLO text runs, a loop's as often as it runs.

    XLA's own `cost_analysis` counts the body of a loop once. Here a transcendental function counts
    as one operation an element, so does a reduction, and a conditional with all of its branches.

    Returns:
      The operations of the dots alone, and of everything.
    """
    computations, entry = {}, None
    for line in hlo.splitlines():
        if head := _HEAD.match(line):
            lines = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        elif found := _LINE.match(line):
            lines.append(found.groups())

    @functools.cache
    def count(name):
        shapes = {name: _shape(kind) for name, kind, _, _ in computations[name]}
        own = sum(_own_flops(shapes, *line) for line in computations[name])
        return own + sum(
            times * count(called)
            for _, _, op, rest in computations[name]
            for times, called in _calls(op, rest)
        )

    dots, everything = count(entry)
    return int(dots), int(everything)


def _shape(kind):
    found = re.search(r"\[([\d,]*)\]", kind)
    return [int(size) for size in found[1].split(",") if size] if found else []


def _own_flops(shapes, name, _, op, rest):
    operands = re.findall(r"%([\w.-]+)", rest.split(")")[0])
    if op == "dot":
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)[1].split(",")
        depth = math.prod(shapes[operands[0]][int(axis)] for axis in axes if axis)
        return np.full(2, 2 * depth * math.prod(shapes[name]))
    if op in ("convolution", "custom-call"):
        raise ValueError(f"count_flops: cannot count {name} = {op}({rest[:200]}")
    if op in _ELEMENTWISE:
        return np.array([0, math.prod(shapes[name])])
    if op in ("reduce", "reduce-window", "scatter"):  # XLA's windows here do not overlap
        return np.array([0, math.prod(shapes[operands[-1 if op == "scatter" else 0]])])
    return np.zeros(2)


def _calls(op, rest):
    if op not in ("fusion", "call", "while", "conditional"):
        return []
    times = int(_TRIPS.search(rest)[1]) if op == "while" else 1
    found = [name for group in _CALLED.findall(rest) for name in group.split(",")]
    return [(times, name.strip(" %")) for name in found]
