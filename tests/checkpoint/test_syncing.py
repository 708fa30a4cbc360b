"""What is said to be saved outlasts a loss of power: it is on the disk, and so is its name."""

import errno
import os

import numpy as np
import pytest

import stepfold as sf
from stepfold.checkpoint import steps
from stepfold.checkpoint.sealed import unseal
from stepfold.checkpoint.syncing import sync


@pytest.fixture
def synced(monkeypatch):
    """Note which files and folders were forced onto the disk."""
    found, fsync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (fsync(file), found.add(os.fstat(file).st_ino)))
    return found


def numbers_of(*paths):
    return {path.stat().st_ino for path in paths}


def test_a_step_is_on_the_disk_before_an_older_one_goes(tmp_path, synced, monkeypatch):
    delete, gone = steps.delete, []

    def look(directory, step):
        state = tmp_path / "2" / "state"
        files = [state / name for name in ("files.json", *unseal(state / "files.json"))]
        folders = [tmp_path, tmp_path / "2", state, *(path.parent for path in files)]
        assert numbers_of(*files, *folders) <= synced
        gone.append(step)
        delete(directory, step)

    monkeypatch.setattr(steps, "delete", look)
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
    with pytest.raises(sf.CheckpointError, match="1: not saved: OSError: .*Input/output error"):
        sf.save(tmp_path, {"w": np.ones(3)}, step=1)
    assert sf.verify(tmp_path) == {}
