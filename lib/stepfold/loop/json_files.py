"""Read JSON that may be damaged, of `run.json`, metrics, locks, capsules and notes.

No file blocks, and damage raises only `ValueError`. The callers know which of stepfold's errors it
is, and what to do about it.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

_DEPTH = 100  # levels of JSON, within Python's limit of recursion
_DIGITS = 300  # of an integer, so that it can be converted to a float
_LARGEST = 1 << 30  # bytes of a file that is read at once


def read_file(path: Path) -> bytes:
    """Read a regular file; raise ValueError for a pipe, a device or a directory.

    To open the file makes NFS ask the server, rather than use cached attributes.
    """
    return read_with_time(path)[0]


def read_with_time(path: Path) -> tuple[bytes, float]:
    """Read a regular file, and return the time of its last modification too."""
    check_regular(path.stat())  # a socket or a device may not even be opened
    # Without O_NONBLOCK, opening a pipe that replaced the file since then waits for a writer.
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(file, "rb") as stream:
        status = os.fstat(file)
        check_regular(status)
        if status.st_size > _LARGEST:
            raise ValueError(f"{status.st_size:,} bytes, more than {_LARGEST:,}")
        return stream.read(), status.st_mtime


def check_regular(status: os.stat_result) -> None:
    """Refuse what may block or never end when it is read."""
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        raise ValueError(f"{kind} instead of a file")


def read_json(path: Path) -> Any:
    """Read a file of JSON; raise ValueError if it is damaged, OSError if it cannot be read."""
    return parse_json(read_file(path))


def parse_json(content: bytes) -> Any:
    """Parse JSON; raise ValueError for what is not JSON, too deep, or has too large a number."""
    text = content.decode()
    try:
        value = json.loads(text, parse_int=_parse_int)
    except RecursionError:
        raise ValueError(f"more than {_DEPTH} levels") from None
    if text.count("[") + text.count("{") > _DEPTH and _depth(value) > _DEPTH:
        raise ValueError(f"more than {_DEPTH} levels")
    if "\\ud" in text.lower():
        # A half of a surrogate pair cannot be encoded: it would be an error where it is written.
        text = json.dumps(value, ensure_ascii=False).encode(errors="replace").decode()
        value = json.loads(text)
    return value


def _parse_int(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _depth(value: Any) -> int:
    """Return how deeply lists and dicts are nested; not recursive, since that is limited."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, list | dict)]:
        depth += 1
        level = [x for item in level for x in (item.values() if isinstance(item, dict) else item)]
    return depth


def has_form(value: Any, form: Any) -> bool:
    """Whether JSON has a form.

    A form is a predicate, `str`, a dict of forms (a name with `?` may be missing or null; others
    may be there), `[form]` for a list of any length, or a tuple for a list of exactly these.
    """
    if isinstance(form, dict):
        return isinstance(value, dict) and all(
            (name.endswith("?") and value.get(name[:-1]) is None)
            or has_form(value.get(name.removesuffix("?")), inner)
            for name, inner in form.items()
        )
    if isinstance(form, list):
        return isinstance(value, list) and all(has_form(item, form[0]) for item in value)
    if isinstance(form, tuple):
        is_list = isinstance(value, list) and len(value) == len(form)
        return is_list and all(map(has_form, value, form))
    return isinstance(value, str) if form is str else bool(form(value))


def is_count(value: Any) -> bool:
    """Whether JSON is an integer that counts something."""
    return type(value) is int and 0 <= value < 1 << 63
