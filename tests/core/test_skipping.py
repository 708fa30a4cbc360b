import jax
import jax.numpy as jnp
import pytest
from clu import metrics as clu_metrics

import stepfold as sf
from stepfold.core.report import TermSum
from stepfold.core.skipping import still_finite, without_weight


def state(params=1.0, model_state=()):
    return sf.TrainState(0, params, (), model_state, jax.random.key(0))


def test_what_is_finite_is_still_so(run):
    mixed = {"n": jnp.int32(3), "key": jax.random.key(0), "none": None, "x": jnp.ones(2)}
    assert run(still_finite)(state(mixed, mixed), state(mixed, mixed))
    assert run(still_finite)(state({}), state({}))


@pytest.mark.parametrize("of", ["params", "model_state"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        *((0.0, jnp.nan), (0.0, jnp.inf), (jnp.inf, jnp.nan), (jnp.inf, -jnp.inf)),
        *((0j, complex("nan")), (0j, complex(0.0, jnp.inf))),
    ],
)
def test_what_turns_bad_is_seen_wherever_it_is(of, old, new):
    old, new = (state(**{of: {"a": jnp.ones(2), "b": jnp.array([1, x])}}) for x in (old, new))
    assert not still_finite(old, new)
    assert still_finite(old, old)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_what_was_not_finite_before_may_stay_so(run, value):
    worst = state(model_state=jnp.array([1.0, value]))
    assert run(still_finite)(worst, worst)


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
