"""Steps of any kind become steps with metrics, with methods around them."""

from typing import NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepfold as sf
from stepfold.adapter.setup import make_steps
from stepfold.adapter.steps import (
    StepWithHooks,
    as_eval_step,
    as_metrics,
    as_train_step,
    evaluate_with,
)

from . import digits

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
    metrics = as_metrics(kind(2.0), "step", weight=3)
    assert list(metrics) == ["loss"]
    assert (float(metrics["loss"].compute()), float(metrics["loss"].count)) == (2.0, 3.0)


def test_other_values_are_refused_as_metrics():
    with pytest.raises(
        sf.errors.ConfigError, match="train_step_fn: loss: expected a number, or a metric"
    ):
        as_metrics({"loss": ROW}, "train_step_fn")
    with pytest.raises(
        sf.errors.ConfigError, match="eval_step_fn: expected metrics by name, got float"
    ):
        as_eval_step(lambda state, batch: 1.0)((), ROW)
    with pytest.raises(
        sf.errors.ConfigError, match=r"train_step_fn: expected it to return \(state, metr"
    ):
        as_train_step(lambda state, batch: state)(jnp.ones(1), ROW)


def test_numbers_of_an_evaluation_are_weighted_by_rows():
    step = as_eval_step(lambda state, batch: {"eval_loss": jnp.mean(batch)})
    assert sf.evaluate(step, (), [ROW, 6 * ROW[:1]]) == {"loss": 2.0}


def test_numbers_of_a_step_are_weighted_by_the_mask_if_there_is_one():
    batch = {"x": ROW, "mask": np.array([True, True, True, False])}
    assert as_eval_step(lambda state, batch: {"loss": 2.0})((), batch)["loss"].count == 3
    step = as_train_step(lambda state, batch: (state, {"loss": 2.0}))
    assert [step(1.0, data)[1]["loss"].count for data in (batch, ROW)] == [3, 4]


# Steps of a loss function


def steps_of(**given):
    usual = {"loss_fn": digits.plain_loss, "tx": optax.sgd(0.1)}
    return make_steps(digits.parts(**usual | given))


def batch(rows=20):
    return {name: values[:rows] for name, values in digits.TRAIN.items()}


@pytest.fixture
def state(key):
    return sf.init_state(digits.init, optax.sgd(0.1), key)


def test_an_evaluation_has_its_own_loss_and_weights_a_number_by_rows(state):
    _, evaluate = steps_of(loss_fn=max, eval_loss_fn=digits.plain_loss)
    assert float(jax.jit(evaluate)(state, batch(7))["loss"].count) == 7.0


# Functions around a step


def hooked(before=lambda state, step: None, after=lambda state, metrics, step: None):
    tx = optax.sgd(0.1)
    state = sf.init_state(jnp.ones(()), tx, jax.random.key(0))
    step = sf.make_train_step(lambda params, batch, key: sf.mean(params * batch), tx)
    return StepWithHooks(step, before, after), state


def test_none_changes_nothing_and_the_weights_stay():
    step, state = hooked()
    state, metrics = step(state, ROW)
    assert int(state.step) == 1
    assert float(metrics["loss"].count) == 4.0


def test_a_returned_state_and_numbers_replace_the_others():
    calls = []

    def before(state, step):
        calls.append(step)
        return state._replace(params=2 * state.params)

    def after(state, metrics, step):
        calls.append(step)
        return state, {"loss": metrics["loss"], "twice": 2 * metrics["loss"], "grad_norm": None}

    step, state = hooked(before, after)
    state, metrics = step(state, ROW)
    assert calls == [0, 1]
    assert float(state.params) == pytest.approx(1.9)
    assert sorted(metrics) == ["loss", "twice"]
    assert float(metrics["loss"].count) == 4.0
    assert (float(metrics["twice"].compute()), float(metrics["twice"].count)) == (4.0, 4.0)


def test_an_exception_after_a_step_is_raised_when_the_caller_has_the_state():
    def after(state, metrics, step):
        raise OSError("after")

    step, state = hooked(after=after)
    state, _ = step(state, ROW)
    assert int(state.step) == 1
    with pytest.raises(OSError, match="after"):
        step(state, ROW)
    assert not state.params.is_deleted()
    step.raise_pending()


def test_another_return_value_is_refused():
    step, state = hooked(after=lambda state, metrics, step: state)
    step(state, ROW)
    with pytest.raises(
        sf.errors.ConfigError, match=r"on_step_end: expected it to return \(state, metr"
    ):
        step.raise_pending()


def test_metrics_that_differ_between_steps_are_refused():
    def after(state, metrics, step):
        return state, metrics if step < 2 else {**metrics, "late": 1.0}

    step, state = hooked(after=after)
    state, _ = step(state, ROW)
    state, _ = step(state, ROW)
    with pytest.raises(
        sf.errors.ConfigError, match="on_step_end: expected the metrics of the first step"
    ):
        step.raise_pending()


# Evaluation


def measure(state, batch):
    return {"loss": sf.mean(batch * state)}


BATCHES = [np.ones(3, np.float32), 3 * np.ones(1, np.float32)]


def test_metrics_of_a_function_of_state_and_batch_are_merged_as_those_of_the_step():
    mean = lambda state, batch: {"mean": jnp.mean(batch)}
    assert evaluate_with(measure, 2.0, BATCHES, mean) == {"eval_loss": 3.0, "eval_mean": 1.5}


def test_a_function_of_the_numbers_adds_some():
    half = lambda numbers: {"half": numbers["eval_loss"] / 2}
    assert evaluate_with(measure, 2.0, BATCHES, half) == {"eval_loss": 3.0, "half": 1.5}
    with pytest.raises(
        sf.errors.ConfigError, match="metric_calculator: expected it to return numbers by"
    ):
        evaluate_with(measure, 2.0, BATCHES, lambda numbers: None)
    with pytest.raises(
        sf.errors.ConfigError, match=r"expected a function \(state, batch\) -> metrics"
    ):
        evaluate_with(measure, 2.0, BATCHES, 3)
