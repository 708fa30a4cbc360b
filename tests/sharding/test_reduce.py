"""`reduce_once` computes the plain step, and communicates once per step."""

from functools import cache

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clu import metrics as clu_metrics
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.small import ones

import stepfold as sf
from stepfold.inspect.collectives import collectives, parse, walk

MESHES = [(8, 1, 1, 1), (1, 8, 1, 1), (2, 4, 1, 1), (2, 2, 2, 1)]
RULES = [("in$", P("fsdp", "tp")), ("out$", P("tp", "fsdp"))]
RNG = np.random.default_rng(0)
PARAMS = {
    "in": RNG.normal(size=(8, 16)),
    "out": RNG.normal(size=(16, 8)),
    "bias": np.zeros(3),
}
BATCH = {"x": RNG.normal(size=(32, 8)), "mask": RNG.uniform(size=32) < 0.6}
BATCH["mask"][:4] = False  # all that the first of eight devices has


@pytest.fixture
def fast():
    """Compile in half the time, where only the numbers matter."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


numeric = pytest.mark.usefixtures("fast")
ignores_mask = pytest.mark.filterwarnings("ignore:loss_fn. expected a loss that depends")


def loss_fn(params, batch, key):
    hidden = jnp.tanh(batch["x"] @ params["in"])
    error = ((hidden @ params["out"]) ** 2).sum(-1)
    terms = {
        "fit": sf.mean(error, batch["mask"]),
        "weight": 1e-2 * (params["in"] ** 2).sum() + params["bias"].sum(),
    }
    return terms, {"small": sf.mean(error < 30, batch["mask"])}


def clipped():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))


def made(dims, tx, loss=loss_fn, dtype=np.float32, rules=RULES, accumulate=1, **options):
    """Give a state in its place, the batch, and the steps that reduce once and as always."""
    mesh = sf.make_mesh(dims)
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), PARAMS)
    state = sf.init_state(params, tx, jax.random.key(0))
    plan = sf.make_sharding(state, mesh, rules)
    batch = jax.tree.map(lambda x: x if x.dtype == bool else np.asarray(x, dtype), BATCH)
    once = sf.make_train_step(
        loss, tx, accumulate=accumulate, grad=sf.sharding.reduce_once(plan), **options
    )
    plain = sf.make_train_step(loss, tx, **options)
    return (
        sf.sharding.place(state, plan),
        plan,
        sf.shard_batch(batch, mesh),
        once,
        (plain, state, batch),
    )


def ran(step, *args):
    return jax.block_until_ready(jax.jit(step)(*args))


def raw(tree):
    """Bring a tree to the host, keys as their bits, and metrics as what they compute."""
    tree = jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        tree,
    )
    is_metric = lambda x: isinstance(x, clu_metrics.Metric)
    tree = jax.tree.map(lambda x: x.compute() if is_metric(x) else x, tree, is_leaf=is_metric)
    return jax.tree.map(np.asarray, tree)


@cache
def plainly():
    """Give what the plain step makes of the batch in float64."""
    with jax.enable_x64(True):
        return raw(ran(*made((8, 1, 1, 1), clipped(), dtype=np.float64)[-1]))


@numeric
@pytest.mark.parametrize(
    ("dims", "options"),
    [
        pytest.param(MESHES[0], {"accumulate": 4}, marks=pytest.mark.full),
        pytest.param(MESHES[1], {}, marks=pytest.mark.full),
        pytest.param(MESHES[2], {"accumulate": 4}, marks=pytest.mark.full),
        (MESHES[3], {"accumulate": 2, "remat": "dots_saveable"}),
    ],
)
def test_the_step_is_the_plain_one(dims, options):
    with jax.enable_x64(True):
        state, plan, batch, step, _ = made(dims, clipped(), dtype=np.float64, **options)
        got = ran(step, state, batch)
        chex.assert_trees_all_close(raw(got), plainly(), rtol=1e-10, atol=1e-12)
        for x, place in zip(jax.tree.leaves(got[0]), jax.tree.leaves(plan), strict=True):
            assert x.sharding.is_equivalent_to(place, x.ndim)
        assert got[0].params["in"].dtype == jnp.float64


@numeric
def test_gradients_need_no_jit(key):
    mesh = sf.make_mesh((2, 4, 1, 1))
    state = sf.init_state({"w": jnp.ones((8, 8))}, optax.sgd(0.1), key)
    plan = sf.make_sharding(state, mesh, sf.sharding.fsdp(min_size=1))
    grad_fn = sf.sharding.reduce_once(plan)(lambda p, b, k: sf.mean((b @ p["w"]) ** 2))
    x = np.asarray(BATCH["x"], np.float32)
    inputs = sf.sharding.place(state, plan).params, sf.shard_batch(x, mesh), key, ()
    chex.assert_trees_all_close(raw(grad_fn(*inputs)), raw(jax.jit(grad_fn)(*inputs)), rtol=1e-5)


@pytest.mark.full
@numeric
def test_axes_may_be_some_of_those_the_batch_is_spread_over():
    with jax.enable_x64(True):
        state, plan, batch, *_ = made((2, 4, 1, 1), clipped(), dtype=np.float64)
        grad = sf.sharding.reduce_once(plan, axes=("dp",))
        step = sf.make_train_step(loss_fn, clipped(), accumulate=2, grad=grad)
        got = ran(step, state, batch)
        chex.assert_trees_all_close(raw(got), plainly(), rtol=1e-10, atol=1e-12)


def uniform(params, batch, key):
    drawn = clu_metrics.CollectingMetric.from_outputs(("u",))
    return params["in"].sum(), {"drawn": drawn.from_model_output(u=jax.random.uniform(key, (1,)))}


@pytest.mark.full
@numeric
@ignores_mask
@pytest.mark.parametrize(
    ("dims", "devices", "n"),
    [((8, 1, 1, 1), 8, 1), ((2, 2, 2, 1), 4, 4)],
)
def test_every_device_and_microbatch_has_a_key_of_its_own(dims, devices, n):
    state, _, batch, step, _ = made(dims, optax.sgd(0.1), uniform, accumulate=n)
    step = jax.jit(step)
    after, first = jax.block_until_ready(step(state, batch))
    seen = np.ravel(first["drawn"].compute()["u"])
    assert len(seen) == len(set(seen.tolist())) == devices * n
    _, again = jax.block_until_ready(step(state, batch))
    np.testing.assert_array_equal(seen, np.ravel(again["drawn"].compute()["u"]))
    _, later = jax.block_until_ready(step(after, batch))
    assert not set(seen.tolist()) & set(np.ravel(later["drawn"].compute()["u"]).tolist())


@flax.struct.dataclass
class Largest(clu_metrics.Average):
    def merge(self, other):
        return self.replace(total=jnp.maximum(self.total, other.total))


@numeric
@ignores_mask
def test_metrics_of_every_kind_merge_over_devices_and_microbatches():
    def loss(params, batch, key):
        everything = clu_metrics.CollectingMetric.from_outputs(("x",))
        return params["in"].sum(), {
            "mean": sf.mean(batch["x"].sum(-1), batch["mask"]),
            "count": sf.mean(batch["x"].sum(-1) > 0, batch["mask"]),
            "largest": Largest(total=batch["x"].max(), count=jnp.ones(())),
            "last": clu_metrics.LastValue.from_model_output((params["out"] ** 2).sum()),
            "all": everything.from_model_output(x=batch["x"]),
        }

    state, _, batch, step, _ = made((2, 4, 1, 1), optax.sgd(0.1), loss, accumulate=4)
    metrics = ran(step, state, batch)[1]
    x, mask = BATCH["x"].astype(np.float32), BATCH["mask"]
    assert metrics["mean"].compute() == pytest.approx(x.sum(-1)[mask].mean(), rel=1e-4)
    assert int(metrics["count"].total) == (x.sum(-1) > 0)[mask].sum()
    assert int(metrics["count"].count) == mask.sum()
    assert metrics["largest"].total == x.max()
    with jax.numpy_dtype_promotion("standard"):  # clu divides a float by an integer
        assert metrics["last"].compute() == pytest.approx((PARAMS["out"] ** 2).sum(), rel=1e-4)
    got = np.sort(np.ravel(metrics["all"].compute()["x"]))
    np.testing.assert_array_equal(got, np.sort(np.ravel(x)))


@numeric
def test_gradients_of_bf16_parameters_add_up_in_float32_over_devices(key):
    x = np.random.default_rng(0).uniform(0.5, 1.5, size=(256, 4)).astype(np.float32)
    state = sf.init_state(jnp.ones(4, jnp.bfloat16), optax.sgd(0.1), key)
    mesh = sf.make_mesh((8, 1, 1, 1))
    grad_fn = sf.sharding.reduce_once(sf.make_sharding(state, mesh))(
        lambda p, b, k: sf.mean(b @ p), accumulate=4
    )
    batch = sf.shard_batch(jnp.asarray(x, jnp.bfloat16), mesh)
    grads = jax.jit(grad_fn)(state.params, batch, key, ())[0]
    assert grads.dtype == jnp.bfloat16
    want = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32).mean(0)
    half_ulp = 2**-8
    assert np.abs(np.asarray(grads, np.float32) - want).max() < half_ulp


@pytest.mark.full
@numeric
def test_a_bad_row_on_one_device_skips_the_step_on_all():
    state, _, batch, step, _ = made(
        (2, 2, 2, 1), optax.sgd(0.1, momentum=0.9), skip_nonfinite=True, accumulate=2
    )
    x = np.array(BATCH["x"], np.float32)
    x[int(np.argmax(BATCH["mask"]))] = np.inf
    step = jax.jit(step)
    bad = {**batch, "x": jax.device_put(x, batch["x"].sharding)}
    after, metrics = jax.block_until_ready(step(state, bad))
    chex.assert_trees_all_equal(raw(after.params), raw(state.params))
    chex.assert_trees_all_equal(raw(after.opt_state), raw(state.opt_state))
    assert (after.step, metrics["skipped"].total) == (1, 1)
    after, metrics = jax.block_until_ready(step(state, batch))
    assert metrics["skipped"].total == 0
    assert (raw(after.params["in"]) != raw(state.params["in"])).any()


@pytest.mark.full
@numeric
def test_f16_with_a_loss_scale_is_the_plain_step_and_an_overflow_skips_it_on_all_devices():
    tx = sf.dynamic_loss_scale(optax.sgd(0.01))
    state, _, batch, step, plain = made((2, 4, 1, 1), tx, precision="f16", accumulate=2)
    step = jax.jit(step)
    want, got = ran(*plain)[0], jax.block_until_ready(step(state, batch))[0]
    chex.assert_trees_all_close(raw(got.params), raw(want.params), rtol=5e-3, atol=5e-3)
    assert got.opt_state.scale == want.opt_state.scale
    x = np.array(BATCH["x"], np.float32)
    x[int(np.argmax(BATCH["mask"]))] = 6e4
    after, metrics = step(state, {**batch, "x": jax.device_put(x, batch["x"].sharding)})
    assert after.opt_state.scale == state.opt_state.scale / 2
    assert metrics["skipped"].total == 1
    chex.assert_trees_all_equal(raw(after.params), raw(state.params))


@cache
def compiled(dims, n, once=True):
    state, _, batch, step, _ = made(dims, optax.sgd(0.1), accumulate=n)
    if not once:
        step = sf.make_train_step(loss_fn, optax.sgd(0.1), accumulate=n)
    lowered = jax.jit(step, donate_argnums=0).lower(state, batch)
    return parse(lowered.compile().as_text()), sf.make_mesh(dims)


KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def in_loops(program):
    runs = [run for run in walk(program) if run.instruction.op.startswith(KINDS)]
    assert runs
    return [run for run in runs if run.times > 1]


SIZES = {name: 4 * x.size for name, x in PARAMS.items()}


def test_nothing_crosses_the_network_in_the_loop_over_microbatches():
    assert in_loops(compiled((8, 1, 1, 1), 4)[0]) == []
    assert in_loops(compiled((1, 8, 1, 1), 4)[0]) == []
    assert in_loops(compiled((1, 8, 1, 1), 4, once=False)[0]) != []


def test_replicated_gradients_cost_one_all_reduce():
    program, mesh = compiled((8, 1, 1, 1), 4)
    found = collectives(program, mesh)
    assert {(one.kind, one.axes) for one in found} == {("all-reduce", ("dp",))}
    assert 0 <= sum(one.bytes for one in found) - sum(SIZES.values()) <= 64  # of metrics
    runs = [run for run in walk(program) if run.instruction.op.startswith("all-reduce")]
    assert sum(any(x.bytes >= SIZES["in"] for x in run.inputs) for run in runs) == 1


def test_cut_parameters_cost_one_gather_and_one_scatter_each():
    program, mesh = compiled((1, 8, 1, 1), 4)
    found = {one.kind: one for one in collectives(program, mesh)}
    assert set(found) == {"all-gather", "reduce-scatter", "all-reduce"}
    assert found["all-gather"].count <= 2
    assert found["reduce-scatter"].count <= 2
    assert found["all-gather"].bytes == SIZES["in"] + SIZES["out"]
    assert found["reduce-scatter"].bytes == SIZES["in"] + SIZES["out"]
    assert found["all-reduce"].bytes <= SIZES["bias"] + 64


@pytest.mark.full
@pytest.mark.parametrize("dims", [(1, 8, 1, 1), (2, 2, 2, 1)])
def test_the_traffic_of_gradients_does_not_grow_with_the_microbatches(dims):
    def over_data(n):
        program, mesh = compiled(dims, n)
        found = [one for one in collectives(program, mesh) if set(one.axes) & {"dp", "fsdp"}]
        return sum(one.bytes for one in found)

    assert abs(over_data(4) - over_data(1)) <= 64


@cache
def a_plan():
    state = jax.eval_shape(
        lambda: sf.init_state({"w": jnp.ones((8, 8))}, optax.sgd(0.1), jax.random.key(0))
    )
    return sf.make_sharding(state, sf.make_mesh((2, 2, 1, 1), devices=jax.devices()[:4]))


def test_a_stateful_loss_is_refused():
    with pytest.raises(
        sf.errors.ConfigError, match="grad: expected a function that accepts stateful=, "
    ):
        sf.make_train_step(
            lambda p, b, k, s: (p["w"].sum(), {}, s),
            optax.sgd(0.1),
            stateful=True,
            grad=sf.sharding.reduce_once(a_plan()),
        )


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"x": ones((6, 8))},
            r"^batch/x: expected a leading size that the 4 devices along \('dp', 'fsdp'\) divide, "
            r"got float32\[6,8\]; drop or pad the last batch",
        ),
        (
            {"x": ones((8, 8)), "rate": ones(())},
            r"^batch/rate: expected .*, got float32\[\];",
        ),
        ({"x": ones((8, 8)), "rate": 0.5}, r"^batch/rate: expected .*, got float"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused(run, key, batch, message):
    grad_fn = sf.sharding.reduce_once(a_plan())(lambda p, b, k: sf.mean(b["x"] @ p["w"]))
    with pytest.raises(sf.errors.DataError, match=message):
        run(grad_fn)({"w": jnp.ones((8, 8))}, batch, key, ())


def test_rows_of_a_device_that_do_not_divide_are_refused(key):
    grad_fn = sf.sharding.reduce_once(a_plan())(lambda p, b, k: sf.mean(b @ p["w"]), accumulate=4)
    with pytest.raises(
        sf.errors.DataError, match="accumulate=4: expected a divisor of the batch size 2"
    ):
        jax.jit(grad_fn)({"w": jnp.ones((8, 8))}, jnp.ones((8, 8)), key, ())


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        ({"w": NamedSharding(sf.make_mesh(), P())}, "dict"),
        (None, "NoneType"),
        (sf.TrainState(*5 * [P()]), "TrainState"),
        (sf.make_mesh(), "Mesh"),
    ],
)
def test_what_is_no_plan_of_a_state_is_refused(plan, name):
    message = (
        "reduce_once: expected the plan of a TrainState, as sf.make_sharding makes it, got " + name
    )
    with pytest.raises(sf.errors.ShardingError, match=message):
        sf.sharding.reduce_once(plan)


@pytest.mark.parametrize(("axes", "got"), [("rows", r"\('rows',\)"), (("dp", "zz"), "'zz'")])
def test_axes_that_the_mesh_lacks_are_refused(axes, got):
    with pytest.raises(
        sf.errors.ShardingError, match=f"axes: expected axes of the mesh .* got .*{got}"
    ):
        sf.sharding.reduce_once(a_plan(), axes=axes)
