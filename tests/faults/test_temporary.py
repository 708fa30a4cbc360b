"""With a second directory for frequent saves, a run that was cut goes on from the newest of either.

Kills at any moment are in test_kills.py.
"""

import os
import shutil
import signal
import warnings

import numpy as np
import pytest
from tests.laws import course

import stepfold as sf
from stepfold.checkpoint import temporary as module
from stepfold.checkpoint.store import DirectoryStore
from stepfold.checkpoint.tier import TierStore

from . import training


def full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".json")


def saves_and_is_killed(folder, local, at, options):
    """Save a step every two, temporarily but for every sixth; be killed before a deletion."""
    count, delete, remove = 0, DirectoryStore.delete, TierStore._remove_file

    def dies():
        nonlocal count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)

    DirectoryStore.delete = lambda *args: dies() or delete(*args)
    TierStore._remove_file = lambda *args: dies() or remove(*args)
    temporary = sf.Temporary(local, every=2, keep=1)
    with sf.Checkpoints(folder, every=6, temporary=temporary, **options) as series:
        for step in range((series.latest_step() or 0) + 1, 17):
            if series.due(step):
                series.save({"w": np.full(3, step)}, step=step)
                series.wait()
                print(step)


# In the order of deletion: the temporary steps 2, 4, 8, 10, then with 12 the permanent 6, and 14.
@pytest.mark.parametrize(
    ("at", "newest", "left", "kept"),
    [
        full(1, 4, [[], [2, 4]], [[], [4]]),  # after a temporary save, another one
        (2, 6, [[6], [4]], [[6], []]),  # after a permanent save, the temporary ones
        full(5, 12, [[6, 12], []], [[12], []]),  # after a permanent save, another one
        full(6, 16, [[12], [14, 16]], [[12], [16]]),  # after the last save
    ],
)
def test_a_deletion_that_a_kill_prevents_is_done_when_the_series_is_opened(
    forks, tmp_path, at, newest, left, kept
):
    folders = [tmp_path / "durable", tmp_path / "local"]
    args = (*map(str, folders), at, {"keep": 1})
    assert forks.run(saves_and_is_killed, *args).code == -signal.SIGKILL
    (folders[1],) = folders[1].iterdir()
    assert [[*sf.checkpoint.verify(folder)] for folder in folders] == left
    # To be killed again while it is done changes nothing.
    assert forks.run(saves_and_is_killed, *args[:2], 1, {"keep": 1}).code == -signal.SIGKILL
    assert [[*sf.checkpoint.verify(folder)] for folder in folders] == left
    # To look at the series deletes nothing.
    described = sf.Checkpoints(
        folders[0], keep=1, temporary=sf.Temporary(tmp_path / "local", every=2, keep=1)
    )
    assert described.restore({"w": np.zeros(3, int)}).step == newest
    assert [[*sf.checkpoint.verify(folder)] for folder in folders] == left
    described.open().close()
    assert [[*sf.checkpoint.verify(folder)] for folder in folders] == kept
    names = [[name.partition("-")[0] for name in names_in(folder)] for folder in folders]
    assert names == [[str(step) for step in steps] for steps in kept]


def test_a_series_that_is_opened_deletes_nothing_that_was_kept(tmp_path):
    """It may be opened with a smaller `keep` than it was saved with, only to look at it."""
    temporary = sf.Temporary(tmp_path / "local", every=1, keep=2)
    with sf.Checkpoints(tmp_path / "a", keep=None, every=3, temporary=temporary) as series:
        for step in range(1, 9):
            assert series.due(step)
            series.save({"w": np.zeros(3)}, step=step)
    temporary = sf.Temporary(tmp_path / "local", every=1, keep=1)
    sf.Checkpoints(tmp_path / "a", keep=1, temporary=temporary).open().close()
    assert [*sf.checkpoint.verify(tmp_path / "a")] == [3, 6]
    assert [*sf.checkpoint.verify(local(tmp_path))] == [7, 8]


# In fit


def described(folder):
    temporary = sf.Temporary(folder / "local", every=2)
    return sf.Checkpoints(every=12, keep=None, temporary=temporary)


def local(folder):
    (inner,) = (folder / "local").iterdir()
    return inner


def cut_at(folder, step, checkpoints=None):
    with training.cut(step) as hook:
        course.run(folder, checkpoints=checkpoints or described(folder), hooks=hook)


@pytest.mark.parametrize("step", [full(5), 35])
def test_fit_resumes_from_a_temporary_step(tmp_path, step):
    cut_at(tmp_path, step)
    durable = [number for number in (12, 24) if number < step]
    assert [*sf.checkpoint.verify(tmp_path / "checkpoints")] == durable
    (newest,) = sf.checkpoint.verify(local(tmp_path))
    assert newest >= step - 2
    result = course.run(tmp_path, checkpoints=described(tmp_path))
    assert result.resumed == newest
    assert course.told(result) == course.whole()
    assert [*sf.checkpoint.verify(tmp_path / "checkpoints")] == [12, 24, 36, 40]
    assert [*sf.checkpoint.verify(local(tmp_path))] == []


@pytest.mark.full
def test_fit_falls_back_from_a_damaged_temporary_step(tmp_path):
    cut_at(tmp_path, 15)
    for path in local(tmp_path).glob("1*"):
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.warns(RuntimeWarning, match="is damaged, kept as"):
        result = course.run(tmp_path, checkpoints=described(tmp_path))
    assert result.resumed == 12
    assert course.told(result) == course.whole()


@pytest.mark.full
def test_without_the_local_disk_a_run_goes_on_from_the_durable_step(tmp_path):
    cut_at(tmp_path, 15)
    (tmp_path / "local").rename(tmp_path / "lost")
    result = course.run(tmp_path, checkpoints=described(tmp_path))
    assert result.resumed == 12
    assert course.told(result) == course.whole()


@pytest.mark.full
@pytest.mark.parametrize("how", ["deleted", "renamed"])
def test_a_run_in_a_new_directory_of_the_name_starts_over(tmp_path, how):
    folder, local = tmp_path / "run", sf.Temporary(tmp_path / "local", every=2)
    make = lambda: sf.Checkpoints(every=12, keep=None, temporary=local)
    cut_at(folder, 15, make())
    shutil.rmtree(folder) if how == "deleted" else folder.rename(tmp_path / "old")
    with pytest.warns(RuntimeWarning, match="temporary steps of an earlier series in .*run/check"):
        result = course.run(folder, checkpoints=make())
    assert result.resumed is None
    assert course.told(result) == course.whole()
    if how == "renamed":
        shutil.rmtree(folder)
        (tmp_path / "old").rename(folder)
        assert course.run(folder, checkpoints=make()).resumed == 14


@pytest.mark.full
@pytest.mark.parametrize("when", ["at a temporary save", "right after a resume"])
def test_a_signal_saves_permanently(tmp_path, when):
    send = lambda: os.kill(os.getpid(), signal.SIGTERM)
    if when == "right after a resume":
        cut_at(tmp_path, 15)
        (step,) = sf.checkpoint.verify(local(tmp_path))

        class Signalled:
            def __init__(self):
                self.inner = course.batches()
                self.get_state, self.set_state = self.inner.get_state, self.inner.set_state

            def __iter__(self):
                return self

            def __next__(self):
                send()

        options = {"data": Signalled()}
    else:
        step = 30  # a log point and an evaluation, where the state is saved at once
        options = {"hooks": lambda event: send() if event.step == step else None}
    with pytest.raises(SystemExit) as caught:
        course.run(tmp_path, checkpoints=described(tmp_path), **options)
    assert caught.value.result.steps == step
    assert max(sf.checkpoint.verify(tmp_path / "checkpoints")) == step
    assert [*sf.checkpoint.verify(local(tmp_path))] == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = course.run(tmp_path, checkpoints=described(tmp_path))
    assert result.resumed == step
    assert course.told(result) == course.whole()


def test_requests_and_the_end_are_saved_permanently(tmp_path):
    checkpoints = described(tmp_path)
    hook = lambda event: checkpoints.request() if event.is_train and event.step == 30 else None
    result = course.run(tmp_path, checkpoints=checkpoints, hooks=hook)
    assert course.told(result) == course.whole()
    assert [*sf.checkpoint.verify(tmp_path / "checkpoints")] == [12, 24, 30, 36, 40]


def test_a_run_that_is_not_to_resume_refuses_temporary_steps_too(tmp_path):
    cut_at(tmp_path, 5)
    with pytest.raises(sf.errors.ConfigError, match="expected a directory without checkpoints"):
        course.run(tmp_path, checkpoints=described(tmp_path), resume=False)


def test_continuous_saves_keep_the_bits_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(module, "_SHARE", 1e6)  # as often as they can

    def checkpoints():
        temporary = sf.Temporary(tmp_path / "local", every="continuous")
        return sf.Checkpoints(every=24, keep=None, temporary=temporary)

    cut_at(tmp_path, 20, checkpoints())
    (newest,) = sf.checkpoint.verify(local(tmp_path))
    assert 0 < newest <= 20
    result = course.run(tmp_path, checkpoints=checkpoints())
    assert result.resumed == newest
    assert course.told(result) == course.whole()
    assert [*sf.checkpoint.verify(local(tmp_path))] == []
