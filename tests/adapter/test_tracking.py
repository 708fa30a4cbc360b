import time

import jax
import jax.numpy as jnp
import pytest

from stepfold.adapter.tracking import CompilationTracker, Timers


def test_a_function_is_counted_when_it_is_traced():
    tracker = CompilationTracker()
    step = jax.jit(tracker.tracked(lambda x: x + 1))
    for _ in range(3):
        step(jnp.ones(2))
    assert tracker.compilations == 1


def test_seconds_add_up_and_are_known_while_they_run():
    timer = Timers()
    for _ in range(2):
        with timer("wait"):
            time.sleep(0.01)
            assert timer.running("wait") >= 0.01
    assert timer.seconds["wait"] >= 0.02
    assert timer.running("wait") == 0.0


def test_what_fails_is_timed_too():
    timer = Timers()
    with pytest.raises(OSError, match="cut"), timer("wait"):
        raise OSError("cut")
    assert timer.seconds["wait"] > 0
