"""Unusual optimizers in an ordinary train step."""

import jax
import numpy as np
import optax
import pytest
from tests.laws.network import bits

import stepfold as sf

from .course import TRAIN, digits, measured, score

pytestmark = pytest.mark.usefixtures("standard_promotion")

STEPS = 40


def _start():
    """Make parameters of numpy's, which need no compiling."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: np.float32(rng.normal(size=shape) / shape[0] ** 0.5)
    first = {"kernel": draw(64, 32), "bias": np.zeros(32, np.float32)}
    last = {"kernel": draw(32, 10), "bias": np.zeros(10, np.float32)}
    return {"first": first, "last": last}


START = _start()


def loss_fn(params, batch, key):
    hidden = jax.nn.relu(batch["image"] @ params["first"]["kernel"] + params["first"]["bias"])
    return score(hidden @ params["last"]["kernel"] + params["last"]["bias"], batch)


MEASURE = jax.jit(sf.make_eval_step(loss_fn))


def trained(tx, folder, *, start=START, loss=loss_fn, **options):
    """Train in a loop of one's own, and a second time from a checkpoint in its middle."""
    step = jax.jit(sf.make_train_step(loss, tx, **options), donate_argnums=0)
    begin = lambda: sf.init_state(start, tx, jax.random.key(0))

    def until(state, batches, end):
        while int(state.step) < end:
            state, _ = step(state, next(batches))
        return state

    batches = digits()
    half = until(begin(), batches, STEPS // 2)
    sf.save(folder, half, data=batches)
    whole = until(half, batches, STEPS)

    restored = sf.restore(folder, jax.eval_shape(begin))
    batches.set_state(restored.data)
    assert bits(until(restored.state, batches, STEPS)) == bits(whole)
    return whole


def loss_of(params):
    """Measure parameters alone, as who has trained them would."""
    return measured(MEASURE, sf.init_state(params, optax.identity(), jax.random.key(0)), 100)[
        "loss"
    ]


UPHILL = optax.chain(optax.contrib.normalize(), optax.sgd(0.02))
OPTIMIZERS = {
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=16),
    "lion": optax.lion(1e-2),
    "muon": optax.contrib.muon(0.1),
    "sam": optax.contrib.sam(optax.adam(4e-2), UPHILL, sync_period=2),
}


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_learns_and_resumes_bit_for_bit(name, tmp_path):
    assert loss_of(trained(OPTIMIZERS[name], tmp_path).params) < 0.8


@pytest.mark.full
def test_schedule_free_evaluates_its_average(tmp_path):
    tx = optax.contrib.schedule_free_adamw(3e-2, warmup_steps=5)
    state = trained(tx, tmp_path)

    def average(state, batch):
        params = optax.contrib.schedule_free_eval_params(state.opt_state, state.params)
        return MEASURE(state._replace(params=params), batch)

    found = measured(average, state, 100)
    assert found["loss"] < 0.8
    assert found["loss"] != measured(MEASURE, state, 100)["loss"]


@pytest.mark.full
def test_lookahead_keeps_two_sets_of_parameters(tmp_path):
    """Its gradients are of the fast ones alone, and so it is given those of the state's."""
    ahead = optax.lookahead(optax.adam(2e-2), sync_period=5, slow_step_size=0.5)
    tx = ahead._replace(update=lambda grads, *rest: ahead.update(grads.fast, *rest))
    both = optax.LookaheadParams.init_synced(START)
    on_fast = lambda params, batch, key: loss_fn(params.fast, batch, key)
    params = trained(tx, tmp_path, start=both, loss=on_fast).params
    assert loss_of(params.slow) < 0.8
    for fast, slow in zip(*map(jax.tree.leaves, params), strict=True):  # they have just met
        np.testing.assert_allclose(fast, slow, atol=1e-6)


def test_frozen_parameters_keep_every_bit(tmp_path):
    edge = np.float32([-0.0, 1e-42, np.inf, 3.3])  # a zero's sign, and what rounds to nothing
    start = {**START, "edge": edge}

    def part(path, leaf):
        return "frozen" if path[0].key in ("first", "edge") else "trained"

    labels = lambda params: jax.tree_util.tree_map_with_path(part, params)
    parts = {"trained": optax.adamw(0.1, weight_decay=0.1), "frozen": optax.set_to_zero()}
    after = trained(optax.multi_transform(parts, labels), tmp_path, start=start).params
    assert loss_of({name: after[name] for name in ("first", "last")}) < 1.2
    for name in ("first", "edge"):
        assert bits(after[name]) == bits(start[name])
    assert bits(after["last"]) != bits(start["last"])


def sharpest_near(rho):
    """Make a way to a gradient: that of the worst point near by (Foret et al., 2021)."""

    def grad(loss_fn, *, accumulate=1, stateful=False):
        gradient = sf.make_grad(loss_fn, accumulate=accumulate, stateful=stateful)

        def there(params, batch, key, model_state):
            grads, *seen = gradient(params, batch, key, model_state)
            worst = optax.tree.add_scale(params, rho / optax.tree.norm(grads), grads)
            return gradient(worst, batch, key, model_state)[0], *seen

        return there

    return grad


@pytest.mark.full
def test_step_uses_a_custom_gradient_function():
    state = sf.init_state(START, optax.sgd(1.0), jax.random.key(0))
    batch = {name: values[:50] for name, values in TRAIN.items()}
    step = jax.jit(sf.make_train_step(loss_fn, optax.sgd(1.0), grad=sharpest_near(0.05)))
    stepped, metrics = step(state, batch)

    @jax.jit
    def by_hand(params):
        plain = lambda params: loss_fn(params, batch, None)[0].compute()
        loss, grads = jax.value_and_grad(plain)(params)
        scale = 0.05 / optax.tree.norm(grads)
        worst = jax.tree.map(lambda p, g: p + scale * g, params, grads)
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(plain)(worst)), loss

    wanted, loss = by_hand(state.params)
    for one, two in zip(*map(jax.tree.leaves, (stepped.params, wanted)), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"].compute(), loss, rtol=1e-6)


def per_example(loss_fn):
    """Return the gradient of each example, along a leading axis."""
    of_one = sf.make_grad(loss_fn)

    def grad_fn(params, batch, key, model_state):
        rows = jax.tree.map(lambda x: x[:, None], batch)
        over_rows = jax.vmap(of_one, in_axes=(None, 0, None, None))
        grads, terms, metrics, _ = over_rows(params, rows, key, model_state)
        reduce = lambda group: {name: metric.reduce() for name, metric in group.items()}
        return grads, reduce(terms), reduce(metrics), model_state

    return grad_fn


def private(tx, bound, noise):
    aggregate = optax.contrib.differentially_private_aggregate(bound, noise, key=0)
    return optax.chain(aggregate, tx)


@pytest.mark.full
def test_private_sgd_is_that_of_optax():
    tx = private(optax.sgd(0.3), bound=0.5, noise=0.1)
    state = sf.init_state(START, tx, jax.random.key(0))
    batch = {name: values[:50] for name, values in TRAIN.items()}
    stepped, metrics = jax.jit(sf.make_train_step(loss_fn, tx, grad=per_example))(state, batch)

    @jax.jit
    def by_hand(params):
        of_row = lambda params, row: loss_fn(params, row, None)[0].compute()
        rows = jax.tree.map(lambda x: x[:, None], batch)
        grads = jax.vmap(jax.grad(of_row), in_axes=(None, 0))(params, rows)
        updates, _ = tx.update(grads, tx.init(params), params)
        mean = jax.grad(lambda params: of_row(params, batch))(params)
        return optax.apply_updates(params, updates), optax.tree.norm(mean)

    wanted, norm = by_hand(START)
    for one, two in zip(*map(jax.tree.leaves, (stepped.params, wanted)), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"].compute(), norm, rtol=1e-5)
