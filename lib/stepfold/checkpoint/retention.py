"""The retention policy: which steps to keep, and which step is the best."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepfold.checkpoint import steps
from stepfold.checkpoint.sealed import number
from stepfold.errors import CheckpointError, ConfigError

Best = tuple[str, str]


def read_best(best: Any, mode: str | None = None) -> Best | None:
    """Validate the metric that ranks checkpoints, and infer its mode.

    Without a mode, a metric whose last part contains "loss" is minimized; any other is maximized.
    """
    if best is None:
        return None
    if not isinstance(best, str) or not best:
        raise ConfigError(f"best: expected the name of a metric, got {best!r}")
    if mode is None:
        mode = "min" if "loss" in best.rsplit("/", 1)[-1].lower() else "max"
    if mode not in ("min", "max"):
        raise ConfigError(f"mode: expected 'min' or 'max', got {mode!r}")
    return best, mode


def order_by(best: Best, metrics: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """List the steps that have a finite metric, the best first; ties keep the older step first."""
    name, mode = best
    found = {step: number(values.get(name)) for step, values in metrics.items()}
    values = {step: value for step, value in found.items() if value is not None}
    sign = 1 if mode == "min" else -1
    return sorted(values, key=lambda step: (sign * values[step], step))


def expendable(
    metrics: Mapping[int, Mapping[str, Any]],
    *,
    keep: int | None,
    last: int | None = None,
    keep_every: int | None = None,
    best: Best | None = None,
    keep_best: int = 1,
) -> list[int]:
    """List the steps that the retention policy deletes.

    `last`, the step saved last, is always kept: after a rollback it may not be the newest.
    """
    there = sorted(metrics)
    if keep is None:
        return []
    kept = {*there[-keep:], last}
    if keep_every is not None:
        kept |= {step for step in there if step % keep_every == 0}
    if best is not None:
        kept |= set(order_by(best, metrics)[:keep_best])
    return [step for step in there if step not in kept]


def metrics_in(directory: Path) -> dict[int, Mapping[str, Any]]:
    """Read the metrics of all complete steps."""
    return {step: words.metrics or {} for step, words in steps.words_in(directory).items()}


def ranked(directory: Path, best: Any) -> list[int]:
    """List the steps from best to worst, by `best` or by the metric recorded in the newest step."""
    there = steps.words_in(directory)
    # An unreadable step may be the best: try it first, rather than skip it silently.
    broken = [step for step in steps.steps_in(directory) if step not in there]
    if best is None:
        best = next((words.best for words in reversed(there.values()) if words.best), None)
    elif isinstance(best, tuple | list) and len(best) == 2:
        best = read_best(*best)
    else:
        best = read_best(best)
    if there and best is None and not broken:
        raise CheckpointError(
            f"{directory}: expected to know which metric is best, but none was told when it was "
            "saved; give best='eval/loss', or the step"
        )
    metrics = {step: words.metrics or {} for step, words in there.items()}
    found = order_by(best, metrics) if best else []
    if there and not found and not broken:
        raise CheckpointError(
            f"{directory}: expected a step with a finite number as the metric {best[0]!r}, got "
            f"none; save with metrics={{{best[0]!r}: …}}, or give the step"
        )
    return broken + found
