import os
from pathlib import Path

import jax.numpy as jnp
import pytest

import stepfold as sf
from stepfold.checkpoint import steps
from stepfold.errors import CheckpointError, ConfigError


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_directory_is_read_and_made_where_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert steps.read_directory("a/b") == tmp_path / "a" / "b"
    assert not (tmp_path / "a").exists()
    assert steps.read_directory(Path("a/b"), make=True).is_dir()
    assert steps.read_directory("a/b", make=True).is_dir()


@pytest.mark.parametrize("directory", [None, 3, "", b"a"])
def test_what_is_no_path_is_refused(directory):
    with pytest.raises(ConfigError, match=f"directory: expected a path, got {directory!r}"):
        steps.read_directory(directory)


def test_a_bucket_is_refused():
    words = "directory: expected a path on a file system, got 'gs://a/b'; mount the bucket"
    with pytest.raises(ConfigError, match=words):
        steps.read_directory("gs://a/b")


def test_a_backslash_is_refused(tmp_path):
    words = r"directory: expected a path without a backslash, .* got '.*a.*b'; rename it"
    with pytest.raises(ConfigError, match=words):
        steps.read_directory(tmp_path / "a\\b")


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(CheckpointError, match="a: expected a directory, got a file; give another"):
        steps.read_directory(tmp_path / "a")
    words = r"b: expected a directory to save in, but it cannot be made: Not a directory; change "
    with pytest.raises(CheckpointError, match=words):
        steps.read_directory(tmp_path / "a" / "b", make=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_made_is_told(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="cannot be made: Permission denied; change the perm"):
        steps.read_directory(tmp_path / "a", make=True)


def test_steps_are_folders_called_by_a_number(tmp_path):
    for name in ("0", "12", "3", "07", "7.damaged", "-1", "1_0", "best", "٣", "²"):
        (tmp_path / name).mkdir()
    (tmp_path / "5").write_text("a file")
    assert steps.steps_in(tmp_path) == [0, 3, 12]
    assert steps.steps_in(tmp_path / "none") == []


def test_only_steps_with_every_file_are_whole(tmp_path):
    for step in (1, 2, 10):
        sf.save(tmp_path, {"w": jnp.ones(2)}, step=step)
    (tmp_path / "2" / "state" / "_METADATA").write_text("cut")
    assert steps.whole_steps(tmp_path) == [1, 10]
    assert not steps.is_whole(tmp_path / "2")


def test_a_step_is_deleted_whatever_lies_in_the_way(tmp_path):
    for name in ("7", "7.deleted", "7.deleted-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    steps.delete(tmp_path, 7)
    assert names(tmp_path) == ["7.deleted", "7.deleted-2"]


def test_a_step_that_another_run_has_deleted_is_gone(tmp_path):
    steps.delete(tmp_path, 7)
    assert names(tmp_path) == []


def test_a_damaged_step_keeps_its_files_under_another_name(tmp_path):
    kept = []
    for text in ("a", "b", "c"):
        (tmp_path / "7").mkdir()
        (tmp_path / "7" / "file").write_text(text)
        kept.append(steps.set_aside(tmp_path, 7))
    assert [path.name for path in kept] == ["7.damaged", "7.damaged-2", "7.damaged-3"]
    assert [(path / "file").read_text() for path in kept] == ["a", "b", "c"]
    assert steps.steps_in(tmp_path) == []
    assert steps.set_aside(tmp_path, 7) is None


def test_only_what_was_left_over_is_cleaned_up(tmp_path):
    left_over = ("7.deleted", "7.deleted-2", "8.saving", "8.orbax-checkpoint-tmp-17")
    others = ("7", "07", "7.damaged", "best", "notes.deleted", "a7.deleted")
    for name in (*left_over, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "9.deleted").write_text("a file of mine")
    steps.clean(tmp_path)
    assert names(tmp_path) == sorted([*others, "notes.txt", "9.deleted"])


def test_a_directory_that_may_not_be_read_is_told(tmp_path, monkeypatch):
    def fail(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied; change the perm"):
        steps.Lock(tmp_path)


def test_a_lock_that_a_forked_process_has_inherited_is_let_go(tmp_path):
    lock = steps.Lock(tmp_path)
    inherited = os.dup(lock._file)
    held = []
    for let_go in (lambda: None, lock.release):
        let_go()
        alone = steps.Lock(tmp_path, alone=True)
        held.append(alone.held)
        alone.release()
    os.close(inherited)
    assert held == [False, True]
