"""`make_grad`: what accumulation costs and refuses. That it is exact is a law."""

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clu import metrics as clu_metrics
from tests.small import full_but, ones

import stepfold as sf
from stepfold.core.gradients import rematerialized

X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)


def loss_fn(params, batch, key):
    return sf.mean((batch["x"] @ params["w"]) ** 2, batch["mask"])


PARAMS = {"w": jax.device_put(np.array([1.0, -2.0, 0.5], np.float32))}
BATCH = {"x": X, "mask": np.arange(12) % 5 > 0}


@pytest.mark.parametrize("n", [1, 3])
def test_grads_terms_metrics_and_state_come_back(run, key, n):
    def loss(params, batch, key, state):
        return params["w"].sum(), {"m": sf.mean(batch["mask"])}, state + 1

    grad_fn = run(sf.make_grad(loss, accumulate=n, stateful=True))
    grads, terms, metrics, state = grad_fn(PARAMS, BATCH, key, jnp.zeros((), int))
    chex.assert_trees_all_close(grads, {"w": jnp.ones(3)}, rtol=1e-6)
    assert terms["loss"].compute() == pytest.approx(-0.5)
    assert metrics["m"].compute() == pytest.approx(BATCH["mask"].mean())
    assert state == n


def test_one_microbatch_is_the_bare_gradient(key):
    def bare(params, batch, key, model_state):
        def loss(params):
            term = loss_fn(params, batch, key)
            weight = jnp.where(term.count == 0, 1.0, term.count)
            return term.total / weight, ({"loss": term}, {}, model_state)

        grads, aux = jax.grad(loss, has_aux=True)(params)
        return grads, *aux

    ours, theirs = (
        jax.jit(f).lower(PARAMS, BATCH, key, ()).compile().cost_analysis()
        for f in (sf.make_grad(loss_fn), bare)
    )
    assert ours["flops"] == theirs["flops"]
    assert ours["bytes accessed"] == theirs["bytes accessed"]
    draw = lambda p, b, k: (p["w"].sum(), {"u": sf.mean(jax.random.uniform(k))})
    *_, metrics, _ = sf.make_grad(draw)(PARAMS, BATCH, key, ())
    assert metrics["u"].compute() == jax.random.uniform(key)  # of the key itself


def test_microbatch_i_holds_every_nth_example_and_its_own_key(key):
    def loss(params, batch, key, state):
        seen = {"x": batch["x"][None, :, 0], "u": jax.random.uniform(key)[None]}
        place = state["i"]
        state = {
            "i": place + 1,
            "x": jax.lax.dynamic_update_slice(state["x"], seen["x"], (place, 0)),
            "u": jax.lax.dynamic_update_slice(state["u"], seen["u"], (place,)),
        }
        return params["w"].sum(), {}, state

    start = {"i": jnp.int32(0), "x": jnp.zeros((4, 3)), "u": jnp.zeros(4)}
    grad_fn = sf.make_grad(loss, accumulate=4, stateful=True)
    *_, state = jax.jit(grad_fn)(PARAMS, BATCH, key, start)
    chex.assert_trees_all_equal(np.asarray(state["x"]), np.stack([X[i::4, 0] for i in range(4)]))
    keys = [jax.random.uniform(jax.random.fold_in(key, i)) for i in range(4)]
    chex.assert_trees_all_close(state["u"], jnp.stack(keys))


@flax.struct.dataclass
class LargestTotal(clu_metrics.Average):
    def merge(self, other):
        return self.replace(total=jnp.maximum(self.total, other.total))


def test_metrics_of_every_kind_merge_over_microbatches(key):
    def loss(params, batch, key):
        predicted = (batch["x"] @ params["w"]) > 0
        everything = clu_metrics.CollectingMetric.from_outputs(("x",))
        return params["w"].sum(), {
            "accuracy": sf.mean(predicted, batch["mask"]),
            "last": clu_metrics.LastValue.from_model_output(jnp.float32(batch["x"].shape[0])),
            "largest": LargestTotal(total=batch["x"].max(), count=jnp.ones(())),
            "all": everything.from_model_output(x=batch["x"]),
        }

    one = jax.jit(sf.make_grad(loss))(PARAMS, BATCH, key, ())[2]
    four = jax.jit(sf.make_grad(loss, accumulate=4))(PARAMS, BATCH, key, ())[2]
    chex.assert_trees_all_equal(one["accuracy"], four["accuracy"])
    assert four["largest"].total == X.max()
    with jax.numpy_dtype_promotion("standard"):  # clu divides a float by an integer
        assert four["last"].compute() == 3
    want, got = (np.sort(np.ravel(m["all"].compute()["x"])) for m in (one, four))
    np.testing.assert_array_equal(want, got)


def test_temporaries_do_not_grow_with_the_number_of_microbatches(key):
    def loss(params, batch, key):
        hidden = batch
        for _ in range(3):
            hidden = jnp.tanh(hidden @ params)
        return sf.mean(hidden**2)

    def temporaries(n):
        params, batch = jnp.ones((32, 32)), jnp.ones((4096, 32))
        lowered = jax.jit(sf.make_grad(loss, accumulate=n)).lower(params, batch, key, ())
        return lowered.compile().memory_analysis().temp_size_in_bytes

    sizes = [temporaries(n) for n in (1, 4, 16)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] < sizes[0] / 10


def test_gradients_come_in_the_parameters_dtype_and_add_up_in_float32(key):
    rng = np.random.default_rng(0)
    x = rng.uniform(0.5, 1.5, size=(256, 4)).astype(np.float32)
    loss = lambda p, b, k: sf.mean(b @ p)
    want = x.mean(0)

    def error(dtype, **options):
        params, batch = jnp.ones(4, dtype), jnp.asarray(x, dtype)
        grads = jax.jit(sf.make_grad(loss, accumulate=256, **options))(params, batch, key, ())[0]
        assert grads.dtype == dtype
        return np.abs(np.asarray(grads, np.float32) - want).max()

    half_ulp = 2**-8
    assert error(jnp.float32) < 1e-5
    assert error(jnp.bfloat16) < half_ulp
    assert error(jnp.bfloat16, accumulator_dtype=None) > 2 * half_ulp


def test_integer_and_key_leaves_of_a_batch_are_split_too(key):
    batch = {"n": jnp.arange(6), "key": jax.random.split(key, 6)}

    def loss(params, batch, key):
        noise = jax.vmap(jax.random.uniform)(batch["key"])
        return sf.mean(params["w"].sum() * (noise + batch["n"].astype(jnp.float32)))

    want = jax.jit(sf.make_grad(loss))(PARAMS, batch, key, ())
    got = jax.jit(sf.make_grad(loss, accumulate=3))(PARAMS, batch, key, ())
    chex.assert_trees_all_close(got, want, rtol=1e-5)


@pytest.mark.parametrize("dtype", [int, "float99", complex])
def test_a_dtype_that_gradients_cannot_add_up_in_is_refused_when_built(dtype):
    message = "accumulator_dtype: expected a floating dtype or None, got"
    with pytest.raises(sf.errors.ConfigError, match=message):
        sf.make_grad(loss_fn, accumulate=2, accumulator_dtype=dtype)


@pytest.mark.parametrize("n", [0, -1, 2.0, "2", None, True, np.True_])
def test_a_number_of_microbatches_that_is_none_is_refused_when_built(n):
    with pytest.raises(
        sf.errors.ConfigError, match="accumulate: expected an integer of at least 1, got"
    ):
        sf.make_grad(loss_fn, accumulate=n)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"x": X[:10]},
            r"^accumulate=4: expected a divisor of the batch size 10, got batch/x float32\[10,3\]; "
            r"use one of \[1, 2, 5, 10\]",
        ),
        (
            {"x": X, "y": X[:8]},
            r"^accumulate=4: expected every leaf to have the same leading size, got "
            r"batch/x float32\[12,3\], batch/y float32\[8",
        ),
        ({"x": X, "rate": 0.5}, r"the same leading size, got batch/rate float"),
        ({}, r"the same leading size, got an empty batch"),
        ({"x": X[:0]}, r"batch size 0, got batch/x float32\[0,3\]; drop the empty batch"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused(key, batch, message):
    grad_fn = sf.make_grad(lambda p, b, k: p["w"].sum(), accumulate=4)
    with pytest.raises(sf.errors.DataError, match=message):
        jax.jit(grad_fn)(PARAMS, batch, key, ())


@pytest.mark.parametrize("n", [1, 2])
def test_a_stateless_loss_leaves_a_model_state_as_it_is(key, n):
    grad_fn = sf.make_grad(lambda p, b, k: p["w"].sum(), accumulate=n)
    for model_state in ({"n": jnp.arange(2)}, None, ()):
        after = jax.jit(grad_fn)(PARAMS, BATCH, key, model_state)[3]
        chex.assert_trees_all_equal(after, model_state)


@pytest.mark.parametrize("n", [1, 3])
def test_parameters_on_the_host_are_parameters(key, n):
    host = {"w": np.array([1.0, -2.0, 0.5])}  # float64, which jax makes float32 of
    grads = jax.jit(sf.make_grad(loss_fn, accumulate=n))(host, BATCH, key, ())[0]
    assert grads["w"].dtype == jnp.float32


@pytest.mark.parametrize("n", [1, 2])
def test_parameters_without_a_gradient_are_refused_by_name(key, n):
    grad_fn = sf.make_grad(lambda p, b, k: 0.0, accumulate=n)
    with pytest.raises(
        sf.errors.ConfigError, match=r"params/n: expected floating numbers, got int32"
    ):
        jax.jit(grad_fn)({"n": jnp.zeros(2, int)}, BATCH, key, ())


LOSSES_WITHOUT_PARAMETERS = [
    lambda p, b, k: sf.mean(b["x"]),
    lambda p, b, k: sf.mean(jax.lax.stop_gradient(p["w"]) * b["x"]),
    jax.jit(lambda p, b, k: b["x"].mean()),
    lambda p, b, k: {"a": jnp.float32(1), "b": jnp.round(p["w"]).sum()},
]


@pytest.mark.parametrize("n", [1, 2])
def test_a_loss_that_does_not_depend_on_the_parameters_is_refused(key, n):
    for loss in LOSSES_WITHOUT_PARAMETERS:
        grad_fn = sf.make_grad(loss, accumulate=n)
        with pytest.raises(
            sf.errors.LossError, match="loss: expected a function of the parameters, got"
        ):
            jax.eval_shape(grad_fn, PARAMS, BATCH, key, ())


@pytest.mark.parametrize("n", [1, 2])
def test_a_loss_that_only_updates_its_model_state_has_zero_gradients(key, n):
    loss = lambda p, b, k, state: (b["x"].mean(), {}, state + 1)
    grad_fn = sf.make_grad(loss, accumulate=n, stateful=True)
    grads, *_, state = grad_fn(PARAMS, BATCH, key, jnp.int32(0))
    assert not grads["w"].any()
    assert state == n


def test_a_loss_may_depend_on_some_parameters_alone_and_through_any_transformation(key):
    params = {"w": jnp.ones(3), "unused": jnp.ones(2)}

    def scanned(params, batch, key):
        row = lambda total, x: (total + jnp.dot(x, params["w"]), None)
        return jax.lax.scan(row, jnp.float32(0), batch["x"])[0]

    for loss in (scanned, jax.jit(scanned), jax.checkpoint(scanned)):
        grads, *_ = sf.make_grad(loss, accumulate=2)(params, BATCH, key, ())
        np.testing.assert_allclose(grads["w"], X.sum(0) / 2, rtol=1e-5)
        assert not grads["unused"].any()


def test_gradients_can_be_differentiated_in_forward_and_in_reverse_mode(key):
    def norm(params):
        grads, *_ = sf.make_grad(loss_fn)(params, BATCH, key, ())
        return (grads["w"] ** 2).sum()

    forward = jax.jvp(norm, (PARAMS,), ({"w": jnp.eye(3)[0]},))[1]
    reverse = jax.grad(norm)(PARAMS)["w"][0]
    assert forward == pytest.approx(float(reverse), rel=1e-5)


# rematerialization


def deep_loss(params, batch, key):
    hidden = batch
    for layer in params:
        hidden = jnp.sin(jnp.sin(hidden @ layer))
    return sf.mean(hidden), {"first": sf.mean(hidden[0])}


LAYERS, ROWS = [jax.device_put(np.full((8, 8), 1 / 8, np.float32))] * 3, ones((6, 8))
NO_BATCH = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


@pytest.mark.parametrize("remat", full_but(["dots_saveable"], ["dots_saveable", NO_BATCH]))
def test_rematerialization_changes_no_number(key, remat):
    got, want = (
        jax.jit(sf.make_grad(loss, accumulate=3))(LAYERS, ROWS, key, ())
        for loss in (rematerialized(deep_loss, remat), deep_loss)
    )
    chex.assert_trees_all_close(got, want, rtol=1e-5)


@pytest.mark.parametrize(
    ("remat", "again"),
    [(None, False), (False, False), ("everything_saveable", False), (True, True)],
)
def test_what_is_not_kept_is_computed_again(key, remat, again):
    grad_fn = sf.make_grad(rematerialized(deep_loss, remat))
    computed = str(jax.make_jaxpr(grad_fn)(LAYERS, ROWS, key, ())).count(" = sin")
    assert (computed > 2 * len(LAYERS)) == again


def test_what_makes_a_policy_is_not_one():
    with pytest.raises(
        sf.errors.ConfigError, match="remat: .*save_only_these.*did you mean to call it"
    ):
        rematerialized(deep_loss, jax.checkpoint_policies.save_only_these_names)
    rematerialized(deep_loss, jax.checkpoint_policies.save_only_these_names("hidden"))


@pytest.mark.parametrize("remat", ["dots", 3, "save_only_these_names"])
def test_an_unknown_policy_is_refused_when_built(remat):
    with pytest.raises(
        sf.errors.ConfigError, match="remat: expected None, True, a policy .*dots_saveable"
    ):
        sf.make_train_step(deep_loss, optax.sgd(0.1), remat=remat)
