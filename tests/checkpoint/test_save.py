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
