"""The loss of several terms merges each with its own denominator."""

import jax.numpy as jnp
import pytest
from clu import metrics as clu_metrics
from clu.metrics import Average

import stepfold as sf
from stepfold.core.metrics import TermSum, report, without_weight

# the sum of terms


def test_a_sum_of_terms_merges_each_with_its_own_denominator(run):
    terms = {
        "a": Average(total=jnp.float32(6), count=jnp.float32(3)),
        "b": Average(total=jnp.float32(1), count=jnp.float32(4)),
        "none": Average(total=jnp.float32(0), count=jnp.float32(0)),
    }
    assert run(lambda: TermSum(terms).compute())() == 2.25
    merged = run(lambda: TermSum(terms).merge(TermSum(terms)).compute())()
    assert merged == 2.25


def test_a_sum_that_has_seen_nothing_is_nan_as_an_average_is():
    nothing = Average(total=jnp.zeros(()), count=jnp.zeros(()))
    assert jnp.isnan(nothing.compute())
    assert jnp.isnan(TermSum({"a": nothing, "b": nothing}).compute())


def test_an_empty_sum_merges_as_nothing(run):
    some = TermSum({"a": sf.mean(jnp.array([1.0, 2.0])), "b": sf.mean(1.0)})
    for merged in (TermSum.empty().merge(some), some.merge(TermSum.empty())):
        assert run(lambda merged=merged: merged.compute())() == 2.5
    assert jnp.isnan(run(TermSum.empty().merge(TermSum.empty()).compute)())


def test_a_stacked_sum_tells_each_step_by_itself():
    stacked = TermSum({"a": Average(total=jnp.array([3.0, 0.0]), count=jnp.array([1.0, 0.0]))})
    assert stacked.compute()[0] == 3.0
    assert jnp.isnan(stacked.compute()[1])


def test_a_sum_of_terms_reduces_as_every_metric_does():
    stacked = TermSum({"a": Average(total=jnp.arange(3.0), count=jnp.ones(3))})
    assert stacked.reduce().compute() == 1.0


# the report


def test_one_term_is_the_loss_and_several_are_named_besides():
    a, b = sf.mean(1.0), sf.mean(2.0)
    assert report({"loss": a}, {"m": b}) == {"loss": a, "m": b}
    assert report({"nll": a}, {}) == {"loss": a, "nll": a}
    named = report({"nll": a, "aux": b}, {}, grad_norm=b)
    assert sorted(named) == ["aux", "grad_norm", "loss", "nll"]
    assert named["loss"].compute() == 3.0


@pytest.mark.parametrize("name", ["loss", "nll", "grad_norm"])
def test_a_name_that_is_taken_is_refused(name):
    with pytest.raises(
        sf.LossError, match=f"metrics/{name}: the name is taken; .*call yours someth"
    ):
        report({"nll": sf.mean(1.0)}, {name: sf.mean(1.0)}, grad_norm=sf.mean(1.0))


@pytest.mark.parametrize("name", ["grad_norm", "skipped"])
def test_a_term_whose_name_is_taken_is_refused(name):
    own = {"grad_norm": sf.mean(1.0), "skipped": sf.mean(1.0)}
    with pytest.raises(sf.LossError, match=f"loss/{name}: the name is taken; .*call your term"):
        report({name: sf.mean(1.0), "nll": sf.mean(1.0)}, {}, **own)


def test_a_term_among_several_is_not_called_loss():
    with pytest.raises(
        sf.LossError, match=r"a term among several cannot have that name; .*'aux', 'lo"
    ):
        report({"loss": sf.mean(1.0), "aux": sf.mean(1.0)}, {})


def test_averages_of_a_skipped_step_weigh_nothing(run):
    one, last = sf.mean(2.0), clu_metrics.LastValue.from_model_output(jnp.float32(1))
    metrics = {"a": one, "both": TermSum({"a": one, "b": one}), "last": last, "skipped": one}
    kept = run(without_weight)(jnp.array(True), metrics)
    assert {name: metric.total for name, metric in kept.items() if name != "both"} == {
        "a": 2.0, "last": 1.0, "skipped": 2.0
    }  # fmt: skip
    left = run(without_weight)(jnp.array(False), metrics)
    for name in ("a", "both"):
        assert jnp.isnan(left[name].compute())
        assert left[name].merge(kept[name]).compute() == kept[name].compute()
    assert left["last"].total == 1.0
    assert left["skipped"].total == 2.0
