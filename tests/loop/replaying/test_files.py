import os
import shutil

import jax
import numpy as np
import pytest

import stepfold as sf
from stepfold.checkpoint.sealed import DamageError
from stepfold.loop.replaying import files
from stepfold.loop.replaying.capsule import Capsule, Reference
from stepfold.loop.replaying.files import read_capsule, write_capsule, write_or_warn
from stepfold.loop.replaying.rereading import Mark


def capsule(run_dir, **changes):
    given = {
        "step": 120,
        "metric": "train/loss",
        "metrics": {"train/loss": float("nan"), "train/accuracy": 0.1},
        "key": jax.random.key(3),
        "batch": {"x": np.arange(6, dtype=np.int64), "y": [np.ones(2, np.float16), None]},
        "lost": (),
        "checkpoint": Reference(run_dir / "checkpoints", 100),
        "mark": Mark(100, {"step": 100, "stream": b"\x00\xff"}),
        "began": 0,
    }
    return Capsule(**{**given, **changes})


def test_what_is_written_is_read(tmp_path):
    path = write_capsule(capsule(tmp_path), tmp_path)
    assert path == tmp_path / "capsules" / "120"
    read, wanted = read_capsule(path), capsule(tmp_path)
    same = ("step", "metric", "lost", "checkpoint", "mark", "began")
    assert [getattr(read, name) for name in same] == [getattr(wanted, name) for name in same]
    assert repr(read.metrics) == repr(wanted.metrics)
    assert (jax.random.key_data(read.key) == jax.random.key_data(wanted.key)).all()
    assert jax.tree.map(lambda x: (x.dtype, x.tolist()), read.batch) == jax.tree.map(
        lambda x: (x.dtype, x.tolist()), wanted.batch
    )
    assert (read.path, read.like, read.batches) == (path, None, None)


def test_a_run_may_be_moved_with_its_checkpoints(tmp_path):
    write_capsule(capsule(tmp_path / "a"), tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    read = read_capsule(str(tmp_path / "b" / "capsules" / "120"))
    assert read.checkpoint.directory == tmp_path / "b" / "checkpoints"


def test_checkpoints_elsewhere_are_named_wholly(tmp_path):
    elsewhere = Reference(tmp_path / "far", 100)
    path = write_capsule(capsule(tmp_path, checkpoint=elsewhere), tmp_path / "run")
    assert read_capsule(path).checkpoint == elsewhere


def test_what_is_not_known_is_none(tmp_path):
    path = write_capsule(capsule(tmp_path, key=None, checkpoint=None, batch=None), tmp_path)
    read = read_capsule(path)
    assert (read.key, read.checkpoint, read.batch) == (None, None, None)


def test_one_of_the_same_step_is_replaced(tmp_path):
    write_capsule(capsule(tmp_path), tmp_path)
    path = write_capsule(capsule(tmp_path, metric="train/other"), tmp_path)
    assert read_capsule(path).metric == "train/other"
    assert os.listdir(tmp_path / "capsules") == ["120"]


def test_a_position_that_json_cannot_hold_is_said(tmp_path):
    path = write_capsule(capsule(tmp_path, mark=Mark(100, {"at": object()})), tmp_path)
    read = read_capsule(path)
    assert read.mark == (100, None)
    assert read.notes[0].startswith("the position in the data: position/at: expected what JSON")
    assert read.lost == ()


def test_of_a_full_disk_there_is_a_warning_and_the_capsule(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    words = "the capsule of step 120 cannot be written, and is only on the result: No space left"
    with pytest.warns(RuntimeWarning, match=words):
        kept = write_or_warn(capsule(tmp_path), tmp_path)
    assert (kept.step, kept.path) == (120, None)
    assert os.listdir(tmp_path / "capsules") == []


def test_a_file_in_the_way_is_no_reason_to_lose_the_result(tmp_path):
    (tmp_path / "capsules").write_text("")
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        assert write_or_warn(capsule(tmp_path), tmp_path).path is None


@pytest.mark.parametrize("path", [None, 3])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(sf.ConfigError, match=f"expected a Capsule or the path of one, got {path}"):
        read_capsule(path)


def test_a_folder_without_one_is_refused(tmp_path):
    with pytest.raises(sf.CheckpointError, match=r"expected the folder of a capsule.* got none"):
        read_capsule(tmp_path)


@pytest.mark.parametrize("name", ["capsule.json", "batch.npz"])
def test_a_flipped_bit_is_noticed(tmp_path, name):
    file = write_capsule(capsule(tmp_path), tmp_path) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamageError, match=f"{name}: its checksum"):
        read_capsule(file.parent)


def test_a_missing_batch_is_noticed(tmp_path):
    path = write_capsule(capsule(tmp_path), tmp_path)
    (path / "batch.npz").unlink()
    with pytest.raises(DamageError, match=r"batch.npz: missing; the capsule was copied in part"):
        read_capsule(path)


def test_one_of_a_later_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_VERSION", 2)
    path = write_capsule(capsule(tmp_path), tmp_path)
    monkeypatch.undo()
    with pytest.raises(sf.CheckpointError, match="expected a capsule of version 1, got 2"):
        read_capsule(path)


def test_a_copy_elsewhere_is_read(tmp_path):
    path = write_capsule(capsule(tmp_path, checkpoint=None), tmp_path)
    shutil.copytree(path, tmp_path / "copy")
    assert read_capsule(tmp_path / "copy").step == 120
