"""The command line lists, shows, verifies and compares steps, and its exit code tells of damage."""

import os
import runpy
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf
from stepfold.checkpoint.__main__ import main
from stepfold.checkpoint.store import DirectoryStore

from .folders import damage


def state(value):
    return {
        "w": np.random.default_rng(value).normal(size=4096).astype(np.float32),
        "same": jnp.zeros((2, 0)),
        "key": jax.random.key(value),
        "wide": np.array([3.0, 4.0 + value]),
        "on": np.array([value == 1]),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    with sf.Checkpoints(path, best="loss") as series:
        for step, loss in {1: 0.25, 2: 0.5}.items():
            extra = {"lr": 0.1}
            series.save(state(step), step=step, metrics={"loss": loss}, data={"at": 7}, extra=extra)
    return path


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path, dirs_exist_ok=True)


@pytest.fixture
def says(capsys):
    """Run the command; give its code, and what it says in words."""

    def run(*arguments):
        code = main([*map(str, arguments)])
        told = capsys.readouterr()
        return code, [line.split() for line in (told.out + told.err).splitlines()]

    return run


def sentence(lines):
    return " ".join(word for line in lines for word in line)


def test_steps_are_listed(folder, says):
    (folder / "2" / "state" / "_METADATA").unlink()
    (folder / "7.damaged").mkdir()
    (folder / "mine").mkdir()
    code, lines = says("ls", folder)
    assert code == 0
    assert lines[0] == ["step", "saved", "bytes", "leaves", "metrics"]
    assert lines[2][0] == "1"
    assert lines[2][-3:] == ["5", "loss", "0.25"]
    assert lines[3][0] == "2"
    assert "_METADATA: expected" in " ".join(lines[3])
    told = [" ".join(line) for line in lines[4:] if line]
    assert told == ["best by loss (min): 1", "set aside or left over: 7.damaged"]


def test_the_newest_is_shown_or_the_one_asked_for(folder, says):
    for arguments, step in (((), 2), ((1,), 1)):
        code, lines = says("show", folder, *arguments)
        assert code == 0
        assert lines[0][:2] == ["step", f"{step},"]
        told = "\n".join(" ".join(line) for line in lines)
        assert f'"loss": {0.25 * step}' in told
        assert '"at": 7' in told
        assert '"lr": 0.1' in told
        assert "key key<threefry2x32>[] 8 B 1" in told
        assert "same float32[2,0] 0 B" in told
        assert lines[-1][:2] == ["5", "leaves,"]


def test_damage_is_told_by_the_code_too(folder, says):
    assert says("verify", folder) == (0, [["1:", "good"], ["2:", "good"]])
    damage(folder, 2, state(2)["w"])
    code, lines = says("verify", folder)
    assert code == 1
    assert lines[:2] == [["1:", "good"], ["2:", "damaged"]]
    assert " ".join(lines[2]) == "w[0:4096]: the values are not those that were saved"


def test_the_folder_of_temporary_steps_is_listed_and_verified(tmp_path, says):
    temporary = sf.Temporary(tmp_path / "local", every=1, keep=2)
    with sf.Checkpoints(tmp_path / "durable", every=10, temporary=temporary) as series:
        for step in (1, 2):
            assert series.due(step)
            series.save(state(step), step=step, metrics={"loss": 0.5})
    (folder,) = (tmp_path / "local").iterdir()
    assert says("verify", folder) == (0, [["1:", "good"], ["2:", "good"]])
    (file,) = folder.glob("2-*.slices")
    os.truncate(file, file.stat().st_size - 1)
    file.with_name(f"{file.name}.part").touch()
    code, lines = says("ls", folder)
    assert code == 0
    assert [line[0] for line in lines[2:4]] == ["1", "2"]
    assert lines[2][-3:] == ["5", "loss", "0.5"]
    assert sentence(lines[3:4]).endswith(f"{file.name}: it is damaged or not complete")
    assert sentence(lines[4:]) == f"set aside or left over: {file.name}.part"
    code, lines = says("verify", folder)
    assert (code, lines[:2]) == (1, [["1:", "good"], ["2:", "damaged"]])


def test_two_steps_are_compared_leaf_by_leaf(folder, says):
    code, lines = says("diff", folder, 1, 2)
    rows = {line[0]: line[1:] for line in lines[2:-1]}
    assert code == 0
    assert rows["key"] == ["key<threefry2x32>[]", "other", "bits"]
    assert rows["on"] == ["bool[1]", "other", "bits"]
    change = float(np.max(np.abs(np.subtract(state(2)["w"], state(1)["w"], dtype=np.float64))))
    assert rows["w"][:2] == ["float32[4096]", f"{change:.3g}"]
    assert rows["wide"] == ["float64[2]", "1", f"{1 / np.sqrt(34):.3g}"]
    assert " ".join(lines[-1]) == "4 of 5 leaves differ, 1 have the same bits"
    _, lines = says("diff", folder, 1, 1)
    assert " ".join(lines[-1]) == "0 of 5 leaves differ, 5 have the same bits"


def test_leaves_that_only_one_has_are_told(folder, says):
    sf.save(folder, {"w": jnp.ones(3), "new": jnp.ones(())}, step=3)
    _, lines = says("diff", folder, 2, 3)
    told = [" ".join(line) for line in lines]
    assert "w float32[4096] to float32[3]" in told
    assert "new nothing to float32[]" in told
    assert "on bool[1] to nothing" in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ls", "none"), "expected a checkpoint to restore, got none; look at the path"),
        (("show", ".", 7), "expected step 7 to restore, got steps 1, 2; look at the path"),
        (("diff", ".", 1, 3), "expected step 3 to restore, got steps 1, 2; look at the path"),
        (("verify", "hdfs://a"), "expected a URL such as 's3://bucket/run', got 'hdfs://a'"),
    ],
)
def test_a_wrong_question_is_answered_in_words(folder, says, monkeypatch, arguments, words):
    monkeypatch.chdir(folder)
    code, lines = says(*arguments)
    assert code == 2
    assert words in sentence(lines)


def test_without_a_whole_step_nothing_is_shown(folder, says):
    for step in (1, 2):
        (folder / str(step) / "state" / "_METADATA").unlink()
    code, lines = says("show", folder)
    assert code == 1
    assert "no step is complete; there are 1, 2" in sentence(lines)
    code, lines = says("show", folder, 2)
    assert code == 1
    assert "2: damaged: _METADATA: expected" in sentence(lines)


def test_it_is_a_command(folder, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "stepfold.checkpoint.__main__")
    monkeypatch.setattr(sys, "argv", ["checkpoint", "verify", str(folder)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("stepfold.checkpoint", run_name="__main__")
    assert (ended.value.code, capsys.readouterr().out) == (0, "1: good\n2: good\n")


def test_numbers_that_are_none_are_compared_without_a_warning(tmp_path, says):
    sf.save(tmp_path, {"w": np.array([np.inf, np.nan, 1.0])}, step=1)
    sf.save(tmp_path, {"w": np.array([np.inf, np.nan, 3.0])}, step=2)
    code, lines = says("diff", tmp_path, 1, 2)
    assert code == 0
    assert lines[2][0] == "w"


def test_a_damaged_value_in_a_comparison_is_told_as_damage(folder, says):
    damage(folder, 2, state(2)["w"])
    code, lines = says("diff", folder, 1, 2)
    assert code == 1
    assert "step 2: w[0:4096]: the values are not those that were saved" in sentence(lines)


def test_other_folders_are_not_called_damaged(folder, says):
    (folder / "3").mkdir()
    code, lines = says("verify", folder)
    assert code == 0
    assert lines[2] == ["3:", "not", "a", "checkpoint", "of", "stepfold"]


def test_steps_are_listed_while_one_is_deleted(folder, says, monkeypatch):
    saved_at = DirectoryStore.saved_at

    def delete_first(store, step):
        shutil.rmtree(folder / "1", ignore_errors=True)
        return saved_at(store, step)

    monkeypatch.setattr(DirectoryStore, "saved_at", delete_first)
    code, lines = says("ls", folder)
    assert code == 0
    assert [line[0] for line in lines[2:3]] == ["2"]


def test_the_best_is_listed_after_a_save_without_a_metric(folder, says):
    sf.save(folder, state(3), step=3)
    _, lines = says("ls", folder)
    assert lines[-1] == ["best", "by", "loss", "(min):", "1"]
