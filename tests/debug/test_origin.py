"""The first operation that makes a NaN or inf is found, with its line."""

import jax
import jax.numpy as jnp
import pytest

from stepfold.debug.origin import find_origin


def line(function, offset):
    return f"test_origin.py:{function.__code__.co_firstlineno + offset} ({function.__name__})"


def test_the_first_operation_is_found_with_its_line():
    def function(x):
        y = jnp.exp(x)
        z = jnp.log(x)
        return (y + z) - z

    origin = find_origin(function, (jnp.float32([1, 0]),))
    assert (origin.operation, origin.value) == ("log", "inf")
    assert origin.where.endswith(line(function, 2))
    assert str(origin) == f"log made inf at {origin.where}"


def test_operations_that_the_result_does_not_need_are_left_out():
    def function(x):
        jnp.log(x) + 1
        return 1 / x

    assert find_origin(function, (jnp.float32(0),)).operation == "div"


@pytest.mark.parametrize(
    ("function", "value", "operation"),
    [
        (lambda x: jnp.sqrt(-x), "nan", "sqrt"),
        (lambda x: (x * 300).astype(jnp.float16) * jnp.float16(300), "inf", "mul"),
        (lambda x: (x - x) / (x - x), "nan", "div"),
    ],
)
def test_other_operations_are_found(function, value, operation):
    origin = find_origin(function, (jnp.float32(1),))
    assert (origin.value, origin.operation) == (value, operation)
    assert find_origin(lambda x: x + 1, (jnp.float32(1),)) is None


def test_a_nan_made_of_an_infinity_counts_and_one_passed_on_does_not():
    origin = find_origin(lambda x: (x + 1) - x, (jnp.float32(jnp.inf),))
    assert (origin.operation, origin.value) == ("sub", "nan")
    assert find_origin(lambda x: x * 2 + 1, (jnp.float32(jnp.nan),)) is None


@pytest.mark.parametrize(
    "around",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: lambda x: jax.lax.scan(lambda c, r: (c + f(r), None), 0.0, x)[0],
        lambda f: jax.grad(lambda x: f(x).sum()),
        lambda f: jax.vmap(f),
    ],
    ids=["jit", "checkpoint", "scan", "grad", "vmap"],
)
def test_the_line_is_found_inside_of_jax_transformations(around):
    def function(x):
        return jnp.log(x)

    origin = find_origin(around(function), (jnp.float32([1, 2, 0]),))
    assert origin.operation in ("log", "div")  # the slope of a logarithm is a division
    assert origin.where.endswith(line(function, 1))


def test_a_custom_rule_is_entered():
    @jax.custom_jvp
    def function(x):
        return jnp.log(x) * 2

    function.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    assert find_origin(function, (jnp.float32(0),)).operation == "log"


def test_a_masked_infinity_that_good_arguments_have_too_is_skipped():
    def function(x):
        masked = jnp.where(x > 0, jnp.log(jnp.abs(x)), 0)  # -inf at 0, which does no harm
        return masked + 1 / (x - 3)

    bad, good = (jnp.float32([0, 3]),), (jnp.float32([0, 1]),)
    assert find_origin(function, bad).operation == "log"
    origin = find_origin(function, bad, good)
    assert (origin.operation, origin.where.endswith(line(function, 2))) == ("div", True)
