import json
import resource
import warnings
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import stepfold as sf

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


def test_without_donation_there_is_a_second_state():
    assert described(donate=False).memory.output >= described().memory.state


def test_an_evaluation():
    report = described((1, 8, 1, 1), EVAL)
    assert report.flops.dots * 8 == FORWARD
    assert report.not_reused == ()


def test_an_evaluation_sums_no_gradients():
    assert described((1, 8, 1, 1), EVAL).remarks == ()


def test_a_state_that_is_no_train_state():
    state = {"w": jnp.ones((64, 32)), "n": jnp.zeros((), jnp.int32)}
    step = lambda state, batch: ({"w": state["w"] * batch, "n": state["n"] + 1}, {})
    report = sf.describe(step, state, jnp.ones(32))
    assert report.parameters == 64 * 32 + 1
    assert "parameters" in str(report)


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


def test_other_warnings_come_out():
    def step(state, batch):
        warnings.warn("of my own", stacklevel=1)
        return state + batch, {}

    with pytest.warns(UserWarning, match="of my own"):
        sf.describe(step, jnp.ones(3), jnp.ones(3))


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


def test_sums_of_activations_are_no_sums_of_gradients():
    report = described((1, 8, 1, 1))  # so small a batch is gathered, and not the parameters
    assert any(one.kind == "all-reduce" for one in report.collectives)
    assert report.remarks == described((8, 1, 1, 1)).remarks == ()


def test_what_is_not_counted_is_remarked_on():
    def loss_fn(params, batch, key):
        steps = (batch.sum() > 0).astype(jnp.int32) + 3
        body = lambda at: (at[0] + 1, jnp.tanh(at[1] @ params["in"] @ params["in"].T))
        _, hidden = jax.lax.while_loop(lambda at: at[0] < steps, body, (0, batch))
        return sf.mean(hidden.mean(-1))

    (remark,) = described(step=sf.make_eval_step(loss_fn)).remarks
    assert remark.startswith("not in the FLOPs: a loop of unknown length, counted once")


# Does it fit


def test_it_fits_where_there_is_enough():
    report = described()
    report.assert_fits(report.memory.peak)
    report.assert_fits(1e12)
    with pytest.raises(sf.ConfigError):
        report.assert_fits(report.memory.peak - 1)


def test_a_step_that_does_not_fit_raises_with_the_table():
    report = described((1, 8, 1, 1))
    with pytest.raises(sf.ConfigError) as caught:
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


def advice(*args, **options):
    with pytest.raises(sf.ConfigError) as caught:
        described(*args, **options).assert_fits(100)
    return str(caught.value).splitlines()[-1]


def test_advice_where_most_comes_and_goes():
    many = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    text = advice(step=sf.make_train_step(deep_loss, TX), batch=many)
    assert text.startswith("Most of it is temporaries: ")
    for turn in ("accumulate=n", "remat=True", "precision='bf16'"):
        assert turn in text


def test_advice_where_most_is_the_state():
    few = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    text = advice(step=EVAL, batch=few)
    assert text.startswith("Most of it is the state: ")
    assert "sf.fsdp()" in text
    assert "optimizer" in text


def test_advice_where_most_is_the_batch():
    text = advice(step=EVAL, batch=jax.ShapeDtypeStruct((1 << 16, 64), jnp.float32))
    assert "Most of it is the state" not in text
    assert "batch" in text


def test_advice_where_most_is_a_second_state():
    """Without donation the new state is held next to the old one."""
    few = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    step = lambda state, batch: (jax.tree.map(lambda leaf: leaf * 2, state), {})
    state = {"w": jnp.ones((512, 512))}
    with pytest.raises(sf.ConfigError) as caught:
        sf.describe(step, state, few, donate=False).assert_fits(100)
    assert "donate" in str(caught.value).splitlines()[-1]


# Utilization


def test_utilization_of_a_given_peak():
    report = described()
    assert report.mfu(2.0, peak=TRAINING) == 0.5
    tokens = described(tokens=32)
    assert tokens.estimate == 6 * SIZE * 32
    assert tokens.mfu(1.0, peak=12 * SIZE * 32) == 0.5


def test_the_estimate_is_a_devices_share():
    assert described((2, 4, 1, 1), tokens=32).estimate == 6 * SIZE * 32 // 8


def test_the_estimate_of_an_evaluation_is_of_the_forward_pass():
    assert described(step=EVAL, tokens=32).estimate == 2 * SIZE * 32


def test_an_unknown_device_is_an_error():
    words = "mfu: the bfloat16 peak of 'cpu' is not known; give peak="
    with pytest.raises(sf.ConfigError, match=words):
        described().mfu(1.0)
    with pytest.raises(sf.ConfigError, match="the float32 peak of 'cpu' is not known"):
        described().mfu(1.0, dtype="float32")
    with pytest.raises(sf.ConfigError, match="mfu: expected seconds above 0, got 0"):
        described().mfu(0, peak=1.0)


# As data and as text


REPORTS = {
    "one device": lambda: described(tokens=32),
    "mesh": lambda: described((2, 4, 1, 1), tokens=32),
    "whole": lambda: described((8, 1, 1, 1), WIDE, wide, ROWS),
    "eval": lambda: described(step=EVAL),
    "options": lambda: described(
        step=sf.make_train_step(loss_fn, TX, accumulate=2, precision="bf16")
    ),
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


def test_no_line_is_too_long(report):
    assert max(map(len, str(report).splitlines())) <= 130


def test_no_line_of_a_deep_model_is_too_long():
    path = "transformer/encoder/block/attention/multi_head/query_projection/kernel"

    def deep(key):
        leaf = jnp.ones((512, 512))
        for name in reversed(path.split("/")):
            leaf = {name: leaf}
        return {f"model{index}": leaf for index in range(3)}

    loss_fn = lambda params, batch, key: sf.mean(sum(map(jnp.sum, jax.tree.leaves(params))) * batch)
    batch = jax.ShapeDtypeStruct((8,), jnp.float32)
    text = str(described((8, 1, 1, 1), sf.make_train_step(loss_fn, TX), deep, batch))
    assert max(map(len, text.splitlines())) <= 130


def test_the_text_names_the_mesh_and_the_dtypes():
    text = str(described((2, 4, 1, 1)))
    assert text.startswith("a step on 8 cpu devices (dp 2 x fsdp 4)\n")
    assert "(float32 100%)" in text
    assert "a step on 1 cpu device\n" in str(described())
    assert "(bfloat16 100%)" in str(
        described(step=sf.make_train_step(loss_fn, TX, precision="bf16"))
    )


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


@pytest.mark.parametrize(("dims", "axis"), [((8, 1, 1, 1), "dp"), ((1, 8, 1, 1), "fsdp")])
def test_ten_billion_parameters_are_described_without_holding_them(dims, axis):
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
        sf.ConfigError, match="the step needs .* GiB on each device, and the limit is"
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
    grad = sf.reduce_once(plan) if once else sf.value_and_grad
    step = sf.make_train_step(loss, tx, grad=grad)
    report = sf.describe(step, state, jnp.ones((512, 128)), sharding=plan)
    words = "compiled for a CPU, which reduces the gradients of sharded parameters"
    assert any(remark.startswith(words) for remark in report.remarks) != once
