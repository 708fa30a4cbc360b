"""Read what the files of a run say, without jax and without arrays.

What is missing or damaged becomes a sentence, so that the rest can be compared.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from typing import Any

from stepfold.checkpoint.checksums import Checksums
from stepfold.core.validation import absolute_path, is_url
from stepfold.errors import StepfoldError, refuse
from stepfold.json_files import parse_json
from stepfold.object_storage import Bucket
from stepfold.runs.report.read import CurveArrays, read_curves

_SECTIONS = ("config", "arguments", "versions", "devices", "mesh", "seed", "parameters")


class RunRecord:
    """What the files of a run say.

    Attributes:
      name: the run as the user names it.
      curves: its metrics.
      checksums: its checkpoints, or None.
      timeline: its settings by the step from which on they hold, empty if they are unknown.
      notes: what happened in it, as steps and sentences.
      skipped: ranges of batches that it has skipped where it went back.
      config: what `fit` got.
      key: the numbers of its first key.
      step: the number of steps that it has done.
      missing: sentences on what is missing or damaged.
    """

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self.name, self.missing = str(run), list[str]()
        root, location = None, self.name
        if not is_url(location):
            root = absolute_path("run", run)
            if not root.is_dir():
                kind = "a file" if root.exists() else "a path that does not exist"
                refuse(self.name, "the directory of a run", kind, "check the path")
            location = root.as_uri()
        bucket, attempts, settings = Bucket(location), list[Any](), None
        self.timeline: list[tuple[int, dict[str, Any]]] = []
        self.notes: list[tuple[int, str]] = []
        self.skipped: list[tuple[int, int]] = []
        self.curves: Mapping[str, CurveArrays] = {}
        self.checksums: Checksums | None = None
        self.config = self.key = None
        with self._converted("run.json", self.missing):
            info = parse_json(bucket.read("run.json") or b"null")
            if info is None:
                raise ValueError("the file is missing")
            self.timeline, self.notes = [*_timeline(info)][::-1], [*_notes(info)]
            self.skipped = [(*note["skipped"],) for note in info.get("rollbacks") or ()]
            self.config = info.get("config")
            self.key = (info.get("seed") or {}).get("key")
            attempts = info.get("attempts") or []
            settings = (info.get("arguments") or {}).get("checkpoints")
            if attempts and attempts[-1].get("ended") is None:
                self.missing.append(f"{self.name}: its end: it is running, or was killed")
        with self._converted("metrics.jsonl", self.missing):
            self.curves, damaged = read_curves(BytesIO(bucket.read("metrics.jsonl") or b""))
            if damaged or not self.curves:
                raise ValueError(f"{damaged} damaged lines" if damaged else "there are no rows")
        with self._converted("checkpoints", self.missing):
            directory = (settings or {}).get("directory") or "checkpoints"
            if root is not None and not is_url(directory):
                directory = absolute_path("directory", root / directory).as_uri()
            # The directory of a run may be that of a series itself.
            places = [directory, location] if is_url(directory) else [location]
            self.checksums = next((x for x in map(Checksums, places) if x.steps), None)
            if self.checksums is None:
                raise ValueError("there are none")
        if not (self.timeline or self.curves or self.checksums):
            expected = "a run with run.json, metrics.jsonl or checkpoints"
            refuse(self.name, expected, "none of them", "give a run_dir of fit")
        done = [attempt["to"] for attempt in attempts[-1:]]
        done += [int(curve.steps[-1]) for curve in self.curves.values() if len(curve.steps)]
        self.step = max([*done, *(self.checksums.steps if self.checksums else ())], default=0)

    def read_checkpoint(self, step: int) -> dict[str, dict[Any, Any]] | str:
        """Return the checksums of a checkpoint, or what is wrong with it."""
        problems = list[str]()
        with self._converted(f"checkpoint of step {step}", problems):
            return self.checksums.read(step) if self.checksums else {}
        return problems[0]

    @contextmanager
    def _converted(self, what: str, missing: list[str]) -> Iterator[None]:
        """Convert the errors of damaged files to sentences."""
        try:
            yield
        except (StepfoldError, OSError, ValueError) as error:
            missing.append(f"{self.name}: {what}: {error}")
        except (LookupError, TypeError, AttributeError) as error:  # JSON of another form
            missing.append(f"{self.name}: {what}: it is damaged: {error!r}")


def _timeline(info: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the settings of a run and the step from which on they hold, the newest first.

    `run.json` has those of the newest attempt, and each attempt what it has changed.
    """
    facts = dict(_flatten({name: info.get(name) for name in _SECTIONS}))
    first = None
    for attempt in reversed(info.get("attempts") or [{"from": 0}]):
        compiled = (attempt.get("compiled") or {}).get("steps") or ()
        programs = [each["program"] for each in compiled if each.get("program")]
        # A later attempt that began at an earlier step has replaced this one.
        if first is None or attempt["from"] < first:
            first = attempt["from"]
            yield first, facts | ({"program/of the step": programs} if programs else {})
        changes = {
            f"config/{name}": pair for name, pair in attempt.get("config_changes", {}).items()
        }
        changes |= attempt.get("changes", {})
        facts = facts | dict(_flatten({name: old for name, (old, _) in changes.items()}))


def _flatten(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of `run.json` by their paths; what decides the batches is a section."""
    if isinstance(node, dict) and (node or not path):
        for name, inner in node.items():
            yield from _flatten(inner, f"{path}/{name}" if path else name)
    elif path != "seed/batches":  # it is among the settings of the batches too
        yield path.removeprefix("arguments/" if "/batches/" in path else ""), node


def _notes(info: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    for step, why, *kind in info.get("replacements") or ():
        yield step, f"{'changed weights' if kind else 'replaced the state'}: {why}"
    for note in info.get("rollbacks") or ():
        yield note["to"], f"went back to here: {note['why']}; skipped {note['skipped']}"
