"""The store: which steps there are, how they are removed, and how they rank by a metric."""

import errno
import fcntl
import json
import math
import os
import shutil
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf
from stepfold.checkpoint import claims
from stepfold.checkpoint.restore import rank_steps
from stepfold.checkpoint.store import DirectoryStore, complete_steps, open_store
from stepfold.errors import CheckpointError

from .folders import names


def test_steps_are_folders_called_by_a_number(tmp_path):
    for name in ("0", "12", "3", "07", "7.damaged", "-1", "1_0", "best", "٣", "²"):
        (tmp_path / name).mkdir()
    (tmp_path / "5").write_text("a file")
    assert open_store(tmp_path).steps() == [0, 3, 12]
    assert open_store(tmp_path / "none").steps() == []


def test_a_step_is_deleted_whatever_lies_in_the_way(tmp_path):
    for name in ("7", "7.deleted", "7.deleted-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    open_store(tmp_path).delete(7)
    assert names(tmp_path) == ["7.deleted", "7.deleted-2"]


def test_a_step_that_another_run_has_deleted_is_gone(tmp_path):
    open_store(tmp_path).delete(7)
    assert names(tmp_path) == []


def test_a_damaged_step_keeps_its_files_under_another_name(tmp_path):
    kept = []
    for text in ("a", "b", "c"):
        (tmp_path / "7").mkdir()
        (tmp_path / "7" / "file").write_text(text)
        kept.append(open_store(tmp_path).set_aside(7))
    assert kept == ["7.damaged", "7.damaged-2", "7.damaged-3"]
    assert [(tmp_path / name / "file").read_text() for name in kept] == ["a", "b", "c"]
    assert open_store(tmp_path).steps() == []
    assert open_store(tmp_path).set_aside(7) is None


def test_only_what_was_left_over_is_cleaned_up(tmp_path):
    left_over = ("7.deleted", "7.deleted-2", "8.saving", "8.orbax-checkpoint-tmp-17")
    (tmp_path / f"8.saving-{0:016x}").write_text("a claim")
    others = ("7", "07", "7.damaged", "best", "notes.deleted", "a7.deleted")
    for name in (*left_over, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "notes.txt").write_text("mine")
    files = ("notes.txt", "9.deleted", "8.saving-mine")
    for name in files[1:]:
        (tmp_path / name).write_text("mine")
    open_store(tmp_path).clean()
    assert names(tmp_path) == sorted([*others, *files])


def test_names_of_others_and_targets_of_links_are_never_cleaned_up(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("mine")
    (tmp_path / "12.deleted (backup of bob)").mkdir()
    (tmp_path / "13.deleted").symlink_to(tmp_path / "elsewhere")
    open_store(tmp_path).clean()
    assert names(tmp_path) == ["12.deleted (backup of bob)", "elsewhere"]
    assert names(tmp_path / "elsewhere") == ["file"]


@pytest.fixture
def no_exclusive_locks(monkeypatch):
    """Refuse exclusive locks of a directory, as NFS does."""
    flock = fcntl.flock

    def refuse(file, kind):
        if kind & fcntl.LOCK_EX:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, kind)

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_without_locks_only_old_leftovers_are_cleaned_up(tmp_path, no_exclusive_locks):
    for name in ("7.orbax-checkpoint-tmp", "8.saving", "9.deleted"):
        (tmp_path / name).mkdir()
    long_ago = time.time() - 2 * 24 * 3600
    os.utime(tmp_path / "8.saving", (long_ago, long_ago))
    open_store(tmp_path).clean()
    assert names(tmp_path) == ["7.orbax-checkpoint-tmp", "9.deleted"]


# A step that another process began to save, on a file system without locks


def leave_save(folder, age=0.0, **claim):
    """Leave what a killed process had of step 3, with its claim."""
    (folder / "3.orbax-checkpoint-tmp/state").mkdir(parents=True)
    claim = {"machine": claims._machine(), "host": "there", "since": "then"} | claim
    path = folder / f"3.saving-{0:016x}"
    path.write_text(json.dumps(claim))
    os.utime(path, (time.time() - age,) * 2)
    return path


@pytest.mark.parametrize("left", ["claim of a dead process", "old claim of a host", "folder"])
def test_a_killed_save_does_not_block_the_next(tmp_path, no_exclusive_locks, left):
    if left == "claim of a dead process":
        leave_save(tmp_path, pid=2**22 + 1)
    elif left == "old claim of a host":
        leave_save(tmp_path, machine="other", age=70)
    else:
        (tmp_path / "3.saving").mkdir()  # of an earlier stepfold
    with sf.Checkpoints(tmp_path) as series:
        series.save({"w": np.ones(3)}, step=3)
    assert sf.checkpoint.verify(tmp_path) == {3: []}
    assert set(names(tmp_path)) - {"3.saving"} == {"3"}


def test_a_save_that_another_host_may_be_writing_is_watched(
    tmp_path, no_exclusive_locks, monkeypatch
):
    monkeypatch.setattr(claims, "_STALE", 0.6)
    path = leave_save(tmp_path, machine="other", pid=7)
    ends = threading.Event()

    def beat():
        while not ends.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(CheckpointError, match="another run is saving it, process 7 on there since"):
        sf.save(tmp_path, {"w": np.ones(3)}, step=3)
    assert (tmp_path / "3.orbax-checkpoint-tmp").is_dir()
    ends.set()
    thread.join()
    sf.save(tmp_path, {"w": np.ones(3)}, step=3)
    assert names(tmp_path) == ["3"]


def test_a_refused_save_leaves_the_save_of_another_run(tmp_path, no_exclusive_locks):
    state = {"w": jnp.ones(3)}
    first, second = (sf.Checkpoints(tmp_path).open() for _ in range(2))
    may_commit = threading.Event()
    first.save(state, step=3, before_commit=lambda: may_commit.wait(60))
    with pytest.raises(CheckpointError, match="3: not saved: another run is saving it, process"):
        second.save(state, step=3)
    sf.Checkpoints(tmp_path).open().close()
    may_commit.set()
    first.close()
    second.close()
    assert sf.checkpoint.verify(tmp_path) == {3: []}
    assert names(tmp_path) == ["3"]


def test_errors_of_the_system_are_errors_of_checkpoints(tmp_path, monkeypatch):
    save(tmp_path, 1)
    store = open_store(tmp_path)
    with pytest.raises(CheckpointError, match="2: cannot be read: No such file"):
        store.saved_at(2)

    def fail(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(shutil, "rmtree", fail)
    with pytest.raises(CheckpointError, match="1: cannot be deleted: Input/output error"):
        store.delete(1)


def metrics_in(store):
    return {step: metadata.metrics or {} for step, metadata in complete_steps(store).items()}


def save(folder, step, metrics=None, **options):
    with sf.Checkpoints(folder, keep=None, **options) as series:
        series.save({"w": jnp.ones(2)}, step=step, metrics=metrics)


def test_a_step_that_goes_meanwhile_is_not_read(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(DirectoryStore, "steps", lambda store: [1, 2])
    assert metrics_in(open_store(tmp_path)) == {1: {}}
    assert rank_steps(open_store(tmp_path), "loss") == [2]


def test_the_newest_tells_which_metric_is_best(tmp_path):
    assert rank_steps(open_store(tmp_path), None) == []
    save(tmp_path, 1, {"loss": 2.0, "bleu": 5.0}, best="bleu")
    save(tmp_path, 2, {"loss": 1.0, "bleu": 4.0}, best="loss")
    assert rank_steps(open_store(tmp_path), None) == [2, 1]
    assert (
        rank_steps(open_store(tmp_path), "bleu")
        == rank_steps(open_store(tmp_path), ("loss", "max"))
        == [1, 2]
    )


def test_without_a_metric_none_is_best(tmp_path):
    save(tmp_path, 1, {"loss": 2.0})
    with pytest.raises(
        CheckpointError, match="expected a metric that ranks the steps, got none, and none wa"
    ):
        rank_steps(open_store(tmp_path), None)
    save(tmp_path, 2, {"bleu": math.nan})
    words = (
        "expected a step with a finite number as the metric 'bleu', got none; save with metrics="
    )
    with pytest.raises(CheckpointError, match=words):
        rank_steps(open_store(tmp_path), "bleu")


def test_a_file_whose_size_cannot_be_read_is_an_error_of_checkpoints(tmp_path, monkeypatch):
    sf.save(tmp_path, {"w": jnp.ones(2)}, step=1)
    status = Path.stat

    def fail(path, **options):
        if path.name == "_METADATA":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return status(path, **options)

    monkeypatch.setattr(Path, "stat", fail)
    with pytest.raises(CheckpointError, match="_METADATA: cannot be read: Input/output error"):
        open_store(tmp_path).read_metadata(1)
