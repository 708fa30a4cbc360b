import json
import math
import time

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clu import metrics as clu

import stepfold as sf
from stepfold.checkpoint.manifest import from_json, to_json
from stepfold.core.metrics import TermSum
from stepfold.loop.metrics import (
    Curve,
    History,
    MetricBuffer,
    PerStepMetrics,
    merge_metrics,
    metric_value,
    metric_values,
    per_step_values,
    per_step_weights,
    read_interval,
)


def stacked(*found):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *jax.device_get(list(found)))


@flax.struct.dataclass
class Values(clu.CollectingMetric.from_outputs(("x",))):
    """Count the values of all batches."""

    def compute(self):
        return sum(np.size(x) for x in jax.tree.leaves(self.values))


def average(total, count):
    return clu.Average(total=jnp.asarray(total), count=jnp.asarray(count))


@flax.struct.dataclass
class Largest(clu.Metric):
    value: jax.Array

    def merge(self, other):
        return Largest(jnp.maximum(self.value, other.value))

    def compute(self):
        return self.value


@flax.struct.dataclass
class Perplexity(clu.Average):
    def compute(self):
        return jnp.exp(super().compute())


@flax.struct.dataclass
class Confusion(clu.Metric):
    counts: jax.Array

    def merge(self, other):
        return Confusion(self.counts + other.counts)

    def compute(self):
        return {"hit": jnp.diag(self.counts), "all": self.counts.sum()}


def last_value(x):
    return clu.LastValue(total=jnp.array(x), count=jnp.ones(()))


def accuracy():
    labels, logits = jnp.array([0, 1, 1]), jnp.eye(2)[jnp.array([0, 1, 0])]
    return clu.Accuracy.from_model_output(logits=logits, labels=labels)


FromOutput = clu.Average.from_output("error")


def from_output(x):
    return FromOutput.from_model_output(error=jnp.array([x, x]))


NOTHING = lambda: average(0.0, 0.0)
NAN = pytest.approx(math.nan, nan_ok=True)


@pytest.mark.parametrize(
    ("make", "expected"),
    {
        "totals and weights, not means": (lambda: [average(6.0, 3.0), average(2.0, 1.0)], 2.0),
        "a denominator for each term": (
            lambda: [
                TermSum({"a": average(6.0, 3.0), "b": NOTHING()}),
                TermSum({"a": average(2.0, 1.0), "b": average(5.0, 2.0)}),
            ],
            4.5,
        ),
        "the terms that were seen": (
            lambda: [TermSum({"a": NOTHING(), "b": average(3.0, 2.0)})],
            1.5,
        ),
        "no term that was seen": (lambda: [TermSum({"a": NOTHING(), "b": NOTHING()})], NAN),
        "no weight": (lambda: [NOTHING()], NAN),
        "a total without weight": (lambda: [average(1.0, 0.0)], math.inf),
        "infinities of both signs": (
            lambda: [average(np.float32(sign * np.inf), 1.0) for sign in (1, -1)],
            NAN,
        ),
        "the merge of a class": (lambda: [Largest(jnp.array(x)) for x in (1.0, 5.0, 3.0)], 5.0),
        "the last value": (lambda: [last_value(x) for x in (1.0, 5.0, 2.0)], 2.0),
        "computed of an average": (
            lambda: [Perplexity(jnp.array(x), jnp.array(1.0)) for x in (1.0, 3.0)],
            pytest.approx(np.exp(2.0)),
        ),
        "an accuracy of clu": (lambda: [accuracy()], pytest.approx(2 / 3)),
        "named by an output": (lambda: [from_output(x) for x in (1.0, 3.0)], 2.0),
    }.values(),
)
def test_metrics_merge_as_their_classes_define(make, expected):
    assert metric_values(merge_metrics([{"m": metric} for metric in make()])) == {"m": expected}


HUGE = np.int32(2**31 - 1)


@pytest.mark.parametrize(
    ("pairs", "total", "count"),
    [
        ([(HUGE, HUGE)] * 3 + [(np.int32(1), np.int32(2))], 3 * int(HUGE) + 1, 3 * int(HUGE) + 2),
        ([(np.float32(2**24), 1.0)] + [(1.0, 1.0)] * 3, 2**24 + 3, 4),
        ([(jnp.bfloat16(0.5), np.array(True))] * 3, 1.5, 3),
    ],
    ids=["integers", "floats", "bfloat16 and booleans"],
)
def test_numbers_are_summed_in_64_bits(pairs, total, count):
    merged = merge_metrics([{"m": average(*pair)} for pair in pairs])
    assert (merged["m"].total, merged["m"].count) == (total, count)
    again = merge_metrics([merged, merged])["m"]
    assert (again.total, again.count) == (2 * total, 2 * count)


def test_a_metric_of_several_numbers_gets_a_name_for_each():
    seen = [{"matrix": Confusion(jnp.eye(2, dtype=jnp.int32))}] * 2
    assert metric_values(merge_metrics(seen), "eval/") == {
        "eval/matrix/hit/0": 2.0,
        "eval/matrix/hit/1": 2.0,
        "eval/matrix/all": 4.0,
    }


def test_what_is_read_step_by_step_is_what_has_a_total_and_a_weight():
    steps = stacked(*[{"a": average(x, 2.0), "top": Largest(jnp.array(x))} for x in (1.0, 4.0)])
    chunks = {name: [metric] for name, metric in steps.items()}
    found = PerStepMetrics(chunks, per_step_values, "train/")
    assert {name: values.tolist() for name, values in found.items()} == {"train/a": [0.5, 2.0]}
    assert len(found) == 1
    assert "train/top" not in found
    assert found.get("a") is None


def test_an_average_with_a_merge_of_its_own_is_read_step_by_step():
    @flax.struct.dataclass
    class Latest(clu.Average):
        def merge(self, other):
            return other

    steps = stacked(*[{"a": Latest(jnp.array(x), jnp.array(2.0))} for x in (1.0, 4.0)])
    merged, per_step, weights = read_interval([steps])
    assert merged == {"train/a": 2.0}
    assert per_step["train/a"].tolist() == [0.5, 2.0]
    assert weights["train/a"].tolist() == [2.0, 2.0]


def test_the_weights_step_by_step_are_the_largest_of_a_sum_of_terms():
    terms = TermSum({"x": average(0.0, jnp.array([0.0, 1.0])), "y": average(0.0, jnp.zeros(2))})
    found = PerStepMetrics({"loss": [terms], "top": [Largest(jnp.zeros(2))]}, per_step_weights)
    assert {name: values.tolist() for name, values in found.items()} == {"loss": [0.0, 1.0]}


def test_what_nobody_asks_for_is_not_read():
    read = []
    rows = PerStepMetrics({"a": [1], "b": [2]}, lambda metric: read.append(metric) or np.zeros(1))
    assert (rows["a"].tolist(), rows["a"].tolist(), read) == ([0.0], [0.0], [1])


def test_a_vector_of_averages_is_merged_number_by_number():
    steps = [{"a": average(jnp.array([x, 1.0]), jnp.array([1.0, 1.0]))} for x in (1.0, 3.0)]
    assert metric_value(merge_metrics(steps)["a"]).tolist() == [2.0, 1.0]
    assert read_interval([stacked(*steps)])[0] == {"train/a/0": 2.0, "train/a/1": 1.0}


def test_an_array_of_several_axes_is_logged_with_a_warning():
    with pytest.warns(
        UserWarning, match=r"eval/matrix: expected a number or a vector, got float64\[3,3"
    ):
        values = metric_values({"matrix": np.eye(3)}, "eval/")
    assert len(values) == 9


def test_what_is_given_for_metrics_may_be_numbers():
    found = metric_values({"a": 1, "b": np.float32(0.5), "c": jnp.array([1, 2]), "d": True}, "x/")
    assert found == {"x/a": 1.0, "x/b": 0.5, "x/c/0": 1.0, "x/c/1": 2.0, "x/d": 1.0}


@pytest.mark.parametrize("value", [None, "text", object(), 10**400])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(sf.ConfigError, match="eval/name: expected a number, got "):
        metric_values({"name": value}, "eval/")


def test_a_list_of_what_is_no_number_is_refused():
    with pytest.raises(sf.ConfigError, match=r"eval/name/1: expected a number, got 'b'"):
        metric_values({"name": ["1", "b"]}, "eval/")


def test_a_name_that_is_a_number_is_written_out():
    assert metric_values({3: 0.5, "class": {0: 0.25}}, "eval/") == {
        "eval/3": 0.5,
        "eval/class/0": 0.25,
    }


@pytest.mark.parametrize("name", ["", "a\nb", "a\r", "a\u2028b"])
def test_a_name_that_is_not_one_line_is_refused(name):
    with pytest.raises(sf.ConfigError, match="expected names of one line, got .*; rename it"):
        metric_values({name: 1.0})
    with pytest.raises(sf.ConfigError, match="expected names of one line"):
        metric_values({"of": {f"{name}\n": 1.0}}, "eval/")


# The buffer


def unpack(said):
    """Turn what calls returned, each a number, into a chunk of metrics."""
    totals = np.array(said, np.float32)
    pairs = np.stack([np.array([x, -x]).astype(jnp.bfloat16) for x in said])
    chunk = {
        "a": clu.Average(total=totals, count=np.ones_like(totals)),
        "b": clu.Average(total=pairs, count=np.ones_like(pairs)),
    }
    return [chunk]


def shown(buffer):
    return [(one.step, one.per_step["train/a"].tolist()) for one in buffer.take(10**9)]


def filled(*said):
    buffer = MetricBuffer(unpack)
    for one in said:
        buffer.append(one)
    return buffer


def again(buffer):
    """Save it and read it back, as JSON would."""
    other = MetricBuffer(unpack)
    other.set_state(from_json(json.loads(json.dumps(to_json(buffer.get_state(), "buffer")))))
    return other


def test_an_interval_is_given_once():
    buffer = filled(1, 2)
    assert shown(buffer) == []
    buffer.close_interval(2)
    buffer.append(3)
    assert shown(buffer) == [(2, [1.0, 2.0])]
    assert shown(buffer) == []
    buffer.close_interval(3)
    assert shown(buffer) == [(3, [3.0])]


def test_an_interval_without_steps_is_none():
    buffer = MetricBuffer(unpack)
    buffer.close_interval(5)
    assert buffer.closed == []


def test_what_was_given_counts_as_shown_when_the_next_is_asked_for():
    buffer = filled(1)
    buffer.close_interval(1)

    def fails():
        for _ in buffer.take(1):
            raise OSError

    with pytest.raises(OSError):
        fails()
    assert shown(buffer) == [(1, [1.0])]


def test_only_what_was_over_at_a_step_is_given():
    buffer = filled(1)
    buffer.close_interval(1)
    buffer.append(2)
    buffer.close_interval(2)
    assert [one.step for one in buffer.take(1)] == [1]
    assert [one.step for one in buffer.take(2)] == [2]


def test_the_time_of_an_interval_is_when_it_was_over_unless_it_has_to_be_waited_for():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 600, lambda _, x: x @ x / 300, x)[0, 0])
    times = {}
    for name, wait in {"there": True, "waited for": False}.items():
        buffer = MetricBuffer(lambda said: unpack([float(one) for one in said]))
        buffer.append(slow(jnp.full((300, 300), 1.0 + len(times))))
        if wait:
            jax.block_until_ready(buffer._open)
        closed = time.perf_counter()
        buffer.close_interval(1)
        time.sleep(0.01 if wait else 0)
        (taken,) = buffer.take(1)
        times[name] = taken.time - closed
    assert times["there"] < 0.005
    assert times["waited for"] > 0.005


def test_the_device_is_not_read_before_an_interval_is_taken():
    reads = []
    buffer = MetricBuffer(lambda said: reads.append(len(said)) or unpack(said))
    buffer.append(1)
    buffer.close_interval(1)
    assert reads == []


def test_the_digits_of_what_was_cut_are_those_of_the_device():
    (saved,) = filled(1, 2).get_state()["chunks"]
    assert [dtype for dtype, *_ in saved.values()] == ["float32", "float32", "bfloat16", "bfloat16"]


def rows(*values):
    return clu.Average(total=np.float32(values), count=np.ones(len(values), np.float32))


def test_chunks_of_other_shapes_are_one_interval():
    first = {"a": average(jnp.ones(2), jnp.ones(2)), "values": Values({"x": jnp.ones((2, 4))})}
    second = {
        "a": average(jnp.array([7.0]), jnp.ones(1)),
        "values": Values({"x": jnp.ones((1, 3))}),
    }
    metrics, per_step, _ = read_interval([first, second])
    assert metrics == {"train/a": 3.0, "train/values": 11.0}
    assert per_step["train/a"].tolist() == [1.0, 1.0, 7.0]


def test_a_metric_of_later_steps_alone_is_that_of_these():
    first, second = {"a": rows(1, 1), "gone": rows(1, 1)}, {"a": rows(1), "new": rows(1)}
    metrics, per_step, _ = read_interval([first, second])
    assert metrics == {"train/a": 1.0, "train/new": 1.0}
    assert {name: len(rows) for name, rows in per_step.items()} == {"train/a": 3, "train/new": 1}


def test_a_metric_that_is_new_does_not_get_the_values_of_another():
    other = again(filled(1))
    other._unpack = lambda said: [
        {"c" if name == "a" else name: metric for name, metric in chunk.items()}
        for chunk in unpack(said)
    ]
    other.append(2)
    other.close_interval(2)
    with pytest.warns(UserWarning, match="got others without a/count, …; their values since"):
        (interval,) = other.take(2)
    assert interval.per_step["train/c"].tolist() == [2.0]
    assert interval.per_step["train/b"].tolist() == [[1.0, -1.0], [2.0, -2.0]]


def test_a_vector_of_another_length_is_dropped_with_a_warning():
    other = again(filled(1))
    wider = np.ones((1, 3), np.dtype("bfloat16"))
    other._unpack = lambda said: [{**unpack(said)[0], "b": clu.Average(wider, wider)}]
    other.append(2)
    other.close_interval(2)
    with pytest.warns(UserWarning, match="got others without b/count"):
        (interval,) = other.take(2)
    assert interval.per_step["train/b"].shape == (1, 3)


def test_it_may_be_cut_twice():
    other = again(filled(1))
    other.append(2)
    last = again(other)
    last.append(3)
    last.close_interval(3)
    assert shown(last) == [(3, [1.0, 2.0, 3.0])]


# The history


def test_a_curve_is_a_list_of_values_with_their_steps():
    curve = Curve()
    curve.add(5, 0.5)
    curve.add(10, 0.25)
    assert curve == [0.5, 0.25]
    assert curve.steps == [5, 10]
    assert min(curve) == curve[-1]


def test_a_step_never_appears_twice():
    curve = Curve()
    for step in (5, 10, 10, 7, 15):
        curve.add(step, float(step))
    assert curve == curve.steps == [5, 10, 15]


def test_each_metric_has_its_own_steps():
    history = History()
    history.add(5, {"train/loss": 1})
    history.add(6, {"eval/loss": 2})
    history.add(10, {"train/loss": 3})
    assert history == {"train/loss": [1.0, 3.0], "eval/loss": [2.0]}
    assert history["train/loss"].steps == [5, 10]
    assert type(history["train/loss"][0]) is float


def test_a_history_comes_back_from_json_as_it_was():
    history, other = History(), History()
    values = [0.1, math.nan, math.inf, -0.0, 1e-320]
    for step, value in enumerate(values):
        history.add(step, {"a": value})
    state = history.get_state()
    history.add(5, {"a": 1.0})
    other.set_state(from_json(json.loads(json.dumps(to_json(state, "history")))))
    assert list(map(repr, other["a"])) == list(map(repr, values))
    assert other["a"].steps == list(range(5))


def test_the_state_of_a_history_is_bounded_and_a_cut_is_warned_of(monkeypatch):
    monkeypatch.setattr("stepfold.loop.metrics._SAVED_POINTS", 10)
    history, other, small = History(), History(), History()
    for step in range(25):
        history.add(step, {"a": step})
    small.add(3, {"a": 3.0})
    with pytest.warns(UserWarning, match="history: expected .* the last 10 of .* give run_dir"):
        other.set_state(history.get_state())
    assert other["a"].steps == list(range(15, 25))
    other.set_state(small.get_state())  # warnings are errors here
    assert other["a"].steps == [3]


def test_going_back_keeps_the_points_that_a_checkpoint_lacks(monkeypatch):
    monkeypatch.setattr("stepfold.loop.metrics._SAVED_POINTS", 10)
    history = History()
    for step in range(25):
        history.add(step, {"a": step})
    saved = history.get_state()
    history.add(30, {"a": 30.0, "b": 1.0})
    history.set_state(saved)
    assert history == {"a": [float(step) for step in range(25)]}
