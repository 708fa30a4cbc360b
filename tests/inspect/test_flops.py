"""FLOPs are counted from the jaxpr, by dtype and line."""

import functools
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from tests.small import full_but, ones

import stepfold as sf
from stepfold.inspect import flops
from stepfold.inspect.flops import Product


def count(function, *args):
    return flops.count(jax.make_jaxpr(function)(*args))


def test_a_loop_of_unknown_length_is_named_with_its_line():
    loop = lambda n, x: lax.fori_loop(0, n, lambda _, c: c @ c, x)
    found = count(loop, 3, jnp.ones((8, 8)))
    assert found.dots == 2 * 8**3
    line = loop.__code__.co_firstlineno
    assert found.unknown == (f"a loop of unknown length, counted once: test_flops.py:{line}",)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_loop_from_i_to_i_plus_n_counts_n_times(length):
    loop = lambda i, x: lax.fori_loop(i, i + length, lambda _, c: c @ c, x)
    assert count(loop, 3, jnp.ones((8, 8))) == (length * 2 * 8**3, ())


@pytest.mark.parametrize(
    ("goes_on", "following"),
    [
        (lambda i, end: i < end, lambda i, end: (i + 2, end)),
        (lambda i, end: i < end, lambda i, end: (i + 1, end - 1)),
        (lambda i, end: i <= end, lambda i, end: (i + 1, end)),
        (lambda i, end: end < i, lambda i, end: (i + 1, end)),
        (lambda i, end: (i < end) & (i > 0), lambda i, end: (i + 1, end)),
    ],
)
def test_a_loop_that_counts_otherwise_has_an_unknown_length(goes_on, following):
    def loop(i, x):
        turn = lambda c: (*following(*c[:2]), c[2] @ c[2])
        return lax.while_loop(lambda c: goes_on(*c[:2]), turn, (i, i + 2, x))[2]

    found = count(loop, 3, jnp.ones((8, 8)))
    assert found.dots == 2 * 8**3
    assert len(found.unknown) == 1


def test_a_loop_of_unknown_length_without_products_is_not_named():
    assert count(lambda n, x: lax.fori_loop(0, n, lambda _, c: c * 2, x), 3, 1.0) == (0, ())


def test_only_what_a_linear_solve_runs_counts():
    def solve(matrix, b):
        run = lambda matvec, b: matrix @ b
        return lax.custom_linear_solve(lambda x: matrix @ x, b, run, run)

    assert count(solve, jnp.eye(8), jnp.ones(8)) == (2 * 8 * 8, ())


@pytest.mark.parametrize(
    "options",
    [
        {"padding": "SAME"},
        {"padding": "VALID"},
        {"padding": "SAME", "window_strides": (2, 2)},
        {"padding": ((2, 0), (0, 3)), "rhs_dilation": (2, 1)},
        {"padding": ((0, 1), (2, 0)), "lhs_dilation": (2, 3)},
        {"padding": "SAME", "feature_group_count": 4},
        {"padding": "SAME", "batch_group_count": 2},
    ],
    ids=str,
)
def test_convolutions_and_their_gradients_count_as_xla_does(options):
    """XLA's own count is exact where nothing loops."""
    groups = options.get("feature_group_count", 1)
    shapes = (4, 12, 10, 8), (3, 3, 8 // groups, 16)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    forward = functools.partial(convolve, **options)

    def both(image, kernel, gradient):
        out, backward = jax.vjp(forward, image, kernel)
        return out, backward(gradient)

    arrays.append(jax.eval_shape(forward, *arrays))
    found = count(both, *arrays)
    assert found.dots == jax.jit(both).lower(*arrays).compile().cost_analysis()["flops"] > 0
    assert found.unknown == ()


# What is not counted


def test_a_kernel_is_named_and_not_followed():
    def square(x_ref, out_ref):
        out_ref[...] = x_ref[...] @ x_ref[...]

    x = jnp.ones((8, 8))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    found = count(lambda x: pl.pallas_call(square, shape)(x), x)
    assert found.dots == 0
    assert [name.split(":")[0] for name in found.unknown] == ["pallas_call"]


def test_a_foreign_function_is_named_by_its_target():
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    found = count(lambda x: jax.ffi.ffi_call("my_gemm", shape)(x, x), jnp.ones((8, 8)))
    assert found.dots == 0
    assert [name.split(":")[0] for name in found.unknown] == ["my_gemm"]


@pytest.mark.parametrize("draw", [jax.random.normal, jax.random.gumbel, jax.random.permutation])
def test_random_numbers_are_not_named(draw):
    x = jnp.arange(8.0) if draw is jax.random.permutation else (8, 8)
    assert count(lambda key: draw(key, x), jax.random.key(0)).unknown == ()


# Products by dtype and line


TX = optax.adam(0.1)


def init(key):
    return {"in": jnp.ones((64, 256)), "out": jnp.ones((256, 32))}


def loss_fn(params, batch, key):
    return sf.mean((jnp.tanh(batch @ params["in"]) @ params["out"]).mean(-1) ** 2)


STATE = jax.eval_shape(lambda: sf.init_state(init, TX, jax.random.key(0)))
BATCH = jax.ShapeDtypeStruct((32, 64), jnp.float32)
FORWARD = 2 * 32 * (64 * 256 + 256 * 32)
# The first layer has no gradient with respect to its input.
TRAINING = 2 * FORWARD + 2 * 32 * 256 * 32


def products(step, state, batch):
    return flops.products(jax.make_jaxpr(step)(state, batch))


def total(found):
    return sum(one.flops for one in found)


def dtypes(found):
    return {one.dtype for one in found}


def here(offset=0):
    """The line of the caller."""
    return f"{Path(__file__).name}:{inspect.currentframe().f_back.f_lineno + offset}"


def of(function, *args):
    return products(lambda state, batch: function(*state), args, None)


# Numbers by hand


def test_a_train_step_by_hand():
    step = sf.make_train_step(loss_fn, TX)
    found = products(step, STATE, BATCH)
    assert (dtypes(found), total(found)) == ({"float32"}, TRAINING)
    assert total(products(sf.make_eval_step(loss_fn), STATE, BATCH)) == FORWARD
    compiled = sf.compile_step(step, STATE, BATCH)
    assert flops.count(compiled.jaxpr) == count(step, STATE, BATCH) == (TRAINING, ())
    assert TRAINING < flops.estimate(64 * 256 + 256 * 32, 32) < 1.6 * TRAINING


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation_does_not_change_the_flops(accumulate):
    step = sf.make_train_step(loss_fn, TX, accumulate=accumulate)
    assert total(products(step, STATE, BATCH)) == TRAINING


@pytest.mark.parametrize("formula", ["ij,jk->ik", "ij,kj->ki", "bij,bjk->bik", "bi,bi->b", "i,i->"])
def test_contractions(formula):
    sizes = {"b": 3, "i": 5, "j": 7, "k": 11}
    left, right = formula.split("->")[0].split(",")
    arrays = [jnp.ones([sizes[axis] for axis in axes]) for axes in (left, right)]
    wanted = 2
    for axis in set(left + right):
        wanted *= sizes[axis]
    assert total(of(lambda x, y: jnp.einsum(formula, x, y), *arrays)) == wanted


def convolve(image, kernel, padding="VALID", **options):
    layout = ("NHWC", "HWIO", "NHWC")
    options = {"window_strides": (1, 1), "dimension_numbers": layout} | options
    return lax.conv_general_dilated(image, kernel, padding=padding, **options)


# What is followed


X = ones((8, 8))
ONE = 2 * 8**3


def test_a_fixed_loop_is_a_scan_and_an_open_one_counts_once():
    assert total(of(lambda x: lax.fori_loop(0, 4, lambda _, c: c @ c, x), X)) in (ONE, 4 * ONE)
    assert total(of(lambda x, n: lax.fori_loop(0, n, lambda _, c: c @ c, x), X, 3)) == ONE


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jax.vmap, jax.named_call])
def test_wrappers_are_followed(wrap):
    x = X[None].repeat(2, 0) if wrap is jax.vmap else X
    assert total(of(wrap(lambda x: x @ x), x)) == ONE * (1 + (wrap is jax.vmap))


def test_recomputed_products_count():
    plain = lambda x: jnp.sum(jnp.tanh(x @ X) @ X)
    again = total(of(jax.value_and_grad(jax.checkpoint(plain)), X))
    assert again > total(of(jax.value_and_grad(plain), X))


def test_custom_derivatives_are_followed():
    @jax.custom_vjp
    def square(x):
        return x @ x

    square.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))
    assert total(of(square, X)) == ONE
    assert total(of(jax.value_and_grad(lambda x: square(x).sum()), X)) == 3 * ONE

    @jax.custom_jvp
    def cube(x):
        return x @ x @ x

    cube.defjvp(lambda x, t: (cube(*x), t[0] @ X))
    assert total(of(cube, X)) == 2 * ONE


def test_what_shard_map_does_counts_for_all_devices():
    mesh = sf.make_mesh()
    rows = P("fsdp")
    whole = lambda x, w: x @ w
    mapped = jax.shard_map(whole, mesh=mesh, in_specs=(rows, P()), out_specs=rows)
    assert total(of(mapped, jnp.ones((64, 8)), X)) == total(of(whole, jnp.ones((64, 8)), X))


def test_what_shard_map_does_over_one_axis_of_two_counts_each_once():
    mesh = sf.make_mesh((2, 1, 4, 1))
    mapped = jax.shard_map(
        lambda x, w: x @ w,
        mesh=mesh,
        in_specs=(P("dp"), P()),
        out_specs=P("dp"),
        axis_names={"dp"},
    )
    with jax.set_mesh(mesh):
        found = of(jax.jit(mapped), jnp.ones((64, 8)), X)
    assert total(found) == 2 * 64 * 8 * 8


# On several devices


@pytest.mark.parametrize(
    ("dims", "once"),
    full_but([((2, 4, 1, 1), True)], [((1, 8, 1, 1), False), ((2, 4, 1, 1), True)]),
)
def test_products_are_those_of_all_devices_together(dims, once):
    plan = sf.make_sharding(STATE, sf.make_mesh(dims))
    options = {"grad": sf.sharding.reduce_once(plan), "accumulate": 2} if once else {}
    step = sf.make_train_step(loss_fn, TX, **options)
    report = sf.describe(step, STATE, BATCH, sharding=plan)
    assert report.flops.dots * report.devices == TRAINING
    assert total(report.products) == TRAINING


# Dtypes and lines


def test_a_bfloat16_step_is_bfloat16_all_through():
    found = products(sf.make_train_step(loss_fn, TX, precision="bf16"), STATE, BATCH)
    assert dtypes(found) == {"bfloat16"}
    assert dtypes(products(sf.make_eval_step(loss_fn, precision="bf16"), STATE, BATCH)) == {
        "bfloat16"
    }


def test_the_backward_pass_has_the_line_of_the_forward_pass():
    def loss_fn(params, batch, key):
        hidden = batch @ params["in"]
        return sf.mean((hidden @ params["out"]).mean(-1))

    found = products(sf.make_train_step(loss_fn, TX), STATE, BATCH)
    assert {one.where for one in found} == {_at(loss_fn, 1), _at(loss_fn, 2)}


def _at(function, offset):
    return f"{Path(__file__).name}:{function.__code__.co_firstlineno + offset}"


def hidden(params, batch, key):
    out = jnp.tanh(batch @ params["in"])
    wide = out.astype(jnp.float32) @ params["out"].astype(jnp.float32)
    return sf.mean(wide.mean(-1) ** 2)


def test_a_float32_product_among_bfloat16_ones_is_found_with_its_line():
    step = sf.make_train_step(hidden, TX, precision="bf16")
    found = products(step, STATE, BATCH)
    wide = [one for one in found if one.dtype == "float32"]
    assert wide == [Product("float32", 3 * 2 * 32 * 256 * 32, _at(hidden, 2))]
    (remark,) = sf.describe(step, STATE, BATCH).remarks
    share = f"{wide[0].flops / total(found):.0%}"
    assert remark == f"{share} of products in wider dtypes: {_at(hidden, 2)} (float32, {share})"


def test_float64_is_found_with_its_line():
    def loss_fn(params, batch, key):
        wide = batch.astype(jnp.float64) @ params["in"].astype(jnp.float64)
        return sf.mean((wide.astype(jnp.float32) @ params["out"]).mean(-1))

    with jax.enable_x64(True):
        state, batch = sf.init_state(init32, TX, jax.random.key(0)), jnp.ones((32, 64), jnp.float32)
        report = sf.describe(sf.make_train_step(loss_fn, TX), state, batch)
    assert {one.where for one in report.products if one.dtype == "float64"} == {_at(loss_fn, 1)}
    (remark,) = [remark for remark in report.remarks if "wider dtypes" in remark]
    assert f"{_at(loss_fn, 1)} (float64, " in remark
    assert "float32" not in remark


def init32(key):
    return {"in": jnp.ones((64, 256), jnp.float32), "out": jnp.ones((256, 32), jnp.float32)}


@pytest.mark.parametrize("precision", [None, "f32", "bf16"])
def test_a_plain_step_is_not_remarked_on(precision):
    report = sf.describe(sf.make_train_step(loss_fn, TX, precision=precision), STATE, BATCH)
    assert report.remarks == ()
