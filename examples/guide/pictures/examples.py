"""Draw what examples print, for their pages."""

import re
from pathlib import Path

import matplotlib.pyplot as plt

PRINTED = Path(__file__).parent.parent / "examples"
# The names of the numbers that each example prints by step, one chart each.
CURVES = {
    "adapter": ["loss", "test accuracy"],
    "own_loop": ["loss", "test loss"],
    "packing": ["loss"],
    "per_example_gradients": ["loss", "test accuracy"],
    "preferences": ["accuracy", "divergence"],
    "quickstart": ["test loss", "test accuracy"],
    "subclass_adapter": ["current learning rate"],
    "tfds_digits": ["loss"],
    "two_processes": ["loss", "accuracy"],
    "two_states": ["episode length", "critic loss"],
}
# The columns of tables: what is on the x axis, the first column, and the columns that are drawn.
TABLES = {
    "mup": ("width", {"standard": 1, "muP": 3}, "change of the logits"),
    "pipeline": ("microbatches", {"FLOPs, relative to one device": 1}, ""),
}


def draw_curves(name: str, labels: list[str]) -> None:
    """Draw the numbers after each label over the first number of their lines."""
    figure, axes = plt.subplots(ncols=len(labels), squeeze=False)
    lines = (PRINTED / f"{name}.txt").read_text().splitlines()
    for label, chart in zip(labels, axes[0], strict=True):
        row = rf"(step|epoch) +(\d+)\b.*?  ?{label} +(-?\d+\.?\d*)"
        rows = [match.groups() for match in (re.match(row, line) for line in lines) if match]
        chart.plot([int(step) for _, step, _ in rows], [float(y) for *_, y in rows], ".-")
        chart.set(title=label, xlabel=rows[0][0])
    figure.savefig(f"example-{name}.svg")


def draw_table(name: str, xlabel: str, columns: dict[str, int], ylabel: str) -> None:
    """Draw columns of a table over its first column."""
    figure, axes = plt.subplots()
    lines = (PRINTED / f"{name}.txt").read_text().splitlines()[1:]
    rows = [[float(word.replace(",", "")) for word in line.split()] for line in lines]
    for label, column in columns.items():
        axes.plot([row[0] for row in rows], [row[column] for row in rows], "o-", label=label)
    axes.set(xlabel=xlabel, ylabel=ylabel, xscale="log", ylim=(0, None))
    axes.set_xticks([row[0] for row in rows], [f"{row[0]:.0f}" for row in rows], minor=False)
    axes.minorticks_off()
    axes.legend()
    figure.savefig(f"example-{name}.svg")


def draw_generation() -> None:
    """Draw the two rows that examples/generation.py prints."""
    figure, axes = plt.subplots(ncols=2)
    lines = (PRINTED / "generation.txt").read_text().splitlines()
    for line, chart in zip(lines, axes, strict=False):
        name, *values = line.split()
        chart.plot(range(50, 301, 50), [*map(float, values)], ".-")
        chart.set(title=name, xlabel="step")
    figure.savefig("example-generation.svg")


def draw_ensemble() -> None:
    """Draw the accuracy of each member, and that of the ensemble."""
    text = (PRINTED / "ensemble.txt").read_text()
    *members, ensemble = map(float, re.findall(r"test accuracy (\d\.\d+)", text))
    figure, axes = plt.subplots()
    axes.plot(members, "o", label="a member")
    axes.axhline(ensemble, label="the ensemble")
    axes.set(xlabel="member", ylabel="test accuracy")
    axes.legend()
    figure.savefig("example-ensemble.svg")


if __name__ == "__main__":
    plt.rcParams["figure.figsize"] = 5.0, 2.4
    for name, labels in CURVES.items():
        draw_curves(name, labels)
    for name, table in TABLES.items():
        draw_table(name, *table)
    draw_generation()
    draw_ensemble()
