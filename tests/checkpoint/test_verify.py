"""Steps are described and verified without being restored or changed."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf
from stepfold.checkpoint.store import DirectoryStore, open_store
from stepfold.checkpoint.verify import problems_of
from stepfold.errors import CheckpointError, ConfigError

from .folders import damage


def state(value):
    noise = np.random.default_rng(value).normal(size=4096).astype(np.float32)
    return {"w": noise, "none": jnp.zeros((0, 2))}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    for step in (1, 2, 10):
        sf.save(path, state(step), step=step)
    return path


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path, dirs_exist_ok=True)


def files(folder):
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def test_what_is_good_has_no_problems(folder):
    before = files(folder)
    assert sf.checkpoint.verify(folder) == {1: [], 2: [], 10: []}
    assert sf.checkpoint.latest_step(folder) == 10
    assert files(folder) == before


def test_changed_values_are_named(folder):
    damage(folder, 10, state(10)["w"])
    before = files(folder)
    told = "w[0:4096]: the values are not those that were saved"
    assert sf.checkpoint.verify(folder) == {1: [], 2: [], 10: [told]}
    assert [str(problem) for problem in problems_of(open_store(folder), 10)] == [told]
    assert files(folder) == before


def test_the_latest_is_the_newest_that_is_whole(folder):
    (folder / "10" / "state" / "_METADATA").unlink()
    assert sf.checkpoint.latest_step(str(folder)) == 2
    (problem,) = sf.checkpoint.verify(folder)[10]
    assert problem.startswith("_METADATA: expected ")
    for name in ("11.orbax-checkpoint-tmp", "12.damaged", "13.deleted"):
        (folder / name).mkdir()
    assert sf.checkpoint.latest_step(folder) == 2
    assert list(sf.checkpoint.verify(folder)) == [1, 2, 10]


def test_where_nothing_is_there_is_no_step(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        assert sf.checkpoint.latest_step(folder) is None
        assert sf.checkpoint.verify(folder) == {}


@pytest.mark.parametrize("look", [sf.checkpoint.verify, sf.checkpoint.latest_step])
def test_what_is_no_directory_is_refused(tmp_path, look):
    (tmp_path / "a").write_text("")
    with pytest.raises(CheckpointError, match="a: expected a directory, got a file"):
        look(tmp_path / "a")
    with pytest.raises(ConfigError, match="directory: expected a path, got 3"):
        look(3)


def test_what_others_saved_is_a_problem(tmp_path):
    (tmp_path / "3" / "state").mkdir(parents=True)
    (problem,) = sf.checkpoint.verify(tmp_path)[3]
    assert "3: expected a checkpoint that stepfold saved, got a folder without a man" in problem


def test_what_is_in_a_checkpoint_is_told(folder):
    with sf.Checkpoints(folder, keep=None, best="loss") as series:
        series.save(state(3), step=3, metrics={"loss": 0.5}, data={"at": 1}, extra=b"x")
        series.save(state(4), step=11, metrics={"loss": 1.5})
    found = sf.checkpoint.contents(folder, step=3)
    assert found[0] == 3
    assert {path: str(leaf) for path, leaf in found.leaves.items()} == {
        "none": "float32[0,2]",
        "w": "float32[4096]",
    }
    assert (found.data, found.extra, found.metrics) == ({"at": 1}, b"x", {"loss": 0.5})
    assert found.bytes > 4 * 4096
    assert sf.checkpoint.contents(folder, step="best") == found
    assert sf.checkpoint.contents(folder).step == 11
    (folder / "11" / "state" / "_METADATA").unlink()
    assert sf.checkpoint.contents(folder).step == 10
    with pytest.raises(CheckpointError, match="_METADATA: expected"):
        sf.checkpoint.contents(folder, step=11)
    with pytest.raises(CheckpointError, match="expected step 7 to restore, got steps 1, 2, 3, 10"):
        sf.checkpoint.contents(folder, step=7)


def test_arrays_that_cannot_be_read_are_a_problem(folder, monkeypatch):
    def fail(*_, **__):
        raise ValueError("RESOURCE_EXHAUSTED: Too many open files")

    monkeypatch.setattr("tensorstore.open", fail)
    problem = "w: cannot be read: RESOURCE_EXHAUSTED: Too many open files"
    assert sf.checkpoint.verify(folder) == {1: [problem], 2: [problem], 10: [problem]}


def test_contents_and_parts_of_another_number_of_processes(folder, monkeypatch):
    """Parts and contents need no position, which only as many processes can use."""
    read, data = DirectoryStore.read_manifest, [{"at": 1}, {"at": 2}]
    change = lambda store, step: read(store, step)._replace(data=data)
    monkeypatch.setattr(DirectoryStore, "read_manifest", change)
    assert sf.checkpoint.contents(folder).data == [{"at": 1}, {"at": 2}]
    found = sf.restore(folder, state(0), parts=("w",))
    assert (found.step, found.data) == (10, None)
    with pytest.raises(CheckpointError, match="data: expected 2 processes, each with the position"):
        sf.restore(folder, state(0))


def test_without_a_whole_step_there_are_no_contents(tmp_path):
    sf.save(tmp_path, state(1), step=1)
    (tmp_path / "1" / "state" / "_METADATA").unlink()
    with pytest.raises(CheckpointError, match="_METADATA: expected|expected a checkpoint"):
        sf.checkpoint.contents(tmp_path)
