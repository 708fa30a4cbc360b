"""`linear_cross_entropy`: dtypes, labels, costs, refusals. That it is exact is a law."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.inspect.flops import count, products

ROWS, SIZE, VOCABULARY = 12, 8, 32


def arrays(dtype=jnp.float32, rows=ROWS):
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(dtype)
    labels = rng.integers(0, VOCABULARY, rows, np.int32)
    return jax.device_put((normal(rows, SIZE), normal(SIZE, VOCABULARY), labels))


@jax.jit
def plain(features, kernel, labels, weights=None):
    logits = jnp.matmul(features, kernel, preferred_element_type=jnp.float32)
    return sf.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels), weights)


def blocks(*args, **options):
    return sf.linear_cross_entropy(*args, **{"block_size": 5} | options)


@partial(jax.jit, static_argnums=0)
def gradients(loss, features, kernel, *rest):
    return jax.grad(lambda f, k: loss(f, k, *rest).compute(), (0, 1))(features, kernel)


def close(got, want, **tolerance):
    compare = lambda a, b: np.testing.assert_allclose(
        np.float32(a), np.float32(b), **{"rtol": 1e-5, "atol": 1e-6} | tolerance
    )
    jax.tree.map(compare, got, want)


# What it returns


def test_hits_are_counted_as_in_a_mean_of_booleans():
    features, kernel, labels = arrays()
    hits = (features @ kernel).argmax(-1)[:7]
    labels = labels.at[:7].set(hits).at[7:].set((hits[0] + 1) % VOCABULARY)
    expected = sf.mean((features @ kernel).argmax(-1) == labels, labels > 0)
    loss, accuracy = blocks(features, kernel, labels, labels > 0, accuracy=True)
    assert (accuracy.total, accuracy.count) == (expected.total, expected.count)
    assert loss.total == blocks(features, kernel, labels, labels > 0).total


def test_of_equal_logits_the_first_counts():
    labels = jnp.array([0, 1])
    _, accuracy = blocks(jnp.ones((2, 3)), jnp.ones((3, 4)), labels, accuracy=True)
    assert (accuracy.total, accuracy.count) == (1, 2)


@pytest.mark.parametrize(
    "shape", [(2, 3), *(pytest.param(shape, marks=pytest.mark.full) for shape in ((), (0,)))]
)
def test_features_have_any_leading_dimensions(shape):
    features, kernel, _ = arrays()
    features = jnp.broadcast_to(features[0], (*shape, SIZE))
    labels = jnp.zeros(shape, jnp.int32)
    loss, accuracy = jax.jit(partial(blocks, accuracy=True))(features, kernel, labels)
    assert int(loss.count) == int(accuracy.count) == math.prod(shape)
    close(loss.total, plain(features, kernel, labels).total)
    got, want = (
        jax.jit(partial(gradients, loss))(features, kernel, labels) for loss in (blocks, plain)
    )
    if loss.count:
        close(got, want)
    else:  # 0 / 0
        assert got[0].shape == features.shape


@pytest.mark.parametrize("label", [-1, VOCABULARY])
def test_a_label_outside_the_vocabulary_is_nan_unless_it_has_no_weight(label):
    features, kernel, labels = arrays()
    labels = labels.at[3].set(label)
    assert jnp.isnan(blocks(features, kernel, labels).total)
    assert jnp.isnan(gradients(blocks, features, kernel, labels)[1]).any()
    mask = jnp.arange(ROWS) != 3
    loss = blocks(features, kernel, labels, mask)
    close(loss.total, plain(features, kernel, labels.at[3].set(0), mask).total)
    close(blocks(features, kernel, labels, ignore_index=label).total, loss.total)
    assert blocks(features, kernel, labels, ignore_index=label).count == ROWS - 1


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint32])
def test_labels_of_any_integer_dtype(dtype):
    features, kernel, labels = arrays()
    kernel = jnp.tile(kernel, (1, 10))  # more than int8 and uint8 hold
    want = plain(features, kernel, labels)
    close(blocks(features, kernel, labels.astype(dtype)).total, want.total)


# Dtypes


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_losses_are_float32_and_gradients_in_the_dtypes_of_the_arguments(dtype):
    features, kernel, labels = arrays(dtype)
    loss = blocks(features, kernel, labels)
    assert loss.total.dtype == loss.count.dtype == jnp.float32
    close(loss.total, plain(features, kernel, labels).total)
    got, want = (gradients(loss, features, kernel, labels) for loss in (blocks, plain))
    assert [grad.dtype for grad in got] == [dtype, dtype]
    epsilon = float(jnp.finfo(dtype).eps)
    close(got, want, rtol=4 * epsilon, atol=4 * epsilon * float(jnp.abs(want[1]).max()))


def dtypes_of_products(features, kernel, labels, **options):
    loss = lambda f, k: blocks(f, k, labels, **options).total
    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(features, kernel)
    return {product.dtype for product in products(jaxpr)}


def test_products_have_the_dtype_of_the_operands_or_the_one_that_is_given():
    (x, kernel, labels), (narrow, *_) = arrays(), arrays(jnp.bfloat16)
    assert dtypes_of_products(x, kernel, labels) == {"float32"}
    assert dtypes_of_products(narrow, kernel.astype(jnp.bfloat16), labels) == {"bfloat16"}
    assert dtypes_of_products(narrow, kernel, labels) == {"float32"}
    assert dtypes_of_products(x, kernel, labels, dtype="bfloat16") == {"bfloat16"}
    bf16 = lambda *args: blocks(*args, dtype=jnp.bfloat16)
    grads = gradients(bf16, x, kernel, labels)
    assert [grad.dtype for grad in grads] == [jnp.float32, jnp.float32]
    close(grads, gradients(plain, x, kernel, labels), rtol=0.05, atol=0.01)


def test_a_sum_over_many_blocks_in_bfloat16_stays_exact():
    rows = 4096
    features, kernel = jnp.ones((rows, 1), jnp.bfloat16), jnp.zeros((1, 2), jnp.bfloat16)
    labels = jnp.zeros(rows, jnp.int32)
    total = lambda kernel: blocks(features, kernel, labels, block_size=16).total
    assert jax.grad(total)(kernel).tolist() == [[-rows / 2, rows / 2]]


# Costs


def largest(jaxpr):
    """Return the elements of the largest array in a jaxpr."""
    sizes = [variable.aval.size for equation in jaxpr.eqns for variable in equation.outvars]
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=callable):
            inner = getattr(value, "jaxpr", value)
            sizes += [largest(inner)] if hasattr(inner, "eqns") else []
    return max(sizes, default=0)


def test_no_array_has_the_logits_of_all_rows():
    features, kernel, labels = arrays(rows=64)
    traced = lambda loss: jax.make_jaxpr(lambda f, k: gradients(loss, f, k, labels))(
        features, kernel
    )
    assert largest(traced(plain).jaxpr) == 64 * VOCABULARY
    assert largest(traced(lambda *args: blocks(*args, block_size=16)).jaxpr) == 64 * SIZE


def test_the_products_are_those_of_the_plain_loss():
    features, kernel, labels = arrays(rows=64)
    options = {"accuracy": False, "block_size": 16, "z_loss": 0.1}
    ours = lambda f, k: blocks(f, k, labels, **options).total
    forward = 2 * 64 * SIZE * VOCABULARY
    assert count(jax.make_jaxpr(ours)(features, kernel)).dots == forward
    assert count(jax.make_jaxpr(jax.grad(ours, (0, 1)))(features, kernel)).dots == 3 * forward


def test_blocks_are_of_one_size_so_that_few_rows_are_padded():
    features, kernel, labels = arrays(rows=1025)
    loss = lambda f: sf.linear_cross_entropy(f, kernel, labels).total
    assert count(jax.make_jaxpr(loss)(features)).dots == 2 * 1026 * SIZE * VOCABULARY


def test_the_weight_costs_no_product_and_has_no_gradient():
    features, kernel, labels = arrays()
    weight = lambda f, k: blocks(f, k, labels, labels > 3).count
    assert count(jax.make_jaxpr(weight)(features, kernel)).dots == 0
    assert not np.any(jax.grad(weight)(features, kernel))


# In steps and under transformations


def loss_fn(params, batch, key, **options):
    hidden = jnp.tanh(batch["x"] @ params["body"])
    loss, accuracy = blocks(
        hidden, params["out"], batch["y"], batch["mask"], accuracy=True, **options
    )
    return loss, {"accuracy": accuracy}


def inputs():
    features, kernel, labels = arrays()
    params = {"body": jnp.eye(SIZE), "out": kernel}
    return params, {"x": features, "y": labels, "mask": labels % 3 > 0}


TX = optax.sgd(0.1)


def products_run(step, state, batch):
    """Count the FLOPs of the jaxpr, and the products in the program that XLA compiles from it."""
    program = jax.jit(step).lower(state, batch).compile().as_text()
    found = sum(" dot(" in line or "__onednn$matmul" in line for line in program.splitlines())
    return count(jax.make_jaxpr(step)(state, batch)).dots, found


def test_the_scan_for_the_weights_computes_no_product():
    params, batch = inputs()
    state = sf.init_state(params, TX, jax.random.key(0))
    loss = lambda *args: loss_fn(*args, block_size=4)
    full, parts = (
        products_run(sf.make_train_step(loss, TX, accumulate=n), state, batch) for n in (1, 3)
    )
    assert full == parts
    assert full[1] == 5  # forward and two backward, and the other layer's two


@pytest.mark.full
def test_it_runs_under_vmap_scan_and_checkpoint():
    features, kernel, labels = arrays()
    kernels = jnp.stack([kernel, 2 * kernel])
    total = lambda kernel: blocks(features, kernel, labels, bias=kernel[0]).total
    want = [jax.value_and_grad(total)(each) for each in kernels]
    want = jax.tree.map(lambda *leaves: jnp.stack(leaves), *want)
    close(jax.vmap(jax.value_and_grad(total))(kernels), want)
    step = lambda carry, kernel: (carry, jax.value_and_grad(total)(kernel))
    close(jax.lax.scan(step, 0, kernels)[1], want)
    close(jax.lax.map(jax.value_and_grad(jax.checkpoint(total)), kernels), want)


def test_a_second_derivative_is_refused():
    features, kernel, labels = arrays()
    total = lambda kernel: blocks(features, kernel, labels).total
    message = "linear_cross_entropy has only a first derivative, in reverse mode; c"
    for second in (jax.hessian(total), jax.grad(lambda k: jax.grad(total)(k).sum())):
        for transform in (lambda f: f, jax.jit):
            with pytest.raises(sf.errors.LossError, match=message):
                transform(second)(kernel)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(total, (kernel,), (kernel,))


# What is refused

X, KERNEL, LABELS = np.ones((4, 3), "f"), np.ones((3, 5), "f"), np.zeros(4, "i")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": np.ones((4, 3), int)}, r"features: expected an array of floats, got int64\["),
        ({"features": [1.0]}, "features: expected an array of floats, got list"),
        (
            {"features": np.float32(1)},
            r"features: expected an array \[..., size\], got float32\[\]",
        ),
        (
            {"features": np.ones((4, 2), "f")},
            r"kernel: expected \[size, vocabulary\] for features ",
        ),
        ({"kernel": np.ones(3, "f")}, r"for features float32\[4,3\], got float32\[3\]"),
        ({"kernel": np.ones((3, 0), "f")}, r"kernel: .* got float32\[3,0\]"),
        ({"kernel": np.ones((3, 5), complex)}, r"kernel: expected an array of floats, got complex"),
        ({"kernel": np.ones((5, 3), "f")}, "float32.5,3.; transposed=True reads it the other way"),
        ({"transposed": True}, r"kernel: .* transposed=False reads it the other way"),
        ({"labels": np.zeros(4, "f")}, r"labels: expected integers of the shape \(4,\), .*float32"),
        ({"labels": np.zeros(4, bool)}, r"labels: expected integers .* got bool\[4\]"),
        ({"labels": np.zeros((4, 1), "i")}, r"one for each row of the features, got int32\[4,1\]"),
        ({"labels": [0, 0, 0, 0]}, "labels: expected integers of .*, got list"),
        ({"weights": np.ones(3)}, r"weights: expected real numbers in the shape \(4,\) of .*\[3\]"),
        ({"weights": np.ones((4, 1))}, r"weights: .* or of its leading axes, got float64\[4,1\]"),
        ({"weights": np.ones(4, complex)}, r"weights: expected real numbers .* got complex128"),
        ({"weights": "mask"}, "weights: expected real numbers .* got str 'mask'"),
        ({"bias": np.ones(3, "f")}, r"bias: expected the shape \(5,\) of the vocab.*float32\[3\]"),
        ({"bias": np.ones(5, int)}, r"bias: expected an array of floats, got int64\[5\]"),
        (
            {"rows": jax.P("dp")},
            r"sharding: expected a NamedSharding, got None; pass that of the k",
        ),
        ({"sharding": jax.P("dp")}, r"sharding: expected a NamedSharding or None, got P P"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, message):
    kind = sf.errors.ShardingError if change.keys() & {"rows", "sharding"} else sf.errors.LossError
    arguments = {"features": X, "kernel": KERNEL, "labels": LABELS} | change
    with pytest.raises(kind, match=message):
        sf.linear_cross_entropy(**arguments)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"transposed": 1}, "transposed: expected True or False, got int 1"),
        ({"accuracy": "yes"}, "accuracy: expected True or False, got str 'yes'"),
        (
            {"ignore_index": 0.5},
            "ignore_index: expected an integer that the labels' int32 holds, or",
        ),
        ({"ignore_index": True}, "ignore_index: .* got True"),
        ({"ignore_index": 2**31}, "ignore_index: .* got 2147483648"),
        ({"label_smoothing": -0.1}, "label_smoothing: expected a number of at least 0, got -0.1"),
        ({"label_smoothing": 1.1}, "label_smoothing: expected a number from 0 to 1, got 1.1"),
        ({"label_smoothing": None}, "label_smoothing: expected a number of at least 0, got None"),
        ({"z_loss": -1.0}, "z_loss: expected a number of at least 0, got -1.0"),
        ({"z_loss": float("nan")}, "z_loss: expected a number of at least 0, got nan"),
        ({"soft_cap": 0.0}, "soft_cap: expected a number above 0, got 0.0"),
        ({"soft_cap": -30.0}, "soft_cap: expected a number above 0, got -30.0"),
        ({"dtype": "int8"}, "dtype: expected a floating dtype or None, got 'int8'"),
        ({"dtype": "bf16"}, "dtype: expected a floating dtype or None, got 'bf16'"),
        ({"block_size": 0}, "block_size: expected an integer of at least 1, got 0"),
        ({"block_size": None}, "block_size: expected an integer of at least 1, got None"),
    ],
)
def test_invalid_options_are_refused(option, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        sf.linear_cross_entropy(X, KERNEL, LABELS, **option)
