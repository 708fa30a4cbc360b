from typing import NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.adapter.stepping import (
    HookedStep,
    as_eval_step,
    as_metrics,
    as_train_step,
    rows_of,
    weighed_by_rows,
)

ROW = np.ones(4, np.float32)


class Pair(NamedTuple):
    loss: float
    accuracy: float | None = None


@flax.struct.dataclass
class LossMetrics:
    loss: float
    accuracy: float | None = None


@pytest.mark.parametrize("kind", [Pair, LossMetrics, lambda loss: {"loss": loss}])
def test_numbers_of_a_dict_or_a_record_are_metrics(kind):
    found = as_metrics(kind(2.0), "step", weight=3)
    assert list(found) == ["loss"]
    assert (float(found["loss"].compute()), float(found["loss"].count)) == (2.0, 3.0)


def test_a_metric_keeps_its_own_weight():
    mean = sf.mean(ROW)
    assert as_metrics({"loss": mean}, "step", weight=7)["loss"] is mean


def test_what_is_no_number_is_refused():
    with pytest.raises(sf.ConfigError, match="train_step_fn: loss: expected a number, or a metric"):
        as_metrics({"loss": ROW}, "train_step_fn")
    with pytest.raises(sf.ConfigError, match="eval_step_fn: expected metrics by name, got float"):
        as_eval_step(lambda state, batch: 1.0)((), ROW)
    with pytest.raises(sf.ConfigError, match=r"train_step_fn: expected \(state, metrics\) from it"):
        as_train_step(lambda state, batch: state)(jnp.ones(1), ROW)


def test_numbers_of_an_evaluation_weigh_by_rows():
    step = as_eval_step(lambda state, batch: {"eval_loss": jnp.mean(batch)})
    assert sf.evaluate(step, (), [ROW, 6 * ROW[:1]]) == {"loss": 2.0}
    assert rows_of({"x": np.float32(1.0), "y": ROW}) == 4
    assert rows_of(()) == 1


@pytest.mark.parametrize("stateful", [False, True])
def test_a_number_for_a_loss_weighs_by_rows_and_an_average_by_itself(stateful):
    more = ({}, ()) if stateful else ()
    number = weighed_by_rows(lambda *given: (jnp.float32(2.0), *more) if more else jnp.float32(2.0))
    found = number((), ROW, None)
    assert float((found[0] if stateful else found).count) == 4.0
    terms = weighed_by_rows(lambda *given: {"a": sf.mean(ROW[:2]), "b": jnp.float32(1.0)})
    found = terms((), ROW, None)
    assert [float(found[name].count) for name in "ab"] == [2.0, 4.0]


def hooked(before=lambda state, step: None, after=lambda state, metrics, step: None):
    tx = optax.sgd(0.1)
    state = sf.init_state(jnp.ones(()), tx, jax.random.key(0))
    step = sf.make_train_step(lambda params, batch, key: sf.mean(params * batch), tx)
    return HookedStep(step, before, after), state


def test_none_changes_nothing_and_the_weights_stay():
    step, state = hooked()
    state, metrics = step(state, ROW)
    assert int(state.step) == 1
    assert float(metrics["loss"].count) == 4.0


def test_a_state_and_numbers_take_the_place_of_what_was_given():
    told = []

    def before(state, step):
        told.append(step)
        return state._replace(params=2 * state.params)

    def after(state, metrics, step):
        told.append(step)
        return state, {"loss": metrics["loss"], "twice": 2 * metrics["loss"], "grad_norm": None}

    step, state = hooked(before, after)
    state, metrics = step(state, ROW)
    assert told == [0, 1]
    assert float(state.params) == pytest.approx(1.9)
    assert sorted(metrics) == ["loss", "twice"]
    assert float(metrics["loss"].count) == 4.0
    assert (float(metrics["twice"].compute()), float(metrics["twice"].count)) == (4.0, 1.0)


def test_what_the_second_function_raises_comes_when_the_state_is_at_hand():
    def after(state, metrics, step):
        raise OSError("after")

    step, state = hooked(after=after)
    state, _ = step(state, ROW)
    assert int(state.step) == 1
    with pytest.raises(OSError, match="after"):
        step(state, ROW)
    assert not state.params.is_deleted()
    step.raise_pending()


def test_anything_else_is_refused():
    step, state = hooked(after=lambda state, metrics, step: state)
    step(state, ROW)
    with pytest.raises(sf.ConfigError, match=r"on_step_end: expected \(state, metrics\), or None"):
        step.raise_pending()


def test_it_is_lowered_as_a_jitted_step_is():
    step, state = hooked()
    assert "HloModule" in step.lower(state, ROW).compile().as_text()
