"""A place that holds no checkpoint of ours, or that cannot be written to, is told of in words."""

import json
import os
import shutil
import subprocess
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tests.small import ones

import stepfold as sf

LIKE = {"w": ones((4, 2)), "count": ones((), np.int32)}


def make_state(step):
    return {"w": jnp.full((4, 2), float(step)), "count": jnp.asarray(step, jnp.int32)}


def is_of(restored, step):
    assert restored.step == int(restored.state["count"]) == step
    assert np.array_equal(restored.state["w"], np.full((4, 2), float(step)))


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "saved"
    for step in (1, 2):
        sf.save(folder, make_state(step), step=step, metrics={"eval/loss": 1 / step})
    return folder


def refused(folder, words, what):
    with pytest.raises(sf.errors.CheckpointError, match=words) as told:
        what(folder)
    assert str(folder) in str(told.value)


ASKING = {
    "restore": lambda folder: sf.restore(folder, LIKE),
    "best": lambda folder: sf.restore(folder, LIKE, step="best", best="eval/loss"),
    "number": lambda folder: sf.restore(folder, LIKE, step=2),
}
SAVING = {
    "save": lambda folder: sf.save(folder, make_state(3), step=3),
    "open": lambda folder: sf.Checkpoints(folder, keep=1).open().close(),
}
LOOKING = {"latest_step": sf.checkpoint.latest_step, "verify": sf.checkpoint.verify}


def test_a_path_that_is_a_file_or_below_one(tmp_path):
    for name in ("model.keras", "weights.pt", "12"):
        path = tmp_path / name
        path.write_bytes(b"PK\3\4 what another tool saved")
        for what in (ASKING | SAVING | LOOKING).values():
            refused(path, "expected a directory, got a file; give another path", what)
        assert path.read_bytes().startswith(b"PK")
    for what in SAVING.values():
        words = "expected a directory to save in, got one that cannot be made: Not a directory"
        refused(path / "run", words, what)


def test_a_directory_that_is_not_there(tmp_path):
    for what in ASKING.values():
        refused(tmp_path / "run", "to restore, got none; look at the path, or save first", what)
    assert sf.checkpoint.latest_step(tmp_path / "run") is None
    assert sf.checkpoint.verify(tmp_path / "run") == {}
    assert not (tmp_path / "run").exists()


def test_what_other_tools_leave_is_not_taken_for_a_step(tmp_path):
    for name in ("checkpoint-500", "epoch=3-step=40.ckpt", "7.tmp", "-1", "007", "²", "1e3"):
        (tmp_path / name).mkdir()
    for name in ("12", "checkpoint", "model.safetensors"):
        (tmp_path / name).write_bytes(b"")
    for what in ASKING.values():
        refused(tmp_path, "to restore, got none; look at the path, or save first", what)
    assert sf.checkpoint.latest_step(tmp_path) is None
    before = {path.name for path in tmp_path.iterdir()}
    sf.save(tmp_path, make_state(3), step=3)
    is_of(sf.restore(tmp_path, LIKE), 3)
    assert {path.name for path in tmp_path.iterdir()} == before | {"3"}


def of_orbax(folder):
    with ocp.CheckpointManager(folder) as manager:
        manager.save(5, args=ocp.args.StandardSave(make_state(5)))


def of_orbax_with_items(folder):
    with ocp.CheckpointManager(folder) as manager:
        manager.save(5, args=ocp.args.Composite(state=ocp.args.StandardSave(make_state(5))))


def of_somebody(folder):
    (folder / "5").mkdir(parents=True)
    (folder / "5" / "results.csv").write_text("1,2\n")


STRANGERS = (
    of_orbax,
    pytest.param(of_orbax_with_items, marks=pytest.mark.full),
    of_somebody,
)


@pytest.mark.parametrize("make", STRANGERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_directory_from_another_tool(tmp_path, make):
    """Saving beside it neither deletes it nor takes it for one of ours.

    What orbax saved can be read, but not once there are steps of stepfold: one of these that is
    being deleted looks the same.
    """
    folder = tmp_path / "run"
    make(folder)
    before = set(folder.rglob("*"))
    words = "expected a checkpoint that stepfold saved, got a folder without a manifest"
    for what in ({}, {"step": 5}):
        if make is of_somebody:
            with pytest.raises(sf.errors.CheckpointError, match=words):
                sf.restore(folder, LIKE, **what)
        else:
            with pytest.warns(RuntimeWarning, match="its values are not verified"):
                is_of(sf.restore(folder, LIKE, **what), 5)
    assert "a folder without a manifest" in str(sf.checkpoint.verify(folder)[5])
    with pytest.raises(sf.errors.CheckpointError, match="step 5 already exists; delete it"):
        sf.save(folder, make_state(5), step=5)
    assert [path.name for path in folder.iterdir()] == ["5"]
    with sf.Checkpoints(folder, keep=1, best="eval/loss") as series:
        for step in (6, 7):
            series.save(make_state(step), step=step, metrics={"eval/loss": 1 / step})
    assert sf.checkpoint.latest_step(folder) == 7
    for step in ("latest", "best"):
        is_of(sf.restore(folder, LIKE, step=step), 7)
    with pytest.raises(sf.errors.CheckpointError, match=words):
        sf.restore(folder, LIKE, step=5)
    assert before <= set(folder.rglob("*"))


def as_nobody(tasks):
    """Do things as a user who owns nothing; print what each returns or raises, and its warnings."""
    like = {"w": np.zeros((4, 2), np.float32), "count": np.zeros((), np.int32)}
    jax.config.update("jax_enable_compilation_cache", False)  # it is root's
    os.setgid(65534)
    os.setuid(65534)
    actions = {
        "open": lambda folder: sf.Checkpoints(folder).open().close(),
        "save": lambda folder: sf.save(folder, like, step=3),
        "restore": lambda folder: sf.restore(folder, like).step,
        "latest_step": sf.checkpoint.latest_step,
        "verify": sf.checkpoint.verify,
    }
    results = []
    for action, folder in tasks:
        with warnings.catch_warnings(record=True, action="always") as caught:
            try:
                result = str(actions[action](folder))
            except sf.errors.CheckpointError as error:
                result = str(error)
        results.append([result, "".join(str(warning.message) for warning in caught)])
    print(json.dumps(results))


def results_as_nobody(forks, tasks):
    """Return the result and the warnings of each task, given as an action and a folder."""
    end = forks.run(as_nobody, [(action, str(folder)) for action, folder in tasks])
    assert end.code == 0, end
    return json.loads(end.output)


@pytest.fixture
def others(saved, public_path):
    """Copy what is saved to where other users may read it."""
    return shutil.copytree(saved, public_path / "saved")


def test_without_permission_to_write_it_is_refused_and_can_be_read(forks, others):
    below = [("open", others / "run"), ("save", others / "run")]
    tasks = [("open", others), ("save", others), *below, ("restore", others), ("verify", others)]
    refused, refused_to_save, *made, restored, verified = results_as_nobody(forks, tasks)
    for result, _ in (refused, refused_to_save):
        assert result.startswith(str(others))
        assert "permission" in result
    words = (
        "expected a directory to save in, got one that cannot be made: Permission denied; change"
    )
    assert all(words in result for result, _ in made)
    assert (restored, verified) == (["2", ""], ["{1: [], 2: []}", ""])
    assert {path.name for path in others.iterdir()} == {"1", "2"}


HIDDEN = ["", "2", "2/state", "2/state/leaves-0.json", "2/state/manifest.ocdbt"]


def test_without_permission_to_read_it_is_refused_or_warns(forks, others):
    """It is refused, or an older step is taken with a warning; there is no other exception."""
    copies = [others.with_name(f"copy-{i}") for i in range(len(HIDDEN) + 1)]
    for copy in copies:
        shutil.copytree(others, copy)
    *unreadable, damaged = copies
    for copy, hidden in zip(unreadable, HIDDEN, strict=True):
        (copy / hidden).chmod(0)
    (damaged / "2" / "state" / "files.json").unlink()
    actions = ["restore", "latest_step", "verify"]
    tasks = [(action, copy) for copy in unreadable for action in actions]
    *results, skipped = results_as_nobody(forks, [*tasks, ("restore", damaged)])
    for copy, hidden in zip(unreadable, HIDDEN, strict=True):
        (copy / hidden).chmod(0o755)
    for (action, copy), (result, warned) in zip(tasks, results, strict=True):
        assert "ermission" in result + warned or action == "latest_step", (action, copy, result)
    assert skipped[0] == "1"
    assert "step 2 is damaged, and an older one is taken" in skipped[1]


@pytest.fixture
def read_only(saved):
    """Mount what is saved such that not even root may write there."""
    done = subprocess.run(["mount", "--bind", saved, saved], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no permission to mount: {done.stderr.strip()}")
    subprocess.run(["mount", "-o", "remount,ro,bind", saved], check=True)
    yield saved
    subprocess.run(["umount", saved], check=True)


def test_a_file_system_that_is_read_only(read_only):
    for what in SAVING.values():
        refused(read_only, "(?i)read-only|permission", what)
    is_of(sf.restore(read_only, LIKE), 2)
    assert sf.checkpoint.verify(read_only) == {1: [], 2: []}


def test_a_link_to_nowhere(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone", target_is_directory=True)
    for what in SAVING:
        refused(link, "expected a directory", SAVING[what])


def test_a_step_that_is_a_link(saved, tmp_path):
    """As where another disk keeps one for good: it is read, and when its time is over goes."""
    shutil.move(saved / "1", tmp_path / "kept")
    (saved / "1").symlink_to(tmp_path / "kept", target_is_directory=True)
    is_of(sf.restore(saved, LIKE, step=1), 1)
    with sf.Checkpoints(saved, keep=1) as series:
        series.save(make_state(3), step=3)
    assert sf.checkpoint.verify(saved) == {3: []}
    assert sorted(path.name for path in saved.iterdir()) == ["3"]
