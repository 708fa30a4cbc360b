import jax.numpy as jnp
import pytest

import stepfold as sf
from stepfold.adapter.compiling import ForOneForm, first_batch


def test_a_batch_of_another_form_goes_through_the_jitted_step():
    two = jnp.float32(2.0)
    step = ForOneForm(lambda state, batch: {"loss": sf.mean(state * batch)}, two, jnp.ones(4))
    assert "HloModule" in step.compiled.as_text()
    assert float(step(two, jnp.ones(4))["loss"].compute()) == 2.0
    assert float(step(two, jnp.ones(3))["loss"].count) == 3.0
    assert sf.evaluate(step, two, [jnp.ones(4), 3 * jnp.ones(1)]) == {"loss": 2.8}


def test_the_first_batch_is_looked_at_and_stays():
    resumable = sf.batches(jnp.arange(4), 2)
    again = [1, 2]
    once = iter([1, 2])
    for batches in (resumable, again, once):
        first, left = first_batch(batches, "dataloader_train")
        assert jnp.array_equal(next(iter(left)), first)


def test_no_batch_is_nothing_to_compile_for():
    with pytest.raises(sf.ConfigError, match="dataloader_train: expected a batch to compile for"):
        first_batch([], "dataloader_train")
