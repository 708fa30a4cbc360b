"""`run.json`: what a run was begun with, on what it ran, and how each attempt at it ended."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from itertools import count, cycle
from pathlib import Path
from typing import Any, NamedTuple

from stepfold import tree
from stepfold.errors import DataError

NAME = "run.json"
FORMAT = 1  # counted up when what is there before means something else
_ADVICE = "move it away, and the rest of the run is shown without it"


class _Kind(NamedTuple):
    """What a value has to be, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]


def _is_time(value: Any) -> bool:
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


_TEXT = _Kind("a text", lambda value: isinstance(value, str))
_COUNT = _Kind("an integer from 0 on", lambda value: type(value) is int and 0 <= value < 2**63)
_NUMBER = _Kind("a number", lambda value: type(value) in (int, float) and abs(value) < 1e300)
_TIME = _Kind("a time, as 2026-01-31T12:00:00+00:00", _is_time)
_MODE = _Kind("'min' or 'max'", lambda value: value in ("min", "max"))
# What pages are made of; whatever else there is, is shown as it is. A name with ? may be missing or
# null, a list holds any number of what is in it, and a tuple stands for a list of just these.
_FORM: Mapping[str, Any] = {
    "program?": _TEXT,
    "arguments?": {
        "evaluations?": [{"name": _TEXT}],
        "checkpoints?": {"directory?": _TEXT, "best?": _TEXT, "mode?": _MODE},
    },
    "devices?": {},
    "parameters?": {
        "count": _COUNT,
        "bytes": _COUNT,
        "leaves?": [(_TEXT, [_COUNT], _TEXT, _COUNT)],
    },
    "attempts": [
        {
            "began": _TIME,
            "from": _COUNT,
            "to": _COUNT,
            "total?": _COUNT,
            "updated?": _TIME,
            "ended?": _TIME,
            "stopped?": _TEXT,
            "error?": {"type": _TEXT, "message": _TEXT},
            "pause?": _NUMBER,
            "clock?": [(_NUMBER, _NUMBER, _NUMBER)],
        }
    ],
}


def read_record(run_dir: Path) -> dict[str, Any]:
    """Read what is known of a run; nothing, where nothing was written.

    Raises:
      DataError: if it is damaged, edited to something else, or of a later stepfold.

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
    if number != FORMAT:
        raise DataError(
            f"{path}: expected what fit writes, with its format and attempts, got other JSON; "
            f"{_ADVICE}"
        )
    misfit = _misfit(record, _FORM)
    if misfit is not None:
        where, words = misfit
        raise DataError(f"{path}: {where.rstrip('/')}: {words}; mend it, or {_ADVICE}")
    return dict(record)


def _misfit(value: Any, form: Any) -> tuple[str, str] | None:
    """Say where a value is not of a form, and what it has to be there; None, if it is."""
    inner: Iterable[tuple[Any, Any, Any]]
    if isinstance(form, _Kind):
        return None if form.fits(value) else _expected(form.words, value)
    if isinstance(form, Mapping):
        if not isinstance(value, dict):
            return _expected("an object", value)
        named = [(name.removesuffix("?"), name) for name in form]
        there = [
            (name, given) for name, given in named if given == name or value.get(name) is not None
        ]
        inner = ((name, value.get(name), form[given]) for name, given in there)
    else:
        if not isinstance(value, list):
            return _expected("a list", value)
        if isinstance(form, tuple) and len(value) != len(form):
            return _expected(f"a list of {len(form)}", value)
        inner = zip(count(), value, form if isinstance(form, tuple) else cycle(form), strict=False)
    for key, one, wanted in inner:
        found = _misfit(one, wanted)
        if found is not None:
            return f"{key}/{found[0]}", found[1]
    return None


def _expected(words: str, value: Any) -> tuple[str, str]:
    return "", f"expected {words}, got {tree.spell(value)}"


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
        # A folder's name need not be UTF-8, and a page may show it.
        new.write_text(text, encoding="utf-8", errors="replace")
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
