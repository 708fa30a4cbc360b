"""`python -m stepfold report RUN_DIR [RUN_DIR…]`: write the page of a run, or compare runs."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from stepfold.core.validation import absolute_path
from stepfold.errors import ConfigError, DataError, refuse
from stepfold.runs.report.read import read_run_data
from stepfold.runs.report.render import render
from stepfold.writers.base import replace_file
from stepfold.writers.jsonl import write_csv


def run(options: argparse.Namespace) -> int:
    """Run the command; return 1 if a file is damaged, 2 if an argument is wrong."""
    try:
        print(_report(options.runs, options.out))  # noqa: T201  this is a command
    except (ConfigError, DataError, OSError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1 if isinstance(error, DataError) else 2
    return 0


def _report(runs: Sequence[str], out: str | None) -> Path:
    directories = list(dict.fromkeys(map(_run_directory, runs)))
    is_single = len(directories) == 1
    default = (directories[0] if is_single else directories[0].parent) / "report.html"
    path = default if out is None else absolute_path("--out", out)
    if path.is_dir() or not path.parent.is_dir():
        refuse("--out", "a file in an existing directory", f"{out or path}")
    page = render([read_run_data(directory) for directory in directories], path=path)
    replace_file(path, page.encode(errors="replace"))
    if out is None and is_single:
        write_csv(directories[0] / "metrics.jsonl", directories[0] / "metrics.csv")
    return path


def _run_directory(name: str) -> Path:
    path = absolute_path("RUN_DIR", name).resolve()
    if not path.is_dir():
        kind = "a file" if path.exists() else "a path that does not exist"
        refuse(name, "the directory of a run", f"{kind}", "check the path")
    return path
