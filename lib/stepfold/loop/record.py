"""`run.json`: what a run was begun with, on what it ran, and how each attempt at it ended."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepfold.errors import DataError

NAME = "run.json"
FORMAT = 1  # counted up when what is there before means something else
_ADVICE = "move it away, and the rest of the run is shown without it"


def read_record(run_dir: Path) -> dict[str, Any]:
    """Read what is known of a run; nothing, where nothing was written.

    Raises:
      DataError: if it is damaged, or of a later stepfold.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_record(folder, {"attempts": []})
    >>> read_record(folder)
    {'format': 1, 'attempts': []}
    """
    path = run_dir / NAME
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DataError(
            f"{path}: expected JSON, got something damaged: {error}; {_ADVICE}"
        ) from None
    number = record.get("format") if isinstance(record, dict) else None
    if type(number) is int and number > FORMAT:
        raise DataError(
            f"{path}: expected format {FORMAT} or earlier, got {number}, which a later stepfold "
            f"wrote; install that, or {_ADVICE}"
        )
    if number != FORMAT or not _is_whole(record):
        raise DataError(
            f"{path}: expected what fit writes, with its format and attempts, got other JSON; "
            f"{_ADVICE}"
        )
    return dict(record)


def _is_whole(record: Mapping[str, Any]) -> bool:
    """Tell whether what pages are made of is of the kind that it has to be."""
    attempts = record.get("attempts")
    return (
        isinstance(attempts, list)
        and all(isinstance(one, dict) and {"began", "from", "to"} <= one.keys() for one in attempts)
        and all(
            isinstance(record.get(name, {}), dict)
            for name in ("arguments", "versions", "devices", "parameters")
        )
    )


def write_record(run_dir: Path, record: Mapping[str, Any]) -> None:
    """Write what is known of a run, at once: there is the old one or the new one."""
    lines = ",\n ".join(
        f"{json.dumps(name)}: {_spelled(value)}"
        for name, value in {"format": FORMAT, **record}.items()
    )
    replace(run_dir / NAME, f"{{\n {lines}\n}}\n")


def _spelled(value: Any) -> str:
    """Write a list of objects with a line for each, and anything else on one line."""
    if isinstance(value, list) and value:
        return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
    return json.dumps(value)


def replace(path: Path, text: str) -> None:
    """Replace a file at once, so that whoever reads it finds it whole.

    Raises:
      OSError: if it cannot be written; the file is as it was before.
    """
    new = path.with_name(path.name + ".new")
    try:
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)
    except (OSError, UnicodeError):
        new.unlink(missing_ok=True)
        raise
