"""The loss function as the arguments want it."""

import jax
import jax.numpy as jnp
import optax
import pytest

import stepfold as sf
from stepfold.adapter import TrainingArguments, make_loss


def terms(params, batch, key, scale=1.0):
    return {"ce": params.sum() * scale, "aux_router": params.sum() * 10}, {"hits": sf.mean(params)}


def of(loss_fn=terms, mesh=None, **fields):
    return make_loss(TrainingArguments(**fields), loss_fn, mesh)


def test_a_configuration_is_given_by_keyword():
    said, metrics = of(loss_config={"scale": 3.0})(jnp.ones(2), None, None)
    assert float(said["ce"]) == 6.0
    assert metrics.keys() == {"hits"}
    with pytest.raises(sf.ConfigError, match="loss_config: expected keywords of terms, got smooth"):
        of(loss_config={"smooth": 3.0})
    with pytest.raises(sf.ConfigError, match="loss_fn: expected a loss function, got int 3"):
        of(3)


def test_auxiliary_terms_are_left_out():
    tx = optax.sgd(0.1)
    state = sf.init_state(jnp.ones(2), tx, jax.random.key(0))
    for enabled, total in ((True, 22.0), (False, 2.0)):
        step = sf.make_train_step(of(aux_loss_enabled=enabled), tx)
        assert float(step(state, None)[1]["loss"].compute()) == total
    assert of(lambda *_: {"ce": 1.0, "aux": 2.0}, aux_loss_enabled=False)(1, 2, 3) == {"ce": 1.0}


@pytest.mark.parametrize(
    ("said", "why"),
    [(1.0, "returns its terms by name"), ({"aux": 1.0}, "expected a term besides aux")],
)
def test_where_there_is_nothing_to_leave_out_or_nothing_left(said, why):
    with pytest.raises(sf.ConfigError, match=why):
        of(lambda params, batch, key: said, aux_loss_enabled=False)(1, 2, 3)


@pytest.mark.parametrize(
    ("fast", "precision"), [(None, "None"), (True, "DEFAULT"), (False, "HIGH")]
)
def test_matrix_products_are_as_precise_as_said(fast, precision):
    loss = of(lambda params, batch, key: (batch @ params).sum(), use_fast_kernels=fast)
    jaxpr = jax.make_jaxpr(lambda p, b: loss(p, b, None))(jnp.ones((2, 2)), jnp.ones((2, 2)))
    (product,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert precision in str(product.params["precision"])


def test_a_batch_is_spread_by_all_its_dimensions():
    mesh, seen = sf.make_mesh((1, 4, 1, 2)), {}

    def loss_fn(params, batch, key):
        for name, leaf in batch.items():
            jax.debug.inspect_array_sharding(
                leaf, callback=lambda place, name=name: seen.update({name: place})
            )
        return params.sum() * (batch["x"].sum() + batch["y"].sum())

    loss = of(loss_fn, mesh, step_partition_spec=(("dp", "fsdp"), "sp"))
    batch = sf.shard_batch({"x": jnp.ones((8, 6)), "y": jnp.ones(8)}, mesh)
    jax.jit(loss)(jnp.ones(2), batch, None).block_until_ready()
    assert seen["x"].shard_shape((8, 6)) == (2, 3)
    assert seen["y"].shard_shape((8,)) == (2,)


def test_it_is_a_loss_function_to_a_step_with_a_model_state():
    def loss_fn(params, batch, key, model_state):
        return params.sum(), {}, model_state + 1

    tx = optax.sgd(0.1)
    init = lambda key: (jnp.ones(2), jnp.zeros(()))
    state = sf.init_state(init, tx, jax.random.key(0), stateful=True)
    state, _ = sf.make_train_step(of(loss_fn), tx, stateful=True)(state, None)
    assert float(state.model_state) == 1.0
