"""Draw the goodput of each policy of `benchmarks/goodput.py`, over hosts and over intervals."""

import sys
from pathlib import Path

import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import goodput

BLUE, ORANGE, *_ = plt.rcParams["axes.prop_cycle"].by_key()["color"]
LINES = {
    "from memory, with spares": (BLUE, "--"),
    "restart from memory": (BLUE, "-"),
    "restart with spares": (ORANGE, "--"),
    "restart": (ORANGE, "-"),
}
USUAL = 2048


def main():
    """Simulate and draw."""
    figure, (hosts, intervals) = plt.subplots(1, 2, figsize=(7.6, 3.6), sharey=True)
    at_best = [goodput.best(n) for n in goodput.HOSTS]
    for name, (color, style) in LINES.items():
        look = {"color": color, "linestyle": style, "marker": "o", "markersize": 3}
        hosts.plot(goodput.HOSTS, [row[name] for row in at_best], label=name, **look)
        policy = goodput.POLICIES[name]
        each = [goodput.simulate(policy, USUAL, 60 * one) for one in goodput.INTERVALS]
        intervals.plot(goodput.INTERVALS, each, **look)
    hosts.set(xscale="log", xlabel="hosts, at the best interval", ylabel="goodput", ylim=(0.6, 1))
    hosts.set_xticks((64, 256, 1024, 4096, 16384), ("64", "256", "1,024", "4,096", "16,384"))
    intervals.set(xscale="log", xlabel=f"minutes between checkpoints, {USUAL:,} hosts")
    intervals.set_xticks(goodput.INTERVALS, map(str, goodput.INTERVALS))
    for axes in (hosts, intervals):
        axes.minorticks_off()
    figure.legend(loc="outside upper center", ncols=2)
    figure.savefig("goodput.svg")


if __name__ == "__main__":
    main()
