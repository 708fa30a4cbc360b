"""Functions of whole matrices: the same bits on any mesh, what is sent, and what is refused."""

import functools
import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stepfold as sf
from stepfold.inspect.collectives import collectives, parse

SHAPES = {
    **{f"layer{i}": {"up": (32, 64), "down": (64, 32), "key": (32, 8)} for i in range(3)},
    "stack": (3, 32, 64),
    "experts": (4, 32, 16),
}
# Meshes of x and y, and what shards rows, columns and experts.
LAYOUTS = {
    "one device": ((1, 1), None, None, None),
    "dp": ((8, 1), None, None, None),
    "fsdp 2": ((2, 1), "x", None, None),
    "fsdp 8": ((8, 1), "x", None, None),
    "tp": ((1, 8), None, "y", None),
    "fsdp x tp": ((4, 2), "x", "y", None),
    "both for rows": ((4, 2), ("x", "y"), None, None),
    "beside dp": ((4, 2), "y", None, None),
    "experts": ((4, 2), None, "y", "x"),
}


@functools.cache
def gradients():
    rng = np.random.default_rng(0)
    is_shape = lambda x: isinstance(x, tuple)
    return jax.tree.map(lambda s: np.float32(rng.normal(size=s)), SHAPES, is_leaf=is_shape)


def plan_of(layout):
    dims, rows, columns, experts = LAYOUTS[layout]
    mesh = sf.make_mesh(dims, ("x", "y"), devices=jax.devices()[: math.prod(dims)])
    specs = jax.tree.map(lambda x: P(*[None] * (x.ndim - 2), rows, columns), gradients())
    specs["experts"] = P(experts, None, columns) if experts else specs["experts"]
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )


@functools.cache
def run(layout, balance=False, function=sf.optim.orthogonalize):
    """Return the updates on the host, and the collectives of the compiled update."""
    plan = plan_of(layout)
    tx = sf.optim.at_home(function, plan, balance=balance)
    updates = jax.device_put(gradients(), plan)
    update = jax.jit(tx.update, out_shardings=(plan, None))
    compiled = update.lower(updates, tx.init(updates)).compile()
    results, _ = compiled(updates, tx.init(updates))
    mesh = jax.tree.leaves(plan)[0].mesh
    return jax.device_get(results), collectives(parse(compiled.as_text()), mesh)


@pytest.mark.parametrize("balance", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("layout", sorted(LAYOUTS.keys() - {"one device"}))
def test_the_bits_are_those_of_one_device(layout, balance):
    got, _ = run(layout, balance)
    jax.tree.map(np.testing.assert_array_equal, got, run("one device")[0])


def test_each_matrix_is_that_of_the_function_alone():
    got, _ = run("fsdp x tp")
    one = jax.jit(sf.optim.orthogonalize)
    for result, matrix in zip(jax.tree.leaves(got), jax.tree.leaves(gradients()), strict=True):
        flat = matrix.reshape(-1, *matrix.shape[-2:])
        expected = np.stack([one(x) for x in flat]).reshape(matrix.shape)
        np.testing.assert_allclose(result, expected, atol=2e-5)


def test_orthogonalize_is_that_of_optax():
    muon = optax.contrib.scale_by_muon(beta=0.0, nesterov=False)
    for shape in [(16, 48), (48, 16)]:
        matrix = np.float32(np.random.default_rng(1).normal(size=shape))
        with jax.numpy_dtype_promotion("standard"):
            expected, _ = jax.jit(muon.update)(matrix, muon.init(matrix), matrix)
        ratio = np.asarray(jax.jit(sf.optim.orthogonalize)(matrix)) / np.asarray(expected)
        np.testing.assert_allclose(ratio, ratio[0, 0] * np.ones(shape), rtol=2e-3)


@pytest.mark.parametrize(
    ("layout", "kind"), [("fsdp 8", "all-to-all"), ("tp", "all-to-all"), ("dp", "all-gather")]
)
def test_each_shape_is_sent_there_and_back(layout, kind):
    _, found = run(layout)
    (entry,) = found  # no other communication
    shapes = {x.shape[-2:] for x in jax.tree.leaves(gradients())}
    assert entry.kind == kind
    assert entry.count == len(shapes) * (2 if kind == "all-to-all" else 1)


def test_a_device_sends_twice_its_share_of_the_parameters():
    shape, devices = (64, 32), 8
    mesh = sf.make_mesh((devices,), ("x",))
    plan = [NamedSharding(mesh, P("x"))] * 16
    updates = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=one) for one in plan]
    tx = sf.optim.at_home(sf.optim.orthogonalize, plan)
    compiled = jax.jit(tx.update, out_shardings=(plan, None)).lower(updates, ()).compile()
    (entry,) = collectives(parse(compiled.as_text()), mesh)
    assert entry.bytes == 2 * 16 * 4 * math.prod(shape) // devices


def llama(layers, width, hidden, keys):
    shapes = {"qo": (width, width), "kv": (width, keys), "gate": (width, hidden)}
    counts = {"qo": 2 * layers, "kv": 2 * layers, "gate": 2 * layers}
    return {**shapes, "down": (hidden, width)}, {**counts, "down": layers}


@pytest.mark.parametrize(
    ("devices", "plain", "balanced", "bytes_sent"), [(8, 1.0, 1.0, 1.0), (64, 1.205, 1.02, 1.39)]
)
def test_balance_shares_out_the_work_of_many_devices(devices, plain, balanced, bytes_sent):
    """Of Llama 7B: the busiest device over the mean, and the bytes over those of the matrices."""
    module = importlib.import_module("stepfold.optim.at_home")
    mesh = jax.sharding.AbstractMesh((devices,), ("x",))
    shapes, counts = llama(32, 4096, 11008, 4096)
    groups = [
        module._Group(mesh, shape, (("x",), ()), (), counts[name], {})
        for name, shape in shapes.items()
    ]
    groups.sort(key=lambda group: -module._cost(group.shape))
    found = {}
    for balance in (False, True):
        homes = module._assign(groups, mesh, balance=balance)
        work = sum(
            (home >= 0).sum(1) * module._cost(group.shape)
            for group, home in zip(groups, homes, strict=True)
        )
        sizes = [math.prod(group.shape) for group in groups]
        sent = sum(home.size * size for home, size in zip(homes, sizes, strict=True))
        least = sum(g.num_matrices * size for g, size in zip(groups, sizes, strict=True))
        found[balance] = work.max() / work.mean(), sent / least
        assert all(
            sorted(home[home >= 0]) == [*range(group.num_matrices)]
            for group, home in zip(groups, homes, strict=True)
        )
    assert found[False][0] == pytest.approx(plain, abs=1e-3)
    assert found[True][0] <= balanced
    assert found[True][1] <= bytes_sent
    assert found[True][0] <= found[False][0]


def test_it_trains_beside_another_optimizer_and_resumes_on_another_mesh(tmp_path):
    def loss_fn(params, batch, key):
        return sf.mean(((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean(-1))

    rng = np.random.default_rng(0)
    data = {name: np.float32(rng.normal(size=(64, 16))) for name in "xy"}
    params = {"w": jnp.zeros((16, 16)), "b": jnp.zeros(16)}

    def fit(folder, dims, steps):
        mesh = sf.make_mesh(dims, ("dp", "fsdp"), devices=jax.devices()[: math.prod(dims)])
        rules = [("w$", P("fsdp", None))]
        home = sf.optim.at_home(sf.optim.orthogonalize, sf.make_sharding(params, mesh, rules))
        muon = optax.chain(optax.trace(0.9), home, optax.scale_by_learning_rate(0.1))
        tx = optax.partition({"muon": muon, "adam": optax.adam(0.1)}, {"w": "muon", "b": "adam"})
        make = functools.partial(sf.init_state, params, tx, jax.random.key(0))
        state = make(sharding=sf.make_sharding(jax.eval_shape(make), mesh, rules))
        step = sf.make_train_step(loss_fn, tx, accumulate=2)
        checkpoints = sf.Checkpoints(tmp_path / folder, every=4)
        batches = sf.batches(data, 16, seed=0)
        return sf.fit(step, state, batches, steps=steps, checkpoints=checkpoints, hooks=[])

    fit("cut", (1, 4), 4)
    cut, whole = fit("cut", (2, 2), 8), fit("whole", (1, 4), 8)
    for name in params:
        np.testing.assert_allclose(cut.state.params[name], whole.state.params[name], atol=1e-4)
    assert np.linalg.norm(cut.state.params["w"], 2) > 0.3  # as updates of norm 0.07 to 0.12 do


REFUSED = {
    "a vector": ({"w": jnp.ones((4, 4)), "b": jnp.ones(4)}, "b: expected a matrix or a stack"),
    "a leaf without a sharding": ({"v": jnp.ones((4, 4))}, "v: expected a sharding of it in the"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_matrix_is_refused(case):
    params, message = REFUSED[case]
    plan = sf.make_sharding({"w": jnp.ones((4, 4)), "b": jnp.ones(4)}, sf.make_mesh())
    with pytest.raises(sf.StepfoldError, match=message):
        sf.optim.at_home(sf.optim.orthogonalize, plan).init(params)


def test_wrong_arguments_are_refused():
    params = {"w": jnp.ones((6, 4))}
    plan = sf.make_sharding(params, sf.make_mesh())
    with pytest.raises(sf.errors.ConfigError, match="function: expected .*, as that of w, got"):
        sf.optim.at_home(jnp.linalg.norm, plan).init(params)
    with pytest.raises(sf.errors.ConfigError, match="plan: w: expected a NamedSharding"):
        sf.optim.at_home(sf.optim.orthogonalize, params)
    with pytest.raises(sf.errors.ConfigError, match="function: expected a function of a matrix"):
        sf.optim.at_home(3, plan)
    with pytest.raises(sf.errors.ConfigError, match="matrix: expected two axes"):
        sf.optim.orthogonalize(jnp.ones(3))
    uneven = {"w": NamedSharding(sf.make_mesh((4,), ("x",), devices=jax.devices()[:4]), P("x"))}
    with pytest.raises(sf.errors.ShardingError, match=r"w: expected axes that the devices divide"):
        sf.optim.at_home(sf.optim.orthogonalize, uneven).init(params)
