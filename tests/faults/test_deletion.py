"""A step whose deletion was interrupted, whoever deleted it, is offered by nothing."""

import os
import random
import shutil
import warnings
from contextlib import contextmanager

import jax.numpy as jnp
import numpy as np
import pytest
from tests.small import ones

import stepfold as sf

LIKE = {"params": {"w": ones((6, 4)), "b": ones(4)}, "count": ones((), np.int32)}


def make_state(step):
    return {
        "params": {"w": jnp.full((6, 4), float(step)), "b": jnp.arange(4.0) * step},
        "count": jnp.asarray(step, jnp.int32),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save two steps, of which the newer is the best."""
    folder = tmp_path_factory.mktemp("saved")
    with sf.Checkpoints(folder, keep=None, best="eval/loss") as series:
        for step in (1, 2):
            series.save(make_state(step), step=step, metrics={"eval/loss": 1 / step})
    return folder


def is_of(restored, step):
    assert restored.step == step
    assert int(restored.state["count"]) == step
    assert np.array_equal(restored.state["params"]["w"], np.full((6, 4), step))


def never_offered(folder):
    """Step 2 is half there: ask for it in every way, and then go on saving."""
    assert sf.checkpoint.latest_step(folder) == 1
    assert sf.checkpoint.verify(folder).pop(2, ["away"]), "verify finds it good"
    with pytest.raises(sf.errors.CheckpointError):
        sf.restore(folder, LIKE, step=2)
    for step in ("best", "latest"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            is_of(sf.restore(folder, LIKE, step=step), 1)


def goes_on(folder):
    with sf.Checkpoints(folder, keep=2, best="eval/loss") as series:
        series.save(make_state(3), step=3, metrics={"eval/loss": 3.0})
        is_of(series.restore(LIKE), 3)
    assert sf.checkpoint.latest_step(folder) == 3


@contextmanager
def interrupted(after):
    """Let deletions fail from the k-th file or folder on, as if the process had ended."""
    left = [after]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("unlink", "rmdir"):
            real = getattr(os, name)

            def delete(*args, real=real, **options):
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt
                return real(*args, **options)

            patch.setattr(os, name, delete)
        yield


def entries(folder):
    return sum(len(folders) + len(files) for _, folders, files in os.walk(folder)) + 1


def test_our_deletion_interrupted_at_each_file(saved, tmp_path, count):
    number = entries(saved / "2")
    # The first to go is what kept the new step to this run.
    points = count(min(4, number), number)
    for after in range(1, number + 1, number // points):
        folder = tmp_path / f"{after}"
        shutil.copytree(saved, folder)
        with sf.Checkpoints(folder, keep=1) as series, interrupted(after):
            series.save(make_state(3), step=3)
            with pytest.raises(KeyboardInterrupt):
                series.wait()
        assert sf.checkpoint.verify(folder) in ({2: [], 3: []}, {3: []})
        assert sf.checkpoint.latest_step(folder) == 3
        is_of(sf.restore(folder, LIKE), 3)
        with pytest.raises(
            sf.errors.CheckpointError, match="expected step 1 to restore, got steps"
        ):
            sf.restore(folder, LIKE, step=1)
        with sf.Checkpoints(folder, keep=1) as series:
            assert sorted(path.name for path in folder.iterdir()) in (["2", "3"], ["3"])
            series.save(make_state(4), step=4)
        assert [path.name for path in folder.iterdir()] == ["4"]
    print(f"{number} interruptions of our own deletion")


@pytest.mark.full
def test_a_deletion_by_others_interrupted_after_each_file(saved, tmp_path, count):
    files = sorted(path.relative_to(saved) for path in (saved / "2").rglob("*") if path.is_file())
    shuffled = random.Random(0).sample(files, len(files))
    orders = {"by chance": shuffled, "reversed": files[::-1], "as listed": files}
    for order in list(orders)[: count(1, 3)]:
        interrupt_after_each_file(saved, tmp_path / order, orders[order])


def interrupt_after_each_file(saved, place, files):
    missing = set()
    offered = []
    for k, file in enumerate(files):
        missing.add(file)
        folder = place / f"{k}"
        shutil.copytree(saved, folder)
        for path in missing:
            (folder / path).unlink()
        if all(path.parts[1] != "state" or path.name == "commit_success.txt" for path in missing):
            continue  # what orbax alone reads; all that is needed is there
        try:
            never_offered(folder)
            goes_on(folder)
        except (sf.errors.CheckpointError, AssertionError) as error:
            offered.append(f"{k + 1} files away, the last {file}: {error!r}"[:300])
    assert not offered, "\n".join([f"{len(offered)} of {len(files)}", *offered[-3:]])


@pytest.mark.parametrize("left", ["2", "2/state", "2/state/d"])
def test_folders_without_files_are_passed_over(saved, tmp_path, left):
    folder = tmp_path / "saved"
    shutil.copytree(saved, folder)
    shutil.rmtree(folder / "2")
    (folder / left).mkdir(parents=True)
    never_offered(folder)
    goes_on(folder)


def test_a_step_that_is_deleted_while_it_is_asked_for(saved, tmp_path):
    """The names are there when they are listed, and the files are not when they are read."""
    folder = tmp_path / "saved"
    shutil.copytree(saved, folder)
    from stepfold.checkpoint.store import DirectoryStore

    listed = DirectoryStore.steps
    with pytest.MonkeyPatch.context() as patch:

        def late(store):
            found = listed(store)
            shutil.rmtree(folder / "2", ignore_errors=True)
            return found

        patch.setattr(DirectoryStore, "steps", late)
        assert sf.checkpoint.latest_step(folder) == 1
        for step in ("latest", "best"):
            shutil.copytree(saved / "2", folder / "2", dirs_exist_ok=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                is_of(sf.restore(folder, LIKE, step=step), 1)
