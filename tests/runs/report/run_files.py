"""Directories of runs as `fit` leaves them, and pages read back."""

import json
from datetime import UTC, datetime
from html.parser import HTMLParser

from stepfold.runs.info import write_run_info
from stepfold.runs.report.read import read_run_data
from stepfold.runs.report.render import render

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
STOP = {"kind": "completed", "message": "all 100 steps were done"}


def attempt(**options):
    """Describe a completed attempt of 100 s over 100 steps."""
    return {
        "began": "2026-03-01T10:00:00.000+00:00",
        "from": 0,
        "to": 100,
        "total": 100,
        "updated": "2026-03-01T10:01:40.000+00:00",
        "ended": "2026-03-01T10:01:40.000+00:00",
        "stop": STOP,
        "clock": [[0, 0.0, 0.0], [10, 10.0, 0.0], [50, 30.0, 5.0], [100, 90.0, 8.0]],
        **options,
    }


def write_metrics(folder, rows):
    """Write rows of metrics by step, as `sf.writers.jsonl` does."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"step": step, **row}) + "\n" for step, row in rows.items()]
    (folder / "metrics.jsonl").write_text("".join(lines))


def write_run(folder, rows=None, attempts=None, **metadata):
    """Write a run; by default with a loss of training and of an evaluation."""
    rows = rows or {
        10: {"train/loss": 2.0},
        50: {"train/loss": 1.0, "eval/loss": 1.5},
        100: {"train/loss": 0.5, "eval/loss": 1.75},
    }
    write_metrics(folder, rows)
    write_run_info(folder, {"attempts": attempts or [attempt()], **metadata})
    return folder


class Page(HTMLParser):
    """A page, with the texts of each tag, and `data`, the JSON in it; checks that tags match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.mismatched = [], [], {}, []
        self.feed(text)
        self.close()
        assert (self.open, self.mismatched) == ([], [])
        self.data = json.loads(self.texts["script"][0])

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "link", "input", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open[-1:] == [tag]:
            self.open.pop()
        else:
            self.mismatched.append((tag, list(self.open)))

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def attributes(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]

    def lines(self):
        """Map the section and the title of each chart to its lines."""
        return {
            (section["title"], chart["title"]): chart["lines"]
            for section in self.data["sections"]
            for chart in section["charts"]
        }

    def table(self, title):
        """Return the rows of a table without its head."""
        return [
            [cell.replace("\N{NO-BREAK SPACE}", " ") for cell in row]
            for row in self.data["tables"][title][1:]
        ]

    def figures(self):
        """Map the name of each figure to its value and note."""
        rows = [figure for figures in self.data["figures"] for figure in figures]
        return {name: (value, note) for name, value, note in rows}


def page(*folders, **options):
    """Render and read back the page of runs."""
    return Page(render([read_run_data(folder) for folder in folders], **{"now": NOW, **options}))
