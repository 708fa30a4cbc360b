"""What a run spent its time on: its parts, its speed, and its goodput."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np

from stepfold.loop.hook import find_save_interval
from stepfold.runs.report.read import CurveArrays, RunData

_NONE = "\N{EN DASH}"
_PARTS = 12  # in the table; the rest are summed up
_MIN_SHARE = 0.001  # of the time, for a row of its own
_PART_WORDS = {  # of parts that `ReportWriter` measures
    "start": "start, until the first metrics",
    "steps": "steps, with the time of devices",
    "batches": "waiting for batches",
    "saving": "saving checkpoints",
    "end": "end, until all is saved",
}


def time_rows(run: RunData) -> Iterator[Sequence[str]]:
    """Yield the parts of the time of a run, the longest first: their time, share, and per step."""
    parts = _parts(run)
    steps = _count_steps(run)
    rows = [(_PART_WORDS.get(part, part), seconds) for part, seconds in parts.items() if seconds]
    total = sum(parts.values())
    shown = min(_PARTS, sum(seconds >= _MIN_SHARE * total for _, seconds in rows))
    if len(rest := rows[shown:]) > 1:
        rows[shown:] = [(f"{len(rest)} others", sum(seconds for _, seconds in rest))]
    for name, seconds in rows:
        per_step = _brief(seconds / max(steps, 1))
        yield name, spell_duration(seconds), f"{seconds / total:.1%}", per_step


def describe_slow_saves(run: RunData) -> str | None:
    """Say that saves took more than a fifth of the time, and how rare they would take little."""
    parts = _parts(run)
    saving, total = parts.get("saving", 0.0), sum(parts.values())
    rest = total - sum(parts.get(part, 0.0) for part in ("saving", "start", "end"))
    saves = sum(attempt.get("saves") or 0 for attempt in run.attempts)
    steps = _count_steps(run)
    if not saves or not steps or saving < 0.2 * total:
        return None
    every = find_save_interval(saving, saves, rest, steps)
    return (
        f"Saves took {saving / total:.0%} of the time; every {every:,} steps, they would take 5 %"
    )


def _count_steps(run: RunData) -> int:
    return sum(max(0, attempt["to"] - attempt["from"]) for attempt in run.attempts)


def times_side_by_side(runs: Sequence[RunData]) -> Iterator[Sequence[str]]:
    """Yield the parts of the time, the largest shares of any run first, with a cell for each."""
    parts = [_parts(run) for run in runs]
    totals = [sum(seconds.values()) for seconds in parts]
    rows: dict[str, list[tuple[float, str]]] = {}
    for part in dict.fromkeys(part for seconds in parts for part in seconds):
        rows[part] = [(0.0, _NONE)] * len(runs)
        for number, (seconds, total) in enumerate(zip(parts, totals, strict=True)):
            if seconds.get(part):
                share = seconds[part] / total
                rows[part][number] = share, f"{spell_duration(seconds[part])} ({share:.1%})"
    for part in sorted(rows, key=lambda part: max(rows[part]), reverse=True)[:_PARTS]:
        yield _PART_WORDS.get(part, part), *(text for _, text in rows[part])


def _parts(run: RunData) -> dict[str, float]:
    """Return the seconds of all attempts by what they went into, the longest first."""
    sums: dict[str, float] = {}
    for attempt in run.attempts:
        for part, seconds in attempt.get("parts") or ():
            sums[part] = sums.get(part, 0.0) + max(seconds, 0.0)
    return dict(sorted(sums.items(), key=lambda part: -part[1]))


def speed_curves(run: RunData) -> dict[str, CurveArrays]:
    """Return the steps per second, and the share of the time spent waiting for batches."""
    points = [np.zeros((0, 3))]
    for attempt in run.attempts:
        rows = read_clock(attempt)[1:]
        changes = np.diff(rows, axis=0)
        valid = (changes[:, :2] > 0).all(axis=1)
        steps, seconds, waited = changes[valid].T
        shares = np.clip(waited / seconds, 0, 1)
        points.append(np.stack([rows[1:, 0][valid], steps / seconds, shares], axis=1))
    table = np.concatenate(points)
    steps, rates, shares = table[np.argsort(table[:, 0], kind="stable")].T
    curves = {"steps_per_second": CurveArrays(steps, rates), "waiting": CurveArrays(steps, shares)}
    return {f"throughput/{name}": curve for name, curve in curves.items() if len(steps)}


def read_clock(attempt: Mapping[str, Any]) -> np.ndarray:
    """Return rows of a step, the seconds since the start, and those spent waiting for batches."""
    return np.array(attempt.get("clock") or [], np.float64).reshape(-1, 3)


def goodput_of(run: RunData) -> float | None:
    """Return the share of the time, pauses included, in steps that no restart repeated."""
    if len(run.attempts) < 2:
        return None
    useful = 0.0
    for number, attempt in enumerate(run.attempts):
        rows = read_clock(attempt)
        kept = min([attempt["to"], *(later["from"] for later in run.attempts[number + 1 :])])
        if len(rows) and kept > attempt["from"]:
            useful += float(np.interp(kept, rows[:, 0], rows[:, 1]))
    total = attempt_seconds({**run.attempts[-1], "began": run.attempts[0]["began"]})
    return min(useful / total, 1.0) if total else None


def attempt_seconds(attempt: Mapping[str, Any]) -> float:
    """Return the seconds from the start of an attempt to its last update."""
    duration = last_update(attempt) - datetime.fromisoformat(attempt["began"])
    return max(duration.total_seconds(), 0.0)


def last_update(attempt: Mapping[str, Any]) -> datetime:
    """Return the time at which an attempt was last heard of."""
    times = (attempt.get(name) for name in ("ended", "updated", "began"))
    return datetime.fromisoformat(next(filter(None, times)))


def spell_duration(seconds: float) -> str:
    """Write a duration in its two largest units."""
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    for (large, unit), (small, part) in pairwise(units):
        if seconds >= unit:
            return f"{int(seconds // unit)} {large} {int(seconds % unit // part)} {small}"
    return f"{seconds:.3g} s"


def _brief(seconds: float) -> str:
    """Write a short duration in the unit that fits."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"
