import jax
import jax.numpy as jnp
import pytest

from stepfold.loop.replaying.origin import first_site


def line(function, offset):
    return f"test_origin.py:{function.__code__.co_firstlineno + offset} ({function.__name__})"


def test_the_first_operation_is_told_with_its_line():
    def function(x):
        y = jnp.exp(x)
        z = jnp.log(x)
        return (y + z) - z

    site = first_site(function, (jnp.float32([1, 0]),))
    assert (site.operation, site.value) == ("log", "inf")
    assert site.where.endswith(line(function, 2))
    assert str(site) == f"log made inf at {site.where}"


@pytest.mark.parametrize(
    ("function", "value", "operation"),
    [
        (lambda x: jnp.sqrt(-x), "nan", "sqrt"),
        (lambda x: jnp.exp(100 * x), "inf", "exp"),
        (lambda x: (x * 300).astype(jnp.float16) * jnp.float16(300), "inf", "mul"),
        (lambda x: (x - x) / (x - x), "nan", "div"),
    ],
)
def test_whatever_makes_it(function, value, operation):
    site = first_site(function, (jnp.float32(1),))
    assert (site.value, site.operation) == (value, operation)


def test_a_nan_that_comes_of_an_infinity_counts_and_what_passes_one_on_does_not():
    site = first_site(lambda x: (x + 1) - x, (jnp.float32(jnp.inf),))
    assert (site.operation, site.value) == ("sub", "nan")
    assert first_site(lambda x: x * 2 + 1, (jnp.float32(jnp.nan),)) is None


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
def test_the_line_is_found_inside_of_what_jax_does_with_a_function(around):
    def function(x):
        return jnp.log(x)

    site = first_site(around(function), (jnp.float32([1, 2, 0]),))
    assert site.operation in ("log", "div")  # the slope of a logarithm is a division
    assert site.where.endswith(line(function, 1))


def test_a_custom_rule_is_gone_into():
    @jax.custom_jvp
    def function(x):
        return jnp.log(x) * 2

    function.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    assert first_site(function, (jnp.float32(0),)).operation == "log"


def test_what_is_masked_is_passed_over_where_it_comes_with_good_numbers_too():
    def function(x):
        masked = jnp.where(x > 0, jnp.log(jnp.abs(x)), 0)  # -inf at 0, and nobody minds
        return masked + 1 / (x - 3)

    bad, good = (jnp.float32([0, 3]),), (jnp.float32([0, 1]),)
    assert first_site(function, bad).operation == "log"
    site = first_site(function, bad, good)
    assert (site.operation, site.where.endswith(line(function, 2))) == ("div", True)


def test_where_all_is_finite_there_is_none():
    assert first_site(lambda x: x + 1, (jnp.float32(1),)) is None
