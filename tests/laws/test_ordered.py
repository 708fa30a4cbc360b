"""An ordered step computes the same bits on any mesh; other steps do not."""

import importlib
import math
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from tests.small import full_but

import stepfold as sf

ordered = importlib.import_module("stepfold.sharding.ordered")

STEPS, ROWS, LENGTH, WORDS, WIDTH = 3, 32, 8, 32, 32
MESHES = [(2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)]
EXACT = {"xla_allow_excess_precision": False}


def init():
    rng = np.random.default_rng(0)
    normal = lambda *shape: (rng.normal(size=shape) / shape[-1] ** 0.5).astype(np.float32)
    params = {
        "embed": normal(WORDS, WIDTH),
        "up": normal(WIDTH, 2 * WIDTH),
        "down": normal(2 * WIDTH, WIDTH),
        "bias": np.zeros(7, np.float32),  # no number of devices divides it
    }
    return params, {"mean": np.zeros(WIDTH, np.float32), "calls": np.int32(0)}


def loss_fn(params, batch, key, model_state):
    """Compute two terms with ragged masks and dropout, and the running mean of an activation."""
    x = params["embed"][batch["words"]]
    hidden = jnp.tanh(x @ params["up"]) @ params["down"]
    keep = jax.random.bernoulli(key, 0.9, hidden.shape)
    x = x + jnp.where(keep, hidden / 0.9, jnp.zeros_like(hidden))
    x = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    logits = x @ params["embed"].T + params["bias"].sum()
    scale = jax.nn.logsumexp(logits, -1)
    nll = scale - jnp.take_along_axis(logits, batch["next"][..., None], -1)[..., 0]
    size = sum((x.astype(jnp.float32) ** 2).sum() for x in jax.tree.leaves(params))
    terms = {"nll": sf.mean(nll, batch["mask"]), "scale": sf.mean(1e-3 * scale**2)}
    terms["size"] = 1e-4 * size  # its gradient is a product, which may be fused with a sum
    hit = logits.argmax(-1).astype(np.int32) == batch["next"]
    mean = 0.9 * model_state["mean"] + 0.1 * x.astype(jnp.float32).mean((0, 1))
    model_state = {"mean": mean, "calls": model_state["calls"] + 1}
    return terms, {"hit": sf.mean(hit, batch["mask"])}, model_state


def batch(i):
    rng = np.random.default_rng(i)
    words = rng.integers(0, WORDS, (ROWS, LENGTH + 1)).astype(np.int32)
    return {"words": words[:, :-1], "next": words[:, 1:], "mask": rng.random(ROWS) < 0.7}


def optimizer(mesh):
    return optax.chain(sf.optim.clip_by_ordered_norm(0.1, mesh), optax.adamw(0.01))


def mesh_of(dims):
    return sf.make_mesh((*dims, 1, 1), devices=jax.devices()[: math.prod(dims)])


@cache
def _start():
    tx = optimizer(mesh_of((1, 1)))
    return jax.jit(lambda: sf.init_state(init(), tx, jax.random.key(0), stateful=True))


def compile_ordered(dims, grad=None, precision="f32"):
    """Compile a step; return a new state, and a function that trains a state for some steps."""
    mesh = mesh_of(dims)
    plan = sf.make_sharding(jax.eval_shape(_start()), mesh, sf.sharding.fsdp(min_size=64))
    state, tx = sf.sharding.place(_start()(), plan), optimizer(mesh)
    grad = grad(plan) if grad else sf.sharding.ordered(plan, blocks=8)
    step = sf.make_train_step(loss_fn, tx, precision=precision, stateful=True, grad=grad)
    step = sf.observe(step, weight_norm=lambda state: sf.optim.ordered_norm(state.params, mesh))
    place = lambda i: sf.shard_batch(batch(i), mesh)
    step = sf.compile_step(step, state, place(0), compiler_options=EXACT)

    def train(state, first=0, last=STEPS):
        metrics = []
        for i in range(first, last):
            state, latest = step(state, place(i))
            metrics.append(latest)
        return state, metrics

    return state, train


def bits(tree):
    data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [np.asarray(jax.device_get(data(x))).tobytes() for x in jax.tree.leaves(tree)]


@cache
def on_one_device(precision="f32"):
    """Return the bits of a run on one device, and what continues a run there."""
    state, train = compile_ordered((1, 1), precision=precision)
    return bits(train(state)), train


@pytest.mark.full
@pytest.mark.parametrize(("precision", "dims"), [*product(["f32", "bf16"], MESHES)])
def test_the_bits_are_those_of_one_device(precision, dims):
    state, train = compile_ordered(dims, precision=precision)
    assert bits(train(state)) == on_one_device(precision)[0]


def test_a_run_may_move_from_mesh_to_mesh(tmp_path):
    want, train_on_one = on_one_device()
    state, train = compile_ordered((2, 4))
    state, metrics = train(state, 0, 2)
    sf.save(tmp_path, state)
    plan = sf.make_sharding(state, mesh_of((1, 1)))
    like = lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
    state = sf.restore(tmp_path, jax.tree.map(like, state, plan)).state
    state, more = train_on_one(state, 2)
    assert bits((state, metrics + more)) == want


def accumulated(plan):
    return lambda loss_fn, **options: sf.make_grad(loss_fn, **{**options, "accumulate": 8})


@pytest.mark.full
@pytest.mark.parametrize("grad", [lambda plan: sf.make_grad, accumulated])
def test_other_gradients_depend_on_the_mesh(grad):
    results = [compile_ordered(dims, grad=grad) for dims in ((1, 1), (8, 1))]
    one, eight = (bits(train(state)) for state, train in results)
    assert one != eight


def test_only_the_ordered_norm_is_the_same_on_any_mesh():
    rng = np.random.default_rng(0)
    trees = [{"w": rng.normal(size=(64, 40)).astype(np.float32)} for _ in range(8)]
    results = {"ordered": [], "optax": []}
    for dims in [(1, 1), (2, 2), (1, 8)]:
        mesh = mesh_of(dims)
        sharded = jax.sharding.NamedSharding(mesh, P("fsdp"))
        trees = jax.device_put(jax.device_get(trees), sharded)
        norms = {
            "ordered": lambda x, mesh=mesh: sf.optim.ordered_norm(x, mesh),
            "optax": optax.tree.norm,
        }
        for name, norm in norms.items():
            results[name].append([bits(jax.jit(norm)(tree)) for tree in trees])
    first, *others = results["ordered"]
    assert others == [first] * 2
    first, *others = results["optax"]
    assert others != [first] * 2


def strangers(size, level):
    return [(device, device ^ size >> level + 1) for device in range(size)]


def in_sequence(function, first, count, like):
    def body(total, i):
        result, other = function(first + i)
        add = lambda t, r: t + r if r.dtype == jnp.float32 else t
        return sf.tree.select(i == 0, result, jax.tree.map(add, total, result)), other

    return jax.lax.scan(body, like, jnp.arange(count, dtype=jnp.int32))


MUTANTS = {
    "distant devices first": ("_siblings", strangers, (8, 1)),
    "one block after the other": ("_sum_in_tree", in_sequence, (1, 1)),
    "norms of shards": ("_longest_dim", lambda shape, divisor: None, (1, 8)),
}


@pytest.mark.parametrize("mutant", full_but(["one block after the other"], MUTANTS))
def test_mutants_compute_other_bits(mutant, monkeypatch):
    want, _ = on_one_device()
    name, function, dims = MUTANTS[mutant]
    monkeypatch.setattr(ordered, name, function)
    state, train = compile_ordered(dims)
    assert bits(train(state)) != want


def gradients(dims, loss_fn, params, batch, blocks=8):
    mesh = mesh_of(dims)
    state = sf.init_state(params, optax.sgd(0.1), jax.random.key(0))
    plan = sf.make_sharding(state, mesh, sf.sharding.fsdp(min_size=1))
    grad_fn = sf.sharding.ordered(plan, blocks=blocks)(loss_fn)
    params = sf.sharding.place(state, plan).params
    return jax.jit(grad_fn)(params, sf.shard_batch(batch, mesh), jax.random.key(0), ())


@pytest.mark.parametrize(
    ("blocks", "dims"), full_but([(16, (2, 4))], product((8, 16), [(1, 1), (1, 8), (2, 4)]))
)
def test_the_gradients_are_those_of_the_batch(dims, blocks):
    def loss_fn(params, batch, key):
        error = (jnp.tanh(batch["x"] @ params["w"]) @ params["out"]) ** 2
        terms = {"fit": sf.mean(error.sum(-1), batch["mask"]), "size": (params["w"] ** 2).sum()}
        return terms, {"small": sf.mean(error.sum(-1) < 30, batch["mask"])}

    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        params = {"w": rng.normal(size=(8, 16)), "out": rng.normal(size=(16, 3))}
        data = {"x": rng.normal(size=(32, 8)), "mask": rng.random(32) < 0.5}
        data["mask"][:4] = False  # all that the first of eight devices has
        got = gradients(dims, loss_fn, params, data, blocks)
        want = jax.jit(sf.make_grad(loss_fn))(params, data, jax.random.key(0), ())
        for name in params:
            np.testing.assert_allclose(got[0][name], want[0][name], rtol=1e-12)
        for metrics in (1, 2):
            for name, metric in want[metrics].items():
                np.testing.assert_allclose(
                    got[metrics][name].compute(), metric.compute(), rtol=1e-12
                )


@pytest.mark.full
def test_a_device_with_one_block_computes_the_bits_of_one_with_several():
    def loss_fn(params, batch, key):
        logits = batch["x"] @ params["w"]
        return sf.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]))

    rng = np.random.default_rng(3)
    params = {"w": jnp.asarray(rng.normal(size=(16, 10)), jnp.float32)}
    data = {"x": rng.normal(size=(8, 16)).astype(np.float32), "label": rng.integers(0, 10, 8)}
    on_one, on_eight = (gradients((n, 1), loss_fn, params, data) for n in (1, 8))
    assert bits(on_one) == bits(on_eight)


@pytest.mark.parametrize("dims", [(2, 1), (8, 1)])
def test_a_negative_zero_keeps_its_sign(dims):
    def loss_fn(params, batch, key):
        return (params * batch[0]).sum()

    grads, *_ = gradients(dims, loss_fn, jnp.ones(8), np.full((16, 8), -0.0, np.float32))
    assert np.signbit(grads).all()


def test_the_norm_is_the_global_norm():
    mesh = sf.make_mesh((2, 4, 1, 1))
    tree = {"a": jnp.arange(48.0).reshape(3, 16), "b": jnp.ones(7), "c": jnp.array(2.0)}
    tree["narrow"] = jnp.full((8,), 3.0, jnp.bfloat16)
    want = np.sqrt(sum((np.asarray(x, np.float64) ** 2).sum() for x in tree.values()))
    norm_of = jax.jit(partial(sf.optim.ordered_norm, mesh=mesh))
    norm = norm_of(tree)
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, want, rtol=1e-6)
    assert sf.optim.ordered_norm({}, mesh) == 0
    with jax.enable_x64(True):
        wide = norm_of({"a": np.ones(8), "b": np.ones(8, np.float32)})
        assert (wide.dtype, float(wide)) == (jnp.float64, 4.0)


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_the_clip_is_that_of_optax(limit):
    mesh = sf.make_mesh((2, 4, 1, 1))
    grads = {"a": jnp.arange(16.0), "b": jnp.ones((3, 5), jnp.bfloat16)}
    for clip in (sf.optim.clip_by_ordered_norm(limit, mesh), optax.clip_by_global_norm(limit)):
        with jax.numpy_dtype_promotion("standard"):
            clipped, _ = jax.jit(clip.update)(grads, clip.init(grads))
        if limit == 100.0:
            assert bits(clipped) == bits(grads)
        assert clipped["b"].dtype == jnp.bfloat16
        norm = np.sqrt(sum((np.asarray(x, np.float64) ** 2).sum() for x in clipped.values()))
        np.testing.assert_allclose(norm, min(limit, 35.426), rtol=1e-2)


def test_the_model_state_is_merged_over_the_blocks():
    def loss_fn(params, batch, key, model_state):
        keys = jax.random.split(model_state["key"])
        new = {"mean": batch.mean(0), "count": model_state["count"] + 1, "key": keys[0]}
        return sf.mean((batch * params).sum(-1)), {}, new

    data = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    mesh, tx = mesh_of((2, 1)), optax.sgd(0.1)
    model_state = {"mean": jnp.zeros(8), "count": jnp.array(3), "key": jax.random.key(5)}
    state = sf.init_state((jnp.ones(8), model_state), tx, jax.random.key(0), stateful=True)
    plan = sf.make_sharding(state, mesh)
    grad = sf.sharding.ordered(plan, blocks=8)
    step = jax.jit(sf.make_train_step(loss_fn, tx, stateful=True, grad=grad))
    state, _ = step(sf.sharding.place(state, plan), sf.shard_batch(data, mesh))
    np.testing.assert_allclose(state.model_state["mean"], data.mean(0), rtol=1e-6, atol=1e-7)
    assert int(state.model_state["count"]) == 4
    assert bits(state.model_state["key"]) == bits(jax.random.split(jax.random.key(5))[0])
