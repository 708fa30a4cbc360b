"""Goodput of restarting after a failure, and of going on without the failed host, simulated.

Goodput is useful time over total time, per host, spares included. Useful is the time that the work
that is kept takes at full speed. Nothing is measured here: `Times` lists the assumptions. Failures
are independent, and each, a hang too, is noticed after a heartbeat. Going on assumes that another
host has a copy of the failed one's state. Failures per host and day are published:

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
SHARED = (54 + 35) / 419  # the part of failures that no single host has, which end any run
HOSTS = (64, 256, 1024, 2048, 4096, 8192, 16384)
INTERVALS = (1, 2, 5, 10, 20, 30, 60, 120, 240)  # minutes


class Times(NamedTuple):
    """Seconds that each action takes. All are assumptions; what stepfold measured is noted.

    Attributes:
      heartbeat: until a failure is noticed. Measured: the heartbeat that was set, and up to 0.5 s.
      rebuild: the plan, the step and the state on other hosts. Measured: 0.04 s, of 4 processes.
      compile: the step for a number of hosts not seen before. Measured: 1 s, a small step.
      load: the step from the compilation cache.
      start: all processes, imports, connections. Measured: 1 to 2 s, of 3 processes.
      restore: read a checkpoint from storage.
      fetch: read a copy in the memory of hosts after a restart.
      wait: until another host replaces a failed one, if there is no spare.
      save: steps stop for it at each checkpoint, which is complete at once.
      copy: steps stop for it at each copy to memory. Measured: 0.01 s to agree, of 4 processes.
      repair: until a failed host is a spare.
      rejoin: between planned restarts, which bring a run without spares back to all hosts. A day
        is near the best for many hosts.
    """

    heartbeat: float = 20.0
    rebuild: float = 5.0
    compile: float = 120.0
    load: float = 10.0
    start: float = 60.0
    restore: float = 60.0
    fetch: float = 10.0
    wait: float = 300.0
    save: float = 10.0
    copy: float = 0.5
    repair: float = 12 * 3600.0
    rejoin: float = DAY


class Policy(NamedTuple):
    """What a run does at a failure.

    Attributes:
      elastic: the other hosts go on, unless the failure is shared or process 0 was on the host.
      outlive: copies in memory outlive the processes, so that a restart starts from them.
      spares: spare hosts per 1,000 hosts, rounded up.
      half: a run that lacks a host uses half of the hosts, since its mesh is a power of two, and
        restarts as soon as the host is replaced.
    """

    elastic: bool = False
    outlive: bool = False
    spares: float = 0.0
    half: bool = False


TIMES = Times()
POLICIES = {
    "restart": Policy(),
    "restart from memory": Policy(outlive=True, spares=4),  # the best case of restarting
    "go on with half": Policy(elastic=True, half=True),
    "go on without": Policy(elastic=True),
    "spares": Policy(elastic=True, spares=4),
    "spares, copies outlive": Policy(elastic=True, outlive=True, spares=4),
}


VARIED = {
    **{f"failures of {name}": {"rate": rate} for name, rate in RATES.items()},
    "no shared failures": {"shared": 0},
    "half of them shared": {"shared": 0.5},
    "no wait for a host": {"times": TIMES._replace(wait=0)},
    "compile in 10 s": {"times": TIMES._replace(compile=10)},
    "start in 5 min": {"times": TIMES._replace(start=300)},
    "copies stop for 2 s": {"times": TIMES._replace(copy=2)},
    "repair in 2 days": {"times": TIMES._replace(repair=2 * DAY)},
}


def simulate(policy, hosts, interval, *, times=TIMES, rate=RATE, shared=SHARED, failures=40_000):
    """Return the goodput of one long run with `interval` seconds of work between checkpoints."""
    t, mean = times, DAY / (rate * hosts)
    at, broken, first, planned = _events(policy, hosts, mean, t.rejoin, shared, failures)
    lost = broken & ~first & policy.elastic  # the run goes on without this host
    spares = math.ceil(policy.spares * hosts / 1000)
    if policy.spares:
        lacking = np.maximum(_within(at, broken, t.repair) - spares, 0)
    else:
        lacking = _since(lost, ~lost) * (not policy.half)

    # After an event, steps pause until the run goes on, has restarted, or is back on all hosts.
    restart = t.start + t.load + (t.fetch if policy.outlive else t.restore)
    back = t.save + t.start + t.load + t.restore
    shrink = t.heartbeat + t.rebuild + np.where(lacking > 0, t.compile, t.load)
    if policy.spares:  # a repaired host joins later
        shrink += np.where(lacking > 0, t.rebuild + t.load, 0)
    elif policy.half:
        shrink += t.wait / 2 + back
    waits = broken & ((lacking > 0) | (not policy.spares))
    pause = np.where(lost, shrink, t.heartbeat + restart + waits * t.wait)
    pause[planned] = back * (np.roll(lacking, 1)[planned] > 0)
    gaps = np.diff(at)
    for _ in range(4):  # a failure during a pause repeats the longer of the two
        pause[1:] = np.where(gaps < pause[:-1], np.maximum(pause[1:], pause[:-1]), pause[1:])

    # Work between events, of which a failure leaves whole attempts, or whole intervals.
    work = np.maximum(gaps - pause[:-1], 0) * interval / (interval + t.save)
    if policy.elastic:
        work *= 1 - lacking[:-1] / hosts
    if policy.elastic or policy.outlive:
        attempt = math.sqrt(2 * t.copy * mean)  # Young's formula
        work *= attempt / (attempt + t.copy)
        work -= np.where(planned[1:], 0, work % attempt)
    if not policy.outlive:
        restarts = np.cumsum(~lost & ~planned)
        work = np.bincount(restarts[:-1], work) // interval * interval
    return float(work.sum() / (at[-1] - at[0]) * hosts / (hosts + spares))


def _events(policy, hosts, mean, rejoin, shared, failures):
    """Return times of failures and planned restarts, and which are broken hosts, first, planned."""
    rng = np.random.default_rng(hosts)
    at = np.cumsum(rng.exponential(mean, failures))
    broken, first = rng.random(failures) >= shared, rng.random(failures) < 1 / hosts
    goes_on = policy.elastic and not (policy.spares or policy.half)
    restarts = np.arange(rejoin, at[-1], rejoin) if goes_on else np.zeros(0)
    at, none = np.append(at, restarts), np.zeros(len(restarts), bool)
    order = np.argsort(at)
    flags = np.append(broken, none), np.append(first, none), order >= failures
    return at[order], flags[0][order], flags[1][order], flags[2]


def _within(at, counted, span):
    """Count the events of the last `span` seconds, at each event."""
    times = at[counted]
    return np.searchsorted(times, at, "right") - np.searchsorted(times, at - span, "right")


def _since(counted, reset):
    """Count the events since the last reset, at each event."""
    total = np.cumsum(counted)
    return total - np.maximum.accumulate(np.where(reset, total, 0))


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
    ratio = lost["spares"] / lost["restart"]
    return [
        Claim("simulated goodput of restarts, off the exact one", max(checked), 0.02, clock=False),
        Claim("time lost by restarts; less than 0.1 in Llama 3", lost["restart"], 0.1, clock=False),
        Claim("time lost with spares over restarts, 2048 hosts", ratio, 0.6, clock=False),
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
