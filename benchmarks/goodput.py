"""Goodput of restarting after a failure, from storage or from copies in memory, simulated.

Goodput is useful time over total time, per host, spares included. Useful is the time that the work
that is kept takes at full speed. Nothing is measured here: `Times` lists the assumptions. Failures
are independent, and each, a hang too, is noticed after a heartbeat. A restart from memory assumes
that another host has a copy of the failed one's state. Failures per host and day are published:

- "The Llama 3 Herd of Models", Meta, 2024: 419 unexpected interruptions in 54 days on 16,384 GPUs
  in 2,048 hosts; 54 were software bugs, 35 switches and cables. Over 90% of the time was effective:
  the times of a restart are chosen to be consistent with that.
- "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", Kokolis et al., 2024:
  6.50 failures per 1,000 node-days on the cluster RSC-1, and 2.34 on RSC-2. Jobs on 128 hosts
  failed every 7.9 hours, 3.7 times as often as by that rate, so small runs may be worse than here.
- "OPT: Open Pre-trained Transformer Language Models", Zhang et al., 2022: at least 35 manual and an
  estimated 70 automatic restarts in 2 months on 992 GPUs in 124 hosts.

The numbers of the first two were found as quotations, not read in the papers.
"""

import argparse
import math
from typing import NamedTuple

import numpy as np
from measure import Claim, show

DAY = 86400.0
RATES = {
    "Llama 3": 419 / (54 * 2048),
    "RSC-1": 6.50 / 1000,
    "RSC-2": 2.34 / 1000,
    "OPT-175B": (35 + 70) / (61 * 124),
}
RATE = RATES["Llama 3"]
SHARED = (54 + 35) / 419  # the part of failures that no single host has, so that all are there
HOSTS = (64, 256, 1024, 2048, 4096, 8192, 16384)
INTERVALS = (1, 2, 5, 10, 20, 30, 60, 120, 240)  # minutes


class Times(NamedTuple):
    """Seconds that each action takes. All are assumptions; what stepfold measured is noted.

    Attributes:
      heartbeat: until a failure is noticed. Measured: the heartbeat that was set, and up to 0.5 s.
      load: the step from the compilation cache.
      start: all processes, imports, connections. Measured: 1 to 2 s, of 3 processes.
      restore: read a checkpoint from storage.
      fetch: read a copy in the memory of hosts after a restart.
      wait: until another host replaces a failed one, if there is no spare.
      save: steps stop for it at each checkpoint, which is complete at once.
      copy: steps stop for it at each copy to memory.
      repair: until a failed host is a spare.
    """

    heartbeat: float = 20.0
    load: float = 10.0
    start: float = 60.0
    restore: float = 60.0
    fetch: float = 10.0
    wait: float = 300.0
    save: float = 10.0
    copy: float = 0.5
    repair: float = 12 * 3600.0


class Policy(NamedTuple):
    """What a run does at a failure.

    Attributes:
      outlive: copies in memory outlive the processes, so that a restart starts from them.
      spares: spare hosts per 1,000 hosts, rounded up.
    """

    outlive: bool = False
    spares: float = 0.0


TIMES = Times()
POLICIES = {
    "restart": Policy(),
    "restart with spares": Policy(spares=4),
    "restart from memory": Policy(outlive=True),
    "from memory, with spares": Policy(outlive=True, spares=4),
}


VARIED = {
    **{f"failures of {name}": {"rate": rate} for name, rate in RATES.items()},
    "no shared failures": {"shared": 0},
    "half of them shared": {"shared": 0.5},
    "no wait for a host": {"times": TIMES._replace(wait=0)},
    "start in 5 min": {"times": TIMES._replace(start=300)},
    "copies stop for 2 s": {"times": TIMES._replace(copy=2)},
    "repair in 2 days": {"times": TIMES._replace(repair=2 * DAY)},
}


def simulate(policy, hosts, interval, *, times=TIMES, rate=RATE, shared=SHARED, failures=40_000):
    """Return the goodput of one long run with `interval` seconds of work between checkpoints."""
    t, mean = times, DAY / (rate * hosts)
    rng = np.random.default_rng(hosts)
    at = np.cumsum(rng.exponential(mean, failures))
    broken = rng.random(failures) >= shared  # a host, which another one has to replace
    spares = math.ceil(policy.spares * hosts / 1000)
    has_none = np.maximum(_within(at, broken, t.repair) - spares, 0) > 0 if spares else True

    # After a failure, steps pause until the run has restarted.
    restart = t.start + t.load + (t.fetch if policy.outlive else t.restore)
    pause = t.heartbeat + restart + (broken & has_none) * t.wait
    gaps = np.diff(at)
    for _ in range(4):  # a failure during a pause repeats the longer of the two
        pause[1:] = np.where(gaps < pause[:-1], np.maximum(pause[1:], pause[:-1]), pause[1:])

    # Work between failures, of which one leaves whole attempts, or whole intervals.
    work = np.maximum(gaps - pause[:-1], 0) * interval / (interval + t.save)
    if policy.outlive:
        attempt = math.sqrt(2 * t.copy * mean)  # Young's formula
        work *= attempt / (attempt + t.copy)
        work -= work % attempt
    else:
        work = work // interval * interval
    return float(work.sum() / (at[-1] - at[0]) * hosts / (hosts + spares))


def _within(at, counted, span):
    """Count the events of the last `span` seconds, at each event."""
    times = at[counted]
    return np.searchsorted(times, at, "right") - np.searchsorted(times, at - span, "right")


def exact(mean, interval, save, restart):
    """Return the goodput of restarting, with failures every `mean` seconds, in restarts too.

    The expected time of an interval is that of Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", 2006.
    """
    return interval / (mean * math.exp(restart / mean) * math.expm1((interval + save) / mean))


def best(hosts, **options):
    """Return the goodput of each policy at its best interval."""
    return {
        name: max(simulate(policy, hosts, 60 * each, **options) for each in INTERVALS)
        for name, policy in POLICIES.items()
    }


def measure(hosts=HOSTS, usual=2048):
    """Simulate over hosts and intervals, compare with the formula, and vary the assumptions."""
    t, mean = TIMES, DAY / (RATE * usual)
    restart = t.heartbeat + t.start + t.load + t.restore + t.wait
    rows = [{"hosts": n, "failures/day": RATE * n} | best(n) for n in hosts]
    rows += [
        {f"{usual} hosts, interval": f"{each} min"}
        | {name: simulate(policy, usual, 60 * each) for name, policy in POLICIES.items()}
        for each in INTERVALS
    ]
    rows += [
        {
            "restart, no shared failures": f"{each} min",
            "simulated": simulate(Policy(), usual, 60 * each, shared=0),
            "exact": exact(mean, 60 * each, t.save, restart),
        }
        for each in INTERVALS
    ]
    return rows + [
        {f"{usual} hosts, best interval": name} | best(usual, **options)
        for name, options in VARIED.items()
    ]


def judge(rows):
    """Return the claims about the rows."""
    checked = [abs(row["simulated"] / row["exact"] - 1) for row in rows if "exact" in row]
    lost = {name: 1 - next(r[name] for r in rows if r.get("hosts") == 2048) for name in POLICIES}
    ratio = lost["from memory, with spares"] / lost["restart"]
    return [
        Claim("simulated goodput of restarts, off the exact one", max(checked), 0.02, clock=False),
        Claim("time lost by restarts; less than 0.1 in Llama 3", lost["restart"], 0.1, clock=False),
        Claim("time lost from memory with spares, over restarts", ratio, 0.6, clock=False),
    ]


def main(argv=None):
    """Simulate, print the tables and claims, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2,048 hosts only")
    rows = measure((2048,)) if parser.parse_args(argv).quick else measure()
    show(rows, judge(rows))
    return rows


if __name__ == "__main__":
    main()
