"""A damaged step keeps its name until something is saved: readers change nothing in a series."""

import shutil
from contextlib import suppress

import numpy as np
import pytest

import stepfold as sf
from stepfold.checkpoint.__main__ import main
from stepfold.errors import CheckpointError

LIKE = {"w": np.zeros(3)}


def state(value):
    return {"w": np.full(3, float(value))}


@pytest.fixture(scope="module", params=["directory", "bucket"])
def saved(request, tmp_path_factory):
    """Return a folder with steps 1, 2 and 3, of which 3 has the best loss, and its location."""
    folder = tmp_path_factory.mktemp("saved")
    location = str(folder) if request.param == "directory" else f"file://{folder}"
    for step in (1, 2, 3):
        sf.save(location, state(step), step=step, metrics={"loss": 1.0 / step})
    return folder, location


@pytest.fixture
def series(saved, tmp_path):
    """Return a copy of it that is not complete: a file of step 3 is still missing."""
    shutil.copytree(saved[0], tmp_path / "copy")
    (file,) = missing_files(tmp_path / "copy")
    file.unlink()
    return saved[1].replace(str(saved[0]), str(tmp_path / "copy"))


def missing_files(folder):
    return [*folder.glob("3/state/manifest.ocdbt"), *folder.glob("saves/3-*/0.000000")]


def snapshot(folder):
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


READERS = {
    "restore": lambda url: sf.restore(url, LIKE),
    "restore the best": lambda url: sf.restore(url, LIKE, step="best", best="loss"),
    "restore by a policy": lambda url: sf.Checkpoints(url).restore(LIKE),
    "list": lambda url: sf.Checkpoints(url).steps(),
    "find the newest": lambda url: (
        sf.checkpoint.latest_step(url),
        sf.Checkpoints(url).latest_step(),
    ),
    "find the best": lambda url: sf.Checkpoints(url, best="loss").best_step(),
    "contents": sf.checkpoint.contents,
    "verify": sf.checkpoint.verify,
    "average": lambda url: sf.checkpoint.average_checkpoints(url, [1, 3], part=""),
    "ls": lambda url: main(["ls", url]),
    "show": lambda url: main(["show", url]),
    "diff": lambda url: main(["diff", url, "1", "3"]),
}


@pytest.mark.filterwarnings("ignore:.*step 3 is damaged:RuntimeWarning")
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_readers_change_nothing(read, series, tmp_path):
    before = snapshot(tmp_path)
    with suppress(CheckpointError):
        read(series)
    assert snapshot(tmp_path) == before


def test_a_copy_that_was_not_complete_is_restored_once_it_is(series, saved, tmp_path):
    with pytest.warns(RuntimeWarning, match="step 3 is damaged, and an older one is taken"):
        assert sf.restore(series, LIKE).step == 2
    (source,) = missing_files(saved[0])
    shutil.copy(source, tmp_path / "copy" / source.relative_to(saved[0]))
    assert sf.restore(series, LIKE).step == 3


def test_an_open_series_renames_what_it_skips(series):
    with (
        sf.Checkpoints(series) as opened,
        pytest.warns(RuntimeWarning, match="step 3 is damaged, kept as 3.damaged, and an older"),
    ):
        assert opened.restore(LIKE).step == 2
    assert opened.steps() == [1, 2]
    assert opened.store.other_names() == ["3.damaged"]


def test_a_closed_series_only_reads(series):
    with sf.Checkpoints(series) as opened:
        pass
    with pytest.warns(RuntimeWarning, match="step 3 is damaged, and an older one is taken"):
        assert opened.restore(LIKE).step == 2
    assert opened.steps() == [1, 2, 3]


def test_if_all_are_damaged_none_is_renamed(series, tmp_path):
    for path in (*tmp_path.rglob("files.json"), *tmp_path.rglob("saves/*/0.json")):
        path.unlink()
    with sf.Checkpoints(series) as opened:  # otherwise, the next run would start over
        for _ in range(2):
            with pytest.raises(
                CheckpointError,
                match="no checkpoint can be restored: step 3: .*; step 2: .*; step 1: ",
            ):
                opened.restore(LIKE)
    assert opened.steps() == [1, 2, 3]


def test_a_save_renames_a_damaged_step_of_its_number(series):
    with pytest.warns(RuntimeWarning, match="step 3 is damaged, kept as 3.damaged, and saved ag"):
        sf.save(series, state(4), step=3)
    assert sf.restore(series, LIKE).state["w"][0] == 4
    with pytest.raises(CheckpointError, match="step 2 already exists; delete it"):
        sf.save(series, state(4), step=2)


def test_clean_renames_damaged_steps(series):
    assert sf.Checkpoints(series).clean() == ["3.damaged"]
    assert sf.checkpoint.verify(series) == {1: [], 2: []}
    assert sf.Checkpoints(series).clean() == []
    with pytest.raises(sf.errors.ConfigError, match="directory: expected a path, got None"):
        sf.Checkpoints().clean()


def test_what_cannot_be_renamed_is_left(saved, tmp_path, monkeypatch):
    if "://" in saved[1]:
        pytest.skip("a marker is written instead")
    shutil.copytree(saved[0], tmp_path / "copy")
    (tmp_path / "copy/3/state/files.json").unlink()
    monkeypatch.setattr("pathlib.Path.rename", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with (
        sf.Checkpoints(tmp_path / "copy") as opened,
        pytest.warns(RuntimeWarning, match="step 3 is damaged, left where it is, and an older"),
    ):
        assert opened.restore(LIKE).step == 2
    assert opened.steps() == [1, 2, 3]
