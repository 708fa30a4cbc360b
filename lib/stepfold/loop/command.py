"""What `python -m stepfold.loop` does: write the page of a run, or one that compares several."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from stepfold.errors import ConfigError, DataError
from stepfold.loop.record import replace
from stepfold.loop.report.page import render
from stepfold.loop.report.reading import read_run


def main(arguments: Sequence[str]) -> int:
    """Run the command; give the exit code: 1 where something is damaged, 2 for a wrong question."""
    parser = argparse.ArgumentParser(
        prog="python -m stepfold.loop", description="Look at runs that fit has made."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    text = "write the page of a run, or one page that compares several"
    report = verbs.add_parser("report", help=text, description=text)
    report.add_argument("runs", nargs="+", metavar="RUN_DIR", help="what was given as run_dir")
    report.add_argument(
        "--out",
        metavar="FILE",
        help="the page; if left out, report.html in the directory of the run or, of several runs, "
        "in the one that holds the first",
    )
    asked = parser.parse_args(arguments)
    try:
        print(_report(asked.runs, asked.out))  # noqa: T201  this is a command
    except (ConfigError, DataError, OSError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1 if isinstance(error, DataError) else 2
    return 0


def _report(given: Sequence[str], out: str | None) -> Path:
    places = [_place(one) for one in dict.fromkeys(given)]
    if out is not None:
        path = Path(out)
    else:
        path = (places[0] if len(places) == 1 else places[0].parent) / "report.html"
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--out: expected a file in a directory that is there, got {path}")
    replace(path, render([read_run(place) for place in places]))
    return path


def _place(given: str) -> Path:
    place = Path(given).resolve()
    if not place.is_dir():
        raise ConfigError(
            f"{given}: expected the directory of a run, got "
            f"{'a file' if place.exists() else 'nothing there'}; look at the path"
        )
    return place
