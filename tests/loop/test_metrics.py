import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clu import metrics as clu

import stepfold as sf
from stepfold.core.report import TermSum
from stepfold.loop.metrics import (
    PerStep,
    each_of,
    merged,
    over_steps,
    value_of,
    values_of,
    weights_of,
)


def stacked(*found):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *jax.device_get(list(found)))


def average(total, count):
    return clu.Average(total=jnp.asarray(total), count=jnp.asarray(count))


def test_totals_and_weights_are_merged_and_not_means():
    seen = [{"loss": average(6.0, 3.0)}, {"loss": average(2.0, 1.0)}]
    assert values_of(merged(seen)) == {"loss": 2.0}


def test_whole_numbers_are_counted_beyond_what_32_bits_hold():
    many = {"hits": average(np.int32(2**31 - 1), np.int32(2**31 - 1))}
    one = {"hits": average(np.int32(1), np.int32(2))}
    found = merged([many, many, many, one])["hits"]
    assert int(found.total) == 3 * (2**31 - 1) + 1
    assert int(found.count) == 3 * (2**31 - 1) + 2


def test_floats_are_added_up_in_64_bits():
    seen = [{"loss": average(np.float32(2**24), 1.0)}] + [{"loss": average(1.0, 1.0)}] * 3
    assert float(merged(seen)["loss"].total) == 2**24 + 3


def test_infinities_of_both_signs_are_no_number_and_no_warning():
    seen = [{"loss": average(np.float32(sign * np.inf), 1.0)} for sign in (1, -1)]
    assert np.isnan(merged(seen)["loss"].total)


def test_what_is_merged_already_is_merged_again():
    seen = [{"hits": average(np.int32(2**31 - 1), np.int32(1))}] * 4
    assert int(merged([merged(seen), *seen])["hits"].total) == 8 * (2**31 - 1)


def test_bfloat16_and_booleans_are_added_up_too():
    seen = [{"a": average(jnp.bfloat16(0.5), jnp.array(True))}] * 3
    found = merged(seen)["a"]
    assert (float(found.total), int(found.count)) == (1.5, 3)


def test_each_term_of_a_sum_keeps_its_own_denominator():
    some = TermSum({"a": average(6.0, 3.0), "b": average(0.0, 0.0)})
    rest = TermSum({"a": average(2.0, 1.0), "b": average(5.0, 2.0)})
    assert values_of(merged([{"loss": some}, {"loss": rest}])) == {"loss": 2.0 + 2.5}


def test_a_sum_is_nan_where_nothing_was_seen_and_else_of_what_was():
    nothing = average(0.0, 0.0)
    assert np.isnan(value_of(TermSum({"a": nothing, "b": nothing})))
    assert value_of(TermSum({"a": nothing, "b": average(3.0, 2.0)})) == 1.5
    assert np.isnan(value_of(nothing))


def test_a_total_without_weight_is_not_quietly_a_number():
    assert value_of(average(1.0, 0.0)) == np.inf


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


def test_a_metric_merges_as_its_class_says():
    seen = [{"top": Largest(jnp.array(x))} for x in (1.0, 5.0, 3.0)]
    assert values_of(merged(seen)) == {"top": 5.0}


def test_the_last_value_of_several_steps_is_the_last():
    seen = [
        {"rate": clu.LastValue(total=jnp.array(x), count=jnp.ones(()))} for x in (1.0, 5.0, 2.0)
    ]
    assert values_of(merged(seen)) == {"rate": 2.0}


def test_what_is_computed_of_an_average_is_computed():
    seen = [{"ppl": Perplexity(jnp.array(x), jnp.array(1.0))} for x in (1.0, 3.0)]
    assert values_of(merged(seen))["ppl"] == pytest.approx(np.exp(2.0))


def test_an_accuracy_of_clu_is_a_number():
    labels, logits = jnp.array([0, 1, 1]), jnp.eye(2)[jnp.array([0, 1, 0])]
    metric = clu.Accuracy.from_model_output(logits=logits, labels=labels)
    assert values_of(merged([{"hit": metric}])) == {"hit": pytest.approx(2 / 3)}


def test_a_metric_named_by_an_output_is_a_number():
    kind = clu.Average.from_output("error")
    seen = [{"error": kind.from_model_output(error=jnp.array([x, x]))} for x in (1.0, 3.0)]
    assert values_of(merged(seen)) == {"error": 2.0}


def test_a_metric_of_several_numbers_gets_a_name_for_each():
    seen = [{"matrix": Confusion(jnp.eye(2, dtype=jnp.int32))}] * 2
    assert values_of(merged(seen), "eval/") == {
        "eval/matrix/hit/0": 2.0,
        "eval/matrix/hit/1": 2.0,
        "eval/matrix/all": 4.0,
    }


def test_what_is_read_step_by_step_is_what_has_a_total_and_a_weight():
    steps = stacked(*[{"a": average(x, 2.0), "top": Largest(jnp.array(x))} for x in (1.0, 4.0)])
    found = PerStep(steps, each_of, "train/")
    assert {name: values.tolist() for name, values in found.items()} == {"train/a": [0.5, 2.0]}
    assert len(found) == 1
    assert "train/top" not in found
    assert found.get("a") is None


def test_the_weights_step_by_step_are_the_largest_of_a_sum_of_terms():
    terms = TermSum({"x": average(0.0, jnp.array([0.0, 1.0])), "y": average(0.0, jnp.zeros(2))})
    found = PerStep({"loss": terms, "top": Largest(jnp.zeros(2))}, weights_of)
    assert {name: values.tolist() for name, values in found.items()} == {"loss": [0.0, 1.0]}


def test_what_nobody_asks_for_is_not_read():
    read = []
    rows = PerStep({"a": 1, "b": 2}, lambda metric: read.append(metric) or np.zeros(1))
    assert (rows["a"].tolist(), rows["a"].tolist(), read) == ([0.0], [0.0], [1])


def test_a_vector_of_averages_is_merged_number_by_number():
    steps = stacked(*[average(jnp.array([x, 1.0]), jnp.array([1.0, 1.0])) for x in (1.0, 3.0)])
    assert value_of(over_steps(steps)).tolist() == [2.0, 1.0]


def test_what_is_given_for_metrics_may_be_numbers():
    found = values_of({"a": 1, "b": np.float32(0.5), "c": jnp.array([1, 2]), "d": True}, "x/")
    assert found == {"x/a": 1.0, "x/b": 0.5, "x/c/0": 1.0, "x/c/1": 2.0, "x/d": 1.0}


@pytest.mark.parametrize("value", [None, "text", object(), 10**400])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(sf.ConfigError, match="eval/name: expected a number, got "):
        values_of({"name": value}, "eval/")


def test_a_list_of_what_is_no_number_is_refused():
    with pytest.raises(sf.ConfigError, match=r"eval/name/1: expected a number, got 'b'"):
        values_of({"name": ["1", "b"]}, "eval/")


def test_a_name_that_is_a_number_is_written_out():
    assert values_of({3: 0.5, "class": {0: 0.25}}, "eval/") == {"eval/3": 0.5, "eval/class/0": 0.25}


@pytest.mark.parametrize("name", ["", "a\nb", "a\r", "a\u2028b"])
def test_a_name_that_is_not_one_line_is_refused(name):
    with pytest.raises(sf.ConfigError, match="expected names of one line each, got .*; give it"):
        values_of({name: 1.0})
    with pytest.raises(sf.ConfigError, match="expected names of one line each"):
        values_of({"of": {f"{name}\n": 1.0}}, "eval/")
