"""The cross-entropy of a linear layer on several devices: what they send, and what is refused."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import stepfold as sf

SIZE, VOCABULARY, ROWS = 32, 128, 1024
TX = optax.sgd(0.1)


def init(key):
    return {"out": jax.random.normal(key, (SIZE, VOCABULARY))}


def arrays(rows=ROWS):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, VOCABULARY, rows).astype(np.int32)
    return {"x": rng.normal(size=(rows, SIZE)).astype(np.float32), "y": labels}


def on(dims, kernel):
    mesh = sf.make_mesh(dims, devices=jax.devices()[: math.prod(dims)])
    shape = jax.eval_shape(lambda: sf.init_state(init, TX, jax.random.key(0)))
    return mesh, shape, sf.make_sharding(shape, mesh, [("out", kernel)])


def losses(sharding):
    def plain(params, batch, key):
        logits = batch["x"] @ params["out"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return sf.mean(loss, batch["y"] > 9)

    def blocks(params, batch, key):
        labels, options = batch["y"], {"block_size": 16, "sharding": sharding}
        return sf.linear_cross_entropy(batch["x"], params["out"], labels, labels > 9, **options)

    return plain, blocks


LAYOUTS = {
    "one device": ((1, 1, 1, 1), P()),
    "dp 8": ((8, 1, 1, 1), P()),
    "fsdp 8": ((1, 8, 1, 1), P(None, "fsdp")),
    "fsdp 4 x tp 2": ((1, 4, 2, 1), P("fsdp", "tp")),
    "dp 2 x fsdp 2 x tp 2": ((2, 2, 2, 1), P(None, ("fsdp", "tp"))),
}


@pytest.mark.parametrize(
    "layout",
    [
        "dp 2 x fsdp 2 x tp 2",
        *(pytest.param(layout, marks=pytest.mark.full) for layout in list(LAYOUTS)[:2]),
        *(pytest.param(layout, marks=pytest.mark.full) for layout in ("fsdp 8", "fsdp 4 x tp 2")),
    ],
)
def test_devices_send_no_more_than_for_the_plain_loss(layout):
    dims, kernel = LAYOUTS[layout]
    mesh, shape, plan = on(dims, kernel)
    plain, blocks = (
        sf.describe(sf.make_train_step(loss, TX), shape, arrays(), sharding=plan)
        for loss in losses(plan.params["out"])
    )
    assert blocks.moved <= plain.moved
    assert blocks.flops.dots == plain.flops.dots == 4 * ROWS * SIZE * VOCABULARY // mesh.size
    assert blocks.memory.temporaries <= plain.memory.temporaries
    # The kernel is gathered once, and its gradient reduced once, though there are many blocks.
    gathers = [each for each in blocks.collectives if each.kind == "all-gather"]
    scatters = [each for each in blocks.collectives if each.kind == "reduce-scatter"]
    count = int("fsdp" in layout)
    assert [sum(each.count for each in kind) for kind in (gathers, scatters)] == [count, count]
    share = 4 * SIZE * VOCABULARY // dims[2]  # what one device of an axis tp holds after it
    assert all(each.moved == share * (dims[1] - 1) // dims[1] for each in gathers + scatters)


@pytest.mark.full
def test_the_scan_for_the_weights_sends_nothing_of_the_loss():
    _, shape, plan = on(*LAYOUTS["fsdp 4 x tp 2"])
    loss = losses(plan.params["out"])[1]
    whole, parts = (
        sf.describe(
            sf.make_train_step(loss, TX, accumulate=n), shape, arrays(n * ROWS), sharding=plan
        )
        for n in (1, 4)
    )
    assert parts.flops.dots == 4 * whole.flops.dots
    counts = lambda report, kind: sum(c.count for c in report.collectives if c.kind == kind)
    assert counts(parts, "reduce-scatter") == 4 * counts(whole, "reduce-scatter") == 4


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "grad"),
    [
        ("fsdp 8", sf.sharding.reduce_once),
        ("fsdp 4 x tp 2", sf.sharding.reduce_once),
        ("fsdp 8", sf.sharding.ordered),
    ],
)
def test_it_runs_where_axes_are_mapped_already(layout, grad):
    mesh, _, plan = on(*LAYOUTS[layout])
    results = []
    for loss in losses(plan.params["out"]):
        state = sf.init_state(init, TX, jax.random.key(0), sharding=plan)
        step = jax.jit(sf.make_train_step(loss, TX, grad=grad(plan)))
        state, metrics = step(state, sf.shard_batch(arrays(), mesh))
        results.append((np.asarray(state.params["out"]), metrics["loss"].compute()))
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=1e-6)


@pytest.mark.full
def test_ordered_gradients_have_the_same_bits_on_any_mesh():
    results = []
    for dims in [(1, 1, 1, 1), (1, 8, 1, 1), (2, 2, 1, 1)]:
        mesh, _, plan = on(dims, P(None, "fsdp"))
        state = sf.init_state(init, TX, jax.random.key(0), sharding=plan)
        loss = losses(plan.params["out"])[1]
        step = jax.jit(sf.make_train_step(loss, TX, grad=sf.sharding.ordered(plan)))
        state, metrics = step(state, sf.shard_batch(arrays(), mesh))
        results.append((np.asarray(state.params["out"]).tobytes(), float(metrics["loss"].total)))
    assert results[0] == results[1] == results[2]


@pytest.mark.full
def test_it_runs_on_explicit_axes():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    kernel, batch = np.asarray(init(jax.random.key(0))["out"]), arrays()
    want = jax.grad(lambda k: sf.linear_cross_entropy(batch["x"], k, batch["y"]).total)(kernel)
    with jax.set_mesh(mesh):
        put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
        x, y, kernel = put(batch["x"], "fsdp"), put(batch["y"], "fsdp"), put(kernel, "fsdp", "tp")
        total = lambda k: sf.linear_cross_entropy(x, k, y, sharding=kernel.sharding).total
        grad = jax.jit(jax.grad(total))(kernel)
        assert grad.sharding.spec == P("fsdp", "tp")
    np.testing.assert_allclose(grad, want, rtol=1e-4, atol=1e-5)


def test_a_sharding_is_wanted_where_there_are_devices():
    mesh, _, plan = on(*LAYOUTS["fsdp 4 x tp 2"])
    batch, kernel = arrays(), init(jax.random.key(0))["out"]
    with (
        jax.set_mesh(mesh),
        pytest.raises(
            sf.errors.ShardingError, match="got None on a mesh with the axes fsdp, tp; pass th"
        ),
    ):
        jax.jit(sf.linear_cross_entropy)(batch["x"], kernel, batch["y"])
    batch = sf.shard_batch(batch, mesh)
    with pytest.raises(
        sf.errors.ShardingError, match="sharding: expected a NamedSharding, got None; pass"
    ):
        sf.linear_cross_entropy(batch["x"], kernel, batch["y"])
    plain = sf.linear_cross_entropy(np.asarray(batch["x"]), kernel, np.asarray(batch["y"]))
    kernel = jax.device_put(kernel, plan.params["out"])
    loss = sf.linear_cross_entropy(batch["x"], kernel, batch["y"], sharding=kernel.sharding)
    np.testing.assert_allclose(loss.total, plain.total, rtol=1e-6)


@pytest.mark.parametrize(
    ("kernel", "rows", "message"),
    [
        (
            P("fsdp", "tp"),
            P("data"),
            r"rows: expected axes of the mesh \('dp', .*, each at most once, got P.'data",
        ),
        (
            P("fsdp", "tp"),
            P("dp", "fsdp"),
            r"rows: expected a PartitionSpec of at most 1 entries fo",
        ),
        (P("fsdp", "tp"), "dp", "rows: expected a PartitionSpec of at most 1 entries .* got dp"),
        (P("fsdp"), P(("tp", "tp")), "rows: expected axes of the mesh .*, each at most once"),
        (
            P(),
            P(("fsdp", "tp", "dp")),
            r"rows: expected a size of dimension 0 that the 8 devices al",
        ),
        (
            P(None, "fsdp"),
            None,
            r"sharding: expected a size of dimension 1 that the 4 devices along",
        ),
    ],
)
def test_shardings_that_do_not_fit_are_refused(kernel, rows, message):
    sharding = NamedSharding(sf.make_mesh((1, 4, 2, 1)), kernel)
    features, labels = jnp.ones((4, 8)), jnp.zeros(4, jnp.int32)
    with pytest.raises(sf.errors.ShardingError, match=message):
        sf.linear_cross_entropy(features, jnp.ones((8, 6)), labels, sharding=sharding, rows=rows)


def test_rows_that_the_devices_do_not_divide_are_refused():
    _, _, plan = on(*LAYOUTS["fsdp 8"])
    batch, kernel = arrays(ROWS + 4), init(jax.random.key(0))["out"]
    message = (
        r"labels.*8 devices along \('fsdp',\) divide, got int32\[1028\]; drop or pad the last batch"
    )
    message = message.replace("labels", "rows: expected a size of dimension 0 that the ")
    with pytest.raises(sf.errors.ShardingError, match=message):
        sf.linear_cross_entropy(batch["x"], kernel, batch["y"], sharding=plan.params["out"])


def test_another_mesh_than_that_of_shard_map_is_refused():
    _, _, plan = on(*LAYOUTS["fsdp 8"])
    other = sf.make_mesh((8,), ("data",))
    batch, kernel = arrays(), init(jax.random.key(0))["out"]

    def total(x, y):
        return sf.linear_cross_entropy(x, kernel, y, sharding=plan.params["out"]).total

    mapped = jax.shard_map(total, mesh=other, in_specs=P("data"), out_specs=P(), check_vma=False)
    with pytest.raises(
        sf.errors.ShardingError, match=r"expected the mesh \{'data': 8\} of shard_map, got"
    ):
        mapped(batch["x"], batch["y"])
