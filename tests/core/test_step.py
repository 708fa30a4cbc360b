"""Steps report what they say, keep the form of the state, and skip bad batches."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.small import full_but, ones

import stepfold as sf

RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(12, 3)).astype(np.float32),
    "y": RNG.normal(size=12).astype(np.float32),
    "mask": np.arange(12) % 4 > 0,
}
NO_MASK = {"x": BATCH["x"], "y": BATCH["y"]}


def init(key):
    return {"w": jax.random.normal(key, (3,)), "b": jnp.zeros(())}


def loss_fn(params, batch, key):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return sf.mean(error**2, batch["mask"]), {"close": sf.mean(abs(error) < 1, batch["mask"])}


ADAM = optax.adam(0.1)


@functools.cache
def start(tx, stateful):
    """Make a state, once for all tests that do not donate it."""
    source = (lambda k: (init(k), {"n": jnp.zeros(())})) if stateful else init
    return sf.init_state(source, tx, jax.random.key(0), stateful=stateful)


def make(loss_fn=loss_fn, tx=ADAM, *, stateful=False, **options):
    return start(tx, stateful), sf.make_train_step(loss_fn, tx, stateful=stateful, **options)


# the train step


def test_a_step_is_the_gradient_and_the_update(run):
    state, step = make()
    new, metrics = run(step)(state, BATCH)
    tx = optax.adam(0.1)
    grads = jax.grad(lambda p: loss_fn(p, BATCH, None)[0].compute())(state.params)
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = tx.update(grads, tx.init(state.params), state.params)
    chex.assert_trees_all_close(new.params, optax.apply_updates(state.params, updates), rtol=1e-5)
    chex.assert_trees_all_close(new.opt_state, opt_state, rtol=1e-5, atol=1e-7)
    assert new.step == 1
    assert (jax.random.key_data(new.key) == jax.random.key_data(state.key)).all()
    assert metrics["grad_norm"].compute() == pytest.approx(float(optax.tree.norm(grads)))
    assert sorted(metrics) == ["close", "grad_norm", "loss"]


def test_every_term_is_reported_besides_the_loss():
    def terms(params, batch, key):
        return {"fit": loss_fn(params, batch, key)[0], "decay": (params["w"] ** 2).sum()}

    state, step = make(terms, accumulate=3)
    _, metrics = jax.jit(step)(state, BATCH)
    assert sorted(metrics) == ["decay", "fit", "grad_norm", "loss"]
    total = metrics["fit"].compute() + metrics["decay"].compute()
    assert metrics["loss"].compute() == pytest.approx(float(total))


def test_the_key_of_a_step_is_folded_from_its_number():
    state, step = make(lambda p, b, k: (p["b"], {"u": sf.mean(jax.random.uniform(k))}))
    drawn = []
    for i in range(3):
        want = jax.random.uniform(jax.random.fold_in(state.key, i))
        state, metrics = jax.jit(step)(state, NO_MASK)
        drawn.append(float(metrics["u"].compute()))
        assert drawn[-1] == pytest.approx(float(want))
    assert len(set(drawn)) == 3


@pytest.mark.parametrize("n", [1, 3])
def test_a_model_state_is_carried_along(n):
    def loss(params, batch, key, model_state):
        return params["b"], {}, {"n": model_state["n"] + 1}

    state, step = make(loss, stateful=True, accumulate=n)
    for _ in range(2):
        state, _ = jax.jit(step)(state, NO_MASK)
    assert state.model_state["n"] == 2 * n


# other optimizers, as optax has them


def test_an_optimizer_that_wants_the_loss_gets_it():
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))
    state, step = make(tx=tx)
    new, metrics = jax.jit(step)(state, BATCH)
    assert new.opt_state[1].best_value == pytest.approx(float(metrics["loss"].compute()))


def test_updates_may_be_wider_than_the_parameters():
    tx = optax.adam(0.5, mu_dtype=jnp.float32)
    state = sf.init_state(jnp.ones(2, jnp.bfloat16), tx, jax.random.key(0))
    step = jax.jit(sf.make_train_step(lambda p, b, k: p.astype(jnp.float32).sum(), tx))
    params = step(state, None)[0].params
    assert (params.dtype, params.tolist()) == (jnp.bfloat16, [0.5, 0.5])


def turning_weak(updates, state, params=None):
    return updates, jnp.asarray(1.0)


OPTIMIZERS = {
    "adafactor": optax.adafactor(0.1),
    "lion": optax.lion(0.1),
    "muon": optax.contrib.muon(0.1),
    "schedule free": optax.contrib.schedule_free_adamw(0.1),
    "hyperparameters": optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(0.1, 10)),
    "multiple steps": optax.MultiSteps(optax.adam(0.1), 2),
    "apply if finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "masked": optax.masked(optax.adam(0.1), {"w": True, "b": False}),
    "turns weak": optax.GradientTransformation(lambda params: jnp.asarray(1.0), turning_weak),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_every_kind_keep_the_form_of_the_state(name):
    tx = OPTIMIZERS[name]
    old = jax.eval_shape(lambda: sf.init_state(init, tx, jax.random.key(0)))
    new, _ = jax.eval_shape(sf.make_train_step(loss_fn, tx), old, BATCH)
    form = lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type)
    assert jax.tree.map(form, new) == jax.tree.map(form, old)


@pytest.mark.parametrize("name", full_but(["apply if finite", "turns weak"], [*OPTIMIZERS][-5:]))
def test_optimizers_that_wrap_others_compile_once(name, compiles):
    state, step = make(tx=OPTIMIZERS[name])
    state, step = jax.tree.map(jnp.copy, state), jax.jit(step, donate_argnums=0)
    state, _ = step(state, BATCH)
    compiles.clear()
    state, metrics = step(state, BATCH)
    assert compiles == []
    assert np.isfinite(metrics["loss"].compute())


def test_an_optimizer_that_changes_the_form_of_its_state_is_refused():
    def update(updates, state, params=None):
        return updates, jax.tree.map(lambda s: s.astype(jnp.bfloat16), state)

    tx = optax.GradientTransformation(optax.trace(0.9).init, update)
    state, step = make(tx=tx)
    message = (
        r"^state: expected the same structure, shapes and dtypes from the step, got\n"
        r"  state/opt_state/trace/b: expected float32\[\], got bfloat"
    )
    with pytest.raises(sf.errors.TreeMismatchError, match=message):
        jax.eval_shape(step, state, BATCH)


def test_the_state_of_another_optimizer_is_refused():
    state, _ = make()
    _, step = make(tx=optax.sgd(0.1, momentum=0.9))
    message = (
        r"made with another optimizer(.|\n)*opt_state/0/trace/w: missing, expected float32\[3\]"
        r"(.|\n)*make_train_step the same tx\."
    )
    with pytest.raises(sf.errors.TreeMismatchError, match=message):
        jax.eval_shape(step, state, BATCH)


def test_the_state_of_other_parameters_is_refused():
    state, step = make()
    other = state._replace(params={"w": jnp.ones(4), "b": jnp.ones(())})
    message = r"for other parameters:\n  opt_state/0/mu/w: expected float32\[4\], got float32\[3\]"
    with pytest.raises(sf.errors.TreeMismatchError, match=message):
        jax.eval_shape(step, other, BATCH)


@pytest.mark.parametrize("state", [{"params": 1}, None])
def test_what_is_no_state_is_refused(state):
    _, step = make()
    evaluate = sf.make_eval_step(loss_fn)
    for function in (step, evaluate):
        with pytest.raises(
            sf.errors.ConfigError, match="state: expected a TrainState, got .*init_state mak"
        ):
            function(state, BATCH)


def test_what_holds_a_state_is_told_from_one_and_others_by_their_module():
    state, step = make()
    held = sf.FitResult(state, 0, {}, "", best=None, resumed=None)
    with pytest.raises(sf.errors.ConfigError, match=r"got stepfold.*FitResult; give its .state"):
        step(held, BATCH)
    other = type("TrainState", (), {"__module__": "flax.training.train_state"})()
    with pytest.raises(
        sf.errors.ConfigError, match="got flax.training.train_state.TrainState; sf.init"
    ):
        step(other, BATCH)


# skipping


def bad(batch):
    return batch | {"x": batch["x"] * np.float32("nan")}


@pytest.mark.parametrize("value", ["no", None, 1])
def test_skipping_is_asked_for_or_not(value):
    with pytest.raises(sf.errors.ConfigError, match="skip_nonfinite: expected True or False, got"):
        make(skip_nonfinite=value)


def test_without_skipping_what_is_not_finite_shows():
    state, step = make()
    new, metrics = jax.jit(step)(state, bad(BATCH))
    assert "skipped" not in metrics
    assert jnp.isnan(new.params["w"]).all()
    assert jnp.isnan(metrics["loss"].compute())


def test_a_skipped_step_weighs_nothing_when_merged():
    with_mean = lambda p, b, k: (loss_fn(p, b, k)[0], {"m": sf.mean(b["mask"])})
    state, step = make(with_mean, skip_nonfinite=True)
    seen = [jax.jit(step)(state, batch)[1] for batch in (BATCH, bad(BATCH), BATCH)]
    merged = functools.reduce(lambda a, b: {k: a[k].merge(b[k]) for k in a}, seen)
    assert merged["skipped"].compute() == pytest.approx(1 / 3)
    for name in ("loss", "grad_norm", "m"):
        assert merged[name].compute() == pytest.approx(float(seen[0][name].compute()))
        assert jnp.isnan(seen[1][name].compute())


def test_a_metric_may_not_take_the_place_of_what_is_skipped():
    state, step = make(lambda p, b, k: (p["b"], {"skipped": sf.mean(1.0)}), skip_nonfinite=True)
    with pytest.raises(sf.errors.LossError, match="metrics/skipped: the name is taken"):
        jax.eval_shape(step, state, NO_MASK)


def test_a_model_state_that_turns_bad_alone_skips_too():
    def loss(params, batch, key, model_state):
        return params["b"], {}, {"n": jnp.where(batch["y"][0] > 5, jnp.nan, model_state["n"] + 1)}

    state, step = make(loss, stateful=True, skip_nonfinite=True)
    after, metrics = jax.jit(step)(state, NO_MASK | {"y": np.full(12, 9.0, np.float32)})
    assert metrics["skipped"].total == 1
    assert after.model_state["n"] == 0
    assert after.params["b"] == state.params["b"]


def test_a_loss_that_is_not_finite_is_skipped_though_its_gradients_are():
    infinite = lambda p, b, k: p["b"] + jnp.where(b["y"][0] > 5, jnp.inf, 0.0)
    state, step = make(infinite, skip_nonfinite=True)
    after, metrics = jax.jit(step)(state, NO_MASK | {"y": np.full(12, 9.0, np.float32)})
    assert metrics["skipped"].total == 1
    chex.assert_trees_all_equal(after.params, state.params)


@pytest.mark.parametrize(
    "wrap", [pytest.param(lambda tx: tx, marks=pytest.mark.full), sf.dynamic_loss_scale]
)
def test_an_update_that_is_not_finite_is_skipped_though_its_gradients_are(wrap):
    rate = lambda count: jnp.where(count == 1, jnp.nan, 0.1)
    state, step = make(tx=wrap(sf.ema_params(optax.sgd(rate), 0.9)), skip_nonfinite=True)
    state, _ = jax.jit(step)(state, BATCH)
    after, metrics = jax.jit(step)(state, BATCH)
    assert metrics["skipped"].total == 1
    chex.assert_trees_all_equal(after.params, state.params)
    chex.assert_trees_all_equal(sf.get_ema(after), sf.get_ema(state))


def test_finite_gradients_whose_square_overflows_are_skipped():
    state, step = make(lambda p, b, k: p["b"] * 1e30, skip_nonfinite=True)
    after, metrics = jax.jit(step)(state, NO_MASK)
    assert metrics["skipped"].total == 1
    chex.assert_trees_all_equal(after.opt_state, state.opt_state)


# other ways to a gradient


def per_example_clipping(bound):
    """Clip every example's own gradient, as private training does."""

    def grad(loss_fn):
        one = sf.make_grad(loss_fn)

        def grad_fn(params, batch, key, model_state):
            rows = jax.tree.map(lambda x: x[:, None], batch)
            each = jax.vmap(one, in_axes=(None, 0, None, None))
            grads, terms, metrics, _ = each(params, rows, key, model_state)
            norms = jax.vmap(optax.tree.norm)(grads)
            shrink = jnp.minimum(1.0, bound / jnp.maximum(norms, 1e-12))
            clipped = jax.tree.map(lambda g: (g.T * shrink).T.mean(0), grads)
            merged = {name: metric.reduce() for name, metric in metrics.items()}
            return clipped, {name: term.reduce() for name, term in terms.items()}, merged, ()

        return grad_fn

    return grad


@pytest.mark.full
def test_grad_may_return_the_gradient_of_each_example_to_an_optimizer_that_aggregates_them():
    def each(loss_fn):
        one = sf.make_grad(loss_fn)

        def grad_fn(params, batch, key, model_state):
            rows = jax.tree.map(lambda x: x[:, None], batch)
            grads, *_ = jax.vmap(one, in_axes=(None, 0, None, None))(params, rows, key, ())
            return grads, loss_fn(params, batch, key)[0], {}, ()

        return grad_fn

    batch = {**BATCH, "mask": np.ones(12, bool)}
    without_noise = optax.contrib.differentially_private_aggregate(1e6, 0.0, key=0)
    for wrap in (sf.dynamic_loss_scale, lambda tx: sf.ema_params(tx, 0.9)):
        state, step = make(tx=wrap(optax.chain(without_noise, optax.sgd(0.1))), grad=each)
        found, metrics = jax.jit(step)(state, batch)
        state, step = make(tx=wrap(optax.sgd(0.1)))
        plain, wanted = jax.jit(step)(state, batch)
        chex.assert_trees_all_close(found.params, plain.params, rtol=1e-5)
        norms = [float(m["grad_norm"].compute()) for m in (metrics, wanted)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_grad_may_return_a_bare_loss():
    def grad(loss_fn):
        def grad_fn(params, batch, key, model_state):
            loss, grads = jax.value_and_grad(lambda p: (p["w"] ** 2).sum())(params)
            return {**grads, "b": jnp.zeros(())}, loss, {}, model_state

        return grad_fn

    state, step = make(grad=grad)
    assert jax.jit(step)(state, BATCH)[1]["loss"].compute() > 0


@pytest.mark.parametrize("wrap", [lambda tx: tx, sf.dynamic_loss_scale])
@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        ((1.0,), sf.errors.ConfigError, r"grad: expected \(grads, loss, .*, got a tuple of 1"),
        (None, sf.errors.ConfigError, r"grad: expected \(grads, loss, .*, got NoneType None"),
        (
            ({"w": ones(3)}, 0.0, {}, ()),
            sf.errors.TreeMismatchError,
            r"grad: expected gradients in the form of the parameters, got\n  grads/b: missing",
        ),
        (
            ({"w": ones(3, jnp.bfloat16), "b": 0.0}, 0.0, {}, ()),
            sf.errors.TreeMismatchError,
            r"grads/w: expected float32\[3\], got bfloat16\[3\]",
        ),
        (({"w": ones(3), "b": 0.0}, None, {}, ()), sf.errors.LossError, "loss: expected a number"),
        (({"w": ones(3), "b": 0.0}, 0.0, [], ()), sf.errors.LossError, "metrics: expected a dict"),
    ],
)
def test_what_another_gradient_returns_is_held_to_the_contract(wrap, returned, error, message):
    state, step = make(tx=wrap(optax.sgd(0.1)), grad=lambda loss_fn: lambda *inputs: returned)
    with pytest.raises(error, match=message):
        jax.eval_shape(step, state, BATCH)


def test_grad_is_given_the_options_that_it_takes():
    asked = []

    def everything(loss_fn, **options):
        asked.append(options)
        return sf.make_grad(loss_fn, **options)

    def required(loss_fn, *, accumulate):
        asked.append(accumulate)
        return sf.make_grad(loss_fn, accumulate=accumulate)

    make(grad=everything, accumulate=3)
    make(lambda p, b, k, s: 0.0, grad=everything, stateful=True)
    make(grad=required)
    make(grad=functools.partial(sf.make_grad, accumulator_dtype=None), accumulate=3)
    assert asked == [
        {"accumulate": 3, "stateful": False},
        {"accumulate": 1, "stateful": True},
        1,
    ]


def test_a_grad_that_cannot_do_what_is_asked_says_so_when_built():
    message = "grad: expected a function that accepts accumulate=, got grad; add the keyword"
    with pytest.raises(sf.errors.ConfigError, match=message):
        make(accumulate=2, grad=per_example_clipping(1.0))
    with pytest.raises(
        sf.errors.ConfigError, match="that accepts stateful=, got grad; add the keyword"
    ):
        make(lambda p, b, k, s: 0.0, stateful=True, grad=per_example_clipping(1.0))
    with pytest.raises(sf.errors.ConfigError, match="grad: expected a function of a loss"):
        make(grad="vmap")


def test_partial_with_another_value_of_an_option_is_refused():
    message = "grad: expected a partial without accumulate=, got accumulate=4; pass it as make_tr"
    for grad in (sf.make_grad, lambda loss_fn, **options: None):
        with pytest.raises(sf.errors.ConfigError, match=message):
            make(grad=functools.partial(grad, accumulate=4))
        with pytest.raises(sf.errors.ConfigError, match=message):
            make(grad=functools.partial(grad, accumulate=4), accumulate=2)
    with pytest.raises(sf.errors.ConfigError, match="without stateful=, got stateful=True"):
        make(grad=functools.partial(sf.make_grad, stateful=True))


def test_a_loss_or_an_optimizer_that_is_none_is_refused_when_built():
    words = r"expected a function loss_fn\(params, batch, key\), got"
    with pytest.raises(sf.errors.LossError, match=words):
        sf.make_train_step(optax.sgd(0.1), loss_fn)
    with pytest.raises(sf.errors.ConfigError, match="tx: expected an optax transformation"):
        sf.make_train_step(loss_fn, optax.adam)


# the eval step


def test_an_eval_step_measures_and_changes_nothing():
    state, _ = make()
    metrics = jax.jit(sf.make_eval_step(loss_fn))(state, BATCH)
    assert sorted(metrics) == ["close", "loss"]
    want = loss_fn(state.params, BATCH, None)[0].compute()
    assert metrics["loss"].compute() == pytest.approx(float(want))


def test_a_stateful_eval_step_reads_the_model_state():
    def loss(params, batch, key, model_state):
        return params["b"], {"n": sf.mean(model_state["n"])}, {"n": model_state["n"] + 1}

    state, _ = make(loss, stateful=True)
    metrics = jax.jit(sf.make_eval_step(loss, stateful=True))(state, NO_MASK)
    assert metrics["n"].compute() == 0


def test_an_eval_step_has_the_key_of_the_step_to_come():
    state, step = make(lambda p, b, k: (p["b"], {"u": sf.mean(jax.random.uniform(k))}))
    evaluate = sf.make_eval_step(lambda p, b, k: (p["b"], {"u": sf.mean(jax.random.uniform(k))}))
    for _ in range(2):
        drawn = jax.jit(evaluate)(state, NO_MASK)["u"].compute()
        state, metrics = jax.jit(step)(state, NO_MASK)
        assert drawn == metrics["u"].compute()


def test_an_eval_step_holds_the_loss_to_its_contract():
    state, _ = make()
    with pytest.raises(sf.errors.LossError, match="loss: expected a scalar"):
        jax.eval_shape(sf.make_eval_step(lambda p, b, k: p["w"]), state, BATCH)
    with pytest.raises(sf.errors.ConfigError, match="precision: expected one of"):
        sf.make_eval_step(loss_fn, precision="half")


# a step with metrics of its state


def squares(params, batch, key):
    return sf.mean((params - batch) ** 2)


def observed(tx, **functions):
    step = sf.observe(sf.make_train_step(squares, tx), **functions)
    return step, sf.init_state(jnp.ones(4), tx, jax.random.key(0))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda state: None, "rate: expected one number of the state, got NoneType None"),
        (lambda state: state.key, "rate: expected one number of the state, got key<fry>"),
        (lambda state: state.params, r"rate: expected one number of the state, got float32\[4\]"),
    ],
)
def test_what_is_no_number_is_named(function, said):
    step, state = observed(optax.sgd(0.1), rate=function)
    with pytest.raises(sf.errors.ConfigError, match=said):
        step(state, jnp.zeros(4))


def test_arguments_are_checked():
    step, state = observed(optax.sgd(0.1), loss=lambda state: 0.0)
    with pytest.raises(
        sf.errors.ConfigError, match="other names than the step's own metrics, got loss"
    ):
        step(state, jnp.zeros(4))
    with pytest.raises(sf.errors.ConfigError, match="observe: expected a step .* got None"):
        sf.observe(None)
    with pytest.raises(
        sf.errors.ConfigError, match="rate: expected a function of the state, got float 0"
    ):
        sf.observe(squares, rate=0.1)
