"""Step directories: names, locks, cleanup, durability and retention."""

import errno
import math
import os
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepfold as sf
from stepfold.checkpoint import steps
from stepfold.checkpoint import steps as module
from stepfold.checkpoint.manifest import read_checked
from stepfold.checkpoint.policy import Policy, expendable_steps
from stepfold.checkpoint.steps import (
    check_shared,
    order_by,
    split_location,
    sync,
)
from stepfold.checkpoint.store import DirectoryStore
from stepfold.errors import CheckpointError


def test_a_directory_is_read_and_made_where_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert steps.read_directory("a/b") == tmp_path / "a" / "b"
    assert not (tmp_path / "a").exists()
    assert steps.read_directory(Path("a/b"), make=True).is_dir()
    assert steps.read_directory("a/b", make=True).is_dir()


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(CheckpointError, match="a: expected a directory, got a file; give another"):
        steps.read_directory(tmp_path / "a")
    words = (
        r"b: expected a directory to save in, got one that cannot be made: Not a directory; change "
    )
    with pytest.raises(CheckpointError, match=words):
        steps.read_directory(tmp_path / "a" / "b", make=True)


def test_a_directory_that_may_not_be_read_is_told(tmp_path, monkeypatch):
    def fail(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", fail)
    words = "cannot be read: Permission denied; change the permission"
    with pytest.raises(CheckpointError, match=words), steps.locked(tmp_path):
        pass


def test_a_lock_that_a_forked_process_has_inherited_is_let_go(tmp_path, monkeypatch):
    opened, real = [], os.open
    monkeypatch.setattr(os, "open", lambda *args: opened.append(real(*args)) or opened[-1])
    with steps.locked(tmp_path):
        inherited = os.dup(opened[0])
        with steps.locked(tmp_path, alone=True) as held:
            assert held is False
    with steps.locked(tmp_path, alone=True) as held:
        assert held is True
    os.close(inherited)


@pytest.fixture
def synced(monkeypatch):
    """Note which files and folders were forced onto the disk."""
    found, fsync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (fsync(file), found.add(os.fstat(file).st_ino)))
    return found


def numbers_of(*paths):
    return {path.stat().st_ino for path in paths}


def test_a_step_is_on_the_disk_before_an_older_one_goes(tmp_path, synced, monkeypatch):
    delete, gone = DirectoryStore.delete, []

    def look(store, step):
        state = tmp_path / "2" / "state"
        files = [state / name for name in ("files.json", *read_checked(state / "files.json"))]
        folders = [tmp_path, tmp_path / "2", state, *(path.parent for path in files)]
        assert numbers_of(*files, *folders) <= synced
        gone.append(step)
        delete(store, step)

    monkeypatch.setattr(DirectoryStore, "delete", look)
    with sf.Checkpoints(tmp_path, keep=1) as series:
        for step in (1, 2):
            series.save({"w": np.ones(3)}, step=step)
            series.wait()
            synced.clear()
    assert gone == [1]


def test_what_is_added_is_on_the_disk_before_it_takes_its_place(tmp_path, synced, monkeypatch):
    state, replace = tmp_path / "1" / "state", os.replace

    def look(new, old):
        assert numbers_of(new) <= synced
        replace(new, old)

    with sf.Checkpoints(tmp_path) as series:
        series.save({"w": np.ones(3)}, step=1)
        series.wait()
        synced.clear()
        monkeypatch.setattr(os, "replace", look)
        series.add_later(1, metrics={"loss": 1.0}, extra=None)
    assert numbers_of(state, state / "later.json") <= synced


def failing(monkeypatch, number):
    def fail(file):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_tell_is_not_in_the_way(tmp_path, monkeypatch, number):
    failing(monkeypatch, number)
    sync(tmp_path)


def test_a_disk_that_fails_is_told(tmp_path, monkeypatch):
    failing(monkeypatch, errno.EIO)
    with pytest.raises(
        sf.errors.CheckpointError, match="1: not saved: OSError: .*Input/output error"
    ):
        sf.save(tmp_path, {"w": np.ones(3)}, step=1)
    assert sf.checkpoint.verify(tmp_path) == {}


NUMBERS = st.floats() | st.none()
SERIES = st.dictionaries(st.integers(0, 40), st.dictionaries(st.just("loss"), NUMBERS), max_size=9)


def test_equals_are_as_old_as_they_are():
    metrics = {3: {"a": 1.0}, 1: {"a": 2.0}, 2: {"a": 2.0}, 4: {"a": 1.0}}
    assert order_by(("a", "max"), metrics) == [1, 2, 3, 4]
    assert order_by(("a", "min"), metrics) == [3, 4, 1, 2]


def test_what_is_no_finite_number_is_never_best():
    values = [math.nan, math.inf, -math.inf, None, "1", True, 5.0]
    metrics = {step: {"a": value} for step, value in enumerate(values)} | {9: {}}
    assert order_by(("a", "max"), metrics) == order_by(("a", "min"), metrics) == [6]


@given(SERIES, st.integers(1, 4), st.none() | st.integers(1, 5), st.booleans(), st.integers(1, 3))
def test_the_last_the_nth_and_the_best_are_kept(metrics, keep, keep_every, by_best, keep_best):
    ranking = {"best": "loss", "keep_best": keep_best} if by_best else {}
    gone = expendable_steps(Policy(keep=keep, keep_every=keep_every, **ranking), metrics)
    kept = set(metrics) - set(gone)
    last = sorted(metrics)[-keep:]
    finite = {
        step: m["loss"] for step, m in metrics.items() if math.isfinite(m.get("loss") or math.nan)
    } | {step: 0.0 for step, m in metrics.items() if m.get("loss") == 0}
    firsts = sorted(finite, key=lambda step: (finite[step], step))[:keep_best] if by_best else []
    nth = [step for step in metrics if keep_every and step % keep_every == 0]
    assert gone == sorted(gone)
    assert kept == {*last, *firsts, *nth}


def test_all_are_kept_if_asked():
    assert expendable_steps(Policy(keep=None), {1: {}, 2: {}}) == []


@pytest.mark.parametrize(
    ("location", "series", "step"),
    [
        ("/runs/a/12", "/runs/a", 12),
        ("s3://bucket/a/12", "s3://bucket/a", 12),
        ("s3://bucket/12/?endpoint=http://host:1/x", "s3://bucket?endpoint=http://host:1/x", 12),
        ("s3://12", "s3:/", None),
        ("/12", "", None),
        ("/runs/a", "/runs", None),
    ],
)
def test_the_location_of_a_step_is_split_into_series_and_number(location, series, step):
    assert split_location(location) == (series, step)


@pytest.mark.parametrize("late", [0, 2])
def test_a_file_of_process_0_may_show_late_on_another_host(tmp_path, monkeypatch, late):
    looks = []

    class Directory(type(tmp_path)):
        def exists(self):
            looks.append(self)
            return len(looks) > late

    class Answers:
        def __init__(self, name):
            pass

        def gather(self, answer, *args, **options):
            return [answer, answer]

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(module, "broadcast_from_first", lambda numbers: numbers)
    monkeypatch.setattr(module, "KeyValues", Answers)
    monkeypatch.setattr(module, "agreement", lambda *_: __import__("contextlib").nullcontext())
    began = time.monotonic()
    check_shared(Directory(tmp_path))
    assert len(looks) == late + 1
    assert time.monotonic() - began < 2
