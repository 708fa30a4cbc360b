import jax.numpy as jnp
import pytest

import stepfold as sf
from stepfold.loop.hooks.base import Stop
from stepfold.loop.metrics import Curve, History
from stepfold.loop.result import FitResult


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


def test_a_result_and_what_is_in_it_have_a_short_repr():
    history = History()
    for step in range(100):
        history.add(step, {f"train/{name}": step for name in "abcdefgh"})
    state = {f"w{i}": jnp.ones((100, 100)) for i in range(50)}
    result = FitResult(state, 99, history, Stop("completed", "all 99 steps were done"), None, None)
    assert len(repr(result)) < 300
    assert "all 99 steps were done" in repr(result)
    event = sf.Event(10, 20, {"train/loss": 0.5}, state, batch=state)
    assert len(repr(event)) < 200


@pytest.mark.parametrize("kind", ["completed", "hook"])
def test_a_stop_has_a_kind_and_its_text_is_the_message(kind):
    stop = Stop(kind, "why")
    assert (stop.kind, stop.message, str(stop), f"{stop}") == (kind, "why", "why", "why")
