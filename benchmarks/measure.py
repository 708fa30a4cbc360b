"""Time functions in turns, judge claims, print tables, and read the memory of the process."""

import itertools
import random
import statistics
import time
from pathlib import Path
from typing import NamedTuple


class Claim(NamedTuple):
    """A measured number and its limit.

    Attributes:
      what: the claim in words.
      measured: the measured number.
      limit: the largest number for which the claim holds.
      clock: whether the number depends on time, and so on the load of the machine. Other claims
        have to hold on every machine.
    """

    what: str
    measured: float
    limit: float
    clock: bool = True

    @property
    def verdict(self):
        """Whether the claim holds."""
        if self.measured <= self.limit:
            return "holds"
        return "does not hold by this clock" if self.clock else "does not hold"


def take_turns(runs, rounds, *, warm=True):
    """Time functions in turns: in each round, each one once, in a random order.

    Args:
      runs: functions without arguments, by name.
      rounds: the number of timed runs of each function.
      warm: whether each runs once before that, without being timed.

    Returns:
      For each name a list of `(CPU seconds of the process, wall seconds)`, one per round.
    """
    times = {name: [] for name in runs}
    for run in runs.values() if warm else ():
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
    """Return the medians over rounds of the ratios of CPU time and of wall time."""
    pairs = list(zip(these, those, strict=True))
    return [statistics.median(a[i] / b[i] for a, b in pairs) for i in (0, 1)]


def show(rows, claims):
    """Print rows as tables, and below them the verdict of each claim.

    Args:
      rows: dicts. Consecutive rows with the same keys become one table.
      claims: `Claim`s of these rows.
    """
    for columns, alike in itertools.groupby(rows, key=tuple):
        lines = [columns, *([_spell(value) for value in row.values()] for row in alike)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
        print()
    for claim in itertools.starmap(Claim, claims):
        print(f"{claim.verdict}: {claim.what} ({claim.measured:.3f}, at most {claim.limit})")


def resident():
    """Return the resident bytes, and reset their maximum."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def most_resident():
    """Return the maximum of resident bytes since `resident` was called."""
    return _status("VmHWM")


def _status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _spell(value):
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if value < 100 else f"{value:.0f}"
