"""Results of evaluations that other processes make, next to the steps of a store.

A result is a small note that is created once, as a whole: `evaluations/eval-20-0f3a….json`. Its
name has the evaluation, the step and the identity of the checkpoint, a digest of the saved values.
After a rollback, the results of deleted steps match no checkpoint. A step that is saved again with
the same values matches its earlier result.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from stepfold.checkpoint.manifest import DamageError, read_fields
from stepfold.errors import CheckpointError, warn

FOLDER, LEASES = "evaluations", "evaluators"  # next to the steps
_RUN = f"{FOLDER}/run.json"
_NAME = re.compile(r"(.+)-(\d+)-([0-9a-f]{16})\.json")


class Result(NamedTuple):
    """The evaluation and the checkpoint of a result, which are in its name."""

    evaluation: str
    step: int
    identity: str

    @property
    def path(self) -> str:
        return f"{FOLDER}/{quote(self.evaluation, safe='')}-{self.step}-{self.identity}.json"


def find_results(store: Any) -> list[Result]:
    """List all results, even of deleted steps, in the order of their steps."""
    matches = map(_NAME.fullmatch, store.list_notes(FOLDER))
    results = [Result(unquote(m[1]), int(m[2]), m[3]) for m in matches if m is not None]
    return sorted(results, key=lambda result: result.step)


def is_saved(store: Any, step: int, identity: str) -> bool:
    """Whether a step still is the checkpoint with this identity."""
    try:
        return bool(store.read_metadata(step).identity == identity)
    except CheckpointError:
        return False


def read_result(store: Any, result: Result) -> dict[str, float] | None:
    """Return the numbers of a result; None if it was deleted or, with a warning, if damaged."""
    try:
        note = store.read_note(result.path)
    except DamageError:
        note = "damaged"
    if note is None:
        return None
    if not isinstance(note, dict):
        warn(
            f"{store.location}/{result.path}: the result of the evaluation is damaged; "
            f"sf.evaluate_run evaluates step {result.step} again",
            RuntimeWarning,
        )
        return None
    return {name: float(value) for name, value in note.items() if type(value) in (int, float)}


def add_result(store: Any, result: Result, metrics: Mapping[str, float]) -> bool:
    """Write a result, unless another process has; return whether this one did."""
    return bool(store.add_note(result.path, dict(metrics)))


def metrics_in(store: Any, results: Sequence[Result], step: int, identity: str) -> dict[str, float]:
    """Return the numbers of all evaluations of a checkpoint."""
    own = [result for result in results if result[1:] == (step, identity)]
    numbers = [read_result(store, result) or {} for result in own]
    return {name: value for each in numbers for name, value in each.items()}


def drop_results(store: Any) -> None:
    """Delete the results of an earlier run whose checkpoints are gone."""
    for name in store.list_notes(FOLDER):
        store.delete_note(f"{FOLDER}/{name}")


def read_run(store: Any) -> dict[str, Any]:
    """Return what `write_run` wrote; empty without it."""
    return read_fields(store, _RUN) or {}


def write_run(store: Any, names: Sequence[str], read: Sequence[Result], *, has_ended: bool) -> None:
    """Record which evaluations a run awaits, which it has read, and whether it has ended."""
    store.write_note(_RUN, {"names": [*names], "read": [*read], "has_ended": has_ended})
