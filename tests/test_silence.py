"""A plausible misuse of a public name works as meant, warns, or is refused."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import stepfold as sf

TX = optax.sgd(0.1)


def state_of(params, tx=TX):
    return sf.init_state(params, tx, jax.random.key(0))


# The mask of a batch


def squares(params, batch):
    return ((params["w"] - batch["x"]) ** 2).sum(-1).astype(jnp.float32)


def in_a_scan(params, batch, key):
    def add(sums, row):
        value, weight = row
        return (sums[0] + weight * value, sums[1] + weight), None

    rows = squares(params, batch), batch["mask"].astype(jnp.float32)
    (total, weight), _ = jax.lax.scan(add, (jnp.float32(0), jnp.float32(0)), rows)
    return total / weight


MASK_IS_READ = {
    "in the mean": lambda p, b, k: sf.mean(squares(p, b), b["mask"]),
    "in weights": lambda p, b, k: sf.mean(squares(p, b), 2.0 * b["mask"].astype(jnp.float32)),
    "by a model": lambda p, b, k: jnp.where(b["mask"], squares(p, b), 0.0).sum(),
    "in one term": lambda p, b, k: {"a": sf.mean(squares(p, b), b["mask"]), "b": p["w"] ** 2},
    "in a scan": in_a_scan,
    "in a checkpoint": jax.checkpoint(
        lambda p, b, k: jnp.vdot(squares(p, b), b["mask"].astype("f"))
    ),
    "in jit": jax.jit(lambda p, b, k: sf.mean(squares(p, b), b["mask"]).compute()),
}
MASK_IS_IGNORED = {
    "it is not read": lambda p, b, k: sf.mean(squares(p, b)),
    "a metric reads it": lambda p, b, k: (sf.mean(squares(p, b)), {"n": sf.mean(b["mask"])}),
    "its shape is read": lambda p, b, k: squares(p, b).sum() / b["mask"].size,
    "jit takes it": jax.jit(lambda p, b, k: squares(p, b).mean()),
}
BATCH = {"x": np.ones((4, 2), np.float32), "mask": np.arange(4) < 3}


@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "remat": True}, {"precision": "bf16"}])
def test_a_loss_that_ignores_the_mask_of_its_batch_is_warned_of_once(options, recwarn):
    for loss_fn in MASK_IS_IGNORED.values():
        step = sf.make_train_step(loss_fn, TX, **options)
        state = state_of({"w": jnp.ones(())})
        with pytest.warns(UserWarning, match=r"sf.mean.values, batch.* remainder=.drop.") as caught:
            jax.eval_shape(step, state, BATCH)
        assert len(caught) == 1
        jax.eval_shape(step, state, {name: leaf[:2] for name, leaf in BATCH.items()})
    for loss_fn in MASK_IS_READ.values():
        jax.eval_shape(sf.make_train_step(loss_fn, TX, **options), state, BATCH)
    assert not recwarn


def test_an_evaluation_that_ignores_the_mask_is_warned_of():
    data, state = {"x": np.ones((10, 2))}, state_of({"w": jnp.ones(())})
    padded = lambda: sf.batches(data, 4, epochs=1, remainder="pad")
    with pytest.warns(UserWarning, match="expected a loss that depends on batch"):
        sf.evaluate(sf.make_eval_step(MASK_IS_IGNORED["a metric reads it"]), state, padded())
    sf.evaluate(sf.make_eval_step(MASK_IS_READ["in the mean"]), state, padded())


def test_looking_at_the_mask_changes_no_program():
    state = state_of({"w": jnp.ones(())})
    loss_fn = MASK_IS_READ["in a scan"]
    step = sf.make_train_step(loss_fn, TX, accumulate=2)
    first, second = (jax.jit(lambda *args: step(*args)).lower(state, BATCH) for _ in range(2))
    assert first.as_text() == second.as_text()  # only the first looked


# Names of mesh axes


def test_data_is_an_axis_of_batches_and_an_axis_that_nothing_uses_is_warned_of():
    def plan_on(dims, names, rules=()):
        mesh = sf.make_mesh(dims, names, devices=jax.devices()[:4])
        return mesh, sf.make_sharding(state_of({"w": jnp.ones((64, 64))}), mesh, list(rules))

    mesh, plan = plan_on((2, 2), ("data", "fsdp"))
    rows = sf.shard_batch(np.zeros((8, 2)), mesh)
    assert rows.sharding.shard_shape(rows.shape) == (2, 2)
    assert plan.params["w"].spec == P("fsdp")
    with pytest.warns(UserWarning, match="got {'model': 2}, which no rule and no batch uses"):
        plan_on((2, 2), ("data", "model"))
    plan_on((2, 2), ("data", "model"), [("w$", P("model"))])
    plan_on((2, 2), ("dp", "sp"))  # of activations


def test_a_compiled_step_shows_which_axes_are_used():
    mesh = sf.make_mesh((2, 2), ("batch", "model"), devices=jax.devices()[:4])
    state = state_of({"w": jnp.ones(())})
    plan = sf.make_sharding(state, mesh)  # the batch may use either
    batch = sf.shard_batch(np.ones((4, 4), np.float32), mesh, axes="batch")
    loss = lambda p, b, k: sf.mean(p["w"] * b)
    constrained = lambda p, b, k: loss(p, jax.lax.with_sharding_constraint(b, across), k)
    across = jax.sharding.NamedSharding(mesh, P("batch", "model"))
    with pytest.warns(UserWarning, match="{'model': 2}, which no rule and no batch uses"):
        sf.compile_step(sf.make_train_step(loss, TX), state, batch, sharding=plan)
    sf.compile_step(sf.make_train_step(constrained, TX), state, batch, sharding=plan)


# Dtypes


def test_counts_of_booleans_do_not_wrap_around_when_they_are_merged():
    hits = sf.mean(jnp.ones((), bool), jnp.ones(()))
    hits = hits.replace(total=hits.total * 2.0**30, count=hits.count * 2.0**30)
    metric = sf.mean(jnp.ones(3, bool))
    for _ in range(4):
        metric = jax.jit(lambda a, b: a.merge(b))(metric, hits)
    assert metric.compute() == 1.0
    assert metric.count == 2.0**32


def test_targets_and_weights_are_not_rounded_to_the_dtype_of_the_model():
    target = np.full((2, 1), 100.7, np.float32)
    batch = {"x": np.ones((2, 3), np.float32), "time": np.full(2, 999.0, np.float32)}
    batch |= {"y": target, "loss_weights": target / 1000}

    def loss_fn(params, batch, key):
        predicted = (batch["x"] @ params["w"]).astype(jnp.float32)
        assert batch["x"].dtype == params["w"].dtype == jnp.bfloat16
        error = batch["y"] - predicted
        return sf.mean(error, batch["loss_weights"]), {"time": sf.mean(batch["time"])}

    evaluate = sf.make_eval_step(loss_fn, precision="bf16")
    metrics = jax.jit(evaluate)(state_of({"w": jnp.zeros((3, 1))}), batch)
    assert metrics["loss"].compute() == pytest.approx(100.7)
    assert metrics["time"].compute() == 999.0


def test_float_labels_are_refused_with_advice():
    loss = optax.softmax_cross_entropy_with_integer_labels
    step = sf.make_train_step(lambda p, b, k: sf.mean(loss(b["x"] * p["w"], b["y"])), TX)
    batch = {"x": np.ones((2, 3), np.float32), "y": np.zeros(2, np.float32)}
    with pytest.raises(TypeError, match=r"labels of classes are integers: cast them, as"):
        jax.eval_shape(step, state_of({"w": jnp.ones(())}), batch)


# States


@pytest.mark.parametrize(
    "use",
    [
        lambda state: sf.make_train_step(lambda p, b, k: sf.mean(p["w"]), TX)(state, None),
        lambda state: sf.make_eval_step(lambda p, b, k: sf.mean(p["w"]))(state, None),
        lambda state: sf.init_state(state.params, TX, jax.random.key(0)),
        lambda state: sf.place(state, jax.sharding.SingleDeviceSharding(jax.devices()[1])),
    ],
)
def test_a_state_that_was_donated_is_named_when_it_is_used_again(use):
    state = state_of({"w": jnp.ones(2)})
    jax.jit(lambda state: state, donate_argnums=0)(state)
    with pytest.raises(sf.ConfigError, match="the arrays were donated to an earlier call and are"):
        use(state)


def test_the_type_hints_of_a_state_can_be_read():
    assert typing.get_type_hints(sf.TrainState)["step"] is jax.Array
    assert typing.get_type_hints(sf.init_state)["return"] is sf.TrainState
