"""Draw the folders of `lib/stepfold` in layers, with arrows for the imports between them.

An import that is also implied by others, through a folder in between, has no arrow. Two modules at
the bottom, `lazy` and `json_files`, are left out.
"""

import ast
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt

import stepfold

ROOT = Path(stepfold.__file__).parent
LAYERS = [
    ["adapter", "testing"],
    ["debug"],
    ["runs"],
    ["cluster"],
    ["hooks"],
    ["writers"],
    ["loop"],
    ["inspect", "optim"],
    ["checkpoint", "sharding", "data"],
    ["object_storage"],
    ["core"],
    ["internals"],
    ["errors"],
    ["table", "tree"],
]
ASIDE = {"debug": 1.75, "object_storage": 3.5}  # so that arrows pass
PURPOSES = {
    "adapter": "the trainer object",
    "testing": "laws of a program",
    "debug": "replay, diff, check_step",
    "runs": "fit, reports, predictions",
    "cluster": "launch, votes, patience",
    "hooks": "stop, measure, watch",
    "writers": "files and trackers",
    "loop": "the fold, events, evaluations",
    "inspect": "describe, choose, compile",
    "optim": "EMA, spikes, bfloat16",
    "checkpoint": "save, restore, series",
    "data": "batches, sources, packing",
    "sharding": "meshes, plans, placement",
    "object_storage": "objects at s3:// and gs://",
    "core": "state, loss, gradients, step",
    "internals": "private parts of jax, orbax, …",
    "errors": "refuse, warn",
    "tree": "paths",
    "table": "text",
}
TEXT, GRAY, BLUE = "#24292f", "#57606a", "#0969da"


def main():
    """Count the lines, collect the imports, and draw both."""
    lines, imports = defaultdict(int), defaultdict(set)
    for path in ROOT.rglob("*.py"):
        part = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if part not in ("__init__", "__main__"):
            code = path.read_text()
            lines[part] += code.count("\n")
            imports[part] |= imported_parts(code) - {part}
    figure, axes = plt.subplots(figsize=(6.8, 9.2))
    axes.set(xlim=(-5.3, 5.3), ylim=(-0.5, 1.5 * len(LAYERS) - 0.4))
    axes.axis("off")
    centers = {}
    for height, names in enumerate(reversed(LAYERS)):
        for column, name in enumerate(names):
            x = ASIDE.get(name, 3.5 * (column - (len(names) - 1) / 2))
            centers[name] = (x, 1.5 * height + 0.2)
    heights = {name: height for height, names in enumerate(LAYERS) for name in names}
    for part, (x, y) in centers.items():
        for other in imports[part] & centers.keys():
            if heights[other] <= heights[part]:
                raise ValueError(f"{part} imports {other}, which is not below it")
            if any(other in reachable(middle, imports) for middle in imports[part]):
                continue
            end, top = centers[other]
            # An arrow past other layers starts at a corner, so that it crosses no box.
            is_next = heights[other] == heights[part] + 1
            start = x if is_next else x + (1.55 if end > x else -1.55)
            axes.annotate(
                "",
                xy=(end, top + 0.45),
                xytext=(start, y - 0.45),
                arrowprops={"arrowstyle": "->", "color": GRAY, "shrinkA": 0, "shrinkB": 0},
            )
    for part, (x, y) in centers.items():
        corner = (x - 1.55, y - 0.45)
        box = plt.Rectangle(corner, 3.1, 0.9, facecolor="#0969da22", edgecolor=BLUE, zorder=2)
        axes.add_patch(box)
        axes.text(x, y + 0.18, f"{part}  {lines[part]:,}", ha="center", va="center", color=TEXT)
        axes.text(x, y - 0.2, PURPOSES[part], ha="center", va="center", fontsize=7.5, color=GRAY)
    figure.savefig("house.svg")


def imported_parts(code):
    """Return the folders and modules of stepfold that a module imports."""
    parts = set()
    for node in ast.walk(ast.parse(code)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "stepfold":
            names = [f"stepfold.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        parts |= {name.split(".")[1] for name in names if name.startswith("stepfold.")}
    return parts


def reachable(part, imports):
    """Return the parts that a part imports, directly or through others."""
    return imports[part].union(*(reachable(other, imports) for other in imports[part]))


if __name__ == "__main__":
    main()
