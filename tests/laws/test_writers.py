"""However often a run is killed and gone on with, its files are those of a run that never was."""

import contextlib
import csv
import json
import os
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import stepfold as sf

names = st.sampled_from(["train/loss", "train/acc", "eval/loss", 'odd, "name"', "x"])
values = st.floats(allow_nan=False) | st.integers(-(2**70), 2**70)
scripts = st.lists(
    st.tuples(st.integers(0, 2), st.dictionaries(names, values, max_size=3)), max_size=12
)
# How many bytes and calls each attempt is granted, and how far behind the last step the next one
# goes on.
kills = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3)), max_size=4)


class Killed(BaseException):
    """What no writer catches, as it could catch no SIGKILL."""


@contextlib.contextmanager
def killed_after(granted):
    """Let the system do so much, and then nothing more: a write may be torn at any byte."""
    left = granted

    def mortal(function, cost=lambda *_: 1):
        def call(*arguments, **options):
            nonlocal left
            left -= cost(*arguments)
            if left < 0:
                if function is write and cost(*arguments) + left > 0:
                    write(arguments[0], arguments[1][: cost(*arguments) + left])
                raise Killed
            return function(*arguments, **options)

        return call

    write = os.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", mortal(os.write, lambda _, data: len(data)))
        for name in ("ftruncate", "replace", "fsync"):
            patch.setattr(os, name, mortal(getattr(os, name)))
        yield


def steps_of(script):
    step, found = 0, []
    for further, scalars in script:
        step += further
        found.append((step, scalars))
    return found


def run(make, path, script, start=None, granted=None):
    """Write what comes after a step; give the step that was being written when it was killed."""
    writer, step = make(path), -1
    try:
        with contextlib.nullcontext() if granted is None else killed_after(granted):
            writer.resume(start or 0)
            for step, scalars in script:
                if start is None or step > start:
                    writer.write_scalars(step, scalars)
    except Killed:
        return step
    finally:
        if writer._opened is not None:
            os.close(writer._opened._file)  # as the system does for a process that is killed
    return None


def read(path):
    """Read a file as anyone would: the names and texts of values, of every step once."""
    with path.open(newline="") as file:
        if path.read_bytes().startswith(b"{"):
            rows = [json.loads(line, parse_float=str, parse_int=str) for line in file]
        else:
            rows = list(csv.DictReader(file, strict=True))
    steps = [int(row.pop("step")) for row in rows]
    assert steps == sorted(set(steps))
    return [
        (step, {name: float(value) for name, value in row.items() if value != ""})
        for step, row in zip(steps, rows, strict=True)
    ]


def read_script(script):
    found = {}
    for step, scalars in script:
        if scalars:
            found.setdefault(step, {}).update(scalars)
    return [
        (step, {name: float(value) for name, value in row.items()}) for step, row in found.items()
    ]


@settings(max_examples=200)
@pytest.mark.parametrize("make", [sf.csv_writer, sf.jsonl_writer], ids=["csv", "jsonl"])
@given(scripts, kills)
def test_kills_leave_no_trace(make, script, kills):
    script = steps_of(script)
    with tempfile.TemporaryDirectory() as folder:
        whole, path = Path(folder, "whole"), Path(folder, "killed")
        run(make, whole, script)
        start = None
        for granted, behind in kills:
            reached = run(make, path, script, start, granted)
            if reached is None:
                break
            # A checkpoint holds a step that was done with when it was saved; there may be none.
            saved = reached - 1 - behind
            start = start if saved < 0 else max(saved, start or 0)
        run(make, path, script, start)
        assert path.read_bytes() == whole.read_bytes()
        assert read(path) == read_script(script)
