"""The run directory of `fit`, given where the directory of its checkpoints is expected."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from tests.small import ones

import stepfold as sf
from stepfold.checkpoint.__main__ import main
from stepfold.checkpoint.bucket import BucketStore
from stepfold.checkpoint.restore import candidates
from stepfold.checkpoint.steps import join_location
from stepfold.errors import CheckpointError

STATE = {"params": {"w": ones(4)}}


@pytest.fixture(params=["directory", "url"])
def run(request, tmp_path):
    """Give the path and the location of a run with two checkpoints."""
    folder = tmp_path / "run"
    location = str(folder) if request.param == "directory" else f"file://{folder}"
    for step in (1, 2):
        state = {"params": {"w": jnp.full(4, float(step))}}
        sf.save(f"{location}/checkpoints", state, step=step, metrics={"loss": step})
    return folder, location


@pytest.mark.parametrize("end", ["", "/"])
def test_restoring_from_the_run_directory_restores_its_checkpoint(run, end):
    assert sf.restore(run[1] + end, STATE).step == 2
    best = sf.restore(run[1] + end, STATE, step="best", best=("loss", "min"))
    assert (best.step, best.state["params"]["w"][0]) == (1, 1)
    assert sf.restore(run[1] + end, STATE, step=1).step == 1


def test_inspecting_the_run_directory_inspects_its_checkpoints(run):
    assert sf.checkpoint.latest_step(run[1]) == 2
    assert sf.checkpoint.verify(run[1]) == {1: [], 2: []}
    assert sf.checkpoint.contents(run[1]).step == 2


def test_averaging_steps_of_the_run_directory(run):
    average = sf.checkpoint.average_checkpoints(run[1], [1, 2], STATE["params"])
    assert np.array_equal(average["w"], np.full(4, 1.5))


@pytest.mark.parametrize("arguments", [["ls"], ["show"], ["verify"], ["diff", "1", "2"]])
def test_the_command_takes_the_run_directory(run, arguments, capsys):
    verb, *steps = arguments
    assert main([verb, run[1], *steps]) == 0
    shown = capsys.readouterr().out
    assert main([verb, f"{run[1]}/checkpoints", *steps]) == 0
    assert capsys.readouterr().out == shown


def test_a_directory_with_steps_is_no_run_directory(run):
    sf.save(run[1], STATE, step=7)
    assert (sf.checkpoint.latest_step(run[1]), sf.restore(run[1], STATE).step) == (7, 7)
    assert list(sf.checkpoint.verify(run[1])) == [7]


def test_a_damaged_step_of_the_run_directory_is_skipped(run):
    (path,) = (run[0] / "checkpoints").glob("2.commit" if "://" in run[1] else "2/state/files.json")
    path.write_bytes(b"")
    with pytest.warns(RuntimeWarning, match=r"run/checkpoints: step 2 is damaged, and an older"):
        assert sf.restore(run[1], STATE).step == 1


def test_a_run_without_checkpoints_says_so(run):
    shutil.rmtree(run[0] / "checkpoints")
    run[0].joinpath("metrics.jsonl").touch()
    with pytest.raises(CheckpointError, match=r"run: expected a checkpoint to restore, got none; "):
        sf.restore(run[1], STATE)
    assert sf.checkpoint.latest_step(run[1]) is None
    assert sf.checkpoint.verify(run[1]) == {}
    if "://" not in run[1]:
        run[0].joinpath("checkpoints").touch()  # a file is no series
        assert sf.checkpoint.latest_step(run[1]) is None


def test_a_url_keeps_its_query():
    joined = join_location("s3://bucket/run/?endpoint=http://host", "checkpoints")
    assert joined == "s3://bucket/run/checkpoints?endpoint=http://host"


@pytest.mark.parametrize("layout", ["directory", "bucket"])
def test_a_path_and_its_url_are_one_series(tmp_path, layout):
    names = [str(tmp_path / "a b"), (tmp_path / "a b").as_uri()]
    first, second = names if layout == "directory" else names[::-1]
    sf.save(first, STATE, step=1)
    for name in names:
        assert sf.checkpoint.latest_step(name) == 1
        assert sf.restore(name, STATE).step == 1
    sf.save(second, STATE, step=2)
    with sf.Checkpoints(second, keep=2) as series:
        series.save(STATE, step=3)
    for name in names:
        assert sf.checkpoint.verify(name) == {2: [], 3: []}
    with pytest.raises(CheckpointError, match="step 3 already exists; delete it"):
        sf.save(second, STATE, step=3)
    is_bucket = (tmp_path / "a b/3.commit").exists()
    assert is_bucket == (layout == "bucket")
    assert (tmp_path / "a b/3").exists() != is_bucket


def test_steps_in_both_layouts_are_refused(tmp_path):
    url = tmp_path.as_uri()
    sf.save(url, STATE, step=1)
    (tmp_path / "2").mkdir()
    for name in (url, tmp_path):
        with pytest.raises(CheckpointError, match="expected steps in one layout, got both folders"):
            sf.restore(name, STATE)


def test_folders_of_steps_that_were_copied_to_a_bucket_are_named(tmp_path):
    sf.save(tmp_path, STATE, step=1)
    store = BucketStore(tmp_path.as_uri())
    with pytest.raises(CheckpointError, match="saved to a URL, got a folder of a file system: 1/;"):
        candidates([store], "latest")
