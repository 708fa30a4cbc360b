import contextlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.errors import CheckpointError, ConfigError

from .sameness import check_same


def test_a_state_is_on_the_disk_when_it_returns(tmp_path):
    state = sf.init_state({"w": jnp.ones(3)}, optax.adam(0.1), jax.random.key(0))
    sf.save(tmp_path / "runs" / "a", state, data={"step": 0}, extra={"lr": 0.1})
    assert [path.name for path in (tmp_path / "runs" / "a").iterdir()] == ["0"]
    check_same(sf.restore(str(tmp_path / "runs" / "a"), state).state, state)


def test_nothing_is_ever_deleted_or_written_over(tmp_path):
    for step in range(5):
        sf.save(tmp_path, {"w": jnp.full(2, step, jnp.float32)}, step=step)
    with pytest.raises(CheckpointError, match="expected a new step, got 3, which is there already"):
        sf.save(tmp_path, {"w": jnp.zeros(2)}, step=3)
    assert list(sf.verify(tmp_path)) == [0, 1, 2, 3, 4]
    check_same(sf.restore(tmp_path, {"w": jnp.zeros(2)}, step=3).state, {"w": jnp.full(2, 3.0)})


def test_an_older_step_may_be_saved_later(tmp_path):
    for step in (30, 11):
        sf.save(tmp_path, {"w": jnp.full(2, step, jnp.float32)}, step=step)
    assert list(sf.verify(tmp_path)) == [11, 30]


@pytest.mark.parametrize("name", ["lr=[1,2]", "a b%20c", "50% ä?#|*"])
def test_a_directory_may_have_any_name(tmp_path, name):
    state = {"params": {"w": jnp.arange(3)}}
    sf.save(tmp_path / name, state, step=1)
    check_same(sf.restore(tmp_path / name, state, fall_back=False).state, state)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_bare_array_is_a_state(tmp_path):
    sf.save(tmp_path, jnp.arange(3), step=1)
    check_same(sf.restore(tmp_path, np.zeros(3, np.int32)).state, np.arange(3, dtype=np.int32))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"step": -1}, "step: expected an integer of at least 0, got int -1"),
        ({}, "step: expected a number, since the state has no `step` of its own; give step="),
        ({"step": 1, "extra": {"f": print}}, "extra/f: expected what JSON can hold, got"),
        ({"step": 1, "data": {1: 2}}, "data: expected keys of text, got 1"),
        ({"step": 1, "metrics": {"a": "b"}}, "metrics/a: expected a number, got str 'b'"),
        ({"step": 1, "metrics": 3}, "metrics: expected numbers by name, got int 3"),
    ],
)
def test_what_is_refused_leaves_nothing(tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        sf.save(tmp_path, {"w": jnp.ones(1)}, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["latest", "3", None])
def test_text_is_no_step(tmp_path, step):
    with pytest.raises(ConfigError, match="step: expected"):
        sf.save(tmp_path, {"w": jnp.ones(1)}, step=step)


def test_numbers_in_another_order_of_bytes_come_back(tmp_path):
    state = {"w": np.arange(4, dtype=">f4")}
    sf.save(tmp_path, state, step=1)
    assert sf.verify(tmp_path) == {1: []}
    assert sf.restore(tmp_path, state).state["w"].tolist() == [0, 1, 2, 3]


def test_a_name_may_go_on_where_another_ends(tmp_path):
    state = {"a": jnp.ones(1), "a/b": jnp.zeros(1)}
    with contextlib.suppress(ConfigError):  # either is good: to keep it, or to refuse it in words
        sf.save(tmp_path, state, step=1)
        check_same(sf.restore(tmp_path, state).state, state)


UNSTORED = {
    "uint4": np.zeros(2, jnp.uint4),
    "longdouble": np.zeros(2, np.longdouble),
    "records": np.zeros(2, [("a", "i4")]),
    "large": 1 << 70,
}


@pytest.mark.parametrize("name", UNSTORED)
def test_what_cannot_be_stored_is_refused_with_its_path(tmp_path, name):
    with pytest.raises(ConfigError, match="a/w: expected "):
        sf.save(tmp_path, {"a": {"w": UNSTORED[name]}, "b": jnp.ones(1)}, step=1)


@pytest.mark.parametrize("state", [{}, {"a": jnp.zeros((0, 3))}])
def test_a_state_of_nothing_is_saved_or_refused_in_words(tmp_path, state):
    with contextlib.suppress(ConfigError):  # either is good, and orbax's "empty item" is neither
        sf.save(tmp_path, state, step=1)
        check_same(sf.restore(tmp_path, state).state, state)


def test_a_bucket_spelled_as_a_path_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="expected a path on a file system"):
        sf.save(Path("gs://bucket/run"), {"w": jnp.ones(1)}, step=1)
    assert list(tmp_path.iterdir()) == []


def test_text_is_no_metric(tmp_path):
    with pytest.raises(ConfigError, match="metrics/a: expected a number, got str '0.5'"):
        sf.save(tmp_path, {"w": jnp.ones(1)}, step=1, metrics={"a": "0.5"})


def test_a_state_that_was_donated_is_refused(tmp_path):
    state = {"w": jnp.ones(3)}
    jax.jit(lambda state: state, donate_argnums=0)(state)
    with pytest.raises(ConfigError, match="w, …: the arrays were donated to an earlier call and"):
        sf.save(tmp_path, state, step=0)
