"""The commands of `python -m stepfold.checkpoint`."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepfold.checkpoint import steps
from stepfold.checkpoint.leaves import Leaf
from stepfold.checkpoint.manifest import Manifest, read_manifest
from stepfold.checkpoint.retention import order_by
from stepfold.checkpoint.sealed import DamageError
from stepfold.checkpoint.verify import latest_step, problems_of
from stepfold.errors import CheckpointError, ConfigError
from stepfold.table import amount, size, table


def main(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code: 1 for damage, 2 for an invalid request."""
    parser = argparse.ArgumentParser(
        prog="python -m stepfold.checkpoint", description="Look at the checkpoints of a run."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    told = {
        "ls": "list the steps, their sizes and metrics",
        "show": "show what is in a step",
        "verify": "compare every value with what was saved",
        "diff": "compare two steps, leaf by leaf",
    }
    for verb, text in told.items():
        one = verbs.add_parser(verb, help=text, description=text)
        one.add_argument("directory", help="the folder that has a folder for each step")
        if verb == "show":
            one.add_argument("step", type=int, nargs="?", help="the newest, if left out")
        if verb == "diff":
            one.add_argument("old", type=int)
            one.add_argument("new", type=int)
    asked = vars(parser.parse_args(arguments))
    verb, directory = asked.pop("verb"), asked.pop("directory")
    try:
        return _VERBS[verb](_place(directory), **asked)
    except (CheckpointError, ConfigError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1 if isinstance(error, DamageError) else 2


def _place(directory: str) -> Path:
    place = steps.read_directory(directory)
    if not steps.steps_in(place):
        raise CheckpointError(f"{place}: expected checkpoints, got none; look at the path")
    return place


def _ls(place: Path) -> int:
    rows: list[Sequence[object]] = []
    metrics, best = {}, None
    for step in steps.steps_in(place):
        path = steps.path_of(place, step)
        saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            rows.append((step, saved, "", "", f"{error}".removeprefix(f"{path}: ")))
            continue
        metrics[step], best = manifest.words.metrics or {}, manifest.words.best
        values = ", ".join(f"{name} {value:.6g}" for name, value in metrics[step].items())
        rows.append((step, saved, size(manifest.bytes), len(manifest.leaves), values))
    _say(table(("step", "saved", "bytes", "leaves", "metrics"), rows))
    if best and order_by(best, metrics):
        _say(f"\nbest by {best[0]} ({best[1]}): {order_by(best, metrics)[0]}")
    aside = sorted(path.name for path in place.iterdir() if steps.is_aside(path))
    if aside:
        _say(f"\nset aside or left over: {', '.join(aside)}")
    return 0


def _show(place: Path, step: int | None) -> int:
    manifest = _read(place, latest_step(place) if step is None else step)
    words = manifest.words
    rows = [
        (name, leaf, size(leaf.bytes), len(manifest.shards[name]))
        for name, leaf in manifest.leaves.items()
    ]
    _say(f"step {words.step}, {size(manifest.bytes)} on disk\n")
    for name, value in (("metrics", words.metrics), ("data", words.data), ("extra", words.extra)):
        if value:
            _say(f"{name}: {json.dumps(value, indent=2)}\n")
    _say(table(("path", "leaf", "bytes", "parts"), rows))
    elements = sum(int(np.prod(leaf.shape)) for leaf in manifest.leaves.values())
    _say(f"\n{len(rows)} leaves, {amount(elements)} elements")
    return 0


def _verify(place: Path) -> int:
    damaged = False
    for step in steps.steps_in(place):
        problems = problems_of(steps.path_of(place, step))
        damaged |= bool(problems)
        _say(f"{step}: {'good' if not problems else 'damaged'}")
        for line in problems:
            _say(f"  {line}")
    return int(damaged)


def _diff(place: Path, old: int, new: int) -> int:
    from stepfold.checkpoint.arrays import Reader  # lazy: imports tensorstore

    manifests = [_read(place, step) for step in (old, new)]
    readers = [
        Reader(steps.path_of(place, step), manifest.leaves, manifest.shards)
        for step, manifest in zip((old, new), manifests, strict=True)
    ]
    names = dict.fromkeys([*manifests[0].leaves, *manifests[1].leaves])
    rows, same = [], 0
    for name in names:
        was, now = (manifest.leaves.get(name) for manifest in manifests)
        if was is not None and was == now:
            row = _changed(was, *(reader.whole(name) for reader in readers))
        else:
            row = (f"{was or 'nothing'} to {now or 'nothing'}", "", "")
        same += row is None
        rows += [(name, *row)] if row else []
    if rows:
        _say(table(("path", "leaf", "greatest change", "relative"), rows))
    _say(f"{len(rows)} of {len(names)} leaves differ, {same} have the same bits")
    return 0


def _changed(leaf: Leaf, old: np.ndarray, new: np.ndarray) -> tuple[Any, ...] | None:
    """Return the leaf, its greatest absolute and its relative change; None for equal bits."""
    if old.tobytes() == new.tobytes():
        return None
    if leaf.key or old.dtype.kind in "b":
        return (leaf, "other bits", "")
    wide = np.complex128 if old.dtype.kind == "c" else np.float64
    old, new = old.astype(wide), new.astype(wide)
    with np.errstate(invalid="ignore"):  # inf - inf
        change, norm = new - old, np.linalg.norm(old)
        relative = f"{np.linalg.norm(change) / norm:.3g}" if norm else ""
        return (leaf, f"{np.max(np.abs(change)):.3g}", relative)


def _read(place: Path, step: int | None) -> Manifest:
    path = place / str(step)
    if step is None or not path.is_dir():
        there = ", ".join(map(str, steps.steps_in(place)))
        raise CheckpointError(
            f"{place}: expected {'a whole step' if step is None else f'step {step}'}, got {there}"
        )
    try:
        return read_manifest(path)
    except DamageError as error:
        raise DamageError(f"{path}: damaged: {error}") from error


def _say(text: str) -> None:
    print(text)  # noqa: T201  command-line output


_VERBS: dict[str, Callable[..., int]] = {"ls": _ls, "show": _show, "verify": _verify, "diff": _diff}
