"""Where a run stands, in words and in a few numbers."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from stepfold.loop.report.curves import Curve
from stepfold.loop.report.reading import Run

# Seconds without a word after which a run is not said to be running; more, where a word is rare.
_SILENT = 600.0


class Standing(NamedTuple):
    """Where a run stands.

    Attributes:
      kind: "running", "finished", "stopped", "failed", "silent" or "unknown".
      word: the same, for people.
      why: a sentence about it.
    """

    kind: str
    word: str
    why: str


def standing_of(run: Run, now: datetime) -> Standing:
    """Say where a run stands."""
    if not run.attempts:
        why = "There is no run.json, so nobody knows how it ended."
        return Standing("unknown", "Unknown", why if run.curves else "Nothing was measured yet.")
    return _of_attempt(run.attempts[-1], now)


def how_it_ended(attempt: Mapping[str, Any], *, last: bool, now: datetime) -> str:
    """Say in a few words how an attempt ended; one that others followed is not under way."""
    if attempt.get("ended") is None and not last:
        return f"killed after step {attempt['to']:,}"
    return _of_attempt(attempt, now).why


def _of_attempt(attempt: Mapping[str, Any], now: datetime) -> Standing:
    step, error, stopped = attempt["to"], attempt.get("error"), attempt.get("stopped")
    if error:
        what = f"{error['type']}: {error['message']}" if error["message"] else error["type"]
        return Standing("failed", "Failed", f"{what} (at step {step:,})")
    if attempt.get("ended") is None:
        silent = (now - time_of(attempt.get("updated") or attempt["began"])).total_seconds()
        if silent > max(_SILENT, 3 * (attempt.get("pause") or 0.0)):
            return Standing(
                "silent",
                "No word",
                f"Nothing was heard for {duration(silent)}, after step {step:,}: it was killed, or "
                "the machine is gone.",
            )
        total = attempt.get("total")
        of = f" of {total:,}" if total else ""
        return Standing("running", "Running", f"Step {step:,}{of} was done when this was written.")
    why = str(stopped or f"stopped at step {step:,}")
    # As the fold says it: a run that did what it was to do, whatever became of the last save.
    whole = why.startswith(("all ", "the batches ended")) or step == attempt.get("total")
    kind, word = ("finished", "Finished") if whole else ("stopped", "Stopped early")
    return Standing(kind, word, _sentence(why))


def _sentence(words: str) -> str:
    """Begin with a capital, unless it is a name that words begin with, as `train/loss` is."""
    first = words.split(" ", 1)[0]
    return (words[:1].upper() + words[1:] if first.isalpha() else words) + "."


def time_of(text: str) -> datetime:
    """Read a time as `run.json` has it."""
    return datetime.fromisoformat(text)


def seconds_of(attempt: Mapping[str, Any]) -> float:
    """Tell how long an attempt took, as far as anything was heard of it."""
    end = attempt.get("ended") or attempt.get("updated") or attempt["began"]
    return max((time_of(end) - time_of(attempt["began"])).total_seconds(), 0.0)


def duration(seconds: float) -> str:
    """Write a duration in its two largest units.

    >>> duration(0.42), duration(59.5), duration(3600 * 5 + 61), duration(86400 * 3)
    ('0.42 s', '59.5 s', '5 h 1 min', '3 d 0 h')
    """
    if seconds < 60:
        return f"{seconds:.3g} s"
    for unit, name, less, smaller in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if seconds >= unit:
            whole, rest = divmod(int(seconds), unit)
            return f"{whole} {name} {rest // less} {smaller}"
    return f"{seconds:.3g} s"


def clock_of(attempt: Mapping[str, Any]) -> np.ndarray:
    """Give where the clock stood: rows of a step, the seconds so far, and those waited."""
    rows = attempt.get("clock") or []
    return np.array(rows, np.float64).reshape(-1, 3)


def pace_of(run: Run) -> dict[str, Curve]:
    """Give the steps a second and the share of waiting, from clocks, over all attempts.

    The first interval of an attempt, in which the step is compiled, is left out.
    """
    steps: list[float] = []
    rates: list[float] = []
    shares: list[float] = []
    for attempt in run.attempts:
        rows = clock_of(attempt)[1:]
        done, seconds, waited = np.diff(rows, axis=0).T if len(rows) > 1 else np.zeros((3, 0))
        good = (done > 0) & (seconds > 0)
        steps += rows[1:, 0][good].tolist()
        rates += (done[good] / seconds[good]).tolist()
        shares += np.clip(waited[good] / seconds[good], 0, 1).tolist()
    if not steps:
        return {}
    order = np.argsort(steps, kind="stable")
    found = {"steps a second": rates, "share of time waiting for batches": shares}
    return {n: Curve(np.array(steps)[order], np.array(v)[order]) for n, v in found.items()}


def overall(run: Run) -> tuple[float, float] | None:
    """Give the steps a second and the share of waiting of the last attempt, without compiling."""
    rows = clock_of(run.attempts[-1])[1:] if run.attempts else np.zeros((0, 3))
    if len(rows) < 2 or not rows[-1, 1] > rows[0, 1] or rows[-1, 0] <= rows[0, 0]:
        return None
    done, seconds, waited = rows[-1] - rows[0]
    return float(done / seconds), float(min(waited / seconds, 1.0))


def goodput_of(run: Run) -> float | None:
    """Tell which share of all time, pauses too, went into steps that no restart did again.

    None, where the run was never begun a second time.
    """
    if len(run.attempts) < 2:
        return None
    useful = 0.0
    for number, attempt in enumerate(run.attempts):
        rows = clock_of(attempt)
        later = [one["from"] for one in run.attempts[number + 1 :]]
        until = min([attempt["to"], *later])
        if len(rows) and until > attempt["from"]:
            useful += float(np.interp(until, rows[:, 0], rows[:, 1]))
    last = run.attempts[-1]
    whole = (time_of(last["began"]) - time_of(run.attempts[0]["began"])).total_seconds()
    whole += seconds_of(last)
    return min(useful / whole, 1.0) if whole > 0 else None


def utc_now() -> datetime:
    """Give the time, as `run.json` has it."""
    return datetime.now(UTC)
