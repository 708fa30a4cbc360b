"""`describe` says what a step holds, sends and computes, and remarks on waste."""

import json
import resource
import warnings
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.small import ones

import stepfold as sf
from stepfold.inspect.flops import Product
from stepfold.inspect.report import (
    leaf_remarks,
    not_reused,
    product_remarks,
)

TX = optax.adam(0.1)


def init(key):
    return {"in": jax.random.normal(key, (64, 256)), "out": jnp.zeros((256, 32))}


def loss_fn(params, batch, key):
    return sf.mean((jnp.tanh(batch @ params["in"]) @ params["out"]).mean(-1) ** 2)


STEP, EVAL = sf.make_train_step(loss_fn, TX), sf.make_eval_step(loss_fn)
BATCH = jax.ShapeDtypeStruct((32, 64), jnp.float32)
SIZE = 64 * 256 + 256 * 32
FORWARD = 2 * 32 * SIZE
TRAINING = 2 * FORWARD + 2 * 32 * 256 * 32


@cache
def described(dims=None, step=STEP, build=init, batch=BATCH, tx=TX, **options):
    shape = jax.eval_shape(lambda: sf.init_state(build, tx, jax.random.key(0)))
    plan = dims and sf.make_sharding(shape, sf.make_mesh(dims))
    return sf.describe(step, shape, batch, sharding=plan, **options)


# What it says


def test_of_one_device():
    report = described()
    assert (report.devices, report.device_kind, report.mesh) == (1, "cpu", {})
    assert (report.parameters, report.flops.dots, report.flops.unknown) == (SIZE, TRAINING, ())
    assert (report.collectives, report.moved) == ((), 0)
    assert (report.not_reused, report.whole, report.remarks, report.estimate) == ((), (), (), None)


def test_of_eight_devices():
    report = described((2, 4, 1, 1))
    assert report.devices == 8
    assert report.mesh == {"dp": 2, "fsdp": 4, "tp": 1, "sp": 1}
    assert (report.parameters, report.flops.dots) == (SIZE, TRAINING // 8)
    assert report.moved == sum(one.moved for one in report.collectives) > 0


def test_a_compiled_step_is_described_as_it_is():
    state = sf.init_state(init, TX, jax.random.key(0))
    step = sf.compile_step(STEP, state, np.ones((32, 64), np.float32), donate=False)
    report = sf.describe(step, state, None)
    assert report.memory.output > report.memory.state
    assert report.flops == described().flops


def test_an_evaluation_sums_no_gradients():
    report = described((1, 8, 1, 1), EVAL)
    assert report.flops.dots * 8 == FORWARD
    assert (report.not_reused, report.remarks) == ((), ())


def test_it_computes_nothing_and_keeps_what_it_is_given(compiles):
    state = sf.init_state(init, TX, jax.random.key(0))
    batch = jnp.ones((32, 64))
    compiles.clear()
    sf.describe(STEP, state, batch)
    assert len(compiles) == 1
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


# Remarks


def wasteful(state, batch):
    return {"w": (state["w"] * batch).astype(jnp.bfloat16), "n": state["n"] + 1}, {}


@pytest.mark.parametrize("donate", [True, False])
def test_what_is_donated_in_vain_is_remarked_on_and_not_warned_of(donate):
    state = {"w": jnp.ones((512, 512)), "n": jnp.zeros((), jnp.int32)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = sf.describe(wasteful, state, jnp.ones(()), donate=donate)
    assert caught == []
    assert report.not_reused == ((("w", 1 << 20),) if donate else ())
    words = "1.00 MiB donated, but not reused: w (1.00 MiB)"
    assert report.remarks == ((words,) if donate else ())


def wide(key):
    return {f"layer{index}": jnp.ones((512, 512)) for index in range(2)}


def wide_loss(params, batch, key):
    for layer in params.values():
        batch = batch @ layer
    return sf.mean(batch.mean(-1))


WIDE = sf.make_train_step(wide_loss, TX)
ROWS = jax.ShapeDtypeStruct((32, 512), jnp.float32)


def test_large_leaves_that_are_whole_are_remarked_on():
    report = described((8, 1, 1, 1), WIDE, wide, ROWS)
    assert [name for name, _ in report.whole][:2] == ["params/layer0", "params/layer1"]
    (remark,) = report.remarks
    assert remark == (
        "6.00 MiB replicated on each of 8 devices: params/layer0 (1.00 MiB), "
        "params/layer1 (1.00 MiB), opt_state/0/mu/layer0 (1.00 MiB) and 3 more"
    )
    assert described((1, 8, 1, 1), WIDE, wide, ROWS).whole == ()


def test_what_is_not_counted_is_remarked_on():
    def loss_fn(params, batch, key):
        steps = (batch.sum() > 0).astype(jnp.int32) + 3
        body = lambda at: (at[0] + 1, jnp.tanh(at[1] @ params["in"] @ params["in"].T))
        _, hidden = jax.lax.while_loop(lambda at: at[0] < steps, body, (0, batch))
        return sf.mean(hidden.mean(-1))

    (remark,) = described(step=sf.make_eval_step(loss_fn)).remarks
    assert remark.startswith("not in the FLOPs: a loop of unknown length, counted once")


# Does it fit


def test_a_step_that_does_not_fit_raises_with_the_table():
    report = described((1, 8, 1, 1))
    with pytest.raises(sf.errors.ConfigError) as caught:
        report.assert_fits(2**10)
    text = str(caught.value)
    assert text.startswith("the step needs ")
    assert "on each device, and the limit is 1.00 KiB:\n\non each device" in text
    for name in ("parameters", "optimizer's state", "batch", "temporaries", "peak, predicted"):
        assert f"\n{name} " in text


def deep_loss(params, batch, key):
    for _ in range(6):
        batch = jnp.tanh(batch @ params["in"] @ params["in"].T)
    return sf.mean(batch.mean(-1))


@pytest.mark.parametrize(
    ("step", "rows", "most", "turns"),
    [
        (
            sf.make_train_step(deep_loss, TX),
            4096,
            "Most of it is temporaries: ",
            ("accumulate=n", "remat=True", "precision='bf16'"),
        ),
        (EVAL, 8, "Most of it is the state: ", ("sf.sharding.fsdp()", "optimizer")),
        (EVAL, 1 << 16, "Most of it is the batch: ", ("batch",)),
    ],
)
def test_advice_is_on_what_takes_most(step, rows, most, turns):
    report = described(step=step, batch=jax.ShapeDtypeStruct((rows, 64), jnp.float32))
    with pytest.raises(sf.errors.ConfigError) as caught:
        report.assert_fits(100)
    text = str(caught.value).splitlines()[-1]
    assert text.startswith(most)
    assert [turn for turn in turns if turn not in text] == []


# Utilization


def test_utilization_of_a_given_peak():
    assert described().mfu(2.0, peak=TRAINING) == 0.5
    tokens = described(tokens=32)
    assert tokens.estimate == 6 * SIZE * 32
    assert tokens.mfu(1.0, peak=12 * SIZE * 32) == 0.5
    assert described((2, 4, 1, 1), tokens=32).estimate == tokens.estimate // 8  # its share
    assert described(step=EVAL, tokens=32).estimate == 2 * SIZE * 32  # of the forward pass


def test_an_unknown_device_is_an_error():
    words = "mfu: the bfloat16 peak of 'cpu' is not known; give peak="
    with pytest.raises(sf.errors.ConfigError, match=words):
        described().mfu(1.0)
    with pytest.raises(sf.errors.ConfigError, match="the float32 peak of 'cpu' is not known"):
        described().mfu(1.0, dtype="float32")
    with pytest.raises(sf.errors.ConfigError, match="mfu: expected seconds above 0, got 0"):
        described().mfu(0, peak=1.0)


# As data and as text


NARROW = sf.make_train_step(loss_fn, TX, accumulate=2, precision="bf16")
REPORTS = {
    "one device": lambda: described(tokens=32),
    "mesh": lambda: described((2, 4, 1, 1), tokens=32),
    "whole": lambda: described((8, 1, 1, 1), WIDE, wide, ROWS),
    "eval": lambda: described(step=EVAL),
    "options": lambda: described(step=NARROW),
    "no products": lambda: sf.describe(lambda s, x: (s + x, {}), jnp.ones(3), jnp.ones(3)),
}


@pytest.fixture(scope="module", params=REPORTS)
def report(request):
    return REPORTS[request.param]()


def test_it_is_plain_data(report):
    data = report.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["memory"]["peak"] == report.memory.peak
    assert data["memory"]["state"] == report.memory.state
    assert data["flops"]["dots"] == report.flops.dots
    assert data["moved"] == report.moved
    assert sum(one["flops"] for one in data["products"]) == sum(o.flops for o in report.products)
    assert [one["kind"] for one in data["collectives"]] == [o.kind for o in report.collectives]
    assert [leaf["path"] for leaf in data["whole"]] == [path for path, _ in report.whole]
    assert data["remarks"] == list(report.remarks)
    assert type(data["mesh"]) is dict


def test_the_text_has_every_section(report):
    text = str(report)
    lines = text.splitlines()
    assert lines[0].startswith(f"a step on {report.devices} cpu device")
    assert "parameters, " in lines[1]
    assert "on each device" in lines[1]
    assert any(line.startswith("on each device ") for line in lines)
    assert any(line.startswith("peak, predicted") for line in lines)
    assert any(line.startswith("collective ") for line in lines) == bool(report.collectives)
    at = next((i for i, line in enumerate(lines) if line.startswith("! ")), len(lines))
    remarks = " ".join(line.strip() for line in lines[at:])
    assert remarks == " ".join(f"! {remark}" for remark in report.remarks)
    assert ("estimate by tokens" in text) == (report.estimate is not None)
    assert max(map(len, lines)) <= 130


def test_the_text_names_the_mesh_and_the_dtypes():
    text = str(described((2, 4, 1, 1)))
    assert text.startswith("a step on 8 cpu devices (dp 2 x fsdp 4)\n")
    assert "(float32 100%)" in text
    assert "a step on 1 cpu device\n" in str(described())
    assert "(bfloat16 100%)" in str(described(step=NARROW))


# A model that no memory here could hold


LAYERS, WIDTH, LONG, ROWS_OF = 48, 4096, 128, 16


def huge(key):
    shape = (LAYERS, WIDTH, WIDTH)
    return {
        **{name: jnp.zeros(shape) for name in ("q", "k", "v", "o")},
        "up": jnp.zeros((LAYERS, WIDTH, 4 * WIDTH)),
        "down": jnp.zeros((LAYERS, 4 * WIDTH, WIDTH)),
    }


def huge_loss(params, batch, key):
    @jax.checkpoint
    def layer(x, p):
        q, k, v = x @ p["q"], x @ p["k"], x @ p["v"]
        weights = jax.nn.softmax(jnp.einsum("bsd,btd->bst", q, k), axis=-1)
        x = x + jnp.einsum("bst,btd->bsd", weights, v) @ p["o"]
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    return sf.mean(jax.lax.scan(layer, batch, params)[0].mean((-1, -2)) ** 2)


@pytest.mark.parametrize(("dims", "axis"), [((1, 8, 1, 1), "fsdp"), ((8, 1, 1, 1), "dp")])
def test_ten_billion_parameters_are_described_without_holding_them(dims, axis, count):
    if axis == "dp" and count(0, 1) == 0:
        pytest.skip("one mesh is enough, but for --full")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    batch = jax.ShapeDtypeStruct((ROWS_OF, LONG, WIDTH), jnp.float32)
    tokens = ROWS_OF * LONG
    report = described(dims, sf.make_train_step(huge_loss, TX), huge, batch, tokens=tokens)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 2**30
    numbers = LAYERS * 12 * WIDTH**2
    assert report.parameters == numbers > 9.6e9
    cut = 8 if axis == "fsdp" else 1
    assert report.memory.params == numbers * 4 // cut
    assert report.memory.opt_state == 2 * numbers * 4 // cut + 4
    # The estimate knows neither attention's products nor the layers that are computed again.
    assert report.estimate < report.flops.dots < 1.5 * report.estimate
    assert report.flops.unknown == ()
    large = [one for one in report.collectives if one.bytes > 2**20]
    assert {one.axes for one in large} == {(axis,)}
    kinds = {one.kind for one in large}
    assert ("all-gather" in kinds) == (axis == "fsdp")
    assert "all-reduce" in kinds
    if axis == "dp":
        reduced = sum(one.bytes for one in large if one.kind == "all-reduce")
        assert reduced == pytest.approx(numbers * 4, rel=0.01)
    assert bool(report.whole) == (axis == "dp")
    with pytest.raises(
        sf.errors.ConfigError, match="the step needs .* GiB on each device, and the limit is"
    ):
        report.assert_fits(2**30)


def test_tensor_parallel_layers_talk_along_tp():
    rules = [("params/in", P(None, "tp")), ("params/out", P("tp"))]
    shape = jax.eval_shape(lambda: sf.init_state(init, TX, jax.random.key(0)))
    mesh = sf.make_mesh((2, 1, 4, 1))
    report = sf.describe(STEP, shape, BATCH, sharding=sf.make_sharding(shape, mesh, rules))
    assert {one.axes for one in report.collectives} >= {("tp",), ("dp",)}
    assert report.flops.dots * 8 == TRAINING


@pytest.mark.parametrize("once", [False, True])
def test_sums_are_remarked_on_where_gradients_are_summed_whole(once):
    mesh, tx = sf.make_mesh(), optax.sgd(0.1)
    state = sf.init_state({"w": jnp.ones((128, 128))}, tx, jax.random.key(0))
    plan = sf.make_sharding(state, mesh)
    loss = lambda params, batch, key: sf.mean((batch @ params["w"]) ** 2)
    grad = sf.sharding.reduce_once(plan) if once else sf.make_grad
    step = sf.make_train_step(loss, tx, grad=grad)
    report = sf.describe(step, state, jnp.ones((512, 128)), sharding=plan)
    words = "compiled for a CPU, which reduces the gradients of sharded parameters"
    assert any(remark.startswith(words) for remark in report.remarks) != once


def test_sums_of_activations_are_not_taken_for_those_of_gradients():
    params = {"up": jnp.ones((64, 128)), "down": jnp.ones((128, 64))}
    shape = jax.eval_shape(lambda: sf.init_state(params, TX, jax.random.key(0)))
    rules = [("up$", P(None, "tp")), ("down$", P("tp", None))]
    plan = sf.make_sharding(shape, sf.make_mesh((1, 1, 8, 1)), rules)
    loss = lambda p, batch, key: sf.mean((jnp.tanh(batch @ p["up"]) @ p["down"]) ** 2)
    batch = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
    report = sf.describe(sf.make_train_step(loss, TX), shape, batch, sharding=plan)
    assert "all-reduce" in {one.kind for one in report.collectives}
    assert report.remarks == ()


# Remarks by hand


def test_of_many_leaves_the_largest_are_named_and_small_ones_are_not():
    leaves = [("a", 1 << 10), ("b", 1 << 20), ("c", 1 << 12), ("d", 1 << 11)]
    assert leaf_remarks("whole", leaves) == [
        "1.01 MiB whole: b (1.00 MiB), c (4.00 KiB), d (2.00 KiB) and 1 more"
    ]
    assert leaf_remarks("whole", leaves[:1]) == ["1.00 KiB whole: a (1.00 KiB)"]
    for small in ([], [("count", 4), ("key", 1019)]):
        assert leaf_remarks("whole", small) == []


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (["float64", "float32"], "50% of products in wider dtypes: x (float64, 50%)"),
        (["float32", "bfloat16"], "50% of products in wider dtypes: x (float32, 50%)"),
        (["float32", "float8_e4m3fn"], "50% of products in wider dtypes: x (float32, 50%)"),
        (["float32", "float32"], None),
        (["bfloat16"], None),
        ([], None),
    ],
)
def test_wider_products_are_mentioned(dtypes, expected):
    found = [Product(dtype, 100, "x") for dtype in dtypes]
    assert product_remarks(found) == ([] if expected is None else [expected])
    assert product_remarks([one._replace(flops=0) for one in found]) == []  # of empty batches


# Memory that a step could do without


W, B = 64 * 128 * 4, 128 * 4


def init_affine(key):
    return {"w": jax.random.normal(key, (64, 128)), "b": jnp.zeros(128)}


def affine_loss(params, batch, key):
    out = (batch["x"] @ params["w"] + params["b"]).mean(-1)
    return sf.mean(out.astype(batch["y"].dtype) * batch["y"])


AFFINE, AFFINE_EVAL = sf.make_train_step(affine_loss, TX), sf.make_eval_step(affine_loss)
PAIRS = {"x": np.ones((16, 64), np.float32), "y": np.ones(16, np.float32)}


@cache
def compiled(dims=None, step=AFFINE, build=init_affine, tx=TX, **options):
    shape = jax.eval_shape(lambda: sf.init_state(build, tx, jax.random.key(0)))
    plan = dims and sf.make_sharding(shape, sf.make_mesh(dims))
    return sf.compile_step(step, shape, PAIRS, sharding=plan, **options)


# What is donated and not used again


@pytest.mark.parametrize(
    ("dims", "options"),
    [
        (None, {}),
        pytest.param((8, 1, 1, 1), {"accumulate": 2}, marks=pytest.mark.full),
        ((2, 4, 1, 1), {"precision": "bf16", "skip_nonfinite": True, "remat": True}),
    ],
    ids=str,
)
def test_a_train_step_uses_all_it_is_given(dims, options):
    assert not_reused(compiled(dims, sf.make_train_step(affine_loss, TX, **options))) == []


def unused(step, state, batch):
    """Compile a step that wastes what it is given, of which jax warns at times."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        return not_reused(sf.compile_step(step, state, batch))


def narrowing(state, batch):
    """Let the parameters slip into what the products were made in."""
    grads = jax.grad(lambda w: jnp.sum(jnp.tanh(batch @ w)))(state["w"])
    return {"w": (state["w"] - 0.1 * grads).astype(jnp.bfloat16), "n": state["n"] + 1}, {}


def narrowing_state(place=None):
    made = {"w": jnp.ones((64, 128)), "n": jnp.zeros((), jnp.int32)}
    return made if place is None else jax.device_put(made, place)


@pytest.mark.parametrize("on_mesh", [False, True])
def test_a_leaf_that_comes_back_in_another_dtype_is_named(on_mesh):
    place = NamedSharding(sf.make_mesh(), P()) if on_mesh else None
    assert unused(narrowing, narrowing_state(place), jnp.ones((8, 64))) == [("w", W)]


NAMES = ["plain", "it's", 'a"b', "a\\b", "a[0]", "a b", "a\nb", "a/b", "größe", "層", ""]
ALIKE = {"a": ones((64, 32)), "b": ones((64, 32)), "n": ones((), np.int32)}


def scaled(state, batch):
    return jax.tree.map(lambda leaf: leaf * batch, state), {}


@pytest.mark.parametrize(
    ("step", "state"),
    [
        (lambda state, batch: (state, {}), ALIKE),
        (lambda state, batch: ({"a": state["b"], "b": state["a"], "n": state["n"]}, {}), ALIKE),
        (scaled, ones(8)),
        (scaled, {"params": {name: ones((8, 8)) for name in NAMES}, "z": ones(4)}),
        (scaled, [{"w": ones((4, index + 1))} for index in range(12)]),
    ],
    ids=["nothing changes", "a swap", "one array", "any names", "many layers"],
)
def test_leaves_of_any_tree_are_found_again(step, state):
    assert unused(step, state, jnp.ones(())) == []


# What is whole on each device


# The table of parameters


PARAMS = {
    "layers": [{"w": np.ones((64, 128), np.float32), "b": ones(128, jnp.bfloat16)}] * 2,
    "norm": (jax.device_put(np.full(3, 2, np.float32)),),
}
ARRAYS = jax.device_put(PARAMS)


def cells(text):
    """Read a table as rows of cells, by name."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    head, *rest = [row for row in rows if row]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rest}


def test_parameters_and_abstract_ones_are_listed_by_their_paths_with_a_total():
    numbers, size = 2 * (8192 + 128) + 3, 2 * (8192 * 4 + 128 * 2) + 3 * 4
    for params in (PARAMS, jax.eval_shape(lambda: ARRAYS)):
        table = sf.inspect.parameter_table(params)
        found = cells(table)
        assert list(found) == ["layers/0/b", "layers/0/w", "layers/1/b", "layers/1/w", "norm/0"]
        row = found["layers/1/w"]
        assert (row["Shape"], row["Dtype"], row["Size"]) == ("(64, 128)", "float32", "8,192")
        assert found["layers/0/b"]["Dtype"] == "bfloat16"
        assert "Sharding" not in row
        assert table.endswith(f"Total: {numbers:,} -- {size:,} bytes")
    assert sf.inspect.parameter_table({}).endswith("Total: 0 -- 0 bytes")


@pytest.mark.parametrize("abstract", [True, False])
def test_a_plan_gives_the_shardings(abstract):
    rules = [("layers/0/w", P("fsdp", "tp"))]
    plan = sf.make_sharding(ARRAYS, sf.make_mesh((1, 4, 2, 1)), rules)
    found = cells(
        sf.inspect.parameter_table(jax.eval_shape(lambda: ARRAYS) if abstract else ARRAYS, plan)
    )
    assert found["layers/0/w"]["Sharding"] == "('fsdp', 'tp')"
    assert found["layers/1/w"]["Sharding"] == "(None, 'fsdp')"
    assert found["layers/0/b"]["Sharding"] == "()"


def test_statistics_are_of_arrays_in_their_shardings():
    plan = sf.make_sharding(ARRAYS, sf.make_mesh())
    words = "stats=True: expected arrays in their shardings, got a plan"
    with pytest.raises(sf.errors.ConfigError, match=words):
        sf.inspect.parameter_table(ARRAYS, plan, stats=True)
    words = "stats=True: expected arrays .* got the abstract layers/0/b"
    with pytest.raises(sf.errors.ConfigError, match=words):
        sf.inspect.parameter_table(jax.eval_shape(lambda: ARRAYS), stats=True)
    found = cells(sf.inspect.parameter_table(sf.sharding.place(ARRAYS, plan), stats=True))
    assert found["norm/0"]["Mean"] == "2.0"
    assert found["layers/0/w"]["Sharding"] == "(None, 'fsdp')"


def test_what_is_no_array_is_refused_by_its_path():
    with pytest.raises(sf.errors.ConfigError, match="act: expected an array"):
        sf.inspect.parameter_table({"w": jnp.ones(3), "act": jnp.tanh})
