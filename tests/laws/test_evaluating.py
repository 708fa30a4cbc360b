"""What an evaluation comes to does not depend on how the examples are batched or shared out."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clu import metrics as clu
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

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


@settings(max_examples=6)
@given(size=st.integers(1, 80), remainder=st.sampled_from(["pad", "keep"]))
def test_the_size_of_a_batch_is_no_matter(size, remainder):
    if remainder == "keep" or size <= EXAMPLES:
        batches = sf.batches(data(), size, epochs=1, remainder=remainder)
        same(sf.evaluate(MEASURE, course.start(), batches), course.start())


@pytest.mark.parametrize("size", [8, 24, 64])
@pytest.mark.parametrize("dims", [(1, 8, 1, 1), (2, 4, 1, 1)], ids=str)
def test_the_number_of_devices_is_no_matter(dims, size):
    state = on_mesh(dims)
    batches = sf.batches(data(), size, epochs=1, remainder="pad")
    same(sf.evaluate(MEASURE, state, batches), course.start())


def test_batches_may_be_placed_already():
    state = on_mesh()
    mesh = state.params["w"].sharding.mesh
    batches = sf.batches(data(), 16, epochs=1, remainder="pad")
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


def test_several_evaluations_have_their_own_names_and_steps():
    own = sf.Evaluation(lambda state: {"n": state.step}, every=10, name="own")
    last = sf.Evaluation(lambda state: {"n": state.step}, name="last")
    result = course.run(evaluation=[course.evaluation(every=15), own, last], steps=32)
    assert result.history["eval/loss"].steps == [15, 30, 32]
    assert result.history["own/n"] == result.history["own/n"].steps == [10, 20, 30, 32]
    assert result.history["last/n"] == [32]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("total", [30, 32])
def test_at_the_end_every_evaluation_is_made(known, total):
    """Also where nobody knew that it would be the end, and another was made at the last step."""
    number = jax.jit(lambda state, batch: (state + 1, {"at": sf.mean(state)}))
    evaluations = [
        sf.Evaluation(lambda state: {"n": state}, every=10, name="ten"),
        sf.Evaluation(lambda state: {"n": state}, every=16, name="sixteen"),
        sf.Evaluation(lambda state: {"n": state}, name="last"),
    ]
    batches, steps = [np.float32(0)] * total, total if known else None
    result = sf.fit(number, jnp.float32(0), batches, steps=steps, evaluation=evaluations)
    assert result.history["last/n"] == [total]
    assert result.history["ten/n"][-1] == total
    assert result.history["sixteen/n"] == ([16, 32] if total == 32 else [16, 30])
