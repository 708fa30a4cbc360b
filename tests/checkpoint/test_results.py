"""Results of evaluations next to the steps, in a directory and in a bucket."""

import errno
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf
from stepfold.checkpoint.results import (
    FOLDER,
    Result,
    add_result,
    drop_results,
    find_results,
    read_result,
)
from stepfold.checkpoint.store import open_store


@pytest.fixture(params=["directory", "file", "s3"])
def location(request, tmp_path):
    """Give a directory, the URL of one, and that of a bucket."""
    if request.param == "s3":
        return request.getfixturevalue("server").url(tmp_path.name)
    return f"{'file://' * (request.param == 'file')}{tmp_path}/run"


def save(location, step, value):
    sf.save(location, {"w": jnp.full(2, value)}, step=step)
    return open_store(location).read_metadata(step).identity


def test_a_result_is_written_once_and_read_with_its_bits(location):
    store = open_store(location, save=True)
    result = Result("a/b-1 é", 20, "0" * 16)
    metrics = {"x": 1 / 3, "y": float("nan"), "z": float("inf")}
    assert add_result(store, result, metrics)
    assert not add_result(store, result, {"x": 0.0})
    assert find_results(store) == [result]
    np.testing.assert_equal(read_result(store, result), metrics)
    assert add_result(store, result._replace(step=3), {})
    assert [each.step for each in find_results(store)] == [3, 20]
    assert store.steps() == []
    drop_results(store)
    assert find_results(store) == []
    assert read_result(store, result) is None


def test_of_several_writers_one_wins(location):
    stores = [open_store(location, save=True) for _ in range(4)]
    result, won = Result("eval", 1, "0" * 16), []

    def write(number):
        if add_result(stores[number], result, {"number": number}):
            won.append(number)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert read_result(stores[0], result) == {"number": won[0]}
    assert len(stores[0].list_notes(FOLDER)) == 1


def test_a_file_system_without_links_has_results_too(tmp_path, monkeypatch):
    def no_links(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", no_links)
    store, result = open_store(tmp_path), Result("eval", 1, "0" * 16)
    assert add_result(store, result, {"x": 1.0})
    assert not add_result(store, result, {"x": 2.0})
    assert read_result(store, result) == {"x": 1.0}
    assert len([*(tmp_path / FOLDER).iterdir()]) == 1


def test_a_result_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.link", full)
    with pytest.raises(
        sf.errors.CheckpointError, match="cannot be written: No space left on device"
    ):
        add_result(open_store(tmp_path), Result("eval", 1, "0" * 16), {})


def test_equal_states_have_equal_identities(location):
    first = save(location, 1, 1.0)
    assert save(location, 2, 1.0) == first
    assert save(location, 3, 2.0) != first


def test_results_of_other_states_do_not_rank(location):
    """As after a run went back, and came to the same step with other values."""
    store = open_store(location, save=True)
    for step, value in ((1, 1.0), (2, 2.0)):
        identity = save(location, step, value)
        add_result(store, Result("eval", step, identity), {"eval/loss": value})
    add_result(store, Result("eval", 2, "0" * 16), {"eval/loss": 0.0})
    assert sf.Checkpoints(location, best="eval/loss").best_step() == 1
    like = {"w": jnp.zeros(2)}
    restored = sf.restore(location, like, step="best", best=("eval/loss", "max"))
    assert restored.step == 2


def test_a_step_that_awaits_an_evaluation_is_kept_until_it_was_read(location):
    with sf.Checkpoints(location, keep=1, async_=False) as series:
        for step in (1, 2, 3):
            series.save({"w": jnp.ones(2)}, step=step, awaits=["eval"] if step < 3 else [])
        assert series.steps() == [1, 2, 3]
        series.evaluated = {"eval": 1}
        series.save({"w": jnp.ones(2)}, step=4)
        assert series.steps() == [2, 4]
    with sf.Checkpoints(location, keep=1, async_=False) as series:
        series.save({"w": jnp.ones(2)}, step=5)
        assert series.steps() == [2, 5]
        series.evaluated = {}  # no remote evaluation any more
        series.save({"w": jnp.ones(2)}, step=6)
        assert series.steps() == [6]


def test_only_steps_that_await_an_evaluation_need_a_newer_stepfold(tmp_path):
    with sf.Checkpoints(tmp_path) as series:
        series.save({"w": jnp.ones(2)}, step=1)
        series.save({"w": jnp.ones(2)}, step=2, awaits=["eval"])
    texts = [(tmp_path / f"{step}/state/leaves-0.json").read_text() for step in (1, 2)]
    assert ["awaits" in text for text in texts] == [False, True]
    assert not any("identity" in text for text in texts)
