import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import freeze

import stepfold as sf
from stepfold.adapter.counting import count_parameters, total_flops


@pytest.mark.parametrize(
    ("params", "count"),
    [
        ({"w": np.ones((2, 3)), "b": jnp.ones(())}, 7),
        (freeze({"w": jnp.ones((2, 3))}), 6),
        (eqx.nn.Linear(2, 3, key=jax.random.key(0)), 9),
        ((jnp.ones(2), jax.random.key(0), "name", None), 2),
        ({}, 0),
    ],
)
def test_parameters_of_any_tree_are_counted(params, count):
    assert count_parameters(params) == count


def test_a_compiled_step_is_counted_over_all_its_devices():
    mesh = sf.make_mesh()
    batch = sf.shard_batch(jnp.ones((16, 4)), mesh)
    compiled = jax.jit(lambda batch, w: batch @ w).lower(batch, jnp.ones((4, 5))).compile()
    assert total_flops({}, 16, compiled) == 2 * 16 * 4 * 5


def test_an_estimate_tells_training_from_inference():
    params = {"w": jnp.ones(10)}
    assert total_flops(params, 3) == 3 * total_flops(params, 3, training=False) == 180
