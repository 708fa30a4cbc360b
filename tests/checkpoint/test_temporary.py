"""A second directory for frequent saves: what is saved where, pruned when, and restored first."""

import errno
import shutil
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import stepfold as sf
from stepfold.checkpoint import tier
from stepfold.errors import CheckpointError, ConfigError

from .folders import damage


def state(step):
    return {"w": jax.device_put(np.arange(1000) + step)}


LIKE = state(0)


def series_in(folder, **options):
    """Describe a series that saves permanently every 6 steps, and temporarily every 2."""
    temporary = sf.Temporary(folder / "local", every=2, **options.pop("local", {}))
    return sf.Checkpoints(folder / "durable", **{"every": 6, "temporary": temporary, **options})


def run(series, steps):
    for step in steps:
        if series.due(step):
            series.save(state(step), step=step)


def local(folder):
    """Return the folder of the one series."""
    (inner,) = (folder / "local").iterdir()
    return inner


def steps_in(folder):
    return [*sf.checkpoint.verify(folder)]


def test_a_permanent_save_deletes_the_temporary_ones_up_to_it(tmp_path):
    found = {}
    with series_in(tmp_path) as series:
        for step in range(1, 15):
            run(series, [step])
            series.wait()
            found[step] = (series.steps(), steps_in(local(tmp_path)))
    assert found[1] == ([], [])
    assert found[4] == ([4], [4])
    assert found[6] == found[7] == ([6], [])
    assert found[10] == ([6, 10], [10])
    assert found[12] == ([6, 12], [])
    assert found[14] == ([6, 12, 14], [14])
    assert steps_in(tmp_path / "durable") == [6, 12]


def test_the_policies_act_on_permanent_steps_alone(tmp_path):
    described = series_in(tmp_path, keep=1, keep_every=12, best="loss", local={"keep": 2})
    with described as series:
        for step in range(1, 24):
            if series.due(step):
                loss = 0.0 if step in (6, 20) else 1.0
                series.save(state(step), step=step, metrics={"loss": loss})
        series.wait()
        assert series.best_step() == 6
    assert steps_in(tmp_path / "durable") == [6, 12, 18]
    assert steps_in(local(tmp_path)) == [20, 22]
    assert described.restore(LIKE, step="best").step == 6


@pytest.mark.parametrize("is_open", [True, False])
def test_the_newest_of_either_is_restored(tmp_path, is_open):
    described = series_in(tmp_path)
    with described as series:
        run(series, range(1, 11))
        series.wait()
        one = series if is_open else described
        assert one.latest_step() == 10
        restored = one.restore(LIKE)
        assert (restored.step, restored.damaged) == (10, {})
        np.testing.assert_array_equal(restored.state["w"], state(10)["w"])
        assert one.restore(LIKE, step=6).step == 6
        assert one.restore(LIKE, step=10).step == 10
        with pytest.raises(CheckpointError, match="expected step 8 to restore, got steps 6; "):
            one.restore(LIKE, step=8)
        run(series, [11, 12])
        series.wait()
        assert one.restore(LIKE).step == 12


@pytest.mark.parametrize("steps", [range(1, 11), range(1, 5)], ids=["behind", "nothing"])
def test_a_damaged_temporary_step_falls_back(tmp_path, steps):
    with series_in(tmp_path, local={"keep": 2}) as series:
        run(series, steps)
    *_, older, newest = sorted({6, 8, 10} if max(steps) == 10 else {2, 4})
    damage(local(tmp_path), newest, state(newest)["w"])
    with (
        series_in(tmp_path) as series,
        pytest.warns(RuntimeWarning, match=f"step {newest} is damaged, kept as"),
    ):
        restored = series.restore(LIKE)
    assert (restored.step, [*restored.damaged]) == (older, [newest])
    np.testing.assert_array_equal(restored.state["w"], state(older)["w"])
    with series_in(tmp_path) as series:  # it is saved again
        run(series, [newest])
    assert series_in(tmp_path).restore(LIKE).step == newest


def test_a_step_of_both_is_taken_from_the_permanent_one_first(tmp_path):
    with series_in(tmp_path) as series:
        run(series, range(1, 5))
        series.wait()
        (kept,) = local(tmp_path).glob("4-*")
        kept.rename(tmp_path / "kept")
        assert series.due(8)
        series.save(state(4), step=4)  # not the step that is due: a permanent save
        series.wait()
    (tmp_path / "kept").rename(kept)
    assert series_in(tmp_path).steps() == [4]
    damage(tmp_path / "durable", 4, state(4)["w"])
    with pytest.warns(RuntimeWarning, match="durable: step 4 is damaged"):
        assert series_in(tmp_path).restore(LIKE).step == 4


def test_a_save_that_was_not_due_or_is_to_be_permanent_is(tmp_path):
    with series_in(tmp_path) as series:
        series.save(state(1), step=1)
        assert series.due(2)
        series.save(state(2), step=2)
        series.save(state(2), step=2, kind="permanent")  # as at a signal
        assert not series.due(2)
        assert series.due(4)
        series.save(state(4), step=4, kind="permanent")
        assert series.due(8)
        series.save(state(9), step=9)  # another step than the one that is due
    assert steps_in(tmp_path / "durable") == [2, 4, 9]
    assert steps_in(local(tmp_path)) == []


def test_a_request_is_for_a_permanent_save(tmp_path):
    with series_in(tmp_path) as series:
        series.request()
        run(series, range(2, 5))
    assert steps_in(tmp_path / "durable") == [2]
    assert steps_in(local(tmp_path)) == [4]


def test_minutes_are_counted_from_the_last_save_of_either_kind(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    temporary = sf.Temporary(tmp_path / "local", every_minutes=15)
    described = sf.Checkpoints(tmp_path / "durable", every_minutes=40, temporary=temporary)
    saved = []
    with described.open() as series:
        for step in range(1, 12):
            now[0] += 10 * 60
            if series.due(step):
                series.save(state(step), step=step)
                series.wait()
                saved.append((step, series.saved == step))
    # 20 minutes: temporary. 40: permanent, and again 20 minutes later.
    expected = [(2, False), (4, True), (6, False), (8, True), (10, False)]
    assert saved == expected


def test_runs_share_a_directory_and_do_not_mix(tmp_path):
    places = [tmp_path / "a", tmp_path / "b"]
    temporary = sf.Temporary(tmp_path / "local", every=1)
    for place in places:
        with sf.Checkpoints(place, temporary=temporary) as series:
            assert series.latest_step() is None
            run(series, [1 + places.index(place)])
    assert [sf.Checkpoints(place, temporary=temporary).steps() for place in places] == [[1], [2]]


def test_the_folder_does_not_depend_on_how_the_path_is_spelled(tmp_path, monkeypatch):
    with series_in(tmp_path) as series:
        run(series, [2])
    monkeypatch.chdir(tmp_path)
    relative = sf.Checkpoints("durable", temporary=sf.Temporary("local", every=2))
    assert relative.latest_step() == 2


def test_the_durable_steps_may_be_in_object_storage(tmp_path):
    url = f"file://{tmp_path}/bucket"
    described = sf.Checkpoints(url, every=6, temporary=sf.Temporary(tmp_path / "local", every=2))
    with described as series:
        run(series, range(1, 11))
    assert sf.checkpoint.latest_step(url) == 6
    assert described.restore(LIKE).step == 10
    damage(local(tmp_path), 10, state(10)["w"])
    with pytest.warns(RuntimeWarning, match="step 10 is damaged"):
        assert described.restore(LIKE).step == 6
    with described as series:
        run(series, [12])
    assert steps_in(local(tmp_path)) == []


def test_what_is_measured_later_is_added_where_the_step_is(tmp_path):
    with series_in(tmp_path) as series:
        run(series, range(1, 9))
        for step in (6, 8):
            series.add_later(step, metrics={"loss": float(step)}, extra={})
    for step in (6, 8):
        assert series_in(tmp_path).restore(LIKE, step=step).metrics == {"loss": step}


def saved_one_by_one(series, steps):
    for step in steps:
        run(series, [step])
        series.wait()


def fails(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["written", "begun"])
def test_a_temporary_save_that_fails_is_a_warning(tmp_path, monkeypatch, where):
    series = series_in(tmp_path).open()
    with monkeypatch.context() as patch:
        patch.setattr(tier, "sync" if where == "written" else "arrays_of", fails)
        with pytest.warns(RuntimeWarning, match="local/.*temporary saves fail.*no space") as said:
            saved_one_by_one(series, [2, 4])
        assert len(said) == 1
        assert series.latest_step() is None
    run(series, [6, 8])
    series.close()
    assert steps_in(tmp_path / "durable") == [6]
    assert steps_in(local(tmp_path)) == [8]


def test_temporary_steps_that_cannot_be_deleted_are_a_warning(tmp_path, monkeypatch):
    with series_in(tmp_path) as series:
        run(series, [2, 4])
        series.wait()
        monkeypatch.setattr(Path, "unlink", fails)
        with pytest.warns(RuntimeWarning, match="local/.*/4-.*: cannot be deleted: No space"):
            saved_one_by_one(series, [6])
    assert steps_in(tmp_path / "durable") == [6]


@pytest.mark.parametrize("steps", [[2, 4], [4, 6, 8]], ids=["before a permanent step", "after one"])
@pytest.mark.parametrize("how", ["deleted", "renamed"])
def test_a_new_series_does_not_continue_another_in_its_place(tmp_path, how, steps):
    with series_in(tmp_path) as series:
        run(series, steps)
    if how == "deleted":
        shutil.rmtree(tmp_path / "durable")
    else:
        (tmp_path / "durable").rename(tmp_path / "old")
    assert series_in(tmp_path).steps() == []
    with pytest.raises(CheckpointError, match="got none"):
        series_in(tmp_path).restore(LIKE)
    with pytest.warns(RuntimeWarning, match="local/series-.*: temporary steps of an earlier seri"):
        opened = series_in(tmp_path).open()
    with opened as series:
        assert (series.steps(), series.latest_step()) == ([], None)
        run(series, [2])
    with series_in(tmp_path) as series:
        assert series.steps() == [2]
    if how == "renamed":  # the old one is still whole, where it was
        shutil.rmtree(tmp_path / "durable")
        (tmp_path / "old").rename(tmp_path / "durable")
        assert series_in(tmp_path).latest_step() == max(steps)


def test_a_copy_of_a_series_does_not_share_its_temporary_steps(tmp_path):
    with series_in(tmp_path) as series:
        run(series, [2])
    shutil.copytree(tmp_path / "durable", tmp_path / "copy")
    temporary = sf.Temporary(tmp_path / "local", every=2)
    with sf.Checkpoints(tmp_path / "copy", temporary=temporary) as series:
        run(series, [4])
    assert series_in(tmp_path).steps() == [2]


def test_opening_cleans_both_directories(tmp_path):
    with series_in(tmp_path) as series:
        run(series, [2])
    left = [tmp_path / "durable" / "5.deleted", local(tmp_path) / "4-a.1-0.slices.part"]
    left[0].mkdir()
    left[1].touch()
    series_in(tmp_path).open().close()
    assert not any(map(Path.exists, left))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sf.Temporary("a"), "temporary: expected every=… or every_minutes=…, got neither"),
        (lambda: sf.Temporary("a", every=0), "every: expected"),
        (lambda: sf.Temporary("a", every=1, keep=None), "keep: expected"),
        (lambda: sf.Temporary("a", every_minutes=-1), "every_minutes: expected"),
        (lambda: sf.Temporary("s3://a/b", every=1), "directory: expected a path on a file system"),
        (lambda: sf.Temporary(None, every=1), "directory: expected a path, got None"),
        (lambda: sf.Checkpoints("a", temporary="b"), "temporary: expected sf.Temporary"),
    ],
)
def test_what_is_no_temporary_directory_is_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("asked", [[2, 3], [2, 4], [2, 12], [2, 1], [1, 2, 3, 6, 5]])
def test_a_question_about_another_step_does_not_change_a_save(tmp_path, asked):
    with series_in(tmp_path) as series:
        answers = [series.due(step) for step in asked]
        assert answers == [step % 2 == 0 for step in asked]
        series.save(state(2), step=2)
        series.wait()
        assert steps_in(local(tmp_path)) == [2]
        assert series.due(6)
        assert series.due(4)
        series.save(state(6), step=6)
        series.wait()
        assert steps_in(tmp_path / "durable") == [6]
