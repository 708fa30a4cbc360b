"""What the benchmarks share: taking turns, what a claim is, and saying what was found."""

import itertools
import random
import statistics
import time
from pathlib import Path
from typing import NamedTuple


class Claim(NamedTuple):
    """What is said, and whether it is so.

    Attributes:
      what: the claim, in words.
      measured: the number that was measured.
      limit: the largest number for which the claim holds.
      clock: whether it hangs on the clock, which a busy machine upsets. Any other has to hold
        wherever it is measured.
    """

    what: str
    measured: float
    limit: float
    clock: bool = True

    @property
    def verdict(self):
        """Say whether it holds."""
        if self.measured <= self.limit:
            return "holds"
        return "does not hold by this clock" if self.clock else "does not hold"


def take_turns(runs, rounds, *, warm=True):
    """Time functions against each other, each once a round, in an order that is drawn anew.

    Args:
      runs: functions without arguments, by name.
      rounds: how often each runs.
      warm: whether each runs once before that, and is not timed.

    Returns:
      For each name a list of `(CPU seconds of the whole process, wall seconds)`, one a round.
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
    """Give the medians of CPU and of wall time's ratios, each taken within one round."""
    pairs = list(zip(these, those, strict=True))
    return [statistics.median(a[i] / b[i] for a, b in pairs) for i in (0, 1)]


def show(rows, claims):
    """Print rows as tables, and below them each claim with whether it holds.

    Args:
      rows: dicts. Those with the same keys one after the other become one table.
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
    """Read how many bytes are resident, and let the most that were so begin here."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def most_resident():
    """Read how many bytes were resident at most, since `resident` was called."""
    return _status("VmHWM")


def _status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _spell(value):
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if value < 100 else f"{value:.0f}"
