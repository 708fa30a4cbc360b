"""Draw the curves of the runs that `benchmarks/results.json` records."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

RECORD = Path(__file__).parents[3] / "benchmarks" / "results.json"
PUBLISHED = {"logistic": 32, "MLP": 68, "CNN": 94, "GRU": 91}
COLORS = plt.rcParams["axes.prop_cycle"].by_key()["color"]


def runs_of(runs, prefix):
    """Return the runs whose names begin with a prefix."""
    return [run for name, run in runs.items() if name.startswith(prefix)]


def draw_mnist1d(axes, runs):
    """Draw the mean test accuracy of each model, its range over seeds, and the published one."""
    for (name, published), color in zip(PUBLISHED.items(), COLORS, strict=False):
        found = runs_of(runs, f"mnist1d/{name}/")
        steps = found[0]["steps"]
        curves = 100 * np.array([run["accuracies"] for run in found])
        axes.plot(steps, curves.mean(0), color=color, label=name)
        axes.fill_between(steps, curves.min(0), curves.max(0), color=color, alpha=0.2, lw=0)
        axes.axhline(published, color=color, linestyle=":", linewidth=1)
    axes.set(xlabel="step", ylabel="test accuracy, %", ylim=(0, 100), title="MNIST-1D")
    axes.legend(ncols=2)


def draw_cartpole(axes, runs):
    """Draw the mean return of each seed in `fit`, in fortieths of the run."""
    for run, color in zip(runs_of(runs, "cartpole/fit/"), COLORS, strict=False):
        returns = run["returns"]
        at = 500_000 * (np.arange(len(returns)) + 0.5) / len(returns)
        axes.plot(at / 1000, returns, color=color, linewidth=1)
    axes.axhline(500, color="#57606a", linestyle=":", linewidth=1)
    axes.set(xlabel="thousand time steps", ylabel="return", ylim=(0, 520), title="CartPole")


def draw_nanogpt(runs):
    """Draw the validation loss of both ways, and their difference."""
    found = runs["nanogpt"]
    figure, (above, below) = plt.subplots(1, 2, figsize=(7.6, 3))
    losses = {name: np.array(found[name]["loss"]) for name in ("fit", "torch")}
    steps = 250 * np.arange(len(losses["fit"]))
    above.plot(steps, losses["torch"], color=COLORS[1], linewidth=4, alpha=0.5, label="torch")
    above.plot(steps, losses["fit"], color=COLORS[0], marker="o", markersize=3, label="fit")
    above.set(xlabel="step", ylabel="validation loss")
    above.legend()
    difference = abs(losses["fit"] - losses["torch"])
    below.plot(steps, difference, color=COLORS[0], marker="o", markersize=3)
    below.axhline(0.01, color="#57606a", linestyle=":", linewidth=1)
    below.set(xlabel="step", ylabel="difference of the losses", yscale="log")
    figure.savefig("results-nanogpt.svg")


def main():
    """Draw both pictures."""
    runs = json.loads(RECORD.read_text())
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.4))
    draw_mnist1d(left, runs)
    draw_cartpole(right, runs)
    figure.savefig("results.svg")
    if "torch" in runs.get("nanogpt", {}):
        draw_nanogpt(runs)


if __name__ == "__main__":
    main()
