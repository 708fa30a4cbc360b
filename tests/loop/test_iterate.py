import itertools

import jax.numpy as jnp
import pytest

import stepfold as sf


def step(state, batch):
    return state + batch, {"seen": sf.mean(batch)}


def test_it_gives_state_and_metrics_after_each_batch():
    found = [
        (float(state), float(metrics["seen"].compute()))
        for state, metrics in sf.iterate(step, jnp.float32(0), [jnp.float32(1), jnp.float32(2)])
    ]
    assert found == [(1.0, 1.0), (3.0, 2.0)]


def test_it_pulls_no_batch_before_it_is_asked_to():
    pulled = []
    batches = (pulled.append(i) or jnp.float32(i) for i in itertools.count())
    fold = sf.iterate(step, jnp.float32(0), batches)
    assert pulled == []
    next(fold)
    assert pulled == [0]


def test_without_batches_it_gives_nothing():
    assert list(sf.iterate(step, jnp.float32(0), [])) == []


def test_an_error_of_the_step_or_of_the_data_comes_through():
    def broken():
        yield jnp.float32(1)
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(sf.iterate(step, jnp.float32(0), broken()))
