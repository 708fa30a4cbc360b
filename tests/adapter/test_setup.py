"""The state and the checkpoint that a trainer starts from."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import stepfold as sf
from stepfold.adapter import TrainingArguments
from stepfold.adapter.setup import (
    find_checkpoint,
    first_state,
    load_weights,
)

from . import digits

FOLDER = "checkpoints"
TX = optax.adam(optax.linear_schedule(0.1, 0.0, 100))


def begin(model=None, given=None, tx=TX, fields=(), **options):
    arguments = TrainingArguments(**{"seed": 0, "max_steps": 100, **dict(fields)})
    devices = options.pop("devices", None)
    parts = digits.parts(arguments, devices, **options)
    return first_state(parts, model, given, tx)


def trained():
    state = begin(digits.init)
    moments = jax.tree.map(jnp.ones_like, state.opt_state)
    return state._replace(step=jnp.int32(7), opt_state=moments)


def test_a_state_keeps_its_optimizer_state_if_that_fits():
    state = trained()
    assert digits.bits(begin(given=state)) == digits.bits(state)
    other = begin(given=state, tx=optax.sgd(0.1))
    assert digits.bits(other.params) == digits.bits(state.params)
    assert int(other.step) == 7
    with pytest.raises(
        sf.errors.TreeMismatchError, match="init_tx=False: expected a model_state whose"
    ):
        begin(given=state, tx=optax.sgd(0.1), fields={"init_tx": False})


def test_parameters_are_cast_wherever_they_come_from():
    half = {"param_dtype": "bf16"}
    for options in ({"model": digits.init}, {"given": digits.init(jax.random.key(0))}):
        assert begin(**options, fields=half).params["bias"].dtype == jnp.bfloat16
    both = lambda key: (jnp.ones(2), jnp.zeros(3))
    stateful = begin(both, fields=half, stateful=True)
    assert (stateful.params.dtype, stateful.model_state.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.full
def test_weights_are_loaded_into_a_state_of_flax(tmp_path):
    params = digits.init(jax.random.key(0))
    flax_state = TrainState.create(
        apply_fn=None, params=jax.tree.map(jnp.zeros_like, params), tx=optax.sgd(np.float32(0.1))
    )
    sf.checkpoint.export_params(tmp_path / "w.safetensors", params)
    sf.save(tmp_path / "run", sf.init_state(params, TX, jax.random.key(0)))
    for path in (tmp_path / "w.safetensors", tmp_path / "run"):
        new, *_ = load_weights(path, flax_state, FOLDER)
        assert digits.bits(new.params) == digits.bits(params)
        assert type(new) is TrainState


def test_a_checkpoint_is_found_by_its_run_its_folder_or_itself(tmp_path):
    sf.save(tmp_path / "checkpoints", {"w": jnp.ones(1)}, step=7)
    folder = tmp_path / "checkpoints"
    assert find_checkpoint(tmp_path, FOLDER) == (str(folder), None)
    assert find_checkpoint(str(folder), FOLDER) == (str(folder), None)
    assert find_checkpoint(folder / "7", FOLDER) == (str(folder), 7)
    (folder / "²").mkdir()  # a digit, but no number
    for wrong in (folder / "8", folder / "²", tmp_path / "nowhere"):
        with pytest.raises(
            sf.errors.CheckpointError, match="expected a checkpoint, a folder of them"
        ):
            find_checkpoint(wrong, FOLDER)


@pytest.mark.parametrize("path", [5, None, " "])
def test_what_is_not_a_path_is_refused(path):
    with pytest.raises(
        sf.errors.ConfigError, match=f"checkpoint: expected a path, got {path!r}; give"
    ):
        find_checkpoint(path, FOLDER)
