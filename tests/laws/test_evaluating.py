"""What an evaluation comes to does not depend on how the examples are batched or shared out."""

from itertools import product

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
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
    return sf.place(course.start(), plan)


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
    with pytest.raises(sf.ShardingError, match="multiple of 8 rows, .*, got 6 rows; "):
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
