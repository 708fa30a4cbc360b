"""Directories of runs, made by hand: what pages are read from, with nothing trained."""

import json
from datetime import UTC, datetime

from stepfold.loop.record import write_record

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def attempt(**options):
    """Describe an attempt of 100 s over 100 steps that is over, unless said otherwise."""
    return {
        "began": "2026-03-01T10:00:00.000+00:00",
        "from": 0,
        "to": 100,
        "total": 100,
        "updated": "2026-03-01T10:01:40.000+00:00",
        "ended": "2026-03-01T10:01:40.000+00:00",
        "stopped": "all 100 steps were done",
        "error": None,
        "clock": [[0, 0.0, 0.0], [10, 10.0, 0.0], [50, 30.0, 5.0], [100, 90.0, 8.0]],
        **options,
    }


def metrics(folder, rows):
    """Write rows of metrics by step, as the writer does."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"step": step, **row}) + "\n" for step, row in rows.items()]
    (folder / "metrics.jsonl").write_text("".join(lines))


def run(folder, rows=None, attempts=None, **facts):
    """Write all of a run; by default a loss in training and in an evaluation."""
    rows = rows or {
        10: {"train/loss": 2.0},
        50: {"train/loss": 1.0, "eval/loss": 1.5},
        100: {"train/loss": 0.5, "eval/loss": 1.75},
    }
    metrics(folder, rows)
    write_record(folder, {"attempts": attempts or [attempt()], **facts})
    return folder
