import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clu.metrics import Average

import stepfold as sf
from stepfold.core.loss import share_of, total_of

# mean


def test_mean_keeps_total_and_weight_apart(run):
    average = run(sf.mean)(jnp.array([1.0, 2.0, 4.0]), jnp.array([1.0, 0.5, 0.0]))
    assert (average.total, average.count) == (2.0, 1.5)


def test_mean_without_a_mask_weighs_each_value_alike(run):
    average = run(sf.mean)(jnp.ones((2, 3)))
    assert (average.total, average.count) == (6.0, 6.0)
    assert sf.mean(2.5).compute() == 2.5


def test_a_mask_covers_the_leading_axes(run):
    average = run(sf.mean)(jnp.arange(6.0).reshape(3, 2), jnp.array([True, False, True]))
    assert (average.total, average.count) == (0 + 1 + 4 + 5, 4)


def test_a_mask_is_repeated_along_axes_of_one(run):
    average = run(sf.mean)(jnp.arange(6.0).reshape(3, 2), jnp.array([[True], [False], [True]]))
    assert (average.total, average.count) == (0 + 1 + 4 + 5, 4)


@pytest.mark.parametrize("where", [None, [True, False, True], [1, 0, 1]])
def test_booleans_are_counted_in_integers(run, where):
    where = None if where is None else jnp.array(where)
    average = run(sf.mean)(jnp.array([True, True, False]), where)
    assert average.total.dtype == average.count.dtype == jnp.int32
    assert average.compute() == (2 / 3 if where is None else 1 / 2)


def test_counts_beyond_what_float32_holds_are_exact():
    many = Average(total=jnp.int32(2**24), count=jnp.int32(2**24))
    merged = many.merge(sf.mean(jnp.array([True])))
    assert merged.total == 2**24 + 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_sums_are_float32_at_least(dtype):
    average = sf.mean(jnp.ones(4096, dtype), jnp.ones(4096, dtype))
    assert average.total.dtype == average.count.dtype == jnp.float32
    assert average.total == 4096


def test_weights_count_in_full_however_narrow_the_values():
    exact = sf.mean(jnp.ones(2, jnp.bfloat16), jnp.array([1.0, 1 + 2**-12]))
    assert exact.total == exact.count == 2 + 2**-12


def test_sums_of_float64_stay_float64_and_counts_int32():
    with jax.enable_x64(True):
        assert sf.mean(np.ones(3)).total.dtype == jnp.float64
        assert sf.mean(np.ones(3), np.ones(3, np.float32)).count.dtype == jnp.float64
        counted = sf.mean(np.ones(3, bool))
        assert counted.total.dtype == counted.count.dtype == jnp.int32


def test_what_is_masked_out_may_be_anything(run):
    average = run(sf.mean)(jnp.array([1.0, jnp.nan, jnp.inf]), jnp.array([1.0, 0.0, 0.0]))
    assert average.compute() == 1.0


def test_a_weight_may_be_negative(run):
    average = run(sf.mean)(jnp.array([1.0, 2.0]), jnp.array([3.0, -1.0]))
    assert (average.total, average.count) == (1.0, 2.0)


def test_a_weight_that_is_not_finite_is_not_hidden():
    assert jnp.isnan(sf.mean(jnp.ones(2), jnp.array([1.0, jnp.nan])).total)


def test_averages_merge_exactly():
    values, mask = np.arange(10.0, dtype=np.float32), np.arange(10) % 3 == 0
    parts = [sf.mean(values[i : i + 3], mask[i : i + 3]) for i in (0, 3, 6, 9)]
    assert functools.reduce(Average.merge, parts).compute() == values[mask].mean()


@pytest.mark.parametrize(
    ("values", "where", "message"),
    [
        (jnp.ones((2, 3)), jnp.ones(3), r"got float32\[3\] for values float32\[2,3\]"),
        (
            jnp.ones(3),
            jnp.ones((3, 1)),
            r"leading axes, got float32\[3,1\] for values float32\[3\]",
        ),
        (jnp.ones(3, complex), None, r"expected real numbers as values, got complex64\[3\]"),
        (jnp.ones(3), jnp.ones(3, complex), r"expected real numbers as where, got complex64\[3\]"),
        (jax.random.key(0), None, r"expected real numbers as values, got key<fry>"),
    ],
)
def test_what_has_no_mean_is_refused(values, where, message):
    with pytest.raises(sf.LossError, match=message):
        sf.mean(values, where)


# terms and their sum


def test_terms_add_up_each_with_its_own_denominator(run):
    terms = {
        "a": Average(total=jnp.float32(6), count=jnp.float32(3)),
        "b": Average(total=jnp.float32(1), count=jnp.float32(4)),
        "none": Average(total=jnp.float32(0), count=jnp.float32(0)),
    }
    assert run(total_of)(terms) == 2.25


def test_terms_of_different_precision_add_up():
    with jax.enable_x64(True):
        terms = {"a": sf.mean(np.float64(1.0)), "b": sf.mean(np.float32(2.0))}
        assert total_of(terms).dtype == jnp.float64


def test_shares_have_the_gradients_of_the_whole():
    def terms(p):
        return {"a": Average(total=p**3, count=p), "b": Average(total=p, count=jnp.ones(()))}

    whole = {k: Average(total=2 * t.total, count=2 * t.count) for k, t in terms(3.0).items()}
    part = jax.grad(lambda p: share_of(terms(p), whole))(3.0)
    want = jax.grad(lambda p: total_of(terms(p)))(3.0)
    assert 2 * part == pytest.approx(want)


def test_shares_without_any_weight_have_the_gradients_of_the_whole():
    def terms(p):
        return {"a": Average(total=jnp.ones(()), count=p)}

    assert jax.grad(lambda p: total_of(terms(p)))(0.0) == 0
    assert jax.grad(lambda p: share_of(terms(p), terms(0.0)))(0.0) == 0
