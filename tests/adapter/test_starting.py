import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.adapter.starting import check_model, first_state, is_state, placed, weights_from

from . import digits

pytestmark = pytest.mark.usefixtures("compiled_once")

TX = optax.adam(optax.linear_schedule(0.1, 0.0, 100))
CAST = lambda params: params


def begin(model=None, given=None, tx=TX, **options):
    usual = {"seed": 0, "plan": lambda shape: None, "cast": CAST}
    return first_state(model, given, tx, **usual | options)


def trained():
    state = begin(digits.init)
    moments = jax.tree.map(jnp.ones_like, state.opt_state)
    return state._replace(step=jnp.int32(7), opt_state=moments)


def test_what_is_a_state():
    assert is_state(trained())
    assert not is_state({"params": 1, "step": 2})
    assert not is_state(digits.TEST)


def test_an_init_function_is_called_with_the_seeds_key():
    wanted = sf.init_state(digits.init, TX, jax.random.key(3))
    assert digits.bits(begin(digits.init, seed=3)) == digits.bits(wanted)


def test_parameters_are_copied():
    params = digits.init(jax.random.key(0))
    state = begin(given=params)
    assert digits.bits(state.params) == digits.bits(params)
    jax.jit(lambda state: state, donate_argnums=0)(state)
    assert not params["kernel"].is_deleted()


def test_a_state_goes_on_with_its_optimizer_where_that_fits():
    state = trained()
    assert digits.bits(begin(given=state)) == digits.bits(state)
    other = begin(given=state, tx=optax.sgd(0.1))
    assert digits.bits(other.params) == digits.bits(state.params)
    assert int(other.step) == 7
    with pytest.raises(sf.TreeMismatchError, match="init_tx=False: expected a model_state whose"):
        begin(given=state, tx=optax.sgd(0.1), init_tx=False)


def test_a_new_state_begins_where_it_is_told_to_and_its_schedule_too():
    state = begin(digits.init, step=40)
    assert int(state.step) == int(state.opt_state[1].count) == 40
    assert int(state.opt_state[0].count) == 0


def test_parameters_are_cast_whoever_makes_them():
    half = lambda params: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    for options in ({"model": digits.init}, {"given": digits.init(jax.random.key(0))}):
        assert begin(**options, cast=half).params["bias"].dtype == jnp.bfloat16
    stateful = begin(lambda key: (jnp.ones(2), jnp.zeros(3)), cast=half, stateful=True)
    assert (stateful.params.dtype, stateful.model_state.dtype) == (jnp.bfloat16, jnp.float32)


def test_it_is_born_where_it_is_planned():
    mesh = sf.make_mesh()
    plan = lambda shape: sf.make_sharding(shape, mesh, sf.fsdp(min_size=1))
    for options in ({"model": digits.init}, {"given": trained()}):
        kernel = begin(**options, plan=plan).params["kernel"]
        assert len({str(shard.index) for shard in kernel.addressable_shards}) == 8


def test_a_copy_is_strong_and_shares_nothing():
    state = {"step": 0, "w": np.ones(2)}
    copy = placed(jax.tree.map(jnp.asarray, state), None)
    assert not copy["step"].weak_type


def test_what_no_state_can_be_made_of_is_refused():
    with pytest.raises(sf.ConfigError, match="model, model_state: expected a function key -> para"):
        check_model(None, None, finetune=True)
    with pytest.raises(sf.ConfigError, match="finetune=False draws parameters anew"):
        check_model(None, {"w": 1}, finetune=False)
    with pytest.raises(sf.ConfigError, match="model: Dense makes its parameters of an example"):
        check_model(linen.Dense(3), None, finetune=True)
    check_model(linen.Dense(3), {"w": 1}, finetune=True)
    check_model(eqx.nn.Linear(2, 3, key=jax.random.key(0)), None, finetune=True)


def test_weights_come_from_safetensors_or_from_a_checkpoint(tmp_path):
    state = trained()
    fresh = begin(digits.init, seed=1)
    sf.export_params(tmp_path / "w.safetensors", state.params)
    sf.save(tmp_path / "run" / "checkpoints", state)
    for path in (tmp_path / "w.safetensors", tmp_path / "run", tmp_path / "run/checkpoints/7"):
        found = weights_from(path, fresh)
        assert digits.bits(found.state.params) == digits.bits(state.params)
        assert digits.bits(found.state.opt_state) == digits.bits(fresh.opt_state)
        assert found.loaded == ["params/bias", "params/kernel"]
    with pytest.raises(sf.TreeMismatchError, match="none that fits"):
        weights_from(tmp_path / "run", begin(lambda key: {"other": jnp.ones(3)}))
