"""Where two runs part, and why, as far as their files show it.

Three kinds of files are compared. Rows of metrics say up to which log point two runs agree.
Checkpoints have a checksum of each shard, so a leaf that differs has a name, and no array is read.
`run.json` has what may be the cause: config, arguments, versions, devices, seeds, the program of
the step, and what a resume has changed.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import jax
import numpy as np

from stepfold.checkpoint.manifest import Manifest
from stepfold.checkpoint.restore import restore
from stepfold.checkpoint.store import Store, open_store
from stepfold.core.validation import absolute_path, is_url, read_positive
from stepfold.debug.lockstep import Program, StepDiff, different_leaves, find_first_difference
from stepfold.errors import StepfoldError, refuse
from stepfold.loop.report.read import Curve, read_metrics
from stepfold.loop.run_info import NAME, flatten_config, flatten_settings, read_run_info
from stepfold.object_storage import Bucket

_METRICS = "metrics.jsonl"
# Metrics of the machine, which differ between two runs of one program.
_MEASURED = ("throughput/", "memory/")
# Arguments of `fit` that decide what is shown, kept or done when, but not what a step computes.
_WITHOUT_EFFECT = (
    "checkpoints", "epochs", "evaluations", "hooks", "log_every", "more_steps", "steps",
    "time_limit", "upload",
)  # fmt: skip
_GROWTH_POINTS = 6

Step = Callable[[Any, Any], tuple[Any, Any]]


class Cause(NamedTuple):
    """Something in which two runs differ.

    Attributes:
      kind: `"config"`, `"argument"`, `"batches"`, `"seed"`, `"version"`, `"device"`, `"state"`,
        `"program"`, `"note"` (what happened to one of the runs), or `"unknown"`.
      what: a sentence for people.
      since: the step after which it may have an effect.
    """

    kind: str
    what: str
    since: int = 0

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}" if self.what else self.kind


class RunDiff(NamedTuple):
    """Where two runs part, and what may be the cause.

    Attributes:
      runs: the runs that were compared.
      steps: the number of steps that each has done.
      equal_until: the last step up to which the files show no difference.
      differs_at: the step after which they show the first difference, or None.
      leaves: the paths of the leaves that differ in the first checkpoint that does.
      leaf_count: the number of leaves that were compared.
      checkpoint: the step of the first checkpoint that differs, or None.
      metrics: the names of the metrics in the first row that differs.
      row: the step of the first row of metrics that differs, or None.
      growth: relative differences of one metric by step, from the first row that differs.
      causes: what may have made them part, in the order of the steps at which it began.
      others: in what the runs differ without an effect on the steps that they share.
      equal: in what they do not differ.
      missing: what could not be compared, and why.
      replayed: what running the steps again has found, if `diff` got a step.
    """

    runs: tuple[str, str]
    steps: tuple[int, int]
    equal_until: int
    differs_at: int | None
    leaves: Sequence[str] = ()
    leaf_count: int = 0
    checkpoint: int | None = None
    metrics: Sequence[str] = ()
    row: int | None = None
    growth: Mapping[int, float] = {}
    causes: Sequence[Cause] = ()
    others: Sequence[str] = ()
    equal: Sequence[str] = ()
    missing: Sequence[str] = ()
    replayed: StepDiff | None = None

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    rtol: float = 0.0,
    state: Any = None,
    step: Step | None = None,
    batches: Any = None,
    step_b: Step | None = None,
    batches_b: Any = None,
) -> RunDiff:
    """Compare the files of two runs, and return where and why they part.

    Runs on other meshes, with other hooks or other log intervals are compared by what they share.
    A run may be unfinished, still running or damaged: `missing` says what could not be compared.
    `python -m stepfold diff A B` prints the result.

    With the program of the runs, their steps are run again from the last checkpoint that they
    share, side by side, until the states differ. The result then has the exact step, whether the
    batch, the key or the program differs in it, and the first operation of the program that does.
    If the programs make no difference, one of the runs has not computed what its program says.

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
      ConfigError: if one of the runs has neither metrics nor `run.json`, or a part of the program
        is missing.
      CheckpointError, TreeMismatchError: if the shared checkpoint cannot be restored.
      DataError: if the batches end, or cannot be moved to the checkpoint.

    >>> import jax, jax.numpy as jnp, numpy as np, optax, stepfold as sf, tempfile
    >>> from pathlib import Path
    >>> from stepfold.debug.diff import diff
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
    >>> found = diff(train(folder / "a", 0.1), train(folder / "b", 0.2))
    >>> found.differs_at, found.leaves, str(found.causes[0])
    (10, ['params'], 'config: rate 0.1 -> 0.2')
    """
    read_positive("rtol", rtol, allow_zero=True)
    if step is None and not (state is batches is step_b is batches_b is None):
        refuse("step", "the step of the first run, to run it again", "None")
    if step is not None and (state is None or batches is None):
        missing_part = "state" if state is None else "batches"
        refuse(missing_part, "that of the run, to run its steps again", "None")
    with ExitStack() as stack:
        first, second = (_RunFiles.read(each, stack) for each in (a, b))
        missing = [*first.missing, *second.missing]
        row, names, agreed, growth = _compare_metrics(first, second, rtol)
        found = _Checkpoints(None, [], 0, 0)
        if not rtol:
            found = _compare_checkpoints(first, second, missing)
        replayed = None
        until = found.differs or row
        if step is not None and until is not None:
            other = step_b or step, batches if batches_b is None else batches_b
            programs = (step, batches), other
            replayed = _replay((first, second), state, programs, found, until)
    steps = first.step, second.step
    differs_at = min((each for each in (row, found.differs) if each is not None), default=None)
    before = max(steps) + 1 if differs_at is None else differs_at
    equal_until = max(step for step in (0, agreed, found.agreed) if step < before)
    differences, equal = _compare_facts(first, second)
    causes, others = _choose_causes(differences, differs_at, min(steps))
    if differs_at is not None and not any(each.kind != "program" for each in causes):
        causes.append(_unknown(causes, equal))
    return RunDiff(
        (str(a), str(b)), steps, equal_until, differs_at, found.leaves, found.leaf_count,
        found.differs, names, row, growth, causes, others, equal, missing, replayed,
    )  # fmt: skip


# The files of a run


class _RunFiles(NamedTuple):
    """What the files of a run say, without arrays."""

    name: str
    info: Mapping[str, Any]
    curves: Mapping[str, Curve]
    store: Store | None
    missing: Sequence[str]

    @classmethod
    def read(cls, run: str | os.PathLike[str], stack: ExitStack) -> "_RunFiles":
        name, missing = str(run), list[str]()
        path = _fetch(name, stack) if is_url(run) else absolute_path("run", run)
        if not path.is_dir():
            kind = "a file" if path.exists() else "a path that does not exist"
            refuse(name, "the directory of a run", kind, "check the path")
        info: Mapping[str, Any] = {}
        try:
            info = read_run_info(path)
        except StepfoldError as error:
            missing.append(f"{name}: {error}")
        curves, _, damaged = read_metrics(path / _METRICS)
        if not info and not curves and not missing:
            advice = "give a run_dir of fit"
            refuse(name, f"a run with {NAME} or {_METRICS}", "neither", advice)
        if not info:
            missing.append(f"{name}: no {NAME}, so causes are unknown")
        if not curves:
            missing.append(f"{name}: no metrics")
        if damaged:
            missing.append(f"{name}: {damaged} damaged lines of {_METRICS} are left out")
        last = (info.get("attempts") or [{}])[-1]
        if last and last.get("ended") is None:
            missing.append(f"{name}: it is still running, or was killed")
        store = None
        try:
            store = _open_checkpoints(path, info, missing, name)
        except (StepfoldError, ValueError) as error:
            missing.append(f"{name}: {error}")
        return cls(name, info, curves, store, missing)

    @property
    def step(self) -> int:
        """The number of steps that it has done."""
        attempts = self.info.get("attempts") or [{}]
        rows = [int(curve.steps[-1]) for curve in self.curves.values() if len(curve.steps)]
        saved = [] if self.store is None else self.store.steps()
        return max([int(attempts[-1].get("to", 0)), *rows, *saved], default=0)


def _fetch(url: str, stack: ExitStack) -> Path:
    """Copy the files of a run from object storage, without its checkpoints."""
    folder = Path(mkdtemp(prefix="stepfold-diff-"))
    stack.callback(shutil.rmtree, folder)
    bucket = Bucket(url)
    for name in (NAME, _METRICS):
        if (content := bucket.read(name)) is not None:
            (folder / name).write_bytes(content)
    return folder


def _open_checkpoints(
    path: Path, info: Mapping[str, Any], missing: list[str], name: str
) -> Store | None:
    settings = (info.get("arguments") or {}).get("checkpoints")
    directory = (settings or {}).get("directory") or "checkpoints"
    if is_url(directory):
        return open_store(directory)
    directory = Path(os.path.normpath(path / directory))
    if not directory.is_dir():
        reason = "it saved none" if settings is None else f"{directory} does not exist"
        missing.append(f"{name}: no checkpoints: {reason}")
        return None
    return open_store(directory)


# Metrics


def _compare_metrics(
    first: _RunFiles, second: _RunFiles, rtol: float
) -> tuple[int | None, list[str], int, dict[int, float]]:
    """Return the first row that differs, its names, the last row that agrees, and the growth."""
    by_name: dict[str, int] = {}
    agreed = 0
    for name in first.curves:
        if name.startswith(_MEASURED) or name not in second.curves:
            continue
        steps, values, others = _shared_rows(name, first.curves[name], second.curves[name])
        is_equal = (values == others) | (np.isnan(values) & np.isnan(others))
        if rtol:
            largest = np.maximum(np.abs(values), np.abs(others))
            with np.errstate(invalid="ignore"):  # inf - inf
                is_equal |= np.abs(values - others) <= rtol * largest
        (different,) = np.nonzero(~is_equal)
        if different.size:
            by_name[name] = int(steps[different[0]])
        before = steps[: different[0]] if different.size else steps
        agreed = max(agreed, int(before[-1]) if before.size else 0)
    if not by_name:
        return None, [], agreed, {}
    row = min(by_name.values())
    names = [name for name, step in by_name.items() if step == row]
    name = "train/loss" if "train/loss" in by_name else names[0]
    curves = first.curves[name], second.curves[name]
    return row, names, min(agreed, row - 1), _growth(name, *curves, by_name[name])


def _shared_rows(name: str, a: Curve, b: Curve) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the steps of rows that mean the same in both runs, and their values.

    A metric of train steps is a mean over the steps since the previous row.
    """
    a, b = _last_of_each_step(a), _last_of_each_step(b)
    steps, at, other = np.intersect1d(a.steps, b.steps, return_indices=True)
    if name.startswith("train/"):
        before, other_before = (
            np.concatenate([[-1], curve.steps])[index] for curve, index in ((a, at), (b, other))
        )
        is_same = before == other_before
        steps, at, other = steps[is_same], at[is_same], other[is_same]
    return steps, a.values[at], b.values[other]


def _last_of_each_step(curve: Curve) -> Curve:
    is_last = np.append(np.diff(curve.steps) != 0, [True] * bool(len(curve.steps)))
    return Curve(curve.steps[is_last], curve.values[is_last])


def _growth(name: str, a: Curve, b: Curve, start: int) -> dict[int, float]:
    """Return relative differences of a metric at a few steps, evenly on a logarithmic scale."""
    steps, values, others = _shared_rows(name, a, b)
    is_later = steps >= start
    steps, values, others = steps[is_later], values[is_later], others[is_later]
    largest = np.maximum(np.abs(values), np.abs(others))
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.where(largest == 0, 0.0, np.abs(values - others) / largest)
    chosen = np.unique(np.geomspace(1, len(steps), _GROWTH_POINTS).round().astype(int)) - 1
    return {int(steps[index]): float(relative[index]) for index in chosen}


# Checkpoints


class _Checkpoints(NamedTuple):
    """The first checkpoint that differs, where, and the last before it that does not."""

    differs: int | None
    leaves: list[str]
    leaf_count: int
    agreed: int


def _compare_checkpoints(first: _RunFiles, second: _RunFiles, missing: list[str]) -> _Checkpoints:
    agreed = count = 0
    if first.store is None or second.store is None:
        return _Checkpoints(None, [], 0, 0)
    steps = sorted({*first.store.steps()} & {*second.store.steps()})
    if not steps:
        missing.append("no step has a checkpoint in both runs")
    for step in steps:
        manifests = [_read_manifest(each, step, missing) for each in (first, second)]
        if manifests[0] is None or manifests[1] is None:
            continue
        different, compared = _compare_leaves(manifests[0], manifests[1])
        count = max(count, compared)
        if different:
            return _Checkpoints(step, different, compared, agreed)
        if compared:
            agreed = step
        else:
            missing.append(f"step {step}: no leaf is divided into the same shards in both runs")
    return _Checkpoints(None, [], count, agreed)


def _read_manifest(run: _RunFiles, step: int, missing: list[str]) -> Manifest | None:
    try:
        return None if run.store is None else run.store.read_manifest(step)
    except StepfoldError as error:
        missing.append(f"{run.name}: step {step}: {error}")
        return None


def _compare_leaves(a: Manifest, b: Manifest) -> tuple[list[str], int]:
    """Return the leaves that differ, and how many could be compared."""
    different, count = [], 0
    for name in dict.fromkeys([*a.leaves, *b.leaves]):
        if a.leaves.get(name) != b.leaves.get(name):
            different.append(name)
            count += 1
            continue
        shards = [
            {region: array.checksum for region, array in manifest.shards[name].items()}
            for manifest in (a, b)
        ]
        shared = shards[0].keys() & shards[1].keys()
        count += bool(shared)
        if any(shards[0][region] != shards[1][region] for region in shared):
            different.append(name)
    return different, count


# Steps that are run again


def _replay(
    runs: Sequence[_RunFiles],
    state: Any,
    programs: Sequence[tuple[Step, Any]],
    found: _Checkpoints,
    until: int,
) -> StepDiff:
    """Run the steps of both runs again, from the last checkpoint that they share."""
    start, positions = 0, [None, None]
    if found.agreed:
        start, locations = found.agreed, [run.store.location for run in runs if run.store]
        restored = [restore(location, state, step=start, fall_back=False) for location in locations]
        positions, state = [each.data for each in restored], restored[0].state
    elif len({json.dumps((run.info.get("seed") or {}).get("key")) for run in runs}) > 1:
        return StepDiff(1, ["key"], ["key"])
    elif any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
        expected = "the state that both runs started with, since they share no checkpoint"
        refuse("state", expected, "an abstract one")
    both = [
        Program(step, batches, position, _skipped(run.info))
        for run, (step, batches), position in zip(runs, programs, positions, strict=True)
    ]
    replayed, state = find_first_difference(state, start, until, *both)
    if replayed.step is not None or until != found.differs:
        return replayed
    changed = []
    for run in runs:
        if run.store is not None:
            saved = restore(run.store.location, state, step=until, fall_back=False).state
            changed += [run.name] if different_leaves(state, saved) else []
    return replayed._replace(faulty=changed)


def _skipped(info: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the ranges of batches that a run has skipped where it went back."""
    notes = [note for note in info.get("rollbacks") or () if isinstance(note, dict)]
    return [tuple(note["skipped"]) for note in notes if len(note.get("skipped") or ()) == 2]


# Causes


def _compare_facts(first: _RunFiles, second: _RunFiles) -> tuple[list[Cause], list[str]]:
    """Return in what two runs differ, with the step from which on, and in what they do not."""
    if not first.info or not second.info:
        return [], []
    timelines = [_timeline(each.info) for each in (first, second)]
    starts = sorted({start for timeline in timelines for start, _ in timeline})
    causes: list[Cause] = []
    seen: set[tuple[str, str]] = set()
    kinds: dict[str, None] = {}
    for start in starts:
        facts = [_facts_at(timeline, start) for timeline in timelines]
        for kind, name in dict.fromkeys([*facts[0], *facts[1]]):
            old, new = (each.get((kind, name)) for each in facts)
            if kind == "program" and None in (old, new):
                continue  # it was written by an earlier stepfold, or nothing was compiled
            kinds[kind] = None
            if old == new or (kind, name) in seen:
                continue
            seen.add((kind, name))
            runs = [
                run.name
                for run, timeline in zip((first, second), timelines, strict=True)
                if start and any(start == at for at, _ in timeline)
            ]
            where = f", from the resume at step {start:,} of {runs[0]}" if runs else ""
            change = "" if kind == "program" else f" {_spell(old)} -> {_spell(new)}"
            causes.append(Cause(kind, f"{name}{change}{where}".strip(), start))
    causes += _compare_notes(first, second)
    different = {cause.kind for cause in causes}
    return causes, [kind for kind in kinds if kind not in different]


def _timeline(info: Mapping[str, Any]) -> list[tuple[int, dict[tuple[str, str], Any]]]:
    """Return the facts of a run by the step from which on they hold.

    `run.json` has those of the newest attempt, and each attempt what it has changed.
    """
    facts, timeline = _facts(info), list[tuple[int, dict[tuple[str, str], Any]]]()
    for attempt in reversed(info.get("attempts") or [{}]):
        start = int(attempt.get("from", 0))
        programs = sorted(
            {step["program"] for step in (attempt.get("compiled") or {}).get("steps", ())
             if isinstance(step, dict) and isinstance(step.get("program"), str)}
        )  # fmt: skip
        with_program = {**facts, ("program", "of the step"): programs} if programs else facts
        # A later attempt that began at an earlier step has replaced this one.
        if all(start < later for later, _ in timeline):
            timeline.append((start, with_program))
        facts = dict(facts)
        for section in ("config_changes", "changes"):
            for name, (old, _) in (attempt.get(section) or {}).items():
                key = ("config", name) if section == "config_changes" else _key_of(name)
                if old is None:
                    facts.pop(key, None)
                else:
                    facts[key] = old
    return timeline[::-1]


def _facts_at(
    timeline: Sequence[tuple[int, dict[tuple[str, str], Any]]], step: int
) -> dict[tuple[str, str], Any]:
    earlier = [facts for start, facts in timeline if start <= step]
    return earlier[-1] if earlier else timeline[0][1]


def _facts(info: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """Name what `run.json` says about a run."""
    flat = {("config", name): value for name, value in flatten_config(info.get("config")).items()}
    return flat | {_key_of(name): value for name, value in flatten_settings(info).items()}


def _key_of(name: str) -> tuple[str, str]:
    """Return the kind and the name of a setting by its path."""
    section, _, rest = name.partition("/")
    if section == "arguments":
        if rest == "batches/seed":
            return "seed", "batches"
        if rest.startswith("batches/"):
            return "batches", rest.removeprefix("batches/")
        return "argument", rest
    kinds = {"versions": "version", "devices": "device", "mesh": "device", "parameters": "state"}
    return kinds.get(section, section), rest or section


def _compare_notes(first: _RunFiles, second: _RunFiles) -> list[Cause]:
    """Return what happened to one of two runs: replaced states, batches that were skipped."""
    notes = {*_notes(first.info)}, {*_notes(second.info)}
    return [
        Cause("note", f"{run.name}: step {step:,}: {text}", step)
        for run, alone in ((first, notes[0] - notes[1]), (second, notes[1] - notes[0]))
        for step, text in sorted(alone)
    ]


def _notes(info: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    for note in info.get("replacements") or ():
        if isinstance(note, list) and len(note) > 1 and type(note[0]) is int:
            what = "changed weights" if note[2:] == ["weights"] else "replaced the state"
            yield note[0], f"{what}: {note[1]}"
    for note in info.get("rollbacks") or ():
        if isinstance(note, dict) and type(note.get("to")) is int:
            yield note["to"], f"went back to here: {note.get('why')}; skipped {note.get('skipped')}"


def _choose_causes(
    differences: Sequence[Cause], differs_at: int | None, shared: int
) -> tuple[list[Cause], list[str]]:
    """Divide differences into what may be the cause, and what cannot be."""
    until = shared if differs_at is None else differs_at
    causes, others = [], []
    for each in sorted(differences, key=lambda cause: cause.since):
        name = each.what.partition("/")[0].partition(" ")[0]
        has_effect = each.since < until and not (
            each.kind == "argument" and name in _WITHOUT_EFFECT
        )
        if has_effect and differs_at is not None:
            causes.append(each)
        else:
            others.append(str(each))
    return causes, others


def _unknown(causes: Sequence[Cause], equal: Sequence[str]) -> Cause:
    """Name what the files cannot tell apart."""
    if causes:
        what = "the code of the loss, the model or the optimizer, or a setting of jax"
    elif "program" in equal:
        what = "the contents of the data, or a fault of the hardware: the programs are the same"
    else:
        what = "code, a setting of jax, the contents of the data, or a fault of the hardware"
    return Cause("unknown", what)


# As text


def _lines(found: RunDiff) -> Iterator[str]:
    end = min(found.steps)
    if found.differs_at is None:
        yield f"no difference up to step {found.equal_until:,} of {end:,}"
    else:
        where = f"in step {found.differs_at:,}"
        if found.differs_at > found.equal_until + 1:
            where = f"after step {found.equal_until:,}, at the latest {where}"
        yield f"first difference: {where} of {end:,}"
        rows: list[tuple[str, str]] = []
        if found.leaves:
            more = f" and {len(found.leaves) - 1:,} more" if len(found.leaves) > 1 else ""
            where = f"{found.leaves[0]}{more}, {len(found.leaves)} of {found.leaf_count} leaves"
            rows.append(("where", f"{where} at step {found.checkpoint:,}"))
        if found.metrics:
            rows.append(("metrics", f"{', '.join(found.metrics[:4])} from step {found.row:,} on"))
        if found.growth:
            points = [f"{step:,}: {value:.1e}" for step, value in found.growth.items()]
            rows.append(("grows", f"relative, at step {', '.join(points)}"))
        if found.replayed is not None:
            rows.append(("replayed", str(found.replayed)))
        rows += [("cause", str(cause)) for cause in found.causes]
        for name, text in rows:
            yield f"  {name:9}{text}"
    if found.others:
        yield f"  {'others':9}{'; '.join(found.others)}"
    if found.equal:
        yield f"  {'equal':9}{' · '.join(found.equal)}"
    for each in found.missing:
        yield f"  {'missing':9}{each}"


def _spell(value: Any) -> str:
    text = (
        "nothing" if value is None else json.dumps(value) if not isinstance(value, str) else value
    )
    return text if len(text) <= 60 else f"{text[:57]}..."
