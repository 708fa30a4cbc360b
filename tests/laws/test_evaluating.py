"""What an evaluation comes to does not depend on how the examples are batched or shared out."""

from itertools import product

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clu import metrics as clu
from jax.sharding import PartitionSpec as P
from tests.small import full_but

import stepfold as sf

from . import course

pytestmark = pytest.mark.not_optimized  # results are exact in any order of adding

EXAMPLES = 70


@flax.struct.dataclass
class Range(clu.Metric):
    """The least and the greatest, which add up to nothing."""

    least: jax.Array
    greatest: jax.Array

    @classmethod
    def of(cls, values, mask):
        far = jnp.float32(jnp.inf)
        return cls(jnp.where(mask, values, far).min(), jnp.where(mask, values, -far).max())

    def merge(self, other):
        least = jnp.minimum(self.least, other.least)
        return Range(least, jnp.maximum(self.greatest, other.greatest))

    def compute(self):
        return {"least": self.least, "greatest": self.greatest}


def loss(params, batch, key):
    """Sums of whole numbers alone, so that every order of adding gives the same bits."""
    error = jnp.round(4 * (batch["x"] @ params["w"] - batch["y"])) / 4
    close = clu.Accuracy.from_model_output(
        logits=jnp.stack([error, -error], axis=-1), labels=batch["label"], mask=batch["mask"]
    )
    own = {
        "hit": sf.mean(error < 1, batch["mask"]),
        "close": close,
        "range": Range.of(error, batch["mask"]),
    }
    terms = {
        "fit": sf.mean(jnp.abs(error), batch["mask"]),
        "none": sf.mean(error, jnp.zeros_like(batch["mask"])),
    }
    return terms, own


MEASURE = sf.make_eval_step(loss)


def data():
    found = course.data(EXAMPLES)
    rng = np.random.default_rng(1)
    return {**found, "label": rng.integers(0, 2, EXAMPLES).astype(np.int32)}


def wanted(state):
    """Compute it by hand, of all examples at once."""
    x, y, mask, label = (data()[name] for name in ("x", "y", "mask", "label"))
    error = np.round(4 * (x @ np.asarray(state.params["w"]) - y)) / 4
    error, label = error[mask].astype(np.float64), label[mask]
    mean = np.abs(error).mean()
    return {
        "loss": mean,
        "fit": mean,
        "none": np.nan,
        "hit": (error < 1).mean(),
        "close": (np.where(error >= -error, 0, 1) == label).mean(),
        "range/least": error.min(),
        "range/greatest": error.max(),
    }


def same(found, state):
    assert found == pytest.approx(wanted(state), rel=1e-12, nan_ok=True)


def on_mesh(dims=(1, 8, 1, 1)):
    mesh = sf.make_mesh(dims)
    shape = jax.eval_shape(course.start)
    plan = sf.make_sharding(shape, mesh, [("params", P())])
    return sf.sharding.place(course.start(), plan)


@pytest.mark.parametrize(("size", "remainder"), [(1, "pad"), (9, "keep"), (64, "pad")])
def test_the_size_of_a_batch_is_no_matter(size, remainder):
    batches = sf.batches(data(), size, epochs=1, remainder=remainder)
    same(sf.evaluate(MEASURE, course.start(), batches), course.start())


@pytest.mark.parametrize(
    ("dims", "size"),
    full_but([((2, 4, 1, 1), 24)], product([(1, 8, 1, 1), (2, 4, 1, 1)], [8, 24, 64])),
)
def test_the_number_of_devices_is_no_matter(dims, size):
    state = on_mesh(dims)
    batches = sf.batches(data(), size, epochs=1, remainder="pad")
    same(sf.evaluate(MEASURE, state, batches), course.start())


def test_batches_may_be_placed_already():
    state = on_mesh()
    mesh = state.params["w"].sharding.mesh
    batches = sf.batches(data(), 64, epochs=1, remainder="pad")
    same(sf.evaluate(MEASURE, state, (sf.shard_batch(b, mesh) for b in batches)), course.start())


def test_rows_that_do_not_divide_over_the_devices_are_refused_in_words():
    batches = sf.batches(data(), 16, epochs=1, remainder="keep")
    with pytest.raises(sf.errors.ShardingError, match="multiple of 8 rows, .*, got 6 rows; "):
        sf.evaluate(MEASURE, on_mesh(), batches)


def test_more_batches_than_wait_at_once_are_all_counted():
    batches = [{**data(), "i": np.int32(i)} for i in range(150)]
    same(sf.evaluate(MEASURE, course.start(), batches), course.start())


def test_whole_numbers_are_exact_beyond_what_floats_and_32_bits_hold():
    count = 2**24 + 1

    def measure(state, batch):
        return {"hit": clu.Average(total=batch["hits"], count=batch["rows"])}

    batches = [{"hits": np.int32(count), "rows": np.int32(2**31 - 1)}] * 300
    found = sf.evaluate(measure, course.start(), batches)["hit"]
    assert found == count / (2**31 - 1)
    odd = [{"hits": np.int32(2**30), "rows": np.int32(1)}] + [
        {"hits": np.int32(1), "rows": np.int32(0)}
    ] * 3
    assert sf.evaluate(measure, course.start(), odd)["hit"] == 2**30 + 3


def test_with_dropout_the_same_state_on_the_same_batches_gives_the_same():
    """The key is that of the step to come."""
    one = lambda: course.evaluation()(course.start())
    assert one() == one()


# A loss or a metric that is a number: a mean over the examples of its batch


def number(params, batch, key):
    """Divide by hand, as most write it."""
    mask = batch["mask"].astype(jnp.float32)
    total = lambda values: (values * mask).sum() / mask.sum()
    return total(batch["x"] * params), {"twice": total(2 * batch["x"])}


def plain_number(params, batch, key):
    return {"fit": (batch["x"] * params).mean(), "constant": 3.0}, {"twice": 2 * batch["x"].mean()}


def one():
    return sf.init_state(jnp.ones(()), optax.sgd(0.0), jax.random.key(0))


FEW = {"x": np.array([1, 1, 1, 1, 6], np.float32)}


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_a_number_weighs_as_many_rows_as_its_batch_has(size):
    ragged = sf.batches(FEW, size, epochs=1, remainder="keep")
    found = sf.evaluate(sf.make_eval_step(plain_number), one(), ragged)
    assert found == pytest.approx({"loss": 5.0, "fit": 2.0, "constant": 3.0, "twice": 4.0})
    padded = sf.batches(FEW, size, epochs=1, remainder="pad")
    found = sf.evaluate(sf.make_eval_step(number), one(), padded)
    assert found == pytest.approx({"loss": 2.0, "twice": 4.0})


def test_a_number_weighs_the_same_at_log_points_and_at_the_ends_of_epochs():
    step, epochs = sf.make_train_step(number, optax.sgd(0.0)), []
    callback = sf.hooks.callback(lambda trainer, epoch, metrics: epochs.append(metrics))
    batches = sf.batches(FEW, 4, epochs=2, seed=0, remainder="pad")
    history = sf.fit(step, one(), batches, log_every=2, hooks=callback).history
    for means in (history["train/loss"], [epoch["train_loss"] for epoch in epochs]):
        assert means == pytest.approx([2.0, 2.0])
    for means in (history["train/twice"], [epoch["train_twice"] for epoch in epochs]):
        assert means == pytest.approx([4.0, 4.0])


def test_a_number_changes_no_gradient_and_microbatches_weigh_the_same():
    """Some rows are masked, and the number is a mean over all of them."""
    data = {"x": jnp.arange(1.0, 13.0), "mask": jnp.arange(12) % 3 == 0}
    loss = lambda params, batch, key: {
        "masked": sf.mean(batch["x"] * params, batch["mask"]),
        "all": (batch["x"] * params**2).mean(),
    }
    params, key, tx = jnp.float32(3.0), jax.random.key(0), optax.sgd(1.0)
    want = jax.grad(lambda p: loss(p, data, key)["all"] + loss(p, data, key)["masked"].compute())
    for accumulate in (1, 2, 6):
        state = sf.init_state(params, tx, key)
        state, metrics = sf.make_train_step(loss, tx, accumulate=accumulate)(state, data)
        assert float(params - state.params) == pytest.approx(float(want(params)), rel=1e-6)
        assert (float(metrics["all"].compute()), float(metrics["all"].count)) == (58.5, 4.0)


@pytest.mark.filterwarnings("ignore:.*expected a loss that depends on batch")
@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (np.ones((3, 2)), 3),
        ((np.ones((3, 2)), np.ones(3)), 3),
        ({"rate": np.float32(0.1), "x": np.ones((3, 2))}, 3),
        ({"x": np.ones((3, 2)), "mask": np.array([True, False, True])}, 2),
        ({"x": np.ones((3, 2)), "mask": np.array([[1, 1], [1, 0], [0, 0]])}, 3),
        ({"x": np.ones((3, 2)), "mask": np.array([0.5, 0.25, 0])}, 0.75),
        ({"x": np.ones((3, 2)), "mask": None}, 3),
        (np.float32(2), 1),
    ],
)
def test_the_weight_of_a_number_is_that_of_the_mask_or_else_the_rows(batch, count):
    measure = sf.make_eval_step(lambda params, batch, key: params)
    assert float(jax.jit(measure)(one(), batch)["loss"].count) == count
