"""A run as it lies in its directory: finished, under way, killed, or of an older stepfold."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from stepfold.checkpoint import steps
from stepfold.checkpoint.manifest import read_words
from stepfold.errors import CheckpointError
from stepfold.loop.record import read_record
from stepfold.loop.report.curves import Curve, Tail


class Saved(NamedTuple):
    """A checkpoint that is there.

    Attributes:
      step: its step.
      time: when it was saved, in seconds since 1970.
      metrics: what was measured at it.
      whole: whether its files are all there.
    """

    step: int
    time: float
    metrics: Mapping[str, Any]
    whole: bool


class Run(NamedTuple):
    """What is known of a run.

    Attributes:
      place: its directory.
      record: what `run.json` says; empty, where there is none.
      curves: what was measured, by name.
      settings: what was written as hyper-parameters.
      checkpoints: those that are there, in order.
      damaged: how many lines of `metrics.jsonl` cannot be read.
    """

    place: Path
    record: Mapping[str, Any]
    curves: Mapping[str, Curve]
    settings: Mapping[str, Any]
    checkpoints: Sequence[Saved]
    damaged: int

    @property
    def attempts(self) -> Sequence[Mapping[str, Any]]:
        """The starts of the run, the first one first."""
        found: Sequence[Mapping[str, Any]] = self.record.get("attempts", ())
        return found

    def argument(self, name: str) -> Any:
        """Give an argument of `fit`, if it is known."""
        return (self.record.get("arguments") or {}).get(name)


def read_run(place: Path, tail: Tail | None = None) -> Run:
    """Read all that there is of a run.

    Args:
      place: its directory.
      tail: what has read its metrics before.

    Raises:
      DataError: if `run.json` is damaged, edited to something else, or of a later stepfold.
    """
    tail = tail or Tail(place / "metrics.jsonl")
    record = read_record(place)
    run = Run(place, record, tail.read(), tail.settings, (), tail.damaged)
    said = run.argument("checkpoints") or {}
    return run._replace(checkpoints=_saved(Path(said.get("directory") or place / "checkpoints")))


def _saved(directory: Path) -> list[Saved]:
    """List checkpoints; one that is deleted meanwhile is none."""
    found = []
    with suppress(CheckpointError, ValueError):  # one that cannot be read, or named, has none
        for step in steps.steps_in(directory):
            path = steps.path_of(directory, step)
            with suppress(FileNotFoundError):
                found.append(_one(step, path))
    return found


def _one(step: int, path: Path) -> Saved:
    at = path.stat().st_mtime
    try:
        return Saved(step, at, read_words(path).metrics or {}, whole=True)
    except CheckpointError:
        return Saved(step, at, {}, whole=False)


def names_of(places: Sequence[Path]) -> list[str]:
    """Name runs by their directories, with those above where two would be called the same.

    >>> names_of([Path("/runs/a"), Path("/runs/b")]), names_of([Path("/x/runs/a")])
    (['a', 'b'], ['a'])
    >>> names_of([Path("/x/one/run"), Path("/x/two/run")])
    ['one/run', 'two/run']
    """
    deepest = max(len(place.parts) for place in places)
    for depth in range(1, deepest + 1):
        names = ["/".join(place.parts[-depth:]) for place in places]
        if len(set(names)) == len(names):
            break
    return [name or "/" for name in names]
