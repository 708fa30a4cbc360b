"""Metrics of steps merge exactly, are read by name, survive a checkpoint, and make a history."""

import json
import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clu import metrics as clu

import stepfold as sf
from stepfold.checkpoint.manifest import from_json, to_json
from stepfold.core.metrics import TermSum
from stepfold.loop.intervals import Steps, intervals_from_json, intervals_to_json
from stepfold.loop.metrics import (
    Curve,
    History,
    PerStepMetrics,
    has_values,
    has_weights,
    merge_metrics,
    metric_values,
    per_step_values,
    per_step_weights,
    read_interval,
)
from stepfold.loop.run import Run


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


def test_what_is_read_step_by_step_is_what_has_a_total_and_a_weight():
    steps = stacked(*[{"a": average(x, 2.0), "top": Largest(jnp.array(x))} for x in (1.0, 4.0)])
    chunks = {name: [metric] for name, metric in steps.items()}
    found = PerStepMetrics(chunks, has_values, per_step_values, "train/")
    assert {name: values.tolist() for name, values in found.items()} == {"train/a": [0.5, 2.0]}
    assert len(found) == 1
    assert "train/top" not in found
    assert found.get("a") is None


def test_an_average_with_a_merge_of_its_own_is_read_step_by_step():
    @flax.struct.dataclass
    class Latest(clu.Average):
        def merge(self, other):
            return other

    vectors = [average(np.array([x, 1.0]), np.ones(2)) for x in (1.0, 3.0)]
    latest = [Latest(jnp.array(x), jnp.array(2.0)) for x in (1.0, 4.0)]
    steps = [{"a": one, "v": vector} for one, vector in zip(latest, vectors, strict=True)]
    merged, per_step, weights = read_interval([stacked(*steps)])
    assert merged == {"train/a": 2.0, "train/v/0": 2.0, "train/v/1": 1.0}
    assert per_step["train/a"].tolist() == [0.5, 2.0]
    assert weights["train/a"].tolist() == [2.0, 2.0]


def test_the_weights_step_by_step_are_the_largest_of_a_sum_of_terms():
    terms = TermSum({"x": average(0.0, jnp.array([0.0, 1.0])), "y": average(0.0, jnp.zeros(2))})
    steps = {"loss": [terms], "top": [Largest(jnp.zeros(2))]}
    found = PerStepMetrics(steps, has_weights, per_step_weights)
    assert {name: values.tolist() for name, values in found.items()} == {"loss": [0.0, 1.0]}


def test_what_nobody_asks_for_is_not_read():
    read = []
    steps = {"a": [1], "b": [2], "text": ["x"]}
    is_number = lambda metric: isinstance(metric, int)
    rows = PerStepMetrics(steps, is_number, lambda metric: read.append(metric) or np.zeros(1))
    assert ("b" in rows, "text" in rows, len(rows), list(rows)) == (True, False, 2, ["a", "b"])
    assert (rows["a"].tolist(), rows["a"].tolist(), read) == ([0.0], [0.0], [1])


@pytest.mark.parametrize(
    ("metrics", "values"),
    [
        (
            {"a": 1, "b": np.float32(0.5), "c": jnp.array([1, 2]), "d": True},
            {"x/a": 1.0, "x/b": 0.5, "x/c/0": 1.0, "x/c/1": 2.0, "x/d": 1.0},
        ),
        ({3: 0.5, "class": {0: 0.25}}, {"x/3": 0.5, "x/class/0": 0.25}),
        (
            {"matrix": Confusion(np.eye(2, dtype=np.int32))},
            {"x/matrix/hit/0": 1.0, "x/matrix/hit/1": 1.0, "x/matrix/all": 2.0},
        ),
    ],
)
def test_metrics_are_numbers_by_name(metrics, values):
    assert metric_values(metrics, "x/") == values


def test_an_array_of_several_axes_is_logged_with_a_warning():
    words = r"eval/matrix: expected a number or a vector, got float64\[3,3"
    with pytest.warns(UserWarning, match=words):
        assert len(metric_values({"matrix": np.eye(3)}, "eval/")) == 9


ONE_LINE = "expected names of one line, got .*; rename it"


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        *(({"name": x}, "x/name: expected a number, got ") for x in (None, "a", object(), 10**400)),
        ({"name": ["1", "b"]}, "x/name/1: expected a number, got 'b'"),
        *(({name: 1.0}, ONE_LINE) for name in ("", "a\nb", "a\r", "a\u2028b")),
        ({"of": {"a\n": 1.0}}, ONE_LINE),
    ],
)
def test_what_is_no_number_or_no_name_is_refused(metrics, message):
    with pytest.raises(sf.errors.ConfigError, match=message):
        metric_values(metrics, "" if "" in metrics else "x/")


# Intervals


def call(number):
    """Return what a call of the step returns for a number."""
    total, pair = np.float32(number), np.array([number, -number]).astype(jnp.bfloat16)
    return {
        "a": clu.Average(total, np.ones_like(total)),
        "b": clu.Average(pair, np.ones_like(pair)),
    }


def filled(*calls, before=None):
    """Return the interval of some calls, the first of them before a resume."""
    steps = Steps() if before is None else before
    for one in calls:
        returned = call(one) if isinstance(one, int) else one
        steps = Steps((returned, steps.returned), steps.before)
    return steps


def closed(steps, step):
    return steps._replace(step=step, time=1.0)


def again(current, closed=()):
    """Save intervals and read them back, as JSON would."""
    saved = intervals_to_json(current, closed)
    return intervals_from_json(from_json(json.loads(json.dumps(to_json(saved, "buffer")))))


def shown(interval):
    return interval.step, interval.per_step["train/a"].tolist()


def test_intervals_are_saved_as_they_are_and_may_be_cut_twice():
    current, (first, second) = again(filled(3), [closed(filled(1), 1), closed(filled(2), 2)])
    assert [shown(each.read()) for each in (first, second)] == [(1, [1.0]), (2, [2.0])]
    twice = filled(5, before=again(filled(4, before=current))[0])
    assert shown(closed(twice, 5).read()) == (5, [3.0, 4.0, 5.0])
    assert not filled()
    assert Run.start((), 5, 5, None, {}).close_interval(0.0).closed == ()


class Result(np.ndarray):
    """An array of which one can say whether it is computed."""


@pytest.mark.parametrize(("is_ready", "time"), [(True, 1.0), (False, 5.0)])
def test_the_time_of_an_interval_is_when_it_was_over_unless_it_has_to_be_waited_for(
    is_ready, time, monkeypatch
):
    monkeypatch.setattr("stepfold.loop.intervals.time.perf_counter", lambda: 5.0)
    total = np.ones((), np.float32).view(Result)
    total.is_ready = lambda: is_ready
    interval = closed(filled({"a": clu.Average(total, np.float32(1))}), 1)
    assert interval.read().time == time


def test_the_digits_of_what_was_cut_are_those_of_the_device():
    (saved,) = intervals_to_json(filled(1, 2), ())["chunks"]
    assert [dtype for dtype, *_ in saved.values()] == ["float32", "float32", "bfloat16", "bfloat16"]


def test_chunks_of_other_shapes_and_metrics_are_one_interval():
    ones = lambda *shape: np.ones(shape, np.float32)
    row = clu.Average(7 * ones(1), ones(1))
    first = {"a": clu.Average(ones(2), ones(2)), "values": Values({"x": ones(2, 4)})}
    second = {"a": row, "values": Values({"x": ones(1, 3)})}
    metrics, per_step, _ = read_interval([{**first, "gone": row}, {**second, "new": row}])
    assert metrics == {"train/a": 3.0, "train/values": 11.0, "train/new": 7.0}
    assert per_step["train/a"].tolist() == [1.0, 1.0, 7.0]
    assert per_step["train/new"].tolist() == [7.0]


AVERAGE = call(2)["a"]
WIDE = clu.Average(np.ones(3, np.dtype("bfloat16")), np.ones(3, np.dtype("bfloat16")))


@pytest.mark.parametrize(
    ("later", "lost", "rows"),
    [
        (
            {"c": AVERAGE, "b": call(2)["b"]},
            "a/count, …",
            {"train/c": [2.0], "train/b": [[1.0, -1.0], [2.0, -2.0]]},
        ),
        (
            {"a": AVERAGE, "b": WIDE},
            "b/count, …",
            {"train/a": [1.0, 2.0], "train/b": [[1.0] * 3]},
        ),
    ],
    ids=["renamed", "wider"],
)
def test_a_metric_that_has_changed_at_a_resume_does_not_get_other_values(later, lost, rows):
    steps = closed(filled(later, before=again(filled(1))[0]), 2)
    with pytest.warns(
        UserWarning, match=f"the step does not return {lost} as in the resumed run; the val"
    ):
        interval = steps.read()
    assert {name: interval.per_step[name].tolist() for name in rows} == rows


# The history


def test_a_curve_is_a_list_of_values_with_their_ascending_steps():
    curve = Curve()
    for step in (5, 10, 10, 7, 15):
        curve.add(step, step / 10)
    assert curve == [0.5, 1.0, 1.5]
    assert curve.steps == [5, 10, 15]
    assert max(curve) == curve[-1]


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
    with pytest.warns(
        UserWarning, match="history: only the last 10 points of a are left, .* give run_dir"
    ):
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
