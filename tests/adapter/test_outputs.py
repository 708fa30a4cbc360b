import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.adapter import (
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
    TrainerOutput,
)


def test_arrays_are_branches_and_all_else_is_structure(key):
    state = sf.init_state({"w": jnp.ones(3)}, optax.adam(0.1), key)
    made = TrainerOutput(state, sf.make_mesh(), "10", "runs/10")
    assert len(jax.tree.leaves(made)) == len(jax.tree.leaves(state))
    doubled = jax.jit(
        lambda made: made.replace(state=made.state._replace(step=made.state.step + 1))
    )
    again = doubled(made)
    assert (int(again.state.step), again.mesh, again.checkpoint_path) == (1, made.mesh, "runs/10")
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(made)]
    assert names[0] == ".state.step"


def test_a_model_that_is_a_function_does_not_keep_it_from_jit():
    made = TrainerConfigureModelOutput(lambda key: key, optax.sgd(0.1), state={"w": jnp.ones(2)})
    assert jax.jit(lambda made: made)(made).model is made.model


def test_steps_have_two_names():
    made = TrainerConfigureFunctionOutput(max, None, None, min)
    assert (made.train_step_fn, made.eval_step_fn) == (max, min)
    assert TrainerConfigureFunctionOutput(train_step_fn=max).sharded_training_step_function is max
    with pytest.raises(sf.ConfigError, match="train_step_fn: it is the same field by its short"):
        TrainerConfigureFunctionOutput(max, train_step_fn=min)
    with pytest.raises(sf.ConfigError, match=r"expected a step \(state, batch\) -> .* got None"):
        TrainerConfigureFunctionOutput()


def test_an_unknown_field_is_refused():
    made = TrainerConfigureDataloaderOutput([1])
    with pytest.raises(sf.ConfigError, match="no 'dataloader_tran'; did you mean 'dataloader_trai"):
        made.replace(dataloader_tran=[2])
    with pytest.raises(sf.ConfigError, match="TrainerOutput: there is no 'model'; there are state"):
        TrainerOutput.from_dict({"model": 1})


def test_json_holds_arrays_bit_for_bit(key):
    tx = optax.adam(optax.linear_schedule(1.0, 0.0, 10))
    params = {"w": jnp.full((2, 3), 1 / 3, jnp.bfloat16), "b": jnp.array([jnp.nan, -0.0])}
    made = TrainerOutput(sf.init_state(params, tx, key), sf.make_mesh())
    again = TrainerOutput.from_json(made.to_json(indent=2))
    assert jax.tree.structure(again) == jax.tree.structure(made)
    pairs = zip(jax.tree.leaves(again), jax.tree.leaves(made), strict=True)
    for one, other in pairs:
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert (one.dtype, np.asarray(one).tobytes()) == (other.dtype, np.asarray(other).tobytes())
