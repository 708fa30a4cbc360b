import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.checkpoint import manifest, steps
from stepfold.checkpoint.series import Series, words_of
from stepfold.errors import CheckpointError, ConfigError

from .sameness import check_same

STATE = {"w": jnp.arange(3.0)}


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


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def ended(series):
    """Let a save in the background come to its end without hearing of it."""
    series._thread.join()


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
    assert sf.verify(tmp_path) == ({} if name == "close" else {1: [], 2: []})


def test_a_failure_leaves_the_block(tmp_path, fails):
    with (
        pytest.raises(CheckpointError, match="1: not saved"),
        sf.Checkpoints(tmp_path) as series,
    ):
        series.save(STATE, step=1)


def test_a_failure_in_the_foreground_is_raised_at_once(tmp_path, fails):
    with sf.Checkpoints(tmp_path, async_=False) as series:
        with pytest.raises(CheckpointError, match="1: not saved"):
            series.save(STATE, step=1)
        fails.clear()
        series.save(STATE, step=1)
        assert sf.verify(tmp_path) == {1: []}


def test_what_cannot_be_saved_leaves_the_series_as_it_was(tmp_path):
    with sf.Checkpoints(tmp_path) as series:
        series.save(STATE, step=1)
        with pytest.raises(ConfigError, match="f: expected an array"):
            series.save({"f": print}, step=2)
        with pytest.raises(ConfigError, match="step: expected an integer"):
            series.save(STATE, step=-1)
        series.save(STATE, step=2)
    assert sf.verify(tmp_path) == {1: [], 2: []}


def test_a_step_that_is_there_is_refused(tmp_path):
    with sf.Checkpoints(tmp_path) as series:
        series.save(STATE, step=3)
        with pytest.raises(CheckpointError, match="expected a new step, got 3, which is there al"):
            series.save({"w": jnp.zeros(3)}, step=3)
    check_same(sf.restore(tmp_path, STATE).state, STATE)


def test_a_closed_series_refuses(tmp_path):
    series = sf.Checkpoints(tmp_path).open()
    series.close()
    series.close()
    with pytest.raises(CheckpointError, match="expected an open series, got a closed one"):
        series.save(STATE, step=1)
    series.wait()
    assert names(tmp_path) == []


def leave_by_an_error(block, step):
    with block as series:
        series.save(STATE, step=step)
        assert sf.latest_step(series.directory) != step
        raise KeyError("mine")


def test_the_last_save_is_there_when_a_block_is_left_by_an_error(tmp_path, monkeypatch):
    written = manifest.write_leaves
    monkeypatch.setattr(manifest, "write_leaves", lambda *args: (time.sleep(0.3), written(*args)))
    with pytest.raises(KeyError, match="mine"):
        leave_by_an_error(sf.Checkpoints(tmp_path), step=1)
    assert sf.verify(tmp_path) == {1: []}
    with pytest.raises(KeyError, match="mine"):
        leave_by_an_error(Series(tmp_path), step=2)
    assert sf.verify(tmp_path) == {1: [], 2: []}


def test_a_restore_waits_for_what_is_being_saved(tmp_path):
    with sf.Checkpoints(tmp_path) as series:
        series.save(STATE, step=1, metrics={"loss": 1.0})
        found = series.restore({"w": jnp.zeros(3)}, step="best", best="loss")
    check_same(found.state, STATE)


def test_what_was_left_over_is_cleaned_up_upon_opening(tmp_path):
    others = ["07", "7", "7.damaged", "best", "notes"]
    for name in ("7.orbax-checkpoint-tmp", "7.deleted", "7.deleted-2", *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    (tmp_path / "notes.txt").write_text("")
    sf.Checkpoints(tmp_path).open().close()
    assert names(tmp_path) == sorted([*others, "notes.txt"])


def test_the_best_is_told_after_opening_again(tmp_path):
    described = sf.Checkpoints(tmp_path, keep=1, best="bleu", keep_best=2)
    for step, bleu in {1: 3.0, 2: 9.0, 3: 5.0, 4: 1.0}.items():
        with described as series:
            series.save({"w": jnp.full(3, bleu)}, step=step, metrics={"bleu": bleu})
    assert list(sf.verify(tmp_path)) == [2, 3, 4]
    with described as series:
        assert series.restore(STATE, step="best").step == 2
    (tmp_path / "2" / "state" / "_METADATA").unlink()
    with pytest.warns(RuntimeWarning, match="step 2 is damaged"):
        assert sf.restore(tmp_path, STATE, step="best").step == 3


def test_the_best_falls_back_on_the_next_best(tmp_path):
    with sf.Checkpoints(tmp_path, keep=None, best="loss") as series:
        for step, loss in {1: 2.0, 2: 1.0, 3: 3.0}.items():
            series.save(STATE, step=step, metrics={"loss": loss})
    shutil.rmtree(tmp_path / "2" / "state" / "d")
    (tmp_path / "2" / "state" / "d").mkdir()
    with pytest.warns(RuntimeWarning, match="step 2 is damaged"):
        assert sf.restore(tmp_path, STATE, step="best").step == 1


def dues(series, steps=range(10), epochs=None):
    return [step for step in steps if series.due(step, epoch=(epochs or {}).get(step))]


def test_when_one_is_due(tmp_path):
    assert dues(Series(tmp_path)) == []
    assert dues(Series(tmp_path, every=3)) == [3, 6, 9]
    epochs = {2: 1, 4: 2, 6: 3, 8: 4}
    assert dues(Series(tmp_path, every_epochs=2), epochs=epochs) == [4, 8]
    assert dues(Series(tmp_path, every=3, every_epochs=2), epochs=epochs) == [3, 4, 6, 8, 9]


def test_what_was_just_saved_is_not_due(tmp_path):
    with Series(tmp_path, every=2, every_minutes=1e-9) as series:
        assert series.due(4)
        series.save(STATE, step=4)
        assert not series.due(4)
        assert series.due(6)


def test_minutes_are_counted_from_the_last_save(tmp_path, monkeypatch):
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Series(tmp_path, every_minutes=2) as series:
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


def test_no_thread_is_left(tmp_path):
    before = set(threading.enumerate())
    with sf.Checkpoints(tmp_path) as series:
        series.save(STATE, step=1)
    left = {one.name for one in set(threading.enumerate()) - before}
    assert not {name for name in left if "stepfold" in name}


def test_a_save_beside_an_open_series_lets_it_finish(tmp_path, monkeypatch):
    written = manifest.write_leaves
    monkeypatch.setattr(manifest, "write_leaves", lambda *args: (time.sleep(0.3), written(*args)))
    with sf.Checkpoints(tmp_path) as series:
        series.save(STATE, step=1)
        sf.save(tmp_path, STATE, step=2)
    assert sf.verify(tmp_path) == {1: [], 2: []}


def test_a_directory_that_became_none_is_told_as_a_failed_save(tmp_path):
    series = sf.Checkpoints(tmp_path / "a").open()
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "a").write_text("")
    with pytest.raises(CheckpointError, match="a/1: not saved: "):
        series.save(STATE, step=1)
    series.close()


def test_a_deletion_that_fails_is_an_error_of_checkpoints(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("busy")

    with sf.Checkpoints(tmp_path, keep=1) as series:
        series.save(STATE, step=1)
        series.wait()
        monkeypatch.setattr(steps, "delete", fail)
        series.save(STATE, step=2)
        with pytest.raises(CheckpointError, match="1.*busy"):
            series.wait()


def test_what_is_measured_after_a_save_is_added_to_it(tmp_path):
    with sf.Checkpoints(tmp_path, best="eval/loss").open() as series:
        series.save(STATE, step=1, data={"at": 1}, metrics={"train/loss": 2.0}, extra={"n": 1})
        series.wait()
        series.add_later(1, metrics={"eval/loss": 0.5}, extra={"n": 2})
        series.save(STATE, step=2, metrics={"eval/loss": 0.75})
    found = sf.contents(tmp_path, step="best")
    assert (found.step, found.extra, found.data) == (1, {"n": 2}, {"at": 1})
    assert found.metrics == {"train/loss": 2.0, "eval/loss": 0.5}
    assert sf.verify(tmp_path) == {1: [], 2: []}
    check_same(sf.restore(tmp_path, STATE, step=1).state, STATE)


def test_nothing_is_added_to_a_step_that_is_not_there(tmp_path):
    with sf.Checkpoints(tmp_path).open() as series, pytest.raises(CheckpointError):
        series.add_later(1, metrics={}, extra=None)


def test_what_was_added_and_damaged_is_never_taken(tmp_path):
    with sf.Checkpoints(tmp_path).open() as series:
        series.save(STATE, step=1, metrics={"loss": 1.0})
        series.wait()
        series.add_later(1, metrics={"loss": 2.0}, extra=None)
    path = tmp_path / "1" / manifest.STATE / "later.json"
    path.write_bytes(path.read_bytes().replace(b"2.0", b"3.0"))
    (problems,) = sf.verify(tmp_path).values()
    assert "later.json" in problems[0]


# What is saved with a state


def words(state=None, step=1, data=None, metrics=None, extra=None):
    return words_of(state, step=step, data=data, metrics=metrics, extra=extra)


@pytest.mark.parametrize("step", [4, np.int64(4), np.uint8(4), jnp.int32(4), jnp.array(4)])
def test_a_step_is_any_integer(step):
    made = words(step=step)
    assert made.step == 4
    assert type(made.step) is int


def test_a_state_knows_its_step():
    state = sf.init_state(jnp.ones(2), optax.sgd(0.1), jax.random.key(0))
    assert words(state, step=None).step == 0
    assert words(state._replace(step=jnp.array(7)), step=None).step == 7
    assert words(state, step=3).step == 3


@pytest.mark.parametrize(
    ("step", "got"),
    [
        (-1, "int -1"),
        (1.0, "float 1.0"),
        (True, "bool True"),
        (np.array([1]), r"int64\[1\]"),
        (jnp.float32(1), r"float32\[\]"),
    ],
)
def test_what_is_no_step_is_refused(step, got):
    with pytest.raises(ConfigError, match=f"step: expected an integer of at least 0, got {got}"):
        words(step=step)


def test_a_step_has_to_come_from_somewhere():
    with pytest.raises(ConfigError, match="step: expected a number, since the state .* give step="):
        words({"step": 3}, step=None)


def test_a_position_is_asked_for():
    batches = sf.batches(np.arange(10), 2, seed=0)
    next(batches)
    assert words(data=batches).data == batches.get_state()
    assert words(data={"step": 1}).data == {"step": 1}
    with pytest.raises(ConfigError, match=r"data/at: expected what JSON can hold, got int64\[2\]"):
        words(data={"at": np.arange(2)})


def test_metrics_are_numbers():
    made = words(metrics={"a": 1, "b": jnp.float32(0.5), "c": np.float64(2), "d": True})
    assert made.metrics == {"a": 1.0, "b": 0.5, "c": 2.0, "d": 1.0}
    assert words().metrics == {}


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ([1], r"metrics: expected numbers by name, got list \[1\]"),
        ({"a": "much"}, "metrics/a: expected a number, got str 'much'"),
        ({"a": None}, "metrics/a: expected a number, got NoneType None"),
        ({"a": jnp.ones(2)}, r"metrics/a: expected a number, got float32\[2\]"),
        ({3: 1.0}, "metrics: expected keys of text, got 3"),
    ],
)
def test_what_is_no_metric_is_refused(metrics, told):
    with pytest.raises(ConfigError, match=told):
        words(metrics=metrics)


def test_what_is_extra_is_json():
    assert words(extra={"a": (1, b"x")}).extra == {"a": [1, {"bytes in base64": "eA=="}]}
    with pytest.raises(ConfigError, match="extra/f: expected what JSON can hold, got "):
        words(extra={"f": print})
