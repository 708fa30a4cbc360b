import jax.numpy as jnp
import pytest

import stepfold as sf
from stepfold.loop.hooks.base import Stop
from stepfold.loop.metrics import History
from stepfold.loop.result import FitResult


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
