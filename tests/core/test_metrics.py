"""The loss of several terms merges each with its own denominator."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clu import metrics as clu_metrics
from clu.metrics import Average
from hypothesis import given
from hypothesis import strategies as st
from tests.small import TX, examples, full_but, start

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


# perplexity


@given(
    nll=st.lists(st.floats(0, 5, width=32), min_size=11, max_size=11),
    size=st.sampled_from((3, 4, 11)),  # each shape is compiled
    data=st.data(),
)
def test_perplexity_does_not_depend_on_the_batches(nll, size, data):
    mask = data.draw(st.lists(st.booleans(), min_size=len(nll), max_size=len(nll)))
    nll, mask = np.float32(nll), np.bool_(mask)
    examples = {"nll": nll, "weight": mask}

    def step(state, batch):
        return {"perplexity": sf.perplexity(batch["nll"], batch["mask"] * batch["weight"])}

    batches = sf.batches(examples, size, epochs=1, remainder="pad")
    found = sf.evaluate(step, {}, batches)["perplexity"]
    wanted = np.exp(nll[mask].astype(np.float64).sum() / mask.sum()) if mask.any() else np.nan
    assert found == pytest.approx(wanted, rel=1e-6, nan_ok=True)
    parts = [sf.perplexity(nll[i : i + size], mask[i : i + size]) for i in range(0, len(nll), size)]
    merged = functools.reduce(lambda a, b: a.merge(b), parts)
    assert float(merged.compute()) == pytest.approx(wanted, rel=1e-5, nan_ok=True)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    assert float(stacked.reduce().compute()) == pytest.approx(wanted, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize(
    ("accumulate", "devices"), full_but([(2, 4)], [(1, 1), (2, 1), (1, 4), (2, 4)])
)
def test_perplexity_of_a_run_is_that_of_its_loss(accumulate, devices, tmp_path):
    def masked(params, batch, key):
        nll = (params["w"] - batch["x"]) ** 2
        return sf.mean(nll, batch["mask"]), {"perplexity": sf.perplexity(nll, batch["mask"])}

    state = start()
    if devices > 1:
        mesh = sf.make_mesh(devices=jax.devices()[:devices])
        state = sf.sharding.place(
            state, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        )
    train = sf.batches(examples(20), 8, seed=0, remainder="pad")
    test = lambda: sf.batches(examples(13), 8, epochs=1, remainder="pad")
    result = sf.fit(
        sf.make_train_step(masked, TX, accumulate=accumulate), state, train, steps=7, log_every=3,
        evaluation=sf.Evaluation(sf.make_eval_step(masked), test, every=2),
        checkpoints=sf.Checkpoints(tmp_path, every=2, keep=1, best="eval/perplexity"),
    )  # fmt: skip
    for name in ("train", "eval"):
        loss, found = (result.history[f"{name}/{what}"] for what in ("loss", "perplexity"))
        assert found == pytest.approx(np.exp(loss), rel=1e-12)
    curve = result.history["eval/perplexity"]
    best = sf.restore(tmp_path, start(), step="best", best="eval/perplexity").step
    assert best == curve.steps[int(np.argmin(curve))]


def test_a_perplexity_without_weight_is_nan_and_one_too_large_is_infinite():
    assert jnp.isnan(sf.perplexity(jnp.ones(2), jnp.zeros(2)).compute())
    step = lambda state, batch: {"p": sf.perplexity(batch["x"], batch["x"] > 0)}
    assert np.isnan(sf.evaluate(step, {}, [{"x": np.zeros(2, np.float32)}])["p"])
    assert sf.evaluate(step, {}, [{"x": np.full(2, 1e4, np.float32)}])["p"] == np.inf


def test_a_perplexity_of_what_is_no_number_is_refused():
    with pytest.raises(
        sf.errors.LossError, match="mean: expected real numbers as values, got complex64"
    ):
        sf.perplexity(jnp.ones(2, jnp.complex64))


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
        sf.errors.LossError, match=f"metrics/{name}: the name is taken; .*call yours someth"
    ):
        report({"nll": sf.mean(1.0)}, {name: sf.mean(1.0)}, grad_norm=sf.mean(1.0))


@pytest.mark.parametrize("name", ["grad_norm", "skipped"])
def test_a_term_whose_name_is_taken_is_refused(name):
    own = {"grad_norm": sf.mean(1.0), "skipped": sf.mean(1.0)}
    with pytest.raises(
        sf.errors.LossError, match=f"loss/{name}: the name is taken; .*call your term"
    ):
        report({name: sf.mean(1.0), "nll": sf.mean(1.0)}, {}, **own)


def test_a_term_among_several_is_not_called_loss():
    with pytest.raises(
        sf.errors.LossError, match=r"a term among several cannot have that name; .*'aux', 'lo"
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
