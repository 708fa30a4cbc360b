"""Where two runs part, and why: from their files, or by running their steps again.

Rows of metrics and checksums of checkpoints say up to which step two runs agree, and which leaf
differs. `run.json` says what may be the cause. If all that is written is equal, what is not written
is left: the contents of the data, the compiler, the hardware.
"""

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from stepfold.core.validation import read_positive
from stepfold.debug.result import Cause, RunDiff
from stepfold.debug.run_record import RunRecord
from stepfold.errors import refuse
from stepfold.runs.report.read import relative_difference, shared_rows

if TYPE_CHECKING:
    from stepfold.core.step import StepFn

# Metrics of the machine, which differ between two runs of one program.
_MEASURED = ("throughput/", "memory/")
# Arguments of `fit` that decide what is shown, kept or done when, but not what a step computes.
_WITHOUT_EFFECT = (
    "checkpoints", "epochs", "evaluations", "hooks", "log_every", "more_steps", "steps",
    "time_limit", "upload",
)  # fmt: skip
_GROWTH_POINTS = 6
# What may be the cause if nothing that is written is.
_NOT_WRITTEN = {
    "data": "the contents of the data",
    "hardware": "a fault of the hardware",
    "compiler": "a flag of XLA, or another processor",
    "code": "the code of the loss, the model or the optimizer, or a setting of jax",
}


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    rtol: float = 0.0,
    state: Any = None,
    step: "StepFn | None" = None,
    batches: Any = None,
    step_b: "StepFn | None" = None,
    batches_b: Any = None,
) -> RunDiff:
    """Compare the files of two runs, and return where and why they part.

    Runs on other meshes, with other hooks or other log intervals are compared by what they share.
    A run may be unfinished, still running or damaged: `missing` says what could not be compared.
    `python -m stepfold diff A B` prints the result. Without a step, it reads no array and does not
    import jax.

    With the program of the runs, their steps are run again from the last checkpoint that they
    share, side by side, until the states differ. The result then has the exact step, and its first
    causes say whether the batch, the key or the program differs in it, and which operation of the
    program is the first that does. If no step differs, one of the runs has not computed what its
    program says.

    Args:
      a: the `run_dir` of a run, or the URL of its `upload`.
      b: that of another one.
      rtol: the relative difference of metrics that is allowed. If it is not zero, only metrics are
        compared, since a checksum does not say how much a leaf differs.
      state: with `step`, the state to restore the shared checkpoint into, as `restore` takes it;
        or, if there is none, the state that both runs started with.
      step: the step of the first run, to run it again.
      batches: the batches of the first run, as `replay` takes them.
      step_b: the step of the second run; by default that of the first.
      batches_b: the batches of the second run; by default those of the first.

    Raises:
      ConfigError: if one of the runs has no files, or a part of the program is missing.
      CheckpointError, TreeMismatchError: if the shared checkpoint cannot be restored.
      DataError: if the batches end, or cannot be moved to the checkpoint.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf, tempfile
    >>> from pathlib import Path
    >>> from stepfold.debug import diff
    >>> def train(folder, rate):
    ...     tx = optax.sgd(rate)
    ...     step = sf.make_train_step(lambda p, x, key: sf.mean((p - x) ** 2), tx)
    ...     state = sf.init_state(jnp.array(1.0), tx, jax.random.key(0))
    ...     batches = sf.batches(np.arange(8, dtype=np.float32), 2, seed=0)
    ...     run_dir = sf.RunDirectory(folder, config={"rate": rate})
    ...     checkpoints = sf.Checkpoints(every=20, keep=None)
    ...     _ = sf.fit(step, state, batches, steps=40, run_dir=run_dir, checkpoints=checkpoints)
    ...     return folder
    >>> folder = Path(tempfile.mkdtemp())
    >>> difference = diff(train(folder / "a", 0.1), train(folder / "b", 0.2))
    >>> difference.step, difference.leaf, str(difference.cause), difference.is_equal
    (10, 'params', 'config: rate 0.1 -> 0.2', False)
    """
    read_positive("rtol", rtol, allow_zero=True)
    parts = {"step": step, "state": state, "batches": batches}
    if not step is state is batches is step_b is batches_b is None:
        for name, part in parts.items():
            if part is None:
                refuse(name, "that of the first run, to run its steps again", "None")
    runs = RunRecord(a), RunRecord(b)
    missing = [*runs[0].missing, *runs[1].missing]
    rows, compared_rows = _compare_metrics(*runs, rtol)
    saved, compared = _compare_checkpoints(*runs, missing, rtol)
    first = min((at for at in (rows["row"], saved["checkpoint"]) if at is not None), default=None)
    differences, equal = _compare_settings(*runs)
    difference = RunDiff(
        runs=(runs[0].name, runs[1].name), steps=(runs[0].step, runs[1].step), step=first,
        causes=differences, others=(), equal=equal, compared=compared_rows | compared,
        missing=missing, **rows, **saved,
    )  # fmt: skip
    difference = _attribute(difference)
    until = difference.step if difference.checkpoint is None else difference.checkpoint
    if (
        step is None or until is None or until <= difference.equal_until
    ):  # then the states are equal
        return difference
    from stepfold.debug.lockstep import replay_steps  # lazy: imports jax

    other = step_b or step, batches if batches_b is None else batches_b
    return replay_steps(difference, runs, state, [(step, batches), other], until)


# Metrics


def _compare_metrics(
    first: RunRecord, second: RunRecord, rtol: float
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return fields of the result for the first row that differs, and what was compared."""
    differing: dict[str, tuple[np.ndarray, ...]] = {}  # the columns from the first difference on
    compared = set[float]()
    for name in first.curves.keys() & second.curves.keys():
        if name.startswith(_MEASURED):
            continue
        columns = shared_rows(name, first.curves[name], second.curves[name])
        compared.update(columns[0].tolist())
        is_nan = np.isnan(columns[1]) & np.isnan(columns[2])
        is_equal = is_nan | (relative_difference(*columns[1:]) <= rtol)
        if not is_equal.all():
            differing[name] = tuple(column[np.argmin(is_equal) :] for column in columns)
    counts = {"rows": len(compared), "last_row": int(max(compared, default=0))}
    if not differing:
        return {"row": None, "rows": {}, "growth": {}}, counts
    row = int(min(steps[0] for steps, _, _ in differing.values()))
    values = {
        name: (float(a[0]), float(b[0]))
        for name, (steps, a, b) in sorted(differing.items())
        if steps[0] == row
    }
    steps, *both = differing["train/loss" if "train/loss" in differing else next(iter(values))]
    points = np.unique(np.geomspace(1, len(steps), _GROWTH_POINTS).round().astype(int)) - 1
    relative = relative_difference(*both)
    growth = {int(steps[index]): float(relative[index]) for index in points}
    return {"row": row, "rows": values, "growth": growth}, counts


# Checkpoints


def _compare_checkpoints(
    first: RunRecord, second: RunRecord, missing: list[str], rtol: float
) -> tuple[dict[str, Any], dict[str, int]]:
    """Find the first checkpoint that differs. Return the same two as `_compare_metrics`."""
    fields: dict[str, Any] = {"checkpoint": None, "leaves": (), "equal_until": 0}
    compared = {"checkpoints": 0, "leaves": 0, "last_checkpoint": 0}
    if rtol:
        missing.append("checkpoints: a checksum does not say how close values are, as rtol asks")
    if rtol or first.checksums is None or second.checksums is None:
        return fields, compared
    steps = sorted({*first.checksums.steps} & {*second.checksums.steps})
    if not steps:
        missing.append("no step has a checkpoint in both runs")
    with ThreadPoolExecutor() as pool:  # a request to a bucket takes a while
        reads = [pool.map(run.read_checkpoint, steps) for run in (first, second)]
        for step, *read in zip(steps, *reads, strict=True):
            if problems := [each for each in read if isinstance(each, str)]:
                missing += problems
                continue
            different, count = _compare_leaves(*read)
            total = len({**read[0], **read[1]})
            text = f"checkpoints: {total - count} of {total} leaves have other shards"
            missing += [text] if count < total and text not in missing else []
            if not count:
                continue
            compared["checkpoints"] += 1
            compared |= {"leaves": count, "last_checkpoint": step}
            if different:
                return fields | {"checkpoint": step, "leaves": different}, compared
            fields["equal_until"] = step
    return fields, compared


def _compare_leaves(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[list[str], int]:
    """Return the leaves that differ, and how many could be compared."""
    different, count = [], 0
    for name in {**a, **b}:
        first, second = a.get(name, {}), b.get(name, {})
        shared = first.keys() & second.keys()
        is_same = bool(shared) and all(first[region] == second[region] for region in shared)
        different += [] if is_same else [name]
        count += len(shared) > 1 or not is_same  # without shared shards, only the form can differ
    return different, count


# Causes


def _compare_settings(first: RunRecord, second: RunRecord) -> tuple[list[Cause], list[str]]:
    """Return in what two runs differ, and the sections of `run.json` in which they do not."""
    if not first.timeline or not second.timeline:
        return [], []
    causes: dict[str, Cause] = {}
    sections: dict[str, None] = {}
    for start in sorted({start for run in (first, second) for start, _ in run.timeline}):
        known = [
            next((facts for at, facts in run.timeline[::-1] if at <= start), run.timeline[0][1])
            for run in (first, second)
        ]
        resumed = [run.name for run in (first, second) if start in dict(run.timeline)]
        where = f", from the resume at step {start:,} of {resumed[0]}" if start else ""
        for path in {**known[0], **known[1]}:
            kind, _, name = path.partition("/")
            old, new = known[0].get(path), known[1].get(path)
            if kind == "program":
                if not (old and new):  # nothing was compiled, or by an earlier stepfold
                    continue
                if {*old} <= {*new} or {*new} <= {*old}:  # a call of fewer steps is another one
                    new = old
            sections[kind] = None
            if old != new and path not in causes:
                change = "" if kind == "program" else f" {_spell(old)} -> {_spell(new)}"
                causes[path] = Cause(kind, f"{name}{change}{where}".strip(), start)
    listed = [*causes.values()]
    for run, other in ((first, second), (second, first)):
        alone = sorted({*run.notes} - {*other.notes})
        listed += [Cause("note", f"{run.name}: step {at:,}: {text}", at) for at, text in alone]
    different = {cause.kind for cause in listed}
    return listed, [each for each in sections if each not in different]


def _attribute(difference: RunDiff) -> RunDiff:
    """Divide the causes into those that may be it and others, or infer what is left.

    What holds from before a checkpoint on at which the states are equal has no effect on them.
    """
    until = -1 if difference.step is None else difference.step
    is_of_metrics = difference.row is not None and difference.row <= difference.equal_until
    since = 0 if is_of_metrics else difference.equal_until

    def may_be(each: Cause) -> bool:
        name = each.what.partition("/")[0].partition(" ")[0]
        has_effect = each.kind != "arguments" or name not in _WITHOUT_EFFECT
        # A state may be replaced right before it is saved.
        return has_effect and since <= each.since < until + (each.kind == "note")

    causes = sorted(difference.causes, key=lambda cause: (cause.kind == "program", cause.since))
    likely, others = [*filter(may_be, causes)], [str(x) for x in causes if not may_be(x)]
    if not likely and until >= 0:
        left = {**_NOT_WRITTEN}
        if "program" in {*difference.equal, *(each.kind for each in causes)}:
            del left["code"]
        if is_of_metrics:
            left = {"metric": "how it is computed, or the data of an evaluation"}
        likely = [Cause(kind, what, since) for kind, what in left.items()]
    return difference._replace(causes=likely, others=others)


def _spell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = "nothing" if value is None else text
    return text if len(text) <= 60 else f"{text[:57]}..."
