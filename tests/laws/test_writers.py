"""Metric files are the same however often a run is killed and resumed."""

import contextlib
import csv
import json
import math
import os
import tempfile
from functools import partial
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from stepfold.writers.jsonl import RunWriter, jsonl, last_step, read_rows, write_csv

pytestmark = pytest.mark.not_optimized

names = st.sampled_from(["train/loss", "train/acc", "eval/loss", 'odd, "name"', "x"])
values = st.floats(allow_nan=False) | st.integers(-(2**70), 2**70)
# For each write: how far its step is from the one before, its numbers, and whether a flush follows.
scripts = st.lists(
    st.tuples(st.integers(0, 2), st.dictionaries(names, values, max_size=3), st.booleans()),
    max_size=12,
)
# For each attempt: how many bytes and calls it may use before it is killed, and how many steps
# before the killed one the next attempt resumes.
kills = st.lists(st.tuples(st.integers(0, 600), st.integers(0, 3)), max_size=4)


class Killed(BaseException):
    """Stands for SIGKILL; no writer catches it."""


@contextlib.contextmanager
def killed_after(budget):
    """Let the process write so many bytes and make so many calls; a write may stop at any byte."""
    left = budget

    def mortal(function, cost=lambda *_: 1):
        def call(*arguments, **options):
            nonlocal left
            left -= cost(*arguments)
            if left < 0:
                if function is write and cost(*arguments) + left > 0:
                    write(arguments[0], arguments[1][: cost(*arguments) + left])
                left = -1
                raise Killed
            return function(*arguments, **options)

        return call

    write = os.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", mortal(os.write, lambda _, data: len(data)))
        patch.setattr(os, "fsync", mortal(lambda file: None))  # a kill is no power cut
        for name in ("ftruncate", "replace", "unlink"):
            patch.setattr(os, name, mortal(getattr(os, name)))
        yield


def steps_of(script):
    step, writes = 0, []
    for distance, scalars, flush in script:
        step += distance
        writes.append((step, scalars, flush))
    return writes


def run(make, path, script, start=None, budget=math.inf):
    """Write what comes after a step; return the step that was being written at a kill, or None."""
    writer, step = make(path), -1
    try:
        with killed_after(budget):
            writer.resume(start or 0)
            for step, scalars, flush in script:
                if start is None or step > start:
                    writer.write_scalars(step, scalars)
                    if flush:
                        writer.flush()
            writer.close()
    except Killed:
        return step
    finally:
        if writer._file is not None:
            os.close(writer._file)  # as the system does for a killed process
    return None


def read(path):
    """Read a file as another program would: the values of each step, which is there once."""
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
    rows = {}
    for step, scalars, _ in script:
        if scalars:
            rows.setdefault(step, {}).update(scalars)
    return [
        (step, {name: float(value) for name, value in row.items()}) for step, row in rows.items()
    ]


@settings(max_examples=30)
@pytest.mark.parametrize("make", [partial(jsonl, csv=True), jsonl], ids=["csv", "jsonl"])
@given(scripts, kills)
def test_kills_leave_no_trace(make, script, kills):
    script = steps_of(script)
    with tempfile.TemporaryDirectory() as folder:
        uninterrupted, path = Path(folder, "uninterrupted"), Path(folder, "killed")
        run(make, uninterrupted, script)
        start = None
        for budget, behind in kills:
            reached = run(make, path, script, start, budget)
            if reached is None:
                break
            # A checkpoint is of a step whose rows were written before; there may be none.
            saved = reached - 1 - behind
            start = start if saved < 0 else max(saved, start or 0)
        run(make, path, script, start)
        assert path.read_bytes() == uninterrupted.read_bytes()
        assert read(path) == read_script(script)
        names = [name for name in sorted(os.listdir(folder)) if not name.endswith(".jsonl")]
        assert names == ["killed", "uninterrupted"]


@settings(max_examples=30)
@given(scripts, st.integers(0, 600))
def test_a_kill_loses_only_the_row_being_written(script, budget):
    script = steps_of(script)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        reached = run(jsonl, path, script, budget=budget)
        rows = list(read_rows(path))
        expected = read_script(script)
        if reached is not None:
            rows = [row for row in rows if row[0] < reached]
            expected = [row for row in expected if row[0] < reached]
        assert [(step, {n: float(x) for n, x in row.items()}) for step, row in rows] == expected


@settings(max_examples=30)
@pytest.mark.parametrize("make", [lambda path, csv: jsonl(path, csv=csv), RunWriter])
@given(scripts, st.integers(0, 600))
def test_a_killed_run_has_a_readable_csv(make, script, budget):
    script = steps_of(script)
    with tempfile.TemporaryDirectory() as folder:
        path, table = Path(folder, "metrics.jsonl"), Path(folder, "metrics.csv")
        run(lambda path: make(path, table), path, script, budget=budget)
        # A kill may come after the table was replaced at a flush, or at the end.
        ends = [i for i, (*_, is_flush) in enumerate(script, 1) if is_flush and make != RunWriter]
        if table.exists():
            assert read(table) in [read_script(script[:end]) for end in (*ends, len(script))]
        write_csv(path, table)
        if path.exists():
            assert [step for step, _ in read(table)] == [
                step for step, row in read_rows(path) if row
            ]
            assert last_step(path) == max((step for step, _ in read_rows(path)), default=None)
