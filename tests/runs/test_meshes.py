"""Any mesh that a user has: axes of other names, replicated batches, Explicit axes, flax boxes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import stepfold as sf

TX = optax.sgd(0.1, momentum=0.9)
DATA = {"x": np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)}
BATCH = {"x": DATA["x"][:16]}
RULES = [("in$", P(None, "model")), ("out$", P("model"))]


def init(key):
    return {"in": jax.random.normal(key, (8, 4)), "out": jnp.ones((4, 2))}


def loss_fn(params, batch, key):
    return sf.mean((jnp.tanh(batch["x"] @ params["in"]) @ params["out"]).sum(-1) ** 2)


def explicit_loss(params, batch, key):
    hidden = jnp.tanh(jnp.einsum("bi,ij->bj", batch["x"], params["in"]))
    out = jnp.einsum("bj,jk->bk", hidden, params["out"], out_sharding=P("data"))
    return sf.mean(out.sum(-1) ** 2)


# Made once, so that tests share what jax has compiled for them.
STEPS = {loss: sf.make_train_step(loss, TX) for loss in (loss_fn, explicit_loss)}
MEASURES = {loss: sf.make_eval_step(loss) for loss in (loss_fn, explicit_loss)}
SHAPE = jax.eval_shape(lambda: sf.init_state(init, TX, jax.random.key(0)))


def make(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    return mesh, sf.make_sharding(SHAPE, mesh, RULES)


AUTO, AUTO_PLAN = make(AxisType.Auto)
EXPLICIT, EXPLICIT_PLAN = make(AxisType.Explicit)
STATES = {}


def born(plan):
    """Copy the state of a plan, since a run donates it; `init_state` compiles at each call."""
    if id(plan) not in STATES:
        STATES[id(plan)] = plan, sf.init_state(init, TX, jax.random.key(0), sharding=plan)
    return copied(STATES[id(plan)][1])


def copied(state):
    """Copy a state with its shardings; `device_put` does not copy a key."""
    return jax.device_put(state, may_alias=False)._replace(key=jnp.copy(state.key))


def on(mesh, batch=BATCH):
    return sf.shard_batch(batch, mesh, axes="data")


def batches(mesh):
    return sf.prefetch(sf.batches(DATA, 16, seed=0), sharding=lambda batch: on(mesh, batch))


@pytest.fixture(scope="module")
def one_device():
    """The losses of six steps, the parameters after them, and their evaluation."""
    data = sf.batches(DATA, 16, seed=0)
    result = sf.fit(STEPS[loss_fn], born(None), data, steps=6, log_every=2)
    score = sf.evaluate(MEASURES[loss_fn], result.state, [BATCH])
    return result.history["train/loss"], result.state.params, score["loss"]


kinds = pytest.mark.parametrize(
    ("mesh", "plan", "loss"),
    [
        pytest.param(AUTO, AUTO_PLAN, loss_fn, marks=pytest.mark.full),
        (EXPLICIT, EXPLICIT_PLAN, explicit_loss),
    ],
    ids=["Auto", "Explicit"],
)


@kinds
def test_axes_of_other_names_train_save_resume_and_evaluate(mesh, plan, loss, one_device, tmp_path):
    curve, params, score = one_device
    step, measure = sf.make_train_step(loss, TX, accumulate=2), MEASURES[loss]
    evaluation = sf.Evaluation(measure, lambda: [on(mesh)], every=2)

    def run(steps):
        return sf.fit(
            step, born(plan), batches(mesh), steps=steps, log_every=2, run_dir=tmp_path,
            evaluation=evaluation, checkpoints=sf.Checkpoints(every=4),
        )  # fmt: skip

    with jax.set_mesh(mesh):
        first = run(4)
        result = run(6)
        assert (first.resumed, result.resumed) == (None, 4)
        np.testing.assert_allclose(result.history["train/loss"], curve, rtol=1e-5)
        for name, wanted in params.items():
            np.testing.assert_allclose(result.state.params[name], wanted, rtol=1e-5, atol=1e-6)
            assert result.state.params[name].sharding == plan.params[name]
        found = sf.evaluate(measure, result.state, [on(mesh)])["loss"]
        assert found == result.history["eval/loss"][-1] == pytest.approx(score, rel=1e-5)


@kinds
def test_a_placed_batch_is_compiled_for_as_it_is(mesh, plan, loss):
    step = STEPS[loss]
    with jax.set_mesh(mesh):
        compiled = sf.compile_step(step, born(plan), on(mesh))
        state, _ = compiled(born(plan), on(mesh))
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == plan
        assert compiled.batch["x"].sharding == NamedSharding(mesh, P(("data",)))
        report = sf.describe(compiled, state, None)
        assert report.mesh == {"data": 4, "model": 2}
        abstract = sf.shard_batch(jax.eval_shape(lambda: BATCH), mesh, axes="data")
        shape = jax.eval_shape(lambda: state)
        again = sf.describe(step, shape, abstract, sharding=plan)
        assert again.collectives == report.collectives != ()


ON_AUTO = jax.sharding.auto_axes(STEPS[loss_fn], out_sharding=(EXPLICIT_PLAN, P()))


@pytest.mark.parametrize(("step", "per_call"), [(STEPS[explicit_loss], 2), (ON_AUTO, 1)])
def test_steps_on_explicit_axes_take_placed_batches(step, per_call, one_device):
    """Several in a call, and an ordinary loss by `auto_axes`."""
    options = {"steps": 6, "log_every": 2, "steps_per_call": per_call}
    with jax.set_mesh(EXPLICIT):
        result = sf.fit(step, born(EXPLICIT_PLAN), batches(EXPLICIT), **options)
    np.testing.assert_allclose(result.history["train/loss"], one_device[0], rtol=1e-5)


def test_host_batches_are_typed_by_their_rows_on_explicit_data_axes():
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Explicit,))
    plan = sf.make_sharding(SHAPE, mesh)
    seen = []

    def loss(params, batch, key):
        seen.append(jax.typeof(batch["x"]).sharding.spec)
        return loss_fn(params, batch, key)

    with jax.set_mesh(mesh):
        result = sf.fit(sf.make_train_step(loss, TX), born(plan), [BATCH] * 2)
        sf.evaluate(sf.make_eval_step(loss), result.state, [BATCH])
    assert set(seen) <= {P("dp", None), P(("dp",), None)}
    assert result.steps == 2


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:mesh. expected every axis")  # on purpose
def test_a_replicated_batch_need_not_divide():
    mesh = sf.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    plan = sf.make_sharding(SHAPE, mesh)
    rows = {"x": DATA["x"][:3]}
    batch = jax.device_put(rows, NamedSharding(mesh, P()))
    step, measure = STEPS[loss_fn], MEASURES[loss_fn]
    result = sf.fit(step, born(plan), [batch] * 2, log_every=1)
    alone = sf.fit(step, born(None), [rows] * 2, log_every=1)
    np.testing.assert_allclose(result.history["train/loss"], alone.history["train/loss"], rtol=1e-5)
    assert result.state.params["in"].sharding.is_equivalent_to(plan.params["in"], 2)
    found = sf.evaluate(measure, result.state, [batch])["loss"]
    assert found == pytest.approx(sf.evaluate(measure, alone.state, [rows])["loss"], rel=1e-5)
    assert sf.describe(step, born(plan), batch).memory.batch == 3 * 8 * 4


def test_scalars_and_placed_arrays_may_be_mixed():
    def loss(params, batch, key):
        return loss_fn(params, {"x": batch["x"] * batch["scale"]}, key)

    batch = on(AUTO) | {"scale": np.float32(1.0)}
    state = born(AUTO_PLAN)
    found = sf.evaluate(sf.make_eval_step(loss), state, [batch])
    assert found == pytest.approx(sf.evaluate(MEASURES[loss_fn], state, [on(AUTO)]))
    assert sf.fit(sf.make_train_step(loss, TX), state, [batch]).steps == 1


CALLS = {
    "fit": lambda loss, state, batch: sf.fit(STEPS[loss], state, [batch]),
    "compile_step": lambda loss, state, batch: sf.compile_step(STEPS[loss], state, batch),
    "describe": lambda loss, state, batch: sf.describe(STEPS[loss], state, batch),
    "evaluate": lambda loss, state, batch: sf.evaluate(MEASURES[loss], state, [batch]),
}


OTHER_TYPES = (
    "batch/x: expected it on a mesh with axes of the type {}, as that of the state, got {};"
)
ROWS_PLAN = sf.make_sharding(SHAPE, sf.make_mesh((8,), ("rows",)))
REFUSED = {
    "axes of other names": (
        *(loss_fn, ROWS_PLAN, BATCH),
        r"axes: expected axes of the mesh \('rows',\) to shard the batch over, got "
        r"\('dp', 'fsdp'\); place each batch with sf.shard_batch\(batch, mesh, axes=…\), or",
    ),
    "Explicit axes": (loss_fn, AUTO_PLAN, on(EXPLICIT), OTHER_TYPES.format("Auto", "Explicit")),
    "Auto axes": (explicit_loss, EXPLICIT_PLAN, on(AUTO), OTHER_TYPES.format("Explicit", "Auto")),
    "other devices": (
        *(loss_fn, AUTO_PLAN, jax.device_put(BATCH, jax.devices()[3])),
        "batch/x: expected it on the 8 devices of the state's mesh, got it on 1; place each",
    ),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@calls
@pytest.mark.parametrize("name", REFUSED)
def test_a_batch_that_does_not_fit_the_mesh_of_the_state_is_refused(call, name):
    loss, plan, batch, words = REFUSED[name]
    with pytest.raises(sf.errors.ShardingError, match=words):
        call(loss, born(plan), batch)


def test_a_placed_batch_for_a_state_that_is_not_placed_is_refused():
    words = (
        "batch: expected all arrays on the devices of .*0, got batch/x elsewhere; place the batch "
        "with .* or move the state with sf.sharding.place"
    )
    for call in (CALLS["fit"], CALLS["compile_step"], CALLS["describe"]):
        with pytest.raises(sf.errors.ShardingError, match=words):
            call(loss_fn, born(None), on(AUTO))


@calls
def test_an_ordinary_loss_on_explicit_axes_gets_advice(call):
    words = "(?s)written for the Explicit axes .* ambiguous .*sf.make_mesh.*jax.sharding.auto_axes"
    with pytest.raises(sf.errors.ShardingError, match=words) as caught, jax.set_mesh(EXPLICIT):
        call(loss_fn, born(EXPLICIT_PLAN), on(EXPLICIT))
    assert type(caught.value.__cause__).__name__ == "ShardingTypeError"


@pytest.mark.filterwarnings("ignore:mesh. expected every axis")
def test_reduce_once_on_explicit_axes_takes_replicated_parameters_only(one_device):
    plan = jax.tree.map(lambda _: NamedSharding(EXPLICIT, P()), EXPLICIT_PLAN)
    grad = sf.sharding.reduce_once(plan, axes="data")
    step = sf.make_train_step(loss_fn, TX, accumulate=2, grad=grad)
    with jax.set_mesh(EXPLICIT):
        result = sf.fit(step, born(plan), batches(EXPLICIT), steps=6, log_every=2)
    np.testing.assert_allclose(result.history["train/loss"], one_device[0], rtol=1e-5)
    words = r"reduce_once: expected replicated parameters on .* Explicit axes, got params/in with P"
    with pytest.raises(sf.errors.ShardingError, match=words):
        sf.sharding.reduce_once(EXPLICIT_PLAN, axes="data")


@pytest.mark.full
def test_flax_boxes_train_save_and_resume_as_they_are_annotated(one_device, tmp_path):
    def boxed_init(key):
        params = init(key)
        return {**params, "in": nn.Partitioned(params["in"], (None, "model"))}

    def boxed_loss(params, batch, key):
        return loss_fn(nn.unbox(params), batch, key)

    shape = jax.eval_shape(lambda: sf.init_state(boxed_init, TX, jax.random.key(0)))
    plan = sf.make_sharding(shape, AUTO)
    assert plan.params["in"].value.spec == P(None, "model")
    assert plan.opt_state[0].trace["in"].value.spec == P(None, "model")
    step = sf.make_train_step(boxed_loss, TX)
    state = sf.init_state(boxed_init, TX, jax.random.key(0), sharding=plan)
    for steps in (2, 4):
        result = sf.fit(
            step, copied(state), batches(AUTO), steps=steps, log_every=2, run_dir=tmp_path,
            checkpoints=sf.Checkpoints(every=2),
        )  # fmt: skip
    assert result.resumed == 2
    assert jax.tree.map(lambda leaf: leaf.sharding, result.state) == plan
    np.testing.assert_allclose(result.history["train/loss"], one_device[0][:2], rtol=1e-5)
