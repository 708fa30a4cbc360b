"""Resolve "latest", "best" or a number to a step."""

from pathlib import Path
from typing import Any, Literal

from stepfold.checkpoint import steps
from stepfold.checkpoint.agreement import same_as_first
from stepfold.checkpoint.retention import ranked
from stepfold.checkpoint.sealed import integer
from stepfold.errors import CheckpointError, ConfigError

Step = int | Literal["latest", "best"]


def candidates(place: Path, step: Step, best: Any = None) -> list[int]:
    """List the steps to try, the preferred one first, as process 0 sees them."""
    number = None if isinstance(step, str) else integer(step)
    if number is None and (not isinstance(step, str) or step not in ("latest", "best")):
        raise ConfigError(f"step: expected 'latest', 'best' or a number, got {step!r}")
    there = steps.steps_in(place)
    if step == "latest":
        found = there[::-1]
    elif step == "best":
        found = ranked(place, best)
    else:
        found = [number] if number in there else []
    found = same_as_first(found)
    if not found:
        wanted = "a checkpoint" if isinstance(step, str) else f"step {step}"
        got = f"steps {', '.join(map(str, there))}" if there else "none"
        inside = place.name.isdecimal() and int(place.name) in steps.steps_in(place.parent)
        advice = (
            f"this is one of the steps in {place.parent}: give that, with step={place.name}"
            if inside
            else "look at the path, or save first"
        )
        raise CheckpointError(f"{place}: expected {wanted} to restore, got {got}; {advice}")
    return found
