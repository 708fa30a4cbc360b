"""accumulate=n equals the full batch, for every kind of term; what is nearly right fails."""

from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clu.metrics import Average
from hypothesis import given
from hypothesis import strategies as st
from tests.small import full_but

import stepfold as sf

pytestmark = pytest.mark.not_optimized  # results are equal up to rounding

EXAMPLES, WIDTH = 12, 3
COUNTS = (3, 12)


def predict(params, batch):
    return jnp.tanh(batch["x"] @ params["w"]) * params["scale"]


def masked(params, batch, _key):
    error = (predict(params, batch) - batch["y"]) ** 2
    return sf.mean(error, batch["mask"]), {"hit": sf.mean(error < 1, batch["mask"] != 0)}


def scalar(params, batch, _key):
    return ((predict(params, batch) - batch["y"]) ** 2).mean()


def several(params, batch, key):
    return {
        "masked": masked(params, batch, key)[0],
        "other_mask": sf.mean(predict(params, batch) ** 4, batch["mask"] == 0),
        "auxiliary": jnp.abs(predict(params, batch)).mean(),
        "regularizer": (params["w"] ** 2).sum(),
        "never": sf.mean(predict(params, batch), batch["mask"] < 0),
    }


def weights_of_parameters(params, batch, key):
    gate = jax.nn.sigmoid(batch["x"] @ params["gate"]) * batch["mask"]
    error = (predict(params, batch) - batch["y"]) ** 2
    return {
        "gated": Average(total=(error * gate).sum(), count=gate.sum()),
        **several(params, batch, key),
    }


LOSSES = {f.__name__: f for f in (masked, scalar, several, weights_of_parameters)}


@cache
def compiled(factory, loss_fn, n, dtype):
    return jax.jit(factory(loss_fn, accumulate=n) if n > 1 else factory(loss_fn))


def draw(seed, mask, dtype):
    rng = np.random.default_rng(seed)
    params = {"w": rng.normal(size=WIDTH), "scale": rng.normal(), "gate": rng.normal(size=WIDTH)}
    batch = {
        "x": rng.normal(size=(EXAMPLES, WIDTH)),
        "y": rng.normal(size=EXAMPLES),
        "mask": np.array(mask) * rng.uniform(0.5, 2.0, size=EXAMPLES),
    }
    return jax.tree.map(partial(jnp.asarray, dtype=dtype), (params, batch))


def check(factory, loss_fn, n, seed, mask, dtype, rtol):
    params, batch = draw(seed, mask, dtype)
    key = jax.random.key(seed)
    want = compiled(sf.make_grad, loss_fn, 1, dtype)(params, batch, key, ())
    got = compiled(factory, loss_fn, n, dtype)(params, batch, key, ())
    chex.assert_trees_all_equal_dtypes(want[0], got[0], params)
    chex.assert_trees_all_close(got[0], want[0], rtol=rtol, atol=rtol)
    totals = [sum(t.compute() for t in terms.values() if t.count) for terms in (want[1], got[1])]
    chex.assert_trees_all_close(totals[1], totals[0], rtol=rtol, atol=rtol)
    if "hit" in want[2]:
        chex.assert_trees_all_equal(got[2]["hit"], want[2]["hit"])


some_mask = st.lists(st.booleans(), min_size=EXAMPLES, max_size=EXAMPLES)


@pytest.mark.parametrize(
    ("name", "dtype", "rtol"),
    full_but(
        # With the terms of all others.
        [("weights_of_parameters", np.float64, 1e-12), ("scalar", np.float64, 1e-12)],
        [
            *((name, np.float64, 1e-12) for name in LOSSES),
            ("weights_of_parameters", np.float32, 2e-4),
        ],
    ),
)
@given(n=st.sampled_from(COUNTS), seed=st.integers(0, 2**31 - 1), mask=some_mask)
def test_microbatches_equal_the_full_batch(name, dtype, rtol, n, seed, mask):
    with jax.enable_x64(dtype == np.float64):
        check(sf.make_grad, LOSSES[name], n, seed, mask, dtype, rtol)


def split(batch, n):
    return [jax.tree.map(lambda x: x[i::n], batch) for i in range(n)]


def mean_of_means(loss_fn, accumulate=1):
    """Average the gradients of microbatches, as most libraries do."""
    full = sf.make_grad(loss_fn)

    def grad_fn(params, batch, key, model_state):
        outs = [full(params, part, key, model_state) for part in split(batch, accumulate)]
        grads = jax.tree.map(lambda *g: sum(g) / accumulate, *[out[0] for out in outs])
        return grads, *outs[0][1:]

    return grad_fn


def one_denominator(loss_fn, accumulate=1):
    """Divide every term by the weight of the first, as dividing a loss by its token count does."""

    def wrong(params, batch, key):
        terms = loss_fn(params, batch, key)
        terms = terms if isinstance(terms, dict) else {"loss": terms[0]}
        first = next(iter(terms.values())).count

        def over(term):
            total = term.total if isinstance(term, Average) else term
            return Average(total=total, count=first)

        return {name: over(term) for name, term in terms.items()}

    return sf.make_grad(wrong, accumulate=accumulate)


def weights_held_fixed(loss_fn, accumulate=1):
    """Forget that a weight may depend on the parameters."""

    def wrong(params, batch, key):
        terms = loss_fn(params, batch, key)
        return jax.tree.map(
            lambda t: (
                t.replace(count=jax.lax.stop_gradient(t.count)) if isinstance(t, Average) else t
            ),
            terms,
            is_leaf=lambda t: isinstance(t, Average),
        )

    return sf.make_grad(wrong, accumulate=accumulate)


@pytest.mark.parametrize(
    ("mutant", "name"),
    [
        (mean_of_means, "masked"),
        (mean_of_means, "several"),
        (one_denominator, "several"),
        (weights_held_fixed, "weights_of_parameters"),
    ],
)
def test_what_is_nearly_right_fails_the_same_law(mutant, name):
    mask = [1, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0]
    with jax.enable_x64(True):
        check(sf.make_grad, LOSSES[name], 3, 0, mask, np.float64, 1e-12)
        with pytest.raises(AssertionError):
            check(mutant, LOSSES[name], 3, 0, mask, np.float64, 1e-12)


def test_a_batch_that_is_all_masked_has_zero_gradients():
    with jax.enable_x64(True):
        params, batch = draw(0, [0] * EXAMPLES, np.float64)
        for n in (1, *COUNTS):
            grads, terms, _, _ = compiled(sf.make_grad, masked, n, np.float64)(
                params, batch, jax.random.key(0), ()
            )
            chex.assert_trees_all_equal(grads, jax.tree.map(jnp.zeros_like, params))
            assert terms["loss"].count == 0
