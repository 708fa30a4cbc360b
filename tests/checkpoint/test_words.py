import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.checkpoint.words import words_of
from stepfold.errors import ConfigError


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
