"""A series: when it saves, what it keeps, how it fails, and `save` alone."""

import dataclasses
import shutil
import threading
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf
from stepfold.checkpoint import manifest
from stepfold.checkpoint.bucket import BucketStore
from stepfold.checkpoint.manifest import step_metadata
from stepfold.checkpoint.store import DirectoryStore
from stepfold.errors import CheckpointError, ConfigError

from .folders import names
from .sameness import check_same

STATE = {"w": jax.device_put(np.arange(3, dtype=np.float32))}


@pytest.fixture
def fails(monkeypatch):
    """Let what is written fail, as long as the list is not empty."""
    wrong, written = [OSError("on purpose")], manifest.write_leaves

    def write(*args):
        if wrong:
            raise wrong[0]
        written(*args)

    monkeypatch.setattr(manifest, "write_leaves", write)
    return wrong


def ended(series):
    """Let a save in the background come to its end without hearing of it."""
    series._thread.join()


def test_a_schedule_that_had_no_effect_is_warned_of_when_the_series_closes(tmp_path):
    series = sf.Checkpoints(tmp_path / "a", every_epochs=1).open()
    assert not any(series.due(step) for step in range(1, 9))  # no epoch is given
    with pytest.warns(
        RuntimeWarning, match="nothing was saved, .* without an epoch; with every_epochs"
    ):
        series.close()
    series.close()  # idempotent: warns once

    series = sf.Checkpoints(tmp_path / "b", best="eval/loss").open()
    series.save(STATE, step=1, metrics={"train/loss": 1.0})
    with pytest.warns(RuntimeWarning, match="no step is ranked, .* 'eval/loss' of best"):
        series.close()


HEARS = {
    "save": lambda series: series.save(STATE, step=2),
    "wait": lambda series: series.wait(),
    "close": lambda series: series.close(),
    "restore": lambda series: series.restore(STATE),
}


@pytest.mark.parametrize("name", HEARS)
def test_a_failure_is_raised_by_the_next_call_and_only_once(tmp_path, fails, name):
    series = sf.Checkpoints(tmp_path).open()
    series.save(STATE, step=1)
    ended(series)
    fails.clear()
    with pytest.raises(CheckpointError, match="1: not saved: OSError: on purpose"):
        HEARS[name](series)
    assert names(tmp_path) == []
    series.wait()
    if name != "close":
        series.save(STATE, step=1)
        series.save(STATE, step=2)
    series.close()
    series.close()
    assert sf.checkpoint.verify(tmp_path) == ({} if name == "close" else {1: [], 2: []})


def test_a_failure_in_the_foreground_is_raised_at_once(tmp_path, fails):
    with sf.Checkpoints(tmp_path, async_=False) as series:
        with pytest.raises(CheckpointError, match="1: not saved"):
            series.save(STATE, step=1)
        fails.clear()
        series.save(STATE, step=1)
        assert sf.checkpoint.verify(tmp_path) == {1: []}


def test_an_unreadable_old_step_is_kept_and_does_not_fail_a_save(tmp_path, monkeypatch):
    read = DirectoryStore.read_metadata

    def refuse_first(store, step):
        if step == 1:
            raise CheckpointError("1: cannot be read: Permission denied")
        return read(store, step)

    sf.save(tmp_path, STATE, step=1)
    monkeypatch.setattr(DirectoryStore, "read_metadata", refuse_first)
    with sf.Checkpoints(tmp_path, keep=1) as series:
        for step in (2, 3):
            series.save(STATE, step=step)
            with pytest.warns(RuntimeWarning, match="step 1 is left out: 1: cannot be read: Perm"):
                series.wait()
    assert names(tmp_path) == ["1", "3"]


def test_a_closed_series_refuses(tmp_path):
    series = sf.Checkpoints(tmp_path).open()
    series.close()
    series.close()
    with pytest.raises(CheckpointError, match="the series is closed; use a"):
        series.save(STATE, step=1)
    series.wait()
    assert names(tmp_path) == []


def test_a_restore_waits_for_what_is_being_saved(tmp_path):
    with sf.Checkpoints(tmp_path) as series:
        series.save(STATE, step=1, metrics={"loss": 1.0})
        found = series.restore({"w": jnp.zeros(3)}, step="best", best="loss")
    check_same(found.state, STATE)


def dues(series, steps=range(10), epochs=None):
    return [step for step in steps if series.due(step, epoch=(epochs or {}).get(step))]


def test_when_one_is_due(tmp_path):
    assert dues(sf.Checkpoints(tmp_path)) == []
    assert dues(sf.Checkpoints(tmp_path, every=3)) == [3, 6, 9]
    epochs = {2: 1, 4: 2, 6: 3, 8: 4}
    assert dues(sf.Checkpoints(tmp_path, every_epochs=2), epochs=epochs) == [4, 8]
    assert dues(sf.Checkpoints(tmp_path, every=3, every_epochs=2), epochs=epochs) == [3, 4, 6, 8, 9]


def test_what_was_just_saved_is_not_due(tmp_path):
    with sf.Checkpoints(tmp_path, every=2, every_minutes=1e-9) as series:
        assert series.due(4)
        series.save(STATE, step=4)
        assert not series.due(4)
        assert series.due(6)


def test_minutes_are_counted_from_the_last_save(tmp_path, monkeypatch):
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with sf.Checkpoints(tmp_path, every_minutes=2) as series:
        assert not series.due(1)
        now[0] += 119
        assert not series.due(2)
        now[0] += 2
        assert series.due(3)
        assert series.due(4)
        series.save(STATE, step=4)
        assert not series.due(5)
        now[0] += 120
        assert series.due(6)
        assert not series.due(0)


def test_a_save_beside_an_open_series_lets_it_finish(tmp_path):
    may_commit = threading.Event()
    with sf.Checkpoints(tmp_path) as series:
        series.save(STATE, step=1, before_commit=lambda: may_commit.wait(60))
        sf.save(tmp_path, STATE, step=2)
        may_commit.set()
    assert sf.checkpoint.verify(tmp_path) == {1: [], 2: []}


def test_a_deletion_that_fails_is_an_error_of_checkpoints(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("busy")

    with sf.Checkpoints(tmp_path, keep=1) as series:
        series.save(STATE, step=1)
        series.wait()
        monkeypatch.setattr(shutil, "rmtree", fail)
        series.save(STATE, step=2)
        with pytest.raises(CheckpointError, match="/1: cannot be deleted: busy"):
            series.wait()


def test_what_is_measured_after_a_save_is_added_to_it(tmp_path):
    with sf.Checkpoints(tmp_path, best="eval/loss").open() as series:
        series.save(STATE, step=1, data={"at": 1}, metrics={"train/loss": 2.0}, extra={"n": 1})
        series.wait()
        series.add_later(1, metrics={"eval/loss": 0.5}, extra={"n": 2})
        series.save(STATE, step=2, metrics={"eval/loss": 0.75})
    found = sf.checkpoint.contents(tmp_path, step="best")
    assert (found.step, found.extra, found.data) == (1, {"n": 2}, {"at": 1})
    assert found.metrics == {"train/loss": 2.0, "eval/loss": 0.5}
    assert sf.checkpoint.verify(tmp_path) == {1: [], 2: []}
    check_same(sf.restore(tmp_path, STATE, step=1).state, STATE)


def test_nothing_is_added_to_a_step_that_is_not_there(tmp_path):
    with sf.Checkpoints(tmp_path).open() as series, pytest.raises(CheckpointError):
        series.add_later(1, metrics={}, extra=None)


# What is saved with a state


def words(state=None, step=1, data=None, metrics=None, extra=None):
    return step_metadata(state, step=step, data=data, metrics=metrics, extra=extra)


def save(series, step, **options):
    series.save({"w": np.full(2, step, np.float32)}, step=step, **options)


@pytest.mark.parametrize("name", ["every", "every_epochs", "keep", "keep_every", "keep_best"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "3"])
def test_counts_are_integers(name, value):
    with pytest.raises(ConfigError, match=f"^{name}: expected an integer of at least 1, got "):
        sf.Checkpoints("a", **{name: value})


@pytest.mark.parametrize("value", [0, -0.5, True, float("nan"), "5"])
def test_minutes_are_above_zero(value):
    message = f"every_minutes: expected a number above 0, got {value!r}"
    with pytest.raises(ConfigError, match=message):
        sf.Checkpoints("a", every_minutes=value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "min"}, "mode: expected best=… to go with it, got mode='min' alone"),
        ({"best": "a", "mode": "most"}, "mode: expected one of 'min', 'max', got 'most'"),
        ({"best": 3}, "best: expected the name of a metric, got 3"),
        ({"keep_best": None}, "keep_best: expected an integer of at least 1, got None"),
    ],
)
def test_a_best_is_a_metric_and_a_mode(options, words):
    with pytest.raises(ConfigError, match=words):
        sf.Checkpoints("a", **options)


def test_a_description_does_nothing(tmp_path):
    described = sf.Checkpoints(tmp_path / "a", every=3)
    assert not (tmp_path / "a").exists()
    with pytest.raises(dataclasses.FrozenInstanceError):
        described.every = 4
    assert described == sf.Checkpoints(tmp_path / "a", every=3)
    assert dataclasses.replace(described, every=4).every == 4


def test_a_directory_is_needed_and_its_own_comes_first(tmp_path):
    with pytest.raises(ConfigError, match="directory: expected a path, got None; give Checkpoints"):
        sf.Checkpoints().open()
    with sf.Checkpoints().open(tmp_path / "given") as series:
        assert series.directory == tmp_path / "given"
    with sf.Checkpoints(tmp_path / "own").open(tmp_path / "given") as series:
        assert series.directory == tmp_path / "own"


def test_what_is_kept_is_as_described(tmp_path):
    options = {"keep": 2, "keep_every": 4, "best": "bleu", "keep_best": 2}
    bleu = {1: 5.0, 2: 9.0, 3: 1.0, 5: float("nan"), 6: 7.0}
    with sf.Checkpoints(tmp_path, **options) as series:
        for step in range(1, 11):
            save(series, step, metrics={"bleu": bleu[step]} if step in bleu else None)
    assert list(sf.checkpoint.verify(tmp_path)) == [2, 4, 6, 8, 9, 10]
    assert sf.restore(tmp_path, {"w": jnp.zeros(2)}, step="best").step == 2


def test_a_restart_goes_on_with_what_was_kept(tmp_path):
    described = sf.Checkpoints(tmp_path, keep=1, best="eval/loss", keep_best=1)
    for numbers in ((1, 2, 3), (4, 5, 6)):
        with described as series:
            for step in numbers:
                save(series, step, metrics={"eval/loss": abs(step - 2) + 0.5})
    assert list(sf.checkpoint.verify(tmp_path)) == [2, 6]
    assert sf.restore(tmp_path, {"w": jnp.zeros(2)}, step="best").step == 2
    with sf.Checkpoints(tmp_path, keep=1, best="eval/loss", mode="max") as series:
        save(series, 7, metrics={"eval/loss": 0.0})
    assert list(sf.checkpoint.verify(tmp_path)) == [6, 7]


def test_a_step_of_which_files_are_missing_does_not_count_as_kept(tmp_path):
    described = sf.Checkpoints(tmp_path, keep=2)
    with described as series:
        save(series, 1)
        save(series, 2)
    (tmp_path / "2" / "state" / "_METADATA").unlink()
    with described as series:
        save(series, 3)
    assert [step for step, problems in sf.checkpoint.verify(tmp_path).items() if not problems] == [
        1,
        3,
    ]


def test_the_step_that_was_just_saved_is_kept_though_newer_ones_are_there(tmp_path):
    with sf.Checkpoints(tmp_path, keep=1) as series:
        save(series, 30)
        save(series, 11)
    assert 11 in sf.checkpoint.verify(tmp_path)


def test_requested_saves_are_kept_apart_from_scheduled_ones(tmp_path):
    policy = sf.Checkpoints(tmp_path, every=10, keep=2)

    def save_where_due(series, steps):
        for step in steps:
            if step > 20:
                series.request()
            if series.due(step):
                save(series, step)
        series.wait()

    with policy as series:
        save_where_due(series, range(1, 27))
        assert series.steps() == [10, 20, 25, 26]
    with policy as series:  # they are known after a restart
        save_where_due(series, [27])
        assert series.steps() == [10, 20, 26, 27]
        save_where_due(series, [30])  # a scheduled step, even if it is requested
        assert series.steps() == [20, 26, 27, 30]
        save(series, 31, kind="requested")
        series.wait()
        assert series.steps() == [20, 27, 30, 31]


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        ({"requested": True}, "save(kind='requested')", [1, 2, 3]),
        ({"permanent": True}, "save(kind='permanent')", [2, 3]),
        ({"requested": False}, "save()", [2, 3]),
    ],
)
def test_the_kind_of_a_save_had_other_arguments_in_0_2(tmp_path, old, new, kept):
    ((name, value),) = old.items()
    with sf.Checkpoints(tmp_path, keep=2) as series:
        with pytest.warns(DeprecationWarning, match="is now") as caught:
            series.save(STATE, step=1, **old)
        assert [str(each.message) for each in caught] == [f"save({name}={value}) is now {new}"]
        assert caught[0].filename == __file__
        save(series, 2)
        save(series, 3)
    assert series.steps() == kept


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kind": "kept"}, ConfigError, "^kind: expected one of 'permanent', 'requested', 'tempor"),
        (
            {"kind": "temporary"},
            ConfigError,
            r"^kind: expected Checkpoints\(temporary=…\) to go with it, got kind='temporary' alone",
        ),
        ({"keep": True}, TypeError, "unexpected keyword argument 'keep'"),
    ],
)
def test_an_unknown_kind_of_save_is_refused(tmp_path, options, error, message):
    with sf.Checkpoints(tmp_path) as series:
        with pytest.raises(error, match=message):
            series.save(STATE, step=1, **options)
        assert series.steps() == []


def test_the_kind_of_a_save_is_in_place_of_the_one_that_was_due(tmp_path):
    with sf.Checkpoints(tmp_path, every=10, keep=1) as series:
        save(series, 10)
        series.request()
        assert series.due(11)
        save(series, 11, kind="permanent")  # pushes step 10 out, unlike a requested one
    assert series.steps() == [11]


def test_a_requested_save_may_be_the_best(tmp_path):
    with sf.Checkpoints(tmp_path, every=10, keep=1, best="loss") as series:
        for step in (1, 2, 3):
            save(series, step, metrics={"loss": float(step)}, kind="requested")
        save(series, 10, metrics={"loss": 5.0})
    assert series.steps() == [1, 3, 10]


def test_the_best_is_known_after_a_save_without_a_series(tmp_path):
    with sf.Checkpoints(tmp_path, best="loss") as series:
        save(series, 1, metrics={"loss": 1.0})
    sf.save(tmp_path, {"w": jnp.zeros(2)}, step=2)
    assert sf.restore(tmp_path, {"w": jnp.zeros(2)}, step="best").step == 1


def test_nothing_is_ever_deleted_or_written_over(tmp_path):
    for step in range(4):  # more than a series keeps by default
        sf.save(tmp_path, {"w": np.full(2, step, np.float32)}, step=step)
    with pytest.raises(CheckpointError, match="step 3 already exists; delete it"):
        sf.save(tmp_path, {"w": jnp.zeros(2)}, step=3)
    assert list(sf.checkpoint.verify(tmp_path)) == [0, 1, 2, 3]
    check_same(sf.restore(tmp_path, {"w": jnp.zeros(2)}, step=3).state, {"w": jnp.full(2, 3.0)})


def test_a_bare_array_is_a_state(tmp_path):
    sf.save(tmp_path, jnp.arange(3), step=1)
    check_same(sf.restore(tmp_path, np.zeros(3, np.int32)).state, np.arange(3, dtype=np.int32))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(
            ({"step": step}, f"step: expected an integer of at least 0, got {got}")
            for step, got in (
                (-1, "-1"),
                (1.0, "1.0"),
                (True, "True"),
                ("latest", "'latest'"),
                (np.array([1]), r"array\(\[1\]\)"),
                (jnp.float32(1), r"Array\(1"),
            )
        ),
        (
            {"step": None},
            "step: expected a number, got none, and the state has no `step`; give step=",
        ),
        ({"extra": {"f": print}}, "extra/f: expected JSON or numpy arrays, got "),
        ({"data": {1: 2}}, "data: expected keys of text, got 1"),
        (
            {"data": {"at": jnp.ones(2)}},
            r"data/at: expected JSON or numpy arrays, got float32\[2\]",
        ),
        ({"metrics": [1]}, r"metrics: expected numbers by name, got list \[1\]"),
        ({"metrics": {"a": "0.5"}}, "metrics/a: expected a number, got str '0.5'"),
        ({"metrics": {"a": None}}, "metrics/a: expected a number, got NoneType None"),
        ({"metrics": {"a": jnp.ones(2)}}, r"metrics/a: expected a number, got float32\[2\]"),
        ({"metrics": {3: 1.0}}, "metrics: expected keys of text, got 3"),
    ],
)
def test_what_is_refused_leaves_nothing(tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        sf.save(tmp_path, {"w": jnp.ones(1)}, **{"step": 1, **options})
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_was_donated_is_refused(tmp_path):
    state = {"w": jnp.ones(3)}
    jax.jit(lambda state: state, donate_argnums=0)(state)
    with pytest.raises(ConfigError, match="^state/w, …: the arrays were donated to an earlier"):
        sf.save(tmp_path, state, step=0)


# Opened and not


def test_a_policy_reads_and_does_nothing_on_disk(tmp_path):
    policy = sf.Checkpoints(tmp_path / "a", every=3, every_minutes=1e-9, best="loss")
    assert dues(policy) == [3, 6, 9]
    assert (policy.steps(), policy.latest_step(), policy.best_step()) == ([], None, None)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", ["save", "add_later", "wait", "close", "delete_after"])
def test_a_policy_leads_to_the_open_series(tmp_path, name):
    policy = sf.Checkpoints(tmp_path)
    assert not hasattr(policy, name)
    with pytest.raises(sf.StepfoldError, match=f"^Checkpoints.{name} needs an open series; use "):
        getattr(policy, name)
    with pytest.raises(AttributeError, match="^'Checkpoints' object has no attribute 'sav'"):
        policy.sav  # noqa: B018


def test_opening_leaves_the_description_as_it_was(tmp_path):
    described = sf.Checkpoints(every=3, best="loss", keep_best=2)
    for run in ("a", "b"):
        with described.open(tmp_path / run) as series:
            assert isinstance(series, sf.checkpoint.Series)
            assert (series.policy, series.ranking) == (described, ("loss", "min"))
            series.save(STATE, step=3, metrics={"loss": 2.0})
            series.save(STATE, step=6, metrics={"loss": 3.0})
            assert (series.saved, series.directory) == (6, tmp_path / run)
        assert (series.steps(), series.latest_step(), series.best_step()) == ([3, 6], 6, 3)
        check_same(series.restore(STATE, step="best").state, STATE)
    assert described == sf.Checkpoints(every=3, best="loss", keep_best=2)


def test_a_policy_can_be_copied_while_it_is_open(tmp_path):
    policy = sf.Checkpoints(tmp_path, every=3)
    with policy as series:
        other = dataclasses.replace(policy, every=2)
        with pytest.raises(CheckpointError, match="no series is open"):
            other.request()
        assert not series.due(2)


@pytest.mark.parametrize("layout", [DirectoryStore, BucketStore])
def test_a_save_reads_as_few_manifests_as_the_first(tmp_path, monkeypatch, layout):
    reads = Counter()
    read = layout.read_metadata

    def count(store, step):
        reads[step] += 1
        return read(store, step)

    monkeypatch.setattr(layout, "read_metadata", count)
    url = tmp_path if layout is DirectoryStore else tmp_path.as_uri()
    with sf.Checkpoints(url, keep=1, keep_every=1, best="loss") as series:
        for step in range(1, 6):
            series.save(STATE, step=step)
    assert reads == dict.fromkeys(range(1, 6), 1)
    with sf.Checkpoints(url, keep=1, keep_every=1, best="loss") as series:
        for step in (6, 7):  # those of an earlier run are read once
            series.save(STATE, step=step)
    assert reads == dict.fromkeys(range(1, 6), 2) | {6: 1, 7: 1}


def test_retention_sees_what_changed_since_a_step_was_read(tmp_path):
    with sf.Checkpoints(tmp_path, keep=1, best="loss", async_=False) as series:
        for step, loss in ((1, 3.0), (2, 2.0), (3, 4.0)):
            series.save(STATE, step=step, metrics={"loss": loss})
        assert series.steps() == [2, 3]
        series.add_later(3, metrics={"loss": 1.0}, extra=None)
        series.save(STATE, step=4, metrics={"loss": 5.0})
        assert series.steps() == [3, 4]
        series.delete_after(3)
        series.save(STATE, step=4, metrics={"loss": 0.5})  # another step 4, the best
        series.save(STATE, step=5, metrics={"loss": 6.0})
        assert series.steps() == [4, 5]
