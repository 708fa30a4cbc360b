"""Read JSON that may be damaged: `run.json`, metrics, locks, capsules and notes.

No file blocks, and damage raises only `ValueError`. The callers turn it into one of stepfold's
errors, with what to do about it.
"""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

_DEPTH = 100  # levels of JSON, within Python's recursion limit
_TOO_LARGE = 10**300  # for an integer, which has to fit in a float
_LONG = re.compile(r"\d{300}")
_SURROGATE = re.compile(r"\\u[dD]")
_LARGEST = 1 << 30  # bytes of a file that is read at once


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read; raise ValueError for a directory, and for what may block or never end.

    Opening makes NFS ask the server, rather than use cached attributes.
    """
    _check_regular(path.stat())  # a socket cannot even be opened
    # Without O_NONBLOCK, opening a pipe that replaced the file since then waits for a writer.
    file = open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")  # noqa: SIM115
    try:
        _check_regular(os.fstat(file.fileno()))
    except ValueError:
        file.close()
        raise
    return file


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        raise ValueError(f"{kind} instead of a file")


def read_json(path: Path) -> Any:
    """Read a file of JSON; raise ValueError if it is damaged, OSError if it cannot be read."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _LARGEST:
            raise ValueError(f"{size:,} bytes, more than {_LARGEST:,}")
        return parse_json(file.read())


def parse_json(content: bytes) -> Any:
    """Parse JSON; raise ValueError for what is not JSON, too deep, or has too large a number.

    A lone surrogate, which cannot be encoded as UTF-8, becomes a question mark.
    """
    text = content.decode()
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"more than {_DEPTH} levels") from None
    if text.count("[") + text.count("{") > _DEPTH or _LONG.search(text):
        check_plain(value)
    if _SURROGATE.search(text):
        value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    return value


def check_plain(value: Any) -> None:
    """Raise ValueError if parsed JSON is too deep, or has too large an integer."""
    level, depth = [value], 0  # not recursive, since Python limits recursion
    while level:
        if depth > _DEPTH:
            raise ValueError(f"more than {_DEPTH} levels")
        if any(type(item) is int and abs(item) >= _TOO_LARGE for item in level):
            raise ValueError("an integer that is too large for a float")
        parents = [item for item in level if isinstance(item, list | dict)]
        level = [x for item in parents for x in (item.values() if isinstance(item, dict) else item)]
        depth += 1


def has_form(value: Any, form: Any) -> bool:
    """Whether parsed JSON has a form.

    A form is a predicate, `str`, a dict of forms, `[form]` for a list of any length, or a tuple of
    forms for a list of that length. In a dict, a name that ends with `?` may be missing or null,
    and other names are ignored.
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


def is_count(value: Any) -> TypeGuard[int]:
    """Whether JSON is an integer that counts something."""
    return type(value) is int and 0 <= value < 1 << 63


def is_range(value: Any) -> bool:
    """Whether JSON is a half-open range of counts that is not empty."""
    return has_form(value, (is_count, is_count)) and value[0] < value[1]
