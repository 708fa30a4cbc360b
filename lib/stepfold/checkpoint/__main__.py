"""`python -m stepfold.checkpoint ls|show|verify|diff DIR`: inspect checkpoints from a shell."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from stepfold.checkpoint.leaves import Leaf
from stepfold.checkpoint.manifest import DamageError, ForeignError, Manifest
from stepfold.checkpoint.restore import candidates
from stepfold.checkpoint.steps import order_by
from stepfold.checkpoint.store import Store, open_to_read
from stepfold.checkpoint.verify import newest_complete, problems_by_step
from stepfold.errors import CheckpointError, ConfigError
from stepfold.table import amount, size, table


def main(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code.

    1 means that a step is damaged or cannot be read, 2 that the request is invalid.
    """
    parser = argparse.ArgumentParser(
        prog="python -m stepfold.checkpoint", description="Look at the checkpoints of a run."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, (_, text) in _VERBS.items():
        command = verbs.add_parser(verb, help=text, description=text)
        command.add_argument(
            "directory", help="the run directory, the folder with the steps, or its URL"
        )
        if verb == "show":
            command.add_argument("step", type=int, nargs="?", help="the newest, if left out")
        if verb == "diff":
            command.add_argument("old", type=int)
            command.add_argument("new", type=int)
    options = vars(parser.parse_args(arguments))
    function, _ = _VERBS[options.pop("verb")]
    try:
        store = open_to_read(options.pop("directory"))
        candidates([store], "latest")  # raises if there are no steps
        return function(store, **options)
    except (CheckpointError, ConfigError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1 if isinstance(error, DamageError) else 2


def _ls(store: Store) -> int:
    rows: list[Sequence[object]] = []
    metrics, best = {}, None
    for step in store.steps():
        saved = ""
        try:
            saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(store.saved_at(step)))
            manifest = store.read_manifest(step)
        except CheckpointError as error:
            if store.has_step(step):  # it was not deleted meanwhile
                problem = f"{error}".removeprefix(f"{store.path_of(step)}: ")
                rows.append((step, saved, "", "", problem))
            continue
        metrics[step] = manifest.metadata.metrics or {}
        best = manifest.metadata.best or best
        values = ", ".join(f"{name} {value:.6g}" for name, value in metrics[step].items())
        rows.append((step, saved, size(manifest.bytes), len(manifest.leaves), values))
    _print(table(("step", "saved", "bytes", "leaves", "metrics"), rows))
    if best and (ranked := order_by(best, metrics)):
        _print(f"\nbest by {best[0]} ({best[1]}): {ranked[0]}")
    if others := store.other_names():
        _print(f"\nset aside or left over: {', '.join(others)}")
    return 0


def _show(store: Store, step: int | None) -> int:
    if step is None:
        step = newest_complete(store)
    if step is None:
        found = ", ".join(map(str, store.steps()))
        raise DamageError(f"{store.location}: no step is complete; there are {found}")
    manifest = _read(store, step)
    metadata = manifest.metadata
    _print(f"step {metadata.step}, {size(manifest.bytes)} on disk\n")
    for name in ("metrics", "data", "extra"):
        if value := getattr(metadata, name):
            _print(f"{name}: {json.dumps(value, indent=2, default=str)}\n")
    rows = [
        (name, leaf, size(leaf.bytes), len(manifest.shards[name]))
        for name, leaf in manifest.leaves.items()
    ]
    _print(table(("path", "leaf", "bytes", "parts"), rows))
    elements = sum(int(np.prod(leaf.shape)) for leaf in manifest.leaves.values())
    _print(f"\n{len(rows)} leaves, {amount(elements)} elements")
    if arrays := manifest.arrays.values():
        total = size(sum(array.leaf.bytes for array in arrays))
        _print(f"{len(arrays)} arrays in data and extra, {total}")
    return 0


def _verify(store: Store) -> int:
    code = 0
    for step, problems in problems_by_step(store):
        verdict = "good"
        if any(isinstance(problem, DamageError) for problem in problems):
            verdict = "damaged"
        elif problems:
            is_foreign = isinstance(problems[0], ForeignError)
            verdict = "not a checkpoint of stepfold" if is_foreign else "cannot be read"
        if any(not isinstance(problem, ForeignError) for problem in problems):
            code = 1
        _print("\n  ".join([f"{step}: {verdict}", *map(str, problems)]))
    return code


def _diff(store: Store, old: int, new: int) -> int:
    manifests = {step: _read(store, step) for step in (old, new)}
    rows: list[Sequence[object]] = []
    names = dict.fromkeys(name for manifest in manifests.values() for name in manifest.leaves)
    for name in names:
        was, now = (manifests[step].leaves.get(name) for step in (old, new))
        if was is None or was != now:
            rows.append((name, f"{was or 'nothing'} to {now or 'nothing'}", "", ""))
            continue
        arrays = []
        for step in (old, new):
            try:
                arrays.append(store.open_arrays(step, manifests[step]).read_leaf(name))
            except CheckpointError as error:
                raise type(error)(f"step {step}: {error}") from error
        if change := _change(was, *arrays):
            rows.append((name, was, *change))
    if rows:
        _print(table(("path", "leaf", "greatest change", "relative"), rows))
    same = len(names) - len(rows)
    _print(f"{len(rows)} of {len(names)} leaves differ, {same} have the same bits")
    return 0


def _change(leaf: Leaf, old: np.ndarray, new: np.ndarray) -> tuple[str, str] | None:
    """Return the greatest absolute and the relative change of a leaf; None for equal bits."""
    if old.tobytes() == new.tobytes():
        return None
    if leaf.key or old.dtype.kind == "b":
        return "other bits", ""
    wide = np.complex128 if old.dtype.kind == "c" else np.float64
    old, new = old.astype(wide), new.astype(wide)
    with np.errstate(invalid="ignore"):  # inf - inf
        change, norm = new - old, np.linalg.norm(old)
        relative = f"{np.linalg.norm(change) / norm:.3g}" if norm else ""
        return f"{np.max(np.abs(change)):.3g}", relative


def _read(store: Store, step: int) -> Manifest:
    candidates([store], step)  # raises if it is missing
    try:
        return store.read_manifest(step)
    except DamageError as error:
        raise DamageError(f"{store.path_of(step)}: damaged: {error}") from error


def _print(text: str) -> None:
    print(text)  # noqa: T201  command-line output


_VERBS: dict[str, tuple[Callable[..., int], str]] = {
    "ls": (_ls, "list the steps, their sizes and metrics"),
    "show": (_show, "show the contents of a step"),
    "verify": (_verify, "compare every value with its checksum"),
    "diff": (_diff, "compare two steps, leaf by leaf"),
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
