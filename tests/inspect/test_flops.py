import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import stepfold as sf
from stepfold.inspect import flops, hlo


def text(function, *args):
    return jax.jit(function).lower(*args).compile().as_text()


def count(function, *args):
    return flops.count(hlo.parse(text(function, *args)))


def counted(*lines):
    body = "\n  ".join(lines)
    return flops.count(hlo.parse(f"ENTRY %main () -> f32[] {{\n  {body}\n}}"))


# Products


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_is_two_operations_a_multiply_add(dtype):
    found = count(jnp.matmul, jnp.ones((16, 32), dtype), jnp.ones((32, 8), dtype))
    assert found == (2 * 16 * 32 * 8, 2 * 16 * 32 * 8, ())


@pytest.mark.parametrize("formula", ["bij,bjk->bik", "bij,bkj->bik", "bji,kbj->bik"])
def test_a_batched_product_counts_each_batch_once(formula):
    sizes = {"b": 5, "i": 48, "j": 64, "k": 72}
    left, right = formula.split("->")[0].split(",")
    arrays = [jnp.ones([sizes[axis] for axis in axes]) for axes in (left, right)]
    assert count(lambda x, y: jnp.einsum(formula, x, y), *arrays).dots == 2 * 5 * 48 * 64 * 72


def test_elementwise_and_reductions_are_one_operation_an_element():
    found = count(lambda x: jnp.sum(jnp.tanh(x) * x), jnp.ones((16, 32)))
    assert found == (0, 3 * 16 * 32, ())


def test_loops_and_branches_are_counted():
    def loop(p, x):
        body = lambda c, _: (lax.cond(p, lambda: c @ c, lambda: c @ c.T), None)
        return lax.scan(body, x, None, length=5)[0]

    assert count(loop, True, jnp.ones((16, 16))).dots == 5 * 2 * 2 * 16**3


def test_a_loop_of_unknown_length_is_said():
    loop = lambda n, x: lax.fori_loop(0, n, lambda _, c: c @ c, x)
    found = count(loop, 3, jnp.ones((8, 8)))
    assert found.dots == 2 * 8**3
    assert "a loop of unknown length, counted once" in found.unknown[0]


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


def test_estimates_are_near_the_count():
    step, state, batch = mlp_step(1)
    dots = count(step, state, batch).dots
    assert dots < flops.estimate(16 * 64 + 64 * 4, 32) < 1.6 * dots


# Convolutions, against XLA's own count, which is exact where nothing loops


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
def test_convolutions_count_as_xla_does(options):
    options = {"window_strides": (1, 1), **options}
    groups = options.get("feature_group_count", 1)
    image, kernel = jnp.ones((4, 12, 10, 8)), jnp.ones((3, 3, 8 // groups, 16))

    def convolve(image, kernel):
        layout = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(image, kernel, dimension_numbers=layout, **options)

    compiled = jax.jit(convolve).lower(image, kernel).compile()
    found = flops.count(hlo.parse(compiled.as_text()))
    assert found.dots == compiled.cost_analysis()["flops"] > 0
    assert found.unknown == ()


def test_a_convolution_by_hand():
    convolve = lambda x, k: lax.conv(x, k, (1, 1), "VALID")
    found = count(convolve, jnp.ones((2, 3, 10, 10)), jnp.ones((5, 3, 3, 3)))
    assert found.dots == 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)


def test_a_product_that_a_tpu_writes_as_a_convolution():
    found = counted(
        "%x = bf16[128,64]{1,0:T(8,128)(2,1)} parameter(0)",
        "%w = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(1)",
        "ROOT %y = bf16[128,32]{1,0:T(8,128)(2,1)} convolution(%x, %w), dim_labels=bf_io->bf",
    )
    assert found == (2 * 128 * 64 * 32, 2 * 128 * 64 * 32, ())


CUDNN = (
    "%image = f32[4,16,16,8]{3,2,1,0} parameter(0)",
    "%kernel = f32[16,3,3,8]{3,2,1,0} parameter(1)",
    "%out = f32[4,14,14,16]{3,2,1,0} parameter(2)",
)


@pytest.mark.parametrize(
    "call",
    [
        '(f32[4,14,14,16]{3,2,1,0}, u8[0]{0}) custom-call(%image, %kernel), target="Forward"',
        "(f32[4,14,14,16]{3,2,1,0}, u8[0]{0}) custom-call(%image, %kernel, %bias), "
        'target="BiasActivationForward"',
        '(f32[4,16,16,8]{3,2,1,0}, u8[0]{0}) custom-call(%out, %kernel), target="BackwardInput"',
        '(f32[16,3,3,8]{3,2,1,0}, u8[9]{0}) custom-call(%image, %out), target="BackwardFilter"',
    ],
)
def test_convolutions_of_cudnn_count_alike_in_each_direction(call):
    call = call.replace('target="', 'custom_call_target="__cudnn$conv')
    found = counted(*CUDNN, f"%r = {call}, window={{size=3x3}}, dim_labels=b01f_o01i->b01f")
    assert found.dots == 2 * (4 * 14 * 14 * 16) * (3 * 3 * 8)


# Library calls


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
@pytest.mark.parametrize("batch", [False, True])
def test_library_products_count_by_their_axes(target, batch):
    lead, axes = ("5,", '"0"') if batch else ("", "")
    right = '"1"' if batch else '"0"'
    found = counted(
        f"%a = bf16[{lead}32,48]{{1,0}} parameter(0)",
        f"%b = bf16[{lead}48,64]{{1,0}} parameter(1)",
        f"%g = (bf16[{lead}32,64]{{1,0}}, s8[4194304]{{0}}) custom-call(%a, %b), "
        f'custom_call_target="{target}", backend_config={{"operation_queue_id":"0",'
        '"gemm_backend_config":{"alpha_real":1,"beta":0,"dot_dimension_numbers":{'
        f'"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":[{right}],'
        f'"lhs_batch_dimensions":[{axes}],"rhs_batch_dimensions":[{axes}]}},'
        '"epilogue":"DEFAULT","lhs_stride":"1536"}}',
    )
    assert found == (2 * (5 if batch else 1) * 32 * 48 * 64,) * 2 + ((),)


def test_library_products_of_a_cpu():
    found = counted(
        "%a = f32[2,8,48]{2,1,0} parameter(0)",
        "%b = f32[2,48,64]{2,1,0} parameter(1)",
        '%r = f32[2,8,64]{2,1,0} custom-call(%a, %b), custom_call_target="__onednn$matmul"',
    )
    assert found.dots == 2 * 2 * 8 * 48 * 64


def test_a_product_without_axes_is_unknown():
    found = counted('%g = f32[2,2] custom-call(%a, %b), custom_call_target="__cublas$gemm"')
    assert found == (0, 0, ("__cublas$gemm",))


def test_what_may_hide_arithmetic_is_named_once():
    found = count(lambda x: jnp.linalg.cholesky(x) + jnp.fft.fft(x).real, jnp.eye(8))
    assert len(found.unknown) == 2
    assert any("cholesky" in name for name in found.unknown)
    assert any(name.startswith("fft: ") for name in found.unknown)


def test_what_only_moves_or_sorts_is_not_named():
    assert count(lambda x: lax.top_k(x, 3), jnp.ones((64, 64))).unknown == ()


# Peaks
