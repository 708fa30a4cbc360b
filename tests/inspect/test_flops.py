import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import pallas as pl

import stepfold as sf
from stepfold.inspect import flops


def count(function, *args):
    return flops.count(jax.make_jaxpr(function)(*args))


# Products


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_is_two_operations_a_multiply_add(dtype):
    found = count(jnp.matmul, jnp.ones((16, 32), dtype), jnp.ones((32, 8), dtype))
    assert found == (2 * 16 * 32 * 8, ())


@pytest.mark.parametrize("formula", ["bij,bjk->bik", "bij,bkj->bik", "bji,kbj->bik"])
def test_a_batched_product_counts_each_batch_once(formula):
    sizes = {"b": 5, "i": 48, "j": 64, "k": 72}
    left, right = formula.split("->")[0].split(",")
    arrays = [jnp.ones([sizes[axis] for axis in axes]) for axes in (left, right)]
    assert count(lambda x, y: jnp.einsum(formula, x, y), *arrays).dots == 2 * 5 * 48 * 64 * 72


def test_loops_and_branches_are_counted():
    def loop(p, x):
        body = lambda c, _: (lax.cond(p, lambda: c @ c, lambda: c @ c.T), None)
        return lax.scan(body, x, None, length=5)[0]

    assert count(loop, True, jnp.ones((16, 16))).dots == 5 * 2 * 2 * 16**3


def test_a_loop_of_unknown_length_is_named_with_its_line():
    loop = lambda n, x: lax.fori_loop(0, n, lambda _, c: c @ c, x)
    found = count(loop, 3, jnp.ones((8, 8)))
    assert found.dots == 2 * 8**3
    line = loop.__code__.co_firstlineno
    assert found.unknown == (f"a loop of unknown length, counted once: test_flops.py:{line}",)


def test_a_loop_of_unknown_length_without_products_is_not_named():
    assert count(lambda n, x: lax.fori_loop(0, n, lambda _, c: c * 2, x), 3, 1.0) == (0, ())


def test_only_what_a_linear_solve_runs_counts():
    def solve(matrix, b):
        run = lambda matvec, b: matrix @ b
        return lax.custom_linear_solve(lambda x: matrix @ x, b, run, run)

    assert count(solve, jnp.eye(8), jnp.ones(8)) == (2 * 8 * 8, ())


def mlp_step(accumulate):
    params = {"in": jnp.ones((16, 64)), "out": jnp.ones((64, 4))}

    def loss(params, batch, key):
        hidden = jnp.tanh(batch["x"] @ params["in"])
        return sf.mean((hidden @ params["out"] - batch["y"]) ** 2)

    tx = optax.adam(1e-3)
    state = sf.init_state(params, tx, jax.random.key(0))
    step = sf.make_train_step(loss, tx, accumulate=accumulate)
    return step, state, {"x": jnp.ones((32, 16)), "y": jnp.ones((32, 4))}


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_step_counts_as_it_does_by_hand(accumulate):
    step, state, batch = mlp_step(accumulate)
    forward = 2 * 32 * (16 * 64 + 64 * 4)
    found = count(step, state, batch)
    # No gradient with respect to the input: the first layer's backward pass is one product.
    assert found.dots == forward + forward + 2 * 32 * 64 * 4
    assert found.unknown == ()


def test_a_compiled_step_has_the_jaxpr_to_count():
    step, state, batch = mlp_step(4)
    assert flops.count(sf.compile_step(step, state, batch).jaxpr) == count(step, state, batch)


def test_estimates_are_near_the_count():
    step, state, batch = mlp_step(1)
    dots = count(step, state, batch).dots
    assert dots < flops.estimate(16 * 64 + 64 * 4, 32) < 1.6 * dots


# Convolutions, against XLA's own count, which is exact where nothing loops


CONVOLUTIONS = pytest.mark.parametrize(
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


def convolution(options):
    options = {"window_strides": (1, 1), **options}
    groups = options.get("feature_group_count", 1)
    image, kernel = jnp.ones((4, 12, 10, 8)), jnp.ones((3, 3, 8 // groups, 16))

    def convolve(image, kernel):
        layout = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(image, kernel, dimension_numbers=layout, **options)

    return convolve, image, kernel


def counts_as_xla_does(function, *args):
    compiled = jax.jit(function).lower(*args).compile()
    found = count(function, *args)
    assert found.dots == compiled.cost_analysis()["flops"] > 0
    assert found.unknown == ()


@CONVOLUTIONS
def test_convolutions_count_as_xla_does(options):
    counts_as_xla_does(*convolution(options))


@pytest.mark.parametrize("argument", [0, 1], ids=["image", "kernel"])
@CONVOLUTIONS
def test_the_backward_pass_of_convolutions_counts_as_xla_does(options, argument):
    convolve, *arrays = convolution(options)
    out = convolve(*arrays)

    def backward(out):
        return jax.vjp(convolve, *arrays)[1](out)[argument]

    counts_as_xla_does(backward, out)


def test_a_convolution_by_hand():
    convolve = lambda x, k: lax.conv(x, k, (1, 1), "VALID")
    found = count(convolve, jnp.ones((2, 3, 10, 10)), jnp.ones((5, 3, 3, 3)))
    assert found.dots == 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)


@pytest.mark.parametrize("argument", [None, 0, 1], ids=["forward", "image", "kernel"])
def test_convolutions_count_alike_in_each_direction(argument):
    image, kernel = jnp.ones((4, 16, 16, 8)), jnp.ones((3, 3, 8, 16))
    layout = ("NHWC", "HWIO", "NHWC")

    def convolve(image, kernel):
        return lax.conv_general_dilated(image, kernel, (1, 1), "VALID", dimension_numbers=layout)

    def backward(out):
        return jax.vjp(convolve, image, kernel)[1](out)[argument]

    args = (image, kernel) if argument is None else (convolve(image, kernel),)
    found = count(convolve if argument is None else backward, *args)
    assert found.dots == 2 * (4 * 14 * 14 * 16) * (3 * 3 * 8)


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


def test_a_callback_is_named():
    def host(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((8,), jnp.float32), x)

    (name,) = count(host, jnp.ones(8)).unknown
    assert name.startswith("pure_callback: test_flops.py:")


def test_what_may_hide_arithmetic_is_named_once():
    found = count(lambda x: jnp.linalg.cholesky(x) + jnp.fft.fft(x).real, jnp.eye(8))
    assert len(found.unknown) == 2
    assert any("cholesky" in name for name in found.unknown)
    assert any(name.startswith("fft: ") for name in found.unknown)


def test_what_only_moves_or_sorts_is_not_named():
    assert count(lambda x: lax.top_k(x, 3), jnp.ones((64, 64))).unknown == ()


@pytest.mark.parametrize("draw", [jax.random.normal, jax.random.gumbel, jax.random.permutation])
def test_random_numbers_are_not_named(draw):
    x = jnp.arange(8.0) if draw is jax.random.permutation else (8, 8)
    assert count(lambda key: draw(key, x), jax.random.key(0)).unknown == ()
