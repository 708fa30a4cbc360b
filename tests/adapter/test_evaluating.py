import jax.numpy as jnp
import numpy as np
import pytest

import stepfold as sf
from stepfold.adapter.evaluating import measure, measure_each, whole_if_uneven


def step(state, batch):
    return {"loss": sf.mean(batch * state)}


BATCHES = [np.ones(3, np.float32), 3 * np.ones(1, np.float32)]


def test_what_is_measured_is_exact_over_uneven_batches():
    assert measure(step, 2.0, BATCHES) == {"eval_loss": 3.0}
    assert list(measure_each(step, 2.0, BATCHES)) == [{"eval_loss": 2.0}, {"eval_loss": 6.0}]


def test_a_function_of_state_and_batch_is_merged_as_the_step_is():
    found = measure(step, 2.0, BATCHES, lambda state, batch: {"mean": jnp.mean(batch)})
    assert found == {"eval_loss": 3.0, "eval_mean": 1.5}


def test_a_function_of_what_was_measured_adds_to_it():
    found = measure(step, 2.0, BATCHES, lambda found: {"half": found["eval_loss"] / 2})
    assert found == {"eval_loss": 3.0, "half": 1.5}
    with pytest.raises(sf.ConfigError, match="metric_calculator: expected numbers by name"):
        measure(step, 2.0, BATCHES, lambda found: None)
    with pytest.raises(sf.ConfigError, match=r"expected a function \(state, batch\) -> metrics"):
        measure(step, 2.0, BATCHES, 3)


def test_a_batch_that_does_not_divide_is_whole_on_every_device():
    mesh = sf.make_mesh()
    assert whole_if_uneven({"x": np.ones(16)}, mesh)["x"].__class__ is np.ndarray
    whole = whole_if_uneven({"x": np.ones(3)}, mesh)["x"]
    assert whole.sharding.is_fully_replicated
    assert len(whole.sharding.device_set) == 8
