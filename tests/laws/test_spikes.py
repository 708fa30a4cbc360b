"""Updates by batches with a spike change nothing, and the window follows the level of the loss."""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.small import Shown, ones

import stepfold as sf

from . import network

pytestmark = pytest.mark.not_optimized

WINDOW, DEVIATIONS = 4, 3.0
PARAMS = {
    "w": jax.device_put(np.array([1.0, -0.0, np.nan], np.float32)),
    "half": ones(3, jnp.bfloat16),
}
GRADS = {"w": ones(3), "half": ones(3, jnp.bfloat16)}


def reference(losses):
    """Say for each loss whether it is accepted."""
    accepted, above, answers = [], [], []
    for loss in losses:
        is_above = False
        if np.isfinite(loss) and len(accepted) >= WINDOW:
            window = np.array(accepted[-WINDOW:])
            median = np.median(window)
            spread = 1.4826 * np.median(np.abs(window - median))
            is_above = loss > median + DEVIATIONS * max(spread, 0.01 * abs(median))
        if is_above:
            above.append(loss)
            if len(above) == WINDOW:
                accepted, above = above, []
        elif np.isfinite(loss):
            accepted.append(loss)
            above = []
        answers.append(bool(np.isfinite(loss) and not is_above))
    return answers


# Mutants


def rewritten(change):
    """Return `skip_spikes` with another rule for its state."""

    def make(tx, **options):
        right = sf.optim.skip_spikes(tx, **options)

        def update(updates, state, params=None, *, value, **extra):
            updates, new = right.update(updates, state, params, value=value, **extra)
            return change(updates, state, new, jnp.asarray(value))

        return optax.GradientTransformationExtraArgs(right.init, update)

    return make


def pushed(losses, value):
    return jnp.append(losses[1:], value)


@rewritten
def has_no_floor(updates, state, new, value):
    is_above = (state.num_accepted == WINDOW) & (value > jnp.median(state.accepted))
    is_spike = is_above & (state.accepted.std() == 0)
    inner = jax.tree.map(lambda x, y: jnp.where(is_spike, x, y), state.inner, new.inner)
    return updates, new._replace(skipped=new.skipped + is_spike, inner=inner)


@rewritten
def takes_in_everything(updates, state, new, value):
    return updates, new._replace(
        accepted=pushed(state.accepted, value),
        num_accepted=jnp.minimum(state.num_accepted + 1, WINDOW),
    )


@rewritten
def never_moves(updates, state, new, value):
    has_moved = (state.num_above == WINDOW - 1) & (new.num_above == 0)
    return updates, new._replace(accepted=jnp.where(has_moved, state.accepted, new.accepted))


@rewritten
def updates_the_inner_state(updates, state, new, value):
    return updates, new._replace(inner=jax.tree.map(lambda x: x + jnp.ones_like(x), new.inner))


@rewritten
def adds_a_positive_zero(updates, state, new, value):
    return jax.tree.map(jnp.abs, updates), new


@cache
def scanned(make):
    tx = make(optax.sgd(0.1, momentum=0.9), window=WINDOW, deviations=DEVIATIONS)

    def step(carry, loss):
        params, state = carry
        with jax.numpy_dtype_promotion("standard"):  # optax is not written for the strict kind
            updates, state = tx.update(GRADS, state, params, value=loss)
            params = optax.apply_updates(params, updates)
        return (params, state), (params, state)

    start = PARAMS, tx.init(PARAMS)
    return start, jax.jit(lambda losses: jax.lax.scan(step, start, losses)[1])


@cache
def skipping():
    tx = sf.optim.skip_spikes(optax.sgd(0.1), window=WINDOW, deviations=DEVIATIONS)
    return tx._replace(update=jax.jit(tx.update))


LENGTH = 24


def check(make, losses):
    losses = [*losses, *[1.0] * LENGTH][:LENGTH]
    before, run = scanned(make)
    results = run(jnp.float32(losses))
    skipped = 0
    for i, is_accepted in enumerate(reference(losses)):
        params, state = after = jax.tree.map(lambda leaf, i=i: leaf[i], results)
        same = network.bits((before[0], before[1].inner)) == network.bits((params, state.inner))
        assert same is not is_accepted, (i, losses[i])
        skipped += not is_accepted
        assert int(state.skipped) == skipped
        before = after


LEVELS = [0.75, 1.0, 1.25, 1.5, 8.0, 9.0, np.nan, np.inf, -np.inf]


@given(st.lists(st.sampled_from(LEVELS), min_size=LENGTH, max_size=LENGTH))
def test_exactly_the_spikes_are_skipped(losses):
    check(sf.optim.skip_spikes, losses)


QUIET = [1.0, 1.25, 0.75, 1.0]
CASES = {
    "one NaN": [*QUIET, np.nan, 9.0, 1.0],
    "a spike": [*QUIET, 9.0, 9.0, 1.0, 8.0],
    "a new level": [*QUIET, 8.0, 9.0, 8.5, 8.0, 8.5, 8.25, 20.0],
    "a NaN in a new level": [*QUIET, 8.0, np.nan, 9.0, 8.5, np.inf, 8.0, 8.5],
    "a NaN first": [np.nan, 1.0],
    "rises within rounding after a constant loss": [1.0] * 4 + [1 + 1e-7, 1 + 3e-7, 1.0, 2.0],
    "a constant negative loss": [-2.0] * 4 + [-2 + 1e-6, -1.99, 1.0],
    "a NaN before the window is full": [1.0, np.nan, 1.25, 0.75, 9.0, 9.0, 1.0],
}


@pytest.mark.parametrize("case", CASES)
def test_what_happens_after(case):
    check(sf.optim.skip_spikes, CASES[case])


@pytest.mark.parametrize(
    ("make", "case"),
    [
        (takes_in_everything, "one NaN"),
        (takes_in_everything, "a spike"),
        (has_no_floor, "rises within rounding after a constant loss"),
        (never_moves, "a new level"),
        (updates_the_inner_state, "a spike"),
        (adds_a_positive_zero, "a NaN first"),
    ],
)
def test_what_is_nearly_right_fails_the_same_law(make, case):
    with pytest.raises(AssertionError):
        check(make, CASES[case])


def test_a_loss_that_was_zero_throughout_has_no_scale_to_judge_by():
    """As in reinforcement learning, until a first reward."""
    tx = sf.optim.skip_spikes(optax.sgd(0.1), window=WINDOW)
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    for loss in [0.0] * WINDOW + [1e-7] * 3 + [0.5]:
        _, state = update(GRADS, state, PARAMS, value=jnp.float32(loss))
    assert int(state.skipped) == 1  # the last, when most are not zero


@given(st.lists(st.sampled_from([0.75, 1.0, 1.25, 1.5, 1.75, 8.0]), min_size=6, max_size=24))
def test_the_first_spike_is_where_on_spike_stops(losses):
    state, skipped = skipping().init(PARAMS), None
    for i, loss in enumerate(losses):
        _, state = skipping().update(GRADS, state, PARAMS, value=jnp.float32(loss))
        if skipped is None and int(state.skipped):
            skipped = i + 1
    event = sf.Event(len(losses), None, {}, None, {"train/loss": np.array(losses)})
    stop = Shown(sf.hooks.on_spike(window=WINDOW, deviations=DEVIATIONS))(event)
    assert (stop is None) == (skipped is None)
    assert stop is None or f" in step {skipped}," in stop.message


def test_sigma_gives_its_new_name():
    message = "skip_spikes: sigma=… is now deviations=…"
    with pytest.warns(DeprecationWarning, match=message):
        sf.optim.skip_spikes(optax.sgd(0.1), sigma=6.0)
    with pytest.raises(sf.errors.ConfigError, match=f"{message}; leave sigma out"):
        sf.optim.skip_spikes(optax.sgd(0.1), sigma=6.0, deviations=6.0)


# In a train step


def loss_fn(params, batch, key):
    return sf.mean(params["w"] * batch["x"] + batch["level"])


def batches(levels):
    return [{"x": jnp.ones(8), "level": jnp.full(8, level)} for level in levels]


def chained():
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return sf.optim.skip_spikes(sf.ema_params(inner, 0.9), window=WINDOW, deviations=DEVIATIONS)


@pytest.mark.parametrize(
    ("wrap", "options"),
    [
        pytest.param(lambda tx: tx, {}, marks=pytest.mark.full),
        pytest.param(
            lambda tx: tx, {"accumulate": 4, "skip_nonfinite": True}, marks=pytest.mark.full
        ),
        (sf.dynamic_loss_scale, {"accumulate": 2}),
        pytest.param(lambda tx: optax.chain(optax.clip(1.0), tx), {}, marks=pytest.mark.full),
    ],
)
def test_a_train_step_passes_the_loss(wrap, options):
    tx = wrap(chained())
    step = jax.jit(sf.make_train_step(loss_fn, tx, **options), donate_argnums=0)
    state = sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0))
    rows = []
    for batch in batches([*QUIET, 9.0, 1.0]):
        state, _ = step(state, batch)
        rows.append(network.bits((state.params, optax.tree.get(state.opt_state, "ema"))))
    assert [a == b for a, b in itertools.pairwise(rows)] == [False] * 3 + [True, False]
    assert int(optax.tree.get(state.opt_state, "skipped")) == 1


@pytest.mark.full
def test_calls_scans_layouts_and_restores_have_the_same_bits(tmp_path):
    tx, levels = chained(), [*QUIET, 9.0, np.nan, 1.0, 8.0]
    step = sf.make_train_step(loss_fn, tx)
    start = lambda **plan: sf.init_state({"w": jnp.ones(())}, tx, jax.random.key(0), **plan)
    state, jitted = start(), jax.jit(step)
    for number, batch in enumerate(batches(levels)):
        if number == 5:
            sf.save(tmp_path, state)
            state = sf.restore(tmp_path, start()).state
        state, _ = jitted(state, batch)
    wanted = network.bits(state)
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *batches(levels))
    assert (
        network.bits(jax.jit(lambda s, b: jax.lax.scan(step, s, b))(start(), stacked)[0]) == wanted
    )
    mesh = sf.make_mesh()
    plan = sf.make_sharding(jax.eval_shape(start), mesh)
    state = start(sharding=plan)
    compiled = sf.compile_step(step, state, batches(levels)[0])
    for batch in batches(levels):
        state, _ = compiled(state, sf.shard_batch(batch, mesh))
    assert network.bits(state) == wanted


def test_the_loss_has_to_be_passed():
    tx = sf.optim.skip_spikes(optax.sgd(0.1))
    params = {"w": jnp.ones(2)}
    for wrong in ({}, {"value": jnp.ones(2)}):
        with pytest.raises(sf.errors.ConfigError, match="value: expected the loss, a number, got "):
            tx.update(params, tx.init(params), params, **wrong)
