"""The mean of each source is that of its examples alone, however they are batched and shared."""

import contextlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stepfold as sf

pytestmark = pytest.mark.not_optimized  # sums of whole numbers are exact in any order of adding

NAMES = ("web", "code", "books")
SIZE, STEPS, WIDTH = 16, 12, 8
RNG = np.random.default_rng(0)
PARTS = {
    name: ({"x": RNG.integers(0, 9, count).astype(np.float32)}, weight)
    for name, count, weight in zip(NAMES, (40, 7, 30), (9, 3, 1), strict=True)
}
# The last source is absent from the first batches: an interval may have none of its examples.
MIXTURE = sf.mix(PARTS, seed=0, source_key="source", stages=[(100, (1, 3, 0)), (140, (2, 2, 9))])


def loss_fn(mean_by, params, batch, key):
    error = jnp.abs(batch["x"] + params["w"].sum())
    mask = batch["x"] != 3
    return sf.mean(error, mask), mean_by(error, batch["source"], NAMES, mask, prefix="loss/")


TX = optax.sgd(0.0)  # the parameters stay 0, so that the loss of an example is `x`


def new_state(sharding=None):
    init = lambda key: {"w": jnp.zeros(WIDTH)}
    return sf.init_state(init, TX, jax.random.key(0), sharding=sharding)


def expected_rows(log_every):
    """Sum up the losses of each source between log points, in whole numbers."""
    rows = {}
    for stop in range(log_every, STEPS + log_every, log_every):
        first, stop = stop - log_every, min(stop, STEPS)
        batch = MIXTURE.take(slice(first * SIZE, stop * SIZE))
        means = {}
        for number, name in enumerate(NAMES):
            x = batch["x"][(batch["source"] == number) & (batch["x"] != 3)]
            means[name] = math.fsum(x) / len(x) if len(x) else math.nan
        rows[stop] = means
    return rows


def step_on(layout, accumulate, mean_by):
    loss = lambda *args: loss_fn(mean_by, *args)
    if layout == "one":
        return sf.make_train_step(loss, TX, accumulate=accumulate), new_state()
    mesh = sf.make_mesh((8,), ("fsdp" if layout == "ordered" else layout,))
    plan = sf.make_sharding(jax.eval_shape(new_state), mesh, sf.sharding.fsdp(min_size=1))
    grad = {"grad": sf.sharding.ordered(plan, blocks=8)} if layout == "ordered" else {}
    return sf.make_train_step(loss, TX, accumulate=accumulate, **grad), new_state(plan)


class Cut(Exception):
    """The run was cut."""


def check(folder, layout, accumulate=1, log_every=3, steps_per_call=1, mean_by=sf.mean_by):
    step, state = step_on(layout, accumulate, mean_by)
    rows, cuts = {}, [5, 8]

    def collect(event):
        if cuts and event.step >= cuts[0]:
            cuts.pop(0)
            raise Cut
        rows[event.step] = {name: event.metrics[f"train/loss/{name}"] for name in NAMES}

    for _ in range(3):
        with contextlib.suppress(Cut):
            sf.fit(
                step, jax.tree.map(jnp.copy, state), sf.batches(MIXTURE, SIZE), steps=STEPS,
                run_dir=folder, checkpoints=sf.Checkpoints(every=5), hooks=collect,
                log_every=log_every, steps_per_call=steps_per_call,
            )  # fmt: skip
    expected = expected_rows(log_every)
    assert not cuts
    assert rows.keys() == expected.keys()
    for at, row in rows.items():
        assert row == pytest.approx(expected[at], rel=1e-6, nan_ok=True)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("one", {"accumulate": 4, "log_every": 1}),
        pytest.param("dp", {"accumulate": 2, "log_every": 4}, marks=pytest.mark.full),
        pytest.param("fsdp", {"steps_per_call": 3}, marks=pytest.mark.full),
        pytest.param("ordered", {}, marks=pytest.mark.full),
    ],
)
def test_the_loss_of_each_source_is_exact(tmp_path, layout, options):
    check(tmp_path, layout, **options)


def test_an_interval_may_have_no_example_of_a_source():
    assert any(math.isnan(loss) for row in expected_rows(1).values() for loss in row.values())


def shifted(values, labels, names, where, **options):
    return sf.mean_by(values, (labels + 1) % len(names), names, where, **options)


def unmasked(values, labels, names, where, **options):
    return sf.mean_by(values, labels, names, **options)


def divided(values, labels, names, where, **options):
    """Divide within each microbatch, as a mean of means does."""
    exact = sf.mean_by(values, labels, names, where, **options)
    return {name: sf.mean(jnp.nan_to_num(average.compute())) for name, average in exact.items()}


@pytest.mark.parametrize("mutant", [shifted, unmasked, divided])
def test_what_is_nearly_right_fails_the_same_law(mutant, tmp_path):
    with pytest.raises(AssertionError):
        check(tmp_path, "one", accumulate=2, mean_by=mutant)


EXAMPLE = st.tuples(st.integers(-1, 3), st.integers(-9, 9), st.booleans())


@settings(max_examples=20)
@given(st.lists(EXAMPLE, min_size=12, max_size=12))
def test_means_by_label_add_up_to_the_mean(examples):
    labels, values, where = map(np.array, zip(*examples, strict=True))
    means = sf.mean_by(np.tile(values[:, None], 3), labels, NAMES, where)
    assert tuple(means) == NAMES
    known = where & (labels >= 0) & (labels < 3)
    assert sum(float(mean.total) for mean in means.values()) == 3 * values[known].sum()
    assert sum(float(mean.count) for mean in means.values()) == 3 * known.sum()


@pytest.mark.parametrize(
    ("labels", "names", "says"),
    [
        (np.zeros(4, np.float32), NAMES, r"mean_by: expected integers as labels, got float32\[4\]"),
        (np.zeros(3, int), NAMES, "mean_by: expected labels in the shape of the values or of"),
        (np.zeros(4, int), "web", "mean_by: expected a list of names, got str 'web'"),
        (np.zeros(4, int), [1], "mean_by: expected a list of names"),
    ],
)
def test_invalid_labels_and_names_are_refused(labels, names, says):
    with pytest.raises(sf.errors.LossError, match=says):
        sf.mean_by(np.ones(4), labels, names)
